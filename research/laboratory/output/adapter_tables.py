"""Ways to train adapters in tables: each side's loss, and how far it is from the plain mean of A and B, seed by seed.

A difference has a 95 % interval over seeds and over the parts of the held-out text together, by Student's t with a
degree of freedom less than seeds. The corrected one is as wide as so many comparisons need (Bonferroni): all of the
page at once are right in 95 of 100 such pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import mean, stdev

from msgspec.structs import replace

from gossip.exchange.swap import PROBE
from noloco_node.planning.model_layout import model_layout
from research.laboratory.experiments.adapter_grid import PLACES, SIDES, Place, Side, recipe_name
from research.laboratory.experiments.cell import Cell, Result
from research.laboratory.experiments.task import run_of
from research.laboratory.output.map_tables import Difference, difference
from research.laboratory.output.table import NOTHING, Table
from research.laboratory.running.results import Measured

SEEDS = 5
"""Seeds below which nothing is decided."""
DEFAULT: Side = "mean"
CONTENDERS: tuple[Side, ...] = ("ffa", "ffa_wide", "alternating")
COMPARISONS = (len(SIDES) - 1) * len(PLACES)
SHARE = 0.05
"""Of pages in which an interval may be wrong."""
TEXTS = {"library": "the standard library's sources", "prose": "the reference's prose", "torch": "torch's sources"}
HEADER = (
    "side",
    "rate",
    "seeds",
    "loss, nats",
    "less the plain mean's",
    "95 %",
    f"of {COMPARISONS}",
    "apart",
    "meetings",
    "kB / meeting",
    "kB / step",
)


def student(share: float, free: int) -> float:
    """Return what Student's t with so many degrees of freedom exceeds, on both sides together, in this share of cases.

    By the finite sums for the probability within, which is bisected.
    """
    low, high = 0.0, 1.0
    while 1.0 - _within(high, free) > share:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if 1.0 - _within(middle, free) > share else (low, middle)
    return high


def paired(apart: Sequence[float]) -> str:
    """Return the mean of differences seed by seed, with its 95 % interval; nothing of fewer than two."""
    if len(apart) < 2:
        return NOTHING
    width = stdev(apart) / math.sqrt(len(apart)) * student(SHARE, len(apart) - 1)
    return f"{mean(apart):+.4f} ± {width:.4f}"


def _within(t: float, free: int) -> float:
    angle = math.atan(t / math.sqrt(free))
    odd, cosine = free % 2, math.cos(angle)
    term = total = cosine if odd else 1.0
    for power in range(2 + odd, free - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    if not odd:
        return math.sin(angle) * total
    return (angle + (math.sin(angle) * total if free > 1 else 0.0)) * 2.0 / math.pi


def differs(found: Difference | None, comparisons: int = COMPARISONS) -> bool | None:
    """Return whether a corrected interval excludes 0; None where there are too few seeds, or no figures."""
    if found is None or found.seeds < SEEDS or not math.isfinite(found.nats):
        return None
    return abs(found.nats) > found.error * student(SHARE / comparisons, found.seeds - 1)


def less_default(data: Measured, side: Side, place: Place) -> Difference | None:
    """Return how far the loss of a side is above the plain mean's, over the seeds that both have."""
    default = {result.cell.seed: result for result in data.results(recipe_name(DEFAULT, place))}
    own = data.results(recipe_name(side, place))
    return difference([(each, default[each.cell.seed]) for each in own if each.cell.seed in default])


def adapter_tables(data: Measured) -> list[Table]:
    """Return a table of each place that has results, and one of the tuning."""
    tables = []
    for place in PLACES:
        rows = [_row(data, side, place) for side in SIDES if data.results(recipe_name(side, place))]
        if rows:
            title = f"A base of {TEXTS[place.base]}, adapters of {TEXTS[place.text]}"
            tables.append(Table(title, _before(data, place), HEADER, tuple(rows), data.take_missing()))
    return [*tables, tuning_table(data, "side", SIDES.items())]


def tuning_table(data: Measured, heading: str, families: Iterable[tuple[str, str]]) -> Table:
    """Return the losses by which the rate of each family was chosen. `families`: each with its row's name."""
    tuned = [(said, data.tuned(family)) for family, said in families]
    rates = sorted({rate for _, found in tuned for rate in found})
    rows = [(said, *(_loss(found.get(rate)) for rate in rates)) for said, found in tuned]
    return Table("Tuning: loss by learning rate", "", (heading, *(f"{rate:g}" for rate in rates)), tuple(rows))


def _before(data: Measured, place: Place) -> str:
    before = [result.notes["before"] for result in data.results(recipe_name(DEFAULT, place))]
    return f"Without adapters the bases have {mean(before):.3f} nats here." if before else ""


def _row(data: Measured, side: Side, place: Place) -> tuple[str, ...]:
    name = recipe_name(side, place)
    results, versus = data.results(name), less_default(data, side, place)
    losses = [result.merged for result in results]
    compared: tuple[str, ...] = (NOTHING,) * 3
    if side != DEFAULT and versus is not None and versus.seeds > 1 and math.isfinite(versus.nats):
        widths = [versus.error * student(share, versus.seeds - 1) for share in (SHARE, SHARE / COMPARISONS)]
        compared = (f"{versus.nats:+.4f}", *(f"± {width:.4f}" for width in widths))
    return (
        SIDES[side],
        data.rate(name).partition(" ")[0],
        str(len(results)),
        _interval(losses),
        *compared,
        f"{mean(result.notes['mean_of_products'] for result in results):.1%}",
        f"{mean(result.rounds for result in results):.1f}" if sent(results[0]) else NOTHING,
        *(_kilobytes(results) if sent(results[0]) else (NOTHING, NOTHING)),
    )


def _interval(losses: Sequence[float]) -> str:
    if not all(map(math.isfinite, losses)):
        return "diverged"
    if len(losses) < 2:
        return f"{losses[0]:.4f}"
    width = stdev(losses) / math.sqrt(len(losses)) * student(SHARE, len(losses) - 1)
    return f"{mean(losses):.4f} ± {width:.4f}"


def _loss(result: Result | None) -> str:
    return NOTHING if result is None else f"{result.merged:.4f}"


def sent(result: Result) -> float:
    """Return the bytes that a replica has sent in a run, but for the probes of its meetings.

    Probes are of as many coordinates, however large a model is; beside these adapters they would be most.
    """
    probes = 2 * 4 * min(PROBE, trained(result.cell)) * result.rounds if result.cell.method == "gossip" else 0.0
    return result.bytes_per_step * sum(result.steps_taken) / result.cell.replicas - probes


def trained(cell: Cell) -> int:
    """Return how many weights a cell trains."""
    return _trained(replace(cell, seed=0))


@cache
def _trained(cell: Cell) -> int:
    return sum(math.prod(shape) for stage in model_layout(run_of(cell)).shapes for shape in stage.values())


def _kilobytes(results: Sequence[Result]) -> tuple[str, str]:
    met = mean(sent(result) / result.rounds for result in results)
    step = mean(sent(result) / result.cell.steps for result in results)
    return f"{met / 1e3:.1f}", f"{step / 1e3:.2f}"


def said(data: Measured) -> str:
    """Return what came out, in words computed from the figures."""
    sentences, better = [], []
    for side in SIDES:
        if side == DEFAULT:
            continue
        words = []
        for place in PLACES:
            versus = less_default(data, side, place)
            clear = differs(versus)
            if versus is None or clear is None:
                words.append("undecided")
            else:
                words.append(("worse" if versus.nats > 0.0 else "better") if clear else "open")
        sentences.append(f"*{SIDES[side]}*: {words[0] if len(set(words)) == 1 else ', '.join(words)}.")
        if side in CONTENDERS and set(words) == {"better"}:
            better.append(SIDES[side])
    data.take_missing()
    verdict = f"Clearly better on both texts: {', '.join(better)}." if better else "The plain mean stays the default."
    return (
        f"Beside gossip with the plain mean of A and B, by corrected intervals, on both texts (or the first, the "
        f"second): {' '.join(sentences)} {verdict}"
    )
