"""How far a survey is: a bar on a terminal, elsewhere plain lines; the last result in words.

The time left is estimated from inner steps, those of runs at work included, at the rate of this session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from noloco_node.units import format_clock
from research.laboratory.experiments.cell import Result
from research.laboratory.experiments.grid import Grid, Run
from research.laboratory.running.store import Store

PLAIN_EVERY_S = 30.0


class Board:
    """Tells a person how far the survey of a grid is; a context, so that the terminal is always given back."""

    def __init__(
        self,
        grid: Grid,
        store: Store,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid, self._store, self._clock = grid, store, clock
        self._console = console or Console(stderr=True)
        self._runs, self._steps = grid.extent()
        self._before = grid.done(store)[1]
        self._begun_s = self._spoke_s = clock()
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=float(max(1, self._steps)))

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        done = self._grid.done(self._store)[0]
        resumed = f", {done} of them are in {self._store.path} already" if done else ""
        self._say(f"{self._runs} runs, {self._steps:,} inner steps in all{resumed}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def ended(self, run: Run, result: Result) -> None:
        """Say what a run came to."""
        self._say(f"{in_words(run, result)}; {self.line(())}")

    def failed(self, run: Run, reason: str) -> None:
        """Say why a run came to nothing."""
        self._say(f"{run.name}, {_settings(run)}: FAILED\n{reason}")

    def look(self, at_work: Sequence[tuple[Run, float]]) -> None:
        """Show how far it is, on a terminal at once, elsewhere now and then."""
        if self._console.is_terminal:
            steps = float(self._begun(at_work))
            self._bar.update(self._task, completed=steps, description=self.line(at_work), refresh=True)
        elif self._clock() - self._spoke_s >= PLAIN_EVERY_S:
            names = ", ".join(f"{run.name} {share:.0%}" for run, share in at_work)
            self._say(f"{self.line(at_work)}; at work: {names}")

    def line(self, at_work: Sequence[tuple[Run, float]]) -> str:
        """Return runs done, rate and time left in one line."""
        done, _ = self._grid.done(self._store)
        steps, elapsed_s = self._begun(at_work), self._clock() - self._begun_s
        rate = (steps - self._before) / elapsed_s if elapsed_s > 0.0 else 0.0
        left = f", about {format_clock((self._steps - steps) / rate)} left" if rate > 0.0 else ""
        return f"{done} of {self._runs} runs, {rate:,.0f} replica-steps/s{left}"

    def _begun(self, at_work: Sequence[tuple[Run, float]]) -> int:
        _, steps = self._grid.done(self._store)
        return steps + round(sum(share * run.cell.budget for run, share in at_work))

    def _say(self, text: str) -> None:
        self._spoke_s = self._clock()
        if self._console.is_terminal:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._console.file, flush=True)


def in_words(run: Run, result: Result) -> str:
    """Return a result in one line."""
    return (
        f"{run.name}, {_settings(run)}: {result.merged:.4f} nats merged, {result.single:.4f} single, "
        f"spread {result.spread:.2g}, {result.busy:.0%} busy, {result.virtual_s:,.0f} virtual s; "
        f"took {result.wall_s:.0f} s"
    )


def _settings(run: Run) -> str:
    return f"rate {run.cell.learning_rate:g}, seed {run.cell.seed}"
