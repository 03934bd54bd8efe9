"""What keeps a network to a budget, over libp2p and in memory alike.

Each direction has one `FairLimiter` for all conversations. **Upload** is paced within a message: the stream asks for
each piece, a slice of the rate, so over any stretch of t seconds no more leaves than rate * t + burst. A network in
memory sends a message when the last of its bytes has been granted. **Download** is held back by reading: a message that
came is handed out when its bytes are granted. Every conversation here is questions and answers, so nobody is sent the
next message before the last was taken.

Pieces of all messages come in turn, a twentieth of a second of the rate each: oftener than beats would, unless some
dozens of large messages are under way at once, so nobody takes us for dead. Small messages come before large ones, so
that proposals, answers and records do not starve behind a copy. Of the large ones those of rounds have a share of the
line while others wait, and all of it while none does. The DHT's records and libp2p's own traffic do not pass here.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from noloco_node.limits.budget import SMALL_BYTES, OwnerLimits, full_bucket, give_back, take
from noloco_node.network.interface import Conversation, NetworkHook, Pace
from noloco_node.tasks import loop_s
from noloco_node.units import format_bytes, format_rate

MEMORY_S = 30.0  # over about how long the rate in use is a mean


class _Wanted:
    """A message, or a piece of one, that waits for its bytes."""

    __slots__ = ("granted", "ready", "size")

    def __init__(self, size: int, ready: asyncio.Future[None]) -> None:
        self.size, self.granted, self.ready = size, 0, ready


class FairLimiter:
    """One direction of the line; `bytes_per_s` None only counts.

    `round_share`: what rounds have of it while other large messages wait.
    """

    def __init__(self, bytes_per_s: float | None, round_share: float = 0.5) -> None:
        now_s = loop_s()
        self.bytes_per_s = bytes_per_s
        self.passed_bytes = 0
        self._bucket = None if bytes_per_s is None else full_bucket(bytes_per_s, now_s)
        self._small: deque[_Wanted] = deque()
        self._large: deque[_Wanted] = deque()
        self._rounds: deque[_Wanted] = deque()
        self.round_share = round_share
        self._ahead = 0.0  # bytes that rounds have had beyond their share of late
        self._timer: asyncio.TimerHandle | None = None
        self._used_per_s, self._used_at_s = 0.0, now_s

    @property
    def used_bytes_per_s(self) -> float:
        """The rate that passed lately, a mean that forgets."""
        return self._faded(loop_s())

    def pace(self, *, in_round: bool = False) -> Pace | None:
        """Return the pace of one conversation; None where nothing is limited. `in_round`: it is a round's."""
        return None if self._bucket is None else Pace(self._bucket.slice_bytes, partial(self.admit, in_round=in_round))

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait, what has been granted of them aside; of a message in pieces the next one only."""
        return sum(wanted.size - wanted.granted for wanted in (*self._small, *self._large, *self._rounds))

    async def admit(self, size: int, message_bytes: int = 0, *, in_round: bool = False) -> None:
        """Return when `size` bytes may pass, which may be a piece of a message of `message_bytes`.

        What was granted to a caller who is cancelled goes back.
        """
        if self._bucket is not None:
            wanted = _Wanted(size, asyncio.get_running_loop().create_future())
            large = self._rounds if in_round else self._large
            queue = self._small if max(size, message_bytes) <= SMALL_BYTES else large
            queue.append(wanted)
            self._grant()
            try:
                await wanted.ready
            except asyncio.CancelledError:
                if wanted in queue:
                    queue.remove(wanted)
                self._bucket = give_back(self._bucket, wanted.granted)
                self._grant()
                raise
        now_s = loop_s()
        self._used_per_s, self._used_at_s = self._faded(now_s) + size / MEMORY_S, now_s
        self.passed_bytes += size

    def _grant(self) -> None:
        """Hand out slices, small messages first, rounds by their share and the others in turn, as far as it goes."""
        assert self._bucket is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while queue := self._small or self._next_large():
            wanted = queue[0]
            share = min(wanted.size - wanted.granted, self._bucket.slice_bytes)
            self._bucket, wait_s = take(self._bucket, share, loop.time())
            if wait_s > 0.0:
                self._timer = loop.call_later(wait_s, self._grant)
                return
            wanted.granted += share
            self._charge(queue, share)
            if wanted.granted >= wanted.size:
                queue.popleft()
                if not wanted.ready.done():
                    wanted.ready.set_result(None)
            else:
                queue.rotate(-1)

    def _next_large(self) -> deque[_Wanted]:
        """Return whose turn it is: the rounds' while they have had no more than their share."""
        if self._rounds and self._large:
            return self._large if self._ahead > 0.0 else self._rounds
        return self._rounds or self._large

    def _charge(self, queue: deque[_Wanted], size: int) -> None:
        """Count what rounds or others had; who was alone for long owes a second of the line at most."""
        assert self._bucket is not None
        if queue is not self._small:
            more = size * ((queue is self._rounds) - self.round_share)
            self._ahead = max(-self._bucket.burst_bytes, min(self._bucket.burst_bytes, self._ahead + more))

    def _faded(self, now_s: float) -> float:
        return self._used_per_s * math.exp((self._used_at_s - now_s) / MEMORY_S)


class LimitHook(NetworkHook):
    """Keeps all conversations of a network together to what the owner allows."""

    def __init__(self, allowance: OwnerLimits) -> None:
        self.allowance = allowance
        self.up = FairLimiter(allowance.upload_bytes_per_s)
        self.down = FairLimiter(allowance.download_bytes_per_s)
        self._round_topic: str | None = None
        self.month_bytes = 0  # bytes of this calendar month, as the ledger has them

    def share_with_rounds(self, kind: str, share: float) -> None:
        """From now on conversations begun about a topic of this kind are rounds', and have this share of the line."""
        self._round_topic = kind
        self.up.round_share = self.down.round_share = share

    def opened(self, conversation: Conversation, topic: str) -> Conversation:
        in_round = topic.partition("/")[0] == self._round_topic
        conversation.limit(self.up.pace(in_round=in_round), self.down.pace(in_round=in_round))
        return conversation

    def answering(self, conversation: Conversation, topic: str) -> AbstractContextManager[Conversation]:
        return nullcontext(self.opened(conversation, topic))

    def statistics(self) -> dict[str, int | float]:
        """Return under `budget.` what is allowed and used, in bytes (a second)."""
        counts: dict[str, int | float] = {}
        for name, limiter in (("upload", self.up), ("download", self.down)):
            if limiter.bytes_per_s is not None:
                counts[f"budget.{name}.allowed"] = limiter.bytes_per_s
                counts[f"budget.{name}.used"] = limiter.used_bytes_per_s
                counts[f"budget.{name}.waiting"] = limiter.waiting_bytes
        if self.allowance.monthly_cap_bytes is not None:
            counts["budget.month.allowed"] = self.allowance.monthly_cap_bytes
            counts["budget.month.used"] = self.month_bytes
        return counts


def spending(counts: Mapping[str, int | float]) -> str | None:
    """Say what a network's statistics say of its budget, in words; None where there is none."""
    said = [
        f"{name} {format_rate(counts[f'budget.{name}.used'])} of {format_rate(allowed)}"
        for name in ("upload", "download")
        if (allowed := counts.get(f"budget.{name}.allowed")) is not None
    ]
    if (cap := counts.get("budget.month.allowed")) is not None:
        said.append(f"{counts['budget.month.used'] / cap:.0%} of this month's {format_bytes(cap)}")
    return ", ".join(said) or None
