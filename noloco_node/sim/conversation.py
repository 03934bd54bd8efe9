"""One end of a conversation in the simulation: whole messages, in order, and the same endings as over libp2p.

What one end posts stands in a queue (`flying`), and one timer for each entry lets the other end take the next. So the
order never depends on how the event loop breaks ties, and arrival times never fall: a late message holds up those
behind it, as on any reliable stream.

The same argument settles what a loss is. libp2p's streams are reliable and ordered, so one message in the middle cannot
be missing; what a volunteer sees of a bad line is a stream that breaks. A lost message therefore breaks its stream, at
both ends, one latency later. A duplicate is what a misbehaving relay or peer sends: the same message twice in a row.

`send` does not suspend while the line is free, for the real one does not either: the kernel takes a small message at
once. On a line with a bandwidth it returns when the transfer is through, and a sender who is cancelled before breaks
the stream: half a frame is out.

In fair weather an end posts straight to the event loop. All else (cuts, shared bandwidth, a draw of each message's
fate) is `Way`'s, which is made when first needed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from noloco_node.sim.way import Parcel, Way
from noloco_node.wire import Schema, Violation

if TYPE_CHECKING:
    from noloco_node.sim.network import MemoryNetwork


class Parting(NamedTuple):
    """What ends a conversation: `kind` None is the polite end."""

    kind: type[ConnectionError] | None
    text: str


_ENDED = Parting(None, "")


class Traffic:
    """Bytes that one peer sent and received about one topic."""

    __slots__ = ("received_bytes", "sent_bytes")

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0


class End:
    """One end of a conversation; implements `port.Conversation`."""

    __slots__ = (
        "_arrive",
        "_broken",
        "_hub",
        "_inbox",
        "_incoming",
        "_left",
        "_network",
        "_peer",
        "_peer_ended",
        "_silence",
        "_their_traffic",
        "_traffic",
        "_waiter",
        "_way",
        "flying",
        "me",
        "schema",
        "started",
        "task",
        "their_schema",
        "topic",
    )

    def __init__(self, network: MemoryNetwork, peer: str, topic: str, schema: Schema) -> None:
        self._network, self._hub = network, network.hub
        self.me, self._peer, self.topic, self.schema = network.peer_id, peer, topic, schema
        self._inbox: deque[Any] = deque()
        self.flying: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._broken: tuple[type[ConnectionError], str] | None = None
        self._peer_ended = self._left = self.started = False
        self._way: Way | None = None
        self._silence: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"End({self.me} with {self._peer} about {self.topic})"

    def join(self, other: End) -> None:
        """Connect with the other end; both must be told."""
        self._incoming, self._arrive = other.flying, other.land
        self.their_schema = other.schema
        self._traffic = self._network.traffic(self.topic)
        self._their_traffic = other._network.traffic(self.topic)
        self._network.ends[self] = None

    # What port.Conversation promises.

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: Any) -> None:
        """Hand one message over; see the module for when this suspends."""
        self._check()
        hub = self._hub
        size = hub.size_bytes(message, self.topic)
        hub.messages[message.__class__] += 1
        self._traffic.sent_bytes += size
        if hub.easy and self._way is None:
            self._their_traffic.received_bytes += size
            self._network.line.up.moved_bytes += size
            self.flying.append(message)
            asyncio.get_running_loop().call_later(hub.latency_s, self._arrive)
            return
        sent = self._slow_way().send(message, size)
        if sent is not None:
            try:
                await sent
            except asyncio.CancelledError:
                self._break_off("a message was cut short by its sender")
                raise
            self._check()

    async def receive(self) -> Any:
        """Return the next message."""
        while not self._inbox:
            self._check()
            if self._waiter is not None:
                raise RuntimeError(f"two tasks receive at once from {self!r}")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._inbox.popleft()
