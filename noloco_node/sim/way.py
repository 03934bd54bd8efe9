"""The way of one end's messages to the other in anything but fair weather.

Each message meets its fate when it is sent: lost, late, doubled, tampered with, or nothing. Then the line: a stream is
one flow, so its messages are transferred one after the other, each sharing the links of both peers with other streams.
Then the latency, and never before the message ahead.

While nothing passes between the two peers, what is due to leave is held back. It leaves when they are heard again, and
is dropped when its stream breaks, or after `silence_s` if the stream has been left: nothing grows behind a peer that
stays silent for ever. What is in flight arrives.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from noloco_node.sim.tamper import spoil
from noloco_node.sim.transfer import Link, Transfer
from noloco_node.wire import Violation

if TYPE_CHECKING:
    from noloco_node.sim.conversation import End
    from noloco_node.sim.network import Hub


class Parting(NamedTuple):
    """What ends a conversation: `kind` None is the polite end."""

    kind: type[ConnectionError] | None
    text: str


class _Parcel(NamedTuple):
    """A message or a parting with its bytes on the line; `sent` is done when they have left."""

    content: Any
    size_bytes: int = 0
    late_s: float = 0.0
    sent: asyncio.Future[None] | None = None


class Way:
    """What one end of a conversation has yet to put in flight."""

    __slots__ = ("_down", "_end", "_held", "_hub", "_last_s", "_moving", "_patience", "_transfer", "_up", "_waiting")

    def __init__(self, hub: Hub, end: End, up: Link, down: Link) -> None:
        self._hub, self._end, self._up, self._down = hub, end, up, down
        self._waiting: deque[_Parcel] = deque()
        self._held: deque[_Parcel] = deque()
        self._moving: _Parcel | None = None
        self._transfer: Transfer | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._last_s = 0.0

    def __repr__(self) -> str:
        return f"Way({self._end!r}: {len(self._waiting)} wait, {len(self._held)} held back)"

    def statistics(self) -> dict[str, int | float]:
        """Return how many messages wait for the line and how many are held back."""
        return {"waiting": len(self._waiting), "held": len(self._held)}

    @property
    def is_idle(self) -> bool:
        """Whether all that was posted is in flight."""
        return self._transfer is None and not self._held

    def send(self, message: Any, size_bytes: int) -> asyncio.Future[None] | None:
        """Send one message to its fate; return what is done when it has left the line, or None when it has."""
        hub, end, weather = self._hub, self._end, self._hub.weather
        if weather.loss and hub.fates.random() < weather.loss:
            hub.counts["messages.lost"] += 1
            self.post(Parting(ConnectionResetError, f"the stream with {end.me} broke: a message was lost"))
            words = f"the stream with {end.peer} broke: a message was lost"
            asyncio.get_running_loop().call_later(hub.draw_latency(), end.break_, ConnectionResetError, words)
            return None
        how = hub.next_tampering(end.me, message)
        if how is not None:
            hub.counts["messages.tampered"] += 1
            try:
                message = spoil(message, how, end.schema, end.their_schema, hub.spoils)
            except Violation as violation:
                message = Parting(Violation, str(violation))
        late_s = 0.0
        if weather.late and hub.fates.random() < weather.late:
            hub.counts["messages.late"] += 1
            late_s = weather.late_s
        if weather.duplicate and hub.fates.random() < weather.duplicate:
            hub.counts["messages.duplicated"] += 1
            self._take(_Parcel(message, size_bytes, late_s))
        sent = None
        if size_bytes and self._is_limited():
            sent = asyncio.get_running_loop().create_future()
        self._take(_Parcel(message, size_bytes, late_s, sent))
        return None if sent is None or sent.done() else sent

    def post(self, parting: Parting) -> None:
        """Send the end of the conversation behind all that was sent."""
        self._take(_Parcel(parting))

    def release(self) -> None:
        """Let go of what was held back, if the two peers are heard again."""
        if self._held and not self._hub.is_cut(self._end.me, self._end.peer):
            held, self._held = self._held, deque()
            self._stop_holding()
            for parcel in held:
                self._take(parcel)
            self._settle()

    def drop(self) -> None:
        """Forget all that is not in flight: its stream broke."""
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

    def _take(self, parcel: _Parcel) -> None:
        if self._transfer is not None:
            self._waiting.append(parcel)
        else:
            self._set_out(parcel)

    def _set_out(self, parcel: _Parcel) -> None:
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
            self._set_out(self._waiting.popleft())
        self._settle()

    def _fly(self, parcel: _Parcel) -> None:
        loop = asyncio.get_running_loop()
        arrival_s = loop.time() + self._hub.draw_latency() + parcel.late_s
        self._last_s = max(self._last_s, arrival_s)
        if parcel.size_bytes:
            self._end.note_arrival(parcel.size_bytes)
        self._end.flying.append(parcel.content)
        loop.call_at(self._last_s, self._end.arrive)
        _note_sent(parcel)

    def _hold(self, parcel: _Parcel) -> None:
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


def _note_sent(parcel: _Parcel) -> None:
    if parcel.sent is not None and not parcel.sent.done():
        parcel.sent.set_result(None)
