"""A simulation as a page in a browser shows it, while it runs.

It is looked at by the real clock; nothing in the simulation depends on it.
"""

from __future__ import annotations

import time

from noloco_node.journal import events
from noloco_node.observe.journal_observer import JournalObserver
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.report.text import fault_words
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.world import Watcher, World
from noloco_node.web.server import Page

SHOW_EVERY_S = 0.1


class PageWatcher(Watcher):
    """Feeds a page."""

    def __init__(self, world: World, page: Page) -> None:
        self._world, self._page = world, page
        self._observer = JournalObserver(world.setting.scenario.name, (), world.setting.run)
        self._histories: dict[str, PeerHistory] = {}
        self._shown_s = float("-inf")

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        """Fold an event in."""
        history = self._histories.get(peer.name)
        if history is None:
            history = self._histories[peer.name] = PeerHistory(peer.name, peer.stage or 0)
            self._observer.histories.append(history)
        history.gone = None
        self._observer.take(history, events.stamped(event, self._world.now_s))

    def struck(self, fault: Fault) -> None:
        """Tell of a fault."""
        history = self._histories.get(fault.peer) if isinstance(fault, faults.Crash) else None
        if history is not None:
            self._observer.note(history, "crashed", self._world.now_s)
        else:
            self._observer.tell("fault:", fault_words(fault), self._world.now_s)

    def look(self) -> None:
        """Show the swarm, if the last time was long enough ago."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = now_s
            self.show()

    def show(self) -> None:
        """Show the swarm as it is now."""
        for name, history in self._histories.items():
            if history.finished is not None and self._world.progress < 1.0 and not self._world.peers[name].running:
                history.gone = "has left"  # a journal alone cannot tell it from one that still serves its weights
        self._page.show(self._observer.view(self._world.now_s))
