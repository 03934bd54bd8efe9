"""How long a newcomer takes from its first request to its first useful microbatch, against what the bytes alone need.

    python -m benchmarks.robustness.late_join  10M and 100M parameters over 100 Mbit/s
    python -m benchmarks.robustness.late_join --millions 1 --rate 20mbit
    python -m benchmarks.robustness.late_join --millions 10 --later  a newcomer of the second of two stages
    python -m benchmarks.robustness.late_join --kills 50  a newcomer killed while it copies (kill_catch_up.py)

Real processes, real libp2p daemons: a bootstrap peer, one replica that trains a model of one stage and has
`--max-upload`, and a newcomer. Where there is one stage a replica sends nothing but its state until it has somebody to
meet, so its budget is the newcomer's line. With `--later` that replica holds the second stage, whose gradients are a
few kilobytes, behind a source that looks at the roster every ten seconds, as nodes do by default.
The clock runs from the newcomer's first request (before the donor freezes and hashes its copy) until a microbatch has
gone forward and backward through the newcomer and its inner step is taken. The bytes are those of the pieces; the time
that they need alone is bytes / rate. Starting the process, loading torch and building the model are told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.robustness.kill_download import run_kills
from noloco_node.demo.child_processes import Child, Children, tied_command
from noloco_node.demo.swarm_processes import ANYWHERE, READY_S
from noloco_node.journal.events import CatchUp, Event, InnerStep, StateChanged
from noloco_node.journal.reader import read
from noloco_node.limits.budget import read_rate
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.invite import SCHEME

WITHIN_S = 1800.0
WITHIN_TIMES = 1.5
"""The goal: so many times what the bytes alone need."""


class Size(NamedTuple):
    """A model of about `millions` of parameters."""

    millions: float
    hidden: int
    intermediate: int
    layers: int


SIZES = {
    1: Size(1, 128, 352, 5),
    10: Size(10, 320, 864, 8),
    100: Size(100, 768, 2048, 14),
}


class Joined(NamedTuple):
    """One newcomer's times, in seconds, and its bytes. `parameters`: of the stage. `alone_s`: bytes / rate."""

    parameters: int
    size_bytes: int
    start_s: float
    copy_s: float
    useful_s: float
    alone_s: float
    donor_step_s: tuple[float, float]

    @property
    def times(self) -> float:
        """How often the time of the bytes alone."""
        return self.useful_s / self.alone_s


def run_text(size: Size, stages: int) -> str:
    """Return the run file: each stage of that size, and so few tokens that arithmetic matters little."""
    return f"""
name = "late"
seed = 5
[model]
architecture = "llama"
[model.sizes]
vocab_size = 384
hidden_size = {size.hidden}
intermediate_size = {size.intermediate}
num_hidden_layers = {stages * size.layers}
num_attention_heads = 4
max_position_embeddings = 32
[pipeline]
stages = {stages}
replicas = 2
sequence_length = 16
microbatch_size = 1
microbatches_per_step = 1
[inner]
steps = 1000000
learning_rate = 0.0001
warmup_steps = 5
[outer]
inner_steps_per_round = 20
overlap_steps = 4
"""


async def join_late(directory: Path, size: Size, rate: str, *, later: bool) -> Joined:
    """Run one swarm and one newcomer; raise `UserError` with a process's last words where that fails."""
    children = Children()
    run_file = directory / "run.toml"
    run_file.write_text(run_text(size, 2 if later else 1))

    def start(name: str, *arguments: str) -> Child:
        home = directory / name
        return children.start(
            name,
            tied_command("noloco_node", *arguments, "--listen", ANYWHERE, "--home", str(home)),
            directory / "logs" / name,
        )

    try:
        invite = await start("bootstrap", "bootstrap", "--run", str(run_file)).line(SCHEME, READY_S)
        computing = ("join", invite, "--device", "cpu", "--threads", "1")
        joining = (*computing, "--stage", "1" if later else "0", "--refresh", "2")
        if later:
            start("source", *computing, "--stage", "0")
        old = start("old", *joining, "--max-upload", rate)
        await until(lambda: steps(directory, "old") >= 25, old, "the first replica trains")
        begun_unix_s = time.time()
        new = start("new", *joining)
        await until(lambda: steps(directory, "new") >= 1, new, "the newcomer's first inner step")
        return measure(events(directory, "old"), events(directory, "new"), begun_unix_s, rate)
    finally:
        await children.stop()


def events(directory: Path, name: str) -> list[Event]:
    """Return a peer's journal."""
    return list(read(directory / name / "journal.jsonl"))


def steps(directory: Path, name: str) -> int:
    """Return the inner steps that a peer has taken."""
    return sum(isinstance(event, InnerStep) for event in events(directory, name))


async def until(condition: Callable[[], bool], child: Child, what: str) -> None:
    """Wait for a condition; raise `UserError` where the process ends before."""
    limit_s = time.monotonic() + WITHIN_S
    while not condition():
        if child.exit_code is not None or time.monotonic() > limit_s:
            raise child.trouble(f"{what}: that did not come")
        await asyncio.sleep(0.2)


def measure(old: list[Event], new: list[Event], begun_unix_s: float, rate: str) -> Joined:
    """Return the newcomer's times from the two journals."""
    states = [event for event in new if isinstance(event, StateChanged)]
    (request_s,) = [event.at for event in states if event.state is PeerState.CATCHING_UP]
    (done,) = [event for event in new if isinstance(event, CatchUp) and event.what == "done"]
    first = next(event for event in new if isinstance(event, InnerStep))
    paces = [event.seconds for event in old if isinstance(event, InnerStep)]
    times = [event.at for event in old if isinstance(event, InnerStep)]
    before = [pace for pace, at in zip(paces, times, strict=True) if at < begun_unix_s][5:]
    during = [pace for pace, at in zip(paces, times, strict=True) if request_s <= at <= done.at] or [0.0]
    return Joined(
        parameters=done.total_bytes // 16,
        size_bytes=done.fetched_bytes,
        start_s=request_s - begun_unix_s,
        copy_s=done.at - request_s,
        useful_s=first.at - request_s,
        alone_s=done.fetched_bytes / read_rate(rate, "--rate"),
        donor_step_s=(sorted(before)[len(before) // 2], sorted(during)[len(during) // 2]),
    )


def row(joined: Joined) -> str:
    """Return one row of a table."""
    before, during = joined.donor_step_s
    return (
        f"| {joined.parameters / 1e6:.1f} M | {joined.size_bytes / 2**20:,.0f} MiB | {joined.alone_s:.1f} s |"
        f" {joined.copy_s:.1f} s | {joined.useful_s:.1f} s | {joined.times:.2f} | {joined.start_s:.1f} s |"
        f" {before:.2f} / {during:.2f} s |"
    )


async def main(millions: list[int], rate: str, *, later: bool) -> int:
    """Measure each size and print a table; return 1 where a newcomer took longer than the goal."""
    print(f"Over {rate}:\n")
    print("| parameters | bytes | bytes alone | copied | first step | times | start-up before | donor's step |")
    print("|---|---|---|---|---|---|---|---|")
    failed = False
    for number in millions:
        with tempfile.TemporaryDirectory() as directory:
            joined = await join_late(Path(directory), SIZES[number], rate, later=later)
        print(row(joined), flush=True)
        failed |= joined.times > WITHIN_TIMES
    print(f"\nGoal: the first step within {WITHIN_TIMES} times the bytes alone: {'missed' if failed else 'met'}")
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure how long a newcomer takes, or kill it while it copies.")
    parser.add_argument("--millions", type=int, nargs="+", choices=sorted(SIZES), default=[10, 100])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--later", action="store_true", help="a newcomer of the second of two stages")
    parser.add_argument("--kills", type=int, help="instead: kill a newcomer so often while it copies")
    parser.add_argument("--megabytes", type=float, default=16.0, help="of the state that is copied with --kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.kills is not None:
        sys.exit(run_kills(options.kills, options.megabytes, options.seed))
    sys.exit(asyncio.run(main(options.millions, options.rate, later=options.later)))
