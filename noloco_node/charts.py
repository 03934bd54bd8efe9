"""Parts of all our charts: colours, the figure and its panels, and labels that do not overlap.

`new_figure` imports matplotlib, so that code that needs only a colour does not load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours that the colour-blind tell apart (Okabe and Ito)."""
INK, QUIET = "#222222", "#8a8a8a"
DPI = 150
LABEL_POINTS = 13  # height of one line of a label
SAME = 1e-6  # a gap below this is rounding


class Labelled(NamedTuple):
    """A label at the right edge of a panel, at this height."""

    height: float
    text: str
    colour: str


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Figure) -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def dress(panel: Axes) -> None:
    """Give a panel its quiet frame: two spines, short ticks, and lines across at the ticks of the height."""
    panel.grid(axis="y", color="#ececec", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=QUIET, labelsize=9, which="both", length=3)
    panel.tick_params(which="minor", length=0)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color("#c8c8c8")


def set_title(panel: Axes, text: str) -> None:
    panel.set_title(text, loc="left", fontsize=11, color=INK, pad=8)


def write_labels(panel: Axes, labels: Sequence[Labelled]) -> None:
    """Write each label right of a panel, as near to its height as the others allow."""
    to_axes = panel.transData + panel.transAxes.inverted()
    bottom, top = panel.get_ylim()
    ordered = sorted(labels)
    wanted = [float(to_axes.transform((0, min(max(each.height, bottom), top)))[1]) for each in ordered]
    heights = spread(wanted, LABEL_POINTS / (panel.bbox.height / DPI * 72))
    # Below the axis they would run into the last tick's.
    lift = max(0.0, -min(heights, default=0.0))
    for each, height in zip(ordered, heights, strict=True):
        panel.text(
            1.02, height + lift, each.text, transform=panel.transAxes, color=each.colour, fontsize=9, va="center"
        )


def spread(wanted: Sequence[float], distance: float) -> list[float]:
    """Return rising heights at least `distance` apart, nearest to the rising `wanted` ones in the mean square.

    Less `distance` times their number, the heights must only not fall: pooling neighbours that do is optimal.
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
