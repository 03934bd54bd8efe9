"""When a replica's next round is due, what number it has, and how many inner steps it takes.

A round is due H own inner steps after the last opening, met or not. H is settled when a round opens, so that an open
round knows its end; before the first opening it follows what becomes known of speeds. A round's number follows the last
finished one and heals (`matching.heal`): from the roster at the opening, from proposals and answers while it is open. A
skipped round is not finished; the next opening catches up with the others' numbers.

**Dynamic local updates** (Asynchronous Local-SGD, arXiv 2401.09135, equation 6). With speed v, and v_max that of the
stage's fastest replica, a replica takes

    steps = max(1, floor(v / v_max * H))

inner steps, so that all reach their rounds together. Speeds need only a unit in common. Two bounds are ours:

- *Measured speeds* of equal machines differ by a few per cent, and a bare floor would cost all but the fastest a step.
  So a speed counts as up to `TOLERANCE` more than measured, and never as more than v_max.
- *Speeds are claims*: one replica that claims a thousandfold speed would reduce all others to one step. So v_max is at
  most `LARGEST_MULTIPLE` times the lower median of the known speeds, and what is no positive, finite number is ignored.

**H over the run** grows geometrically from `early` to `late`: replicas drift apart fast while the learning rate is
high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from gossip.rounds.matching import good_enough_at, heal
from gossip.rule.outer_step import LIFT_BOUND

if TYPE_CHECKING:
    from gossip.interface import RoundProgress
    from gossip.settings import OuterConfig

TOLERANCE = 0.1
"""Share of a measured speed within which two speeds count as equal."""
LARGEST_MULTIPLE = 8.0
"""How many times the stage's median the highest speed may be that is believed."""


class RoundClaims(NamedTuple):
    """The rounds that others say they have finished: all in the roster, and those `of_partners` that we have met."""

    listed: Sequence[int] = ()
    of_partners: Sequence[int] = ()


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
        self.skipped_in_a_row = 0
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
        if self._last or self.skipped_in_a_row:
            return 0.0
        steps = good_enough_at(place, count) * self.steps - (self.inner_steps - self._opened_at)
        return max(0.0, steps) * (self._unknown_s if self._seconds_per_step is None else self._seconds_per_step)

    def next_round(self, claims: RoundClaims) -> int:
        """Return the number that the next round has, after those that the others say are finished."""
        return max(self.round, 1 + heal(self.finished, claims.listed, (self._shown(claims),), LIFT_BOUND))

    def _shown(self, claims: RoundClaims) -> int:
        """Return the last round finished by our own evidence: ours, or the median of ours and our partners'."""
        return max(self.finished, median_low((self.finished, *claims.of_partners)))

    def open(self, claims: RoundClaims, *, last: bool = False) -> None:
        """Begin the next round."""
        self._last = last
        following = self.next_round(claims)
        self.healed += following > max(self.round, self.finished + 1)
        self.round = following
        self._opened_at, self._opened = self.inner_steps, True
        self.steps = self._next_steps

    def adopt(self, seen_round: int, claims: RoundClaims) -> None:
        """Move up to a partner's number, within a bound on what the partners we have met claim."""
        healed = heal(self.round, (seen_round,), (1 + self._shown(claims),), LIFT_BOUND)
        self.healed += healed > self.round
        self.round = healed

    def skip(self) -> None:
        """Count a round without a partner."""
        self.skipped_in_a_row += 1

    def finish(self, round: int) -> None:
        """Count an outer step."""
        self.finished = round
        self.skipped_in_a_row = 0


def fastest(speed: float, others: Sequence[float]) -> float:
    """Return the highest speed that is believed in a stage: our own, a positive number, at least.

    `others`: what the others claim, in the same unit; what is not a positive, finite number is unknown.
    """
    known = [speed, *(claim for claim in others if _is_speed(claim))]
    return max(speed, min(max(known), LARGEST_MULTIPLE * median_low(known)))


def dynamic_steps(speed: float, others: Sequence[float], steps: int) -> int:
    """Return how many of the `steps` of the fastest replica one of this `speed` takes: from 1 to `steps`.

    `others`: the speeds that the stage's other replicas claim. A speed of our own that is unknown leaves all `steps`.
    """
    if not _is_speed(speed):
        return steps
    # The ratio first: no product of two large speeds, and exactly 1 between equals.
    share = min(1.0, speed / fastest(speed, others) * (1.0 + TOLERANCE))
    return max(1, math.floor(share * steps))


def steps_per_round(progress: float, early: int, late: int | None) -> int:
    """Return H at this progress of the run: `early` at 0, `late` at 1, a geometric course between, whole numbers.

    `progress` outside 0 to 1 counts as the nearer end. `late` None: constant.
    """
    if late is None:
        return early
    # Rounded to whole steps, both ends are exact: a power of 0 and of 1 is.
    course = round(early * math.pow(late / early, min(1.0, max(0.0, progress))))
    return min(max(course, min(early, late)), max(early, late))


def local_step_count(settings: OuterConfig, going: RoundProgress, others: Sequence[float]) -> int:
    """Return the inner steps from this replica's next round to the one after, as the run's settings have it."""
    steps = steps_per_round(going.progress, settings.inner_steps_per_round, settings.late_inner_steps_per_round)
    return dynamic_steps(going.speed, others, steps) if settings.dynamic_steps else steps


def _is_speed(claim: float) -> bool:
    return math.isfinite(claim) and claim > 0.0
