"""One table of the laboratory, and the measures and comparisons that tables are made of.

A figure is mean ± standard deviation (number of seeds). An ordering that the papers report is said to hold, not to
hold, or to be undecided, computed from the figures beside it. Fewer than three seeds decide nothing. Nor does a
difference within one standard deviation of itself: not that one is better, and not that they are level either, unless
that deviation is as small as what counts as level, a hundredth of a nat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeGuard

from research.laboratory.experiments.cell import Result
from research.laboratory.running.results import Figure, Measured, perplexity

NOTHING = "-"
SEEDS = 3
"""Seeds below which a figure decides nothing."""
LEVEL = 0.01
"""Nats by which two losses may differ and be level."""
Comparison = Literal[
    "better than", "level with", "worse than", "within the error of", "on too few seeds to be compared with"
]
NO_WORSE: tuple[Comparison, ...] = ("better than", "level with")


class Table(NamedTuple):
    """One table. `says`: what it shows, in words. `missing`: recipes and seeds that it lacks. `texts`: how many of its
    columns, the first ones, hold words.
    """

    title: str
    says: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    missing: Sequence[str] = ()
    texts: int = 1

    def markdown(self) -> str:
        """Return the table with its title and words."""
        parts = [f"### {self.title}", self.says, aligned(self.header, self.rows, self.texts)]
        if self.missing:
            parts.append(f"Not run (yet): {', '.join(self.missing)}.")
        return "\n\n".join(part for part in parts if part)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return a Markdown table whose columns stand below each other; so many columns to the left, the others right."""
    widths = [max(3, *(len(row[column]) for row in (header, *rows))) for column in range(len(header))]
    rule = ["-" * width if column < texts else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join(
        f"| {' | '.join(_padded(row[column], widths[column], column < texts) for column in range(len(header)))} |"
        for row in (header, rule, *rows)
    )


def _padded(text: str, width: int, to_the_left: bool) -> str:
    return text.ljust(width) if to_the_left else text.rjust(width)


def shown(found: Figure | None, digits: int = 3, otherwise: str = NOTHING) -> str:
    """Return a figure as a table shows it."""
    if found is None:
        return NOTHING
    return found.text(digits) if math.isfinite(found.mean) else otherwise


def merged(result: Result) -> float:
    """Return the loss of the merged model, nats a token."""
    return result.merged


def single(result: Result) -> float:
    """Return the mean loss of single replicas, nats a token."""
    return result.single


def spread(result: Result) -> float:
    """Return the standard deviation of a weight among the replicas, in thousandths."""
    return 1e3 * result.spread


def ratio(mine: Result, other: Result) -> float:
    """Return the perplexity of single replicas over that of another method's."""
    return perplexity(mine.single - other.single)


def merged_ratio(mine: Result, other: Result) -> float:
    """Return the perplexity of a merged model over that of another method's."""
    return perplexity(mine.merged - other.merged)


def gap(mine: Result, other: Result) -> float:
    """Return how much higher the loss of the merged model is, nats a token."""
    return mine.merged - other.merged


def single_gap(mine: Result, other: Result) -> float:
    """Return how much higher the mean loss of single replicas is, nats a token."""
    return mine.single - other.single


def verdict(holds: bool) -> str:
    """Return whether a statement holds, in words."""
    return "holds" if holds else "does not hold"


def signed(found: Figure, digits: int = 3) -> str:
    """Return a difference with its sign and spread."""
    wide = "" if found.deviation is None else f" ± {found.deviation:.{digits}f}"
    return f"{found.mean:+.{digits}f}{wide}"


def apart(found: Figure) -> str:
    """Return a difference of losses with its sign, its spread and its seeds, in nats and as a factor of perplexity."""
    factor = perplexity(found.mean)
    wide = "" if found.deviation is None else f" ± {factor * found.deviation:.3f}"
    return f"{signed(found)} nats, perplexity times {factor:.3f}{wide}, {seeds(found)}"


def at_rounds(data: Measured, name: str, other: str) -> str:
    """Return that two recipes had different numbers of rounds, in words to go on with; nothing where they had not."""
    mine, others = (data.figure(one, lambda result: result.rounds) for one in (name, other))
    if mine is None or others is None or round(mine.mean) == round(others.mean):
        return ""
    return f", with {mine.mean:.0f} instead of {others.mean:.0f} rounds"


def seeds(found: Figure) -> str:
    """Return the number of seeds of a figure, in words."""
    return f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"


def is_enough(found: Figure | None) -> TypeGuard[Figure]:
    """Return whether a figure is there, on seeds enough to say something."""
    return found is not None and found.seeds >= SEEDS


def compared(found: Figure) -> Comparison:
    """Return what a difference of losses over seeds amounts to."""
    if not is_enough(found):
        return "on too few seeds to be compared with"
    if abs(found.mean) <= (found.deviation or 0.0) > LEVEL:
        return "within the error of"
    if abs(found.mean) <= LEVEL:
        return "level with"
    return "better than" if found.mean < 0.0 else "worse than"


def judged(found: Figure, *claimed: Comparison) -> str:
    """Return whether a difference of losses is one of these, in words; undecided where its seeds leave it open."""
    seen = compared(found)
    if seen == "on too few seeds to be compared with":
        return "is undecided on so few seeds"
    if seen == "within the error of":
        return "is undecided within the error"
    return verdict(seen in claimed)


def worst_end(data: Measured, names: Iterable[str]) -> float:
    """Return the highest loss at which any run of these recipes ends: a level that all of them reach."""
    ends = [result.merged for name in names for result in data.results(name) if math.isfinite(result.merged)]
    return max(ends, default=math.nan)


def best_of(data: Measured, names: Sequence[str]) -> str | None:
    """Return the recipe with the lowest loss of the merged model, over the seeds that all those with a result have.

    None where there is no such seed, or all diverged.
    """
    found = {name: {result.cell.seed: result.merged for result in data.results(name)} for name in names}
    found = {name: losses for name, losses in found.items() if losses}
    shared = set.intersection(*map(set, found.values())) if found else set()
    means = {name: sum(losses[seed] for seed in shared) for name, losses in found.items() if shared}
    finite = {name: value for name, value in means.items() if math.isfinite(value)}
    return min(finite, key=lambda name: finite[name]) if finite else None


def time_to(level: float) -> str:
    """Return the head of a column of virtual seconds to a loss."""
    return f"virtual s to {level:.3f}" if math.isfinite(level) else "virtual s to the same loss"
