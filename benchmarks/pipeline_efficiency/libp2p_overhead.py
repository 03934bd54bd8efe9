"""What a swarm over libp2p costs: two stages, or whole replicas, against one process that trains the same model.

    python -m benchmarks.pipeline_efficiency.libp2p_overhead [--rounds 5] [--seconds 40] [--windows-in-flight 2]
    python -m benchmarks.pipeline_efficiency.libp2p_overhead --stages 1 --replicas 3 --window 4 --gossip-every 5

Each round measures both on the same cores, one after the other, so that a noisy machine disturbs them alike; the
ratio is taken within a round. The swarm is the real thing: a bootstrap peer and a `noloco-node join` process for each
replica with one torch thread, real daemons, real data, rounds. The single process is a plain training loop with two
torch threads. Where a swarm has more processes than cores the ratio by processor time tells more.

Where the swarm's time goes is read from the kernel's CPU clocks: the device threads compute, the main threads of the
peers serialise and route, the daemons move bytes; what is left of the cores' time is waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import psutil

from gossip.interface import OuterStepTaken
from noloco_node.data.blocks import run_blocks
from noloco_node.demo.child_processes import Child, Children, tied_command
from noloco_node.journal import events, reader
from noloco_node.planning.model_layout import model_layout
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import load_run
from noloco_node.swarm.invite import SCHEME

CORES = 2
"""That either side may use."""
RUN = """
name = "overhead"
[model]
architecture = "llama"
[model.sizes]
vocab_size = 384
hidden_size = {width}
intermediate_size = {inner}
num_hidden_layers = {layers}
num_attention_heads = 6
max_position_embeddings = {sequence}
[pipeline]
stages = {stages}
replicas = {replicas}
sequence_length = {sequence}
microbatch_size = {batch}
microbatches_per_step = {window}
windows_in_flight = {windows}
[inner]
steps = {steps}
warmup_steps = {warmup}
learning_rate = {rate}
state = "{state}"
[outer]
inner_steps_per_round = {gossip_every}
overlap_steps = {overlap}
"""


def run_text(
    arguments: argparse.Namespace, stages: int, steps: int = 100_000, warmup: int = 10, rate: float = 6e-4
) -> str:
    """Return the run file of a benchmark."""
    return RUN.format(
        width=arguments.width,
        inner=8 * arguments.width // 3,
        layers=arguments.layers,
        sequence=arguments.sequence,
        batch=arguments.batch,
        window=arguments.window,
        windows=arguments.windows_in_flight if stages > 1 else 1,
        stages=stages,
        replicas=arguments.replicas,
        state=arguments.state,
        steps=steps,
        warmup=warmup,
        rate=rate,
        gossip_every=arguments.gossip_every,
        overlap=min(8, arguments.gossip_every - 1),
    )


class BareLoop:
    """The whole model of a run in this process, trained plainly: fused AdamW in float32, text mixed as for nodes."""

    def __init__(self, run: RunConfig) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        inner = run.inner
        torch.manual_seed(run.seed)
        self._run = run
        self.model = AutoModelForCausalLM.from_config(model_layout(run).prepared.config).train()
        self._optimiser = torch.optim.AdamW(
            self.model.parameters(),
            betas=(inner.beta1, inner.beta2),
            eps=inner.epsilon,
            weight_decay=inner.weight_decay,
            fused=True,
        )
        self._blocks = run_blocks(run, None, "single", self.model.config.vocab_size)
        self.step_tokens = run.samples_per_step * run.pipeline.sequence_length

    def step(self, rate: float) -> float:
        """Take one step of this learning rate; return the loss of its window."""
        import torch

        run, total = self._run, 0.0
        for _ in range(run.pipeline.microbatches_per_step):
            tokens = self._blocks.next_batch(run.pipeline.microbatch_size)
            logits = self.model(tokens[:, :-1], use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            torch.autograd.backward(loss / run.pipeline.microbatches_per_step)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), run.inner.clip_norm)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._optimiser.zero_grad()
        return total / run.pipeline.microbatches_per_step


def single(run_file: Path, seconds: float, threads: int) -> None:
    """Train the whole model in this process; print tokens a second and the number of parameters as JSON."""
    import torch

    torch.set_num_threads(threads)
    loop = BareLoop(load_run(run_file))
    loop.step(1e-4)
    begun, cpu, tokens = time.perf_counter(), time.process_time(), 0
    while (elapsed := time.perf_counter() - begun) < seconds or tokens == 0:
        loop.step(1e-4)
        tokens += loop.step_tokens
    parameters = sum(weight.numel() for weight in loop.model.parameters())
    per_cpu_s = tokens / (time.process_time() - cpu)
    print(json.dumps({"tokens_per_s": tokens / elapsed, "tokens_per_cpu_s": per_cpu_s, "parameters": parameters}))


async def started(children: Children, run_file: Path, home: Path, stages: int, replicas: int) -> list[Child]:
    """Start a bootstrap peer and a node for each replica, with its home in HOME/STAGE-REPLICA; return the nodes."""
    anywhere = ("--listen", "/ip4/127.0.0.1/tcp/0")
    command = ("bootstrap", "--run", str(run_file), *anywhere, "--home", str(home / "bootstrap"))
    bootstrap = children.start("bootstrap", tied_command("noloco_node", *command), home / "bootstrap")
    invite = await bootstrap.line(SCHEME, 120)
    nodes = []
    for stage, replica in product(range(stages), range(replicas)):
        where = home / f"{stage}-{replica}"
        options = ("--stage", str(stage), "--home", str(where), "--device", "cpu", "--threads", "1", *anywhere)
        nodes.append(children.start(where.name, tied_command("noloco_node", "join", invite, *options), where))
    return nodes


async def swarm(run_file: Path, home: Path, seconds: float, stages: int, replicas: int) -> dict[str, float]:
    """Train with a swarm; return tokens a second, rounds met, and where the cores' time went."""
    children = Children()
    try:
        pids = [node.pid for node in await started(children, run_file, home, stages, replicas)]
        sources = [home / f"0-{replica}" / "journal.jsonl" for replica in range(replicas)]
        tails = [reader.Tail(path) for path in sources]
        first = await asyncio.gather(*(_steps(tail, 1, 240.0) for tail in tails))
        before, begun = cpu_seconds(pids), time.perf_counter()
        more = await asyncio.gather(*(_steps(tail, 1, 300.0, at_least_s=seconds) for tail in tails))
        after, elapsed = cpu_seconds(pids), time.perf_counter() - begun
        used = {name: (after[name] - before[name]) / elapsed for name in before}
        each = [[*some[-1:], *rest] for some, rest in zip(first, more, strict=True)]
        speed = sum(sum(step.tokens for step in steps[1:]) / (steps[-1].at - steps[0].at) for steps in each)
        met = sum(
            1 for path in sources for event in reader.read(path) if isinstance(event, OuterStepTaken) and event.partner
        )
        return {"tokens_per_s": speed, "tokens_per_cpu_s": speed / sum(used.values()), "meetings": met / 2, **used}
    finally:
        await children.stop()


async def _steps(tail: reader.Tail, count: int, patience_s: float, at_least_s: float = 0.0) -> list[events.InnerStep]:
    """Collect inner steps until there are `count` and `at_least_s` seconds have passed; end with a step."""
    found: list[events.InnerStep] = []
    begun = time.perf_counter()
    async with asyncio.timeout(patience_s + at_least_s):
        while True:
            new = [event for event in tail.poll() if isinstance(event, events.InnerStep)]
            found += new
            if new and len(found) >= count and time.perf_counter() - begun >= at_least_s:
                return found
            await asyncio.sleep(0.02)


def cpu_seconds(pids: list[int]) -> dict[str, float]:
    """Return CPU seconds so far by what they are for: arithmetic, the peers' event loops, the libp2p daemons."""
    spent = {"compute": 0.0, "event loops": 0.0, "daemons": 0.0}
    for pid in pids:
        process = psutil.Process(pid)
        for thread in process.threads():
            kind = "event loops" if thread.id == pid else "compute"
            spent[kind] += thread.user_time + thread.system_time
        for daemon in process.children(recursive=True):
            times = daemon.cpu_times()
            spent["daemons"] += times.user + times.system
    return spent


def _alone(run_file: Path, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name, "--single", str(run_file), "--seconds", str(seconds)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def _in_words(row: dict[str, float]) -> str:
    kinds = ("compute", "event loops", "daemons")
    spent = ", ".join(f"{kind} {row[kind]:.2f}" for kind in kinds)
    idle = CORES - sum(row[kind] for kind in kinds)
    return (
        f"single process {row['single']:,.0f} tokens/s, swarm {row['tokens_per_s']:,.0f}, "
        f"ratio {row['tokens_per_s'] / row['single']:.3f}, by processor time "
        f"{row['tokens_per_cpu_s'] / row['single_per_cpu_s']:.3f}; {row['meetings']:.0f} meetings; "
        f"of {CORES} cores: {spent}, waiting {idle:.2f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--windows-in-flight", type=int, choices=(1, 2), default=1)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="of each stage")
    parser.add_argument("--state", choices=("float32", "int8"), default="float32", help="of the inner optimiser")
    parser.add_argument("--gossip-every", type=int, default=10, help="inner steps between two rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--single", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.single:
        single(arguments.single, arguments.seconds, CORES)
        return
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "whole.toml").write_text(run_text(arguments, 1))
        (home / "swarm.toml").write_text(run_text(arguments, arguments.stages))
        shape = f"{arguments.window} microbatches of {arguments.batch} x {arguments.sequence} tokens a window"
        shape += f", {arguments.windows_in_flight} in flight"
        host = f"{platform.machine()}, {psutil.cpu_count()} cores, Python {platform.python_version()}"
        print(f"{host}; width {arguments.width}, {arguments.layers} layers, {shape}")
        for number in range(arguments.rounds):
            alone = _alone(home / "whole.toml", arguments.seconds)
            if not rows:
                print(f"{alone['parameters']:,} parameters")
            where, (stages, replicas) = home / f"round-{number}", (arguments.stages, arguments.replicas)
            together = asyncio.run(swarm(home / "swarm.toml", where, arguments.seconds, stages, replicas))
            rows.append({"single": alone["tokens_per_s"], "single_per_cpu_s": alone["tokens_per_cpu_s"], **together})
            print(f"round {number + 1}: {_in_words(rows[-1])}", flush=True)
    ways = {
        "ratio": [row["tokens_per_s"] / row["single"] for row in rows],
        "by processor time": [row["tokens_per_cpu_s"] / row["single_per_cpu_s"] for row in rows],
    }
    for name, ratios in ways.items():
        median = statistics.median(ratios)
        print(f"{name}: median {median:.3f}, from {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} rounds")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
