"""theory.png: the four findings, measured points (bars from the smallest to the largest seed) on lines of theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

from noloco_node.charts import COLOURS, INK, QUIET, dress, new_figure, png, set_title
from research.theory.moments import MANY, Law, contraction, critical_gamma
from research.theory.noise import POLICIES, Bend
from research.theory.report import Spread
from research.theory.stable_range import DRAWN, Edge

BLUE, RED, GREEN, PINK, ORANGE, SKY = COLOURS
BY_ALPHA = {0.0: SKY, 0.3: GREEN, 0.5: BLUE, 0.7: ORANGE, 0.9: RED}
BY_POLICY = {"defer": BLUE, "solo after 4": GREEN, "solo at once": RED}


def picture(
    bends: Sequence[Bend],
    decays: dict[float, list[Spread]],
    growths: Sequence[tuple[int, Spread, float]],
    edges: Sequence[Edge],
) -> bytes:
    """Return the picture as a PNG."""
    figure = new_figure(11, 8.6)
    panels = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.075, right=0.975, top=0.885, bottom=0.07, hspace=0.36, wspace=0.2)
    figure.text(0.075, 0.962, "The outer rule against theory", fontsize=14, fontweight="bold", color=INK)
    subtitle = "points: the production rule on quadratic bowls, bars from smallest to largest of 5 seeds; lines: theory"
    figure.text(0.075, 0.936, subtitle, fontsize=10, color=QUIET)
    _draw_bends(panels[0][0], bends)
    _draw_decays(panels[0][1], decays)
    _draw_growths(panels[1][0], growths)
    _draw_edges(panels[1][1], edges)
    for panel in panels.flat:
        dress(panel)
        panel.xaxis.set_minor_formatter(NullFormatter())
    return png(figure)


def _points(panel: Axes, x: Sequence[float], found: Sequence[Spread], colour: str) -> None:
    means = [value.mean for value in found]
    bars = [[value.mean - value.low for value in found], [value.high - value.mean for value in found]]
    panel.errorbar(
        x,
        means,
        yerr=[[max(0.0, bar) for bar in side] for side in bars],
        fmt="o",
        color=colour,
        markersize=4.5,
        linewidth=1.2,
        capsize=2.5,
        zorder=4,
    )


def _draw_bends(panel: Axes, bends: Sequence[Bend]) -> None:
    reaches = [bend.reach for bend in bends]
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.plot(reaches, [bend.among_expected for bend in bends], color=BLUE, linewidth=1.4)
    _points(panel, reaches, [bend.among for bend in bends], BLUE)
    panel.plot(reaches, [bend.common_stationary for bend in bends], color=ORANGE, linewidth=1.4)
    first = bends[0]
    slope = [first.among_expected * (reach / first.reach) ** 2 for reach in reaches]
    panel.plot(reaches[:-3], slope[:-3], color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    panel.text(reaches[5] * 0.9, slope[5] * 2.0, "slope 2", color=QUIET, fontsize=9, ha="right")
    panel.text(0.013, first.among_expected * 45, "variance among replicas", color=BLUE, fontsize=9.5, va="top")
    label = "mean square of their mean,\nin the long run: slope 1"
    panel.text(0.3, bends[5].common_stationary * 0.3, label, color=ORANGE, fontsize=9.5, va="top")
    panel.set_xlabel("inner learning rate x curvature x inner steps a round", color=INK)
    set_title(panel, "a. Disagreement: the square of a small learning rate")


def _draw_decays(panel: Axes, decays: dict[float, list[Spread]]) -> None:
    panel.set_yscale("log")
    panel.set_ylim(1e-9, 100)
    panel.set_xlim(0, 41)
    panel.set_xticks(range(0, 31, 5))
    for alpha, course in decays.items():
        colour, rounds = BY_ALPHA[alpha], range(len(course))
        panel.plot(rounds, [value.mean for value in course], color=colour, linewidth=1.8)
        panel.fill_between(
            rounds,
            [value.low for value in course],
            [value.high for value in course],
            color=colour,
            alpha=0.25,
            linewidth=0,
        )
        factor, middle = contraction(Law(alpha=alpha)), 20
        line = [course[middle].mean * factor ** (number - middle) for number in rounds]
        panel.plot(rounds, line, color=INK, linewidth=0.9, linestyle=(0, (4, 4)), zorder=5)
        label, nudge = f"alpha {alpha:g}: {factor:.3f}", {0.0: 0.35, 0.3: 2.2}.get(alpha, 1.0)
        panel.text(len(course) - 0.4, course[-1].mean * nudge, label, color=colour, fontsize=9.5, va="center")
    panel.text(1, 3e-9, "dashed: the factor of the recursion", color=QUIET, fontsize=9)
    panel.set_xlabel("rounds", color=INK)
    set_title(panel, f"b. Variance among {DRAWN} replicas at gamma 0.7, by round")


def _draw_growths(panel: Axes, growths: Sequence[tuple[int, Spread, float]]) -> None:
    counts = [count for count, _, _ in growths]
    panel.set_xscale("log", base=2)
    panel.axhline(1.0, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    panel.plot(counts, [theory for _, _, theory in growths], color=ORANGE, linewidth=1.4)
    _points(panel, counts, [found for _, found, _ in growths], RED)
    panel.text(1024, 1.003, "above: diverges", color=QUIET, fontsize=9, ha="right", va="bottom")
    panel.text(5.2, 1.098, "mean square", color=ORANGE, fontsize=9.5)
    panel.set_ylim(0.89, 1.12)
    panel.text(9.5, 1.042, "a long run", color=RED, fontsize=9.5, va="top")
    panel.xaxis.set_major_locator(FixedLocator(counts))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.set_xlabel("replicas", color=INK)
    set_title(panel, "c. alpha 0.9 with gamma 0.7: growth of the variance a round")


def _draw_edges(panel: Axes, edges: Sequence[Edge]) -> None:
    grid = [number / 100 for number in range(61)]
    for alpha in (0.3, 0.5, 0.7):
        for policy, colour in BY_POLICY.items():
            law = Law(alpha=alpha, replicas=MANY, patience=POLICIES[policy])
            panel.plot(grid, [critical_gamma(replace(law, unmet=unmet)) for unmet in grid], color=colour, linewidth=1.2)
            mine = [edge for edge in edges if edge.alpha == alpha and edge.policy == policy and edge.unmet > 0.0]
            _points(panel, [edge.unmet for edge in mine], [edge.found for edge in mine], colour)
        met = [edge.found for edge in edges if edge.alpha == alpha and edge.unmet == 0.0]
        _points(panel, [0.0] * len(met), met, INK)
        panel.text(0.01, critical_gamma(Law(alpha=alpha)) + 0.03, f"alpha {alpha:g}", color=INK, fontsize=9.5)
    for policy, colour in BY_POLICY.items():
        law = Law(unmet=grid[-1], patience=POLICIES[policy])
        panel.text(0.61, critical_gamma(law), policy, color=colour, fontsize=9.5, va="center")
    panel.set_xlim(-0.02, 0.78)
    panel.set_ylim(0.6, 1.95)
    panel.set_xticks([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    panel.set_xlabel("chance that a pair is not met", color=INK)
    set_title(panel, "d. Critical gamma: deferral keeps it, solo steps lower it")
