"""Where a replica starts: from first weights, a donor's state or its own checkpoint, and which snapshot to believe.

The loss of a newcomer's first microbatches shows whether given weights are worth anything: it is compared with the
losses that most replicas of the run report, for a snapshot with those from before its stage died. Medians count on both
sides. docs/design/catching-up.md says what follows when weights fail.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median, median_high, median_low
from types import MappingProxyType
from typing import NamedTuple

from gossip.exchange.messages import Manifest, ReplicaState
from gossip.interface import Origin
from gossip.rounds.rounds import Rounds
from gossip.rule.outer_step import ROUND_BOUND, OuterState
from gossip.transfer.download import OUTLYING_PROGRESS, Objection, round_to_start_in
from noloco_node.errors import config_error
from noloco_node.machine.interface import StageModel
from noloco_node.run.peer_state import AT_WORK, PeerState
from noloco_node.state_sync.replica_mean import ReplicaSummary
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.swarm.roster import Roster
from noloco_node.units import LARGEST
from pipeline.inner_step import OptimiserState

JUDGED = 8  # microbatches in one judgement
JUDGEMENTS = 3  # a replica's weights may fail so many; if they fail all, the cause is not the weights
LEAST_OTHERS = 3  # replicas whose loss must be known
FAR = 1.5  # times the loss of others; honest replicas and routes differ by less
MOST_ASKED = 256  # peers at work, and a quarter as many that are on their way to a stage
AGAIN_S = 10.0  # before all peers are asked again
ATTEMPTS = 30  # if a peer has a snapshot, or may have
ATTEMPTS_IN_VAIN = 2
NORM_FACTOR = 4.0  # from the median of three or more norms at most: snapshots are of different rounds
LEAST_FOR_MEDIAN = 3  # offers without which no median is taken
MOST_TIMES = 64  # times the rounds of the furthest other stage: a stage with fewer replicas takes more rounds


class SnapshotTrial(NamedTuple):
    """The trial of a snapshot that revived a stage. `keeper`: its peer. `usual`: the losses of others by then."""

    keeper: str
    usual: tuple[float, ...]


class FailedSnapshots(NamedTuple):
    """Snapshots of one stage that failed. `losses`: of each, by its keeper. `usual`: the losses of others before."""

    losses: Mapping[str, float] = MappingProxyType({})
    usual: tuple[float, ...] = ()

    def with_one(self, trial: SnapshotTrial, loss: float) -> FailedSnapshots:
        return FailedSnapshots({**self.losses, trial.keeper: loss}, self.usual or trial.usual)


NONE_FAILED = FailedSnapshots()


class StartingLoss:
    """The first losses of a replica. `judges`: whether another replica gave it its weights."""

    def __init__(self, *, judges: bool, trial: SnapshotTrial | None = None) -> None:
        self._left = JUDGEMENTS if judges else 0
        self._losses: list[float] = []
        self._usual: tuple[float, ...] = ()
        if trial is not None:
            self._left, self._usual = int(len(trial.usual) >= LEAST_OTHERS), trial.usual

    @property
    def judges(self) -> bool:
        """Say whether the weights are still to be judged."""
        return self._left > 0

    def failed(self, losses: Iterable[float], others: Iterable[float]) -> tuple[float, float] | None:
        """Note losses of microbatches; return our median and the others' once ours is far above theirs."""
        if not self._left:
            return None
        self._losses += [loss if math.isfinite(loss) else LARGEST for loss in losses]  # JSON knows no infinity
        known = self._usual or list(others)
        if len(known) < LEAST_OTHERS:
            # A small run may never have so many, and losses fall: the newest are compared with those of others.
            del self._losses[:-JUDGED]
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
    """The outer state, counters and progress from which a replica starts; the stage has its weights already.

    `given`: whether another peer gave the weights, which have yet to prove themselves. `trial`: of a snapshot.
    """

    origin: Origin
    progress: float = 0.0
    given: bool = False
    trial: SnapshotTrial | None = None


def from_seed(stage: StageModel) -> StartingState:
    return StartingState(origin=Origin(OuterState(stage.weights())))


def from_donor(stage: StageModel, state: ReplicaState) -> StartingState:
    """Put a donor's state into the stage and return the starting state."""
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

    It may be behind as far as a meeting still counts its weights, and as far as rounds catch up at once.
    """
    return own_round >= median_low(rounds) - min(ROUND_BOUND, staleness_at_most)


def started(beginning: StartingState, rounds: Sequence[int], progress: float) -> StartingState:
    """Return a starting state that is as far as its stage: `rounds` of its replicas, median `progress`."""
    origin = beginning.origin
    round = round_to_start_in(origin.rounds, rounds)
    origin = origin._replace(rounds=round, last_met=min(origin.last_met, round))
    return at_progress(replace(beginning, origin=origin), progress)


def at_progress(beginning: StartingState, progress: float) -> StartingState:
    """Return a starting state at the median `progress` of its stage.

    If that is far from its own, its own counts: only the donor, or our checkpoint, has shown a state.
    """
    near = abs(progress - beginning.progress) <= OUTLYING_PROGRESS
    return replace(beginning, progress=progress) if near else beginning


def from_checkpoint(stage: StageModel, checkpoint: Checkpoint) -> StartingState:
    """Put a checkpoint into the stage and return the starting state.

    A checkpoint saved after the device was lost has slow weights alone: the inner optimiser begins anew. Raises
    `UserError` (CONFIG), with nothing changed, if its moments are of another form than the run's.
    """
    counters, tensors = checkpoint.counters, checkpoint.tensors
    slow = tensors["slow"]
    fast = tensors.get("fast", slow)  # as the stage that saved them held them
    if "optimiser" in tensors:
        try:
            stage.load_optimiser_state(OptimiserState(counters.optimiser_steps, tensors["optimiser"]))
        except ValueError as error:
            raise config_error(
                f"The checkpoint of inner step {counters.inner_steps} keeps the optimiser in another form.",
                why=str(error),
                hint="the run file with which it was saved (inner.state), or a home without this checkpoint",
            ) from error
    stage.set_weights(fast)
    return StartingState(
        origin=Origin(
            OuterState(slow, tensors.get("momentum", ()), tensors.get("gathered", ()), counters.meetings),
            rounds=counters.round,
            inner_steps=counters.inner_steps,
            # A checkpoint of an earlier version does not say: as fresh as can be.
            last_met=counters.round if counters.last_met is None else counters.last_met,
            # The steps since the last round are in the fast weights alone.
            gathered="fast" not in tensors or counters.slow_steps == counters.inner_steps,
        ),
        progress=counters.progress,
    )


class RunReach(NamedTuple):
    """How far the run is, by its stages at work."""

    round: int
    progress: float

    def allows(self, of: ReplicaSummary | Manifest) -> bool:
        most = MOST_TIMES * (self.round + ROUND_BOUND)
        return 0 <= of.round <= most and of.progress <= self.progress + OUTLYING_PROGRESS


def donors(own_round: int | None, offers: Sequence[ReplicaSummary], run: RunReach) -> tuple[str, ...]:
    """Return the peers whose snapshot to ask for, the newest first; none if our own checkpoint is as good.

    `own_round`: of our checkpoint of the stage, None without one.
    """
    believed = [offer for offer in offers if run.allows(offer)]
    if len(believed) >= LEAST_FOR_MEDIAN:
        norm = median_low(offer.norm for offer in believed)
        believed = [offer for offer in believed if norm / NORM_FACTOR <= offer.norm <= norm * NORM_FACTOR]
    if own_round is not None:
        believed = [offer for offer in believed if offer.round > own_round + ROUND_BOUND]
    return tuple(offer.peer for offer in sorted(believed, key=lambda offer: -offer.round))


def verify_snapshot(offers: Sequence[ReplicaSummary], run: RunReach) -> Objection:
    """Return the objection to a peer that gives another snapshot than it offered."""
    norms = {offer.peer: offer.norm for offer in offers}

    async def objection(peer: str, manifest: Manifest) -> str | None:
        if not run.allows(manifest):
            return f"its snapshot is of round {manifest.round} and progress {manifest.progress:.2f}, the run at {run}"
        if not norms[peer] / NORM_FACTOR <= manifest.norm <= norms[peer] * NORM_FACTOR:
            return f"its snapshot has the norm {manifest.norm:.4g}, and had {norms[peer]:.4g} a moment ago"
        return None

    return objection


def reached(roster: Roster) -> RunReach:
    """Return how far the furthest stage is, by the medians of its replicas at work.

    Newcomers, which say round 0, count only if no other replica is left.
    """
    at_work = [[record for record in records if record.state in AT_WORK] for records in roster.stages]
    stages = [records for records in (at_work if any(at_work) else roster.stages) if records]
    return RunReach(
        max((median_high([record.round for record in records]) for records in stages), default=0),
        max((median_high([record.progress for record in records]) for records in stages), default=0.0),
    )


def asked_of(roster: Roster, me: str, rng: Random) -> list[str]:
    """Return the peers to ask for a snapshot: those at work, and those on their way to another stage."""
    found: list[str] = []
    for states, most in ((AT_WORK, MOST_ASKED), ((PeerState.CATCHING_UP,), MOST_ASKED // 4)):
        records = [record for records in roster.stages for record in records if record.state in states]
        peers = sorted({record.peer for record in records} - {me, *found})
        found += rng.sample(peers, min(most, len(peers)))
    return found


def asks_again(promised: bool, saved: bool, attempt: int) -> bool:
    """Say whether to ask all peers again after this attempt, from 0.

    If a peer has a snapshot or is busy, for some minutes: a stage is at stake. If none has, once more when only the
    run's first weights are left, because an answer may have been lost.
    """
    if promised:
        return attempt + 1 < ATTEMPTS
    return not saved and attempt + 1 < ATTEMPTS_IN_VAIN


class StartingWeights:
    """The weights that a replica began with, judged by its first microbatches.

    Those of a donor are disowned: the rounds go on from a partner's. A snapshot that revived the stage has no partner:
    `failed_snapshot` is set, and the replica gives the stage up. Weights that nobody gave us are judged as a donor's
    once the stage is out of their reach, if they have met nobody's by then: we began while we were cut off.
    """

    def __init__(self, starting_state: StartingState, rounds: Rounds, staleness_at_most: int) -> None:
        self._trial, self._rounds, self._staleness_at_most = starting_state.trial, rounds, staleness_at_most
        self._unmet = not starting_state.given  # whether our weights are our own, and have met nobody's
        self._loss = StartingLoss(judges=starting_state.given, trial=self._trial)
        self.failed_snapshot: asyncio.Future[tuple[SnapshotTrial, float]] = asyncio.get_running_loop().create_future()
        """The snapshot that we began with, and what it loses: once that is far too much."""
        self._disowned = False  # whether our weights were disowned when the window began

    @property
    def judged(self) -> bool:
        """Whether the judgement is over, or none was needed."""
        return not self._loss.judges

    @property
    def doubtful(self) -> bool:
        """Whether our weights are a snapshot that has not been found to be worth anything."""
        return self._trial is not None and (not self.judged or self.failed_snapshot.done())

    def failed(
        self, losses: Sequence[float], known: Iterable[float], rounds: Iterable[int]
    ) -> tuple[float, float] | None:
        """Judge by the losses of a window, beside those `known` of others; return ours and theirs if ours is far more.

        Then the weights are disowned, or `failed_snapshot` is set. `rounds`: of the others of our stage.
        """
        self._unmet = self._unmet and self._rounds.slow_age.last_met == 0
        if self._unmet and (others := list(rounds)):
            self._unmet = is_recent_enough(self._rounds.finished, others, self._staleness_at_most)
            self._loss = self._loss if self._unmet else StartingLoss(judges=True)
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
