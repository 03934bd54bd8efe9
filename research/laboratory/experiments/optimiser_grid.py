"""Optimisers inside the replicas of a synchronous mean and of gossip, each at its own rate.

Methods, machines and steps are those of the survey of rivals (`rivals`), texts its two. Rates are chosen on seed 0 of
the library's text, which is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from msgspec.structs import replace

from research.laboratory.experiments.cell import Corpus, Optimiser
from research.laboratory.experiments.grid import Grid, Recipe
from research.laboratory.experiments.rivals import heads

METHODS = {"mean": "a synchronous mean", "gossip_weighed": "asynchronous gossip"}
"""As `rivals` has them, with the same choices."""
OPTIMISERS: tuple[Optimiser, ...] = get_args(Optimiser)
TEXTS: tuple[Corpus, ...] = get_args(Corpus)
RATES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)


def recipe_name(method: str, optimiser: Optimiser, text: Corpus) -> str:
    """Return the name of a method's reported runs on a text."""
    return f"{family(method, optimiser)}_{text}"


def family(method: str, optimiser: Optimiser) -> str:
    """Return what has a learning rate of its own."""
    return f"{method}_{optimiser}"


def optimiser_grid(seeds: int) -> Grid:
    """Return the survey with so many seeds."""
    return Grid(recipes=tuple(_recipes()), seeds=seeds, tried=RATES)


def _recipes() -> Iterator[Recipe]:
    for method, about in METHODS.items():
        for optimiser in OPTIMISERS:
            cell, own = replace(heads()[method][0], optimiser=optimiser), family(method, optimiser)
            yield Recipe(name=own, family=own, cell=cell, about=f"{about}, tuning", seeds=0)
            for text in TEXTS:
                name = recipe_name(method, optimiser, text)
                yield Recipe(name=name, family=own, cell=replace(cell, text=text), about=about, first_seed=1)
