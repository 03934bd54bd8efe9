"""A view as text: a picture that fits the terminal, and plain lines; `LiveView` shows one view after the other.

A picture begins with what counts most: how far the run is, how fast, what holds it back. It leaves out from below what
does not fit; stages and peers that a person should look at come first.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Literal, Self, TypeAlias

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from noloco_node.observe.bottleneck import StageView
from noloco_node.observe.peer_history import Point
from noloco_node.observe.swarm_view import LONGEST_VIRTUAL_S, Change, GivenInAll, PeerView, SwarmView, plain
from noloco_node.swarm.shards import total
from noloco_node.units import format_clock, format_count, format_duration

STATE_STYLES = {"joining": "yellow", "catching up": "yellow", "training": "green", "finished": "blue", "gone": "red"}
WIDE, NARROW, NARROWEST = 110, 75, 60
"""Columns: from `WIDE` on a peer's partner and share of work, and a stage's gap, are shown too; below `NARROW` fewer
figures of a peer, and below `NARROWEST` no waits, for a figure that is cut tells another one."""
LEAST_CHART = 5  # lines below which a curve says nothing
MOST_CHART = 12
LEAST_WIDTH, LEAST_HEIGHT = 40, 10
PLAIN_EVERY_S = 5.0
Row: TypeAlias = dict[str, str | Text]  # of a table: its cells by the titles of their columns
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the dot in column x and row y of a braille cell; the code page begins at U+2800."""


def picture(view: SwarmView, width: int, height: int, footer: str = "") -> RenderableType:
    """Draw a view into `width` columns and at most `height` lines, a footer included."""
    below = footer.splitlines()
    width, height = max(LEAST_WIDTH, width), max(LEAST_HEIGHT, height) - len(below)
    top = _top(view, width, height)
    left = height - len(top)
    stages = _fitting_stages(view.stages, max(1, min(left // 2, left - 4) - 2))
    left -= len(stages) + 1 + (len(stages) < len(view.stages))
    changes = [] if left < 8 else _collapsed(view.changes)[-max(2, left // 5) :]
    left -= len(changes) + bool(changes)
    peers = fitting_peers(view.peers, left - 2) if left >= 2 else []
    left -= len(peers) + 1 + (len(peers) < len(view.peers)) if peers else 0
    parts: list[RenderableType] = [*top, _stage_table(stages, view, width)]
    if len(stages) < len(view.stages):
        parts.append(Text(f"  and {len(view.stages) - len(stages)} more stages", style="dim"))
    if peers:
        parts.append(_peer_table(peers, view, width))
        if len(peers) < len(view.peers):
            parts.append(Text(f"  and {len(view.peers) - len(peers)} more peers", style="dim"))
    if left - 1 >= LEAST_CHART and len(view.course) > 1:
        parts += _curve(view, width, min(MOST_CHART, left - 1))
    if changes:
        parts.append(Text("what happened", style="dim"))
        parts += [_fitted(change_line(change), width) for change in changes]
    return Group(*parts, *(_fitted(text, width) for text in below))


def line(view: SwarmView) -> str:
    loss = [] if view.loss is None else [f"loss {view.loss:.3f}"]
    loss += [] if view.held_out is None else [f"held-out loss {view.held_out:.3f}"]
    gap = [] if view.gap is None else [f"gap {view.gap:.2g}"]
    census = ", ".join(f"{each.stage}: {each.size}" for each in view.stages)
    parts = [f"{view.progress:.1%}", f"{view.tokens_per_s:,.0f} tokens/s", time_left(view), *loss, *gap]
    parts += [f"replicas by stage {census}", *filter(None, [view.trouble]), plain(view.bottleneck)]
    return f"{_clock(view.at)}  " + " | ".join(parts)


def lines(view: SwarmView) -> list[str]:
    """Return a view in plain lines: the swarm, each stage, and what peers wait for."""
    text = [f"{plain(view.name)}: {line(view)}"]
    for stage in view.stages:
        waits = f"; {stage.waiting} wait for {plain(stage.waits)}" if stage.waits else ""
        busy = "" if stage.busy is None else f", busy {stage.busy:.0%}"
        text.append(f"  stage {stage.stage}: {_replicas(stage)}{busy}, {stage.tokens_per_s:,.0f} tokens/s{waits}")
    waiting = [peer for peer in view.peers if peer.waits is not None]
    text += [f"  {plain(peer.name)} at stage {peer.stage}, waiting: {_waits(peer, view.at)}" for peer in waiting]
    return text


def change_line(change: Change) -> str:
    return f"{_clock(change.at)}  {plain(change.name)} {plain(change.text)}"


def _top(view: SwarmView, width: int, height: int) -> list[RenderableType]:
    run_id = f" ({view.run_id[:12]})" if view.run_id else ""
    there = total([stage.size for stage in view.stages])
    tokens = format_count(view.tokens)
    of = "" if view.budget_tokens is None else f" of {format_count(view.budget_tokens)}"
    figures = f"{view.progress:.1%}  {view.tokens_per_s:,.0f} tokens/s  {time_left(view)}"
    cells = max(4, min(60, width - len(figures) - 2))
    full = round(view.progress * cells)
    bar = Text("━" * full, style="green", no_wrap=True).append("━" * (cells - full), style="dim")
    bar.append(f"  {figures}", style="bold").truncate(width, overflow="ellipsis")
    facts = [f"{tokens}{of} tokens{_signed(view.given, width)}"]
    facts += [] if view.loss is None else [f"loss {view.loss:.3f}"]
    facts += [] if view.held_out is None else [f"held-out {view.held_out:.3f}"]
    facts += [] if view.gap is None else [f"gap {view.gap:.2g}"]
    facts.append(f"{there} peer{'s' * (there.peers != 1)}")
    said = [view.bottleneck] if view.trouble is None else [view.trouble, view.bottleneck]
    wrapped = [line for text in said for line in textwrap.wrap(plain(text), width)]
    heading = _fitted(f"{plain(view.name)}{run_id}  {_clock(view.at)}", width)
    heading.stylize("bold")
    quiet = _fitted(", ".join(facts), width)
    said_lines = [Text(words, style="bold yellow") for words in wrapped[: max(1, height // 6)]]
    return [heading, bar, quiet, *said_lines, Text()]


def _signed(given: GivenInAll, width: int) -> str:
    if not given.drawn:
        return ""
    if width < WIDE:
        return f" ({given.signed / given.drawn:.0%} signed)"
    return f" (receipts sign for {format_count(given.signed)} of {format_count(given.drawn)} claimed)"


def _stage_table(stages: Sequence[StageView], view: SwarmView, width: int) -> Table:
    alone = max((each.replicas for each in view.stages), default=0) > 1

    def row(stage: StageView) -> Row:
        style = "bold red" if not stage.training else "yellow" if alone and stage.replicas == 1 else ""
        waits = "" if stage.waits is None else f"{stage.waiting} of {stage.size}: {plain(stage.waits)}"
        return {
            "stage": str(stage.stage),
            "replicas": Text(_replicas(stage), style=style),
            view.busy_name: "" if stage.busy is None else _share(stage.busy),
            "tokens/s": f"{stage.tokens_per_s:,.0f}",
            "gap": "" if stage.gap is None else f"{stage.gap:.4f}",
            "wait for": Text(waits, style="dim"),
        }

    spared = {WIDE: ("gap",), NARROWEST: ("wait for",)}
    return _table(list(map(row, stages)), width, left=("replicas", view.busy_name, "wait for"), spared=spared)


def _peer_table(peers: Sequence[PeerView], view: SwarmView, width: int) -> Table:
    def row(peer: PeerView) -> Row:
        return {
            "peer": Text(plain(peer.name)),
            "stage": str(peer.stage),
            "state": Text(plain(peer.state), style=STATE_STYLES.get(peer.state, "dim")),
            "step": str(peer.inner_steps),
            "round": str(peer.round),
            "partner": Text(plain(peer.partner)),
            view.busy_name: "" if peer.busy is None else f"{peer.busy:.0%}",
            "gap": "" if peer.gap is None else f"{peer.gap:.4f}",
            "loss": "" if peer.loss is None else f"{peer.loss:.3f}",
            "tokens/s": f"{peer.tokens_per_s:,.0f}",
            "waits for": Text(_waits(peer, view.at), style="dim"),
        }

    spared = {WIDE: ("partner", view.busy_name), NARROW: ("step", "round", "gap", "loss"), NARROWEST: ("waits for",)}
    table = _table(list(map(row, peers)), width, left=("peer", "state", "waits for"), spared=spared)
    table.columns[0].max_width = 34 if width >= WIDE else 16 if width >= NARROWEST else 11
    return table


def _table(rows: Sequence[Row], width: int, *, left: Sequence[str], spared: Mapping[int, Sequence[str]]) -> Table:
    """Return a table of rows, whose last column takes what is left.

    `spared`: titles that it leaves out, by the width below which it does.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", width=width, pad_edge=False)
    left_out = {title for least, titles in spared.items() if width < least for title in titles}
    titles = [title for title in rows[0] if title not in left_out]
    for title in titles:
        justify: Literal["left", "right"] = "left" if title in left else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis")
    table.columns[-1].ratio = 1
    for row in rows:
        table.add_row(*(row[title] for title in titles))
    return table


def _fitting_stages(stages: Sequence[StageView], most: int) -> list[StageView]:
    """Return the stages to show, in order; if not all fit, first those with the fewest replicas that train."""
    if len(stages) <= most + 1:
        return list(stages)
    first = sorted(stages, key=lambda each: (each.training, -(each.busy or 0.0), -each.waiting, each.stage))[:most]
    return sorted(first, key=lambda each: each.stage)


def fitting_peers(peers: Sequence[PeerView], most: int) -> list[PeerView]:
    """Return the peers to show; if not all fit, first those that do not train and those that wait longest."""
    if len(peers) <= most + 1:
        return list(peers)
    late = sorted(peers, key=lambda peer: (peer.trains, peer.waits is None, peer.since or float("inf"), peer.stage))
    return late[:most]


def _collapsed(changes: Sequence[Change]) -> list[Change]:
    """Return changes, with equal ones in a row told once."""
    found: list[Change] = []
    for text, same in groupby(changes, key=lambda change: change.text):
        first, *others = same
        more = f" and {len(others)} more" if others else ""
        found.append(Change(at=first.at, name=f"{plain(first.name)}{more}:" if others else first.name, text=text))
    return found


def _curve(view: SwarmView, width: int, height: int) -> list[Text]:
    points = [Point(moment.progress, moment.loss) for moment in view.course if moment.loss is not None]
    if len(points) < 2:
        return []
    title = Text("loss, nats a token, over the run", style="dim")
    return [title, *chart(smoothed(points), min(100, width), height)]


def _share(share: float, cells: int = 8) -> Text:
    full = round(share * cells)
    style = "red" if share >= 0.9 else "green" if share >= 0.5 else "yellow"
    bar = Text("█" * full, style=style)
    return bar.append("░" * (cells - full), style="dim").append(f" {share:4.0%}")


def _replicas(stage: StageView) -> str:
    if not stage.replicas:
        return "nobody"
    others = stage.replicas - stage.training
    return f"{stage.size}" + (f" ({others} idle)" if others else "")


def _waits(peer: PeerView, at: float) -> str:
    if peer.waits is None:
        return ""
    since = "" if peer.since is None else f"{format_clock(at - peer.since)} "
    return since + plain(peer.waits)


def time_left(view: SwarmView) -> str:
    if view.progress >= 1.0 or view.left_s == 0.0:
        return "over"
    return "no estimate yet" if view.left_s is None else f"{format_duration(view.left_s)} left"


def _clock(at: float) -> str:
    if at < LONGEST_VIRTUAL_S:
        return format_clock(at)
    return time.strftime("%H:%M:%S", time.localtime(at))


def _fitted(words: str, width: int) -> Text:
    text = Text(words, no_wrap=True)
    text.truncate(width, overflow="ellipsis")
    return text


class LiveView:
    """A context that draws views and restores the terminal; one that cannot move its cursor gets lines.

    `whole_screen`: draw on the terminal's other screen, of which nothing stays; otherwise the last picture stays.
    `address`: of the page with the same view, told below each picture.
    """

    def __init__(self, console: Console, *, whole_screen: bool, address: str | None = None) -> None:
        self._console, self._whole_screen, self._address = console, whole_screen, address
        self._live = Live(console=console, auto_refresh=False, screen=whole_screen) if console.is_interactive else None
        self._plain_at = float("-inf")
        self._told: tuple[Change, ...] = ()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # a closed terminal needs no restoring
                self._live.stop()

    def show(self, view: SwarmView, footer: str = "") -> None:
        """Draw a view; without a terminal, print new changes and now and then a line."""
        if self._live is not None:
            width, height = self._console.size
            below = "\n".join(filter(None, (self._address and f"in a browser: {self._address}", footer)))
            # Below a picture that stays there is a line for the cursor.
            self._live.update(picture(view, width, height - (not self._whole_screen), below), refresh=True)
            return
        for change in view.changes:
            if change not in self._told:
                self._print(change_line(change))
        self._told = view.changes
        if view.at - self._plain_at >= PLAIN_EVERY_S:
            self._plain_at = view.at
            self._print(line(view))

    def _print(self, text: str) -> None:
        print(text, file=self._console.file, flush=True)  # as it is: a console has signs for some words


# The curve, in braille characters: two by four dots in each cell of a terminal.


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the mean over a twentieth of the points around each, because losses of small windows are noisy.

    The mean is centred, so that the curve does not lag; near the start and the end it takes fewer points.
    """
    count, places = len(points), np.arange(len(points))
    reach = max(1, count // 40)
    sums = np.cumsum([0.0, *(point.value for point in points)])
    first = places - np.minimum(reach, places)
    end = places + np.minimum(np.minimum(reach, places), count - 1 - places) + 1
    means = (sums[end] - sums[first]) / (end - first)
    return [Point(point.x, mean) for point, mean in zip(points, means.tolist(), strict=True)]


def chart(points: Sequence[Point], width: int, height: int) -> list[Text]:
    """Draw points with x from 0 to 1 into `height` lines of `width` cells, with a logarithmic scale at the left."""
    drawn = [point for point in points if 0 < point.value < math.inf]
    if not drawn:
        return [Text() for _ in range(height)]
    low, high = min(point.value for point in drawn), max(point.value for point in drawn)
    columns = max(1, width - 8)
    bits = [[0] * columns for _ in range(height)]
    x = (np.clip([point.x for point in drawn], 0, 1) * (2 * columns - 1)).astype(int)
    depth = 1 - np.log([point.value / low for point in drawn]) / max(math.log(high / low), 1e-6)
    across = np.arange(x[0], x[-1] + 1)
    down = np.interp(across, x, depth * (4 * height - 1)).round().astype(int)
    for column, row in zip(across.tolist(), down.tolist(), strict=True):
        bits[row // 4][column // 2] |= DOTS[column % 2][row % 4]
    scales = [f"{high:6.2f} ┤", *["       │"] * (height - 2), f"{low:6.2f} ┤"]
    curve = ("".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in bits)
    # A stranger may claim a loss of thirty digits: the scale is longer then, and the line no higher.
    return [
        Text.assemble((scale, "dim"), (cells, "cyan"), no_wrap=True, overflow="crop")
        for scale, cells in zip(scales, curve, strict=True)
    ]
