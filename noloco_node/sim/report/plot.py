"""swarm.png: a simulation at a glance: speed, work and gap over virtual time, and what the time went by with.

Made from the report alone. Faults are marked where they happened, in all panels that show time. Everything is labelled
where it is drawn, in colours that the colour-blind tell apart (`noloco_node.charts`).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, MultipleLocator, PercentFormatter

from noloco_node.charts import COLOURS, INK, QUIET, SAME, Labelled, dress, new_figure, png, write_labels
from noloco_node.observe.bottleneck import Cause
from noloco_node.sim.report.collector import Happened
from noloco_node.sim.report.figures import COMPUTING, UNSEEN, Report
from noloco_node.sim.report.text import bottleneck, rate_words, size_words
from noloco_node.sim.scenario.faults import kind_of
from noloco_node.units import format_clock

CAUSES = {
    COMPUTING: "#0072B2",
    Cause.MICROBATCHES: "#56B4E9",
    Cause.REPLIES: "#E69F00",
    Cause.WINDOW: "#F0E442",
    Cause.ROOM: "#D55E00",
    Cause.ROUTE: "#CC79A7",
    Cause.GOSSIP: "#009E73",
    Cause.JOINING: "#bdbdbd",
    Cause.ENDING: "#dedede",
    UNSEEN: "#f4f4f4",
}
MOST_LABELLED = 8
"""Stages that get a line each; of more, the lowest, the mean and the highest are drawn."""
MOST_BARS = 24
MOST_TICKS = 9
NEAR = 0.06
"""Part of the width within which faults share a label."""
MOST_LINES = 100
"""Faults beyond which not each has a line."""
WRAP = 118
FAULT = "#D55E00"


def picture(report: Report) -> bytes:
    bars = 0.4 + 0.28 * min(len(report.stages), MOST_BARS)
    sentence = _wrapped(bottleneck(report))
    head = 0.98 + 0.17 * sentence.count("\n")
    height = 6.05 + head + bars
    figure = new_figure(11, height)
    sides = {"left": 0.085, "right": 0.87}
    over_time = figure.add_gridspec(3, 1, **sides, top=1 - head / height, bottom=(bars + 1.2) / height, hspace=0.2)
    speed = figure.add_subplot(over_time[0])
    devices, gap = (figure.add_subplot(over_time[row], sharex=speed) for row in (1, 2))
    below = figure.add_gridspec(1, 1, **sides, top=(bars + 0.3) / height, bottom=0.3 / height)
    waits = figure.add_subplot(below[0])
    for panel in (speed, devices):
        panel.tick_params(labelbottom=False)
    figure.text(0.085, 1 - 0.35 / height, _heading(report), fontsize=14, fontweight="bold", color=INK, parse_math=False)
    figure.text(0.085, 1 - 0.45 / height, sentence, fontsize=9.5, color=QUIET, va="top", linespacing=1.3)
    _draw_speed(speed, report)
    _draw_stages(devices, report, [moment.devices for moment in report.course], 1.02)
    devices.yaxis.set_major_formatter(PercentFormatter(1.0))
    devices.set_ylabel("devices busy", color=INK)
    _draw_gap(gap, report)
    for panel in (speed, devices, gap):
        dress(panel)
        _mark_faults(panel, report, named=panel is speed)
        panel.set_xlim(0, report.course[-1].until_s)
        panel.xaxis.set_major_locator(MultipleLocator(_tick_s(report.course[-1].until_s)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_clock(seconds)))
    figure.align_ylabels([speed, devices, gap])
    gap.set_xlabel("virtual time", color=INK, labelpad=1)
    _draw_waits(waits, report)
    return png(figure)


def _heading(report: Report) -> str:
    return f"{report.scenario.name}: {size_words(report)}, {rate_words(report.tokens_per_s)} tokens/s"


def _tick_s(length_s: float) -> float:
    clock = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 4 * 3600, 12 * 3600)
    return next((each for each in clock if length_s / each <= MOST_TICKS), length_s / MOST_TICKS)


def _wrapped(text: str) -> str:
    """Break a text into lines, and no number from its unit."""
    return "\n".join(textwrap.wrap(re.sub(r"(?<=\d) s\b", "\u00a0s", text), WRAP))


def _draw_speed(panel: Axes, report: Report) -> None:
    edges = [0.0, *(moment.until_s for moment in report.course)]
    panel.stairs([moment.tokens_per_s for moment in report.course], edges, color=INK, linewidth=1.4)
    panel.axhline(report.tokens_per_s, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(EngFormatter(sep=""))
    panel.yaxis.set_major_locator(MaxNLocator(4))
    panel.set_ylabel("tokens/s", color=INK)
    write_labels(panel, [Labelled(report.tokens_per_s, f"mean {rate_words(report.tokens_per_s)}", QUIET)])


def _draw_stages(panel: Axes, report: Report, rows: Sequence[tuple[float | None, ...]], top: float | None) -> None:
    labels = []
    for name, colour, values in _curves(len(report.stages), rows):
        points = [(at_s, value) for at_s, value in zip(_middles(report), values, strict=True) if value is not None]
        if points:
            panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.5, solid_capstyle="round")
            labels.append(Labelled(median(value for _, value in points), name, colour))
    panel.set_ylim(0, top)
    write_labels(panel, labels)


def _curves(stages: int, rows: Sequence[tuple[float | None, ...]]) -> list[tuple[str, str, list[float | None]]]:
    if stages <= MOST_LABELLED:
        colours = (*COLOURS, INK, QUIET)
        return [(f"stage {number}", colours[number], [row[number] for row in rows]) for number in range(stages)]
    known = [[value for value in row if value is not None] for row in rows]
    return [
        ("highest stage", COLOURS[1], [max(values, default=None) for values in known]),
        ("mean of stages", INK, [sum(values) / len(values) if values else None for values in known]),
        ("lowest stage", COLOURS[0], [min(values, default=None) for values in known]),
    ]


def _middles(report: Report) -> list[float]:
    ends = [0.0, *(moment.until_s for moment in report.course)]
    return [(then + now) / 2 for then, now in pairwise(ends)]


def _draw_gap(panel: Axes, report: Report) -> None:
    panel.set_ylabel("gap", color=INK)
    found = [value for moment in report.course for value in moment.gap if value is not None]
    if max(found, default=0.0) < SAME:
        remark = "zero: after each round the replicas of a stage held the same slow weights" if found else "no round"
        panel.text(0.5, 0.5, remark, transform=panel.transAxes, ha="center", va="center", color=QUIET, fontsize=9)
        panel.set_yticks([])
        return
    _draw_stages(panel, report, [moment.gap for moment in report.course], None)
    panel.yaxis.set_major_locator(MaxNLocator(4))


def _draw_waits(panel: Axes, report: Report) -> None:
    stages = list(reversed(report.stages))
    left = [0.0] * len(stages)
    shown = [cause for cause in CAUSES if any(stage.time.get(cause, 0.0) > 0.002 for stage in stages)]
    for cause in shown:
        shares = [stage.time.get(cause, 0.0) for stage in stages]
        panel.barh(range(len(stages)), shares, left=left, color=CAUSES[cause], height=0.72, edgecolor="white")
        for number, share in enumerate(shares):
            if share >= 0.04 and len(stages) <= MOST_BARS:
                ink = "white" if cause in (COMPUTING, Cause.ROOM, Cause.GOSSIP) else INK
                middle = left[number] + share / 2
                panel.text(middle, number, f"{share:.0%}", ha="center", va="center", fontsize=8, color=ink)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    panel.set_yticks(range(len(stages)), [f"stage {stage.stage}" for stage in stages])
    panel.set_xlim(0, 1)
    panel.set_ylim(-0.5, len(stages) - 0.5)
    panel.xaxis.set_major_formatter(PercentFormatter(1.0))
    panel.tick_params(colors=QUIET, labelsize=9, length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)
    place = 0.0
    for cause in shown:
        for right, text, colour in ((0.0, "■", CAUSES[cause]), (0.016, str(cause), INK)):
            panel.text(place + right, 1.03, text, transform=panel.transAxes, va="bottom", fontsize=9, color=colour)
        place += 0.036 + 0.0082 * len(cause)


def _mark_faults(panel: Axes, report: Report, *, named: bool) -> None:
    """Draw a line at each fault; name the first of those that are close together, and count the others.

    Where faults are many, a line stands for all that are close together.
    """
    across, length_s = panel.get_xaxis_transform(), report.course[-1].until_s
    groups: list[list[Happened]] = []
    for each in report.happened:
        if groups and each.at_s - groups[-1][0].at_s < NEAR * length_s:
            groups[-1].append(each)
        else:
            groups.append([each])
    many = len(report.happened) > MOST_LINES
    for each in (group[0] for group in groups) if many else report.happened:
        panel.axvline(each.at_s, color=FAULT, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0)
    for group in groups if named else []:
        first = group[0]
        name = f"{kind_of(first.fault)} {getattr(first.fault, 'peer', '')}".strip()
        more = f" +{len(group) - 1}" if len(group) > 1 else ""
        panel.text(first.at_s, 1.03, name + more, transform=across, color=FAULT, fontsize=7.5, rotation=15)
