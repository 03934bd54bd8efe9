"""One conversation over one socket: its rules without I/O (`FrameProtocol`), and the socket (`Stream`).

**Rules.** The owner of a `FrameProtocol` fills (part of) `next_buffer()` and says so with `receive_bytes`; writes what
`data_to_send` returns after each call; and takes messages with `next_message`. Every time is passed in: the protocol
never waits or looks at a clock.

Both sides send a BEAT when they have sent nothing else for `beat_s`; `PeerLiveness` says how long a silence is
tolerated. Beats come from the event loop, not from the work, so they vouch for the peer and not for its progress, which
the caller's deadline bounds. Leaving politely sends END: the other's handler may finish what it does. Everything else
that closes a stream breaks it and cancels the handler: a caller that was cancelled or killed wants nothing any more.
The side that ended politely keeps the socket open until the other has ended as well, for libp2p drops what is under way
when one side closes early. At most `MOST_WAITING` messages wait to be received while the owner stops reading at
`is_full`, and one more is under way; `held_bytes` counts both.

**The socket** leads to the libp2p daemon. `Stream` is asyncio's `BufferedProtocol`, so the kernel writes received bytes
straight into the tensor. Writing waits until the kernel has taken every byte, so that a sent tensor may be changed when
`send` returns. A stream with a pace asks before each piece of a message whether it may pass. No beat fits between the
pieces, so they must come oftener than beats would; until the first, beats go on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn

from noloco_node.libp2p.settings import TimeoutSettings
from noloco_node.network import wire
from noloco_node.network.interface import ConversationEnded, Handler, Pace
from noloco_node.network.schema import Schema, Violation
from noloco_node.network.timeouts import PeerLiveness
from noloco_node.network.wire import Buffer

logger = logging.getLogger(__name__)

MOST_WAITING = 2
MOST_IDLE_FRAMES = 256  # that say nothing, beyond twice as many as the beats since the stream began
_CHUNK_BYTES = 1 << 20
_FLUSH_S = 30.0  # a peer that takes nothing has so long to take the last bytes of a stream that is over


class SendState(Enum):
    """Our half of the conversation."""

    BETWEEN_FRAMES = auto()
    IN_MESSAGE = auto()  # a part of a message is out: nothing but the rest of it may follow
    ENDED = auto()  # we sent END or ERROR


class Event(Enum):
    """What the bytes that came mean for the owner."""

    MESSAGE_RECEIVED = auto()  # a message waits for `next_message`
    PEER_ENDED = auto()  # the other side ended politely: it sends no more, and takes no more messages


class StreamClosed(NamedTuple):
    """The stream is of no use any more: broken by `error`, or None after a polite end. Nothing follows it."""

    error: ConnectionError | None


# By name: to look a member of an enum up takes a while.
_MESSAGE_RECEIVED, _PEER_ENDED = Event
_BETWEEN_FRAMES, _IN_MESSAGE, _ENDED = SendState
_MESSAGE, _END, _ERROR = wire.FrameKind.MESSAGE, wire.FrameKind.END, wire.FrameKind.ERROR


class FrameProtocol:
    """One end of a conversation with `peer`, from `now_s` on."""

    def __init__(
        self, peer: str, schema: Schema, liveness: PeerLiveness, timeouts: TimeoutSettings, now_s: float
    ) -> None:
        self.peer = peer
        self.send_state = _BETWEEN_FRAMES
        self.peer_ended = False
        self.closed: StreamClosed | None = None
        self.is_full = False  # whether so many messages wait that no more should be read
        self.held_bytes = 0  # bytes that came and were not received, those of the message under way included
        self._schema, self._liveness, self._timeouts = schema, liveness, timeouts
        self._decoder = wire.FrameDecoder(schema)
        self.next_buffer = self._decoder.wants
        """Returns where the next bytes belong: never empty, and never beyond the current frame."""
        self._inbox: deque[tuple[Any, int]] = deque()  # messages that nobody has received, and the bytes of each
        self._incoming_bytes = 0  # bytes of the message under way
        self._output = b""
        self._begun_s = self._sent_s = self._taken_s = self._ended_s = self._listening_s = now_s
        self._idle_frames = 0
        self._unsent_bytes = 0

    # Receiving.

    @property
    def next_message_bytes(self) -> int | None:
        """The size of the message that `next_message` would return; None where none waits."""
        return self._inbox[0][1] if self._inbox else None

    @property
    def is_quiet(self) -> bool:
        """Whether both ends are open, and no message waits or is under way to us."""
        return self.closed is None and self.send_state is not _ENDED and not (self.peer_ended or self.held_bytes)

    def receive_bytes(self, count: int, now_s: float) -> Event | StreamClosed | None:
        """Take note that the first `count` bytes of `next_buffer()` were filled."""
        if self.closed is not None:
            return None
        self._liveness.hear(now_s, self._listening_s)
        try:
            frame = self._decoder.got(count)
        except Violation as violation:
            return self._refuse(violation)
        if frame is None:
            if self._decoder.in_message:
                self._incoming_bytes += count
                self.held_bytes += count
            return None
        if frame.kind is _MESSAGE:
            if self.send_state is _ENDED:
                self._drop_incoming()
                return self._count_idle(now_s)
            self._inbox.append((frame.content, self._incoming_bytes + count))
            self.held_bytes += count
            self._incoming_bytes = 0
            self.is_full = len(self._inbox) >= MOST_WAITING
            return _MESSAGE_RECEIVED
        if frame.kind is _END:
            self.peer_ended = True
            return _PEER_ENDED if self.send_state is not _ENDED else self.break_off(None)
        if frame.kind is _ERROR:
            sentence = "".join(letter if letter.isprintable() else " " for letter in frame.content)
            return self.break_off(ConnectionResetError(f"{self.peer} ended with an error: {sentence}"))
        return self._count_idle(now_s)

    def next_message(self, now_s: float) -> Any:
        """Return the message that has waited longest; there must be one. A stream that was full listens again."""
        message, size = self._inbox.popleft()
        self.held_bytes -= size
        if self.is_full:
            self._listening_s = now_s
            self.is_full = len(self._inbox) >= MOST_WAITING
        return message

    def discard(self) -> None:
        self._inbox.clear()
        self.held_bytes, self.is_full = self._incoming_bytes, False

    def check_receive(self) -> None:
        if self.closed is not None or self.send_state is _ENDED:
            self._raise_closed()
        if self.peer_ended:
            raise ConversationEnded(f"{self.peer} ended the conversation")

    # Sending.

    def encode(self, message: Any) -> Sequence[Buffer]:
        """Return what to write for a message; a ConnectionError where the other takes none any more."""
        self.check_receive()
        return wire.encode(message, self._schema)

    def start_piece(self, now_s: float) -> None:
        """Note that a piece of a message is written now; a ConnectionError where that makes no sense any more."""
        if self.closed is not None or self.send_state is _ENDED:
            self._raise_closed()
        self.send_state = _IN_MESSAGE
        self._sent_s = now_s

    def finish_message(self) -> None:
        if self.closed is not None:
            self._raise_closed()
        self.send_state = _BETWEEN_FRAMES

    def data_to_send(self) -> bytes:
        """Return, once, the beats and ends that are to be written."""
        content, self._output = self._output, b""
        return content

    def resume_sending(self, now_s: float) -> None:
        """Note that the other end has taken all that was written."""
        # Ticks alone might see one piece after another, all of a size, and take them for the same.
        self._note_taken(now_s, 0)

    # Time.

    def restart_timers(self, now_s: float) -> None:
        """Count silence and standstill from now on: until now it was we who did not listen."""
        self._listening_s = self._taken_s = now_s

    def tick(self, now_s: float, unsent_bytes: int) -> StreamClosed | None:
        """Beat if it is time to, and give the peer up if it is silent or takes nothing; call it every half beat.

        `unsent_bytes`: what we wrote and the socket has not taken.
        """
        if self.closed is not None:
            return None
        is_listening = not (self.is_full or self.peer_ended)
        if is_listening and self._liveness.is_silent(now_s, self._listening_s):
            self._liveness.give_up(self._listening_s)
            words = f"{self.peer} was silent for {self._liveness.silence_s:.1f} s"
            return self.break_off(ConnectionAbortedError(words))
        if self.send_state is _ENDED and now_s - self._ended_s > self._timeouts.linger_s:
            return self.break_off(None)
        if unsent_bytes == 0 or unsent_bytes != self._unsent_bytes:
            self._note_taken(now_s, unsent_bytes)
        if now_s - self._taken_s > self._liveness.stall_s:
            words = f"{self.peer} took no byte for {self._liveness.stall_s:.0f} s"
            return self.break_off(ConnectionAbortedError(words))
        if self.send_state is _BETWEEN_FRAMES and now_s - self._sent_s >= self._timeouts.beat_s:
            self._output += wire.beat()
            self._sent_s = now_s
        return None

    # Ends.

    def leave(self, now_s: float) -> StreamClosed | None:
        return self._end(wire.end(), "the conversation was left while a message was being sent", now_s)

    def fail(self, sentence: str, now_s: float) -> StreamClosed | None:
        return self._end(wire.error(sentence), sentence, now_s)

    def break_off(self, error: ConnectionError | None) -> StreamClosed | None:
        """Close the stream at once, whatever is under way; None if it was closed before."""
        if self.closed is not None:
            return None
        self.closed = StreamClosed(error)
        self._drop_incoming()
        return self.closed

    def lose_connection(self) -> StreamClosed | None:
        if self.peer_ended or self.send_state is _ENDED:
            return self.break_off(None)
        return self.break_off(ConnectionResetError(f"the stream with {self.peer} broke"))

    # Inside.

    def _count_idle(self, now_s: float) -> StreamClosed | None:
        """Count a frame that says nothing: it costs us a step of the event loop, and its sender 13 bytes."""
        self._idle_frames += 1
        if self._idle_frames <= MOST_IDLE_FRAMES + 2 * (now_s - self._begun_s) / self._timeouts.beat_s:
            return None
        return self._refuse(Violation(f"{self._idle_frames} frames that say nothing came too fast"))

    def _refuse(self, violation: Violation) -> StreamClosed | None:
        if self.send_state is _BETWEEN_FRAMES:
            self._output += wire.error(str(violation))
        return self.break_off(violation)

    def _raise_closed(self) -> NoReturn:
        error = None if self.closed is None else self.closed.error
        if error is not None:
            raise type(error)(*error.args)
        raise ConnectionResetError(f"the conversation with {self.peer} is over")

    def _note_taken(self, now_s: float, unsent_bytes: int) -> None:
        if self._unsent_bytes:
            self._liveness.take(now_s - self._taken_s)
        self._unsent_bytes, self._taken_s = unsent_bytes, now_s

    def _end(self, frame: bytes, why: str, now_s: float) -> StreamClosed | None:
        if self.closed is not None or self.send_state is _ENDED:
            return None
        if self.send_state is _IN_MESSAGE:
            return self.break_off(ConnectionResetError(why))
        self._output += frame
        if self.is_full:
            self._listening_s = now_s
        self.send_state, self._sent_s, self._ended_s = _ENDED, now_s, now_s
        self.discard()
        return self.break_off(None) if self.peer_ended else None

    def _drop_incoming(self) -> None:
        """Forget a message that will not come to its end; whole ones can still be received."""
        self.held_bytes -= self._incoming_bytes
        self._incoming_bytes = 0


class ByteCounts:
    """Bytes of one topic."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0


class Stream(asyncio.BufferedProtocol):
    """One end of a conversation; implements `interface.Conversation`.

    `lost` is called when the stream is of no use any more, with the error, or with None after a polite end.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        protocol: FrameProtocol,
        traffic: ByteCounts,
        lost: Callable[[Stream, ConnectionError | None], None],
        hold: Callable[[Stream, int], None] | None = None,
        origin: str = "",
    ) -> None:
        """Take the transport over. `hold` takes note of the bytes that came and were not received."""
        self._transport, self._protocol, self._traffic, self._lost = transport, protocol, traffic, lost
        self.origin = origin  # the multiaddr from which the other side came to us; empty for a stream that we opened
        self._up: Pace | None = None
        self._down: Pace | None = None
        self._next_buffer = protocol.next_buffer
        self._time = asyncio.get_running_loop().time
        self._hold = hold
        self._is_answered = False
        self._news, self._writable, self._sending = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._writable.set()
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=0)

    # What conversations need.

    @property
    def peer(self) -> str:
        return self._protocol.peer

    @property
    def is_quiet(self) -> bool:
        return self._protocol.is_quiet

    @property
    def violation(self) -> Violation | None:
        closed = self._protocol.closed
        return closed.error if closed is not None and isinstance(closed.error, Violation) else None

    def limit(self, up: Pace | None, down: Pace | None) -> None:
        self._up, self._down = up, down

    async def send(self, message: Any) -> None:
        """Send one message, in pieces where a pace was set; return when the kernel has taken all of it."""
        protocol, pace = self._protocol, self._up
        buffers = protocol.encode(message)
        message_bytes = sum(map(len, buffers))
        async with self._sending:
            try:
                for piece in _pieces(buffers, _CHUNK_BYTES if pace is None else pace.piece_bytes):
                    if pace is not None:
                        await pace.admit(len(piece), message_bytes)
                    protocol.start_piece(self._time())
                    self._write(piece)
                    await self._writable.wait()
                protocol.finish_message()
            finally:
                if protocol.send_state is _IN_MESSAGE:
                    # Half a message is out; nothing that follows would make sense.
                    self.break_off(ConnectionResetError("a message was cut short by its sender"))

    async def receive(self) -> Any:
        size = await self._wait_for_message()
        if self._down is not None:
            await self._down.admit(size, size)
            await self._wait_for_message()  # it may be gone with the stream
        protocol = self._protocol
        was_full = protocol.is_full
        message = protocol.next_message(self._time())
        self._count_held()
        if was_full and not protocol.is_full:
            self._transport.resume_reading()
        return message

    async def _wait_for_message(self) -> int:
        while (size := self._protocol.next_message_bytes) is None:
            self._protocol.check_receive()
            self._news.clear()
            await self._news.wait()
        return size

    # What the switchboard needs.

    @property
    def wants_handler(self) -> bool:
        """Whether a handler that answers is to be cancelled when the stream is lost: the caller gave its work up."""
        return not (self._is_answered or self._protocol.peer_ended)

    async def answer(self, handler: Handler) -> bool:
        """Have a handler answer, and end as it ends; say whether it succeeded."""
        try:
            try:
                await handler(self)
            finally:
                self._is_answered = True
        except ConnectionError as error:
            self.fail(str(error))
            return False
        except Exception as error:  # a border: the fault of one handler must not take the others with it
            logger.exception("A conversation with %s failed", self.peer)
            self.fail(f"{type(error).__name__} in the handler")
            return False
        except asyncio.CancelledError:
            self.break_off(ConnectionResetError("the handler was cancelled"))
            raise
        self.leave()
        return True

    def leave(self) -> None:
        self._end(self._protocol.leave)

    def fail(self, sentence: str) -> None:
        self._end(functools.partial(self._protocol.fail, sentence))

    def break_off(self, error: ConnectionError) -> None:
        self._react(self._protocol.break_off(error))

    def evict(self) -> None:
        """Break the stream for what it holds."""
        self._protocol.discard()
        self.break_off(ConnectionResetError("too much waits here to be received, and this has waited longest"))

    def discard(self) -> None:
        self._protocol.discard()
        self._count_held()

    def tick(self, now_s: float, we_listened: bool) -> None:
        """Beat if it is time to, and give the peer up if it is silent while `we_listened`; called every half beat."""
        if not we_listened:
            self._protocol.restart_timers(now_s)
        self._react(self._protocol.tick(now_s, self._transport.get_write_buffer_size()))

    # What the event loop calls.

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._next_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._traffic.received_bytes += nbytes
        protocol = self._protocol
        event = protocol.receive_bytes(nbytes, self._time())
        self._count_held()
        if event is _MESSAGE_RECEIVED:
            self._news.set()
            if protocol.is_full:
                self._transport.pause_reading()
        elif event is not None:
            self._react(event)

    def eof_received(self) -> bool:
        self._react(self._protocol.lose_connection())
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._react(self._protocol.lose_connection())

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._protocol.resume_sending(self._time())
        self._writable.set()

    # Inside.

    def _react(self, event: Event | StreamClosed | None) -> None:
        """Write what the protocol has to say, and do what its event asks for."""
        if content := self._protocol.data_to_send():
            self._write(content)
        if event is None:
            return
        self._news.set()
        if isinstance(event, StreamClosed):
            self._writable.set()
            self._count_held()
            # A polite end gets through, and a violator is told why, as far as that is possible without waiting.
            if event.error is None or isinstance(event.error, Violation):
                self._transport.close()
                if self._transport.get_write_buffer_size():
                    asyncio.get_running_loop().call_later(_FLUSH_S, self._transport.abort)
            else:
                self._transport.abort()
            self._lost(self, event.error)

    def _end(self, end: Callable[[float], StreamClosed | None]) -> None:
        was_full = self._protocol.is_full
        self._react(end(self._time()))
        self._count_held()
        self._news.set()
        self._writable.set()
        if was_full and self._protocol.closed is None:
            self._transport.resume_reading()

    def _write(self, content: bytes | memoryview) -> None:
        if not self._transport.is_closing():
            self._traffic.sent_bytes += len(content)
            self._transport.write(content)

    def _count_held(self) -> None:
        if self._hold is not None:
            self._hold(self, self._protocol.held_bytes)


def _pieces(buffers: Sequence[Buffer], most_bytes: int) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), most_bytes):
            yield view[start : start + most_bytes]
