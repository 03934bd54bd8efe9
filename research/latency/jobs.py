"""Independent pieces of work on all cores, with progress. What comes back depends on no number of processes.

Each job carries its own seed and an estimate of its cost, from which the estimate of the time left is made: a bar on a
terminal, else a plain line every ten seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """`function(argument)`, which a fresh process can import. `cost`: in messages, or what takes about as long."""

    name: str
    function: Callable[[Any], Any]
    argument: Any
    cost: float


def run(jobs: Sequence[Job], processes: int) -> list[Any]:
    """Return the results in the order of the jobs; show progress on stderr."""
    results: list[Any] = [None] * len(jobs)
    report = _Report(len(jobs), sum(job.cost for job in jobs))
    with report:
        for number, result in _completed(jobs, processes):
            results[number] = result
            report.advance(jobs[number])
    return results


def _completed(jobs: Sequence[Job], processes: int) -> Iterator[tuple[int, Any]]:
    """Yield results as they come, dear jobs first: else one of them would keep a single core busy at the end."""
    order = sorted(range(len(jobs)), key=lambda number: -jobs[number].cost)
    if processes == 1:
        for number in order:
            yield number, jobs[number].function(jobs[number].argument)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        numbers: dict[Future[Any], int] = {
            pool.submit(jobs[number].function, jobs[number].argument): number for number in order
        }
        try:
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Report:
    """Progress in words or as a bar."""

    def __init__(self, jobs: int, total: float) -> None:
        self._jobs, self._total, self._done = jobs, total, 0.0
        self._begun = self._said = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"))
        self._bar = Progress(*columns, TimeRemainingColumn()) if sys.stderr.isatty() else None
        self._task = self._bar.add_task("starting", total=total, rate="") if self._bar is not None else None

    def __enter__(self) -> None:
        if self._bar is not None:
            self._bar.start()
        else:
            print(f"{self._jobs} pieces of work, the longest first", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, job: Job) -> None:
        """Count one finished job."""
        self._done += job.cost
        now = time.perf_counter()
        per_s = self._done / (now - self._begun)
        rate = f"{per_s:,.0f} messages/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, description=job.name, rate=rate)
        elif now - self._said > LINE_EVERY_S:
            self._said = now
            left_s = (self._total - self._done) / per_s
            share = self._done / self._total
            print(f"{share:4.0%}, {rate}, about {left_s:.0f} s left; done: {job.name}", file=sys.stderr, flush=True)
