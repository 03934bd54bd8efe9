"""How many inner steps a replica takes until its next round: dynamic local updates, and an H that follows the run.

**Dynamic local updates** (Asynchronous Local-SGD, arXiv 2401.09135, equation 6). A round every H inner steps suits the
fastest replica of a stage; one that has speed v among replicas whose fastest has v_max takes

    steps = max(1, floor(v / v_max * H))

so that all of them reach their rounds together, and nobody's contribution is older than the others'. Only ratios of
speeds matter, so any unit that the stage has in common will do.

Two things are ours. *Speeds are measured*, and those of equal machines differ by a few per cent, of which a bare floor
would make a lost step for everybody but the fastest (H 5, v 3 % below: 4 steps, a fifth fewer). So a speed counts as
up to `TOLERANCE` more than was measured, and never as more than v_max: equal machines take H, a quarter of the speed
still takes about a quarter of the steps, and is late to its round by a tenth at worst. *Speeds are claims*: a replica
that claims a thousandfold speed would have everybody else do one step a round. So v_max is at most `LARGEST_MULTIPLE`
times the median of the stage's known speeds (the lower one of two, so that of two replicas neither can lift it), and
claims that are no speed at all are passed over. Claims of very low speeds can only switch the whole adaptation off.

**H over the run.** Early in training, at a high learning rate, replicas drift apart fast, late they hardly do: H grows
by the same factor in each part of the run, from `early` at its beginning to `late` at its end.

Pure: numbers in, a number of inner steps out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossip.interface import RoundProgress
    from gossip.settings import OuterConfig

TOLERANCE = 0.1
"""Share of a measured speed within which two speeds count as equal."""
LARGEST_MULTIPLE = 8.0
"""How many times the stage's median the highest speed may be that is believed."""


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
