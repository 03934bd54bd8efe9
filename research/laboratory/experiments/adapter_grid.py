"""What a swarm trains of adapters, and how: sides that are compared, each tuned by itself.

A side is tuned at four rates on a base and a text that are not reported, on a seed that is not reported either. FFA's
rates are higher: half of the adapters move as far as all of them. Bases, texts and tokens of a seed are the same for
all sides that have as many steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec.structs import replace

from research.laboratory.experiments.cell import Adapters, Cell, Corpus, Prose
from research.laboratory.experiments.grid import Grid, Recipe
from research.laboratory.experiments.sizes import OURS

REPLICAS, STEPS, RANK = 4, 80, 4
RATES = (1e-2, 2e-2, 4e-2, 8e-2)
FFA_RATES = (4e-2, 8e-2, 1.6e-1, 3.2e-1)
Side = Literal["mean", "ffa", "ffa_wide", "alternating", "synchronous", "one", "one_all"]
SIDES: dict[Side, str] = {
    "mean": "gossip, plain mean of A and B (the default)",
    "ffa": "gossip, B alone is trained (FFA-LoRA)",
    "ffa_wide": "gossip, FFA-LoRA of twice the rank: about as many trained weights",
    "alternating": "gossip, B is trained in one round, A in the next",
    "synchronous": "data parallel, a mean gradient every step",
    "one": "one machine, as many steps as each replica",
    "one_all": "one machine, as many steps as all replicas",
}


class Place(NamedTuple):
    """What the frozen model was trained on, and the text of the adapters."""

    base: Corpus | Prose
    text: Corpus | Prose


TUNED = Place("prose", "library")
PLACES = (Place("library", "prose"), Place("prose", "torch"))


def adapter_cell(side: Side, place: Place) -> Cell:
    """Return a cell of a side, without learning rate and seed."""
    adapters = Adapters(base_text=place.base, rank=RANK)
    if side in ("ffa", "ffa_wide"):
        adapters = replace(adapters, trained="b", rank=RANK * (2 if side == "ffa_wide" else 1))
    elif side == "alternating":
        adapters = replace(adapters, trained="alternating")
    common = Cell(
        method="parallel",
        replicas=REPLICAS if side == "synchronous" else 1,
        steps=STEPS * (REPLICAS if side == "one_all" else 1),
        learning_rate=0.0,
        scale="adapted",
        text=place.text,
        adapters=adapters,
    )
    if side in ("synchronous", "one", "one_all"):
        return common
    return replace(
        OURS,
        replicas=REPLICAS,
        steps=STEPS,
        speeds="none",
        weighed=True,
        **{name: getattr(common, name) for name in ("scale", "text", "adapters")},
    )


def recipe_name(side: Side, place: Place) -> str:
    """Return the name of a side's recipe at a place."""
    return f"{side}_{place.base}_{place.text}"


def adapter_grid(seeds: int) -> Grid:
    """Return the survey with so many seeds."""
    recipes = tuple(_recipes())
    return Grid(recipes=recipes, seeds=seeds, order=tuple(recipe.name for recipe in recipes))


def _recipes() -> Iterator[Recipe]:
    for side, about in SIDES.items():
        tried = FFA_RATES if side in ("ffa", "ffa_wide") else RATES
        yield Recipe(
            name=side, family=side, cell=adapter_cell(side, TUNED), about=f"{about}, tuning", seeds=0, tried=tried
        )
    for place in PLACES:
        for side, about in SIDES.items():
            name, cell = recipe_name(side, place), adapter_cell(side, place)
            yield Recipe(name=name, family=side, cell=cell, about=about, first_seed=1)
