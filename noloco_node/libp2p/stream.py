"""One conversation over one socket: frames both ways, heartbeats, silence, and how it ends.

The socket leads to the libp2p daemon, which sends one message of its own first (whom this stream connects with, or why
it does not) and then the raw bytes of the stream. `Stream` is asyncio's `BufferedProtocol`, so the kernel writes
received bytes straight to where `wire.Intake` wants them: into the tensor itself.

Liveness. Both sides send a BEAT when they have sent nothing else for `beat_s`. A peer of whom no byte came for
`silence_s` on any of our streams is given up (one clock per peer, not per stream: on a slow link the beats of one
stream queue up behind the bulk of another). Beats come from the event loop, not from the work, so they vouch for the
peer, not for its progress; the caller's deadline bounds that.

Ends. Leaving politely sends END: the other's handler may finish what it does. Everything else that closes a stream
breaks it and cancels the handler: a caller that was cancelled or killed wants nothing any more. Whoever ended politely
keeps the socket open until the other has ended as well, for libp2p drops what is under way when one side closes early.

Flow. Reading pauses while two messages wait to be received; writing waits until the kernel has taken every byte, so
that a sent tensor may be changed when `send` returns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

from noloco_node import wire

_CHUNK_BYTES = 1 << 20
_WAITING_MESSAGES = 2
_PREAMBLE_BYTES = 64 * 1024


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for what, in seconds."""

    beat_s: float = 1.0
    silence_s: float = 6.0
    """A peer that was not heard for so long is given up."""
    stall_s: float = 30.0
    """A peer that is alive and takes none of our bytes for so long is given up."""
    linger_s: float = 30.0
    """How long a stream that we ended waits for the other's end."""
    open_s: float = 20.0
    """For a peer to accept a stream."""
    reach_s: float = 15.0
    """For a bootstrap peer to answer."""
    dht_s: float = 20.0
    """For the DHT to store or find records."""
    start_s: float = 120.0
    """For the libp2p daemon to start."""


class Pulse:
    """When a peer was last heard, shared by all streams with it."""

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.streams = 0


class Traffic:
    """Bytes of one topic."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0


class _Preamble:
    """Collects the daemon's first message: a length as a varint, then so many bytes."""

    def __init__(self) -> None:
        self._length = self._shift = 0
        self._counting = True
        self.content = bytearray(1)
        self._view = memoryview(self.content)

    def wants(self) -> memoryview:
        return self._view

    def got(self, count: int) -> bool:
        """Note so many bytes; say whether the message is complete."""
        self._view = self._view[count:]
        if self._view:
            return False
        if not self._counting:
            return True
        byte = self.content[0]
        self._length |= (byte & 0x7F) << self._shift
        self._shift += 7
        self._counting = byte >= 0x80
        if self._length > _PREAMBLE_BYTES or (self._counting and self._shift > 28):
            raise wire.Violation(f"the daemon announces a message of {self._length} bytes")
        self.content = bytearray(1 if self._counting else self._length)
        self._view = memoryview(self.content)
        return not self._counting and self._length == 0


class Stream(asyncio.BufferedProtocol):
    """One end of a conversation; implements `port.Conversation`.

    `introduce` is called once with the daemon's first message and calls `begin` or `break_off`; `lost` is called when
    the stream is of no use any more, with the error, or with None after a polite end.
    """

    def __init__(
        self,
        patience: Patience,
        introduce: Callable[[Stream, bytes], None],
        lost: Callable[[Stream, ConnectionError | None], None],
    ) -> None:
        self._patience, self._introduce, self._lost = patience, introduce, lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._intake: _Preamble | wire.Intake = _Preamble()
        self._schema: wire.Schema | None = None
        self._peer = ""
        self._pulse = Pulse()
        self._traffic = Traffic()
        self._inbox: deque[Any] = deque()
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._sending = asyncio.Lock()
        self._broken: ConnectionError | None = None
        self._peer_ended = self._left = self._reading_paused = self._over = False
        self._sent_s = self._moved_s = self._left_s = self._loop.time()
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
        self._check()
        if self._peer_ended:
            raise ConnectionResetError(f"{self._peer} ended the conversation")
        assert self._schema is not None
        buffers = wire.encode(message, self._schema)
        async with self._sending:
            whole = False
            try:
                for buffer in buffers:
                    view = memoryview(buffer)
                    for start in range(0, len(view), _CHUNK_BYTES):
                        self._check()
                        self._write(view[start : start + _CHUNK_BYTES])
                        await self._writable.wait()
                self._check()
                whole = True
            finally:
                if not whole:
                    # Half a frame is out; nothing that follows would make sense.
                    self.break_off(ConnectionResetError("a message was cut short by its sender"))

    async def receive(self) -> Any:
        """Return the next message; a `ConnectionError` when none can come any more."""
        while not self._inbox:
            self._check()
            if self._peer_ended:
                raise ConnectionResetError(f"{self._peer} ended the conversation")
            self._news.clear()
            await self._news.wait()
        message = self._inbox.popleft()
        self._resume_reading()
        return message

    # What the network needs.

    @property
    def peer_ended(self) -> bool:
        """Whether the other side ended politely: then a lost stream is no reason to cancel our handler."""
        return self._peer_ended

    def begin(self, peer: str, schema: wire.Schema, pulse: Pulse, traffic: Traffic) -> None:
        """Start talking in frames."""
        self._peer, self._schema, self._pulse, self._traffic = peer, schema, pulse, traffic
        self._pulse.heard_s = self._loop.time()
        self._intake = wire.Intake(schema)

    def write_raw(self, content: bytes) -> None:
        """Write bytes that are for the daemon itself."""
        self._write(content)

    def leave(self) -> None:
        """End politely: say END, and close when the other has ended too."""
        if self._over or self._left:
            return
        if self._sending.locked():
            self.break_off(ConnectionResetError("the conversation was left while a message was being sent"))
            return
        self._write(wire.end())
        self._linger()

    def fail(self, sentence: str) -> None:
        """End with an error that the other side gets to read."""
        if self._over or self._left:
            return
        if self._sending.locked():
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
        self._wake()
        if self._transport is not None:
            # A violator is told why, as far as that is possible without waiting.
            if isinstance(error, wire.Violation):
                self._transport.close()
            else:
                self._transport.abort()
        self._lost(self, error)

    def tick(self, now: float) -> None:
        """Beat if it is time to, and give the peer up if it is silent; called every half beat."""
        if self._over or self._schema is None or self._transport is None:
            return
        patience, listening = self._patience, not (self._reading_paused or self._peer_ended)
        if listening and now - self._pulse.heard_s > patience.silence_s:
            self.break_off(ConnectionAbortedError(f"{self._peer} was silent for {patience.silence_s:g} s"))
        elif self._left and now - self._left_s > patience.linger_s:
            self._close()
        elif not self._is_moving(now):
            self.break_off(ConnectionAbortedError(f"{self._peer} took no byte for {patience.stall_s:g} s"))
        elif not self._left and not self._sending.locked() and now - self._sent_s >= patience.beat_s:
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
        self._pulse.heard_s = self._loop.time()
        self._traffic.received_bytes += nbytes
        try:
            if isinstance(self._intake, wire.Intake):
                frame = self._intake.got(nbytes)
                if frame is not None:
                    self._take(frame)
            elif self._intake.got(nbytes):
                self._introduce(self, bytes(self._intake.content))
        except wire.Violation as violation:
            if not self._over and self._schema is not None and not self._sending.locked():
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
            self._unsent_bytes, self._moved_s = unsent, now
        return now - self._moved_s <= self._patience.stall_s

    def _take(self, frame: wire.Frame) -> None:
        if frame.kind is wire.Kind.MESSAGE:
            if self._left:
                return
            self._inbox.append(frame.content)
            if len(self._inbox) >= _WAITING_MESSAGES and self._transport is not None:
                self._transport.pause_reading()
                self._reading_paused = True
            self._news.set()
        elif frame.kind is wire.Kind.END:
            self._peer_ended = True
            self._news.set()
            if self._left:
                self._close()
        elif frame.kind is wire.Kind.ERROR:
            self.break_off(ConnectionResetError(f"{self._peer} ended with an error: {_printable(frame.content)}"))

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._pulse.heard_s = self._loop.time()
            self._transport.resume_reading()

    def _linger(self) -> None:
        """Wait for the other's end, unless it has come already."""
        self._left, self._left_s = True, self._loop.time()
        self._inbox.clear()
        self._wake()
        if self._peer_ended:
            self._close()
        else:
            self._resume_reading()

    def _close(self) -> None:
        if self._over:
            return
        self._over = True
        self._wake()
        if self._transport is not None:
            self._transport.close()
        self._lost(self, None)

    def _stream_ended(self, error: Exception | None) -> None:
        if self._peer_ended or self._left:
            self._close()
        else:
            self.break_off(ConnectionResetError(f"the stream with {self._peer or 'the daemon'} broke"))

    def _wake(self) -> None:
        self._news.set()
        self._writable.set()


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
