"""What the record holds of each recipe, as figures over seeds, and what it lacks.

A figure is a mean and a sample standard deviation over seeds. Two recipes are compared seed by seed: the same seed has
the same initial weights and the same text for both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import mean, stdev
from typing import NamedTuple

from research.laboratory.experiments.cell import Cell, Point, Result
from research.laboratory.experiments.grid import Grid
from research.laboratory.experiments.hardware_model import merge_bytes
from research.laboratory.running.store import Store

WARMED_UP = 0.05
"""Share of a run at which the warm-up ends."""


class Figure(NamedTuple):
    """Mean and standard deviation (None for one seed) over so many seeds."""

    mean: float
    deviation: float | None
    seeds: int

    def text(self, digits: int = 4) -> str:
        """Return the figure as it stands in a table."""
        if not math.isfinite(self.mean):
            return f"diverged ({self.seeds})"
        spread = "" if self.deviation is None else f" ± {self.deviation:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread} ({self.seeds})"


class Measured:
    """The results of a grid, by name. `missing`: what was asked for and is not there, in words."""

    def __init__(self, grid: Grid, store: Store) -> None:
        self._seeds = {recipe.name: len(grid.seeds_of(recipe)) for recipe in grid.recipes}
        self._results = {name: grid.results(name, store) for name in self._seeds}
        self._tuning = {
            family: {cell.learning_rate: store.get(cell) for cell in grid.tuning(family)} for family in grid.families()
        }
        self._about = {recipe.name: recipe.about for recipe in grid.recipes}
        self._rates = {recipe.name: grid.rate(recipe.family, store) for recipe in grid.recipes}
        self._families = {recipe.name: recipe.family for recipe in grid.recipes}
        self._cells = {recipe.name: (recipe.family, recipe.cell) for recipe in grid.recipes}
        self._heads = {recipe.name: recipe for recipe in grid.recipes if recipe.name == recipe.family}
        self._besides = {recipe.name: recipe.beside for recipe in grid.recipes if recipe.beside}
        self._missing: dict[str, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The recipes that there are."""
        return tuple(self._results)

    @property
    def changes(self) -> dict[str, str]:
        """The recipes that are a change of another one, and which."""
        return self._besides

    def about(self, name: str) -> str:
        """Return what a recipe is."""
        return self._about.get(name, name)

    def cell(self, name: str) -> Cell | None:
        """Return what a recipe runs, without learning rate and seed; None if there is no such recipe."""
        found = self._cells.get(name)
        return None if found is None else found[1]

    def rate(self, name: str) -> str:
        """Return the learning rate of a recipe; the family that it was tuned for and the loss that chose it, if others
        than its own and the merged model's.
        """
        rate, family = self._rates.get(name), self._families.get(name, name)
        if rate is None:
            return "-"
        beside = [] if family == name else [family]
        beside += ["by single replicas"] if self.is_tuned_by_single(family) else []
        return f"{rate:g} ({', '.join(beside)})" if beside else f"{rate:g}"

    def is_tuned_by_single(self, family: str) -> bool:
        """Return whether the loss of single replicas chose the rate of a family."""
        return family in self._heads and self._heads[family].tuned_by == "single"

    def judged(self, family: str, result: Result) -> float:
        """Return the loss by which a family is tuned."""
        return self._heads[family].judged(result)

    def is_same(self, name: str, other: str) -> bool:
        """Return whether two recipes are one under two names."""
        return name in self._cells and self._cells[name] == self._cells.get(other)

    def codes(self) -> Counter[str]:
        """Return how many results were made by which state of the code."""
        every = [result for results in self._results.values() for result in results]
        every += [result for tuned in self._tuning.values() for result in tuned.values() if result is not None]
        return Counter({result.cell.key: result.code or "unknown" for result in every}.values())

    def results(self, name: str) -> list[Result]:
        """Return what there is of a recipe, by seed; note what is not."""
        found = self._results.get(name, [])
        if name not in self._seeds or len(found) < self._seeds[name]:
            self._missing[name] = len(found)
        return found

    def figure(self, name: str, measure: Callable[[Result], float]) -> Figure | None:
        """Return a figure of a recipe, None if there is no result."""
        return figure(measure(result) for result in self.results(name))

    def against(self, name: str, other: str, measure: Callable[[Result, Result], float]) -> Figure | None:
        """Return a figure of a recipe beside another, over the seeds that both have."""
        others = {result.cell.seed: result for result in self.results(other)}
        mine = [result for result in self.results(name) if result.cell.seed in others]
        return figure(measure(result, others[result.cell.seed]) for result in mine)

    def tuned(self, family: str) -> dict[float, Result | None]:
        """Return the runs by which a family was tuned, by rate."""
        return self._tuning[family]

    def families(self) -> tuple[str, ...]:
        """Return all families."""
        return tuple(self._tuning)

    def take_missing(self) -> list[str]:
        """Return what was missing since the last call, in words."""
        found, self._missing = self._missing, {}
        return [
            name if not count or name not in self._seeds else f"{name} ({count} of {self._seeds[name]} seeds)"
            for name, count in found.items()
        ]


def figure(values: Iterable[float]) -> Figure | None:
    """Return the figure of some values, None of none."""
    every = list(values)
    if not every:
        return None
    if not all(map(math.isfinite, every)):
        return Figure(math.nan, None, len(every))
    return Figure(mean(every), stdev(every) if len(every) > 1 else None, len(every))


def bytes_with_merge(result: Result) -> float:
    """Return the bytes that a replica has sent for each inner step when a last merge has made the merged model.

    Where the replicas differ, each sends its weights once more; where they are alike, there is nothing to merge.
    """
    return result.bytes_per_step + merge_bytes(result.cell) * result.cell.replicas / sum(result.steps_taken)


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats."""
    return math.exp(loss) if loss < 700.0 else math.inf


def seconds_to(result: Result, loss: float) -> float:
    """Return the virtual time at which the merged model reaches a loss, not a number if it never does."""
    return spent_to(result, loss, lambda point: point.virtual_s)


def spent_to(result: Result, loss: float, spent: Callable[[Point], float]) -> float:
    """Return what is spent until the merged model reaches a loss, not a number if it never does."""
    before: Point | None = None
    for point in result.curve:
        if point.merged <= loss:
            if before is None:
                return spent(point)
            part = (before.merged - loss) / (before.merged - point.merged)
            return spent(before) + part * (spent(point) - spent(before))
        before = point
    return math.nan


def correlation(result: Result) -> float:
    """Return Pearson's correlation of spread and learning rate, not a number where there is none.

    Over the points after the warm-up, but for the last: it is taken after a last round, the others before one.
    """
    points = [point for point in result.curve if WARMED_UP < point.share < 1.0]
    spreads = [point.spread for point in points]
    rates = [point.learning_rate for point in points]
    return pearson(spreads, rates)


def pearson(first: list[float], second: list[float]) -> float:
    """Return Pearson's correlation; not a number with fewer than three points, or where one of both stands still."""
    if len(first) < 3:
        return math.nan
    a, b = mean(first), mean(second)
    over = sum((x - a) * (y - b) for x, y in zip(first, second, strict=True))
    under = math.sqrt(sum((x - a) ** 2 for x in first) * sum((y - b) ** 2 for y in second))
    return over / under if under > 0.0 else math.nan
