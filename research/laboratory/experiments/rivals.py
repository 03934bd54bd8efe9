"""Asynchronous gossip and its rivals on an equal footing: the same choices, the same budget of tuning, two texts.

Every family runs at the same rate, so none is tuned; with more of them in `RATES` each would be tuned at all of them,
on seed 0 and the library's text. The rivals of others have three settings each, of about the same bytes, of which the
best on that seed and text is `CHOSEN`. Shards are none of theirs, and stay at the four bits of gossip. What is reported
are seeds 1 to 3, on that text and on another one, on which nothing was chosen.

All cells are of the small scale: what one costs decides how many there can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from msgspec.structs import replace

from research.laboratory.experiments.cell import Cell, Codec, Corpus, Method, Rule
from research.laboratory.experiments.grid import Grid, Recipe
from research.laboratory.experiments.sizes import DILOCO_HB, EARLY, LATE, Size

RATES = (1e-2,)
SEEDS = 3
SIZE = Size(steps=160, every=20)
"""NoLoCo has as many rounds in a run as at the full scale."""
CHOSEN = {"streaming": 3, "sparse": 2, "epidemic": 1, "gasloc": 2, "shards": 1}
"""Which of its settings a rival of others is run with, from 1."""
CROWDED = ("mean", "diloco", "gossip_weighed")
"""What is run with more replicas too, on the library's text."""
MORE = (16, 32)
LATE_BY = 3
"""Inner steps: as late as the fastest machine's corrections are in asynchronous gossip."""
STREAMED = Rule(alpha=0.9, beta=0.4, lookahead=True)
"""The outer rule of Streaming DiLoCo."""


def rivals() -> Grid:
    """Return the survey of rivals."""
    return Grid(recipes=tuple(_recipes()), seeds=SEEDS, tried=RATES)


def heads() -> dict[str, tuple[Cell, str]]:
    """Return the methods that are compared, and what they are."""
    size = SIZE
    gossip, often = size.ours(size.replicas), f"every {EARLY} to {LATE} steps"
    cells = {
        "parallel": (size.parallel(size.replicas), "data parallel, a mean gradient every step"),
        "noloco": (size.pairs(size.replicas), "NoLoCo as published"),
        "mean": (
            size.equal(size.replicas, Rule()),
            f"a synchronous mean with all choices of gossip, {often}",
        ),
        "diloco": (
            size.equal(size.replicas, DILOCO_HB),
            f"DiLoCo, heavy ball 0.3, with all choices of gossip, {often}",
        ),
        "gossip": (gossip, "asynchronous gossip, plain means"),
        "gossip_weighed": (replace(gossip, weighed=True), "asynchronous gossip, means weighed by inner steps"),
        "gossip_fast_lines": (
            replace(gossip, weighed=True, slower_lines=1e-3),
            "the same on lines a thousand times as fast, 100 ms as before",
        ),
        "pairs_exact": (
            size.exact(size.replicas, 2, gossip.inner_steps, gossip.late_inner_steps),
            "weighed means of pairs in step, exact, rounds as gossip's",
        ),
        "pairs_late": (
            replace(size.exact(size.replicas, 2, gossip.inner_steps, gossip.late_inner_steps), overlap=LATE_BY),
            f"the same, each correction {LATE_BY} inner steps late",
        ),
        "fours_exact": (size.exact(size.replicas, 4, 6, 21), "weighed means of four in step, exact, every 6 to 21"),
    }
    chosen = {name: settings_of(name)[number - 1] for name, number in CHOSEN.items()}
    cells |= chosen | {"pairs_coded": (_in_step("shards"), "weighed means of pairs in step, int4, rounds as gossip's")}
    return {name: (replace(cell, scale="small"), about) for name, (cell, about) in cells.items()}


def settings_of(name: str) -> tuple[tuple[Cell, str], ...]:
    """Return the settings of a rival of others, and what they are."""
    return {
        "streaming": _streaming,
        "sparse": _sparse,
        "epidemic": _epidemic,
        "gasloc": _gasloc,
        "shards": _shards,
    }[name]()


def trials() -> dict[str, tuple[Cell, str]]:
    """Return all settings of all rivals of others, by name."""
    return {
        f"{name}_{number}": (replace(cell, scale="small"), about)
        for name in CHOSEN
        for number, (cell, about) in enumerate(settings_of(name), start=1)
    }


def _streaming() -> tuple[tuple[Cell, str], ...]:
    blank = replace(SIZE.equal(SIZE.replicas, Rule()), method="streaming", overlap=1, mixing=0.5)
    often = f"every {EARLY} to {LATE}, a step late, half mixed"
    return (
        (replace(blank, fragments=4, rule=STREAMED), f"Streaming DiLoCo, 4 fragments, its own outer rule, {often}"),
        (replace(blank, fragments=4), f"Streaming DiLoCo, 4 fragments, a plain outer mean, {often}"),
        (replace(blank, fragments=2, rule=DILOCO_HB), f"Streaming DiLoCo, 2 fragments, heavy ball 0.3, {often}"),
    )


def _sparse() -> tuple[tuple[Cell, str], ...]:
    blank = replace(SIZE.equal(SIZE.replicas, Rule()), codec="int2")
    every = {1 / 64: (1, None), 1 / 16: (3, 12), 1 / 8: (7, 24)}
    return tuple(
        (
            replace(blank, density=density, inner_steps=early, late_inner_steps=late),
            f"SparseLoCo, {density:.1%} of the values in 2 bits, every {f'{early} to {late}' if late else 'step'}",
        )
        for density, (early, late) in every.items()
    )


def _epidemic() -> tuple[tuple[Cell, str], ...]:
    every: tuple[tuple[int, Codec, int, int], ...] = ((1, "int4", 4, 16), (1, "int3", 3, 12), (2, "int4", 8, 28))
    return tuple(
        (
            replace(_in_step("epidemic"), pushes=pushes, codec=codec, inner_steps=early, late_inner_steps=late),
            f"epidemic learning, {pushes} pushed in {codec}, every {early} to {late}",
        )
        for pushes, codec, early, late in every
    )


def _gasloc() -> tuple[tuple[Cell, str], ...]:
    return tuple(
        (
            replace(_in_step("gasloc"), rule=Rule(alpha=momentum, beta=rate)),
            f"GASLoC in pairs, outer rate {rate:g}, momentum {momentum:g}, rounds as gossip's",
        )
        for rate, momentum in ((1.0, 0.2), (0.7, 0.3), (0.7, 0.5))
    )


def _shards() -> tuple[tuple[Cell, str], ...]:
    every: tuple[tuple[Codec, int, int], ...] = (("int4", 4, 16), ("int3", 3, 12), ("int2", 2, 8))
    return tuple(
        (
            replace(_in_step("shards"), fragments=4, codec=codec, inner_steps=early, late_inner_steps=late),
            f"a quarter of the weights at a time, each with its own partner, in step, {codec}, every {early} to {late}",
        )
        for codec, early, late in every
    )


def _in_step(method: Method) -> Cell:
    """Return a method with all choices of gossip, whose replicas wait for each other."""
    return replace(SIZE.ours(SIZE.replicas), method=method, weighed=True)


def _recipes() -> Iterator[Recipe]:
    for name, (cell, about) in heads().items():
        yield Recipe(name=name, family=name, cell=cell, about=about, first_seed=1)
        for text in get_args(Corpus)[1:]:
            other = replace(cell, text=text)
            yield Recipe(name=f"{name}_{text}", family=name, cell=other, about=f"{about}, {text}", first_seed=1)
    for name in CROWDED:
        cell, about = heads()[name]
        for count in MORE:
            crowd = replace(cell, replicas=count)
            yield Recipe(name=f"{name}_of_{count}", family=name, cell=crowd, about=about, first_seed=1)
    for name, (cell, about) in trials().items():
        yield Recipe(name=name, family=name, cell=cell, about=about, seeds=1)
