"""Whose turn it is to be served, where a donor serves a few newcomers at once.

A place is nobody's for good, or two that read a byte a minute would keep all others out. Where all places are taken and
somebody else comes, one is freed that has been somebody's for a whole turn (what a copy takes on the slowest line that
is good enough), or whose newcomer takes much less than that line would carry. It keeps what it has, and asks again,
here or elsewhere. As long as nobody waits, the slowest newcomer may stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

NEWCOMERS = 2
"""Newcomers that are served at once."""
STREAMS = 4
"""Of one newcomer."""
SETTLING_S = 60.0
"""For which a newcomer's pace is not looked at."""
LEAST_PACE = 0.125
"""Of one copy in a turn: newcomers and training share our line, and a newcomer's disk takes its time."""


@dataclass(slots=True, eq=False)
class DonorSlot:
    """A newcomer's place. `since_s`: when it was told what there is, None before that. `total_bytes`: of its copy.

    `turns`: of its streams, each of which ends at the time to which its turn is set.
    """

    since_s: float | None = None
    given_bytes: int = 0
    total_bytes: int = 0
    turns: list[asyncio.Timeout] = field(default_factory=list)

    def begin(self, total_bytes: int) -> None:
        """Let the turn begin now, if it has not, for a copy of so many bytes at least."""
        if self.since_s is None:
            self.since_s = asyncio.get_running_loop().time()
        self.total_bytes = max(self.total_bytes, total_bytes)

    def pace(self, now_s: float) -> float:
        """Return copies a second so far; infinite before the turn has begun."""
        if self.since_s is None or now_s <= self.since_s:
            return float("inf")
        return self.given_bytes / max(1, self.total_bytes) / (now_s - self.since_s)


def overdue(slots: Collection[DonorSlot], turn_s: float, now_s: float) -> DonorSlot | None:
    """Return the slot that is another's now, None where all may stay. `turn_s`: for one whole copy."""

    def is_overdue(slot: DonorSlot) -> bool:
        if slot.since_s is None:
            return False
        slow = now_s - slot.since_s > SETTLING_S and slot.pace(now_s) * turn_s < LEAST_PACE
        return slow or now_s - slot.since_s > turn_s

    return min(filter(is_overdue, slots), key=lambda slot: slot.pace(now_s), default=None)


class DonorSlots:
    """The places of one donor. `turn_s`: for which a newcomer has its place, though others wait."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._by_peer: dict[str, DonorSlot] = {}
        self._displaced = 0

    def __len__(self) -> int:
        return len(self._by_peer)

    def statistics(self) -> dict[str, int | float]:
        """Return the newcomers that are served, and how many had to give their place to another."""
        return {"visitors": len(self), "displaced": self._displaced}

    def enter(self, peer: str) -> DonorSlot | None:
        """Return the place of a newcomer for one more stream, or None; then `turn` is to be entered at once."""
        slot = self._by_peer.get(peer)
        if slot is not None:
            return slot if len(slot.turns) < STREAMS else None
        if len(self._by_peer) >= NEWCOMERS:
            now_s = asyncio.get_running_loop().time()
            late = overdue(self._by_peer.values(), self._turn_s, now_s)
            if late is None:
                return None
            self._displaced += 1
            self._by_peer = {name: each for name, each in self._by_peer.items() if each is not late}
            for turn in late.turns:
                turn.reschedule(now_s)
        slot = self._by_peer[peer] = DonorSlot()
        return slot

    @asynccontextmanager
    async def turn(self, peer: str, slot: DonorSlot) -> AsyncIterator[None]:
        """Hold a newcomer's place for one stream; ConnectionAbortedError where it becomes another's."""
        turn = asyncio.timeout(None)
        slot.turns.append(turn)
        try:
            async with turn:
                yield
        except TimeoutError:
            if not turn.expired():
                raise
            raise ConnectionAbortedError("others wait, and this newcomer has had its turn") from None
        finally:
            slot.turns.remove(turn)
            if not slot.turns and self._by_peer.get(peer) is slot:
                del self._by_peer[peer]
