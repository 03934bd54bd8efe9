"""What the clocks of this machine say of the time between two samples of them: did it sleep, stand still, was it set?

Three clocks. The event loop's runs evenly, and on Linux stops while the machine sleeps; how long it has slept can be
asked there. The time of day goes on through a sleep, and may be set at any moment. So what the loop's clock and the
sleep do not account for is the clock being set; and a loop that comes to its turn much later than it had asked for was
stopped, or starved. Where a system does not tell its sleep (it says 0 for ever), a sleep looks like a clock that was
put forward, and is called so.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import NamedTuple

from noloco_node.units import format_duration

LEAST_S = 5.0
"""Of a sleep, or of a change of the clock: what is shorter matters to nobody."""
STILL_S = 10.0
"""By which the event loop may be late: a busy machine is not a stopped one."""


class JumpKind(StrEnum):
    """What happened."""

    SLEPT = "slept"
    STOOD_STILL = "stood still"
    CLOCK_SET = "clock set"


class ClockSample(NamedTuple):
    """The clocks at one moment: the event loop's, the time of day, and the seconds slept since the machine started."""

    loop_s: float
    unix_s: float
    asleep_s: float


class ClockJump(NamedTuple):
    """What happened between two samples, and how many seconds of it: negative for a clock that was set back."""

    kind: JumpKind
    seconds: float


def compare(before: ClockSample, after: ClockSample, expected_s: float) -> tuple[ClockJump, ...]:
    """Return what happened between two samples that were to be `expected_s` apart."""
    ran_s, slept_s = after.loop_s - before.loop_s, after.asleep_s - before.asleep_s
    set_s = after.unix_s - before.unix_s - ran_s - slept_s
    still_s = ran_s - expected_s
    found = []
    if slept_s >= LEAST_S:
        found.append(ClockJump(JumpKind.SLEPT, slept_s))
    if still_s >= STILL_S:
        found.append(ClockJump(JumpKind.STOOD_STILL, still_s))
    if abs(set_s) >= LEAST_S:
        found.append(ClockJump(JumpKind.CLOCK_SET, set_s))
    return tuple(found)


def sentence(jump: ClockJump) -> str:
    """Say what happened, and what follows."""
    how_long = format_duration(abs(jump.seconds))
    if jump.kind is JumpKind.SLEPT:
        return f"this machine slept for {how_long}: looking who is there, and going on"
    if jump.kind is JumpKind.STOOD_STILL:
        return f"this process stood still for {how_long} (stopped, or starved): looking who is there, and going on"
    if jump.seconds > 0.0:
        return f"the clock went forward by {how_long} (it was set, or the machine slept): saying anew that we are here"
    return f"the clock was set back by {how_long}: saying anew that we are here"


def asleep_s() -> float:
    """Return for how long this machine has slept since it was started; 0 where the system does not tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return 0.0
    return max(0.0, time.clock_gettime(clock) - time.clock_gettime(time.CLOCK_MONOTONIC))
