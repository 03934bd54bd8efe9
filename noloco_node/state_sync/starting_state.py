"""Where a replica begins: with the run's first weights, with a donor's state, or with its own checkpoint.

A checkpoint that is a few rounds behind the swarm is gone on from: its replica is then a straggler like any other, and
keeps the steps that it took alone. One that is further behind would bring weights that others have left long ago.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median, median_high, median_low
from types import MappingProxyType
from typing import NamedTuple

import torch

from gossip.exchange.messages import Manifest, ReplicaState
from gossip.interface import Origin
from gossip.rule.outer_step import OuterState
from gossip.rule.shares import ROUND_BOUND
from gossip.transfer.download import OUTLYING_PROGRESS, round_to_start_in
from noloco_node.machine.interface import StageModel
from noloco_node.run.peer_state import AT_WORK, PeerState
from noloco_node.state_sync.replica_mean import ReplicaSummary
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.swarm.roster import Roster
from pipeline.inner_step import OptimiserState

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingState:
    """Where a replica starts, its stage being there already: the outer state, its counters, the run's progress.

    `given`: by another peer, whose word it is that the weights are worth anything. `trial`: of a snapshot.
    """

    origin: Origin
    progress: float = 0.0
    given: bool = False
    trial: SnapshotTrial | None = None


def from_seed(stage: StageModel) -> StartingState:
    """Return the beginning of a replica that starts from the run's initial weights."""
    return StartingState(origin=Origin(OuterState(stage.weights())))


def from_donor(stage: StageModel, state: ReplicaState) -> StartingState:
    """Put a donor's state into the stage and return the beginning that follows from it."""
    stage.set_weights(state.slow)
    if state.optimiser:
        stage.load_optimiser_state(OptimiserState(state.optimiser_steps, state.optimiser))
    return StartingState(
        # As far in its momentum period as the donor is: with the same weights it takes the same steps.
        origin=Origin(
            OuterState(state.slow, state.momentum, state.gathered, state.meetings),
            rounds=state.round,
            inner_steps=state.inner_steps,
            last_met=state.last_met,
        ),
        progress=state.progress,
        given=True,
    )


def is_recent_enough(own_round: int, rounds: Sequence[int], staleness_at_most: int) -> bool:
    """Say whether a checkpoint of `own_round` will do in a stage whose living replicas are in `rounds`.

    It may be as far behind as numbers of rounds heal at once, and as weights may be and still count in a meeting.
    """
    return own_round >= median_low(rounds) - min(ROUND_BOUND, staleness_at_most)


def started(beginning: StartingState, rounds: Sequence[int], progress: float) -> StartingState:
    """Return the beginning of a newcomer that is as far as its stage: `rounds` of its replicas, median `progress`.

    Where the stage says quite another progress than the donor, most of it may be names: the donor has shown a state.
    """
    if abs(progress - beginning.progress) > OUTLYING_PROGRESS:
        progress = beginning.progress
    origin = beginning.origin
    round = round_to_start_in(origin.rounds, rounds)
    origin = origin._replace(rounds=round, last_met=min(origin.last_met, round))
    return replace(beginning, origin=origin, progress=progress)


def from_checkpoint(stage: StageModel, checkpoint: Checkpoint) -> StartingState:
    """Put a checkpoint into the stage and return the beginning that follows from it.

    One that was saved when the device was lost has slow weights alone: the inner optimiser begins anew.
    """
    counters, tensors = checkpoint.counters, checkpoint.tensors
    slow = tensors["slow"]
    fast = tensors.get("fast", slow)
    stage.set_weights(fast)
    if "optimiser" in tensors:
        stage.load_optimiser_state(OptimiserState(counters.optimiser_steps, tensors["optimiser"]))
    return StartingState(
        origin=Origin(
            OuterState(slow, tensors.get("momentum", ()), tensors.get("gathered", ()), counters.meetings),
            rounds=counters.round,
            inner_steps=counters.inner_steps,
            # One from before this was noted: as fresh as can be.
            last_met=counters.round if counters.last_met is None else counters.last_met,
            # Steps since the last round are in the fast weights alone, and must not be lost with the last one.
            gathered=all(map(torch.equal, fast, slow)),
        ),
        progress=counters.progress,
    )


MOST_ASKED = 256
"""Of those at work, and a quarter as many of those who are on their way to it."""
AGAIN_S = 10.0
"""Before everybody is asked again."""
ATTEMPTS = 30
"""Where somebody has a snapshot, or may have."""
ATTEMPTS_IN_VAIN = 2
NORM_FACTOR = 4.0
"""By which the norm of a snapshot may differ from the median of three or more: they are of different rounds."""
LEAST_FOR_MEDIAN = 3
"""Offers from which a norm is compared with their median."""
MOST_TIMES = 64
"""As many rounds as the furthest of the other stages may a stage have made: it had the fewer replicas."""


class RunReach(NamedTuple):
    """How far the run is, by its stages at work."""

    round: int
    progress: float

    def allows(self, of: ReplicaSummary | Manifest) -> bool:
        """Say whether a snapshot of another stage may be so far."""
        most = MOST_TIMES * (self.round + ROUND_BOUND)
        return 0 <= of.round <= most and of.progress <= self.progress + OUTLYING_PROGRESS


def donors(own_round: int | None, offers: Sequence[ReplicaSummary], run: RunReach) -> tuple[str, ...]:
    """Return the peers whose snapshot to ask for, the newest first; none where our own checkpoint is as good.

    `own_round`: of our checkpoint of the stage, None without one.
    """
    believed = [offer for offer in offers if run.allows(offer)]
    if len(believed) >= LEAST_FOR_MEDIAN:
        norm = median_low(offer.norm for offer in believed)
        believed = [offer for offer in believed if norm / NORM_FACTOR <= offer.norm <= norm * NORM_FACTOR]
    if own_round is not None:
        believed = [offer for offer in believed if offer.round > own_round + ROUND_BOUND]
    return tuple(offer.peer for offer in sorted(believed, key=lambda offer: -offer.round))


def verify_snapshot(
    offers: Sequence[ReplicaSummary], run: RunReach
) -> Callable[[str, Manifest], Awaitable[str | None]]:
    """Return what refuses whoever gives another snapshot than the one for which `donors` chose it."""
    norms = {offer.peer: offer.norm for offer in offers}

    async def objection(peer: str, manifest: Manifest) -> str | None:
        if not run.allows(manifest):
            return f"its snapshot is of round {manifest.round} and progress {manifest.progress:.2f}, the run at {run}"
        if not norms[peer] / NORM_FACTOR <= manifest.norm <= norms[peer] * NORM_FACTOR:
            return f"its snapshot has the norm {manifest.norm:.4g}, and had {norms[peer]:.4g} a moment ago"
        return None

    return objection


def reached(roster: Roster) -> RunReach:
    """Return how far the stage is that is furthest, by the medians of its replicas at work.

    Newcomers say round 0, and there may be many of them: they count where nobody else is left.
    """
    at_work = [[record for record in records if record.state in AT_WORK] for records in roster.stages]
    stages = [records for records in (at_work if any(at_work) else roster.stages) if records]
    return RunReach(
        max((median_high([record.round for record in records]) for records in stages), default=0),
        max((median_high([record.progress for record in records]) for records in stages), default=0.0),
    )


def asked_of(roster: Roster, me: str, rng: Random) -> list[str]:
    """Return the peers that are asked for a snapshot: whoever works, or has left a stage and not yet arrived."""
    found: list[str] = []
    for states, most in ((AT_WORK, MOST_ASKED), ((PeerState.CATCHING_UP,), MOST_ASKED // 4)):
        records = [record for records in roster.stages for record in records if record.state in states]
        peers = sorted({record.peer for record in records} - {me, *found})
        found += rng.sample(peers, min(most, len(peers)))
    return found


def asks_again(promised: bool, saved: bool, attempt: int) -> bool:
    """Say whether to ask everybody again after this attempt, from 0.

    Where somebody has a snapshot, or is busy giving another one, for some minutes: a stage is at stake. Where nobody
    has, once more if the run's first weights are all that is left, for an answer may have been lost.
    """
    if promised:
        return attempt + 1 < ATTEMPTS
    return not saved and attempt + 1 < ATTEMPTS_IN_VAIN
