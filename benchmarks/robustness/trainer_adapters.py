"""Adapters on conversations: a Trainer with `GossipOptimizer` against the command line, three peers each, one killed.

    OMP_NUM_THREADS=1 python -m benchmarks.robustness.trainer_adapters OUT --repeats 5

Over one small model, which is trained on Python's own library first, both train adapters of the same rank on the same
rows, with the same batch, rate, rounds and budget of steps: once by examples/train_with_trainer.py, once by
`noloco-node join` of a run of `noloco-node init --from DIR --lora RANK`. Real daemons; of three peers one is killed
(SIGKILL) after a third of its steps, and the others take its part of the budget. The benchmark compares the mean of the
two adapters that are left, by its loss on rows that no peer has read. Orders of rows and first adapters are drawn
anew in each repeat. OUT keeps the model and a line of JSON for each run; a second call goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import runpy
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import psutil
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import noloco_node
from noloco_node.cli.main import app
from noloco_node.export.continue_run import continuing_text
from noloco_node.journal.events import Event, InnerStep
from noloco_node.journal.reader import read
from noloco_node.swarm.invite import SCHEME
from pipeline.adapters.settings import AdapterConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_trainer.py"
LOCAL = "/ip4/127.0.0.1/tcp/0"
PEERS, EVERY, RANK, RATE = 3, 10, 8, 3e-3
WITHIN_S = 3600.0
FORK = multiprocessing.get_context("fork")
"""What begins here has the libraries loaded."""


class Forked:
    """A process of its own that does some work and writes to `out`."""

    def __init__(self, work: Callable[[], object], out: Path) -> None:
        def begin() -> None:
            os.setsid()
            with out.open("w") as file:
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
            work()

        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
        self.out, self._process = out, FORK.Process(target=begin)
        self._process.start()

    def check(self) -> None:
        """Raise RuntimeError with its last words if it has failed."""
        if self._process.exitcode:
            raise RuntimeError(f"exit code {self._process.exitcode}:\n{self.out.read_text()[-2000:]}")

    def wait(self) -> None:
        """Wait until it has ended; raise RuntimeError if it failed, or did not end."""
        self._process.join(WITHIN_S)
        self.check()
        if self._process.exitcode is None:
            raise RuntimeError(f"no end within {WITHIN_S:g} s")

    def kill(self) -> None:
        """Kill it, and what belongs to it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid)
            for each in [*family.children(recursive=True), family]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.join()


def until(condition: Callable[[], object], processes: Iterable[Forked]) -> None:
    """Wait for a condition; raise RuntimeError where one of the processes fails before."""
    limit_s = time.monotonic() + WITHIN_S
    while not condition():
        for each in processes:
            each.check()
        if time.monotonic() > limit_s:
            raise RuntimeError(f"it did not come within {WITHIN_S:g} s")
        time.sleep(0.1)


def events(home: Path, kind: type[Event]) -> list[Event]:
    """Return what a home's journal has of a kind."""
    path = home / "journal.jsonl"
    return [event for event in read(path) if isinstance(event, kind)] if path.exists() else []


# The model, and the rows.


def write_model(example: dict[str, Any], out: Path, steps: int) -> None:
    """Train a small model on Python's own library, and write it with its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=384, max_position_embeddings=example["LENGTH"], **sizes))
    library = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in library)), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - example["LENGTH"], (8,))
        ids = torch.stack([text[start : start + example["LENGTH"]] for start in starts]).long() + 3
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    example["base"](None)[1].save_pretrained(out)


def write_rows(example: dict[str, Any], out: Path) -> None:
    """Write the conversations, one in five held out."""
    rows = example["questions"]()
    random.Random(0).shuffle(rows)
    held_out = len(rows) // 5
    for name, part in (("held-out", rows[:held_out]), ("rows", rows[held_out:])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in part))


@torch.no_grad()
def held_out_loss(example: dict[str, Any], model: Any, tokenizer: Any, out: Path) -> float:
    """Return the mean loss of a learnt token, in nats, over the rows that were held out."""
    model.eval()
    total, count = 0.0, 0
    for row in example["rows"](tokenizer, out / "held-out.jsonl"):
        ids, labels = (torch.tensor(row[name]) for name in ("input_ids", "labels"))
        losses = functional.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], labels[1:], reduction="sum")
        total, count = total + losses.item(), count + int((labels[1:] >= 0).sum())
    return total / count


# The two swarms.


def trainer_run(example: dict[str, Any], out: Path, directory: Path, steps: int, seed: int) -> None:
    """Write the run file of the example's Trainers."""
    torch.manual_seed(seed)
    model = example["with_adapters"](example["base"](str(out / "model"))[0])
    sizes = {"steps": steps, "batch": example["BATCH"], "sequence_length": example["LENGTH"]}
    noloco_node.init(directory / "run.toml", model, **sizes, replicas=PEERS, every=EVERY)


def nodes_run(example: dict[str, Any], out: Path, directory: Path, steps: int, seed: int) -> None:
    """Write the run file of nodes, as `noloco-node init --from DIR --lora RANK` does, with the Trainer's numbers."""
    adapter = AdapterConfig(rank=RANK, alpha=2.0 * RANK, base="float32")
    table = tomllib.loads(continuing_text(out / "model", "tiny", adapter))
    rows = {"source": "json", "path": str(out / "rows.jsonl"), "form": "messages", "packed": False}
    tokenizer = {name: table["data"][name] for name in ("tokenizer", "tokenizer_files")}
    noloco_node.init(
        directory / "run.toml",
        table["model"],
        steps=steps,
        batch=example["BATCH"],
        sequence_length=example["LENGTH"],
        replicas=PEERS,
        every=EVERY,
        seed=seed,
        sections={
            "pipeline": {"stages": 1, "microbatches_per_step": 1},
            "inner": {"learning_rate": RATE, "warmup_steps": 0, "final_fraction": 1.0},
            "adapter": table["adapter"],
            "data": {**rows, **tokenizer, "validation_percent": 0},
        },
    )


def train(example: dict[str, Any], form: str, out: Path, directory: Path, steps: int, seed: int) -> list[Path]:
    """Train to the end of the budget with one peer killed; return the homes of those that are left."""
    write = {"trainer": trainer_run, "nodes": nodes_run}[form]
    Forked(lambda: write(example, out, directory, steps, seed), directory / "written").wait()
    weights = directory if form == "trainer" else out / "model"
    options = ["--run", str(directory / "run.toml"), "--weights", str(weights), "--home", str(directory / "host")]
    host = Forked(lambda: app(["bootstrap", *options, "--listen", LOCAL]), directory / "invite")
    processes = [host]
    try:
        until(lambda: SCHEME in host.out.read_text(), processes)
        invite = next(line for line in host.out.read_text().splitlines() if line.startswith(SCHEME))
        own = ["--device", "cpu", "--threads", "1", "--listen", LOCAL, "--linger", "0"]

        def member(home: Path) -> None:
            if form == "nodes":
                app(["join", invite, *own, "--data", str(out / "rows.jsonl"), "--home", str(home)])
            else:
                base = ["--base", str(out / "model"), "--rows", str(out / "rows.jsonl"), "--rate", str(RATE)]
                sys.argv = [str(EXAMPLE), "--swarm", invite, "--home", str(home), *base]
                example["main"]()

        homes = [directory / f"peer{number}" for number in range(PEERS)]
        members = [Forked(partial(member, home), directory / f"{home.name}.log") for home in homes]
        processes += members
        until(lambda: len(events(homes[-1], InnerStep)) >= steps // 3, processes)
        *left, victim = members
        victim.kill()
        for each in left:
            each.wait()
        return homes[:-1]
    finally:
        for each in processes:
            each.kill()


def trained_loss(example: dict[str, Any], form: str, out: Path, directory: Path, homes: list[Path]) -> float:
    """Return the held-out loss of the mean of these homes' adapters."""
    from peft import PeftModel
    from safetensors.torch import load_file

    noloco_node.export(None, directory / "export", homes=homes)
    model, tokenizer = example["base"](str(out / "model"))
    if form == "nodes":
        model = PeftModel.from_pretrained(model, directory / "export")
    else:
        model = example["with_adapters"](model)
        model.load_state_dict(load_file(directory / "export" / "model.safetensors"), strict=False)
    return held_out_loss(example, model, tokenizer, out)


def write_result(example: dict[str, Any], form: str, out: Path, steps: int, repeat: int) -> None:
    """Train once, and add a line of JSON with the loss."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        directory = Path(place)
        homes = train(example, form, out, directory, steps, repeat)
        taken = [len(events(home, InnerStep)) for home in [*homes, directory / f"peer{PEERS - 1}"]]

        def judge() -> None:
            loss = trained_loss(example, form, out, directory, homes)
            with (out / "runs.jsonl").open("a") as file:
                found = {"form": form, "repeat": repeat, "steps": steps, "taken": taken, "loss": loss}
                file.write(json.dumps(found) + "\n")

        Forked(judge, directory / "judge.log").wait()


def main() -> None:
    """Run what is missing, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--begin", type=int, default=0, metavar="N", help="with repeat N; others run beside")
    parser.add_argument("--steps", type=int, default=60, help="of each of three peers")
    parser.add_argument("--model-steps", type=int, default=400, help="on Python's own library, before")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    example = runpy.run_path(str(EXAMPLE))
    if not (out / "model" / "tokenizer_config.json").exists():
        Forked(lambda: write_model(example, out / "model", args.model_steps), out / "model.log").wait()
        write_rows(example, out)
    path = out / "runs.jsonl"
    path.touch()

    def found() -> list[dict[str, Any]]:
        return [run for line in path.read_text().splitlines() if (run := json.loads(line))["steps"] == args.steps]

    for repeat in range(args.begin, args.repeats):
        for form in ("trainer", "nodes"):
            if not any((run["form"], run["repeat"]) == (form, repeat) for run in found()):
                write_result(example, form, out, args.steps, repeat)
                print(found()[-1], flush=True)
    model, tokenizer = example["base"](str(out / "model"))
    print(f"held-out loss, nats a token: {held_out_loss(example, model, tokenizer, out):.4f} without adapters")
    for form in ("trainer", "nodes"):
        losses = [run["loss"] for run in found() if run["form"] == form][: args.repeats]
        spread = f" ± {stdev(losses):.4f} between repeats" if len(losses) > 1 else ""
        print(f"{form:<8} {mean(losses):.4f}{spread}, {min(losses):.4f} to {max(losses):.4f}")


if __name__ == "__main__":
    main()
