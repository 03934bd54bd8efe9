"""The time of day by which records and tickets expire: this machine's, or that of the peers where they disagree.

A volunteer's clock may be wrong by an hour, or be set while a node runs. Each peer tells its machine's time of day with
its answer to a ping, and not the time by which it goes: else one wrong clock would spread. If at least half of those
that answered lately agree with this machine to within `CLOCK_DOUBT_S`, its own time of day counts; else the median of
theirs. So the machine takes part whatever its clock says. Liars move nobody for whom half of the answers are honest.
Names are free, so all peers of one public address prefix have one voice, and all that come through relays.

Fewer than `LEAST_TOLD` answers move nobody, except that of a peer by which we join, which the invite names. Where
nothing is decided, what was decided last stays.

Between two answers the clock runs by the time since the machine was started, which nobody sets and which goes on while
the machine sleeps. A virtual machine that was paused has lost that time, too: then its answers of before are wrong, and
more peers are asked at once (`is_doubted`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

from noloco_node.units import LATEST_UNIX_S

CLOCK_DOUBT_S = 60.0
"""This machine's time of day may differ from the others' by this and still count."""
TOLD_S = 1200.0
"""An answer counts for so long: by then some twenty peers have told the time."""
LEAST_TOLD, MOST_TOLD = 3, 32


def _since_start_s() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class _Told(NamedTuple):
    """What a peer told: its time of day minus the time since our start, and when (since our start).

    `is_door`: we join by it.
    """

    offset_s: float
    at_s: float
    is_door: bool


class SwarmClock:
    """`wall_s`: the time of day of this machine; `since_start_s`: a clock that nobody sets."""

    def __init__(
        self, wall_s: Callable[[], float] = time.time, since_start_s: Callable[[], float] = _since_start_s
    ) -> None:
        self._wall_s, self._since_start_s = wall_s, since_start_s
        self._told: dict[str, _Told] = {}  # by voice; the one that told last comes last
        self._offset_s, self._is_theirs = wall_s() - since_start_s(), False
        self._changing = threading.RLock()  # a program may run several peers, each in a thread of its own

    def unix_s(self) -> float:
        """Return the time of day that counts, in Unix seconds."""
        return self._since_start_s() + self._offset_s

    def earliest_s(self) -> float:
        """Return the earlier of the time that counts and this machine's: what is signed until then is not for ever."""
        return min(self.unix_s(), self.own_s())

    def own_s(self) -> float:
        """Return this machine's time of day, which we tell others."""
        return self._wall_s()

    def ahead_s(self) -> float:
        """Return by how much this machine's time of day is ahead of the time that counts; negative if behind."""
        self.settle()
        return self._wall_s() - self.unix_s()

    def disputed_s(self) -> float:
        """Return by how much this machine is ahead of all that told the time, where they are too few to decide.

        0 where one of them agrees with it, and where they decide.
        """
        with self._changing:
            self.settle()
            told = list(self._told.values())
            ahead_s = [self._wall_s() - self._since_start_s() - each.offset_s for each in told]
            decides = len(told) >= LEAST_TOLD or any(each.is_door for each in told)
            if not told or decides or self._is_theirs or min(map(abs, ahead_s)) < CLOCK_DOUBT_S:
                return 0.0
            return median_low(ahead_s)

    def note(self, voice: str, unix_s: float, *, is_door: bool = False) -> None:
        """Note the time that a peer has told just now; how long its answer was under way does not matter here.

        `voice`: the peer, or the address prefix of several peers.
        """
        if not 0.0 < unix_s <= LATEST_UNIX_S:
            return
        with self._changing:
            now_s = self._since_start_s()
            self._told.pop(voice, None)
            self._told[voice] = _Told(unix_s - now_s, now_s, is_door)
            if len(self._told) > MOST_TOLD:
                del self._told[next(iter(self._told))]
            self.settle()

    def is_doubted(self) -> bool:
        """Say whether this machine's time of day, or the latest answer, differs from the time that counts."""
        with self._changing:
            self.settle()
            latest = [each.offset_s for each in self._told.values()][-1:]
            found = [self._wall_s() - self._since_start_s(), *latest]
            return any(abs(each - self._offset_s) >= CLOCK_DOUBT_S for each in found)

    def settle(self) -> None:
        """Decide by the latest answers whose time counts."""
        with self._changing:
            now_s, own_s = self._since_start_s(), self._wall_s() - self._since_start_s()
            self._told = {voice: each for voice, each in self._told.items() if now_s - each.at_s < TOLD_S}
            told_s = [each.offset_s for each in self._told.values()]
            if len(told_s) >= LEAST_TOLD or any(each.is_door for each in self._told.values()):
                self._is_theirs = 2 * sum(abs(each - own_s) < CLOCK_DOUBT_S for each in told_s) < len(told_s)
                self._offset_s = median_low(told_s) if self._is_theirs else own_s
            elif not self._is_theirs and all(abs(each - self._offset_s) >= CLOCK_DOUBT_S for each in told_s):
                self._offset_s = own_s  # nobody holds that our clock was right before it was set


CLOCK = SwarmClock()
"""The clock of this process: hivemind, too, has one for all of its nodes."""
