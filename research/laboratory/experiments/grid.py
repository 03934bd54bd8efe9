"""Who runs what: the methods of both papers and this project's own, their tuning, and in which order.

A *recipe* is a named method without its learning rate. Each *family* of recipes is tuned once: its own recipe runs on
seed 0 at all of the same four rates, and the rate with the lowest loss wins: of the merged model, or of single replicas
where a merged one is never formed. The others of the family (other rounds, groups, numbers of replicas, speeds, codecs)
take that rate over. So every family has had the same budget of tuning, and the tuning run that wins is the run of
seed 0.

Seed 0 of everything comes before the other seeds, and in each of them the families of the headline before the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from research.laboratory.experiments.cell import Cell, Result
from research.laboratory.running.store import Store

RATES = (2.5e-3, 5e-3, 1e-2, 2e-2)
HEADLINE = ("parallel", "noloco", "diloco", "diloco_hb", "local_sgd_paced", "ours", "ours_none")
"""Recipes whose comparison is the headline."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A named method. `cell`: without learning rate and seed. `family`: of which it takes its learning rate.

    `seeds`: how many, None for as many as the grid has. `about`: what it is, in words. `tuned_by`: which loss chooses
    the rate of the family that has the recipe's name. `beside`: the recipe that it is a change of; empty for the rest.
    `first_seed`: of those that are reported; above 0 the seed of the tuning is not among them.
    `tried`: the learning rates of the tuning of its family; the grid's where it is empty.
    """

    name: str
    family: str
    cell: Cell
    about: str
    seeds: int | None = None
    tuned_by: Literal["merged", "single"] = "merged"
    beside: str = ""
    first_seed: int = 0
    tried: tuple[float, ...] = ()

    def judged(self, result: Result) -> float:
        """Return the loss by which the recipe is tuned."""
        return result.merged if self.tuned_by == "merged" else result.single


class Run(NamedTuple):
    """A cell that is to run. `tier`: lower first."""

    name: str
    cell: Cell
    tier: int


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """All recipes of a survey. A family is tuned at the recipe of its own name, or has its rate in `rates`.

    `tried`: the learning rates of every tuning, but for families whose recipe says otherwise.
    `order`: names of recipes whose runs come first, in this order, whatever their seeds.
    """

    recipes: tuple[Recipe, ...]
    seeds: int
    rates: dict[str, float] | None = None
    tried: tuple[float, ...] = RATES
    order: tuple[str, ...] = ()

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of this name. Raises KeyError."""
        for recipe in self.recipes:
            if recipe.name == name:
                return recipe
        raise KeyError(name)

    def families(self) -> tuple[str, ...]:
        """Return the families that there are, in order."""
        return tuple(dict.fromkeys(recipe.family for recipe in self.recipes))

    def only(self, names: Iterable[str]) -> Grid:
        """Return the grid with these recipes, what they are changes of, and those at which their families are tuned."""
        wanted = set(names)
        wanted |= {recipe.beside for recipe in self.recipes if recipe.name in wanted and recipe.beside}
        if self.rates is None:
            wanted |= {recipe.family for recipe in self.recipes if recipe.name in wanted}
        return msgspec.structs.replace(self, recipes=tuple(r for r in self.recipes if r.name in wanted))

    def tuning(self, family: str) -> tuple[Cell, ...]:
        """Return the runs by which a family is tuned, one for each rate; none where rates are given."""
        if self.rates is not None:
            return ()
        head = self.recipe(family)
        return tuple(at(head.cell, rate, 0) for rate in head.tried or self.tried)

    def rate(self, family: str, store: Store) -> float | None:
        """Return the learning rate of a family, None while its tuning is not complete."""
        if self.rates is not None:
            return self.rates[family]
        found = [store.get(cell) for cell in self.tuning(family)]
        complete = [result for result in found if result is not None]
        if len(complete) < len(found):
            return None
        head = self.recipe(family)
        return min(complete, key=lambda result: loss_or_worst(head.judged(result))).cell.learning_rate

    def cells(self, recipe: Recipe, store: Store) -> tuple[Cell, ...]:
        """Return the runs of a recipe, one a seed; none while its family is not tuned."""
        rate = self.rate(recipe.family, store)
        if rate is None:
            return ()
        return tuple(at(recipe.cell, rate, seed) for seed in self.seeds_of(recipe))

    def seeds_of(self, recipe: Recipe) -> range:
        """Return the seeds of a recipe."""
        count = self.seeds if recipe.seeds is None else min(self.seeds, recipe.seeds)
        return range(recipe.first_seed, recipe.first_seed + count)

    def results(self, name: str, store: Store) -> list[Result]:
        """Return what there is of a recipe, by seed."""
        return [result for cell in self.cells(self.recipe(name), store) if (result := store.get(cell)) is not None]

    def due(self, store: Store) -> list[Run]:
        """Return what can run now and is not in the record, in order: the lower tier first, then the longer."""
        runs = {run.cell.key: run for run in sorted(self._all(store), key=lambda run: -run.tier)}
        return sorted(
            (run for run in runs.values() if run.cell not in store), key=lambda run: (run.tier, -run.cell.budget)
        )

    def done(self, store: Store) -> tuple[int, int]:
        """Return how many runs are in the record, and the inner steps of all their replicas."""
        cells = {run.cell.key: run.cell for run in self._all(store) if run.cell in store}
        return len(cells), sum(cell.budget for cell in cells.values())

    def extent(self) -> tuple[int, int]:
        """Return how many runs there are, and the inner steps of all their replicas."""
        budgets: dict[tuple[str, Cell], int] = {}
        for family in self.families():
            for cell in self.tuning(family):
                budgets["", cell] = cell.budget
        for recipe in self.recipes:
            for seed in self.seeds_of(recipe):
                is_tuned = self.rates is None and seed == 0 and recipe.cell == self.recipe(recipe.family).cell
                if not is_tuned:
                    budgets[recipe.family, at(recipe.cell, 0.0, seed)] = recipe.cell.budget
        return len(budgets), sum(budgets.values())

    def _all(self, store: Store) -> Iterator[Run]:
        for family in self.families():
            for cell in self.tuning(family):
                yield Run(f"{family}, tuning", cell, self._tier(family, 0 if family in HEADLINE else 1))
        for recipe in self.recipes:
            is_headline = recipe.name in HEADLINE
            for cell in self.cells(recipe, store):
                tier = (2 if is_headline else 3) if cell.seed == 0 else (4 if is_headline else 5)
                yield Run(recipe.name, cell, self._tier(recipe.name, tier))

    def _tier(self, name: str, otherwise: int) -> int:
        """Return the tier of a recipe's runs: by its place in the order, after which come those that have none."""
        return self.order.index(name) if name in self.order else len(self.order) + otherwise


def at(cell: Cell, rate: float, seed: int) -> Cell:
    """Return a cell at this rate and seed."""
    return msgspec.structs.replace(cell, learning_rate=rate, seed=seed)


def loss_or_worst(loss: float) -> float:
    """Return a loss that can be ordered: what is not a number is worse than any."""
    return math.inf if math.isnan(loss) else loss
