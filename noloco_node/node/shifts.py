"""When a node takes part: within its hours, and while the month's traffic lasts.

A node's life is a **shift**: it begins when the hours do and ends politely with them, or when the monthly cap is spent;
between two shifts there is no network, and nothing of the node but this wait. It comes back by itself. Whether it may
work is asked of the clock on the wall again and again, so that a machine that slept, or whose clock was set, errs by a
minute at most.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import NamedTuple

from noloco_node.limits.budget import MonthUsage, OwnerLimits, TrafficLedger, in_hours, is_spent, next_month_s
from noloco_node.limits.rate_limit import LimitHook
from noloco_node.network.interface import HookedNetwork, PeerNetwork
from noloco_node.tasks import loop_s
from noloco_node.units import format_bytes

LOOK_EVERY_S = 60.0
COUNT_EVERY_S = 2.0


class OffReason(NamedTuple):
    """Why a node does not work now, and for how many seconds at least."""

    why: str
    for_s: float


def off_reason(limits: OwnerLimits, spent: MonthUsage, now: datetime) -> OffReason | None:
    """Return why a node may not work now; None if it may. Of two reasons the one that lasts longer."""
    reasons: list[OffReason] = []
    if limits.hours is not None:
        inside, for_s = in_hours(limits.hours, now)
        if not inside:
            reasons.append(OffReason(f"it is outside the hours {limits.hours}", for_s))
    cap = limits.monthly_cap_bytes
    if cap is not None and is_spent(spent, cap, now):
        used = f"{format_bytes(spent.total_bytes)} of this month's {format_bytes(cap)} are used up"
        reasons.append(OffReason(used, next_month_s(now)))
    return max(reasons, key=lambda reason: reason.for_s, default=None)


class Shifts:
    """The shifts of one node. `now`: the time of day here."""

    def __init__(
        self, limits: OwnerLimits, ledger: TrafficLedger, now: Callable[[], datetime], say: Callable[[str], None]
    ) -> None:
        self._limits, self._ledger, self._now, self._say = limits, ledger, now, say
        self._ended_for: OffReason | None = None
        self._hook: LimitHook | None = None
        self._line_share: tuple[str, float] | None = None

    def share_with_rounds(self, kind: str, share: float) -> None:
        """In this shift and later ones give rounds, conversations about this kind of topic, that share of the line."""
        self._line_share = kind, share
        if self._hook is not None:
            self._hook.share_with_rounds(kind, share)

    async def begin(self) -> None:
        """Wait until the node may work; say why it waits, and until when."""
        said = ""
        while (reason := off_reason(self._limits, self._ledger.spent, self._now())) is not None:
            if reason.why != said:
                said = reason.why
                now = self._now()
                until = datetime.fromtimestamp(now.timestamp() + reason.for_s, now.tzinfo)
                self._say(f"{reason.why}: waiting until {until:%Y-%m-%d %H:%M}, Ctrl-C leaves now")
            await asyncio.sleep(min(max(reason.for_s, 0.01), LOOK_EVERY_S))

    def lasts_s(self) -> float:
        """Return for how many seconds the node may work as far as the hours say (infinity: always); 0 if not now."""
        now = self._now()
        if off_reason(self._limits, self._ledger.spent, now) is not None:
            return 0.0
        return math.inf if self._limits.hours is None else in_hours(self._limits.hours, now)[1]

    async def pause(self, for_s: float) -> None:
        """Wait so long, or until the node may not work any more."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + for_s
        while True:
            left_s = min(until_s - loop.time(), self.lasts_s())
            if left_s <= 0.0:
                return
            await asyncio.sleep(min(max(left_s, 0.01), LOOK_EVERY_S))

    @asynccontextmanager
    async def shift(
        self, network: PeerNetwork, asked: asyncio.Event
    ) -> AsyncIterator[tuple[PeerNetwork, asyncio.Event]]:
        """Enter one shift: yields the network within the budget, and the event that ends the shift.

        The event follows `asked`, and the end of the hours or of the cap; `goes_on` then says which it was.
        """
        self._ended_for = None
        over = asyncio.Event()
        if self._limits == OwnerLimits():
            yield network, asked
            return
        hook = self._hook = LimitHook(self._limits) if self._limits.is_limited else None
        if hook is not None:
            network = HookedNetwork(network, hook)
            if self._line_share is not None:
                hook.share_with_rounds(*self._line_share)
        async with asyncio.TaskGroup() as group:
            watching = [
                group.create_task(self._close(asked, over), name="end of the shift"),
                group.create_task(self._count(network, hook), name="traffic of the month"),
            ]
            try:
                yield network, over
            finally:
                for task in watching:
                    task.cancel()

    def goes_on(self) -> bool:
        """Say whether the last shift ended for a while only, because of the hours or the cap."""
        return self._ended_for is not None

    async def _close(self, asked: asyncio.Event, over: asyncio.Event) -> None:
        while not asked.is_set():
            reason = off_reason(self._limits, self._ledger.spent, self._now())
            if reason is not None:
                self._ended_for = reason
                self._say(f"{reason.why}: leaving politely")
                break
            wait_s = LOOK_EVERY_S if self._limits.monthly_cap_bytes is None else COUNT_EVERY_S
            if self._limits.hours is not None:
                wait_s = min(wait_s, max(0.01, in_hours(self._limits.hours, self._now())[1]))
            try:
                async with asyncio.timeout(wait_s):
                    await asked.wait()
            except TimeoutError:
                continue
        over.set()

    async def _count(self, network: PeerNetwork, hook: LimitHook | None) -> None:
        """Note what passes in the ledger, and in the hook what the ledger says."""
        if hook is None:
            return
        sent = received = 0
        kept_s = loop_s()
        try:
            while True:
                hook.month_bytes = self._ledger.spent.total_bytes
                await asyncio.sleep(COUNT_EVERY_S)
                sent, received = self._note(network, sent, received)
                if loop_s() - kept_s >= LOOK_EVERY_S:
                    kept_s = loop_s()
                    self._ledger.keep()  # some hundred bytes: not worth a thread
        finally:
            self._note(network, sent, received)
            self._ledger.keep()

    def _note(self, network: PeerNetwork, sent: int, received: int) -> tuple[int, int]:
        """Add to the ledger what the network counted beyond `sent` and `received`; return its counts."""
        counts = network.statistics()
        now_sent = int(sum(count for name, count in counts.items() if name.startswith("bytes.sent.")))
        now_received = int(sum(count for name, count in counts.items() if name.startswith("bytes.received.")))
        self._ledger.add(max(0, now_sent - sent), max(0, now_received - received))
        return now_sent, now_received
