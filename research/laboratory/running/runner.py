"""Runs what is due in worker processes, one cell each, and puts every result into the record as it ends.

What is due is asked anew whenever a worker is free, because the tuning of a family decides the cells that follow from
it. So nothing but the record has to survive an interruption. A worker serves many cells, one after the other, for
importing torch takes longer than a small cell. A run that raises, or whose process dies, is reported and not tried
again; the others go on.

Ctrl-C reaches the workers too; they ignore it, and are ended by the one who started them. A worker whose parent
vanished ends when it next tells how far it is.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from research.laboratory.experiments.cell import Cell, Result
from research.laboratory.experiments.grid import Grid, Run
from research.laboratory.running.store import Store

Tell = Callable[[float], None]
Work = Callable[[Cell, Tell], Result]
LOOK_EVERY_S = 0.5
END_WITHIN_S = 5.0


class Watcher(Protocol):
    """Who is told of the progress: of each run at work, the share that is done."""

    def ended(self, run: Run, result: Result) -> None: ...
    def failed(self, run: Run, reason: str) -> None: ...
    def look(self, at_work: Sequence[tuple[Run, float]]) -> None: ...


class Failed(NamedTuple):
    """A run that came to nothing, and why."""

    run: Run
    reason: str


def trial(cell: Cell, tell: Tell) -> Result:
    """Run a cell: what workers do unless they are given something else."""
    from research.laboratory.running import trial  # torch takes seconds, and only the workers need it

    return trial.run(cell, tell)


def survey(grid: Grid, store: Store, watcher: Watcher, processes: int = 2, work: Work = trial) -> list[Failed]:
    """Run all that is due; return what failed. `work` must be importable by a fresh process."""
    failures: list[Failed] = []
    with Crew(processes, work) as crew:
        while True:
            avoid = {failed.run.cell for failed in failures} | {run.cell for run, _ in crew.at_work()}
            for run in [run for run in grid.due(store) if run.cell not in avoid][: crew.free]:
                crew.begin(run)
            if not crew.at_work():
                return failures
            for run, outcome in crew.outcomes(LOOK_EVERY_S):
                if isinstance(outcome, Result):
                    store.add(outcome)
                    watcher.ended(run, outcome)
                else:
                    failures.append(Failed(run, outcome))
                    watcher.failed(run, outcome)
            watcher.look(crew.at_work())


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    line: Connection
    run: Run | None = None
    share: float = 0.0


class Crew:
    """Worker processes; a context, at whose end none of them is left."""

    def __init__(self, processes: int, work: Work) -> None:
        self._processes, self._work = processes, work
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(END_WITHIN_S)
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            worker.line.close()
        self._workers.clear()

    @property
    def free(self) -> int:
        """How many more runs can begin."""
        return self._processes - len(self.at_work())

    def at_work(self) -> list[tuple[Run, float]]:
        """Return the runs at work, and the share of each that is done."""
        return [(worker.run, worker.share) for worker in self._workers if worker.run is not None]

    def begin(self, run: Run) -> None:
        """Give a run to a free process, which is started if there is none."""
        free = next((worker for worker in self._workers if worker.run is None), None) or self._start()
        free.run, free.share = run, 0.0
        with suppress(OSError):  # a process that is dead shows as the end of its line
            free.line.send(run.cell)

    def outcomes(self, wait_s: float) -> list[tuple[Run, Result | str]]:
        """Wait for news, and return which runs ended: with a result, or with the reason why there is none."""
        lines = [worker.line for worker in self._workers]
        ended: list[tuple[Run, Result | str]] = []
        for line in wait(lines, wait_s):
            worker = next(one for one in self._workers if one.line is line)
            news = self._news(worker)
            if isinstance(news, float):
                worker.share = news
                continue
            if worker.run is not None:
                ended.append((worker.run, news))
            worker.run = None
        return ended

    def _start(self) -> _Worker:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._work, theirs), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]

    def _news(self, worker: _Worker) -> float | Result | str:
        try:
            news: float | Result | str = worker.line.recv()
        except (EOFError, OSError):
            worker.process.join(END_WITHIN_S)
            worker.line.close()
            self._workers.remove(worker)
            return f"its process ended with code {worker.process.exitcode}"
        return news


def _serve(work: Work, line: Connection) -> None:
    """Run the cells that come over the line: a share now and then, and at the end a result or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    told_s = 0.0

    def tell(share: float) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= LOOK_EVERY_S:
            told_s = time.monotonic()
            line.send(float(share))

    while True:
        try:
            cell = line.recv()
        except EOFError:
            return
        try:
            outcome: Result | str = work(cell, tell)
        except BrokenPipeError:
            return
        except Exception:
            outcome = traceback.format_exc().strip()
        line.send(outcome)
