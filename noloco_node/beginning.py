"""Where a replica begins: with the run's first weights, with a donor's state, or with its own checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.messages import ReplicaState
from gossip.nesterov import OuterState
from gossip.port import Origin
from noloco_node.checkpoint import Checkpoint
from noloco_node.machine import Stage
from pipeline.stage import OptimiserState


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """Where a replica starts, its stage being there already: the outer state, its counters, the run's progress."""

    origin: Origin
    progress: float = 0.0


def fresh(stage: Stage) -> Beginning:
    """Return the beginning of a replica that starts from the run's initial weights."""
    slow = stage.weights()
    return Beginning(origin=Origin(OuterState(slow, tuple(tensor.new_zeros(tensor.shape) for tensor in slow))))


def copied(stage: Stage, state: ReplicaState) -> Beginning:
    """Put a donor's state into the stage and return the beginning that follows from it."""
    stage.set_weights(state.slow)
    if state.optimiser:
        stage.load_optimiser_state(OptimiserState(state.optimiser_steps, state.optimiser))
    return Beginning(
        # As far in its momentum period as the donor is: with the same weights it takes the same steps.
        origin=Origin(
            OuterState(state.slow, state.momentum, state.gathered, state.meetings),
            rounds=state.round,
            inner_steps=state.inner_steps,
            last_met=state.last_met,
        ),
        progress=state.progress,
    )


def restored(stage: Stage, checkpoint: Checkpoint) -> Beginning:
    """Put a checkpoint into the stage and return the beginning that follows from it."""
    counters, tensors = checkpoint
    stage.set_weights(tensors["fast"])
    stage.load_optimiser_state(OptimiserState(counters.optimiser_steps, tensors["optimiser"]))
    return Beginning(
        origin=Origin(
            OuterState(tensors["slow"], tensors["momentum"], tensors.get("gathered", ()), counters.meetings),
            rounds=counters.round,
            inner_steps=counters.inner_steps,
            # One from before this was noted: as fresh as can be.
            last_met=counters.round if counters.last_met is None else counters.last_met,
        ),
        progress=counters.progress,
    )
