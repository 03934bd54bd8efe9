"""What watches a simulation while it runs: `events.jsonl`, the progress on the standard error, and the page.

Progress and page look by the real clock; nothing in a simulation depends on them.
"""

from __future__ import annotations

import sys
import time
from typing import Any, BinaryIO

import msgspec
from rich.progress import Progress

from noloco_node.journal import events
from noloco_node.observe.journal_observer import JournalObserver
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.report.text import fault_words
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.world import Watcher, World
from noloco_node.terminal import DRAW_EVERY_S, Bar
from noloco_node.units import format_clock
from noloco_node.web.server import Page


class EventTrace(Watcher):
    """Writes what happens in a world."""

    def __init__(self, world: World, file: BinaryIO) -> None:
        self._world, self._file, self._encoder = world, file, msgspec.json.Encoder()

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        self._write({"node": peer.name, **events.fields_of(event)})

    def struck(self, fault: Fault) -> None:
        self._write({"event": "fault", "text": fault_words(fault), **msgspec.to_builtins(fault)})

    def _write(self, fields: dict[str, Any]) -> None:
        self._file.write(self._encoder.encode({**fields, "at": self._world.now_s}) + b"\n")


PLAIN_EVERY_S = 10.0
RATE_S = 30.0
"""The time left is estimated from the progress of so many last seconds."""


class ProgressBar(Watcher):
    """Shows how far a world is; the caller that opened the bar closes it."""

    def __init__(self, world: World, bar: Bar) -> None:
        self._world, self._bar = world, bar
        self._forecast = Progress(disable=True, speed_estimate_period=RATE_S)  # which draws nothing
        self._all = self._forecast.add_task("", total=1.0)
        self._begun_s = self._looked_s = self._printed_s = time.monotonic()

    def look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < DRAW_EVERY_S:
            return
        self._looked_s = now_s
        done = done_share(self._world)
        self._forecast.update(self._all, completed=done)
        left_s = self._forecast.tasks[0].time_remaining
        line = f"simulating: {progress_line(done, self._world.now_s, now_s - self._begun_s, left_s)}"
        if not self._bar.draw(done, line) and now_s - self._printed_s >= PLAIN_EVERY_S:
            self._printed_s = now_s
            print(line, file=sys.stderr, flush=True)


def done_share(world: World) -> float:
    """Return how much of a simulation is done, by its tokens or by its time, whichever is nearer its end."""
    return min(1.0, max(world.progress, world.now_s / world.setting.scenario.swarm.duration_s))


def progress_line(done: float, virtual_s: float, real_s: float, left_s: float | None) -> str:
    left = "" if left_s is None else f", about {format_clock(left_s)} left"
    speed = f"{virtual_s / real_s:,.1f} times real time" if real_s > 0.0 else "just begun"
    return f"{done:.0%}, virtual time {format_clock(virtual_s)}, {speed}{left}"


SHOW_EVERY_S = 0.1


class PageWatcher(Watcher):
    """Feeds a page."""

    def __init__(self, world: World, page: Page) -> None:
        self._world, self._page = world, page
        self._observer = JournalObserver(world.setting.scenario.name, (), world.setting.run)
        self._histories: dict[str, PeerHistory] = {}
        self._shown_s = float("-inf")

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        history = self._histories.get(peer.name)
        if history is None:
            history = self._histories[peer.name] = PeerHistory(peer.name, peer.stage or 0)
            self._observer.histories.append(history)
        history.gone = None
        self._observer.take(history, events.stamped(event, self._world.now_s))

    def struck(self, fault: Fault) -> None:
        history = self._histories.get(fault.peer) if isinstance(fault, faults.Crash) else None
        if history is not None:
            self._observer.note(history, "crashed", self._world.now_s)
        else:
            self._observer.tell("fault:", fault_words(fault), self._world.now_s)

    def look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = now_s
            self.show()

    def show(self) -> None:
        for name, history in self._histories.items():
            if history.finished is not None and self._world.progress < 1.0 and not self._world.peers[name].running:
                history.gone = "has left"  # a journal alone cannot tell it from one that still serves its weights
        self._page.show(self._observer.view(self._world.now_s))
