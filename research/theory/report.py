"""Tables, checks and progress of the theory benchmark: what was expected stands beside what was measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is simulated. `slack`: factor on all tolerances."""

    seeds: int = 5
    coordinates: int = 512
    share: float = 1.0
    """Of the rounds of a full run."""
    slack: float = 1.0
    alphas: tuple[float, ...] = (0.3, 0.5, 0.7)
    """For which the critical gamma is sought."""
    crowds: tuple[int, ...] = (128, 256, 1024)
    """Replicas by which many are represented; the first pair by the production matching, the others at random."""

    def rounds(self, full: int) -> int:
        """Return how many rounds to run where a full run takes `full`."""
        return max(20, int(full * self.share))


class Spread(NamedTuple):
    """What the seeds gave."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.span()})"

    def span(self) -> str:
        """Return the smallest and the largest."""
        return f"{self.low:.3f} to {self.high:.3f}"

    def over(self, unit: float) -> Spread:
        """Return the same in another unit."""
        return Spread(self.mean / unit, self.low / unit, self.high / unit)


def spread(values: Sequence[float]) -> Spread:
    """Return mean, smallest and largest."""
    return Spread(sum(values) / len(values), min(values), max(values))


class Report:
    """Prints tables to stdout and progress to stderr, and remembers which checked figure was off."""

    def __init__(self, slack: float = 1.0) -> None:
        self._slack, self._begun_s = slack, time.perf_counter()
        self._checked = 0
        self._failures: list[str] = []

    def progress(self, text: str) -> None:
        """Say what is being done, and since when."""
        print(f"  [{time.perf_counter() - self._begun_s:5.1f} s] {text}", file=sys.stderr, flush=True)

    def near(self, what: str, measured: float, expected: float, tolerance: float) -> str:
        """Check a figure against `tolerance`, relative to what was expected; return its deviation for a table."""
        off = measured / expected - 1.0
        self.true(f"{what}: {measured:.4g}, expected {expected:.4g}", abs(off) <= tolerance * self._slack)
        return f"{100 * off:+.1f} %"

    def true(self, what: str, holds: bool) -> None:
        """Check a statement."""
        self._checked += 1
        if not holds:
            self._failures.append(what)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print an aligned table."""
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        print(f"\n{title}\n")
        for row in (header, ["-" * width for width in widths], *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  " + "   ".join(cells).rstrip())
        sys.stdout.flush()

    def verdict(self) -> int:
        """Print what was off; return the exit code."""
        taken_s = time.perf_counter() - self._begun_s
        print(f"\n{self._checked} figures checked in {taken_s:.0f} s, {len(self._failures)} off")
        for failure in self._failures:
            print(f"  off: {failure}")
        return 1 if self._failures else 0
