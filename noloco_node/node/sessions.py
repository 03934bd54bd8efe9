"""The sessions of a node: when it takes part, and how it comes back.

A node that keeps hours or a monthly cap lives in sessions. A session begins when the hours do, and ends politely with
them or when the cap is spent. Between two sessions there is no network: the node only waits. It asks the wall clock
again and again whether it may work, so that a machine that slept, or whose clock was set, errs by a minute at most.

A failure of the first session ends the node, because the person who started it is there to mend it. Later sessions
begin unattended, perhaps while the bootstrap peers or the home router are away. So the node reports a failure that time
may heal, and tries again after growing pauses until it is in, is asked to leave, or may not work any more. Any other
failure ends the node as in the first session.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias

from noloco_node.errors import Exit, UserError, causes, user_error_of
from noloco_node.limits.budget import MonthUsage, OwnerLimits, TrafficLedger, in_hours, is_spent, next_month_s
from noloco_node.limits.rate_limit import LimitHook
from noloco_node.machine.signals import Departure
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import PeerNetwork
from noloco_node.tasks import background, loop_s, until_event
from noloco_node.units import format_bytes, format_duration

LOOK_EVERY_S = 60.0
COUNT_EVERY_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
_MOST_GROWTHS = 10
STEADY_S = 1800.0  # the end of a session that lasted so long counts as a first failure
_PASSING = frozenset({Exit.UNREACHABLE, Exit.PORT_TAKEN, Exit.DAEMON, Exit.CONFIG})
"""CONFIG among them: the config was right for the first session, so an address or a disk of it is away now."""

Opened: TypeAlias = Callable[[], AbstractAsyncContextManager[PeerNetwork]]
TakePart: TypeAlias = Callable[[PeerNetwork, asyncio.Event], Awaitable[None]]


class OffReason(NamedTuple):
    """Why a node may not work now, and for how many seconds at least."""

    why: str
    for_s: float


def off_reason(limits: OwnerLimits, spent: MonthUsage, now: datetime) -> OffReason | None:
    """Return why a node may not work now, or None; of two reasons the one that lasts longer."""
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


class Sessions:
    """The sessions of one node. `traffic`: keeps what was sent and received. `now`: the time of day here."""

    def __init__(
        self, limits: OwnerLimits, traffic: Path, now: Callable[[], datetime], say: Callable[[str], None]
    ) -> None:
        self._limits, self._ledger, self._now, self.say = limits, TrafficLedger(traffic, now, say), now, say
        self._ended_for: OffReason | None = None
        self._hook: LimitHook | None = None
        self._line_share: tuple[str, float] | None = None

    def share_with_rounds(self, kind: str, share: float) -> None:
        """Reserve that share of the line for rounds (topics of this kind), in all sessions from now on."""
        self._line_share = kind, share
        if self._hook is not None:
            self._hook.share_with_rounds(kind, share)

    async def begin(self) -> None:
        """Wait until the node may work; say the reason, and until when."""
        said = ""
        while (reason := off_reason(self._limits, self._ledger.spent, self._now())) is not None:
            if reason.why != said:
                said = reason.why
                now = self._now()
                until = datetime.fromtimestamp(now.timestamp() + reason.for_s, now.tzinfo)
                self.say(f"{reason.why}: waiting until {until:%Y-%m-%d %H:%M}, Ctrl-C leaves now")
            await asyncio.sleep(min(max(reason.for_s, 0.01), LOOK_EVERY_S))

    def lasts_s(self) -> float:
        """Return for how many seconds the hours let the node work (infinity: always); 0 if not now."""
        now = self._now()
        if off_reason(self._limits, self._ledger.spent, now) is not None:
            return 0.0
        return math.inf if self._limits.hours is None else in_hours(self._limits.hours, now)[1]

    async def pause(self, for_s: float) -> None:
        """Wait so long, or until the node may not work any more."""
        until_s = loop_s() + for_s
        while True:
            left_s = min(until_s - loop_s(), self.lasts_s())
            if left_s <= 0.0:
                return
            await asyncio.sleep(min(max(left_s, 0.01), LOOK_EVERY_S))

    @asynccontextmanager
    async def session(
        self, network: PeerNetwork, asked: asyncio.Event
    ) -> AsyncIterator[tuple[PeerNetwork, asyncio.Event]]:
        """Enter one session: yields the network within the budget, and the event that ends the session.

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
        async with background(self._close(asked, over), self._count(network, hook)):
            yield network, over

    def goes_on(self) -> bool:
        """Say whether the hours or the cap ended the last session."""
        return self._ended_for is not None

    async def _close(self, asked: asyncio.Event, over: asyncio.Event) -> None:
        while not asked.is_set():
            reason = off_reason(self._limits, self._ledger.spent, self._now())
            if reason is not None:
                self._ended_for = reason
                self.say(f"{reason.why}: leaving politely")
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
        """Add the network's traffic to the ledger, and tell the hook the ledger's total."""
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
        """Add the network's counts beyond `sent` and `received` to the ledger; return its counts."""
        counts = network.statistics()
        now_sent = int(sum(count for name, count in counts.items() if name.startswith("bytes.sent.")))
        now_received = int(sum(count for name, count in counts.items() if name.startswith("bytes.received.")))
        self._ledger.add(max(0, now_sent - sent), max(0, now_received - received))
        return now_sent, now_received


def heals(error: BaseException) -> bool:
    """Say whether time may heal what ended a session; if there are several causes, all must be such."""
    return all(isinstance(each, UserError) and each.code in _PASSING for each in causes(error))


def pause_s(failures: int) -> float:
    """Return the pause after so many failures in a row: seconds at first, minutes at most."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, _MOST_GROWTHS))


def cause(trouble: UserError) -> str:
    """Return the error and the first of its reasons (there may be one for each address) as one clause."""
    first, *others = trouble.why.splitlines() or [""]
    more = f"; and {len(others)} more" if others else ""
    return f"{trouble.what.rstrip('.')} ({first.strip()}{more})"


async def live_in_sessions(sessions: Sessions, leaving: Departure, opened: Opened, take_part: TakePart) -> None:
    """Take part in one session after another until the run is over or we are asked to leave; raise what ends the node.

    `opened` opens the network of a session. From the second session on we leave at once when asked, even while we wait
    for the hours, for a network that opens, or for a pause to end.
    """
    asked, returns, failures = leaving.asked, False, 0
    while True:
        await until_event(asked, sessions.begin())
        if asked.is_set():
            return
        begun_s = loop_s()
        try:
            await _one_session(sessions, asked, opened, take_part)
        except Exception as error:
            trouble = user_error_of(error)
            if trouble is None or not returns or asked.is_set() or not heals(error):
                raise
            what = cause(trouble)
            del trouble  # its traceback holds all of the session, which would wait with us
        else:
            if asked.is_set() or not sessions.goes_on():
                return
            leaving.polite, returns, failures = True, True, 0
            continue
        failures = 1 if loop_s() - begun_s >= STEADY_S else failures + 1
        wait_s = pause_s(failures)
        if wait_s < sessions.lasts_s():
            sessions.say(f"{what}: trying again in {format_duration(wait_s)}, Ctrl-C leaves now")
        else:
            sessions.say(f"{what}: no time is left to try again in this session")
        await until_event(asked, sessions.pause(wait_s))
        if not sessions.lasts_s():
            failures = 0


async def _one_session(sessions: Sessions, asked: asyncio.Event, opened: Opened, take_part: TakePart) -> None:
    """Take part in one session; give up if we are asked to leave before the network is open."""

    async def give_up(way_in: asyncio.Timeout) -> None:
        await asked.wait()
        way_in.reschedule(loop_s())

    try:
        async with asyncio.timeout(None) as way_in:
            watch = asyncio.create_task(give_up(way_in), name="way in")
            try:
                async with opened() as whole, sessions.session(whole, asked) as (network, leave):
                    watch.cancel()  # `leave` is heeded from now on
                    await take_part(network, leave)
            finally:
                watch.cancel()
    except TimeoutError:
        if not way_in.expired():
            raise
