"""Slow weights that travelled ahead of a meeting: the next partner's that we hold, and ours that it was given.

Each is known by (peer, version), for slow weights are others after every outer step. At most one partner's copy is
held. Whether it is of use is found out in the meeting: the holder says which version it holds, and the owner, which
alone knows what it gave and by which steps it was coded, sends its slow weights unless it is the present one.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from gossip.exchange.messages import NOTHING
from gossip.rule.outer_step import Tensors


class PrefetchReceived(NamedTuple):
    """A partner's slow weights as decoded."""

    peer: str
    version: int
    slow: Tensors


class PrefetchSent(NamedTuple):
    """Who was given our slow weights, of which version, and the codec's steps for them."""

    peer: str
    version: int
    steps: tuple[float, ...]


class PrefetchCache:
    """What is held and what was given, and the bytes that travelled for it since the last outer step."""

    def __init__(self) -> None:
        self.held: PrefetchReceived | None = None
        self.given: PrefetchSent | None = None
        self.bytes_sent = self.bytes_received = 0
        self.swaps: Counter[str] = Counter()
        """How many have begun with each peer, whatever came of them."""

    def held_of(self, peer: str) -> PrefetchReceived | None:
        """Return what we hold of a peer."""
        return self.held if self.held is not None and self.held.peer == peer else None

    def holds(self, peer: str) -> int:
        """Return the version that we hold of a peer's slow weights."""
        held = self.held_of(peer)
        return NOTHING if held is None else held.version

    def given_to(self, peer: str, version: int, their_holds: int) -> tuple[float, ...] | None:
        """Return the steps of what a peer says it holds of ours, if it is this version; None where it must be sent."""
        given = self.given
        if given is None or their_holds != version or (given.peer, given.version) != (peer, version):
            return None
        return given.steps

    def clear(self) -> None:
        """Forget all, after an outer step: the versions are others now."""
        self.forget()
        self.bytes_sent = self.bytes_received = 0
        self.swaps.clear()

    def forget(self) -> None:
        """Let go of what is held, and of what was given: the two are of one swap, coded by the same steps."""
        self.held = self.given = None
