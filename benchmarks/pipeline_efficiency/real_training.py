"""A model that a swarm of real nodes trains, beside what a plain loop makes of as many tokens and of as much time.

    python -m benchmarks.pipeline_efficiency.real_training OUT [--tokens 4_000_000] [--replicas 2]
    python -m benchmarks.pipeline_efficiency.real_training OUT --rate 2e-3 --loop-rate 1e-3      # nothing is chosen

Each replica of the swarm is a `noloco-node join` with the whole model, one torch thread and its own daemon; its inner
optimiser has 8-bit state. The loop is plain PyTorch with fused AdamW in float32 and one thread. One loop takes as many
tokens as all replicas together. Another ends after as much processor time as one replica used with its daemon: other
work on the machine does not change the comparison. Both sides have the same text, windows, warm-up and cosine. The
learning rate of each side is chosen from --rates by held-out loss after a share of the tokens, with another seed than
the one shown.

OUT gets the three models, samples.txt, training.png and summary.json. The losses shown are over all text that the run
holds out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.pipeline_efficiency.libp2p_overhead import BareLoop, cpu_seconds, run_text, started
from noloco_node.charts import COLOURS, INK, QUIET, Labelled, dress, new_figure, png, write_labels
from noloco_node.data.held_out_text import text_loss, validation_text
from noloco_node.data.token_text import Sampling
from noloco_node.demo.child_processes import ONE_THREAD, Children
from noloco_node.export.held_out_loss import logits_of
from noloco_node.inference.generation import continuation
from noloco_node.journal import events, reader
from noloco_node.observe.peer_history import Point
from noloco_node.observe.screen import smoothed
from noloco_node.run.runfile import load_run
from pipeline.inner_step import learning_rate

PROMPTS = ("def __init__(self, ", "import os\n", '    """Return the ')
SAMPLED = 64
"""Batches of held-out text by which a learning rate is chosen."""
LOOK_S = 1.0


class Curve(NamedTuple):
    """The training loss of one process over its processor seconds [s], and what it used in all."""

    points: list[Point]
    cpu_s: float
    wall_s: float
    tokens: int


async def trained(run_file: Path, homes: list[Path]) -> tuple[list[float], float]:
    """Train a swarm to the end of its run; return the processor seconds of each replica, and seconds.

    A node that has ended its run goes on serving its weights, so it is interrupted then. Its start does not count.
    """
    children, begun_s = Children(), time.perf_counter()
    before, used = dict[Path, float](), dict[Path, float]()
    try:
        nodes = await started(children, run_file, homes[0].parent, 1, len(homes))
        while len(used) < len(homes):
            await asyncio.sleep(LOOK_S)
            for home, node in zip(homes, nodes, strict=True):
                if node.exit_code is not None:
                    raise node.trouble("it ended before its run")
                spent = sum(cpu_seconds([node.pid]).values())
                for event in _journal(home) if home not in used else ():
                    if isinstance(event, events.Started):
                        before.setdefault(home, spent)
                    if isinstance(event, events.Finished):
                        used[home] = spent - before[home]
    finally:
        await children.stop()
    return [used[home] for home in homes], time.perf_counter() - begun_s


def _journal(home: Path) -> list[events.Event]:
    path = home / "journal.jsonl"
    return list(reader.read(path)) if path.exists() else []


def swarm(run_file: Path, directory: Path, replicas: int, out: Path) -> list[Curve]:
    """Train a swarm, and export the mean of its replicas; return the curve of each."""
    homes = [directory / f"0-{number}" for number in range(replicas)]
    used, wall_s = asyncio.run(trained(run_file, homes))
    merged = [option for home in homes for option in ("--from-home", str(home))]
    subprocess.run([sys.executable, "-m", "noloco_node", "export", *merged, "--out", str(out)], check=True)
    curves = []
    for home, cpu_s in zip(homes, used, strict=True):
        steps = [event for event in _journal(home) if isinstance(event, events.InnerStep)]
        points = [Point(step.progress * cpu_s, step.loss) for step in steps if step.loss is not None]
        curves.append(Curve(points, cpu_s, wall_s, sum(step.tokens for step in steps)))
    return curves


def loop(run_file: Path, tokens: int, cpu_s: float, out: Path) -> None:
    """Train a bare loop for so many tokens, or so many processor seconds where `tokens` is 0; write model and curve."""
    disable_progress_bar()
    torch.set_num_threads(1)
    run = load_run(run_file)
    bare = BareLoop(run)
    points, done = list[Point](), 0
    begun, begun_s = time.process_time(), time.perf_counter()
    while (progress := done / tokens if tokens else (time.process_time() - begun) / cpu_s) < 1.0:
        loss = bare.step(learning_rate(progress, run.inner))
        done += bare.step_tokens
        points.append(Point(time.process_time() - begun, loss))
    curve = Curve(points, time.process_time() - begun, time.perf_counter() - begun_s, done)
    bare.model.save_pretrained(out)
    (out / "curve.json").write_text(json.dumps(curve))


def start_loop(run_file: Path, out: Path, tokens: int = 0, cpu_s: float = 0.0) -> subprocess.Popen[bytes]:
    """Start `loop` in a process of its own."""
    given = ("--loop", str(run_file), "--tokens", str(tokens), "--cpu-seconds", str(cpu_s))
    return subprocess.Popen([sys.executable, "-m", __spec__.name, str(out), *given], env=os.environ | ONE_THREAD)


def curve_of(process: subprocess.Popen[bytes], out: Path) -> Curve:
    """Wait for a loop and return its curve."""
    if process.wait() != 0:
        raise SystemExit(f"the loop that writes {out} failed: it ended with {process.returncode}")
    points, *rest = json.loads((out / "curve.json").read_text())
    return Curve([Point(*point) for point in points], *rest)


def held_out(run_file: Path, model: Path, batches: int | None) -> tuple[float, float | None, int]:
    """Return nats a token on the text that the run holds out, the margin over documents, and the tokens."""
    run = load_run(run_file)
    text = validation_text(run.data, run.pipeline.sequence_length, run.seed, batches)
    loss = text_loss(logits_of(AutoModelForCausalLM.from_pretrained(model).eval()), text)
    return loss.mean, loss.margin, loss.tokens


def samples(model: Path) -> str:
    """Return what a model of bytes goes on with after each prompt."""
    found, loaded = [], AutoModelForCausalLM.from_pretrained(model).eval()
    for prompt in PROMPTS:
        tokens = continuation(loaded, [byte + 3 for byte in prompt.encode()], Sampling(tokens=240), {1})
        more = bytes(token - 3 for token in tokens if 3 <= token < 259).decode(errors="replace")
        found.append(f"--- {prompt!r}\n{prompt}{more}\n")
    return f"===== {model.name}\n" + "\n".join(found)


def write_run(arguments: argparse.Namespace, path: Path, rate: float, tokens: int, seed: int) -> Path:
    """Write a run whose replicas take so many tokens together; `rate`: the peak of the learning rate."""
    steps = max(2, tokens // (arguments.replicas * arguments.window * arguments.batch * arguments.sequence))
    path.write_text(f"seed = {seed}\n" + run_text(arguments, 1, steps, max(1, steps // 20), rate))
    return path


def chosen_rates(arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the learning rates of swarm and loop whose held-out loss is least after a share of the tokens."""
    directory, tokens, seed = arguments.out / "choice", round(arguments.share * arguments.tokens), arguments.seed + 1
    directory.mkdir()
    of_swarm, of_loop = dict[float, float](), dict[float, float]()
    for rate in arguments.rates:
        run_file = write_run(arguments, directory / f"{rate:g}.toml", rate, tokens, seed)
        out = {name: directory / f"{name}-{rate:g}" for name in ("swarm", "loop")}
        swarm(run_file, directory / f"homes-{rate:g}", arguments.replicas, out["swarm"])
        curve_of(start_loop(run_file, out["loop"], tokens), out["loop"])
        of_swarm[rate], of_loop[rate] = (held_out(run_file, out[name], SAMPLED)[0] for name in ("swarm", "loop"))
        print(f"rate {rate:g}, {tokens:,} tokens: swarm {of_swarm[rate]:.4f}, loop {of_loop[rate]:.4f}", flush=True)
    shutil.rmtree(directory)
    return min(of_swarm, key=lambda rate: of_swarm[rate]), min(of_loop, key=lambda rate: of_loop[rate])


def picture(curves: Mapping[str, list[Curve]], losses: Mapping[str, float], heading: str) -> bytes:
    """Return the training losses over the processor minutes of one machine as a PNG."""
    figure = new_figure(10, 5)
    panel = figure.subplots()
    figure.subplots_adjust(left=0.075, right=0.74, top=0.86, bottom=0.12)
    figure.text(0.075, 0.92, heading, fontsize=13, fontweight="bold", color=INK)
    labels, lowest = [], min(losses.values())
    for (name, drawn), colour in zip(curves.items(), COLOURS, strict=False):
        for curve in drawn:
            points = smoothed([Point(point.x / 60.0, point.value) for point in curve.points])
            panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.4)
            lowest = min(lowest, *(point.value for point in points))
        labels.append(Labelled(losses[name], f"{name}: {losses[name]:.3f} held out", colour))
        panel.axhline(losses[name], color=colour, linewidth=0.8, linestyle=":")
    dress(panel)
    panel.set_ylim(lowest - 0.1, lowest + 1.8)
    panel.set_xlim(left=0)
    panel.set_xlabel("processor minutes of one machine", color=QUIET)
    panel.set_ylabel("training loss, nats a byte", color=QUIET)
    write_labels(panel, labels)
    return png(figure)


def compare(arguments: argparse.Namespace) -> None:
    """Train all three, and write what they became."""
    disable_progress_bar()
    out: Path = arguments.out
    out.mkdir(parents=True)
    rate, loop_rate = arguments.rate, arguments.loop_rate
    if rate is None or loop_rate is None:
        chosen = chosen_rates(arguments)
        rate, loop_rate = chosen[0] if rate is None else rate, chosen[1] if loop_rate is None else loop_rate
    run_file = write_run(arguments, out / "run.toml", rate, arguments.tokens, arguments.seed)
    loop_file = write_run(arguments, out / "loop.toml", loop_rate, arguments.tokens, arguments.seed)
    replicas = swarm(run_file, out / "homes", arguments.replicas, out / "swarm")
    tokens, cpu_s = sum(curve.tokens for curve in replicas), sum(curve.cpu_s for curve in replicas) / len(replicas)
    loops = {"as many tokens": out / "loop-tokens", "as much time": out / "loop-time"}
    processes = {
        "as many tokens": start_loop(loop_file, loops["as many tokens"], tokens=tokens),
        "as much time": start_loop(loop_file, loops["as much time"], cpu_s=cpu_s),
    }
    name = f"swarm of {len(replicas)}"
    try:
        curves = {name: replicas} | {each: [curve_of(processes[each], path)] for each, path in loops.items()}
    finally:
        for process in processes.values():
            process.kill()
    models = {name: out / "swarm", **loops}
    rows, losses = [], dict[str, float]()
    for each, model in models.items():
        losses[each], margin, of = held_out(run_file, model, None)
        used = [round(curve.cpu_s) for curve in curves[each]]
        total = sum(curve.tokens for curve in curves[each])
        rows.append(
            {"arm": each, "held_out": losses[each], "margin": margin, "of_tokens": of, "tokens": total, "cpu_s": used}
            | {"wall_s": round(curves[each][0].wall_s), "rate": rate if each == name else loop_rate}
        )
        interval = "" if margin is None else f" ± {margin:.3f}"
        print(
            f"{each}: {losses[each]:.4f}{interval} nats a byte on {of:,} held-out tokens, after {total:,} tokens, "
            f"processor seconds {used}, {rows[-1]['wall_s']:,} s; learning rate {rows[-1]['rate']:g}",
            flush=True,
        )
    parameters = AutoModelForCausalLM.from_pretrained(out / "swarm").num_parameters()
    host = f"{platform.machine()}, {psutil.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{parameters:,} parameters; {host}; load {os.getloadavg()[2]:.1f}")
    (out / "samples.txt").write_text("\n".join(map(samples, models.values())))
    (out / "training.png").write_bytes(picture(curves, losses, f"{parameters / 1e6:.1f}M parameters, real nodes"))
    (out / "summary.json").write_text(json.dumps({"parameters": parameters, "host": host, "arms": rows}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new directory")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of all replicas together")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rate", type=float, help="learning rate of the swarm")
    parser.add_argument("--loop-rate", type=float, help="learning rate of the loops")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3], help="to choose from")
    parser.add_argument("--share", type=float, default=0.1, help="of the tokens, for the choice")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=2, help="microbatches of an inner step")
    parser.add_argument("--gossip-every", type=int, default=10, help="inner steps between two rounds")
    parser.add_argument("--state", choices=("float32", "int8"), default="int8", help="of the swarm's inner optimiser")
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cpu-seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.loop:
        loop(arguments.loop, arguments.tokens, arguments.cpu_seconds, arguments.out)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
