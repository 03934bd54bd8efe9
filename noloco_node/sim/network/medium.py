"""What all peers of a simulation share: lines, latencies, losses, wrong messages, who is cut off, and the DHT.

`SimNetwork` adds the peers. Every draw comes from a generator of its purpose, in the order of events.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from noloco_node.sim.network.bandwidth import AccessLine, Link, LinkUse
from noloco_node.sim.network.corruption import Corruption, tensors_of
from noloco_node.sim.network.dht import SimDht
from noloco_node.sim.network.link_model import Access, NetworkConditions

HEAD_BYTES = 100
"""About what a message takes on the line beside its tensors."""
_UNNAMED_SIDE = -1
"""The side of the peers that no group of a partition names."""


def message_bytes(message: object, topic: str) -> int:
    """Return the bytes of a message's tensors as they are in memory, and of a header."""
    return HEAD_BYTES + sum(tensor.nbytes for tensor in tensors_of(message))


class Releasable(Protocol):
    """What holds messages back while nothing passes between two peers."""

    def release(self) -> None:
        """Let them go, if the two peers reach each other again."""


@dataclass(frozen=True, slots=True)
class MediumState:
    """What is asked for every message: made anew when conditions, lines or faults change."""

    has_cuts: bool
    """Whether nothing passes between some peers."""
    is_free: bool
    """Whether nothing keeps any message from being put in flight at once."""
    affected_share: float
    """Share of messages that are lost, late or doubled."""


class Medium:
    """Lines and faults; `size_bytes(message, topic)` says what a message takes on the line."""

    state: MediumState

    def __init__(self, conditions: NetworkConditions, seed: int, size_bytes: Callable[[Any, str], int]) -> None:
        self.size_bytes, self.dht = size_bytes, SimDht()
        self.failures: list[tuple[str, Exception]] = []
        """What handlers raised beside a `ConnectionError`, with the peer whose handler it was: bugs, as a rule."""
        self.counts: Counter[str] = Counter()
        self.message_counts: Counter[str] = Counter()
        self.fate_rng, self.corruption_rng = Random(f"{seed}|network|fate"), Random(f"{seed}|network|tamper")
        self.lag_rng, self._latency_rng = Random(f"{seed}|network|lag"), Random(f"{seed}|network|latency")
        self.held_outboxes: dict[Releasable, None] = {}
        """What holds messages back just now."""
        self._round_kind: str | None = None
        self._round_share: float | None = None
        self._lines: dict[str, AccessLine] = {}
        self._accesses: dict[str, Access] = {}
        self._limited: set[str] = set()
        self._silent: set[str] = set()
        self._sides: dict[str, int] | None = None
        self._corruptions: dict[str, deque[Corruption]] = {}
        self.conditions = conditions

    # How long a message takes.

    @property
    def conditions(self) -> NetworkConditions:
        """What all lines have in common; others may be set at any moment."""
        return self._conditions

    @conditions.setter
    def conditions(self, conditions: NetworkConditions) -> None:
        self._conditions = conditions
        self.draw_latency = conditions.latency.sampler(self._latency_rng)
        self._update_state()

    def round_trip_s(self) -> float:
        """Draw the time of a dial, or of a question to the DHT, and its answer."""
        conditions, late_s = self._conditions, 0.0
        if conditions.late and self.fate_rng.random() < conditions.late:
            self.counts["dials.late"] += 1
            late_s = conditions.late_s
        return self.draw_latency() + late_s + self.draw_latency()

    # The lines of the peers.

    def share_with_rounds(self, kind: str, share: float) -> None:
        """Let conversations about a topic of this kind have this share of every line, before there is any."""
        self._round_kind, self._round_share = kind, share

    def is_rounds(self, topic: str) -> bool:
        """Say whether a conversation belongs to a round."""
        return topic.partition("/")[0] == self._round_kind

    def set_access(self, peer: str, access: Access) -> None:
        """Give a peer another line; transfers under way take the new rates at once."""
        now_s = asyncio.get_running_loop().time()
        line = self.line(peer)
        self._accesses[peer] = access
        line.up.change(access.up_bytes_per_s, now_s)
        line.down.change(access.down_bytes_per_s, now_s)
        if min(line.up.rate, line.down.rate) < math.inf:
            self._limited.add(peer)
        else:
            self._limited.discard(peer)
        self._update_state()

    def dials_only(self, peer: str) -> bool:
        """Say whether nobody can open a stream to a peer."""
        access = self._accesses.get(peer)
        return access is not None and access.dials_only

    def line(self, peer: str) -> AccessLine:
        """Return a peer's line; it outlives the peer's restarts."""
        line = self._lines.get(peer)
        if line is None:
            now_s = asyncio.get_running_loop().time()
            share = self._round_share
            line = self._lines[peer] = AccessLine(Link(math.inf, now_s, share), Link(math.inf, now_s, share))
        return line

    def link_use(self, peer: str) -> tuple[LinkUse, LinkUse]:
        """Return the use of a peer's uplink and of its downlink since it came."""
        now_s = asyncio.get_running_loop().time()
        line = self.line(peer)
        return line.up.use(now_s), line.down.use(now_s)

    # Who cannot be reached.

    def is_cut(self, one: str, other: str) -> bool:
        """Say whether nothing passes between two peers."""
        return one in self._silent or other in self._silent or self.side(one) != self.side(other)

    def side(self, peer: str) -> int | None:
        """Return on which side of the partition a peer is; None when there is no partition."""
        return None if self._sides is None else self._sides.get(peer, _UNNAMED_SIDE)

    # Wrong messages, and those that broke.

    def corrupt(self, peer: str, how: Corruption, count: int = 1) -> None:
        """Let the next `count` messages with tensors that a peer sends arrive wrong."""
        self._corruptions.setdefault(peer, deque()).extend([how] * count)
        self._update_state()

    def is_corrupting(self, peer: str) -> bool:
        """Say whether some of the next messages of a peer are to arrive wrong."""
        return peer in self._corruptions

    def next_corruption(self, peer: str, message: Any) -> Corruption | None:
        """Take what is to be wrong with this message that a peer sends, if anything."""
        waiting = self._corruptions.get(peer)
        if waiting is None or not any(tensor.numel() for tensor in tensors_of(message)):
            return None
        how = waiting.popleft()
        if not waiting:
            del self._corruptions[peer]
            self._update_state()
        return how

    def count_break(self, kind: type[ConnectionError]) -> None:
        """Count one end of a conversation that broke."""
        given_up = kind is ConnectionAbortedError
        self.counts["conversations.given_up" if given_up else "conversations.broken"] += 1
        self.counts[f"lost.{kind.__name__}"] += 1

    def _update_state(self) -> None:
        conditions, has_cuts = self._conditions, bool(self._silent) or self._sides is not None
        self.state = MediumState(
            has_cuts=has_cuts,
            is_free=not (has_cuts or self._limited or self._corruptions),
            affected_share=1 - (1 - conditions.loss) * (1 - conditions.late) * (1 - conditions.duplicate),
        )
