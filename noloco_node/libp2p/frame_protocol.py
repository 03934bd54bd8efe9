"""The rules of one conversation without its I/O: bytes and times in, events and bytes out, as in h11 and aioquic.

The owner fills (part of) `next_buffer()` and says so with `receive_bytes`; writes what `data_to_send` returns after
each call; and takes messages with `next_message`. Every time is passed in: nothing here waits or looks at a clock.

Liveness. Both sides send a BEAT when they have sent nothing else for `beat_s`. All streams with a peer share one
`PeerLiveness`, because on a slow link the beats of one stream queue up behind the bulk of another. It notes how far
apart the peer's bytes come: every gap of half a beat or more. On a good line these gaps are as long as a beat and
equal, so a dead peer is noticed after some five of them; on an uneven line a longer silence is tolerated
(`noloco_node.network.calls`). While nothing is known, `TimeoutSettings.silence_s` counts. A gap counts only where we
listened, not after our own sleep or while we had stopped reading. But a peer that we gave up and that comes back soon
was there all the time, so that silence is a gap like others. Beats come from the event loop, not from the work, so they
vouch for the peer, not for its progress; the caller's deadline bounds that.

Ends. Leaving politely sends END: the other's handler may finish what it does. Everything else that closes a stream
breaks it and cancels the handler: a caller that was cancelled or killed wants nothing any more. The side that ended
politely keeps the socket open until the other has ended as well, for libp2p drops what is under way when one side
closes early.

Memory. At most `MOST_WAITING` messages wait to be received while the owner stops reading at `is_full`, and one more is
under way; `held_bytes` counts both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, NoReturn, TypeAlias

from noloco_node.libp2p.settings import TimeoutSettings
from noloco_node.network import wire
from noloco_node.network.calls import MOST_PEERS, RttEstimate, deadline_s, observed
from noloco_node.network.interface import ConversationEnded
from noloco_node.network.schema import Schema, Violation
from noloco_node.network.wire import Buffer

MOST_WAITING = 2


class PeerLiveness:
    """Of one peer, shared by all streams with it."""

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self.streams = 0
        self._least_gap_s = timeouts.beat_s / 2
        self._silences, self._stalls = timeouts.silences(), timeouts.stalls()
        self._gaps: RttEstimate | None = None
        self._pauses: RttEstimate | None = None
        self._heard_s = float("-inf")
        self._silent_since_s: float | None = None
        """From when on it was silent, if it was given up for that."""

    @property
    def silence_s(self) -> float:
        return deadline_s(self._gaps, 0, self._silences)

    @property
    def stall_s(self) -> float:
        return deadline_s(self._pauses, 0, self._stalls)

    def hear(self, now_s: float, since_s: float) -> None:
        """Note that bytes came by a stream that has listened for them since `since_s`."""
        if self._silent_since_s is None:
            self._gaps = self._with(self._gaps, now_s - max(self._heard_s, since_s), self.silence_s)
        else:
            self._gaps = self._with(self._gaps, now_s - self._silent_since_s, self._silences.most_s)
            self._silent_since_s = None
        self._heard_s = now_s

    def is_silent(self, now_s: float, since_s: float) -> bool:
        return now_s - max(self._heard_s, since_s) > self.silence_s

    def give_up(self, since_s: float) -> None:
        """Note that a stream that has listened since `since_s` gave the peer up for its silence."""
        if self._silent_since_s is None:
            self._silent_since_s = max(self._heard_s, since_s)

    def take(self, pause_s: float) -> None:
        self._pauses = self._with(self._pauses, pause_s, self.stall_s)

    def _with(self, known: RttEstimate | None, gap_s: float, most_s: float) -> RttEstimate | None:
        """Return an estimate with one more gap. A gap longer than we tolerate was our own absence."""
        return observed(known, gap_s) if self._least_gap_s <= gap_s <= most_s else known


class LivenessTable:
    """Of all peers: those with whom we converse, and the last with whom we did."""

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._peers: dict[str, PeerLiveness] = {}

    def streams(self, peer: str) -> int:
        return self._peers[peer].streams if peer in self._peers else 0

    def begin(self, peer: str) -> PeerLiveness:
        """Return what is known of a peer with whom another stream begins.

        That is no sign of life: daemons open streams for programs that hang.
        """
        liveness = self._peers.pop(peer, None) or PeerLiveness(self._timeouts)
        if len(self._peers) >= MOST_PEERS:
            idle = next((other for other, each in self._peers.items() if not each.streams), None)
            if idle is not None:
                del self._peers[idle]
        self._peers[peer] = liveness
        liveness.streams += 1
        return liveness

    def end(self, peer: str) -> None:
        self._peers[peer].streams -= 1


class SendState(Enum):
    """Our half of the conversation."""

    BETWEEN_FRAMES = auto()
    IN_MESSAGE = auto()
    """A part of a message is out: nothing but the rest of it may follow."""
    ENDED = auto()
    """We sent END or ERROR."""


class MessageReceived(NamedTuple):
    """A message waits for `next_message`."""


class PeerEnded(NamedTuple):
    """The other side ended politely: it sends no more, and takes no more messages."""


class StreamClosed(NamedTuple):
    """The stream is of no use any more: broken by `error`, or None after a polite end. Nothing follows it."""

    error: ConnectionError | None


Event: TypeAlias = MessageReceived | PeerEnded | StreamClosed
_MESSAGE_RECEIVED, _PEER_ENDED = MessageReceived(), PeerEnded()
# By name: to look a member of an enum up takes a while.
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
        self.is_full = False
        """Whether so many messages wait that no more should be read."""
        self.held_bytes = 0
        """Of what came and was not received, the message under way included."""
        self._schema, self._liveness, self._timeouts = schema, liveness, timeouts
        self._decoder = wire.FrameDecoder(schema)
        self.next_buffer = self._decoder.wants
        """Returns where the next bytes belong: never empty, and never beyond the current frame."""
        self._inbox: deque[tuple[Any, int]] = deque()
        """Messages that nobody has received, and the bytes of each."""
        self._incoming_bytes = 0
        """Of the message under way."""
        self._output = b""
        self._sent_s = self._taken_s = self._ended_s = self._listening_s = now_s
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

    def receive_bytes(self, count: int, now_s: float) -> Event | None:
        """Take note that the first `count` bytes of `next_buffer()` were filled."""
        if self.closed is not None:
            return None
        self._liveness.hear(now_s, self._listening_s)
        try:
            frame = self._decoder.got(count)
        except Violation as violation:
            if self.send_state is _BETWEEN_FRAMES:
                self._output += wire.error(str(violation))
            return self.break_off(violation)
        if frame is None:
            if self._decoder.in_message:
                self._incoming_bytes += count
                self.held_bytes += count
            return None
        if frame.kind is _MESSAGE:
            return self._receive_message(frame.content, count)
        if frame.kind is _END:
            self.peer_ended = True
            return _PEER_ENDED if self.send_state is not _ENDED else self._close(None)
        if frame.kind is _ERROR:
            sentence = "".join(letter if letter.isprintable() else " " for letter in frame.content)
            return self.break_off(ConnectionResetError(f"{self.peer} ended with an error: {sentence}"))
        return None

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
        has_ended = self.send_state is _ENDED
        is_listening = not (self.is_full or self.peer_ended)
        if is_listening and self._liveness.is_silent(now_s, self._listening_s):
            self._liveness.give_up(self._listening_s)
            silence_s = self._liveness.silence_s
            return self.break_off(ConnectionAbortedError(f"{self.peer} was silent for {silence_s:.1f} s"))
        if has_ended and now_s - self._ended_s > self._timeouts.linger_s:
            return self._close(None)
        if unsent_bytes == 0 or unsent_bytes != self._unsent_bytes:
            self._note_taken(now_s, unsent_bytes)
        if now_s - self._taken_s > self._liveness.stall_s:
            stall_s = self._liveness.stall_s
            return self.break_off(ConnectionAbortedError(f"{self.peer} took no byte for {stall_s:.0f} s"))
        if self.send_state is _BETWEEN_FRAMES and now_s - self._sent_s >= self._timeouts.beat_s:
            self._output += wire.beat()
            self._sent_s = now_s
        return None

    # Ends.

    def leave(self, now_s: float) -> StreamClosed | None:
        return self._end(wire.end(), "the conversation was left while a message was being sent", now_s)

    def fail(self, sentence: str, now_s: float) -> StreamClosed | None:
        return self._end(wire.error(sentence), sentence, now_s)

    def break_off(self, error: ConnectionError) -> StreamClosed | None:
        """Break the stream at once, whatever is under way; None if it was closed before."""
        return self._close(error)

    def lose_connection(self) -> StreamClosed | None:
        if self.peer_ended or self.send_state is _ENDED:
            return self._close(None)
        return self._close(ConnectionResetError(f"the stream with {self.peer} broke"))

    # Inside.

    def _raise_closed(self) -> NoReturn:
        error = None if self.closed is None else self.closed.error
        if error is not None:
            raise type(error)(*error.args)
        raise ConnectionResetError(f"the conversation with {self.peer} is over")

    def _receive_message(self, message: Any, last_bytes: int) -> Event | None:
        if self.send_state is _ENDED:
            self._drop_incoming()
            return None
        self._inbox.append((message, self._incoming_bytes + last_bytes))
        self.held_bytes += last_bytes
        self._incoming_bytes = 0
        self.is_full = len(self._inbox) >= MOST_WAITING
        return _MESSAGE_RECEIVED

    def _note_taken(self, now_s: float, unsent_bytes: int) -> None:
        if self._unsent_bytes:
            self._liveness.take(now_s - self._taken_s)
        self._unsent_bytes, self._taken_s = unsent_bytes, now_s

    def _end(self, frame: bytes, why: str, now_s: float) -> StreamClosed | None:
        if self.closed is not None or self.send_state is _ENDED:
            return None
        if self.send_state is _IN_MESSAGE:
            return self._close(ConnectionResetError(why))
        self._output += frame
        if self.is_full:
            self._listening_s = now_s
        self.send_state, self._sent_s, self._ended_s = _ENDED, now_s, now_s
        self.discard()
        return self._close(None) if self.peer_ended else None

    def _close(self, error: ConnectionError | None) -> StreamClosed | None:
        if self.closed is not None:
            return None
        self.closed = StreamClosed(error)
        self._drop_incoming()
        return self.closed

    def _drop_incoming(self) -> None:
        """Forget a message that will not come to its end; whole ones can still be received."""
        self.held_bytes -= self._incoming_bytes
        self._incoming_bytes = 0
