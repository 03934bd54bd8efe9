"""The recipes of the laboratory: every system of both papers, this project's own, and the ablations.

`everything` is the survey behind the tables, tuned; `small` a dozen methods at the rates that the survey found, for a
coffee break; `smoke` every method for a few steps, which shows that they run and nothing else.

Where all replicas step in step, losses do not depend on their speeds. So everything runs on the most unequal machines,
unless its name says otherwise: one run serves for loss and time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from research.laboratory.experiments.ablations import Plain, changes
from research.laboratory.experiments.cell import Cell, Rule
from research.laboratory.experiments.full_scale import ORDER, equals, held_out
from research.laboratory.experiments.grid import Grid, Recipe
from research.laboratory.experiments.sizes import (
    CROWDS,
    DILOCO,
    DILOCO_HB,
    NAIVE,
    NOLOCO,
    OURS,
    SPEEDS,
    Size,
    delay,
)

SMALL_RATES = {
    "parallel": 5e-3,
    "independent": 5e-3,
    "local_sgd": 5e-3,
    "diloco": 5e-3,
    "diloco_hb": 5e-3,
    "noloco": 5e-3,
    "async_naive": 5e-3,
    "async_delayed": 2.5e-3,
    "ours": 1e-2,
}
"""Learning rates of the small survey, as the tuning of the full one found them."""
RIVALS = (
    "mean_equal",
    "diloco_equal",
    "local_sgd",
    "local_sgd_paced",
    "diloco",
    "diloco_paced",
    "diloco_hb",
    "diloco_hb_every_25",
    "diloco_hb_every_100",
    "diloco_hb_paced",
)
"""Synchronous rounds of all with all. Those with all choices of asynchronous gossip are its rivals (`headline`)."""


def everything() -> Grid:
    """Return the survey behind the tables."""
    size = Size()
    plain = (*_heads(size), *_noloco_paper(size), *_async_paper(size), *_crowds(size), *_ours(size), *equals(size))
    recipes = (*plain, *changes(_plain(size)), *held_out(plain))
    return Grid(recipes=recipes, seeds=3)


def headline_runs() -> Grid:
    """Return what the headline's tables need of the survey, the most telling first."""
    grid = everything()
    return replace(grid.only(ORDER), order=ORDER)


def small() -> Grid:
    """Return a dozen methods, one seed."""
    size = Size(replicas=4, few=4, steps=300)
    heads = tuple(_heads(size))
    more = (
        Recipe(
            name="noloco_gamma_0",
            family="noloco",
            cell=size.pairs(4, replace(NOLOCO, gamma=0.0)),
            about="NoLoCo without the pull between replicas",
        ),
        Recipe(
            name="fedbuff",
            family="async_delayed",
            cell=size.server(4, replace(DILOCO, buffer=4)),
            about="a server that steps on the mean of every 4 arrivals",
        ),
        Recipe(
            name="ours_noloco_rule",
            family="noloco",
            cell=_with_noloco_rule(size, 4),
            about="asynchronous rounds by NoLoCo's own rule",
        ),
    )
    return Grid(recipes=heads + more, seeds=1, rates=SMALL_RATES)


def smoke() -> Grid:
    """Return every method once, for a few steps."""
    size = Size(replicas=2, few=2, steps=6, every=2)
    routed = replace(size.pairs(2), routing="random")
    more = Recipe(
        name="noloco_random_routes", family="noloco", cell=routed, about="NoLoCo over two stages, random routes"
    )
    heads = tuple(
        replace(head, cell=replace(head.cell, inner_steps=2, late_inner_steps=3)) if head.name == "ours" else head
        for head in _heads(size)
    )
    short = {"inner_steps": 2, "late_inner_steps": 3}
    changed = tuple(
        replace(change, beside="", cell=replace(change.cell, **short) if change.cell.late_inner_steps else change.cell)
        for change in changes(_plain(size))
    )
    return Grid(recipes=(*heads, more, *changed), seeds=1, rates=SMALL_RATES)


def _heads(size: Size) -> Iterator[Recipe]:
    """Yield one recipe for each family, at which it is tuned."""
    all_of = size.replicas
    cells = {
        "parallel": (size.parallel(all_of), "data parallel, a mean gradient every step"),
        "noloco": (size.pairs(all_of), "NoLoCo"),
        "diloco": (size.central(all_of, DILOCO), "DiLoCo, Nesterov 0.9"),
        "diloco_hb": (size.central(all_of, DILOCO_HB), "DiLoCo, heavy ball 0.3"),
        "ours": (size.ours(all_of), "asynchronous gossip"),
        "local_sgd": (size.central(all_of, Rule()), "Local-SGD"),
        "independent": (size.cell(all_of), "independent replicas"),
        "async_naive": (size.server(size.few, NAIVE), "asynchronous DiLoCo, naive"),
        "async_delayed": (size.delayed(size.few), "delayed Nesterov, dynamic local updates"),
    }
    for name, (cell, about) in cells.items():
        # Independent replicas are used one by one: the mean of their weights is no model that anybody would choose.
        tuned_by: Literal["merged", "single"] = "single" if name == "independent" else "merged"
        yield Recipe(name=name, family=name, cell=cell, about=about, tuned_by=tuned_by)


def _noloco_paper(size: Size) -> Iterator[Recipe]:
    """Yield NoLoCo with other rounds, groups and routes, and DiLoCo with its rounds."""
    pairs, hb = size.pairs(size.replicas), size.central(size.replicas, DILOCO_HB)
    for every in (25, 100):
        often = {
            "noloco": (replace(pairs, inner_steps=every), "NoLoCo"),
            "diloco_hb": (replace(hb, inner_steps=every), "DiLoCo, heavy ball 0.3"),
        }
        for name, (cell, about) in often.items():
            about = f"{about}, a round every {every} steps"
            yield Recipe(name=f"{name}_every_{every}", family=name, cell=cell, about=about)
    alone = size.pairs(size.replicas, replace(NOLOCO, gamma=0.0))
    about = "NoLoCo without the pull between replicas"
    yield Recipe(name="noloco_gamma_0", family="noloco", cell=alone, about=about)
    for group in (4, 8):
        cell, about = replace(pairs, group=group), f"NoLoCo in groups of {group}"
        yield Recipe(name=f"noloco_groups_{group}", family="noloco", cell=cell, about=about, seeds=1)
    routes: tuple[Literal["random", "fixed"], ...] = ("random", "fixed")
    for routing in routes:
        routed = {
            "noloco": (replace(pairs, routing=routing), f"NoLoCo over two stages, {routing} routes"),
            "independent": (
                replace(size.cell(size.replicas), routing=routing),
                f"two stages, {routing} routes, no averaging",
            ),
        }
        for name, (cell, about) in routed.items():
            yield Recipe(name=f"{name}_{routing}_routes", family=name, cell=cell, about=about, seeds=2)


def _async_paper(size: Size) -> Iterator[Recipe]:
    """Yield the asynchronous paper's methods at other speeds, and its rivals and parts."""
    few = size.few
    for speeds in SPEEDS[:-1]:
        cells = {
            "async_naive": (size.server(few, NAIVE, speeds), "asynchronous DiLoCo, naive"),
            "async_delayed": (size.delayed(few, speeds), "delayed Nesterov, dynamic local updates"),
        }
        for name, (cell, about) in cells.items():
            about, seeds = f"{about}, speeds {speeds}", 3 if speeds == "none" else 1
            yield Recipe(name=f"{name}_{speeds}", family=name, cell=cell, about=about, seeds=seeds)
    yield Recipe(
        name="fedbuff",
        family="async_delayed",
        cell=size.server(few, replace(DILOCO, buffer=few)),
        about=f"a server that steps on the mean of every {few} arrivals",
    )
    yield Recipe(
        name="delayed_alone",
        family="async_delayed",
        cell=size.server(few, delay(few)),
        about="delayed Nesterov alone",
    )
    yield Recipe(
        name="dynamic_alone",
        family="async_naive",
        cell=replace(size.server(few, NAIVE), dynamic=True),
        about="naive with dynamic local updates",
    )


def _crowds(size: Size) -> Iterator[Recipe]:
    """Yield other numbers of replicas."""
    in_step = {
        "parallel": size.parallel(size.replicas),
        "diloco": size.central(size.replicas, DILOCO),
        "noloco": size.pairs(size.replicas),
    }
    cells = {"async_delayed": size.delayed(size.few), "ours": size.ours(size.replicas), **in_step}
    for crowd in CROWDS:
        for family, cell in cells.items():
            if crowd != cell.replicas:
                yield Recipe(
                    name=f"{family}_of_{crowd}",
                    family=family,
                    cell=_crowd(cell, crowd),
                    about=f"{family} of {crowd} replicas",
                    seeds=3 if crowd == size.few else 1,
                )


def _crowd(cell: Cell, replicas: int) -> Cell:
    """Return a cell of another number of replicas; a delayed momentum waits for as many contributions."""
    period = replicas if cell.rule.period == cell.replicas > 1 else cell.rule.period
    return replace(cell, replicas=replicas, rule=replace(cell.rule, period=period))


def _ours(size: Size) -> Iterator[Recipe]:
    """Yield asynchronous gossip with one thing changed, and others at its rounds."""
    own = size.ours(size.replicas)
    gain, pull, delayed = Rule(beta=1.5), Rule(gamma=0.5), replace(NOLOCO, period=4)
    variants = {
        "none": (replace(own, speeds="none"), "on equal machines"),
        "float32": (replace(own, codec="float32"), "sent as float32"),
        "bfloat16": (replace(own, codec="bfloat16"), "sent as bfloat16"),
        "int8": (replace(own, codec="int8"), "sent as int8"),
        "int4": (replace(own, codec="int4"), "sent as int4"),
        "early": (replace(own, late_inner_steps=None), f"a round every {own.inner_steps} steps to the end"),
        "late": (_late(size), f"a round every {size.every} steps to the end"),
        "momentum": (replace(own, rule=NOLOCO), "outer momentum 0.5, gain 0.7"),
        "delayed": (replace(own, rule=delayed), "outer momentum 0.5 delayed over 4 contributions, gain 0.7"),
        "no_momentum": (replace(own, rule=Rule()), "plain averaging of the pair"),
        "gain": (replace(own, rule=gain), "gain 1.5, pull 1"),
        "pull": (replace(own, rule=pull), "gain 1, pull 0.5"),
        "in_step": (_paced(size.pairs(size.replicas, own.rule)), "but pairs in step, float32, no dynamic steps"),
    }
    for name, (cell, about) in variants.items():
        about = f"asynchronous gossip, {about}"
        seeds = None if name == "none" else 1
        yield Recipe(name=f"ours_{name}", family="ours", cell=cell, about=about, seeds=seeds)
    yield Recipe(
        name="ours_noloco_rule",
        family="noloco",
        cell=_with_noloco_rule(size, size.replicas),
        about="asynchronous rounds by NoLoCo's own rule",
        seeds=1,
    )
    # Who comes in step, with our steps between rounds. It does not say what asynchrony costs or gives: they have fewer
    # rounds in all, and neither codec nor dynamic steps. A rate tuned for rare rounds would be too low for often ones,
    # so the best of them is tuned at these rounds, and the others take its rate.
    for name, cell in (
        ("local_sgd", size.central(size.replicas, Rule())),
        ("diloco", size.central(size.replicas, DILOCO)),
        ("diloco_hb", size.central(size.replicas, DILOCO_HB)),
        ("noloco", size.pairs(size.replicas)),
    ):
        yield Recipe(
            name=f"{name}_paced",
            family="local_sgd_paced",
            cell=_paced(cell),
            about=f"{name} every {OURS.inner_steps} to {OURS.late_inner_steps} steps, float32, no dynamic steps",
            seeds=None if name == "local_sgd" else 1,
        )


def _plain(size: Size) -> Plain:
    """Return what `changes` changes."""
    own = size.ours(size.replicas)
    return Plain(
        ours=own,
        ours_float32=replace(own, codec="float32"),
        ours_late=_late(size),
        by_noloco_rule=_with_noloco_rule(size, size.replicas),
        noloco=size.pairs(size.replicas),
    )


def _late(size: Size) -> Cell:
    return replace(size.ours(size.replicas), inner_steps=size.every, late_inner_steps=None)


def _paced(cell: Cell) -> Cell:
    """Return a cell with the rounds of asynchronous gossip."""
    return replace(cell, inner_steps=OURS.inner_steps, late_inner_steps=OURS.late_inner_steps)


def _with_noloco_rule(size: Size, replicas: int) -> Cell:
    every = {"inner_steps": size.every, "late_inner_steps": None}
    return replace(size.ours(replicas), rule=NOLOCO, codec="float32", **every)
