"""The messages that one end of a conversation has yet to put in flight, where the medium is not free.

Each message meets its fate when it is sent: lost, late, doubled, corrupted, or nothing. Then the messages of a stream
are transferred one after the other, each sharing the links of both peers with other streams. While nothing passes
between two peers, messages are held back; they leave when the peers reach each other again, and are dropped when the
stream breaks, or after `SILENCE_S` if it has been left.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, NamedTuple, Protocol

from noloco_node.network.schema import Schema, Violation
from noloco_node.sim.network.link_model import SILENCE_S, Link, Transfer
from noloco_node.sim.network.medium import Medium, spoil


class Endpoint(Protocol):
    """The interface of an outbox to the end of the conversation whose messages it sends."""

    me: str
    schema: Schema
    their_schema: Schema

    @property
    def peer(self) -> str:
        """The peer at the other end."""

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent or received any more at this end."""

    def transmit(self, content: Any, size_bytes: int, late_s: float) -> None:
        """Put a message, or the end of the stream, in flight."""

    def note_all_sent(self) -> None:
        """Note that all that was posted is in flight."""

    def note_broken(self, kind: type[ConnectionError], text: str) -> None:
        """Note that the stream broke."""


class EndOfStream(NamedTuple):
    """The end of a conversation: a polite one where `kind` is None. `message`: one that it travels with, and behind."""

    kind: type[ConnectionError] | None
    text: str
    message: Any = None


class _Item(NamedTuple):
    """A message or the end of the stream with its bytes on the line; `sent` is done when they have left."""

    content: Any
    size_bytes: int = 0
    late_s: float = 0.0
    sent: asyncio.Future[None] | None = None


class Outbox:
    """The messages that one end of a conversation has yet to put in flight."""

    def __init__(self, medium: Medium, end: Endpoint, up: Link, down: Link, *, in_round: bool = False) -> None:
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
            self._medium.held_outboxes[self] = None
        self._held.append(item)
        if self._end.is_over:
            self.note_left()
        _note_sent(item)

    def note_left(self) -> None:
        """Note that nobody uses this end any more: what is held back for it is dropped after `SILENCE_S`."""
        if self._held and self._drop_timer is None:
            self._drop_timer = asyncio.get_running_loop().call_later(SILENCE_S, self.drop)

    def _stop_holding(self) -> None:
        self._medium.held_outboxes.pop(self, None)
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
