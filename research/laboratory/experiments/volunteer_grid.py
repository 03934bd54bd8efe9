"""The map: gossip and two means over all, under churn, unequal speeds, lines and numbers of replicas.

All three have the same number format, dynamic steps, means weighed by steps and rounds that grow, and about the same
bytes: a mean over all sends up to twice what a pair does, and comes half as often. Each was tuned at the same rates, on
seed 0 at one cell; what is reported are other seeds, and a second text.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

from msgspec.structs import replace

from research.laboratory.experiments.cell import Cell, Conditions, Corpus, Line, Method, Prose
from research.laboratory.experiments.grid import Grid, Recipe
from research.laboratory.experiments.sizes import EARLY, LATE, OURS
from research.laboratory.experiments.volunteer_model import steps_meant

RATES = (5e-3, 1e-2, 2e-2)
HOURS = 3.0
CHURNS = (0.0, 0.05, 0.2, 0.6)
INEQUALITIES = (1.0, 2.0, 8.0)
LINES: tuple[Line, ...] = get_args(Line)
FEW, MANY, MOST = 4, 16, 64
METHODS: dict[Method, str] = {
    "gossip": "asynchronous gossip",
    "quorum_mean": "a mean over all with a barrier and a deadline",
    "late_mean": "a mean over all for which nobody waits",
}
TUNED = Conditions(churn=0.2, inequality=2.0, line="100/20", hours=HOURS)
"""The conditions of the tuning, with `FEW` replicas."""


def map_cell(method: Method, conditions: Conditions, replicas: int) -> Cell:
    """Return a cell of the map, without learning rate and seed."""
    early, late = (OURS.inner_steps, OURS.late_inner_steps) if method == "gossip" else (EARLY, LATE)
    return Cell(
        method=method,
        replicas=replicas,
        steps=steps_meant(conditions.hours),
        learning_rate=0.0,
        inner_steps=early,
        late_inner_steps=late,
        dynamic=True,
        weighed=True,
        codec=OURS.codec,
        scale="tiny",
        conditions=conditions,
    )


def recipe_name(method: Method, conditions: Conditions, replicas: int, text: str = "library") -> str:
    """Return the name of a method's recipe at a place."""
    words = (method, f"churn{conditions.churn:.0%}", f"unequal{conditions.inequality:g}", conditions.line, replicas)
    return "_".join(map(str, words)) + ("" if text == "library" else f"_{text}")


def all_conditions() -> tuple[Conditions, ...]:
    """Return the conditions of the map."""
    return tuple(
        Conditions(churn=churn, inequality=inequality, line=line, hours=HOURS)
        for line, inequality, churn in product(LINES, INEQUALITIES, CHURNS)
    )


def corners() -> tuple[Conditions, ...]:
    """Return some of the conditions, the extremes first: what runs with many replicas, and on the other text."""
    some = [
        conditions
        for conditions in all_conditions()
        if conditions.churn != CHURNS[1] and conditions.inequality != INEQUALITIES[1] and conditions.line != LINES[1]
    ]
    return tuple(sorted(some, key=lambda one: (one.churn == CHURNS[2]) + (one.line == LINES[2])))


def map_grid(seeds: int) -> Grid:
    """Return the survey of the map with so many seeds."""
    recipes = tuple(_recipes())
    return Grid(recipes=recipes, seeds=seeds, tried=RATES, order=tuple(recipe.name for recipe in recipes))


def places() -> tuple[tuple[int, Corpus | Prose, Conditions], ...]:
    """Return where the methods are compared: replicas, text and conditions, the most telling first."""
    every: list[tuple[int, Corpus | Prose, Conditions]] = []
    every += [(FEW, "library", conditions) for conditions in (TUNED, *corners(), *all_conditions())]
    every += [(FEW, "prose", conditions) for conditions in corners()]
    every += [(MANY, "library", conditions) for conditions in corners()]
    every += [(MOST, "library", conditions) for conditions in corners() if conditions.churn == TUNED.churn]
    return tuple(dict.fromkeys(every))


def _recipes() -> Iterator[Recipe]:
    for method, about in METHODS.items():
        yield Recipe(name=method, family=method, cell=map_cell(method, TUNED, FEW), about=f"{about}, tuning", seeds=0)
    for replicas, text, conditions in places():
        for method, about in METHODS.items():
            yield Recipe(
                name=recipe_name(method, conditions, replicas, text),
                family=method,
                cell=replace(map_cell(method, conditions, replicas), text=text),
                about=about,
                first_seed=1,
            )
