"""What a person sees while the swarm trains: a table of the peers, a bar and the loss; or plain lines.

The view draws histories and decides nothing. `now` is unix time, as in the journals. On a terminal the picture is drawn
anew at each `show`; elsewhere a line comes every few seconds, and each says all that one needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noloco_node.demo.braille_chart import Series, chart, smoothed
from noloco_node.demo.peer_history import PeerHistory, Point, over_tokens
from noloco_node.run.peer_state import PeerState
from noloco_node.terminal import Forecast
from noloco_node.units import format_clock

PLAIN_EVERY_S = 5.0
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
STATE_STYLES = {"joining": "yellow", "catching up": "yellow", "training": "green", "finished": "blue", "gone": "red"}


class LiveView:
    """The live picture of a swarm; a context, so that the terminal is always given back."""

    def __init__(
        self, console: Console, heading: str, histories: Sequence[PeerHistory], budget_tokens: int, started_at: float
    ) -> None:
        self._console, self._heading, self._histories = console, heading, histories
        self._budget_tokens, self._started_at = budget_tokens, started_at
        self._forecast = Forecast()
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._plain_at = float("-inf")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, now: float) -> None:
        """Draw the histories as of `now`, or print a line if the last one is old."""
        if self._live is not None:
            self._live.update(self.picture(now), refresh=True)
        elif now - self._plain_at >= PLAIN_EVERY_S:
            self._plain_at = now
            self._console.print(self.line(now), soft_wrap=True, highlight=False, markup=False)

    def line(self, now: float) -> str:
        """Return the whole swarm in one plain line."""
        progress, speed, left_s = self._outlook(now)
        losses = [history.loss for history in self._histories if history.stage == 0 and history.loss is not None]
        parts = [
            f"[{format_clock(now - self._started_at)}] {progress:4.0%}",
            f"{speed:,.0f} tokens/s",
            "no estimate yet" if left_s is None else f"{format_clock(left_s)} left",
            *([f"loss {sum(losses) / len(losses):.3f}"] if losses else []),
            *(f"{history.name} {_plain_state(history, now)}" for history in self._histories),
        ]
        return " | ".join(parts)

    def picture(self, now: float) -> RenderableType:
        """Return the table, the bar and the curve as one renderable."""
        progress, speed, left_s = self._outlook(now)
        bar = Table.grid(padding=(0, 2))
        estimate = "estimating" if left_s is None else f"{format_clock(left_s)} left"
        bar.add_row(
            ProgressBar(total=1.0, completed=progress, width=max(10, min(60, self._console.width - 60))),
            Text(f"{progress:.0%}", style="bold"),
            Text(f"{speed:,.0f} tokens/s"),
            Text(f"{format_clock(now - self._started_at)} elapsed, {estimate}", style="dim"),
        )
        heading = Text(self._heading, style="bold")
        return Group(heading, Text(), self._table(now), Text(), bar, Text(), *self._curve())

    def _outlook(self, now: float) -> tuple[float, float, float | None]:
        sources = [history for history in self._histories if history.stage == 0]
        progress = min(1.0, sum(history.tokens for history in sources) / self._budget_tokens)
        if all(history.finished is not None for history in sources):  # what was in a partial window is in no inner step
            progress = 1.0
        speed = sum(history.tokens_per_s(now) for history in sources)
        return progress, speed, self._forecast.left_s(progress, now)

    def _table(self, now: float) -> Table:
        names = {history.peer: history.name for history in self._histories if history.peer}
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("peer")
        table.add_column("state", min_width=12)
        for title in ("step", "round", "partner", "gap", "loss", "tokens/s"):
            table.add_column(title, justify="right")
        table.add_column("waits for", overflow="ellipsis", no_wrap=True)
        for number, history in enumerate(self._histories):
            state = _state(history)
            waits = "" if history.waiting is None else f"{history.waiting}, {format_clock(now - history.since)}"
            waits = history.gone or waits
            partner = (
                "" if not history.round else "alone" if history.partner is None else names.get(history.partner, "?")
            )
            table.add_row(
                Text(history.name, style=_colour(number)),
                Text(state, style=STATE_STYLES.get(state, "dim")),
                str(history.steps),
                str(history.round),
                partner,
                "" if history.gap_last is None else f"{history.gap_last:.4f}",
                "" if history.loss is None else f"{history.loss:.3f}",
                f"{history.tokens_per_s(now):,.0f}",
                Text(waits, style="dim"),
            )
        return table

    def _curve(self) -> list[Text]:
        sources = [(number, history) for number, history in enumerate(self._histories) if history.stage == 0]
        if not any(history.losses.points for _, history in sources):
            return []
        series = [
            Series(
                [
                    Point(point.x / self._budget_tokens, point.value)
                    for point in smoothed(over_tokens(history.losses, self._histories))
                ],
                _colour(number),
            )
            for number, history in sources
        ]
        title = Text("training loss, nats a token, over the run ", style="dim")
        for number, history in sources:
            title.append(f" ● {history.name}", style=_colour(number))
        height = max(4, min(10, self._console.height - len(self._histories) - 9))
        return [title, *chart(series, min(100, self._console.width), height)]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _plain_state(history: PeerHistory, now: float) -> str:
    if history.finished is not None:
        return f"finished at step {history.steps}"
    if history.gone is not None:
        return history.gone
    if history.waiting is not None:
        return f"waits for {history.waiting} since {format_clock(now - history.since)}"
    if history.steps:
        return f"step {history.steps} round {history.round}"
    return _state(history)


def _state(history: PeerHistory) -> str:
    if history.finished is not None:
        return str(PeerState.FINISHED)
    if history.gone is not None:
        return "gone"
    if history.state is None:
        return str(PeerState.TRAINING) if history.steps else "starting"
    return str(history.state)
