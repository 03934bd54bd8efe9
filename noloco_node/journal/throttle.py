"""Keeps what strangers can cause at will from filling the journal: the first of a kind is told, of the rest how many.

Refusals, losses, violations and findings of spot checks are told one by one up to a number an hour for each peer and
kind; then whenever their count has doubled, with how many it has become since (`count`). So a flood of a million is
some dozens of lines, and pushes nothing else out. Lines that list peers name those that did most of the work, however
many names there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from noloco_node.journal import events
from noloco_node.tasks import loop_s

ONE_BY_ONE = 32
"""Refusals and losses by one peer of one kind; of violations the first alone."""
PERIOD_S = 3600.0
MOST_KINDS = 256
"""That are counted apart; the others, of many identities, together."""

MOST_HOPS = 32
"""Next hops in one line: 32 names are 2 KiB, 17 MB a day."""

_Throttled = events.RefusedMicrobatch | events.Lost | events.PeerViolation | events.SpotCheck


class JournalThrottle:
    """Hands events on to `record`, those of floods as counts."""

    def __init__(self, record: Callable[[events.Event], None]) -> None:
        self._record = record
        self._since_s = -math.inf
        self._counts: dict[tuple[object, ...], tuple[int, int]] = {}
        """Events of each kind in this period, and how many of them were told."""

    def __call__(self, event: events.Event) -> None:
        """Take an event."""
        if not isinstance(event, _Throttled):
            self._record(_of_most(event) if isinstance(event, events.Hops) else event)
            return
        if loop_s() - self._since_s >= PERIOD_S:
            self._since_s = loop_s()
            self._counts.clear()
        kind, most = _kind_of(event)
        if kind not in self._counts and len(self._counts) >= MOST_KINDS:
            kind = (type(event),)
        seen, told = self._counts.get(kind, (0, 0))
        seen += 1
        if seen <= most or seen >= 2 * told:
            self._record(msgspec.structs.replace(event, count=seen - told))
            told = seen
        self._counts[kind] = seen, told


def _of_most(hops: events.Hops) -> events.Hops:
    """Return the hops that returned most; the others as one sum. A name that returned nothing is left out."""
    worked = sorted((peer for peer, count in hops.counts.items() if count), key=lambda peer: -hops.counts[peer])
    listed = {peer: hops.counts[peer] for peer in worked[:MOST_HOPS]}
    return events.Hops(at=hops.at, counts=listed, others=sum(hops.counts.values()) - sum(listed.values()) + hops.others)


def _kind_of(event: _Throttled) -> tuple[tuple[object, ...], int]:
    match event:
        case events.RefusedMicrobatch():
            return (type(event), event.peer, event.reason, event.here), ONE_BY_ONE
        case events.Lost():
            return (type(event), event.peer, event.what), ONE_BY_ONE
        case events.PeerViolation():
            return (type(event), event.peer, event.topic), 1
        case events.SpotCheck():
            return (type(event), event.peer, event.finding), ONE_BY_ONE
