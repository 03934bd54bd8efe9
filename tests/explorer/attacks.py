"""What hostile peers do in a simulation: a production node of which single acts are replaced, or identities alone.

An `Attack` stands between a node and its network and stage: records are published, microbatches answered, gossip said
and arithmetic done as it says, and the rest is the node's own, so that the peer is met like any other. `Identities` are
records without a node behind them: as many names as one process likes to make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from gossip.exchange.messages import Accept, Decline, Probe, Propose
from noloco_node.network.calls import HookedConversation, HookedNetwork
from noloco_node.run.protocols import GOSSIP, MICROBATCH
from noloco_node.swarm.receipts import SOURCE_LIFETIME_S, ReceiptRecord, SourceRecord
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.stage_records import Published, encode_record
from pipeline.messages import Gradient, Reason, Refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import Tensor

    from noloco_node.machine.interface import StageModel
    from noloco_node.network.interface import Conversation, Handler, PeerNetwork
    from noloco_node.network.schema import Schema
    from noloco_node.sim.network.medium import Corruption
    from noloco_node.sim.network.sim_network import SimNetwork
    from pipeline.inner_step import StepReport
    from pipeline.worker import WorkerForward

FASTEST_S = 1e-9
"""Device seconds a microbatch of who boasts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """Which acts of a node are replaced; None leaves them as they are.

    `record`: what it publishes of itself. `source`: what it claims as a source. `receipts`: what it signs for sources.
    `answer`: takes a call of the stage before. `hear`: makes the node's conversation of one with the stage before.
    `say`: what it says in gossip. `arithmetic`: of its stage.
    `corruption`: of its messages with tensors. `tell`: what it makes of each message, about any topic.
    `flood`: silent conversations that it opens with everybody about each of its topics, whenever it reads the roster.
    """

    record: Callable[[PeerRecord], PeerRecord] | None = None
    source: Callable[[SourceRecord], SourceRecord] | None = None
    receipts: Callable[[dict[bytes, int]], dict[bytes, int]] | None = None
    answer: Handler | None = None
    hear: Callable[[Conversation], Conversation] | None = None
    say: Callable[[Any], Any] | None = None
    tell: Callable[[Any], Any] | None = None
    arithmetic: Callable[[StageModel], Any] | None = None
    corruption: Corruption | None = None
    flood: int = 0

    def network(self, network: PeerNetwork, /) -> PeerNetwork:
        """Return a node's network with the acts of it that are replaced."""
        return HostileNetwork(network, self)

    def stage(self, stage: StageModel, /) -> StageModel:
        """Return a node's stage, or what computes in its place."""
        return stage if self.arithmetic is None else self.arithmetic(stage)


class HostileNetwork(HookedNetwork):
    """The network of a node that attacks."""

    def __init__(self, network: PeerNetwork, attack: Attack) -> None:
        super().__init__(network)
        self._attack = attack
        self._topics: dict[str, Schema] = {}
        self._idle: list[AbstractAsyncContextManager[Conversation]] = []
        """Conversations in which nothing is said; they break when the network is put away."""

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        attack = self._attack
        if key.endswith("/sources"):
            if attack.source is not None:
                value = msgspec.msgpack.encode(attack.source(msgspec.msgpack.decode(value, type=SourceRecord)))
        elif key.endswith("/receipts"):
            if attack.receipts is not None:
                signed = msgspec.msgpack.decode(value, type=ReceiptRecord)
                value = msgspec.msgpack.encode(ReceiptRecord(signed.epoch, attack.receipts(signed.samples)))
        else:
            told = msgspec.msgpack.decode(value, type=Published)
            record = told.record if attack.record is None else attack.record(told.record)
            if attack.source is not None and record.samples:
                said = attack.source(SourceRecord(record.samples, False))
                record = msgspec.structs.replace(record, samples=said.samples)
            value = msgspec.msgpack.encode(msgspec.structs.replace(told, record=record))
        return await super().publish(key, subkey, value, lifetime_s)

    async def read_all(self, keys: Sequence[str]) -> Sequence[Mapping[str, bytes] | None]:
        """Read, and flood whoever was found."""
        found = await super().read_all(keys)
        if self._attack.flood:
            peers = dict.fromkeys(peer for records in found for peer in records or () if peer != self.peer_id)
            topics = list(self._topics.items()) * self._attack.flood
            await asyncio.gather(*(self._open(peer, *topic) for peer in peers for topic in topics))
        return found

    async def _open(self, peer: str, topic: str, schema: Schema) -> None:
        talk = self._network.talk(peer, topic, schema)
        with suppress(ConnectionError):
            await talk.__aenter__()
            self._idle.append(talk)

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        self._topics[topic] = schema
        say = self._said(topic)
        if topic.startswith(MICROBATCH) and self._attack.answer is not None:
            handler = self._attack.answer
        elif topic.startswith(MICROBATCH) and (hear := self._attack.hear) is not None:
            works = handler

            async def holding(conversation: Conversation) -> None:
                await works(hear(conversation))

            handler = holding
        elif say is not None:
            honest, tell = handler, say

            async def lying(conversation: Conversation) -> None:
                await honest(_Lying(conversation, tell))

            handler = lying
        await super().serve(topic, schema, handler)

    @asynccontextmanager
    async def talk(self, peer: str, topic: str, schema: Schema) -> AsyncIterator[Conversation]:
        say = self._said(topic)
        async with super().talk(peer, topic, schema) as conversation:
            yield conversation if say is None else _Lying(conversation, say)

    def _said(self, topic: str) -> Callable[[Any], Any] | None:
        """Return what becomes of what is said about a topic; None where it stays as it is."""
        return self._attack.tell or (self._attack.say if topic.startswith(GOSSIP) else None)


class HoldingConversation(HookedConversation):
    """A conversation with the stage before, in which microbatches are held and then refused.

    `holds`: says for how long a microbatch is held; None lets the node have it.
    """

    def __init__(self, conversation: Conversation, holds: Callable[[], float | None], refusal: Refused) -> None:
        super().__init__(conversation)
        self._holds, self._refusal = holds, refusal

    async def receive(self) -> Any:
        message = await super().receive()
        while (hold_s := self._holds()) is not None:
            await asyncio.sleep(hold_s)
            await self.send(self._refusal)
            message = await super().receive()
        return message


class _Lying(HookedConversation):
    """A conversation in which what is sent is another thing than was meant."""

    def __init__(self, conversation: Conversation, say: Callable[[Any], Any]) -> None:
        super().__init__(conversation)
        self._say = say

    async def send(self, message: Any) -> None:
        await super().send(self._say(message))


# Arithmetic.


class TamperedStage:
    """A stage whose output, gradient or weights are not what it computes."""

    def __init__(
        self,
        stage: StageModel,
        *,
        output: Callable[[Tensor], Tensor] | None = None,
        gradient: Callable[[Tensor], Tensor] | None = None,
        weights: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._stage, self._output, self._gradient, self._weights = stage, output, gradient, weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, hidden: Tensor, targets: Tensor | None = None, /) -> WorkerForward:
        """Run a forward pass."""
        forward = self._stage.forward(hidden, targets)
        return _TamperedPass(forward, self._output or _same, self._gradient or _same)

    def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
        reply = self._stage.loss(hidden, targets)
        if self._gradient is None or reply.hidden is None:
            return reply
        return replace(reply, hidden=self._gradient(reply.hidden))

    def claimed(self) -> tuple[Tensor, ...]:
        """Return what partners are to take for the fast weights."""
        weights = self._stage.weights()
        return weights if self._weights is None else tuple(self._weights(tensor) for tensor in weights)

    def weights(self, less: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        claimed = self.claimed()
        return tuple((own - other).bfloat16() for own, other in zip(claimed, less, strict=True)) if less else claimed

    def step(self, learning_rate: float, microbatches: float, /) -> StepReport:
        return self._stage.step(learning_rate, microbatches)

    def current_weights(self) -> tuple[Tensor, ...]:
        return self.claimed()


class _TamperedPass:
    def __init__(
        self, forward: WorkerForward, output: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]
    ) -> None:
        self._forward, self._gradient = forward, gradient
        self.output = output(forward.output)

    def backward(self, gradient: Tensor, /) -> Tensor | None:
        returned = self._forward.backward(gradient)
        return None if returned is None else self._gradient(returned)


def _same(tensor: Tensor) -> Tensor:
    return tensor


# Single acts.


def boast(record: PeerRecord) -> PeerRecord:
    return msgspec.structs.replace(record, device_s=FASTEST_S)


async def hang(conversation: Conversation) -> None:
    await conversation.receive()
    await asyncio.Event().wait()


def refuse(reason: Reason, retry_after_s: float) -> Handler:
    async def answer(conversation: Conversation) -> None:
        await conversation.receive()
        await conversation.send(Refused(reason=reason, retry_after_s=retry_after_s))

    return answer


def hold(hold_s: float, after_s: float, reason: Reason = Reason.FULL, share: float = 1.0) -> Attack:
    """Return an attack that boasts, and after a while holds a share of all microbatches before it refuses them."""
    rng = Random(0)

    def holds() -> float | None:
        begun = asyncio.get_running_loop().time() >= after_s
        return hold_s if begun and rng.random() < share else None

    refusal = Refused(reason=reason)
    return Attack(record=boast, hear=lambda conversation: HoldingConversation(conversation, holds, refusal))


def in_round(number: int) -> Callable[[Any], Any]:
    """Return what claims to be in this round, and to have met somebody in it, whenever a round is said."""

    def say(message: Any) -> Any:
        match message:
            case Probe():
                return replace(message, round=number, last_met=number)
            case Propose() | Accept() | Decline():
                return replace(message, round=number)
        return message

    return say


class Identities:
    """Names without a node behind them, published as long as `run` is awaited."""

    def __init__(self, medium: SimNetwork, run_id: str, names: Sequence[str], refresh_s: float) -> None:
        self._networks = [medium.network(name) for name in names]
        self._run_id, self._refresh_s = run_id, refresh_s

    async def run(self, record: PeerRecord, samples: int = 0, *, finished: bool = False) -> None:
        """Publish `record` for each of them again and again, and `samples` as a source's where there are any.

        `finished`: they say that their part of the run is done.
        """
        serial = 0
        while True:
            serial += 1
            await asyncio.gather(
                *[
                    publish_identity(
                        network, self._run_id, record, serial, 4 * self._refresh_s, samples, finished=finished
                    )
                    for network in self._networks
                ]
            )
            await asyncio.sleep(self._refresh_s)


async def publish_identity(
    network: PeerNetwork,
    run_id: str,
    record: PeerRecord,
    serial: int,
    lifetime_s: float,
    samples: int = 0,
    *,
    finished: bool = False,
) -> None:
    """Publish once what one identity says of itself, and its samples as a source where there are any."""
    own = msgspec.structs.replace(record, peer=network.peer_id, samples=samples or record.samples)
    raw = encode_record(Published(serial, own))
    await network.publish(f"{run_id}/stage/{record.stage}", network.peer_id, raw, lifetime_s)
    if samples:
        said = msgspec.msgpack.encode(SourceRecord(samples, finished))
        await network.publish(f"{run_id}/sources", network.peer_id, said, SOURCE_LIFETIME_S)
