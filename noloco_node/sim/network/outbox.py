"""The way of one end's messages to the other in anything but fair weather.

Each message meets its fate when it is sent: lost, late, doubled, tampered with, or nothing. Then the line: a stream is
one flow, so its messages are transferred one after the other, each sharing the links of both peers with other streams.

While nothing passes between the two peers, what is due to leave is held back. It leaves when they are heard again, and
is dropped when its stream breaks, or after `silence_s` if the stream has been left: nothing grows behind a peer that
stays silent for ever. What is in flight arrives.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from noloco_node.network.wire import Violation
from noloco_node.sim.network.bandwidth import Link, Transfer
from noloco_node.sim.network.corruption import spoil

if TYPE_CHECKING:
    from noloco_node.sim.network.conversation import StreamEnd
    from noloco_node.sim.network.hub import SimNetwork


class EndOfStream(NamedTuple):
    """What ends a conversation: `kind` None is the polite end. `message`: one that it travels with, and behind."""

    kind: type[ConnectionError] | None
    text: str
    message: Any = None


class _Item(NamedTuple):
    """A message or a parting with its bytes on the line; `sent` is done when they have left."""

    content: Any
    size_bytes: int = 0
    late_s: float = 0.0
    sent: asyncio.Future[None] | None = None


class Outbox:
    """What one end of a conversation has yet to put in flight."""

    __slots__ = ("_down", "_end", "_held", "_hub", "_moving", "_patience", "_transfer", "_up", "_waiting")

    def __init__(self, hub: SimNetwork, end: StreamEnd, up: Link, down: Link) -> None:
        self._hub, self._end, self._up, self._down = hub, end, up, down
        self._waiting: list[_Item] = []
        self._held: list[_Item] = []
        self._moving: _Item | None = None
        self._transfer: Transfer | None = None
        self._patience: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Way({self._end!r}: {len(self._waiting)} wait, {len(self._held)} held back)"

    def statistics(self) -> dict[str, int | float]:
        """Return how many messages wait for the line and how many are held back."""
        return {"waiting": len(self._waiting), "held": len(self._held)}

    @property
    def is_idle(self) -> bool:
        """Whether all that was posted is in flight."""
        return self._transfer is None and not self._held

    @property
    def is_sending(self) -> bool:
        """Whether somebody waits for a message to leave."""
        parcels = (self._moving, *self._waiting) if self._moving is not None else ()
        return any(parcel.sent is not None and not parcel.sent.done() for parcel in parcels)

    def send(self, message: Any, size_bytes: int, fate: float) -> asyncio.Future[None] | None:
        """Send one message to its fate, 0 to 1: lost, late, doubled or nothing (see `SimNetwork.strange`).

        Returns what is done when it has left the line, or None when it has.
        """
        hub, weather = self._hub, self._hub.weather
        if fate < weather.loss:
            self._lose()
            return None
        # What is left of the draw is as good as a new one.
        fate = (fate - weather.loss) / (1 - weather.loss)
        is_late = fate < weather.late
        if is_late:
            hub.counts["messages.late"] += 1
            fate = hub.fates.random() if weather.duplicate else 1.0
        else:
            fate = (fate - weather.late) / (1 - weather.late) if weather.late < 1 else 1.0
        late_s = weather.late_s if is_late else 0.0
        message = self._spoil(message)
        if fate < weather.duplicate:
            hub.counts["messages.duplicated"] += 1
            self._take(_Item(message, size_bytes, late_s))
        sent = asyncio.get_running_loop().create_future() if size_bytes and self._is_limited() else None
        self._take(_Item(message, size_bytes, late_s, sent))
        return None if sent is None or sent.done() else sent

    def _lose(self) -> None:
        """Lose a message, and its stream with it: both ends see that a latency later."""
        hub, end = self._hub, self._end
        hub.counts["messages.lost"] += 1
        self.post(EndOfStream(ConnectionResetError, f"the stream with {end.me} broke: a message was lost"))
        words = f"the stream with {end.peer} broke: a message was lost"
        asyncio.get_running_loop().call_later(hub.draw_latency(), end.break_, ConnectionResetError, words)

    def _spoil(self, message: Any) -> Any:
        """Return what the other end decodes of a message, if it is to be tampered with."""
        hub, end = self._hub, self._end
        how = hub.next_tampering(end.me, message)
        if how is None:
            return message
        hub.counts["messages.tampered"] += 1
        try:
            return spoil(message, how, end.schema, end.their_schema, hub.spoils)
        except Violation as violation:
            return EndOfStream(Violation, str(violation))

    def post(self, parting: EndOfStream) -> None:
        """Send the end of the conversation behind all that was sent."""
        self._take(_Item(parting))

    def release(self) -> None:
        """Let go of what was held back, if the two peers are heard again."""
        if self._held and not self._hub.is_cut(self._end.me, self._end.peer):
            held, self._held = self._held, []
            self._stop_holding()
            for parcel in held:
                self._take(parcel)
            self._settle()

    def cut_short(self) -> None:
        """Forget all messages that are not in flight, for the stream broke; the break itself still has to be told."""
        breaks = [parcel for parcel in (*self._held, *self._waiting) if _is_break(parcel)]
        self.drop()
        for parcel in breaks:
            self._take(parcel)

    def drop(self) -> None:
        """Forget all that is not in flight."""
        if self._transfer is not None:
            self._transfer.cancel()
        parcels = [*self._held, *([self._moving] if self._moving else []), *self._waiting]
        self._held.clear()
        self._waiting.clear()
        self._transfer = self._moving = None
        self._stop_holding()
        for parcel in parcels:
            _note_sent(parcel)
        self._settle()

    def _is_limited(self) -> bool:
        return self._up.rate < math.inf or self._down.rate < math.inf

    def _take(self, parcel: _Item) -> None:
        if self._transfer is not None:
            self._waiting.append(parcel)
        else:
            self._set_out(parcel)

    def _set_out(self, parcel: _Item) -> None:
        if self._hub.cut and self._hub.is_cut(self._end.me, self._end.peer):
            self._hold(parcel)
        elif parcel.size_bytes and self._is_limited():
            self._moving = parcel
            self._transfer = Transfer(self._up, self._down, parcel.size_bytes, self._go_on)
        else:
            self._up.moved_bytes += parcel.size_bytes
            self._down.moved_bytes += parcel.size_bytes
            self._fly(parcel)

    def _go_on(self) -> None:
        """Put in flight what is through the line, and turn to the next."""
        assert self._moving is not None
        self._fly(self._moving)
        self._transfer = self._moving = None
        while self._waiting and self._transfer is None:
            self._set_out(self._waiting.pop(0))
        self._settle()

    def _fly(self, parcel: _Item) -> None:
        self._end.fly(parcel.content, parcel.size_bytes, parcel.late_s)
        _note_sent(parcel)

    def _hold(self, parcel: _Item) -> None:
        if not self._held:
            self._hub.holding[self] = None
            if self._end.is_over:
                self._patience = asyncio.get_running_loop().call_later(self._hub.weather.silence_s, self.drop)
        self._held.append(parcel)
        _note_sent(parcel)

    def note_left(self) -> None:
        """Note that nobody uses this end any more: what is held back for it is dropped when patience ends."""
        if self._held and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self._hub.weather.silence_s, self.drop)

    def _stop_holding(self) -> None:
        self._hub.holding.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _settle(self) -> None:
        if self.is_idle:
            self._end.note_idle()


def _is_break(parcel: _Item) -> bool:
    content = parcel.content
    return content.__class__ is EndOfStream and content.kind is not None and content.kind is not Violation


def _note_sent(parcel: _Item) -> None:
    if parcel.sent is not None and not parcel.sent.done():
        parcel.sent.set_result(None)
