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

A message that nothing special happens to is put in flight at once: one timer. All else (cuts, shared bandwidth, what
befalls the few) is `Outbox`'s, which is made when first needed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from noloco_node.network.interface import VIOLATION_GRACE_S
from noloco_node.network.wire import Schema, Violation
from noloco_node.sim.network.outbox import EndOfStream, Outbox

if TYPE_CHECKING:
    from noloco_node.sim.network.peer_network import SimPeerNetwork

_ENDED = EndOfStream(None, "")


class StreamByteCounts:
    """Bytes that one peer sent and received about one topic."""

    __slots__ = ("received_bytes", "received_name", "sent_bytes", "sent_name")

    def __init__(self, topic: str) -> None:
        self.sent_bytes = self.received_bytes = 0
        # Statistics are asked for every few seconds.
        self.sent_name, self.received_name = f"bytes.sent.{topic}", f"bytes.received.{topic}"

    def __repr__(self) -> str:
        return f"Traffic({self.sent_bytes} bytes sent, {self.received_bytes} received)"


class StreamEnd:
    """One end of a conversation; implements `port.Conversation`."""

    # fmt: off
    __slots__ = (
        "_arrival_s", "_broken", "_flown_s", "_hub", "_inbox", "_incoming", "_left", "_network", "_peer", "_peer_ended",
        "_silence", "_started", "_task", "_their_line", "_their_traffic", "_traffic", "_waiter", "_way", "arrive",
        "flying", "me", "schema", "their_schema", "topic",
    )
    # fmt: on

    def __init__(self, network: SimPeerNetwork, peer: str, topic: str, schema: Schema) -> None:
        self._network, self._hub = network, network.hub
        self.me, self._peer, self.topic, self.schema = network.peer_id, peer, topic, schema
        self._inbox: list[Any] = []
        self.flying: list[Any] = []
        self._flown_s = self._arrival_s = -1.0
        self._waiter: asyncio.Future[None] | None = None
        self._broken: tuple[type[ConnectionError], str] | None = None
        self._peer_ended = self._left = self._started = False
        self._way: Outbox | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"End({self.me} with {self._peer} about {self.topic})"

    def join(self, other: StreamEnd) -> None:
        """Connect with the other end; both must be told."""
        self._incoming, self.arrive = other.flying, other._land
        self.their_schema, self._their_line = other.schema, other._network.line
        self._traffic = self._network.traffic(self.topic)
        self._their_traffic = other._network.traffic(self.topic)
        self._network.ends[self] = None

    # What port.Conversation promises.

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: Any) -> None:
        """Hand one message over; the module says when this suspends."""
        self._check()
        hub = self._hub
        size = hub.size_bytes(message, self.topic)
        hub.messages[self.schema.names[message.__class__]] += 1
        self._traffic.sent_bytes += size
        fate = hub.fates.random() if hub.strange else 1.0
        if fate >= hub.strange and self._is_free():
            self._network.line.up.moved_bytes += size
            self._their_line.down.moved_bytes += size
            self.fly(message, size)
            return
        sent = self._the_way().send(message, size, fate)
        if sent is not None:
            try:
                await sent
            except asyncio.CancelledError:
                self.break_off("a message was cut short by its sender")
                raise
            if self.is_over:
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
        return self._inbox.pop(0)

    def _check(self) -> None:
        if self._broken is not None:
            kind, text = self._broken
            raise kind(text)
        if self._left:
            raise ConnectionResetError(f"the conversation with {self._peer} is over")
        if self._peer_ended:
            raise ConnectionResetError(f"{self._peer} ended the conversation")

    # How it ends.

    def leave(self) -> None:
        """End politely: say END behind all that was sent; who leaves in the middle of a message breaks the stream."""
        if self._is_sending():
            self.break_off("the conversation was left while a message was being sent")
        elif not self.is_over:
            self._left = True
            self._inbox.clear()
            self._close()
            self._post(_ENDED)

    def fail(self, sentence: str) -> None:
        """End with an error that the other side gets to read, unless a message is being sent."""
        if self._is_sending():
            self.break_off(sentence)
        elif not self.is_over:
            self._left = True
            self._close()
            self._post(EndOfStream(ConnectionResetError, f"{self.me} ended with an error: {sentence}"))

    def break_off(self, why: str) -> None:
        """Break the stream: what has not left yet never will."""
        if not self.is_over:
            self._broken = (ConnectionResetError, why)
            self._close()
            self._cut_short()
            self._post(EndOfStream(ConnectionResetError, f"the stream with {self.me} broke"))

    def break_(self, kind: type[ConnectionError], text: str) -> None:
        """Note that the stream broke. A handler is cancelled, unless its caller has ended politely."""
        if self.is_over:
            self._cut_short()
        elif not self._peer_ended:
            self._broken = (kind, text)
            self._hub.note_break(kind)
            self._close()
            self._cut_short()
            if kind is Violation:
                # As in `libp2p.switchboard`: a handler that waits for that very message learns what it was.
                asyncio.get_running_loop().call_later(VIOLATION_GRACE_S, self.stop)
            else:
                self.stop()

    def die(self) -> None:
        """Break with everything, also where END waits for the line: this peer is no more."""
        if self.is_over:
            self._cut_short()
            self._post(EndOfStream(ConnectionResetError, f"the stream with {self.me} broke"))
        else:
            self.break_off("this peer was killed")
        self.stop()

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent or received any more at this end."""
        return self._left or self._broken is not None

    def _close(self) -> None:
        """Leave the books of those that are open."""
        self._network.ends.pop(self, None)
        self.note_cut(False)
        self._wake()

    def _cut_short(self) -> None:
        if self._way is not None:
            self._way.cut_short()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The handler that answers at this end.

    def begin(self, task: asyncio.Task[None]) -> None:
        """Note whom to cancel when the stream breaks."""
        self._task = task

    def note_started(self) -> None:
        """Note that the handler runs, and so will see its cancellation."""
        self._started = True

    def note_finished(self) -> None:
        """Note that nobody is to be cancelled any more."""
        self._task = None

    def stop(self) -> None:
        """Cancel the handler."""
        if self._task is not None:
            self._task.cancel()
            if not self._started:
                # A task that is cancelled before its first step never runs a line: it cannot sign itself off.
                self._task = None
                self._network.answering.pop(self, None)

    # Under way.

    def note_cut(self, cut: bool) -> None:
        """Count the silence from now on, if nothing passes any more; stop counting if it does."""
        if cut and self._silence is None:
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(self._hub.weather.silence_s, self._give_up, self._hub.weather.silence_s)
        elif not cut and self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def fly(self, content: Any, size_bytes: int = 0, late_s: float = 0.0) -> None:
        """Put a message, or a parting of no bytes, in flight: from now on it is sure to arrive."""
        loop = asyncio.get_running_loop()
        now_s = self._flown_s = loop.time()
        arrival_s = now_s + self._hub.draw_latency() + late_s
        if arrival_s < self._arrival_s:
            arrival_s = self._arrival_s
        self._arrival_s = arrival_s
        self._their_traffic.received_bytes += size_bytes
        self.flying.append(content)
        loop.call_at(arrival_s, self.arrive)

    def note_idle(self) -> None:
        """Note that all that was posted is in flight."""
        self._network.lingering.pop(self, None)

    def _give_up(self, silence_s: float) -> None:
        self._silence = None
        self.break_(ConnectionAbortedError, f"{self._peer} was silent for {silence_s:g} s")

    def _the_way(self) -> Outbox:
        if self._way is None:
            self._way = Outbox(self._hub, self, self._network.line.up, self._their_line.down)
        return self._way

    def _is_sending(self) -> bool:
        return self._way is not None and self._way.is_sending

    def _is_free(self) -> bool:
        """Say whether the next message can be put in flight at once."""
        return self._hub.free and (self._way is None or self._way.is_idle)

    def _post(self, parting: EndOfStream) -> None:
        """Tell the other end, unless it has left already."""
        if self._peer_ended:
            self._cut_short()
            self.arrive = _nowhere
        elif not self._is_free():
            way = self._the_way()
            way.post(parting)
            way.note_left()
            if not way.is_idle:
                self._network.lingering[self] = None
        elif parting.kind is None and self._is_setting_out():
            # END travels with the message that set out at this very moment, as the last bytes of a packet would.
            self.flying[-1] = EndOfStream(None, "", self.flying[-1])
        else:
            self.fly(parting)

    def _is_setting_out(self) -> bool:
        """Say whether the last thing in flight is a message that was sent at this very moment."""
        now_s = asyncio.get_running_loop().time()
        return self._flown_s == now_s and bool(self.flying) and self.flying[-1].__class__ is not EndOfStream

    def _land(self) -> None:
        """Take what arrives next."""
        content = self._incoming.pop(0)
        if content.__class__ is EndOfStream:
            if content.message is not None:
                self._take(content.message)
            self._part(content)
        else:
            self._take(content)

    def _take(self, message: Any) -> None:
        if not self._left and self._broken is None:
            self._inbox.append(message)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def _part(self, parting: EndOfStream) -> None:
        if parting.kind is None:
            self._peer_ended = True
            self._wake()
            if self._left:
                # Both are done: undo the ring of references, or every conversation is work for the garbage collector.
                self.arrive = _nowhere
        elif parting.kind is Violation and not self.is_over and not self._peer_ended:
            self._network.note_violation(self._peer)
            self.break_(Violation, parting.text)
            self._post(EndOfStream(ConnectionResetError, f"{self.me} ended with an error: {parting.text}"))
        else:
            self.break_(parting.kind, parting.text)


def _nowhere() -> None:
    """Take what arrives after both have left."""
