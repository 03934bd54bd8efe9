"""One conversation over one socket: frames both ways, heartbeats, silence, and how it ends.

The socket leads to the libp2p daemon, which sends one message of its own first (whom this stream connects with, or why
it does not) and then the raw bytes of the stream. `Stream` is asyncio's `BufferedProtocol`, so the kernel writes
received bytes straight to where `wire.FrameDecoder` wants them: into the tensor itself.

Liveness. Both sides send a BEAT when they have sent nothing else for `beat_s`. A peer of whom no byte came for longer
than is borne with on any of our streams is given up (one `PeerLiveness` per peer, not per stream: on a slow link the
beats of one stream queue up behind the bulk of another). Beats come from the event loop, not from the work, so they
vouch for the peer, not for its progress; the caller's deadline bounds that.

Ends. Leaving politely sends END: the other's handler may finish what it does. Everything else that closes a stream
breaks it and cancels the handler: a caller that was cancelled or killed wants nothing any more. Whoever ended politely
keeps the socket open until the other has ended as well, for libp2p drops what is under way when one side closes early.

Flow. Reading pauses while two messages wait to be received (of all streams together: see `unread`); writing waits until
the kernel has taken every byte, so that a sent tensor may be changed when `send` returns. `send_paced` asks before each
piece of a message whether it may pass. No beat fits between the pieces, so they must come oftener than beats would;
until the first one, beats go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

from noloco_node.libp2p.daemon.framing import Preamble
from noloco_node.libp2p.endpoint.settings import TimeoutSettings
from noloco_node.libp2p.streams.liveness import PeerLiveness
from noloco_node.libp2p.streams.receive_bound import ReceiveBudget, StreamBudget
from noloco_node.network import wire
from noloco_node.network.schema import Buffer

_CHUNK_BYTES = 1 << 20
_WAITING_MESSAGES = 2


Admit: TypeAlias = Callable[[int, int], Awaitable[None]]
"""Returns when so many bytes may pass, which are (a piece of) a message of so many."""


class ByteCounts:
    """Bytes of one topic."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0


class Stream(asyncio.BufferedProtocol):
    """One end of a conversation; implements `port.Conversation`.

    `introduce` is called once with the daemon's first message and calls `begin` or `break_off`; `lost` is called when
    the stream is of no use any more, with the error, or with None after a polite end.
    """

    def __init__(
        self,
        patience: TimeoutSettings,
        introduce: Callable[[Stream, bytes], None],
        lost: Callable[[Stream, ConnectionError | None], None],
    ) -> None:
        self._patience, self._introduce, self._lost = patience, introduce, lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._intake: Preamble | wire.FrameDecoder = Preamble()
        self._schema: wire.Schema | None = None
        self._peer = ""
        self.origin = ""
        """The multiaddr from which the other side came to us; empty for a stream that we opened."""
        self._pulse = PeerLiveness(patience)
        self._traffic = ByteCounts()
        self._inbox: deque[tuple[Any, int]] = deque()
        """Messages that nobody has received, and the bytes of each."""
        self._coming_bytes = 0
        """Of the message under way."""
        self._room: StreamBudget | None = None
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._sending = asyncio.Lock()
        self._broken: ConnectionError | None = None
        self._peer_ended = self._left = self._reading_paused = self._over = False
        self._is_mid_frame = False
        """Whether a part of a frame is out: then nothing but the rest of it may follow."""
        self._sent_s = self._moved_s = self._left_s = self._listening_s = self._loop.time()
        self._unsent_bytes = 0

    def __repr__(self) -> str:
        state = "broken" if self._broken else "ended" if self._peer_ended or self._left else "open"
        return f"Stream(with {self._peer or 'nobody yet'}, {state})"

    # What conversations need.

    @property
    def peer(self) -> str:
        """The other's peer id."""
        return self._peer

    async def send(self, message: Any) -> None:
        """Send one message; return when the kernel has taken all of it."""
        await self._send(message, _CHUNK_BYTES, None)

    async def send_paced(self, message: Any, piece_bytes: int, admit: Admit) -> None:
        """Send one message in pieces of at most `piece_bytes`, each when `admit` lets it pass."""
        await self._send(message, piece_bytes, admit)

    async def _send(self, message: Any, piece_bytes: int, admit: Admit | None) -> None:
        self._check()
        if self._peer_ended:
            raise ConnectionResetError(f"{self._peer} ended the conversation")
        assert self._schema is not None
        buffers = wire.encode(message, self._schema)
        message_bytes = sum(map(len, buffers))
        async with self._sending:
            try:
                for piece in _pieces(buffers, piece_bytes):
                    if admit is not None:
                        await admit(len(piece), message_bytes)
                    self._check()
                    self._is_mid_frame = True
                    self._write(piece)
                    await self._writable.wait()
                self._check()
                self._is_mid_frame = False
            finally:
                if self._is_mid_frame:
                    # Half a frame is out; nothing that follows would make sense.
                    self.break_off(ConnectionResetError("a message was cut short by its sender"))

    async def receive(self) -> Any:
        """Return the next message; a `ConnectionError` when none can come any more."""
        await self._wait_for_message()
        return self._received()

    async def receive_paced(self, admit: Admit) -> Any:
        """Return the next message when `admit` lets it pass; until then it counts as unread."""
        await self._wait_for_message()
        size = self._inbox[0][1]
        await admit(size, size)
        await self._wait_for_message()  # it may be gone with the stream
        return self._received()

    async def _wait_for_message(self) -> None:
        while not self._inbox:
            self._check()
            if self._peer_ended:
                raise ConnectionResetError(f"{self._peer} ended the conversation")
            self._news.clear()
            await self._news.wait()

    def _received(self) -> Any:
        message, size = self._inbox.popleft()
        self._forget(size)
        self._resume_reading()
        return message

    # What the network needs.

    @property
    def peer_ended(self) -> bool:
        """Whether the other side ended politely: then a lost stream is no reason to cancel our handler."""
        return self._peer_ended

    def begin(
        self,
        peer: str,
        schema: wire.Schema,
        pulse: PeerLiveness,
        traffic: ByteCounts,
        unread: ReceiveBudget | None = None,
    ) -> None:
        """Start talking in frames; `unread`: where what comes must find room."""
        self._peer, self._schema, self._pulse, self._traffic = peer, schema, pulse, traffic
        self._room = None if unread is None else StreamBudget(unread, peer, self._evicted)
        self._intake = wire.FrameDecoder(schema)
        self._listening_s = self._loop.time()

    def write_raw(self, content: bytes) -> None:
        """Write bytes that are for the daemon itself."""
        self._write(content)

    def leave(self) -> None:
        """End politely: say END, and close when the other has ended too."""
        if self._over or self._left:
            return
        if self._is_mid_frame:
            self.break_off(ConnectionResetError("the conversation was left while a message was being sent"))
            return
        self._write(wire.end())
        self._linger()

    def fail(self, sentence: str) -> None:
        """End with an error that the other side gets to read."""
        if self._over or self._left:
            return
        if self._is_mid_frame:
            self.break_off(ConnectionResetError(sentence))
            return
        self._write(wire.error(sentence))
        self._linger()

    def break_off(self, error: ConnectionError) -> None:
        """Break the stream at once, whatever is under way."""
        if self._over:
            return
        self._over = True
        self._broken = error
        self._drop_frame()
        self._wake()
        if self._transport is not None:
            # A violator is told why, as far as that is possible without waiting.
            if isinstance(error, wire.Violation):
                self._transport.close()
            else:
                self._transport.abort()
        self._lost(self, error)

    def discard(self) -> None:
        """Drop what came and was not received: nobody will ask for it."""
        self._forget(sum(size for _, size in self._inbox))
        self._inbox.clear()

    def excuse(self, now: float) -> None:
        """Count silence and standstill from now on: until now it was we who did not listen."""
        self._listening_s = self._moved_s = now

    def tick(self, now: float) -> None:
        """Beat if it is time to, and give the peer up if it is silent; called every half beat."""
        if self._over or self._schema is None or self._transport is None:
            return
        patience, listening = self._patience, not (self._reading_paused or self._peer_ended)
        if listening and self._pulse.is_silent(now, self._listening_s):
            self._pulse.give_up(self._listening_s)
            self.break_off(ConnectionAbortedError(f"{self._peer} was silent for {self._pulse.silence_s:.1f} s"))
        elif self._left and now - self._left_s > patience.linger_s:
            self._close()
        elif not self._is_moving(now):
            self.break_off(ConnectionAbortedError(f"{self._peer} took no byte for {self._pulse.stall_s:.0f} s"))
        elif not self._left and not self._is_mid_frame and now - self._sent_s >= patience.beat_s:
            self._write(wire.beat())

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._writable.set()
        if self._over:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._intake.wants()

    def buffer_updated(self, nbytes: int) -> None:
        self._traffic.received_bytes += nbytes
        if self._over:
            return
        try:
            if isinstance(self._intake, wire.FrameDecoder):
                self._pulse.hear(self._loop.time(), self._listening_s)
                frame = self._intake.got(nbytes)
                if frame is None and self._intake.in_message:
                    self._note_coming(nbytes)
                elif frame is not None:
                    self._take(frame, nbytes)
            elif self._intake.got(nbytes):
                self._introduce(self, bytes(self._intake.content))
        except wire.Violation as violation:
            if not self._over and self._schema is not None and not self._is_mid_frame:
                self._write(wire.error(str(violation)))
            self.break_off(violation)

    def eof_received(self) -> bool:
        self._stream_ended(None)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._stream_ended(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        # Ticks alone might see one piece after another, all of a size, and take them for the same.
        self._note_moved(self._loop.time(), 0)
        self._writable.set()

    # Inside.

    def _check(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(*self._broken.args)
        if self._over or self._left:
            raise ConnectionResetError(f"the conversation with {self._peer} is over")

    def _write(self, content: bytes | memoryview) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._sent_s = self._loop.time()
        self._traffic.sent_bytes += len(content)
        self._transport.write(content)

    def _is_moving(self, now: float) -> bool:
        """Say whether the other end takes what we write, as far as the socket lets us see."""
        assert self._transport is not None
        unsent = self._transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent_bytes:
            self._note_moved(now, unsent)
        return now - self._moved_s <= self._pulse.stall_s

    def _note_moved(self, now: float, unsent_bytes: int) -> None:
        if self._unsent_bytes:
            self._pulse.take(now - self._moved_s)
        self._unsent_bytes, self._moved_s = unsent_bytes, now

    def _note_coming(self, size: int) -> None:
        self._coming_bytes += size
        if self._room is not None:
            self._room.more(size)

    def _forget(self, size: int) -> None:
        """Note that so many bytes of what came are no longer kept."""
        if self._room is not None:
            self._room.less(size)

    def _evicted(self) -> None:
        self.discard()
        self.break_off(ConnectionResetError("too much waits here to be received, and this has waited longest"))

    def _take(self, frame: wire.Frame, last_bytes: int) -> None:
        """Take a frame that is whole now, with the last bytes that came of it."""
        if frame.kind is wire.FrameKind.MESSAGE:
            if self._left:
                self._drop_frame()
                return
            self._note_coming(last_bytes)
            if self._over:
                return
            self._inbox.append((frame.content, self._coming_bytes))
            self._coming_bytes = 0
            if len(self._inbox) >= _WAITING_MESSAGES and self._transport is not None:
                self._transport.pause_reading()
                self._reading_paused = True
            self._news.set()
        elif frame.kind is wire.FrameKind.END:
            self._peer_ended = True
            self._news.set()
            if self._left:
                self._close()
        elif frame.kind is wire.FrameKind.ERROR:
            self.break_off(ConnectionResetError(f"{self._peer} ended with an error: {_printable(frame.content)}"))

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._listening_s = self._loop.time()
            self._transport.resume_reading()

    def _linger(self) -> None:
        """Wait for the other's end, unless it has come already."""
        self._left, self._left_s = True, self._loop.time()
        self.discard()
        self._wake()
        if self._peer_ended:
            self._close()
        else:
            self._resume_reading()

    def _close(self) -> None:
        if self._over:
            return
        self._over = True
        self._drop_frame()
        self._wake()
        if self._transport is not None:
            self._transport.close()
        self._lost(self, None)

    def _stream_ended(self, error: Exception | None) -> None:
        if self._peer_ended or self._left:
            self._close()
        else:
            self.break_off(ConnectionResetError(f"the stream with {self._peer or 'the daemon'} broke"))

    def _drop_frame(self) -> None:
        """Count no more what came of a frame that will not come to its end; whole ones can still be received."""
        size, self._coming_bytes = self._coming_bytes, 0
        self._forget(size)

    def _wake(self) -> None:
        self._news.set()
        self._writable.set()


def _pieces(buffers: Sequence[Buffer], most_bytes: int) -> Iterator[memoryview]:
    """Yield what lies in `buffers` in pieces of at most so many bytes, without copies."""
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), most_bytes):
            yield view[start : start + most_bytes]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
