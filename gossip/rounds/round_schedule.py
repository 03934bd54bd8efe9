"""When a replica's next round is due, what number it has, and when an unmet replica stops deferring.

A round is due H own inner steps after the last opening, met or not. H may be another one from round to round
(`local_steps`): it is settled when a round is opened, so that an open round knows its end; until the first opening it
follows what becomes known, for a replica that has just begun knows neither its own speed nor the others'. A round's
number follows the last finished one and heals (`matching.heal`): from the roster when it opens, from offers and answers
while it is open. A deferred round is not finished: the others' numbers go on, and the next opening catches up with
them.

Plain bookkeeping: no tensors, no time, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from gossip.rounds.matching import good_enough_at, heal
from gossip.rule.staleness import ROUND_BOUND


class RoundSchedule:
    """One replica's counters. `round`: the one opened last (0 before the first); `finished`: the last one finished.

    `steps`: inner steps from the last opening to the next. `unknown_s`: what counts for times before the first step has
    been measured.
    """

    def __init__(self, inner_steps_per_round: int, rounds: int, inner_steps: int, unknown_s: float) -> None:
        self.steps = self._next_steps = inner_steps_per_round
        self._unknown_s = unknown_s
        self._opened = False
        self._opened_at = inner_steps
        self._seconds_per_step: float | None = None
        self.inner_steps = inner_steps
        self.round = self.finished = rounds
        self.deferred_in_a_row = 0
        self.healed = 0
        self._last = False

    def tick(self, inner_steps: int, seconds_per_step: float, next_steps: int | None = None) -> None:
        """Take note of the inner steps done, and of the seconds that one takes now.

        `next_steps`: inner steps that the next round to be opened will last; None leaves them as they are.
        """
        self.inner_steps, self._seconds_per_step = inner_steps, seconds_per_step
        self._next_steps = next_steps or self._next_steps
        if not self._opened:
            self.steps = self._next_steps

    @property
    def due(self) -> bool:
        """Whether the next round is to be opened."""
        return self.inner_steps - self._opened_at >= self.steps

    @property
    def ready_in_s(self) -> float:
        """Estimate the seconds until the next opening."""
        if self._seconds_per_step is None:
            return self._unknown_s
        return max(1, self._opened_at + self.steps - self.inner_steps) * self._seconds_per_step

    def preference_delay_s(self, place: int, count: int) -> float:
        """Return for how long preference number `place` of `count` is not good enough; 0 if it is.

        Whoever found nobody last time, or will open no further round, is not picky.
        """
        if self._last or self.deferred_in_a_row:
            return 0.0
        steps = good_enough_at(place, count) * self.steps - (self.inner_steps - self._opened_at)
        return max(0.0, steps) * (self._unknown_s if self._seconds_per_step is None else self._seconds_per_step)

    def next_round(self, listed: Sequence[int]) -> int:
        """Return the number that the next round has, after those that the roster says are finished."""
        return max(self.round, 1 + heal(self.finished, (), (self.finished, *listed), ROUND_BOUND))

    def open(self, listed: Sequence[int], *, last: bool = False) -> None:
        """Begin the next round."""
        self._last = last
        following = self.next_round(listed)
        self.healed += following > max(self.round, self.finished + 1)
        self.round = following
        self._opened_at, self._opened = self.inner_steps, True
        self.steps = self._next_steps

    def adopt(self, seen_round: int, listed: Sequence[int]) -> None:
        """Move up to a partner's number, as far as the roster makes it believable."""
        healed = heal(self.round, (seen_round,), (self.finished, *listed), ROUND_BOUND)
        self.healed += healed > self.round
        self.round = healed

    def defer(self) -> None:
        """Count a round without a partner."""
        self.deferred_in_a_row += 1

    def finish(self, round: int) -> None:
        """Count an outer step."""
        self.finished = round
        self.deferred_in_a_row = 0
