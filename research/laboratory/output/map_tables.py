"""The map in tables and a picture: where gossip is better than a mean over all, and where it is not.

A place is a combination of conditions, replicas and text. Perplexities there are compared seed by seed, as a ratio of
an opponent's to gossip's: above 1 gossip is better. Its ± is the standard error over seeds and over the parts of the
held-out text together, of one seed over the parts alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from gossip.settings import Format, OuterConfig
from noloco_node.charts import COLOURS, INK, QUIET, new_figure, png, set_title
from noloco_node.planning.bandwidth import round_bytes
from noloco_node.planning.expectation import MapLine, Versus
from research.laboratory.experiments.cell import Conditions, Line, Method, Point, Result
from research.laboratory.experiments.volunteer_grid import (
    CHURNS,
    HOURS,
    INEQUALITIES,
    LINES,
    METHODS,
    all_conditions,
    places,
    recipe_name,
)
from research.laboratory.experiments.volunteer_model import PARAMETERS_MEANT, line_bytes_per_s
from research.laboratory.output.table import NOTHING, Table
from research.laboratory.running.results import Measured, perplexity, spent_to

SEEDS = 5
"""Seeds below which a place decides nothing."""
CLEAR = 2.0
"""Standard errors beyond which a difference is one."""
OPPONENTS: dict[Method, str] = {"quorum_mean": "barrier", "late_mean": "nobody waits"}
WIDEST = 0.08
"""Nats at which the picture's colours are full."""


class Place(NamedTuple):
    """Where methods are compared."""

    conditions: Conditions
    replicas: int
    text: str

    def name(self, method: Method) -> str:
        """Return the recipe of a method here."""
        return recipe_name(method, self.conditions, self.replicas, self.text)


class Difference(NamedTuple):
    """Nats by which an opponent's loss is above gossip's, its standard error, and the seeds."""

    nats: float
    error: float
    seeds: int

    @property
    def is_decided(self) -> bool:
        """Whether there are enough seeds to decide something."""
        return self.seeds >= SEEDS

    @property
    def winner(self) -> str:
        """Which method is better, by this difference."""
        if not self.is_decided:
            return "undecided"
        if abs(self.nats) <= CLEAR * self.error:
            return "open"
        return "gossip" if self.nats > 0.0 else "mean"

    def ratio(self) -> str:
        """Return the ratio of perplexities, as a table shows it."""
        factor = perplexity(self.nats)
        return f"{factor:.3f} ± {factor * self.error:.3f}"


def difference(pairs: Sequence[tuple[Result, Result]]) -> Difference | None:
    """Return how far the first of each pair is above the second, None without pairs."""
    if not pairs:
        return None
    parts = [[one - other for one, other in zip(*map(_held_out, pair), strict=True)] for pair in pairs]
    found = [mean(one) for one in parts]
    text = mean(stdev(one) ** 2 / len(one) for one in parts)
    seeds = stdev(found) ** 2 / len(found) if len(found) > 1 else 0.0
    return Difference(mean(found), math.sqrt(text + seeds), len(found))


def _held_out(result: Result) -> tuple[float, ...]:
    return result.held_out


def pairs_of(data: Measured, place: Place, opponent: Method) -> list[tuple[Result, Result]]:
    """Return the runs of an opponent and of gossip at a place, seed by seed."""
    own = {result.cell.seed: result for result in data.results(place.name("gossip"))}
    return [(result, own[result.cell.seed]) for result in data.results(place.name(opponent)) if result.cell.seed in own]


def map_tables(data: Measured) -> list[Table]:
    """Return a table of each number of replicas and text that has results."""
    tables = []
    for replicas, text in dict.fromkeys((replicas, text) for replicas, text, _ in places()):
        rows = [row for conditions in all_conditions() if (row := _row(data, Place(conditions, replicas, text)))]
        if rows:
            tables.append(Table(f"{replicas} replicas, {TEXTS[text]}", "", HEADER, tuple(rows), (), 1))
    data.take_missing()
    return tables


TEXTS = {"library": "the standard library's text", "prose": "prose"}
HEADER = (
    "line",
    "slowest",
    "churn / h",
    "seeds",
    "gossip, nats",
    *(f"{words}: {what}" for words in OPPONENTS.values() for what in ("perplexity", "time", "bytes")),
    "better",
)


def _row(data: Measured, place: Place) -> tuple[str, ...] | None:
    found = {name: pairs_of(data, place, name) for name in METHODS if name != "gossip"}
    if not any(found.values()):
        return None
    own = data.results(place.name("gossip"))
    cells: list[str] = []
    compared = []
    for pairs in found.values():
        versus = difference(pairs)
        cells += [NOTHING] * 3 if versus is None else [versus.ratio(), *(_spent(pairs, of) for of in (_time, _sent))]
        compared.append(versus)
    conditions = place.conditions
    return (
        conditions.line,
        f"{conditions.inequality:g} x",
        f"{conditions.churn:.0%}",
        str(min(versus.seeds if versus else 0 for versus in compared)),
        f"{mean(result.merged for result in own):.4f}",
        *cells,
        verdict_of([versus for versus in compared if versus is not None]),
    )


def verdict_of(compared: Sequence[Difference]) -> str:
    """Return who is better at a place: gossip where it beats all, a mean where one beats gossip."""
    winners = [versus.winner for versus in compared]
    if "undecided" in winners or len(winners) < len(OPPONENTS):
        return "undecided"
    return "mean" if "mean" in winners else "gossip" if set(winners) == {"gossip"} else "open"


def _time(point: Point) -> float:
    return point.virtual_s


def _sent(point: Point) -> float:
    return point.sent_bytes


def _spent(pairs: Sequence[tuple[Result, Result]], of: Callable[[Point], float]) -> str:
    """Return what an opponent spends over what gossip does, until the worse of both has its last loss."""
    ratios = []
    for one, other in pairs:
        level = max(one.curve[-1].merged, other.curve[-1].merged)
        ratios.append(spent_to(one, level, of) / spent_to(other, level, of))
    return f"{mean(ratios):.2f}"


def planner_map(data: Measured) -> tuple[MapLine, ...]:
    """Return what a planner needs of the map: of the library's text, by replicas and in the order of the lines."""
    here: dict[tuple[int, Line], list[Place]] = {}
    for replicas, text, conditions in sorted(places(), key=lambda place: (place[0], LINES.index(place[2].line))):
        if text == "library":
            here.setdefault((replicas, conditions.line), []).append(Place(conditions, replicas, text))
    return tuple(_planner_line(data, replicas, line, found) for (replicas, line), found in here.items())


def _planner_line(data: Measured, replicas: int, line: Line, here: Sequence[Place]) -> MapLine:
    _, up_bytes_per_s = line_bytes_per_s(line)
    sent = round_bytes(OuterConfig(codec=Format.INT4), ((PARAMETERS_MEANT,),))
    return MapLine(
        replicas,
        round(3600.0 * HOURS * up_bytes_per_s / sent),
        len(here),
        *(_planner_versus([pairs_of(data, place, name) for place in here]) for name in OPPONENTS),
    )


def _planner_versus(places: Sequence[Sequence[tuple[Result, Result]]]) -> Versus:
    times = [float(_spent(pairs, _time)) for pairs in places]
    won = [found.winner for pairs in places if (found := difference(pairs)) is not None]
    return Versus(min(times), max(times), won.count("gossip"), won.count("mean"))


def said(data: Measured) -> str:
    """Return what the map says, in words computed from it."""
    verdicts: list[str] = []
    leads: list[float] = []
    winners = {name: list[str]() for name in OPPONENTS}
    for replicas, text, conditions in places():
        compared = []
        for name, won in winners.items():
            versus = difference(pairs_of(data, Place(conditions, replicas, text), name))
            if versus is not None:
                compared.append(versus)
                won.append(versus.winner)
        if len(compared) == len(OPPONENTS):
            verdicts.append(verdict_of(compared))
            leads.append(min(versus.nats for versus in compared))
    data.take_missing()
    count = {word: verdicts.count(word) for word in ("gossip", "mean", "open", "undecided")}
    alone = "; ".join(
        f"against *{OPPONENTS[name]}* gossip is better at {won.count('gossip')}, worse at {won.count('mean')}, and "
        f"{won.count('open')} stay open within {CLEAR:g} standard errors"
        for name, won in winners.items()
    )
    return (
        f"Of {len(places())} places {len(verdicts)} have run. Of those with {SEEDS} seeds, {alone}; gossip is better "
        f"than both at {count['gossip']}. By chance one place in twenty or so would not stay open. Places with fewer "
        f"seeds, which decide nothing: {count['undecided']}. Against the better of both means, whatever the seeds, "
        f"gossip's loss is lower at {sum(lead > 0.0 for lead in leads)} places and higher at "
        f"{sum(lead < 0.0 for lead in leads)}."
    )


# The picture.

_COLOURS = LinearSegmentedColormap.from_list("better", [COLOURS[1], "#ffffff", COLOURS[0]])


def map_picture(data: Measured) -> bytes:
    """Return the phase diagram as a PNG: a panel for each line and opponent, churn across, inequality up."""
    counts = [count for count in dict.fromkeys(replicas for replicas, _, _ in places()) if _has(data, count)]
    rows = [(count, opponent) for count in counts for opponent in METHODS if opponent != "gossip"]
    sheet = new_figure(13, 1.6 + 2.6 * max(1, len(rows)))
    height = sheet.get_figheight()
    sheet.subplots_adjust(
        left=0.08, right=0.985, top=1.0 - 1.35 / height, bottom=0.55 / height, hspace=0.55, wspace=0.12
    )
    sheet.text(0.08, 1.0 - 0.38 / height, "Where gossip is better than a mean over all", fontsize=14, fontweight="bold")
    words = (
        f"an opponent's loss less gossip's after {HOURS:g} virtual hours, in thousandths of a nat (± standard error): "
        f"blue, gossip is better; red, the mean is;\n"
        f"white: within {CLEAR:g} standard errors, or fewer than {SEEDS} seeds (in brackets), so nothing is decided"
    )
    sheet.text(0.08, 1.0 - 0.82 / height, words, fontsize=9, color=QUIET)
    panels = sheet.subplots(max(1, len(rows)), len(LINES), squeeze=False)
    for (count, opponent), row in zip(rows, panels, strict=False):
        for line, panel in zip(LINES, row, strict=True):
            _draw(panel, data, [Place(one, count, "library") for one in all_conditions() if one.line == line], opponent)
            stalls = ", stalls" if line == LINES[-1] else ""
            set_title(panel, f"{line} Mbit/s{stalls}")
        row[0].set_ylabel(f"{count} replicas,\n{OPPONENTS[opponent]}\nslowest machine", color=INK, fontsize=9)
        for panel in row[1:]:
            panel.set_yticklabels([])
    for panel in panels[-1]:
        panel.set_xlabel("departures of a peer an hour", color=INK, fontsize=9)
    return png(sheet)


def _has(data: Measured, count: int) -> bool:
    every = [Place(conditions, count, "library") for conditions in all_conditions()]
    return any(pairs_of(data, place, "quorum_mean") for place in every if place.name("gossip") in data.names)


def _draw(panel: Axes, data: Measured, some: Sequence[Place], opponent: Method) -> None:
    grid = [[math.nan] * len(CHURNS) for _ in INEQUALITIES]
    for place in some:
        if place.name(opponent) not in data.names:
            continue
        versus = difference(pairs_of(data, place, opponent))
        if versus is None:
            continue
        x, y = CHURNS.index(place.conditions.churn), INEQUALITIES.index(place.conditions.inequality)
        grid[y][x] = versus.nats if versus.winner in ("gossip", "mean") else 0.0
        text = f"{1e3 * versus.nats:+.0f} ± {1e3 * versus.error:.0f}"
        text += "" if versus.is_decided else f"\n({versus.seeds})"
        size = 8 if abs(versus.nats) < 1.0 else 6  # a number of four digits would reach into its neighbour's place
        panel.text(x, y, text, ha="center", va="center", fontsize=size, color=INK if versus.is_decided else "#666666")
    panel.imshow(grid, cmap=_COLOURS, vmin=-WIDEST, vmax=WIDEST, origin="lower", aspect="auto", alpha=0.75)
    panel.set_xticks(range(len(CHURNS)), [f"{churn:.0%}" for churn in CHURNS])
    panel.set_yticks(range(len(INEQUALITIES)), [f"{times:g} x" for times in INEQUALITIES])
    panel.tick_params(colors=QUIET, labelsize=9, length=0)
    for spine in panel.spines.values():
        spine.set_color("#c8c8c8")
