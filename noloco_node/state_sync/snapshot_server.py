"""A peer gives the slow weights of stages that it served before to whoever revives one of them.

Whoever moved away from a stage may be the last to have anything of it: the replicas that it left may die before anybody
comes. What it has lies on its disk (`noloco_node.storage.checkpoint_store`) and is served like a snapshot
(`noloco_node.state_sync.snapshot_keeper`), from the moment at which it leaves. Nothing is read before somebody asks,
and of all stages together one is given at a time, which bounds the memory that strangers can cost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from gossip.exchange.messages import Busy, Parts, ReplicaState
from gossip.exchange.swap import norm
from gossip.transfer.chunks import cut
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import piece_s
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.run.protocols import topic
from noloco_node.state_sync.manifests import SNAPSHOT, WeightsOf
from noloco_node.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from noloco_node.machine.interface import Host
    from noloco_node.network.interface import Conversation, PeerNetwork


class SnapshotServer:
    """What one peer gives of stages that it served before.

    `shapes`: of each stage's parameters. `deadline_s`: for so many bytes to be fetched; None where nothing is given,
    for whoever keeps snapshots of all stages gives these with them.
    """

    def __init__(
        self,
        host: Host,
        network: PeerNetwork,
        shapes: Sequence[tuple[tuple[int, ...], ...]],
        deadline_s: Callable[[int], float] | None,
    ) -> None:
        self._machine, self._network, self._shapes, self._deadline_s = host, network, shapes, deadline_s
        self._donors: dict[int, Donor] = {}
        self._said: dict[int, ReplicaState] = {}
        self._talking: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"Lending(stages {sorted(self._donors)})"

    def statistics(self) -> dict[str, int | float]:
        """Return of how many stages there are weights to give."""
        return {"stages": len(self._donors)}

    async def begin(self, own: int) -> None:
        """Set aside what is there of other stages than our own, and serve it from now on."""
        former = self._machine.former
        await former.set_aside(own)
        self._said.clear()
        for number in await former.stages() if self._deadline_s is not None else ():
            if number != own and number not in self._donors and number < len(self._shapes):
                await self._serve(number)

    async def _serve(self, number: int) -> None:
        assert self._deadline_s is not None
        subject = WeightsOf(number, self._shapes[number], SNAPSHOT)
        deadline_s = self._deadline_s(subject.weight_bytes)
        pieces = len(cut([4 * prod(shape) for shape in subject.shapes]))
        terms = DonorLimits(deadline_s=2 * deadline_s, piece_s=piece_s(deadline_s, pieces))

        async def provide(parts: Parts) -> ReplicaState:
            return await self._provide(number, parts)

        async def serve(conversation: Conversation) -> None:
            others = [other for other in self._donors if other != number]
            if any(self._talking[other] or self._donors[other].statistics()["held"] for other in others):
                await turn_away(conversation)
                return
            self._talking[number] += 1
            try:
                await self._donors[number].serve(conversation)
            finally:
                self._talking[number] -= 1

        self._donors[number] = Donor(provide, self._machine.device.beside, subject.shapes, terms)
        await self._network.serve(topic(SNAPSHOT, number), subject.schema, serve)

    async def _provide(self, number: int, parts: Parts) -> ReplicaState:
        """Return what is known of a stage's weights, or they themselves, read from the disk."""
        if parts is Parts.OUTLINE and number in self._said:
            return self._said[number]
        kept = await self._machine.former.slow(number) if parts is not Parts.ALL else None
        if kept is None:
            raise ConnectionAbortedError("of a stage that we left there are slow weights, and no more")
        whole = state_of(kept)
        if number not in self._said:
            size = await self._machine.device.beside(norm, whole.slow)
            self._donors[number].knows(whole.round, size)
            # What it says of itself is asked by many, and must cost neither the disk nor memory for the weights.
            self._said[number] = replace(whole, slow=())
        return self._said[number] if parts is Parts.OUTLINE else whole


VOICE_S = 10.0
RETRY_S = 5.0


def state_of(kept: Checkpoint) -> ReplicaState:
    """Return what is kept as a replica would give it."""
    counters = kept.counters
    return ReplicaState(
        slow=kept.tensors["slow"],
        momentum=(),
        optimiser=(),
        round=counters.round,
        inner_steps=counters.inner_steps,
        progress=counters.progress,
        optimiser_steps=0,
        last_met=counters.last_met or 0,
    )


async def turn_away(conversation: Conversation) -> None:
    """Tell whoever asks to come back later; raise ConnectionAbortedError where it asks nothing."""
    try:
        async with asyncio.timeout(VOICE_S):
            await conversation.receive()
            await conversation.send(Busy(retry_after_s=RETRY_S))
    except TimeoutError as silence:
        raise ConnectionAbortedError("no request came") from silence
