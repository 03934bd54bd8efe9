"""A peer gives slow weights of stages that it does not serve itself to whoever revives one of them.

They lie on its disk: snapshots that it keeps (`noloco_node.state_sync.snapshot_keeper`), or its last checkpoints of
stages that it served before (`noloco_node.storage.checkpoint_store`). Whoever moved away from a stage may be the last
to have anything of it: the replicas that it left may die before anybody comes. So these are served from the moment at
which it leaves. Of all stages together one is given at a time, which bounds the memory that strangers can cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from gossip.exchange.messages import Busy, Parts, ReplicaState
from gossip.exchange.swap import norm
from gossip.transfer.chunks import cut
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import piece_s
from noloco_node.machine.interface import Host, Runner
from noloco_node.network.interface import Conversation, PeerNetwork, patient
from noloco_node.run.protocols import topic
from noloco_node.state_sync.manifests import SNAPSHOT, WeightsOf
from noloco_node.storage.checkpoint import Checkpoint

Shapes = tuple[tuple[int, ...], ...]
"""Of a stage's parameters."""
REQUEST_S = 10.0
RETRY_S = 5.0


class SnapshotServer:
    """Serves slow weights that lie on the disk, of one stage at a time.

    `shapes`: of each stage. `deadline_s`: for so many bytes to be fetched. `load`: reads a stage's weights, None where
    there are none. `is_last`: says that nobody else serves a stage; it is then given besides others.
    """

    def __init__(
        self,
        network: PeerNetwork,
        device: Runner,
        shapes: Sequence[Shapes],
        deadline_s: Callable[[int], float],
        load: Callable[[int], Awaitable[Checkpoint | None]],
        is_last: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._network, self._device, self._shapes, self._deadline_s = network, device, shapes, deadline_s
        self._load, self._is_last = load, is_last
        self._donors: dict[int, Donor] = {}
        self._outlines: dict[int, ReplicaState] = {}
        self._talking: Counter[int] = Counter()

    async def note(self, found: Checkpoint) -> None:
        """Serve a stage of which `found` are the newest weights from now on."""
        number = found.counters.stage
        is_new = number not in self._donors
        await self._outline(number, state_of(found))
        if is_new:
            await self._open(number)

    async def serve(self, number: int) -> None:
        """Serve a stage from now on; its weights are read when somebody asks for them."""
        if number not in self._donors:
            await self._open(number)

    def forget_outlines(self) -> None:
        """Read anew what there is of each stage when somebody asks."""
        self._outlines.clear()

    def _donor(self, number: int) -> Donor:
        if number not in self._donors:
            subject = self._subject(number)
            deadline_s = self._deadline_s(subject.weight_bytes)
            pieces = len(cut([4 * prod(shape) for shape in subject.shapes]))
            limits = DonorLimits(deadline_s=2 * deadline_s, piece_s=piece_s(deadline_s, pieces))
            provide = partial(self._provide, number)
            self._donors[number] = Donor(provide, self._device.beside, subject.shapes, limits)
        return self._donors[number]

    async def _open(self, number: int) -> None:
        self._donor(number)
        serve = partial(self._converse, number)
        await self._network.serve(topic(SNAPSHOT, number), self._subject(number).schema, serve)

    def _subject(self, number: int) -> WeightsOf:
        return WeightsOf(number, self._shapes[number], SNAPSHOT)

    async def _outline(self, number: int, state: ReplicaState) -> ReplicaState:
        """Remember what weights say of themselves: many ask that, and it must cost neither the disk nor memory."""
        size = await self._device.beside(norm, state.slow)
        self._donor(number).knows(state.round, size)
        outline = self._outlines[number] = replace(state, slow=())
        return outline

    async def _provide(self, number: int, parts: Parts) -> ReplicaState:
        """Return what is known of a stage's weights, or they themselves, read from the disk."""
        if parts is Parts.OUTLINE and number in self._outlines:
            return self._outlines[number]
        found = await self._load(number) if parts is not Parts.ALL else None
        if found is None:
            raise ConnectionAbortedError("of another's stage there are slow weights, as long as they lie here, no more")
        state = state_of(found)
        if number not in self._outlines:
            await self._outline(number, state)
        return self._outlines[number] if parts is Parts.OUTLINE else state

    async def _converse(self, number: int, conversation: Conversation) -> None:
        if self._is_busy_with_others(number) and not self._is_last(number):
            await turn_away(conversation)
            return
        self._talking[number] += 1
        try:
            await self._donors[number].serve(conversation)
        finally:
            self._talking[number] -= 1

    def _is_busy_with_others(self, number: int) -> bool:
        """Say whether weights of another stage are being given, or held for somebody."""
        others = [other for other in self._donors if other != number]
        return any(self._talking[other] or self._donors[other].statistics()["held"] for other in others)


class FormerStageServer:
    """Serves what one peer has of the stages that it served before.

    `deadline_s`: as for `SnapshotServer`; None serves nothing, for whoever keeps snapshots of all stages gives these
    with them.
    """

    def __init__(
        self, host: Host, network: PeerNetwork, shapes: Sequence[Shapes], deadline_s: Callable[[int], float] | None
    ) -> None:
        self._former, self._stages, self._server = host.former, len(shapes), None
        if deadline_s is not None:
            self._server = SnapshotServer(network, host.device, shapes, deadline_s, host.former.slow)

    async def begin(self, own: int) -> None:
        """Set aside what is there of other stages than our own, and serve it from now on."""
        await self._former.set_aside(own)
        if self._server is not None:
            self._server.forget_outlines()
            for number in await self._former.stages():
                if number != own and number < self._stages:
                    await self._server.serve(number)


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
    async with patient(conversation, REQUEST_S):
        await conversation.receive()
        await conversation.send(Busy(retry_after_s=RETRY_S))
