"""How far a simulation is, on the standard error: a bar on a terminal, elsewhere a line every ten seconds.

It looks when the world is looked at and speaks by the real clock; nothing in the simulation depends on it.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from noloco_node.journal import events
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.world import World
from noloco_node.terminal import Forecast
from noloco_node.units import format_clock

PLAIN_EVERY_S = 10.0
DRAW_EVERY_S = 0.2


class ProgressBar:
    """Watches worlds (`world.Watcher`), one after the other; a context, so that the terminal is always given back."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        columns = (TextColumn("simulating"), BarColumn(bar_width=16), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=1.0)
        self._world: World | None = None
        self._forecast = Forecast()
        self._begun_s = time.monotonic()
        self._spoke_s = self._begun_s
        self._lines = 0

    def __repr__(self) -> str:
        return f"Meter({self._lines} times)"

    def statistics(self) -> dict[str, int | float]:
        """Return how often it spoke."""
        return {"lines": self._lines}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def watch(self, world: World) -> Self:
        """Look at this world from now on."""
        self._world = world
        self._begun_s = self._spoke_s = time.monotonic()
        return self

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        """Events come too often to be shown."""

    def struck(self, fault: Fault) -> None:
        """Faults are in the report."""

    def look(self) -> None:
        """Say how far it is, if it is time to."""
        now_s = time.monotonic()
        every_s = DRAW_EVERY_S if self._console.is_terminal else PLAIN_EVERY_S
        if self._world is None or now_s - self._spoke_s < every_s:
            return
        self._spoke_s = now_s
        self._lines += 1
        done = done_share(self._world)
        line = progress_line(done, self._world.now_s, now_s - self._begun_s, self._forecast.left_s(done, now_s))
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, description=line, refresh=True)
        else:
            print(f"simulating: {line}", file=sys.stderr, flush=True)


def done_share(world: World) -> float:
    """Return how much of a simulation is done, by its tokens or by its time, whichever is nearer its end."""
    return min(1.0, max(world.progress, world.now_s / world.setting.scenario.swarm.duration_s))


def progress_line(done: float, virtual_s: float, real_s: float, left_s: float | None) -> str:
    """Return one line on the state of a simulation."""
    left = "" if left_s is None else f", about {format_clock(left_s)} left"
    speed = f"{virtual_s / real_s:,.1f} times real time" if real_s > 0.0 else "just begun"
    return f"{done:.0%}, virtual time {format_clock(virtual_s)}, {speed}{left}"
