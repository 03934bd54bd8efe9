"""What the checker reads of a node that no public counter shows: one place for all of it, and nothing is ever changed.

A counter for each of these would be there for the checker alone, and would be updated by the very code that is checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from noloco_node.node.replica import Replica
from pipeline.admission_window import AdmissionWindow


def is_closed(replica: Replica) -> bool:
    """Say whether the replica lets nobody in any more, for it goes or the run is over."""
    return replica.admission._closed is not None


def clipped(replica: Replica) -> int:
    """Return how many meetings counted in part only, for the partner's weights were far away."""
    return replica.rounds._round_state.counts["clipped"]


def doubts_weights(replica: Replica) -> bool:
    """Say whether a replica still doubts the weights that a donor gave it, or has found them worth nothing."""
    return not replica.starting_weights.judged or replica.rounds.disowned


def slots(gate: AdmissionWindow) -> str:
    """Say how many slots and places in the queue are taken."""
    taken = f"{gate.succeeded} succeeded and {gate.in_flight} in flight of {gate.window}"
    return f"{taken}, {gate.queued} of {gate.queue_limit} queued"


def sizes(replica: Replica) -> Iterator[tuple[str, int, int]]:
    """Yield what a replica remembers of others: what it is, their stage, and the number of entries."""
    stage = replica.config.stage
    yield "prospects", stage, replica.rounds.view.put_off
    if replica.next_stage is not None:
        yield "replicas of the next stage that rest", stage + 1, len(replica.next_stage._standing._refusals)
        yield "replicas of the next stage that were called", stage + 1, len(replica.next_stage.hop_totals)
        yield "suspects", stage + 1, len(replica.next_stage.suspects)
