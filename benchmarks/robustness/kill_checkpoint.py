"""Kill a process that writes checkpoints, at random instants, and see what the next start finds.

    python -m benchmarks.robustness.kill_checkpoint --kills 200 --megabytes 16

A child process (no torch: it starts in a fifth of a second) saves checkpoints with the production code, one right after
the other, and names each that is saved. At a random instant it is killed by SIGKILL. Then its directory is read as a
starting node reads it: the newest checkpoint must be whole (checksum), hold the numbers that its counter says, and be
no older than the last that the child had named. The next child goes on in the same directory, amid what the one before
left behind. SIGKILL shows what a process leaves; it does not show what a disk forgets in a power cut.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from noloco_node.storage.atomic_file import Array
from noloco_node.storage.checkpoint import KEPT, Counters, counters_of, files, load_latest, store

RUN = "0" * 64
MEASURED = 5
LIFE = 3.0
"""Longest session of a child after its first checkpoint, in checkpoints: so every phase of one is met."""


class Told(NamedTuple):
    """`whole`: starts that found a good checkpoint. `amid`: kills that left a half-written file beside it.

    `saved`: checkpoints written in all; `seconds` for the whole trial, `delays_s`: the shortest and the longest
    session.
    """

    kills: int
    whole: int
    amid: int
    saved: int
    seconds: float
    delays_s: tuple[float, float]


def content(step: int, size: int) -> list[Array]:
    """Return tensors that any step has its own of, float32, `size` bytes together."""
    numbers = step.to_bytes(4, "little") * (size // 16)
    return [Array(f"slow.{place}", "F32", (len(numbers) // 4,), numbers) for place in range(4)]


def write_for_ever(directory: Path, size: int) -> None:
    """Save one checkpoint after the other, and name each on the standard output once it is saved."""
    found = files(directory)
    step = max((counters_of(path).inner_steps for path in found), default=0)
    while True:
        step += 1
        counters = Counters(
            run_id=RUN, stage=0, round=step, inner_steps=step, progress=0.0, samples=0, optimiser_steps=step
        )
        store(directory, counters, content(step, size), KEPT)
        print(step, flush=True)


def kill_many(directory: Path, *, kills: int, megabytes: float, seed: int) -> Told:
    """Kill `kills` children; raise AssertionError about the first start that does not find what it should."""
    rng, began_s, size = random.Random(f"{seed}|kill"), time.monotonic(), int(megabytes * 2**20)
    pace_s = seconds_of_one(directory, size)
    whole = amid = newest = 0
    delays = []
    for number in range(kills):
        named, delay_s = live_and_die(directory, size, rng.uniform(0.0, LIFE * pace_s))
        delays.append(delay_s)
        amid += any(directory.glob(".*.aside"))
        newest = max(newest, named)
        complaints: list[str] = []
        found = load_latest(directory, RUN, complaints.append)
        assert not complaints, f"kill {number}: {complaints}"
        assert found is not None, f"kill {number}: no checkpoint, and {newest} had been saved"
        step = found.counters.inner_steps
        assert step >= newest, f"kill {number}: found {step}, and {newest} had been saved"
        expected = step.to_bytes(4, "little")
        for tensor in found.tensors["slow"]:
            assert tensor.numpy().tobytes() == expected * tensor.numel(), f"kill {number}: not the numbers of {step}"
        whole, newest = whole + 1, step
    return Told(kills, whole, amid, newest, round(time.monotonic() - began_s, 1), (min(delays), max(delays)))


def child_of(directory: Path, size: int) -> subprocess.Popen[str]:
    """Start a child."""
    command = [sys.executable, "-m", __spec__.name, "--child", str(directory), "--megabytes", str(size / 2**20)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def seconds_of_one(directory: Path, size: int) -> float:
    """Return how long a child takes for a checkpoint on this machine."""
    with child_of(directory, size) as child:
        assert child.stdout is not None
        child.stdout.readline()
        began_s = time.monotonic()
        for _ in range(MEASURED):
            child.stdout.readline()
        took_s = time.monotonic() - began_s
        child.kill()
    return took_s / MEASURED


def live_and_die(directory: Path, size: int, delay_s: float) -> tuple[int, float]:
    """Let one child save until `delay_s` after its first checkpoint; return the last it named, and how long."""
    with child_of(directory, size) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first, "the child died by itself"
        time.sleep(delay_s)
        child.kill()
        rest = child.stdout.read()
    lines = [line for line in (first + rest).splitlines(keepends=True) if line.endswith("\n")]
    return int(lines[-1]), delay_s


def main() -> None:
    """Run the trial, or be its child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--megabytes", type=float, default=16.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        write_for_ever(asked.child, int(asked.megabytes * 2**20))
        return
    with tempfile.TemporaryDirectory(prefix="kill-checkpoint-") as directory:
        told = kill_many(Path(directory), kills=asked.kills, megabytes=asked.megabytes, seed=asked.seed)
    print(json.dumps(told._asdict()))


if __name__ == "__main__":
    main()
