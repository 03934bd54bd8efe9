"""Where a replica begins: with the run's first weights, with a donor's state, or with its own checkpoint.

A checkpoint that is a few rounds behind the swarm is gone on from: its replica is then a straggler like any other, and
keeps the steps that it took alone. One that is further behind would bring weights that others have left long ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import torch

from gossip.exchange.messages import ReplicaState
from gossip.interface import Origin
from gossip.rule.outer_step import OuterState
from gossip.rule.shares import ROUND_BOUND
from gossip.transfer.donor_checks import OUTLYING_PROGRESS, round_to_start_in
from noloco_node.machine.interface import StageModel
from noloco_node.state_sync.starting_loss import SnapshotTrial
from noloco_node.storage.checkpoint import Checkpoint
from pipeline.inner_optimiser import OptimiserState


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
