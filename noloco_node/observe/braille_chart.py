"""A curve in braille characters: two by four dots in each cell of a terminal.

6.0 |⠢⡀
    | ⠈⠢⣀
2.1 |   ⠉⠒⠤⠤
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from rich.text import Text

from noloco_node.observe.peer_history import Point

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the dot in column x and row y of a braille cell; the code page begins at U+2800."""


class Series(NamedTuple):
    """Points with x from 0 to 1, in one colour."""

    points: Sequence[Point]
    style: str


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the mean over a twentieth of the points around each: windows are small and their losses noisy.

    Centred, so that the curve does not lag: at the start, where it is steep, over fewer points; at the end over those
    before.
    """
    count, places = len(points), np.arange(len(points))
    reach = max(1, count // 40)
    sums = np.cumsum([0.0, *(point.value for point in points)])
    first = places - np.minimum(reach, places)
    end = places + np.minimum(np.minimum(reach, places), count - 1 - places) + 1
    means = (sums[end] - sums[first]) / (end - first)
    return [Point(point.x, mean) for point, mean in zip(points, means.tolist(), strict=True)]


def chart(series: Sequence[Series], width: int, height: int) -> list[Text]:
    """Draw all series into `height` lines of `width` cells, the scale at the left included; it is logarithmic."""
    finite = [Series([point for point in one.points if 0 < point.value < math.inf], one.style) for one in series]
    drawn = [one for one in finite if one.points]
    if not drawn:
        return [Text() for _ in range(height)]
    values = [point.value for one in drawn for point in one.points]
    low, high = min(values), max(values)
    columns = max(1, width - 8)
    bits = [[0] * columns for _ in range(height)]
    styles = [[""] * columns for _ in range(height)]
    for one in drawn:
        for x, y in _dots(one.points, (2 * columns, 4 * height), (low, high)):
            bits[y // 4][x // 2] |= DOTS[x % 2][y % 4]
            styles[y // 4][x // 2] = one.style
    lines = []
    for row in range(height):
        scale = f"{high:6.2f} ┤" if row == 0 else f"{low:6.2f} ┤" if row == height - 1 else "       │"
        line = Text()
        line.append(scale, style="dim")
        for style, run in groupby(zip(styles[row], bits[row], strict=True), key=itemgetter(0)):
            line.append("".join(chr(0x2800 + cell) if cell else " " for _, cell in run), style=style)
        lines.append(line)
    return lines


def _dots(points: Sequence[Point], size: tuple[int, int], scale: tuple[float, float]) -> list[tuple[int, int]]:
    """Return the dots of a line through the points, one for each column that it crosses."""
    (width, height), (low, high) = size, scale
    x = (np.clip([point.x for point in points], 0, 1) * (width - 1)).astype(int)
    depth = 1 - np.log([point.value / low for point in points]) / max(math.log(high / low), 1e-6)
    columns = np.arange(x[0], x[-1] + 1)
    rows = np.interp(columns, x, depth * (height - 1)).round().astype(int)
    return list(zip(columns.tolist(), rows.tolist(), strict=True))
