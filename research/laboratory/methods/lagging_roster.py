"""Who is there, and which rounds they have finished, as everybody's roster has it: so many seconds late.

A real roster is read from records that are refreshed now and then, so replicas see rounds that are over, and for a
while those who have left. Here everybody sees everybody as they were `lag_s` ago; at the beginning all are there.
"""

from __future__ import annotations

import math
from collections import deque

from gossip.interface import Candidate
from research.laboratory.methods.replicas import now_s

GONE = -1


class Crowd:
    """The replicas of one stage, for all of them."""

    def __init__(self, lag_s: float = 0.0) -> None:
        self._lag_s = lag_s
        self._speeds: dict[str, float] = {}
        self._courses: dict[str, deque[tuple[float, int]]] = {}
        """Of each, when it was in which finished round: from the last that can be seen on."""

    def __repr__(self) -> str:
        return f"<Crowd of {len(self._courses)}, seen {self._lag_s:g} s late>"

    def statistics(self) -> dict[str, int]:
        """Return how many there were at any time, and how many of them have left, as of now."""
        return {"all": len(self._courses), "gone": sum(course[-1][1] == GONE for course in self._courses.values())}

    def join(self, peer: str, speed: float, finished: int = 0) -> None:
        """Note a replica as if it had always been there, in this finished round; `speed` in inner steps a second."""
        self._speeds[peer] = speed
        self._courses[peer] = deque([(-math.inf, finished)])

    def note(self, peer: str, finished: int) -> None:
        """Note the number of the round that a replica has finished now."""
        self._courses[peer].append((now_s(), finished))

    def leave(self, peer: str) -> None:
        """Note that a replica has left now."""
        self.note(peer, GONE)

    def others(self, me: str) -> tuple[Candidate, ...]:
        """Return all but oneself, as they were."""
        then_s = now_s() - self._lag_s
        seen = []
        for peer, course in self._courses.items():
            while len(course) > 1 and course[1][0] <= then_s:
                course.popleft()
            finished = course[0][1]
            if peer != me and finished != GONE:
                seen.append(Candidate(peer, finished, self._speeds[peer]))
        return tuple(seen)
