"""What becomes of the models of four methods when one machine trains them on prose for a while.

Methods, machines and the rate of the training are those of the survey of rivals (`rivals`), texts its two. The rate of
the fine-tuning is chosen for each method and text on a seed that is not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from msgspec.structs import replace

from research.laboratory.experiments.cell import Corpus, FineTuning
from research.laboratory.experiments.grid import Grid, Recipe
from research.laboratory.experiments.rivals import RATES, heads

METHODS = ("parallel", "mean", "gossip_weighed", "noloco")
TEXTS: tuple[Corpus, ...] = get_args(Corpus)
CHOOSING = "choosing"


def recipe_name(method: str, text: Corpus) -> str:
    """Return the name of a method's reported runs on a text; with `CHOOSING` behind it, the one that chooses."""
    return f"{method}_{text}"


def fine_tuning_grid(seeds: int) -> Grid:
    """Return the survey with so many seeds."""
    recipes = tuple(_recipes())
    return Grid(recipes=recipes, seeds=seeds, rates=dict.fromkeys(METHODS, RATES[0]))


def _recipes() -> Iterator[Recipe]:
    for text in TEXTS:
        for method in METHODS:
            cell, about = heads()[method]
            cell = replace(cell, text=text, fine_tuning=FineTuning(text="prose"))
            name = recipe_name(method, text)
            yield Recipe(name=name, family=method, cell=cell, about=about, first_seed=1)
            yield Recipe(name=f"{name}_{CHOOSING}", family=method, cell=cell, about=about, seeds=1)
