"""Gossip and the means that have all its choices at the full scale, on both texts and on equal machines.

The means are offered two learning rates on seed 0 of the library's text (`TRIED`); gossip with weighed means takes over
the rate of gossip with plain ones. On the other text and on equal machines nothing is chosen: every recipe takes over
the rate of its family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from research.laboratory.experiments.cell import Rule
from research.laboratory.experiments.grid import Recipe
from research.laboratory.experiments.sizes import DILOCO_HB, EARLY, LATE, Size

TRIED = (5e-3, 1e-2)
"""Rates of the two means. Of the four that others had, both families with rounds this frequent chose the second
of these, and was worse at twice that by 0.09 nats and more.
"""
HELD_OUT = "torch_"
"""What the name of a recipe on the other text begins with."""
EQUAL_BYTES = {"mean_equal_none_equal_bytes": (4, 14), "gossip_by_steps_none_equal_bytes": (3, 7)}
"""Inner steps between rounds, early and late, by which equal machines send as many bytes a step as very unequal ones
do every 7 to 24 (the mean) and 4 to 16 steps (gossip): (1/early - 1/late) / log(late/early) rounds a step.
"""
LONGER = 1.175
"""Times the seconds that gossip takes for as many tokens, the synchronous mean takes: its machines wait."""
ORDER = (
    "mean_equal",
    "gossip_by_steps",
    *(f"{HELD_OUT}{name}" for name in ("mean_equal", "gossip_by_steps", "parallel", "noloco", "ours")),
    "gossip_by_steps_fifth",
    "mean_equal_fifth",
    "diloco_equal",
    "mean_equal_none",
    "gossip_by_steps_none",
    *EQUAL_BYTES,
    "gossip_by_steps_often",
    "pairs_equal",
    "gossip_by_steps_as_long",
    *(f"{HELD_OUT}{name}" for name in (*EQUAL_BYTES, "diloco_equal", "pairs_equal", "gossip_by_steps_as_long")),
    *(f"{HELD_OUT}{name}" for name in ("mean_equal_none", "gossip_by_steps_none", "ours_none")),
)
"""The headline's recipes that `everything` has not run before, the most telling first."""


def equals(size: Size) -> Iterator[Recipe]:
    """Yield what gossip is held against: means over all that have its choices, each tuned, and gossip with theirs."""
    all_of, choices = size.replicas, f"with all choices of gossip, every {EARLY} to {LATE} steps"
    cells = {
        "mean_equal": (size.equal(all_of, Rule()), f"a synchronous mean {choices}"),
        "gossip_by_steps": (
            replace(size.ours(all_of), weighed=True),
            "asynchronous gossip, means weighed by inner steps",
        ),
        "diloco_equal": (size.equal(all_of, DILOCO_HB), f"DiLoCo, heavy ball 0.3, {choices}"),
        "pairs_equal": (
            replace(size.ours(all_of), method="shards", weighed=True),
            "weighed means of pairs in step, int4, rounds as gossip's",
        ),
    }
    for name, (cell, about) in cells.items():
        family = name if cell.method == "central" else "ours"
        yield Recipe(name=name, family=family, cell=cell, about=about, tried=TRIED if family == name else ())
        if name in ("mean_equal", "gossip_by_steps"):
            seldom = replace(cell, inner_steps=5 * cell.inner_steps, late_inner_steps=5 * (cell.late_inner_steps or 0))
            yield Recipe(name=f"{name}_fifth", family=family, cell=seldom, about=f"{about}, a fifth as often")
            alike = replace(cell, speeds="none")
            yield Recipe(name=f"{name}_none", family=family, cell=alike, about=f"{about}, on equal machines")
            early, late = EQUAL_BYTES[f"{name}_none_equal_bytes"]
            often = replace(alike, inner_steps=early, late_inner_steps=late)
            said = f"{about.partition(', every')[0]}, every {early} to {late} steps, on equal machines"
            yield Recipe(name=f"{name}_none_equal_bytes", family=family, cell=often, about=said)
        if cell.method == "gossip":
            often = replace(cell, inner_steps=cell.inner_steps // 2, late_inner_steps=(cell.late_inner_steps or 0) // 2)
            yield Recipe(name=f"{name}_often", family=family, cell=often, about=f"{about}, twice as often")
            longer, said = replace(cell, steps=round(LONGER * cell.steps)), "as many seconds as the mean takes"
            yield Recipe(name=f"{name}_as_long", family=family, cell=longer, about=f"{about}, {said}")


def held_out(recipes: Iterable[Recipe]) -> Iterator[Recipe]:
    """Yield those of the headline on the text on which nothing was chosen."""
    for recipe in recipes:
        name = f"{HELD_OUT}{recipe.name}"
        if name in ORDER:
            cell = replace(recipe.cell, text="torch")
            yield replace(recipe, name=name, cell=cell, about=f"{recipe.about}, the source of torch")
