"""One end of a conversation in the simulation: whole messages, in order, and the same endings as over libp2p.

What one end sends stands in a queue, and one timer for each entry lets the other end take the next: arrival times never
fall, and a late message holds up those behind it. A lost message breaks its stream at both ends, one latency later, as
on libp2p's reliable streams. A duplicate is the same message twice in a row, as a misbehaving peer sends it.

`send` does not suspend while the line is free. On a line with a bandwidth it returns when the transfer is through, and
a sender who is cancelled before breaks the stream: half a frame is out. A message that nothing special happens to is
put in flight at once; all else is the `Outbox`'s, which is made when first needed.

**Outbox.** Each message meets its fate when it is sent: lost, late, doubled, corrupted, or nothing. Then the messages
of a stream are transferred one after the other, each sharing the links of both peers with other streams. While nothing
passes between two peers, messages are held back; they leave when the peers reach each other again, and are dropped when
the stream breaks, or after `SILENCE_S` if it has been left.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from noloco_node.network import wire
from noloco_node.network.calls import stop_handler
from noloco_node.network.interface import ConversationEnded, Pace
from noloco_node.network.schema import Schema, Violation
from noloco_node.sim.network.link_model import SILENCE_S, AccessLine, Link, Transfer
from noloco_node.sim.network.medium import Medium, spoil


class EndOfStream(NamedTuple):
    """The end of a conversation: a polite one where `kind` is None. `message`: one that it travels with, and behind."""

    kind: type[ConnectionError] | None
    text: str
    message: Any = None


_ENDED = EndOfStream(None, "")


class StreamByteCounts:
    """Bytes that one peer sent and received about one topic."""

    __slots__ = ("received_bytes", "received_name", "sent_bytes", "sent_name")

    def __init__(self, topic: str) -> None:
        self.sent_bytes = self.received_bytes = 0
        # Statistics are asked for every few seconds.
        self.sent_name, self.received_name = f"bytes.sent.{topic}", f"bytes.received.{topic}"


class StreamHost:
    """The ends of conversations at one peer, and what is counted of them."""

    def __init__(self, peer_id: str, line: AccessLine) -> None:
        self.peer_id, self.line = peer_id, line
        self.ends: dict[StreamEnd, None] = {}
        """The conversations that are open."""
        self.lingering: dict[StreamEnd, None] = {}
        """Conversations that were left while something of theirs waited for the line."""
        self.answering: dict[StreamEnd, asyncio.Task[None]] = {}
        self.violations: Counter[str] = Counter()
        """Messages that no peer may send, by who sent them."""
        self._byte_counts: dict[str, StreamByteCounts] = {}

    def byte_counts(self, topic: str) -> StreamByteCounts:
        counts = self._byte_counts.get(topic)
        if counts is None:
            counts = self._byte_counts[topic] = StreamByteCounts(topic)
        return counts

    def stop_handler(self, end: StreamEnd) -> None:
        task = self.answering.get(end)
        if task is not None:
            task.cancel()
            coroutine = task.get_coro()
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                # A task that is cancelled before its first step never runs a line: it cannot sign itself off.
                del self.answering[end]


class StreamEnd:
    """One end of a conversation; implements `interface.Conversation`."""

    def __init__(self, medium: Medium, host: StreamHost, peer: str, topic: str, schema: Schema) -> None:
        self._medium, self._host, self._line = medium, host, host.line
        self.me, self._peer, self.topic, self.schema = host.peer_id, peer, topic, schema
        self._byte_counts = host.byte_counts(topic)
        self._inbox: list[Any] = []
        self._in_flight: list[Any] = []
        self._sent_s = self._arrival_s = -1.0
        self._waiter: asyncio.Future[None] | None = None
        self._broken: tuple[type[ConnectionError], str] | None = None
        self._peer_ended = self._left = False
        self._up: Pace | None = None
        self._down: Pace | None = None
        self._outbox: Outbox | None = None
        self._silence: asyncio.TimerHandle | None = None

    def join(self, other: StreamEnd) -> None:
        """Connect with the other end; both must be told."""
        self._incoming, self._arrive = other._in_flight, other._receive_next
        self.their_schema, self._their_line = other.schema, other._line
        self._their_byte_counts = other._byte_counts

    # What `interface.Conversation` promises.

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def origin(self) -> str:
        return ""

    @property
    def is_quiet(self) -> bool:
        """Whether both ends are open, and no message waits."""
        return not (self.is_over or self._peer_ended or self._inbox)

    @property
    def violation(self) -> Violation | None:
        return Violation(self._broken[1]) if self._broken is not None and self._broken[0] is Violation else None

    def limit(self, up: Pace | None, down: Pace | None) -> None:
        self._up, self._down = up, down

    async def send(self, message: Any) -> None:
        """Hand one message over; the module says when this suspends."""
        if self._up is not None:
            await self._admitted(self._up, message)
        self._check()
        medium, state = self._medium, self._medium.state
        size = medium.size_bytes(message, self.topic)
        medium.message_counts[self.schema.names[message.__class__]] += 1
        self._byte_counts.sent_bytes += size
        fate = medium.fate_rng.random() if state.affected_share else 1.0
        if fate >= state.affected_share and self._is_free():
            self._line.up.moved_bytes += size
            self._their_line.down.moved_bytes += size
            self.transmit(message, size)
            return
        sent = self._open_outbox().send(message, size, fate)
        if sent is not None:
            try:
                await sent
            except asyncio.CancelledError:
                self.abort("a message was cut short by its sender")
                raise
            if self.is_over:
                self._check()

    async def receive(self) -> Any:
        # One coroutine, for thousands of conversations wait here at a time.
        pace = self._down
        while not self._inbox or pace is not None:
            if self._inbox and pace is not None:
                await self._admitted(pace, self._inbox[0])
                pace = None
                continue
            self._check()
            if self._waiter is not None:
                raise RuntimeError(f"two tasks receive at once from {self._peer} about {self.topic}")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._inbox.pop(0)

    async def _admitted(self, pace: Pace, message: Any) -> None:
        """Return when a message may pass, with the bytes that it has over libp2p."""
        size = wire.message_bytes(message, self.schema)
        await pace.admit(size, size)

    def _check(self) -> None:
        if self._broken is not None:
            kind, text = self._broken
            raise kind(text)
        if self._left:
            raise ConnectionResetError(f"the conversation with {self._peer} is over")
        if self._peer_ended:
            raise ConversationEnded(f"{self._peer} ended the conversation")

    # How it ends.

    def end(self) -> None:
        """End politely: send END behind all messages; leaving in the middle of a message breaks the stream."""
        if self._is_sending():
            self.abort("the conversation was left while a message was being sent")
        elif not self.is_over:
            self._left = True
            self._inbox.clear()
            self._close()
            self._post(_ENDED)

    def fail(self, sentence: str) -> None:
        """End with an error that the other side gets to read, unless a message is being sent."""
        if self._is_sending():
            self.abort(sentence)
        elif not self.is_over:
            self._left = True
            self._close()
            self._post(EndOfStream(ConnectionResetError, f"{self.me} ended with an error: {sentence}"))

    def abort(self, why: str) -> None:
        """Break the stream: what has not left yet never will."""
        if not self.is_over:
            self._broken = (ConnectionResetError, why)
            self._close()
            self._discard_messages()
            self._post(EndOfStream(ConnectionResetError, f"the stream with {self.me} broke"))

    def note_broken(self, kind: type[ConnectionError], text: str) -> None:
        """Note that the stream broke. A handler is cancelled, unless its caller has ended politely."""
        if self.is_over:
            self._discard_messages()
        elif not self._peer_ended:
            self._broken = (kind, text)
            self._medium.count_break(kind)
            self._close()
            self._discard_messages()
            stop_handler(partial(self._host.stop_handler, self), kind)

    def kill(self) -> None:
        """Break with everything, also where END waits for the line: this peer is no more."""
        if self.is_over:
            self._discard_messages()
            self._post(EndOfStream(ConnectionResetError, f"the stream with {self.me} broke"))
        else:
            self.abort("this peer was killed")
        self._host.stop_handler(self)

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent or received any more at this end."""
        return self._left or self._broken is not None

    def _close(self) -> None:
        self._host.ends.pop(self, None)
        self.note_cut(False)
        self._wake()

    def _discard_messages(self) -> None:
        if self._outbox is not None:
            self._outbox.discard_messages()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What is under way.

    def note_cut(self, cut: bool) -> None:
        """Count the silence from now on, if nothing passes any more; stop counting if it does."""
        if cut and self._silence is None:
            self._silence = asyncio.get_running_loop().call_later(SILENCE_S, self._give_up)
        elif not cut and self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def transmit(self, content: Any, size_bytes: int = 0, late_s: float = 0.0) -> None:
        """Put a message, or the end of the stream, in flight: from now on it is sure to arrive."""
        loop = asyncio.get_running_loop()
        now_s = self._sent_s = loop.time()
        arrival_s = now_s + self._medium.draw_latency() + late_s
        if arrival_s < self._arrival_s:
            arrival_s = self._arrival_s
        self._arrival_s = arrival_s
        self._their_byte_counts.received_bytes += size_bytes
        self._in_flight.append(content)
        loop.call_at(arrival_s, self._arrive)

    def note_all_sent(self) -> None:
        self._host.lingering.pop(self, None)

    def _give_up(self) -> None:
        self._silence = None
        self.note_broken(ConnectionAbortedError, f"{self._peer} was silent for {SILENCE_S:g} s")

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            in_round = self._medium.is_rounds(self.topic)
            self._outbox = Outbox(self._medium, self, self._line.up, self._their_line.down, in_round=in_round)
        return self._outbox

    def _is_sending(self) -> bool:
        return self._outbox is not None and self._outbox.is_sending

    def _is_free(self) -> bool:
        return self._medium.state.is_free and (self._outbox is None or self._outbox.is_idle)

    def _post(self, ending: EndOfStream) -> None:
        """Tell the other end, unless it has left already."""
        if self._peer_ended:
            self._discard_messages()
            self._arrive = _ignore
        elif not self._is_free():
            outbox = self._open_outbox()
            outbox.post(ending)
            outbox.note_left()
            if not outbox.is_idle:
                self._host.lingering[self] = None
        elif ending.kind is None and self._has_just_sent():
            # END travels with the message that set out at this very moment, as the last bytes of a packet would.
            self._in_flight[-1] = EndOfStream(None, "", self._in_flight[-1])
        else:
            self.transmit(ending)

    def _has_just_sent(self) -> bool:
        """Say whether the last thing in flight is a message that was sent at this very moment."""
        now_s = asyncio.get_running_loop().time()
        return self._sent_s == now_s and bool(self._in_flight) and self._in_flight[-1].__class__ is not EndOfStream

    def _receive_next(self) -> None:
        content = self._incoming.pop(0)
        if content.__class__ is EndOfStream:
            if content.message is not None:
                self._take(content.message)
            self._take_end(content)
        else:
            self._take(content)

    def _take(self, message: Any) -> None:
        if not self._left and self._broken is None:
            rule = self.schema.rules.get(message.__class__)
            try:
                if rule is not None:
                    wire.check_numbers(rule, message)
            except Violation as violation:
                self._take_end(EndOfStream(Violation, str(violation)))
                return
            self._inbox.append(message)
            self._wake()

    def _take_end(self, ending: EndOfStream) -> None:
        if ending.kind is None:
            self._peer_ended = True
            self._wake()
            if self._left:
                # Both are done: undo the ring of references, or every conversation is work for the garbage collector.
                self._arrive = _ignore
        elif ending.kind is Violation and not self.is_over and not self._peer_ended:
            self._host.violations[self._peer] += 1
            self.note_broken(Violation, ending.text)
            self._post(EndOfStream(ConnectionResetError, f"{self.me} ended with an error: {ending.text}"))
        else:
            self.note_broken(ending.kind, ending.text)


def _ignore() -> None:
    """Take what arrives after both have left."""


class _Item(NamedTuple):
    """A message or the end of the stream with its bytes on the line; `sent` is done when they have left."""

    content: Any
    size_bytes: int = 0
    late_s: float = 0.0
    sent: asyncio.Future[None] | None = None


class Outbox:
    """The messages that one end of a conversation has yet to put in flight."""

    def __init__(self, medium: Medium, end: StreamEnd, up: Link, down: Link, *, in_round: bool) -> None:
        self._medium, self._end, self._up, self._down, self._in_round = medium, end, up, down, in_round
        self._waiting: list[_Item] = []
        self._held: list[_Item] = []
        self._moving: _Item | None = None
        self._transfer: Transfer | None = None
        self._drop_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all that was posted is in flight."""
        return self._transfer is None and not self._held

    @property
    def is_sending(self) -> bool:
        """Whether somebody waits for a message to leave."""
        items = (self._moving, *self._waiting) if self._moving is not None else ()
        return any(item.sent is not None and not item.sent.done() for item in items)

    def send(self, message: Any, size_bytes: int, fate: float) -> asyncio.Future[None] | None:
        """Send one message to its fate, 0 to 1: lost, late, doubled or nothing (see `MediumState.affected_share`).

        Returns what is done when it has left the line, or None when it has.
        """
        medium, conditions = self._medium, self._medium.conditions
        if fate < conditions.loss:
            self._lose()
            return None
        # What is left of the draw is as good as a new one.
        fate = (fate - conditions.loss) / (1 - conditions.loss)
        is_late = fate < conditions.late
        if is_late:
            medium.counts["messages.late"] += 1
            fate = medium.fate_rng.random() if conditions.duplicate else 1.0
        else:
            fate = (fate - conditions.late) / (1 - conditions.late) if conditions.late < 1 else 1.0
        late_s = conditions.late_s if is_late else 0.0
        message = self._spoil(message)
        if fate < conditions.duplicate:
            medium.counts["messages.duplicated"] += 1
            self._take(_Item(message, size_bytes, late_s))
        sent = asyncio.get_running_loop().create_future() if size_bytes and self._is_limited() else None
        self._take(_Item(message, size_bytes, late_s, sent))
        return None if sent is None or sent.done() else sent

    def _lose(self) -> None:
        """Lose a message, and its stream with it: both ends see that a latency later."""
        medium, end = self._medium, self._end
        medium.counts["messages.lost"] += 1
        self.post(EndOfStream(ConnectionResetError, f"the stream with {end.me} broke: a message was lost"))
        words = f"the stream with {end.peer} broke: a message was lost"
        asyncio.get_running_loop().call_later(medium.draw_latency(), end.note_broken, ConnectionResetError, words)

    def _spoil(self, message: Any) -> Any:
        medium, end = self._medium, self._end
        how = medium.next_corruption(end.me, message)
        if how is None:
            return message
        medium.counts["messages.tampered"] += 1
        try:
            return spoil(message, how, end.schema, end.their_schema, medium.corruption_rng)
        except Violation as violation:
            return EndOfStream(Violation, str(violation))

    def post(self, ending: EndOfStream) -> None:
        """Send the end of the conversation behind all that was sent."""
        self._take(_Item(ending))

    def release(self) -> None:
        if self._held and not self._medium.is_cut(self._end.me, self._end.peer):
            held, self._held = self._held, []
            self._stop_holding()
            for item in held:
                self._take(item)
            self._settle()

    def discard_messages(self) -> None:
        """Forget all messages that are not in flight, for the stream broke; the break itself is still sent."""
        breaks = [item for item in (*self._held, *self._waiting) if _is_break(item)]
        self.drop()
        for item in breaks:
            self._take(item)

    def drop(self) -> None:
        if self._transfer is not None:
            self._transfer.cancel()
        items = [*self._held, *([self._moving] if self._moving else []), *self._waiting]
        self._held.clear()
        self._waiting.clear()
        self._transfer = self._moving = None
        self._stop_holding()
        for item in items:
            _note_sent(item)
        self._settle()

    def _is_limited(self) -> bool:
        return self._up.rate < math.inf or self._down.rate < math.inf

    def _take(self, item: _Item) -> None:
        if self._transfer is not None:
            self._waiting.append(item)
        else:
            self._start(item)

    def _start(self, item: _Item) -> None:
        if self._medium.state.has_cuts and self._medium.is_cut(self._end.me, self._end.peer):
            self._hold(item)
        elif item.size_bytes and self._is_limited():
            self._moving = item
            self._transfer = Transfer(self._up, self._down, item.size_bytes, self._continue, in_round=self._in_round)
        else:
            self._up.moved_bytes += item.size_bytes
            self._down.moved_bytes += item.size_bytes
            self._transmit(item)

    def _continue(self) -> None:
        assert self._moving is not None
        self._transmit(self._moving)
        self._transfer = self._moving = None
        while self._waiting and self._transfer is None:
            self._start(self._waiting.pop(0))
        self._settle()

    def _transmit(self, item: _Item) -> None:
        self._end.transmit(item.content, item.size_bytes, item.late_s)
        _note_sent(item)

    def _hold(self, item: _Item) -> None:
        if not self._held:
            self._medium.held_outboxes[self.release] = None
        self._held.append(item)
        if self._end.is_over:
            self.note_left()
        _note_sent(item)

    def note_left(self) -> None:
        """Note that nobody uses this end any more: what is held back for it is dropped after `SILENCE_S`."""
        if self._held and self._drop_timer is None:
            self._drop_timer = asyncio.get_running_loop().call_later(SILENCE_S, self.drop)

    def _stop_holding(self) -> None:
        self._medium.held_outboxes.pop(self.release, None)
        if self._drop_timer is not None:
            self._drop_timer.cancel()
            self._drop_timer = None

    def _settle(self) -> None:
        if self.is_idle:
            self._end.note_all_sent()


def _is_break(item: _Item) -> bool:
    content = item.content
    return content.__class__ is EndOfStream and content.kind is not None and content.kind is not Violation


def _note_sent(item: _Item) -> None:
    if item.sent is not None and not item.sent.done():
        item.sent.set_result(None)
