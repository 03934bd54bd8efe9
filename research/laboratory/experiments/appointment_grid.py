"""Gossip with and without appointments beside means over all, on machines that stay and under churn.

All step by AdamW with Nesterov's momentum. The machines that stay are those of the survey of optimisers
(`optimiser_grid`), at the rate that was best there for both methods. Under churn it is a place of the map
(`volunteer_grid`), at its rate. Its two free settings (`CHOICES`) were chosen on seed 1 of the library's text.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from research.laboratory.experiments.cell import Cell, Conditions, Corpus, Method, Prose
from research.laboratory.experiments.grid import Grid, Recipe
from research.laboratory.experiments.rivals import heads
from research.laboratory.experiments.volunteer_grid import FEW, HOURS, map_cell

RATE = 1e-2
CHOICES = ((1.0, 16), (1.5, 16), (1.0, 13))
"""How much wider stale step sizes are, and the last rounds' inner steps, which say how many bytes are sent."""
CHOSEN = CHOICES[2]
CHURN = Conditions(churn=0.6, inequality=2.0, line="100/20", hours=HOURS)
PLACES: tuple[tuple[str, Corpus | Prose], ...] = (
    ("stay", "library"),
    ("stay", "torch"),
    ("churn", "library"),
    ("churn", "prose"),
)
ABOUT = {
    "gossip": "gossip",
    "appointments": "gossip by appointment",
    "mean": "a mean over all with a barrier",
    "late_mean": "a mean over all for which nobody waits",
}


def methods(place: str) -> dict[str, Cell]:
    """Return what is compared at a place, without learning rate and seed."""
    if place == "stay":
        cells = {"gossip": heads()["gossip_weighed"][0], "mean": heads()["mean"][0]}
    else:
        names: dict[str, Method] = {"gossip": "gossip", "mean": "quorum_mean", "late_mean": "late_mean"}
        cells = {name: map_cell(method, CHURN, FEW) for name, method in names.items()}
    cells |= {"appointments": by_appointment(cells["gossip"], *CHOSEN)}
    return {name: replace(cells[name], optimiser="adamw_nesterov") for name in ABOUT if name in cells}


def by_appointment(gossip: Cell, wider: float, late: int) -> Cell:
    """Return a cell of gossip with appointments."""
    return replace(gossip, appointments=wider, late_inner_steps=late)


def recipe_name(place: str, text: str, method: str) -> str:
    """Return the name of a method's reported runs."""
    return f"{place}_{text}_{method}"


def choice_name(wider: float, late: int) -> str:
    """Return the name of a choice's run."""
    return f"choice_{wider:g}_{late}"


def appointment_grid(seeds: int) -> Grid:
    """Return the survey with so many seeds."""
    recipes = tuple(_recipes())
    return Grid(recipes=recipes, seeds=seeds, rates={"all": RATE}, order=tuple(recipe.name for recipe in recipes))


def _recipes() -> Iterator[Recipe]:
    gossip = methods("stay")["gossip"]
    choices = {choice_name(*choice): by_appointment(gossip, *choice) for choice in CHOICES}
    for name, cell in ({"choice_none": gossip} | choices).items():
        yield Recipe(name=name, family="all", cell=cell, about="a choice", seeds=1, first_seed=1)
    for place, text in PLACES:
        for method, cell in methods(place).items():
            name = recipe_name(place, text, method)
            each = replace(cell, text=text)
            yield Recipe(name=name, family="all", cell=each, about=ABOUT[method], first_seed=1)
