"""How far a simulation is, on the standard error: a bar on a terminal, elsewhere a line every ten seconds.

It looks when the world is looked at and speaks by the real clock; nothing in the simulation depends on it.
"""

from __future__ import annotations

import sys
import time

from noloco_node.sim.world import Watcher, World
from noloco_node.terminal import DRAW_EVERY_S, Bar, Forecast
from noloco_node.units import format_clock

PLAIN_EVERY_S = 10.0


class ProgressBar(Watcher):
    """Looks how far a world is; the bar is to be closed by whoever opened it."""

    def __init__(self, world: World, bar: Bar) -> None:
        self._world, self._bar, self._forecast = world, bar, Forecast()
        self._begun_s = self._looked_s = self._printed_s = time.monotonic()

    def look(self) -> None:
        """Say how far it is, if it is time to."""
        now_s = time.monotonic()
        if now_s - self._looked_s < DRAW_EVERY_S:
            return
        self._looked_s = now_s
        done = done_share(self._world)
        left_s = self._forecast.left_s(done, now_s)
        line = f"simulating: {progress_line(done, self._world.now_s, now_s - self._begun_s, left_s)}"
        if not self._bar.draw(done, line) and now_s - self._printed_s >= PLAIN_EVERY_S:
            self._printed_s = now_s
            print(line, file=sys.stderr, flush=True)


def done_share(world: World) -> float:
    """Return how much of a simulation is done, by its tokens or by its time, whichever is nearer its end."""
    return min(1.0, max(world.progress, world.now_s / world.setting.scenario.swarm.duration_s))


def progress_line(done: float, virtual_s: float, real_s: float, left_s: float | None) -> str:
    """Return one line on the state of a simulation."""
    left = "" if left_s is None else f", about {format_clock(left_s)} left"
    speed = f"{virtual_s / real_s:,.1f} times real time" if real_s > 0.0 else "just begun"
    return f"{done:.0%}, virtual time {format_clock(virtual_s)}, {speed}{left}"
