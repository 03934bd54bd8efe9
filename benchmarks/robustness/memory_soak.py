"""Whether memory stays flat while a swarm of real processes trains at full load: each process's slope, with its error.

    python -m benchmarks.robustness.memory_soak  # 2 stages x 2 replicas, an hour after ten minutes' warm-up
    python -m benchmarks.robustness.memory_soak --minutes 1 --warm-up 0.5 # a short form, which says little about slopes
    python -m benchmarks.robustness.memory_soak --light  # ten times the steps: what grows by the step or the round?
    python -m benchmarks.robustness.memory_soak --judge DIR/samples.jsonl  # what an earlier one has seen, once more

Every peer, its libp2p daemon and the bootstrap peer are looked at every few seconds: resident memory, open file
descriptors, and tasks as the kernel counts them (threads). The warm-up is left out: allocators, caches and routing
tables fill. What follows is cut into `BLOCKS` blocks of equal length, for neighbouring looks at a process find nearly
the same number, and a fit to them would be far too sure of itself; a line through the block means has the slope and its
standard error. The slope of the blocks' peaks is told beside it: a replica gives free memory back after each
checkpoint, so that what it holds goes up and down by a tenth within a minute, and what must fit is the peak.

A process is flat where its slope is not significant (within two errors of zero), or no more than `HARMLESS` of its
memory an hour. Descriptors and tasks may not grow by more than a few from the first quarter to the last. Exit code 1
where one of it is not so. The directory keeps `samples.jsonl`, a line a look, and `result.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import msgspec
import psutil

from benchmarks.robustness.process_swarm import READY_S, Shape, Swarm, options, run, say, write
from noloco_node.run.presets import demo_run_text

BLOCKS = 12
HARMLESS = 0.01
"""Of its memory an hour, that a process may grow by without anybody noticing in a day."""
FEW = 4
"""Descriptors or tasks that may come and go."""
ENDLESS_STEPS = 1_000_000
LIGHT = {"hidden_size": 32, "intermediate_size": 48, "sequence_length": 32, "microbatch_size": 2}
"""Of a run file: small enough for ten times the steps, so that what a step or a round leaves behind shows ten times."""
HOUR_S = 3600.0
MIB = 2**20
SAY_EVERY_S = 60.0


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one process; `at_s` from the end of the warm-up."""

    process: str
    at_s: float
    memory_bytes: int
    descriptors: int
    tasks: int


class Slope(NamedTuple):
    """Of a line through the blocks: per second, and the standard error of that."""

    per_s: float
    error_per_s: float


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one process. `slope_bytes_per_h` is of the block means and judged, `peaks_bytes_per_h` of the
    blocks' peaks; each has its standard error.

    `quarters_bytes`: the highest in each quarter of the watch, which shows whether growth levels off.
    """

    process: str
    memory_bytes: float
    quarters_bytes: tuple[float, ...]
    slope_bytes_per_h: float
    error_bytes_per_h: float
    peaks_bytes_per_h: float
    peaks_error_bytes_per_h: float
    descriptors: tuple[float, float]
    tasks: tuple[float, float]

    @property
    def flat(self) -> bool:
        """Whether its memory does not grow, as far as can be told, or by a harmless amount."""
        slope = self.slope_bytes_per_h
        return slope <= 2 * self.error_bytes_per_h or slope <= HARMLESS * self.memory_bytes

    @property
    def holds(self) -> bool:
        """Whether neither memory nor descriptors nor tasks grow."""
        return self.flat and all(last <= first + FEW for first, last in (self.descriptors, self.tasks))


def slope(
    points: Sequence[tuple[float, float]], blocks: int = BLOCKS, of: Callable[[Iterable[float]], float] = fmean
) -> Slope:
    """Return the slope of values over times, fitted to one value `of` each block of equal length; nan without one."""
    begin, end = points[0][0], points[-1][0]
    gathered: list[list[tuple[float, float]]] = [[] for _ in range(blocks)]
    for at, value in points:
        gathered[min(blocks - 1, int(blocks * (at - begin) / max(1e-9, end - begin)))].append((at, value))
    means = [(fmean(at for at, _ in block), of([value for _, value in block])) for block in gathered if block]
    middle, level = fmean(at for at, _ in means), fmean(value for _, value in means)
    spread = sum((at - middle) ** 2 for at, _ in means)
    if len(means) < 3 or spread == 0.0:
        return Slope(math.nan, math.nan)
    per_s = sum((at - middle) * (value - level) for at, value in means) / spread
    left = sum((value - level - per_s * (at - middle)) ** 2 for at, value in means)
    return Slope(per_s, math.sqrt(left / (len(means) - 2) / spread))


def course(process: str, looks: Sequence[Look]) -> Course:
    """Sum one process up."""
    points = [(look.at_s, float(look.memory_bytes)) for look in looks]
    peaks, means = slope(points, of=max), slope(points)
    quarter = max(1, len(looks) // 4)
    quarters = [looks[begin : begin + quarter] for begin in range(0, len(looks), quarter)][:4]
    first, last = quarters[0], quarters[-1]
    return Course(
        process=process,
        memory_bytes=fmean(look.memory_bytes for look in looks),
        quarters_bytes=tuple(float(max(look.memory_bytes for look in part)) for part in quarters),
        slope_bytes_per_h=HOUR_S * means.per_s,
        error_bytes_per_h=HOUR_S * means.error_per_s,
        peaks_bytes_per_h=HOUR_S * peaks.per_s,
        peaks_error_bytes_per_h=HOUR_S * peaks.error_per_s,
        descriptors=(median(look.descriptors for look in first), median(look.descriptors for look in last)),
        tasks=(median(look.tasks for look in first), median(look.tasks for look in last)),
    )


def look_at(swarm: Swarm, at_s: float) -> Iterator[Look]:
    """Look at every process of a swarm, daemons included."""
    for child in swarm.children.running():
        try:
            process = psutil.Process(child.pid)
            for each in (process, *process.children(recursive=True)):
                with each.oneshot():
                    name = child.name if each is process else f"{child.name}, {each.name()}"
                    memory = each.memory_info().rss
                    tasks, descriptors = each.num_threads(), each.num_fds()
                yield Look(process=name, at_s=at_s, memory_bytes=memory, descriptors=descriptors, tasks=tasks)
        except psutil.NoSuchProcess:
            continue


def lightened(text: str) -> str:
    """Return a run file with a lighter model and smaller microbatches."""
    for field, value in LIGHT.items():
        text, found = re.subn(rf"(?m)^{field} = \d+$", f"{field} = {value}", text)
        if found != 1:
            raise ValueError(f"the run file says {field} {found} times")
    return text


async def soak(
    home: Path, shape: Shape, text: str, warm_up_s: float, train_s: float, every_s: float
) -> tuple[list[Look], float]:
    """Train a run file, and look; return all looks after the warm-up, and the inner steps a second over all peers."""
    looks: list[Look] = []
    async with Swarm(home, shape, text) as swarm:
        await swarm.until(lambda: all(peer.steps for peer in swarm.peers), "not all took part", READY_S)
        say(f"all train; warming up for {warm_up_s:.0f} s")
        await asyncio.sleep(warm_up_s)
        swarm.take_news()
        begun_s, said_s, steps = time.monotonic(), 0.0, sum(peer.history.steps for peer in swarm.peers)
        with (home / "samples.jsonl").open("wb") as kept:
            while (at_s := time.monotonic() - begun_s) < train_s:
                swarm.take_news()
                for look in look_at(swarm, at_s):
                    looks.append(look)
                    kept.write(msgspec.json.encode(look) + b"\n")
                kept.flush()
                _all_there(swarm)
                if at_s - said_s >= SAY_EVERY_S:
                    said_s = at_s
                    say(f"{at_s / 60:.0f} min: {sum(peer.history.steps for peer in swarm.peers) - steps} inner steps")
                await asyncio.sleep(every_s)
        swarm.take_news()
        return looks, (sum(peer.history.steps for peer in swarm.peers) - steps) / train_s


def _all_there(swarm: Swarm) -> None:
    for peer in swarm.peers:
        if not peer.runs:
            raise peer.child.trouble("it ended in the middle of the soak")


def report(courses: Sequence[Course]) -> list[str]:
    """Return the table as plain text."""
    text = [
        f"{'process':<24}{'memory':>9}{'slope an hour':>24}{'of the peaks':>20}{'descriptors':>13}{'tasks':>10}"
        "  highest by quarter, MiB"
    ]
    for each in courses:
        grown = f"{each.slope_bytes_per_h / MIB:+.2f} ± {each.error_bytes_per_h / MIB:.2f} MiB"
        peaks = f"{each.peaks_bytes_per_h / MIB:+.2f} ± {each.peaks_error_bytes_per_h / MIB:.2f} MiB"
        descriptors, tasks = (f"{first:.0f} -> {last:.0f}" for first, last in (each.descriptors, each.tasks))
        line = (
            f"{each.process:<24}{each.memory_bytes / MIB:>5.0f} MiB{grown:>24}{peaks:>20}{descriptors:>13}{tasks:>10}"
        )
        line += "  " + ", ".join(f"{memory / MIB:.1f}" for memory in each.quarters_bytes)
        text.append(line if each.holds else f"{line}   GROWS")
    return text


def judged(looks: Sequence[Look]) -> list[Course]:
    """Sum every process up."""
    names = dict.fromkeys(look.process for look in looks)
    return [course(name, [look for look in looks if look.process == name]) for name in names]


def judge(samples: Path) -> int:
    """Print the table of an earlier soak, and return the exit code."""
    courses = judged([msgspec.json.decode(line, type=Look) for line in samples.read_bytes().splitlines()])
    print("\n".join(report(courses)))
    return 0 if all(each.holds for each in courses) else 1


async def main(asked: argparse.Namespace) -> int:
    """Soak, print, and return the exit code."""
    shape, home = Shape(asked.stages, asked.replicas, asked.seed), asked.home.absolute()
    text = demo_run_text(stages=shape.stages, replicas=shape.replicas, steps=ENDLESS_STEPS, seed=shape.seed)
    text = lightened(text) if asked.light else text
    looks, steps_per_s = await soak(home, shape, text, 60 * asked.warm_up, 60 * asked.minutes, asked.every)
    courses = judged(looks)
    head = f"{asked.minutes:g} minutes after the warm-up, {steps_per_s:.1f} inner steps a second over all peers"
    told = [head, "", *report(courses)]
    document = {"minutes": asked.minutes, "steps_per_s": steps_per_s, "courses": courses}
    write(home / "result.json", msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    write(home / "report.txt", "\n".join(told) + "\n")
    print("\n".join(told))
    return 0 if all(each.holds for each in courses) else 1


def _asked() -> argparse.Namespace:
    parser = options(__doc__ or "", Shape(2, 2), "noloco-soak")
    parser.add_argument("--minutes", type=float, default=60.0, help="after the warm-up")
    parser.add_argument("--warm-up", type=float, default=10.0, metavar="MINUTES")
    parser.add_argument("--light", action="store_true", help="a lighter model, for ten times the steps")
    parser.add_argument("--judge", type=Path, metavar="SAMPLES", help="instead: judge what an earlier soak has seen")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two looks")
    return parser.parse_args()


if __name__ == "__main__":
    asked = _asked()
    sys.exit(judge(asked.judge) if asked.judge else run(lambda: main(asked)))
