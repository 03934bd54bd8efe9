"""The course of a simulated run: its running totals, cut into pieces of time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from noloco_node.sim.report.collector import Row
from noloco_node.sim.scenario.setup import SimSetup

MOMENTS = 60
"""Pieces, at most."""


class TimelinePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the run up to `until_s`; devices and gap by stage. None where there was nothing to measure."""

    until_s: float
    tokens_per_s: float
    devices: tuple[float | None, ...]
    gap: tuple[float | None, ...]
    loss: float | None


def training_s(rows: Sequence[Row], ended_s: float) -> float:
    """Return the seconds from the last moment without a gradient to the first with all of them."""
    total = rows[-1].microbatches
    begun_s = max((row.at_s for row in rows if not row.microbatches), default=0.0)
    done_s = min((row.at_s for row in rows if row.microbatches == total), default=ended_s)
    return max(0.0, min(done_s, ended_s) - begun_s)


def timeline_of(rows: Sequence[Row], setting: SimSetup) -> tuple[TimelinePoint, ...]:
    """Cut the rows into pieces of about equal length."""
    stages, every = setting.run.pipeline.stages, range(setting.run.pipeline.stages)
    zero = (0.0,) * stages
    start = Row(0.0, 0, zero, zero, zero, (0,) * stages, 0.0, 0)
    pieces = min(MOMENTS, len(rows))
    marks = [start, *(rows[(number + 1) * len(rows) // pieces - 1] for number in range(pieces))]
    return tuple(
        TimelinePoint(
            until_s=now.at_s,
            tokens_per_s=(now.microbatches - then.microbatches) * setting.microbatch_tokens / (now.at_s - then.at_s),
            devices=tuple(_ratio(now.busy_s[s] - then.busy_s[s], now.alive_s[s] - then.alive_s[s]) for s in every),
            gap=tuple(_quotient(now.gap[s] - then.gap[s], now.gaps[s] - then.gaps[s]) for s in every),
            loss=_quotient(now.loss - then.loss, now.losses - then.losses),
        )
        for then, now in pairwise(marks)
        if now.at_s > then.at_s
    )


def _ratio(worked_s: float, alive_s: float) -> float | None:
    """A job counts when it begins, so that a short piece may hold more work than time."""
    return min(1.0, max(0.0, worked_s / alive_s)) if alive_s > 1e-9 else None


def _quotient(total: float, count: int) -> float | None:
    return total / count if count else None
