"""Which measurements belong to the survey, how many trials each gets, and what they come to.

A small tree is cheap and its time spreads more, so it gets more trials: in proportion to the square root of the number
of workers that it lacks. Batches are small enough for all cores and for a progress that moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from statistics import mean
from typing import Any, NamedTuple

from research.latency import blocking, open_rounds, talking, tree
from research.latency.jobs import Job
from research.latency.paper import BLOCKING, PRINTED_BLOCKING, TREE_OVER_PAIR, Comparison
from research.latency.tree import Shape, Times, Trials

BATCH_MESSAGES = 400_000
TALKED = (4, 16, 64)
"""Workers of the trees that are measured over conversations too."""
TALKED_SPREAD = 1.0
OWN_CELLS = ((16, 10), (64, 10), (16, 50), (64, 50))
"""(replicas, inner steps) at which our own rounds are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much to measure. `trials`: of the largest tree. `long_outer_steps`: of the largest and slowest cell.

    `repeats`: times that a blocking cell is measured at most.
    """

    trials: int = 2000
    workers_at_most: int = 1024
    outer_steps: int = 100
    long_outer_steps: int = 500
    repeats: int = 16
    own_replicas_at_most: int = 64
    seed: int = 0


class Place(NamedTuple):
    """What a result belongs to."""

    what: str
    row: Any


def jobs(scale: Scale) -> list[tuple[Place, Job]]:
    """Return all work of a survey, each piece with its place in the result."""
    return [*_trees(scale), *_conversations(scale), *_blocking(scale), *_own(scale)]


def _trees(scale: Scale) -> Iterator[tuple[Place, Job]]:
    spreads = dict.fromkeys(spread for spread, _ in TREE_OVER_PAIR)
    sizes = dict.fromkeys(workers for _, workers in TREE_OVER_PAIR if workers <= scale.workers_at_most)
    for spread in spreads:
        for workers in sizes:
            trials = scale.trials * isqrt(1024 // workers)
            yield from _batches("complete", workers, spread, trials, scale.seed)
            yield from _batches("binomial", workers, spread, trials // 4, scale.seed)
        for shape in ("complete", "binomial"):
            yield from _batches(shape, 2, spread, scale.trials * 50, scale.seed)


def _batches(shape: Shape, workers: int, spread: float, trials: int, seed: int) -> Iterator[tuple[Place, Job]]:
    # Without spread all trials are alike to the bit.
    trials = min(trials, 20) if spread == 0.0 else trials
    each = tree.messages(shape, workers)
    size = max(1, BATCH_MESSAGES // each)
    for number, first in enumerate(range(0, trials, size)):
        count = min(size, trials - first)
        batch = Trials(shape, workers, spread, count, seed, number)
        name = f"{shape} tree of {workers}, spread {spread}"
        job = Job(name=name, function=tree.measure, argument=batch, cost=count * each)
        yield Place(shape, (spread, workers)), job


def _conversations(scale: Scale) -> Iterator[tuple[Place, Job]]:
    for workers in (2, *TALKED):
        if workers > scale.workers_at_most:
            continue
        trials = 4 * scale.trials // isqrt(workers)
        batch = Trials("complete", workers, TALKED_SPREAD, trials, scale.seed)
        cost = 15 * trials * tree.messages("complete", workers)
        job = Job(name=f"conversations, tree of {workers}", function=talking.measure, argument=batch, cost=cost)
        yield Place("talked", workers), job


def _blocking(scale: Scale) -> Iterator[tuple[Place, Job]]:
    for replicas, inner_steps in BLOCKING:
        if replicas > scale.workers_at_most:
            continue
        is_long = (replicas, inner_steps) == (1024, 100)
        outer_steps = scale.long_outer_steps if is_long else scale.outer_steps
        for number in range(max(1, min(scale.repeats, 1024 // replicas))):
            cell = blocking.Cell(replicas, inner_steps, outer_steps, scale.seed * 1000 + number)
            name = f"blocking, {replicas} replicas, {inner_steps} inner steps"
            cost = 14.0 * replicas * outer_steps
            job = Job(name=name, function=blocking.measure, argument=cell, cost=cost)
            yield Place("blocking", (replicas, inner_steps)), job


def _own(scale: Scale) -> Iterator[tuple[Place, Job]]:
    for replicas, inner_steps in OWN_CELLS:
        if replicas > scale.own_replicas_at_most:
            continue
        for blocks in (False, True):
            form = open_rounds.Form(replicas, inner_steps, scale.outer_steps, blocks, scale.seed * 1000)
            name = f"our rounds, {replicas} replicas, {inner_steps} inner steps"
            cost = replicas * scale.outer_steps * (400.0 + 10 * replicas + 6 * inner_steps)
            job = Job(name=name, function=open_rounds.measure, argument=form, cost=cost)
            yield Place("blocking form" if blocks else "open form", (replicas, inner_steps)), job


class Survey:
    """All results, by place."""

    def __init__(self, scale: Scale, places: Sequence[Place], results: Sequence[Any]) -> None:
        self.scale = scale
        self._found: dict[Place, list[Any]] = {}
        for place, result in zip(places, results, strict=True):
            self._found.setdefault(place, []).append(result)

    def rows(self, what: str) -> list[Any]:
        """Return the rows that there are of one kind."""
        return [place.row for place in self._found if place.what == what]

    def times(self, what: str, row: Any) -> Times:
        """Return the moments of all batches of one kind of all-reduce."""
        return sum(self._found[Place(what, row)], Times(0, 0.0, 0.0))

    def ratio(self, shape: Shape, spread: float, workers: int) -> tuple[float, float]:
        """Return the time of a tree over that of a pair of the same shape, and its relative standard error."""
        return _over(self.times(shape, (spread, workers)), self.times(shape, (spread, 2)))

    def talked_ratio(self, workers: int) -> tuple[float, float]:
        """Return the same over conversations."""
        return _over(self.times("talked", workers), self.times("talked", 2))

    def tree_comparison(self, spread: float, workers: int) -> Comparison:
        """Return a ratio beside its figure."""
        ours, error = self.ratio("complete", spread, workers)
        theirs = TREE_OVER_PAIR[spread, workers]
        return Comparison(name=f"tree, spread {spread}, {workers}", ours=ours, theirs=theirs, error=error)

    def blocked(self, replicas: int, inner_steps: int, outer_steps: int) -> float:
        """Return the total time of DiLoCo over that of NoLoCo after so many outer steps."""
        runs: list[blocking.Waits] = self._found[Place("blocking", (replicas, inner_steps))]
        return mean(run.diloco_s[outer_steps - 1] / run.noloco_s[outer_steps - 1] for run in runs)

    def blocking_comparison(self, replicas: int, inner_steps: int) -> Comparison:
        """Return a ratio of total times beside its figure."""
        ours = self.blocked(replicas, inner_steps, self.scale.outer_steps)
        theirs = BLOCKING[replicas, inner_steps]
        return Comparison(name=f"blocking, {replicas}, {inner_steps}", ours=ours, theirs=theirs)

    def printed_comparisons(self) -> list[Comparison]:
        """Return what the paper itself prints of blocking, beside ours after either number of outer steps."""
        if (1024, 100) not in self.rows("blocking"):
            return []
        lengths = [length for length in (250, 500) if length <= self.scale.long_outer_steps]
        return [
            Comparison(
                name=f"blocking, 1024, 100, {length} outer steps",
                ours=self.blocked(1024, 100, length),
                theirs=PRINTED_BLOCKING,
            )
            for length in lengths
        ]

    def overheads(self, replicas: int, inner_steps: int) -> tuple[float, float]:
        """Return what waiting makes of the time of a replica's own work: in DiLoCo, in NoLoCo."""
        runs: list[blocking.Waits] = self._found[Place("blocking", (replicas, inner_steps))]
        return mean(run.diloco_overhead for run in runs), mean(run.noloco_overhead for run in runs)

    def own(self, replicas: int, inner_steps: int) -> Mapping[str, open_rounds.Found]:
        """Return what our rounds cost, by form."""
        return {form: self._found[Place(form, (replicas, inner_steps))][0] for form in ("open form", "blocking form")}


def _over(one: Times, other: Times) -> tuple[float, float]:
    return one.mean_s / other.mean_s, float((one.relative_error**2 + other.relative_error**2) ** 0.5)
