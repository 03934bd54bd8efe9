"""What the two papers vary, and what they compare with: at the small scale, three seeds on which nothing was chosen.

NoLoCo (arXiv 2506.10911): the batch, alpha and gamma, rounds of other lengths, each with a rate of its own.
Asynchronous Local-SGD (2401.09135): the period of a delayed momentum at the same work, a grace period, late
pseudo-gradients that count less or are corrected, a start on synchronous training, shards of unlike text, machines of
other speeds.

Each family is tuned at the same three rates on seed 0 of the library's text, and reported on seeds 1 to 3 (`FIVE_SEEDS`
on 1 to 5). The synchronous mean and gossip have one rate, which the survey of rivals chose.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from research.laboratory.experiments.cell import Cell, Rule, Speeds
from research.laboratory.experiments.grid import Grid, Recipe
from research.laboratory.experiments.rivals import SIZE
from research.laboratory.experiments.sizes import DILOCO, DILOCO_HB, NAIVE, SPEEDS

RATES = (5e-3, 1e-2, 2e-2)
SEEDS, MOST_SEEDS = 3, 5
ALPHAS, GAMMAS = (0.0, 0.5, 0.9), (0.3, 0.7, 1.0)
OTHER_ROUNDS = (10, 40)
"""Inner steps between rounds, beside the 20 that all have."""
PERIODS = (2, 8, 16)
"""Of a delayed momentum, beside the 4 of as many workers."""
GRACE_S = (10.0, 40.0)
"""The fastest worker's round takes 28 seconds, the slowest's 123."""
STRENGTHS = (3.0, 30.0)
"""Of delay compensation: at the larger one the correction of a typical value is about a third of it."""
PRETRAINED = 0.27
"""Share of the tokens, as in the paper: 24,000 of 88,000 steps."""

NEARLY_EQUAL: Speeds = "nearly"
FIVE_SEEDS = (
    "diloco_of_4",
    *(f"{name}_{speeds}" for name in ("naive", "delayed") for speeds in ("none", NEARLY_EQUAL)),
)

Cells = dict[str, tuple[Cell, str]]


def sensitivity() -> Grid:
    """Return the survey."""
    return Grid(recipes=tuple(_recipes()), seeds=MOST_SEEDS, tried=RATES)


def heads() -> Cells:
    """Return the recipes at which families are tuned."""
    size = SIZE
    noloco, diloco = size.pairs(size.replicas), size.central(size.replicas, DILOCO_HB)
    cells = {
        "parallel": (size.parallel(size.replicas), "data parallel"),
        "noloco": (noloco, f"NoLoCo, every {size.every} steps"),
        "diloco_hb": (diloco, f"DiLoCo, heavy ball 0.3, every {size.every}"),
        "mean": (size.equal(size.replicas, Rule()), "a synchronous mean with all choices of gossip"),
        "gossip": (replace(size.ours(size.replicas), weighed=True), "asynchronous gossip, weighed means"),
        "diloco_of_4": (size.central(size.few, DILOCO), f"synchronous DiLoCo of 4, every {size.every}"),
        "naive": (size.server(size.few, NAIVE), "asynchronous, naive, 4 workers"),
        "delayed": (size.delayed(size.few), "delayed Nesterov with dynamic steps, 4 workers"),
    }
    for every in OTHER_ROUNDS:
        cells[f"noloco_every_{every}"] = (replace(noloco, inner_steps=every), f"NoLoCo, every {every}")
        cells[f"diloco_hb_every_{every}"] = (replace(diloco, inner_steps=every), f"DiLoCo, heavy ball, every {every}")
    return {name: (replace(cell, scale="small"), about) for name, (cell, about) in cells.items()}


def batches() -> Cells:
    """Return twice the batch, at as many steps: twice the tokens, as in NoLoCo's table 3."""
    return {
        f"{name}_batch_2": (replace(heads()[name][0], batch=2), f"{heads()[name][1]}, twice the batch")
        for name in ("parallel", "diloco_hb", "noloco")
    }


def rules() -> Cells:
    """Return NoLoCo with other momenta and pulls, its own rule excepted."""
    base = heads()["noloco"][0]
    return {
        f"noloco_{alpha:g}_{gamma:g}": (
            replace(base, rule=replace(base.rule, alpha=alpha, gamma=gamma)),
            f"NoLoCo, momentum {alpha:g}, pull {gamma:g}, stable below {2 * (1 - alpha**2):.2f}",
        )
        for alpha in ALPHAS
        for gamma in GAMMAS
        if (alpha, gamma) != (base.rule.alpha, base.rule.gamma)
    }


def waits() -> Cells:
    """Return what a server may do about late pseudo-gradients."""
    (naive, about), (delayed, also) = heads()["naive"], heads()["delayed"]
    changed: Cells = {
        f"naive_grace_{seconds:g}": (replace(naive, grace_s=seconds), f"{about}, a grace period of {seconds:g} s")
        for seconds in GRACE_S
    }
    changed["naive_poly"] = (replace(naive, discount="poly"), f"{about}, Poly")
    changed["naive_threshold"] = (replace(naive, discount="threshold"), f"{about}, PolyThres")
    for strength in STRENGTHS:
        said = f"{about}, delay compensation of {strength:g}"
        changed[f"naive_compensated_{strength:g}"] = (replace(naive, compensation=strength), said)
    for period in PERIODS:
        rule = replace(delayed.rule, period=period)
        changed[f"delayed_period_{period}"] = (replace(delayed, rule=rule), f"{also}, period {period}")
    return changed


def starts() -> Cells:
    """Return methods that begin with synchronous training."""
    said = f"{PRETRAINED:.0%} of the tokens trained data-parallel before"
    return {
        f"{name}_pretrained": (replace(heads()[name][0], common_start=PRETRAINED), f"{heads()[name][1]}, {said}")
        for name in ("diloco_of_4", "naive", "delayed")
    }


def sharded() -> Cells:
    """Return methods whose replicas draw from unlike parts of the text."""
    found: Cells = {}
    for name in ("naive", "delayed", "diloco_of_4", "noloco", "mean", "gossip"):
        cell, about = heads()[name]
        found[f"{name}_shards"] = (replace(cell, sharding="fixed"), f"{about}, each its own part of the text")
    for name in ("naive", "delayed"):
        cell, about = heads()[name]
        found[f"{name}_sampled"] = (replace(cell, sharding="sampled"), f"{about}, the part that is behind most")
    return found


def other_speeds() -> Cells:
    """Return the asynchronous methods on machines less unequal."""
    return {
        f"{name}_{speeds}": (replace(heads()[name][0], speeds=speeds), f"{heads()[name][1]}, inequality: {speeds}")
        for name in ("naive", "delayed")
        for speeds in (*SPEEDS[:-1], NEARLY_EQUAL)
    }


def _recipes() -> Iterator[Recipe]:
    for name, (cell, about) in heads().items():
        # What rounds so frequent want is known from the survey of rivals.
        tried = (1e-2,) if name in ("mean", "gossip") else ()
        seeds = _seeds(name)
        yield Recipe(name=name, family=name, cell=cell, about=about, first_seed=1, tried=tried, seeds=seeds)
    for cells in (batches(), rules(), waits(), starts(), sharded(), other_speeds()):
        for name, (cell, about) in cells.items():
            # The longest name of a head that it begins with.
            family = next(head for head in sorted(heads(), key=len, reverse=True) if name.startswith(head))
            yield Recipe(name=name, family=family, cell=cell, about=about, first_seed=1, seeds=_seeds(name))


def _seeds(name: str) -> int:
    return MOST_SEEDS if name in FIVE_SEEDS else SEEDS
