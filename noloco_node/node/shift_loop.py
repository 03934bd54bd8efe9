"""One shift after another: a node that keeps hours comes back, also where nobody opens at first.

What keeps the first shift from beginning ends the node: whoever started it is there to put it right. Later ones begin
when nobody looks, perhaps while the bootstrap peers or the router at home are away. So what time may heal is said and
tried again, after pauses that grow, until the node is in, is asked to leave, or may not work any more; the next shift
then begins like any other. Whatever else goes wrong ends the node as in the first shift.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from noloco_node.errors import Exit, UserError, causes, user_error_of
from noloco_node.machine.signals import Departure
from noloco_node.network.interface import PeerNetwork
from noloco_node.node.shifts import Shifts
from noloco_node.tasks import until_event
from noloco_node.units import format_duration

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
_MOST_GROWTHS = 10
STEADY_S = 1800.0
"""A shift that lasted so long was no attempt: what ends it is the first failure of its row."""
_PASSING = frozenset({Exit.UNREACHABLE, Exit.PORT_TAKEN, Exit.DAEMON, Exit.CONFIG})
"""The config among them: an earlier shift began with it, so what is wrong now is around it, as where an address to
listen at is away with the router, or a data set with its disk."""

Opened: TypeAlias = Callable[[], AbstractAsyncContextManager[PeerNetwork]]
TakePart: TypeAlias = Callable[[PeerNetwork, asyncio.Event], Awaitable[None]]


def heals(error: BaseException) -> bool:
    """Say whether time may heal what ended a shift; of several causes all must be such."""
    return all(isinstance(each, UserError) and each.code in _PASSING for each in causes(error))


def pause_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row: some seconds at first, some minutes at most."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, _MOST_GROWTHS))


def failures_with(before: int, lasted_s: float) -> int:
    """Count one failure more, of a shift that lasted so long."""
    return 1 if lasted_s >= STEADY_S else before + 1


def cause(trouble: UserError) -> str:
    """Say in one clause what happened, and the first of its reasons: there may be one for each address."""
    first, *others = trouble.why.splitlines() or [""]
    more = f"; and {len(others)} more" if others else ""
    return f"{trouble.what.rstrip('.')} ({first.strip()}{more})"


def outlook(wait_s: float, lasts_s: float) -> str:
    """Say what follows on a failure: another attempt after `wait_s`, if the node may work for longer than that."""
    if wait_s < lasts_s:
        return f"trying again in {format_duration(wait_s)}, Ctrl-C leaves now"
    return "no time is left to try again in this shift"


async def shift_by_shift(
    shifts: Shifts, leaving: Departure, opened: Opened, take_part: TakePart, say: Callable[[str], None]
) -> None:
    """Take part in one shift after another until the run is over or we are asked to leave; raise what ends the node.

    `opened` opens the network of a shift. From the second one on whoever asks us to leave need not wait: neither for
    the hours, nor for a network that opens, nor for a pause to end.
    """
    loop, asked = asyncio.get_running_loop(), leaving.asked
    returns, failures = False, 0
    while True:
        await until_event(asked, shifts.begin())
        if asked.is_set():
            return
        begun_s = loop.time()
        try:
            await _shift(shifts, asked, opened, take_part)
        except Exception as error:
            trouble = user_error_of(error)
            if trouble is None or not returns or asked.is_set() or not heals(error):
                raise
            what = cause(trouble)
            del trouble  # its traceback holds all of the shift, which would wait with us
        else:
            if asked.is_set() or not shifts.goes_on():
                return
            leaving.polite, returns, failures = True, True, 0
            continue
        failures = failures_with(failures, loop.time() - begun_s)
        wait_s = pause_s(failures)
        say(f"{what}: {outlook(wait_s, shifts.lasts_s())}")
        await until_event(asked, shifts.pause(wait_s))
        if not shifts.lasts_s():
            failures = 0


async def _shift(shifts: Shifts, asked: asyncio.Event, opened: Opened, take_part: TakePart) -> None:
    """Take part in one shift; give up at once if we are asked to leave before the network is open."""
    loop = asyncio.get_running_loop()

    async def give_up(way_in: asyncio.Timeout) -> None:
        await asked.wait()
        way_in.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as way_in:
            watch = loop.create_task(give_up(way_in), name="way in")
            try:
                async with opened() as whole, shifts.shift(whole, asked) as (network, leave):
                    watch.cancel()  # `leave` is heeded from now on
                    await take_part(network, leave)
            finally:
                watch.cancel()
    except TimeoutError:
        if not way_in.expired():
            raise
