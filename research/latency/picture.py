"""latency.png: both claims beside the figures to be reproduced. Everything is labelled where it is drawn.

Left, the time of a tree all-reduce over that of a pair average, against the spread of the latencies; right, the total
time with a barrier over that with pairs, against the number of replicas. Lines and dots are measured, crosses are the
figures to be reproduced.
"""

from __future__ import annotations

from matplotlib.axes import Axes

from noloco_node.charts import COLOURS, INK, QUIET, Labelled, dress, new_figure, png, write_labels
from research.latency.paper import BLOCKING, TREE_OVER_PAIR
from research.latency.survey import Survey


def picture(survey: Survey) -> bytes:
    """Return the picture as a PNG."""
    figure = new_figure(11, 5.2)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.895, top=0.80, bottom=0.115, wspace=0.40)
    figure.text(0.06, 0.94, "What waiting for all costs", fontsize=14, fontweight="bold", color=INK)
    subtitle = "messages exchanged in virtual time (lines and dots) and the figures to be reproduced (crosses)"
    figure.text(0.06, 0.895, subtitle, fontsize=10, color=QUIET)
    _draw_trees(left, survey)
    _draw_blocking(right, survey)
    for panel in (left, right):
        dress(panel)
    return png(figure)


def _draw_trees(panel: Axes, survey: Survey) -> None:
    sizes = sorted({workers for _, workers in survey.rows("complete") if workers > 2})
    spreads = sorted({spread for spread, _ in survey.rows("complete")})
    labels = []
    for number, workers in enumerate(sizes):
        colour = COLOURS[number % len(COLOURS)]
        ratios = [survey.ratio("complete", spread, workers)[0] for spread in spreads]
        panel.plot(spreads, ratios, "o-", color=colour, linewidth=1.8, markersize=4)
        theirs = [TREE_OVER_PAIR[spread, workers] for spread in spreads]
        panel.plot(spreads, theirs, "x", color=INK, markersize=6, markeredgewidth=1.0, zorder=5)
        text = f"{workers} replicas" if workers == sizes[-1] else str(workers)
        labels.append(Labelled(ratios[-1], text, colour))
    panel.set_title("tree all-reduce over pair average, ratio of times", loc="left", fontsize=10, color=INK)
    panel.set_xlabel("standard deviation of a latency over its mean", color=INK)
    panel.set_xlim(-0.05, spreads[-1] + 0.05)
    panel.set_ylim(bottom=0)
    write_labels(panel, labels)


def _draw_blocking(panel: Axes, survey: Survey) -> None:
    cells = survey.rows("blocking")
    sizes = sorted({replicas for replicas, _ in cells})
    labels = []
    for number, inner_steps in enumerate(sorted({steps for _, steps in cells})):
        colour = COLOURS[number % len(COLOURS)]
        ratios = [survey.blocked(replicas, inner_steps, survey.scale.outer_steps) for replicas in sizes]
        panel.plot(sizes, ratios, "o-", color=colour, linewidth=1.8, markersize=4)
        theirs = [BLOCKING[replicas, inner_steps] for replicas in sizes]
        panel.plot(sizes, theirs, "x", color=INK, markersize=6, markeredgewidth=1.0, zorder=5)
        text = f"{inner_steps} inner steps" if number == 0 else str(inner_steps)
        labels.append(Labelled(ratios[-1], text, colour))
    panel.set_title("barrier over pairs that wait, ratio of total times", loc="left", fontsize=10, color=INK)
    panel.set_xlabel("replicas", color=INK)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.set_ylim(bottom=1.0)
    write_labels(panel, labels)
