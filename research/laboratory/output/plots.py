"""laboratory.png: loss per token and per virtual second, spread beside the learning rate, and what each change does.

Lines are means over seeds. Everything is labelled where it is drawn. What the record lacks is left out, what has too
few seeds to decide anything is marked, and so is who had fewer choices than asynchronous gossip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

from noloco_node.charts import COLOURS, INK, QUIET, Labelled, dress, new_figure, png, set_title, write_labels
from research.laboratory.experiments.cell import Point, Result
from research.laboratory.experiments.choices import lacking
from research.laboratory.output.table import SEEDS, gap, is_enough, merged
from research.laboratory.running.results import Measured, correlation, figure

BLUE, RED, GREEN, PINK, ORANGE, SKY = COLOURS
DRAWN = {
    "parallel": ("data parallel", INK),
    "mean_equal": ("synchronous mean", GREEN),
    "diloco_hb": ("DiLoCo, heavy ball", SKY),
    "noloco": ("NoLoCo", RED),
    "ours": ("asynchronous gossip", BLUE),
    "async_delayed": ("delayed Nesterov", ORANGE),
    "independent": ("independent", PINK),
}
FOLLOWED = ("noloco", "ours", "independent")
"""Whose spread is drawn."""
CHANGES = {
    "noloco": {
        "noloco_gamma_0": "gamma 0",
        "noloco_groups_4": "groups of 4",
        "noloco_groups_8": "groups of 8",
        "noloco_every_25": "a round every 25",
        "noloco_every_100": "a round every 100",
        "noloco_random_routes": "two stages, random routes",
        "noloco_fixed_routes": "two stages, fixed routes",
        "ours_noloco_rule": "asynchronous",
        "noloco_paced": "a round every 4 to 16",
    },
    "ours": {
        "ours_none": "equal speeds",
        "ours_float32": "float32",
        "ours_bfloat16": "bfloat16",
        "ours_int8": "int8",
        "ours_int4": "int4",
        "ours_early": "often to the end",
        "ours_late": "rarely from the start",
        "ours_momentum": "momentum 0.5, gain 0.7",
        "ours_delayed": "the same, delayed",
        "ours_no_momentum": "plain averaging",
        "ours_gain": "gain 1.5",
        "ours_pull": "pull 0.5",
    },
}
"""By what each is compared with, and as it is called beside it."""
LABEL_LETTERS = 28
LEVELS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.2, 2.5, 3.0, 3.5, 4.0, 5.0)


def picture(data: Measured) -> bytes:
    """Return the picture as a PNG."""
    sheet = new_figure(13, 9.6)
    panels = sheet.subplots(2, 2)
    sheet.subplots_adjust(left=0.055, right=0.85, top=0.86, bottom=0.08, hspace=0.3, wspace=0.54)
    sheet.text(0.055, 0.957, "The laboratory: both papers and asynchronous gossip", fontsize=14, fontweight="bold")
    sheet.text(0.055, 0.93, _subtitle(data), fontsize=10, color=QUIET)
    sheet.text(0.055, 0.907, _choices(data), fontsize=10, color=QUIET)
    _draw_courses(panels[0][0], data, lambda point: 100.0 * point.share)
    panels[0][0].set_xlabel("tokens, % of the budget", color=INK)
    set_title(panels[0][0], "a. Loss of the merged model, by tokens")
    _draw_courses(panels[0][1], data, lambda point: point.virtual_s)
    panels[0][1].set_xlabel("virtual seconds, on very unequal machines", color=INK)
    set_title(panels[0][1], "b. The same, by time")
    _draw_spreads(panels[1][0], data)
    _draw_changes(panels[1][1], data)
    for panel in panels.flat:
        dress(panel)
    panels[0][1].set_ylabel("")  # as beside it
    panels[1][1].tick_params(axis="y", length=0)
    return png(sheet)


def _subtitle(data: Measured) -> str:
    cells = [result.cell for name in DRAWN for result in _results(data, name)]
    if not cells:
        return "nothing is measured yet"
    replicas, steps = max(cell.replicas for cell in cells), max(cell.steps for cell in cells)
    seeds = len({cell.seed for cell in cells})
    return (
        f"0.4 million parameters, bytes of Python source; {replicas} replicas, {steps} inner steps each; "
        f"{seeds} seed{'s' if seeds > 1 else ''}; learning rates tuned for each family"
    )


def _choices(data: Measured) -> str:
    """Return what asynchronous gossip has that others among those drawn have not; nothing where all have the same."""
    names = [name for name in DRAWN if data.figure(name, merged) is not None]
    less = dict.fromkeys(choice for name in names for choice in lacking(data, name)) if "ours" in names else {}
    if not less:
        return ""
    lacks = f"lack its {', '.join(less)} or some of it: no order against asynchronous gossip follows"
    return f"all but the synchronous mean {lacks}" if "mean_equal" in names else f"others {lacks}"


def _course(results: Sequence[Result], across: Callable[[Point], float]) -> list[tuple[float, Point, float]]:
    """Return points of a curve: where, the point of the first seed, and the mean loss of all seeds."""
    curves = [result.curve for result in results]
    return [
        (mean(across(point) for point in points), points[0], mean(point.merged for point in points))
        for points in zip(*curves, strict=False)
    ]


def _results(data: Measured, name: str) -> list[Result]:
    """Return the runs of 8 replicas if there are any, else those as named."""
    names = (f"{name}_of_8", name)
    return next((data.results(one) for one in names if one in data.names), [])


def _draw_courses(panel: Axes, data: Measured, across: Callable[[Point], float]) -> None:
    panel.set_yscale("log")
    labels: list[Labelled] = []
    for name, (label, colour) in DRAWN.items():
        results = _results(data, name)
        course = [(x, y) for x, _, y in _course(results, across) if math.isfinite(y)]
        if not course:
            continue
        panel.plot(*zip(*course, strict=True), color=colour, linewidth=1.8, solid_capstyle="round")
        panel.plot(*course[-1], "o", color=colour, markersize=4, zorder=4)
        few = "" if len(results) >= SEEDS else f" ({len(results)})"
        labels.append(Labelled(course[-1][1], f"{label} {course[-1][1]:.3f}{few}", colour))
    panel.yaxis.set_major_locator(FixedLocator(LEVELS))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_ylabel("nats a token", color=INK)
    panel.set_xlim(left=0)
    write_labels(panel, labels)


def _draw_spreads(panel: Axes, data: Measured) -> None:
    labels: list[Labelled] = []
    rates: list[tuple[float, float]] = []
    top = 0.0
    for name in FOLLOWED:
        results = _results(data, name)
        # The last point follows a last round, the others do not.
        curves = [[point for point in result.curve if point.share < 1.0] for result in results]
        course = [
            (100.0 * points[0].share, 1e3 * mean(point.spread for point in points))
            for points in zip(*curves, strict=False)
        ]
        if len(course) < 2 or not all(math.isfinite(y) for _, y in course):
            continue
        label, colour = DRAWN[name]
        panel.plot(*zip(*course, strict=True), "o-", color=colour, linewidth=1.8, markersize=3.5)
        labels.append(Labelled(course[-1][1], f"{label}{_pearson(results)}", colour))
        top = max(top, *(y for _, y in course))
        rates = rates or [(100.0 * point.share, point.learning_rate) for point in curves[0]]
    if rates:
        peak = max(rate for _, rate in rates)
        panel.plot(
            [x for x, _ in rates],
            [top * rate / peak for _, rate in rates],
            color=QUIET,
            linewidth=1.2,
            linestyle=(0, (4, 3)),
            zorder=1,
        )
        labels.append(Labelled(top * rates[-1][1] / peak, "learning rate, scaled", QUIET))
    panel.set_xlim(0, 100)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("tokens, % of the budget", color=INK)
    panel.set_ylabel("standard deviation of a weight x 1000", color=INK)
    set_title(panel, "c. Spread among replicas beside the learning rate")
    write_labels(panel, labels)


def _pearson(results: Sequence[Result]) -> str:
    found = figure(correlation(result) for result in results)
    return f", r = {found.mean:.2f}" if found is not None and math.isfinite(found.mean) else ""


def _draw_changes(panel: Axes, data: Measured) -> None:
    rows = [
        (label, found, DRAWN[base][1])
        for base, names in CHANGES.items()
        for name, label in names.items()
        # What is the base itself, under another name, changes nothing.
        if name in data.names and not data.is_same(name, base)
        if (found := data.against(name, base, gap)) is not None and math.isfinite(found.mean)
    ]
    against = "NoLoCo (red) and asynchronous gossip (blue)"
    if not any("every" in label for label, _, _ in rows):
        # A small survey has few changes; it shows all its methods instead.
        against = "NoLoCo"
        rows = [
            (DRAWN.get(name, (fill(data.about(name), LABEL_LETTERS), ""))[0], found, DRAWN.get(name, ("", QUIET))[1])
            for name in data.names
            if name == "ours" or not ("ours" in data.names and data.is_same(name, "ours"))
            if name != "noloco" and (found := data.against(name, "noloco", gap)) is not None
            if math.isfinite(found.mean)
        ]
    for height, (_, found, colour) in enumerate(reversed(rows)):
        bar = None if found.deviation is None else [found.deviation]
        panel.errorbar(
            [found.mean],
            [height],
            xerr=bar,
            fmt="o",
            color=colour,
            markerfacecolor=colour if is_enough(found) else "white",
            markersize=5,
            linewidth=1.2,
            capsize=2.5,
        )
    panel.set_yticks(range(len(rows)), [label for label, _, _ in reversed(rows)])
    panel.yaxis.tick_right()
    panel.axvline(0.0, color=QUIET, linewidth=1.0, zorder=1)
    panel.grid(axis="both", color="#ececec", linewidth=0.8)
    panel.set_xlabel(
        f"nats against {against}: left is better\nhollow: fewer than {SEEDS} seeds, which decide nothing", color=INK
    )
    set_title(panel, "d. What each change does to the merged model" if "(" in against else "d. The merged models")
