"""Simulated peers whose every word is overheard: for tests that do something to a conversation at its exact moment.

A `Cast` is a hub and its peers, production nodes with quadratic models for stages, of which a test decides who comes
and who goes.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from noloco_node.journal import events
from noloco_node.network.calls import HookedConversation
from noloco_node.network.interface import Conversation, Handler, PeerNetwork
from noloco_node.node.replica import Replica
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.scenario import decode_scenario
from noloco_node.sim.scenario.setup import build_setup
from noloco_node.swarm.roster import Roster


class Heard(NamedTuple):
    """One act in a conversation; `calls`: whether `me` opened it."""

    me: str
    other: str
    calls: bool
    act: str
    message: object


Tell = Callable[[Heard], Awaitable[None]]


class OverheardConversation(HookedConversation):
    def __init__(self, inner: Conversation, me: str, calls: bool, tell: Tell) -> None:
        super().__init__(inner)
        self._me, self._calls, self._tell = me, calls, tell

    async def send(self, message: Any) -> None:
        await self._tell(Heard(self._me, self.peer, self._calls, "sends", message))
        await super().send(message)
        await self._tell(Heard(self._me, self.peer, self._calls, "sent", message))

    async def receive(self) -> Any:
        message = await super().receive()
        await self._tell(Heard(self._me, self.peer, self._calls, "received", message))
        return message


class OverheardNetwork:
    """A peer's network, with every conversation overheard; all else is the network's own."""

    def __init__(self, inner: PeerNetwork, tell: Tell) -> None:
        self._inner, self._tell = inner, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @asynccontextmanager
    async def talk(self, peer: str, topic: str, schema: Any) -> AsyncIterator[OverheardConversation]:
        async with self._inner.talk(peer, topic, schema) as conversation:
            yield OverheardConversation(conversation, self._inner.peer_id, True, self._tell)

    async def serve(self, topic: str, schema: Any, handler: Handler) -> None:
        async def overheard(conversation: Conversation) -> None:
            await handler(OverheardConversation(conversation, self._inner.peer_id, False, self._tell))

        await self._inner.serve(topic, schema, overheard)


class Cast:
    """The peers that a scenario plans, none of them started, what they journal, and who listens in on them."""

    def __init__(self, text: str) -> None:
        setting = build_setup(decode_scenario(text, "the test's scenario"))
        self.hub = SimNetwork(setting.scenario.network, seed=setting.scenario.seed, size_bytes=setting.sizes.size_bytes)
        self._events: defaultdict[tuple[str, type[events.Event]], list[tuple[float, events.Event]]] = defaultdict(list)
        self.listen: Tell | None = None
        replicas = setting.run.pipeline.replicas
        self.peers = {
            name: SimulatedPeer(name, number // replicas, setting, self, self._hear)
            for number, name in enumerate(setting.peers)
        }

    # What a peer asks of its hub.

    def network(self, name: str, access: Access) -> OverheardNetwork:
        return OverheardNetwork(self.hub.network(name, access), self._tell)

    def kill(self, name: str) -> None:
        self.hub.kill(name)

    async def _tell(self, heard: Heard) -> None:
        if self.listen is not None:
            await self.listen(heard)

    def _hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        self._events[peer.name, type(event)].append((asyncio.get_running_loop().time(), event))

    # What a test asks.

    def since(self, name: str, kind: type[Any], at_s: float = 0.0) -> list[Any]:
        return [event for at, event in self._events[name, kind] if at > at_s]

    def replica(self, name: str) -> Replica:
        """Return the replica of a peer that has a stage."""
        node = self.peers[name].session.node
        assert node.replica is not None
        return node.replica

    def roster(self, name: str) -> Roster:
        """Return the roster as a peer has it."""
        node = self.peers[name].session.node
        return node.roster

    def of_stage(self, stage: int) -> list[SimulatedPeer]:
        return [peer for peer in self.peers.values() if peer.asked_stage == stage]


def nothing_is_held(peer: SimulatedPeer) -> None:
    """Check that a node that has ended holds no slot, no place in a queue, no waiting microbatch and no open round."""
    replica = peer.session.node.replica
    assert replica.admission.in_flight == replica.admission.queued == 0
    assert replica.next_stage is None or replica.next_stage.statistics()["waiting"] == 0
    found = replica.rounds.statistics()
    assert not found["open"], found
    assert "did not come back" not in " ".join(peer.session.said)
    assert peer.session.wrong == []
