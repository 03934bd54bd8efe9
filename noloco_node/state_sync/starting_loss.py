"""Whether the weights that a newcomer was given are worth anything, told by their loss and not by what a donor claims.

Whoever serves a stage sees what its microbatches lost on their way through real routes. The first ones of a newcomer
are compared with what most replicas of the run say of theirs. Medians on both sides: a bad replica of another stage is
in few of our routes, and a liar is one record of many. Weights that are far worse count for nothing: the replica says
in its next meeting that they have met nobody, and goes on from the partner's. If those are no better, it does so again.

A snapshot that revives a stage has no partner to go on from, and soon everybody's loss is that of a route through it.
So it is compared with what others had lost before, and where it fails another one is asked for. Where all fail, the
best of them is taken if it knows more than nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median, median_low
from types import MappingProxyType
from typing import NamedTuple

JUDGED = 8
"""Microbatches of one judgement."""
JUDGEMENTS = 3
"""Of which a replica's weights may fail. What all fail is not the weights' fault."""
LEAST_OTHERS = 3
"""Replicas whose loss is known."""
FAR = 1.5
"""Times the loss of others: honest replicas and routes differ by less."""


class SnapshotTrial(NamedTuple):
    """That of a snapshot which revived a stage. `keeper`: who gave it. `usual`: what others had lost by then."""

    keeper: str
    usual: tuple[float, ...]


class FailedSnapshots(NamedTuple):
    """Those of one stage that were worth nothing: what each lost, by who gave it. `usual`: what others lost before."""

    losses: Mapping[str, float] = MappingProxyType({})
    usual: tuple[float, ...] = ()

    def with_one(self, trial: SnapshotTrial, loss: float) -> FailedSnapshots:
        """Return these and another one."""
        return FailedSnapshots({**self.losses, trial.keeper: loss}, self.usual or trial.usual)


NONE_FAILED = FailedSnapshots()


class StartingLoss:
    """The first losses of a replica. `judges`: whether another one gave it its weights."""

    def __init__(self, *, judges: bool, trial: SnapshotTrial | None = None) -> None:
        self._left = JUDGEMENTS if judges else 0
        self._losses: list[float] = []
        self._usual: tuple[float, ...] = ()
        if trial is not None:
            self._left, self._usual = int(len(trial.usual) >= LEAST_OTHERS), trial.usual

    @property
    def judges(self) -> bool:
        """Whether the weights are still to be judged."""
        return self._left > 0

    def failed(self, losses: Iterable[float], others: Iterable[float]) -> tuple[float, float] | None:
        """Note the losses of some microbatches; return ours and the others' once ours is far above theirs."""
        if not self._left:
            return None
        self._losses += [loss if math.isfinite(loss) else math.inf for loss in losses]
        known = self._usual or list(others)
        if len(self._losses) < JUDGED or len(known) < LEAST_OTHERS:
            return None
        ours, theirs = median(self._losses), median_low(known)
        self._losses.clear()
        if ours <= FAR * theirs:
            self._left = 0
            return None
        self._left -= 1
        return ours, theirs
