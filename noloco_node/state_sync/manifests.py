"""Asking peers for the weights of a stage: what they say of them first, and the weights themselves.

An outline is a round, a progress and a norm, and costs a few bytes: whoever wants one replica's slow weights, or a
snapshot of them, compares what several peers say before it fetches anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

import torch

from gossip.exchange.messages import Manifest, Parts, Section, StateRequest
from gossip.transfer.chunks import cut
from gossip.transfer.download import Converse, StateWanted, manifest_of
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.schema import Schema
from noloco_node.run.protocols import state_schema, topic
from noloco_node.state_sync.replica_mean import ReplicaSummary

SNAPSHOT = "snapshot"
"""The topic of those who keep snapshots of a stage."""
PATIENCE_S = 10.0
ASKED_AT_ONCE = 8


class WeightsOf(NamedTuple):
    """A stage whose weights are asked for. `kind`: STATE of its replicas, SNAPSHOT of peers that keep one."""

    number: int
    shapes: tuple[tuple[int, ...], ...]
    kind: str

    @property
    def weight_bytes(self) -> int:
        """Of the slow weights."""
        return 4 * sum(map(prod, self.shapes))

    @property
    def schema(self) -> Schema:
        """What is said about them."""
        return state_schema(self.shapes)

    def converse(self, network: PeerNetwork) -> Converse:
        """Return how to talk about them with a peer."""
        return lambda peer: network.talk(peer, topic(self.kind, self.number), self.schema)

    def wanted(self, deadline_s: float) -> StateWanted:
        """Return what to ask for: the slow weights alone."""
        like = tuple(torch.empty(shape, device="meta") for shape in self.shapes)
        return StateWanted(parts=Parts.SLOW, like=like, deadline_s=deadline_s)


def copying_s(weight_bytes: int, slowest_bytes_per_s: float) -> float:
    """Return how long a whole state may take over the slowest line: five sections, each as large as the weights."""
    return 60.0 + len(Section) * weight_bytes / slowest_bytes_per_s


class ManifestReplies(NamedTuple):
    """What was said: by those who answered, and by how many that they are busy with others just now."""

    manifests: dict[str, Manifest]
    busy: int


async def ask_manifests(network: PeerNetwork, peers: Iterable[str], subject: WeightsOf) -> ManifestReplies:
    """Return what each peer says of its weights, round and norm, as far as they answer soon."""
    turns, pieces = asyncio.Semaphore(ASKED_AT_ONCE), len(cut([4 * prod(shape) for shape in subject.shapes]))
    converse, told, busy = subject.converse(network), dict[str, Manifest](), list[str]()

    async def ask(peer: str) -> None:
        async with turns:
            try:
                async with asyncio.timeout(PATIENCE_S), converse(peer) as conversation:
                    reply = await manifest_of(conversation, StateRequest(parts=Parts.OUTLINE), pieces)
            except (ConnectionError, TimeoutError):
                return
            if isinstance(reply, Manifest):
                told[peer] = reply
            else:
                busy.append(peer)

    async with asyncio.TaskGroup() as group:
        for peer in peers:
            group.create_task(ask(peer))
    return ManifestReplies({peer: told[peer] for peer in sorted(told)}, len(busy))


def standings(told: Mapping[str, Manifest]) -> list[ReplicaSummary]:
    """Return what peers said, for a comparison."""
    return [
        ReplicaSummary(
            peer=peer, round=each.round, inner_steps=each.inner_steps, progress=each.progress, norm=each.norm
        )
        for peer, each in told.items()
    ]
