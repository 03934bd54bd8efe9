"""What all our charts share: colours, ink and labels that keep apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours that the colour-blind tell apart (Okabe and Ito)."""
INK, QUIET = "#222222", "#8a8a8a"
DPI = 150
LABEL_POINTS = 13
"""Height of one line of a label."""


class Labelled(NamedTuple):
    """Something to be named at the right edge of a panel, at this height."""

    height: float
    text: str
    colour: str


def spread(wanted: Sequence[float], distance: float) -> list[float]:
    """Return rising heights at least `distance` apart, nearest to the rising `wanted` ones in the mean square.

    Less the distance times their number, the heights need only not fall: pooling neighbours that do is optimal.
    """
    pools: list[list[float]] = []
    for number, height in enumerate(wanted):
        pools.append([height - number * distance])
        while len(pools) > 1 and _middle(pools[-2]) >= _middle(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [_middle(pool) for pool in pools for _ in pool]
    return [height + number * distance for number, height in enumerate(level)]


def _middle(pool: Sequence[float]) -> float:
    return sum(pool) / len(pool)


SAME = 1e-6
"""A gap below this is rounding."""
