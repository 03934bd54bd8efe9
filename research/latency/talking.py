"""The same tree over real conversations: the production's network port, open streams, typed messages.

`tree` hands messages to the simulator's lines directly, because that is cheap. Here each edge of the tree is a
conversation of `noloco_node.network.interface`, opened before the clock starts and kept: coroutines send and receive on
them. The ratio must be the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.schema import MessageSpec, Schema
from noloco_node.sim import clock
from research.latency.tree import Member, Times, Trials, carrier, moments, plant, world

TOPIC = "all-reduce"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """A partial sum on its way up, or the whole one on its way down."""

    value: float


SCHEMA = Schema({Sum: MessageSpec("Sum")})


class Talker:
    """One member of a tree that talks with its parent and its children."""

    def __init__(self, network: PeerNetwork, member: Member, ends: asyncio.Queue[float]) -> None:
        self._network, self._member, self._ends = network, member, ends
        self._below: list[Conversation] = []
        self.ready = asyncio.Event()
        self._over = asyncio.Event()

    async def listen(self) -> None:
        """Let children call."""
        await self._network.serve(TOPIC, SCHEMA, self._answer)
        self._note()

    async def _answer(self, conversation: Conversation) -> None:
        self._below.append(conversation)
        self._note()
        await self._over.wait()

    def _note(self) -> None:
        if len(self._below) == len(self._member.children):
            self.ready.set()

    async def live(self, goes: Sequence[asyncio.Event]) -> None:
        """Call the parent, then take part in one all-reduce after the other, each when it is told to go."""
        async with AsyncExitStack() as stack:
            above = None
            if self._member.parent is not None:
                above = await stack.enter_async_context(self._network.talk(self._member.parent.name, TOPIC, SCHEMA))
            for go in goes:
                await go.wait()
                await self._once(above)
            self._over.set()

    async def _once(self, above: Conversation | None) -> None:
        total = float(self._member.arrived is not None)
        for child in self._below:
            total += await _hear(child)
        if above is not None:
            await above.send(Sum(value=total))
            total = await _hear(above)
        for child in self._below:
            await child.send(Sum(value=total))
        self._ends.put_nowait(asyncio.get_running_loop().time())


async def _hear(conversation: Conversation) -> float:
    message = await conversation.receive()
    assert isinstance(message, Sum)
    return message.value


def measure(batch: Trials) -> Times:
    """Take a batch of trials over conversations."""
    return moments(clock.run(_trials(batch)))


async def _trials(batch: Trials) -> list[float]:
    loop = asyncio.get_running_loop()
    hub = world(batch)
    workers = plant(batch.shape, batch.workers, carrier(hub))
    members = {member.name: member for worker in workers for member in _upwards(worker)}
    for worker in workers:
        worker.arrived = lambda total: None
    goes = [asyncio.Event() for _ in range(batch.trials)]
    ends: asyncio.Queue[float] = asyncio.Queue()
    talkers = [Talker(hub.network(name), member, ends) for name, member in members.items()]
    times_s = []
    async with asyncio.TaskGroup() as group:
        for talker in talkers:
            await talker.listen()
        for talker in talkers:
            group.create_task(talker.live(goes))
        for talker in talkers:
            await talker.ready.wait()
        for go in goes:
            begun_s = loop.time()
            go.set()
            # The last of a tree to end is a worker.
            times_s.append(max([await ends.get() for _ in talkers]) - begun_s)
    return times_s


def _upwards(member: Member | None) -> list[Member]:
    return [] if member is None else [member, *_upwards(member.parent)]
