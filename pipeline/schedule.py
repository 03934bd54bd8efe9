"""Decides how far the run is, what learning rate that means, when it is over, and how a queue is shared.

Stages with unequal numbers of replicas take unequal numbers of inner steps (8, 1 and 8 replicas: 19, 151 and 19 in the
same time), so no replica's own step counter says how far the run is. Each microbatch carries the progress of the run as
its source knows it, 0 to 1, and a replica follows the median of each window of microbatches.

A stamp is what a stranger says. A replica's progress therefore moves

- to the lower median of the window's stamps: half a window of lies moves nothing;
- never back;
- never at more than twice the rate that the swarm has shown. The rate is measured on marks, at most 16 of them, spread
  over the last minutes (over the whole life of a young replica): the lower median of the newer half less that of the
  older half, by the time between the two. One window that is made of lies alone is one mark, which neither median
  takes; it can move progress by at most twice what honest time would have, and the next honest windows absorb that.
  A source that owns more than half of all marks is the swarm, as far as anybody downstream can tell.

Until four marks are there no rate has been shown and progress stays; the time meanwhile counts, so that the fifth
window finds a replica where it belongs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

MOST_MARKS = 16
FEWEST_MARKS = 4
LONGEST_SPACING_S = 15.0
"""Seconds between two marks in the long run; longer than a roster's refresh, in whose steps stamps may rise."""
HASTE = 2.0
"""How many times the rate that the swarm has shown a replica's progress may move at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up, then a cosine to a fraction of the peak.

    `steps` and `warmup_steps` are a planned source's inner steps; only their ratio to the run's progress matters.
    """

    peak: float
    steps: int
    warmup_steps: int
    final_fraction: float


def learning_rate(progress: float, schedule: Schedule) -> float:
    """Return the learning rate of an inner step that is taken at this progress of the run.

    A run at progress p has done p * steps inner steps; the one after n steps has (n + 1) / warmup_steps of the peak
    while it warms up, so that the very first step moves something.
    """
    done = min(max(progress, 0.0), 1.0) * schedule.steps
    if done + 1.0 < schedule.warmup_steps:
        return schedule.peak * (done + 1.0) / schedule.warmup_steps
    phase = (done - schedule.warmup_steps) / max(1, schedule.steps - schedule.warmup_steps)
    fall = 0.5 * (1.0 + math.cos(math.pi * min(max(phase, 0.0), 1.0)))
    return schedule.peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * fall)


class Mark(NamedTuple):
    """The lower median of one window's stamps, and when that window ended."""

    at_s: float
    stamp: float


class Progress(NamedTuple):
    """How far a replica takes the run to be.

    `value`: 0 to 1. `at_s`: when it last could move. `since_s`: when this replica began to look.
    """

    value: float
    at_s: float
    since_s: float
    marks: tuple[Mark, ...] = ()


def begin(value: float, now_s: float) -> Progress:
    """Start at a known progress: 0 at the start of a run, the median of its stage for a newcomer."""
    return Progress(value, now_s, now_s)


def advance(progress: Progress, stamps: Sequence[float], now_s: float) -> Progress:
    """Move to the lower median of a window's stamps, as far as the rate that the swarm has shown allows."""
    finite = [min(max(stamp, 0.0), 1.0) for stamp in stamps if math.isfinite(stamp)]
    if not finite:
        return progress
    aim = median_low(finite)
    # The allowance is taken from the marks before this window: a window cannot speak for itself.
    per_s = rate_per_s(progress.marks)
    marks = _marked(progress, Mark(now_s, aim))
    if per_s is None:
        return progress._replace(marks=marks)
    furthest = progress.value + HASTE * per_s * max(0.0, now_s - progress.at_s)
    return Progress(max(progress.value, min(aim, furthest)), now_s, progress.since_s, marks)


def rate_per_s(marks: Sequence[Mark]) -> float | None:
    """Return the progress a second that the marks show, 0 or more; None while there are too few of them."""
    half = len(marks) // 2
    if len(marks) < FEWEST_MARKS:
        return None
    older, newer = marks[:half], marks[-half:]
    elapsed_s = median_low([mark.at_s for mark in newer]) - median_low([mark.at_s for mark in older])
    risen = median_low([mark.stamp for mark in newer]) - median_low([mark.stamp for mark in older])
    return max(0.0, risen) / elapsed_s if elapsed_s > 0.0 else None


def _marked(progress: Progress, mark: Mark) -> tuple[Mark, ...]:
    marks = progress.marks
    spacing_s = min(LONGEST_SPACING_S, (mark.at_s - progress.since_s) / MOST_MARKS)
    if len(marks) >= FEWEST_MARKS and mark.at_s - marks[-1].at_s < spacing_s:
        return marks
    return (*marks, mark)[-MOST_MARKS:]


