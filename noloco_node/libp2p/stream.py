"""One conversation over one socket: `FrameProtocol` on asyncio, and the bytes that all of them may hold.

The socket leads to the libp2p daemon, which sends one message of its own first (whom this stream connects with, or why
it does not) and then the raw bytes of the stream. `StreamOpening` waits for the former; `Stream` is made when it is
there. Both are asyncio's `BufferedProtocol`, so the kernel writes received bytes straight into the tensor.

Flow. Reading pauses while two messages wait to be received; writing waits until the kernel has taken every byte, so
that a sent tensor may be changed when `send` returns. A stream with a pace asks before each piece of a message whether
it may pass. No beat fits between the pieces, so they must come oftener than beats would; until the first, beats go on.

Memory. Each message is checked against its schema before memory is taken for it, but a stranger may open many streams
and send something good on each, faster than handlers take it, or never to its end. So `ReceiveBudget` bounds the bytes
that came on streams that we answer and that nobody has received, for each peer and in all. Beyond the bound we break
the stream that has held some the longest: nobody waits for room, so nobody can keep others waiting by holding it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from noloco_node.libp2p.control import Preamble
from noloco_node.libp2p.frame_protocol import Event, FrameProtocol, MessageReceived, SendState, StreamClosed
from noloco_node.network.interface import Pace
from noloco_node.network.schema import Violation
from noloco_node.network.wire import Buffer

logger = logging.getLogger(__name__)


_CHUNK_BYTES = 1 << 20
_IN_MESSAGE = SendState.IN_MESSAGE


class ReceiveBudget:
    """The bytes of all streams that we answer: so many in all, half of them of one peer; one stream may have more."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._streams: dict[Stream, int] = {}
        """Bytes by stream, in the order in which they began to hold some."""
        self._peers: Counter[str] = Counter()
        self.evicted = 0
        """Streams broken off for their bytes."""

    @property
    def held_bytes(self) -> int:
        return self._peers.total()

    def expect(self, message_bytes: int) -> None:
        """Have room for two peers who each have two messages of this size on a stream, whatever the bound was."""
        self._most_bytes = max(self._most_bytes, 4 * message_bytes)

    def hold(self, stream: Stream, size: int) -> None:
        """Note that a stream holds so many bytes from now on; streams may be broken off for them, this one as well."""
        peer, before = stream.peer, self._streams.get(stream, 0)
        if size:
            self._streams[stream] = size
        else:
            self._streams.pop(stream, None)
        self._peers[peer] += size - before
        if not self._peers[peer]:
            del self._peers[peer]
        if size > before:
            if self._is_greedy(peer):
                self._evict([each for each in self._streams if each.peer == peer], lambda: self._is_greedy(peer))
            if self._is_full():
                self._evict(list(self._streams), self._is_full)

    def _is_full(self) -> bool:
        return self.held_bytes > self._most_bytes

    def _is_greedy(self, peer: str) -> bool:
        return self._peers[peer] > self._most_bytes / 2

    def _evict(self, streams: list[Stream], too_many: Callable[[], bool]) -> None:
        """Break off streams, all but the youngest at most."""
        for stream in streams[:-1]:
            if not too_many():
                return
            self.evicted += 1
            size = self._streams.get(stream, 0)
            logger.info("Breaking a stream with %s off: %d bytes wait on it to be received", stream.peer, size)
            stream.evict()
            self.hold(stream, 0)


class ByteCounts:
    """Bytes of one topic."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0


class StreamOpening(asyncio.BufferedProtocol):
    """A connection to the daemon until the daemon's first message has come.

    `introduce` is called once with that message, and makes a `Stream` of the connection or raises a ConnectionError;
    `lost` is called with the error when there will be no stream. `proof_bytes`: of the other peer, behind that message.
    """

    def __init__(
        self,
        introduce: Callable[[asyncio.Transport, Preamble], None],
        lost: Callable[[ConnectionError], None] = lambda _: None,
        proof_bytes: int = 0,
    ) -> None:
        self._introduce, self._lost = introduce, lost
        self._preamble = Preamble(proof_bytes=proof_bytes)
        self._transport: asyncio.Transport | None = None
        self._is_over = False

    def break_off(self, error: ConnectionError) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()
        self._lost(error)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._preamble.wants()

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_over or self._transport is None:
            return
        try:
            if self._preamble.got(nbytes):
                self._introduce(self._transport, self._preamble)
                self._is_over = True
        except ConnectionError as error:
            self.break_off(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.break_off(ConnectionResetError("the stream with the daemon broke"))


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
        receive_budget: ReceiveBudget | None = None,
        origin: str = "",
    ) -> None:
        """Take the transport over. `receive_budget`: where what comes must find room."""
        self._transport, self._protocol, self._traffic, self._lost = transport, protocol, traffic, lost
        self.origin = origin
        """The multiaddr from which the other side came to us; empty for a stream that we opened."""
        self._up: Pace | None = None
        self._down: Pace | None = None
        self._next_buffer = protocol.next_buffer
        self._time = asyncio.get_running_loop().time
        self._budget = receive_budget
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
        return self._next_message()

    async def _wait_for_message(self) -> int:
        while (size := self._protocol.next_message_bytes) is None:
            self._protocol.check_receive()
            self._news.clear()
            await self._news.wait()
        return size

    def _next_message(self) -> Any:
        protocol = self._protocol
        was_full = protocol.is_full
        message = protocol.next_message(self._time())
        self._count_held()
        if was_full and not protocol.is_full:
            self._transport.resume_reading()
        return message

    # What the switchboard needs.

    @property
    def peer_ended(self) -> bool:
        """Whether the other side ended politely: then a lost stream is no reason to cancel our handler."""
        return self._protocol.peer_ended

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
        if type(event) is MessageReceived:
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

    def _react(self, event: Event | None) -> None:
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
        if self._budget is not None:
            self._budget.hold(self, self._protocol.held_bytes)


def _pieces(buffers: Sequence[Buffer], most_bytes: int) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), most_bytes):
            yield view[start : start + most_bytes]
