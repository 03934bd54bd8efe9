"""What the watch reads of a node that no public counter shows: one place for all of it, and nothing is ever changed.

A counter for each of these would be there for the watch alone, and would be updated by the very code that is watched.
"""

from __future__ import annotations

from collections.abc import Iterator

from noloco_node.node.replica import Replica
from noloco_node.run.protocols import MICROBATCH, topic
from noloco_node.sim.network.hub import SimNetwork


def meets(replica: Replica) -> str | None:
    """Return the partner of the meeting that was agreed and has not ended."""
    return replica.rounds.view.meeting_partner


def swaps(replica: Replica) -> str | None:
    """Return with whom a swap ahead of the next round is under way."""
    return replica.rounds.view.prefetch_partner


def is_closed(replica: Replica) -> bool:
    """Say whether the replica lets nobody in any more, for it goes or the run is over."""
    return replica.gate._closed is not None


def sizes(replica: Replica) -> Iterator[tuple[str, int, int]]:
    """Yield what a replica remembers of others: what it is, their stage, and the number of entries."""
    stage = replica.post.stage
    yield "prospects", stage, replica.rounds.view.put_off
    if replica.downstream is not None:
        yield "replicas of the next stage that rest", stage + 1, len(replica.downstream._resting)
        yield "replicas of the next stage that were called", stage + 1, len(replica.downstream.hop_totals)
        yield "suspects", stage + 1, len(replica.downstream.suspects)


def answered(hub: SimNetwork, peer: str, stage: int) -> int:
    """Return how many microbatches of others a peer is handling: each holds one slot, or one place in the queue."""
    network, kind = hub.peer(peer), topic(MICROBATCH, stage)
    return 0 if network is None else sum(end.topic == kind for end in network.answering)


def is_tampered(hub: SimNetwork, peer: str) -> bool:
    """Say whether some of the next messages of a peer are to arrive wrong."""
    return peer in hub._tamperings
