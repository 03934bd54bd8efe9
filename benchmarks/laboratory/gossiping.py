"""Asynchronous gossip: the production's rounds, over the production's port, on simulated lines.

Nobody waits for anybody. Each replica trains at its own speed, and `gossip.round.Rounds` opens a round after as many
inner steps as the run asks of a machine so fast, finds a partner, swaps weights in the run's number format while
training goes on, and corrects the fast weights at the next pause. Messages take their time on lines of the laboratory's
rate and latency; what a replica sends is counted by the rounds themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import torch

from gossip.nesterov import OuterState, Tensors
from gossip.port import Candidate, Event, Going, Origin, OuterStep, Surroundings
from gossip.round import Rounds
from laboratory.machines import LATENCY_S, bytes_per_s
from laboratory.swarm import Replica, Swarm
from laboratory.task import run_of
from noloco_node.port import Conversation, Network
from noloco_node.post import Post, round_settings
from noloco_node.sim.network.hub import Hub
from noloco_node.sim.network.lines import Access, Latency, Weather
from noloco_node.topics import GOSSIP, gossip_schema

T = TypeVar("T")
LAST_ROUND_S = 60.0


class Gossiper:
    """One replica with its rounds."""

    def __init__(self, swarm: Swarm, replica: Replica, network: Network, here: dict[str, Gossiper]) -> None:
        run, peer = run_of(swarm.cell), network.peer_id
        (stage,) = replica.stages
        self.replica = replica
        self._swarm, self._network, self._here, self._stage = swarm, network, here, stage
        self._schema = gossip_schema(run, stage.shapes)
        weights = stage.weights()
        state = OuterState(weights, tuple(torch.zeros_like(tensor) for tensor in weights))
        around = Surroundings(compute=_at_once, partners=self._partners, converse=self._converse, record=self._record)
        post = Post(run=run, run_id="", stage=0, peer=peer)
        self.rounds = Rounds(peer, round_settings(post, swarm.weight_bytes), Origin(state), self, around)
        self._at_work = asyncio.Lock()
        self.lateness: list[int] = []
        """Inner steps between each snapshot and its correction."""

    def __repr__(self) -> str:
        return f"<Gossiper {self._network.peer_id}: {self.rounds!r}>"

    async def snapshot(self) -> Tensors:
        """Return a copy of the fast weights."""
        return self._stage.weights()

    async def correct(self, correction: Tensors) -> None:
        """Add a correction to the fast weights."""
        self._stage.correct(correction)

    @asynccontextmanager
    async def alone(self, retry_after_s: float) -> AsyncIterator[None]:
        """Wait for the end of the inner step in hand and begin no other."""
        async with self._at_work:
            yield

    def _partners(self) -> tuple[Candidate, ...]:
        mine = self._network.peer_id
        return tuple(
            Candidate(peer, other.rounds.finished, 1.0 / other.replica.step_s)
            for peer, other in self._here.items()
            if peer != mine
        )

    def _converse(self, peer: str) -> AbstractAsyncContextManager[Conversation]:
        return self._network.talk(peer, GOSSIP, self._schema)

    def _record(self, event: Event) -> None:
        if isinstance(event, OuterStep):
            self.replica.rounds += event.partner is not None
            if event.partner is not None:
                self.lateness.append(event.staleness)

    async def live(self) -> None:
        """Train until the swarm's budget is spent, gossip meanwhile, meet once more, and leave."""
        await self._network.serve(GOSSIP, self._schema, self.rounds.serve)
        async with asyncio.TaskGroup() as group:
            gossip = group.create_task(self.rounds.run())
            await self._train()
            await self.rounds.last_round(LAST_ROUND_S)
            del self._here[self._network.peer_id]
            await self.rounds.leave()
            gossip.cancel()

    async def _train(self) -> None:
        replica, swarm = self.replica, self._swarm
        while swarm.left > 0:
            async with self._at_work:
                await swarm.step(replica)
            going = Going(swarm.share, 1.0 / replica.step_s)
            await self.rounds.between_steps(replica.steps, replica.step_s, going)


async def _at_once(function: Callable[..., T], /, *args: object) -> T:
    return function(*args)


async def gossip(swarm: Swarm) -> None:
    """Let everybody train and gossip until the budget is spent."""
    rate, latency = bytes_per_s(swarm.weight_bytes), Latency(mean_s=LATENCY_S)
    hub = Hub(Weather(latency=latency), seed=swarm.cell.seed)
    here: dict[str, Gossiper] = {}
    for replica in swarm.replicas:
        peer = f"replica {replica.number}"
        network = hub.network(peer, Access(up_bytes_per_s=rate, down_bytes_per_s=rate))
        here[peer] = Gossiper(swarm, replica, network, here)
    everybody = list(here.values())
    async with asyncio.TaskGroup() as group:
        for one in everybody:
            group.create_task(one.live())
    if hub.failures:
        raise hub.failures[0][1]
    counts = [one.rounds.statistics() for one in everybody]
    for one, counted in zip(everybody, counts, strict=True):
        one.replica.sent_bytes = counted["bytes_sent"]
    for name in ("met", "solo", "deferred", "retaken", "lost"):
        swarm.notes[name] = sum(counted[name] for counted in counts)
    late = [steps for one in everybody for steps in one.lateness]
    swarm.notes["steps_late"] = sum(late) / max(1, len(late))
