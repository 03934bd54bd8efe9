"""Whether the weights that a replica began with are worth anything, and what becomes of them if not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gossip.rounds.rounds import Rounds
from noloco_node.state_sync.starting_state import SnapshotTrial, StartingLoss, StartingState


class StartingWeights:
    """The weights that a replica began with, judged by its first microbatches.

    Those of a donor are disowned: the rounds go on from a partner's. A snapshot that revived the stage has no partner:
    `failed_snapshot` is set, and the replica gives the stage up.
    """

    def __init__(self, starting_state: StartingState, rounds: Rounds) -> None:
        self._trial, self._rounds = starting_state.trial, rounds
        self._loss = StartingLoss(judges=starting_state.given, trial=self._trial)
        self.failed_snapshot: asyncio.Future[tuple[SnapshotTrial, float]] = asyncio.get_running_loop().create_future()
        """The snapshot that we began with, and what it loses: once that is far too much."""
        self._disowned = False
        """Whether our weights were disowned when the window began."""

    @property
    def judged(self) -> bool:
        """Whether the judgement is over, or none was needed."""
        return not self._loss.judges

    @property
    def doubtful(self) -> bool:
        """Whether our weights are a snapshot that has not been found to be worth anything."""
        return self._trial is not None and (not self.judged or self.failed_snapshot.done())

    def failed(self, losses: Sequence[float], known: Sequence[float]) -> tuple[float, float] | None:
        """Judge by the losses of a window, beside those `known` of others; return ours and theirs if ours is far more.

        Then the weights are disowned, or `failed_snapshot` is set.
        """
        waited, self._disowned = self._disowned, self._rounds.disowned
        if waited or self._disowned:
            return None  # this window began with weights that have been replaced since, or will be
        failed = self._loss.failed(losses, known)
        if failed is None:
            return None
        if self._trial is not None:
            self.failed_snapshot.set_result((self._trial, failed[0]))
        else:
            self._rounds.disown()
            self._disowned = True
        return failed
