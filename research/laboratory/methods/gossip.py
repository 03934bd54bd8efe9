"""Asynchronous gossip: the production's rounds, over the production's port, on simulated lines.

Nobody waits for anybody. Each replica trains at its own speed, and `gossip.rounds.rounds.Rounds` opens a round after as
many inner steps as the run asks of a machine so fast, finds a partner, swaps weights in the run's number format while
training goes on, and corrects the fast weights at the next pause. Messages take their time on lines of the laboratory's
rate and latency; what a replica sends is counted by the rounds themselves. What rounds compute takes no time, and what
is known of the others is never out of date, unless the cell asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from gossip.interface import Candidate, Event, Origin, OuterStepTaken, RoundContext, RoundProgress
from gossip.rounds.rounds import Rounds
from gossip.rule.outer_step import OuterState, Tensors
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.node.node_context import NodeOptions
from noloco_node.node.replica import round_timeouts
from noloco_node.run.protocols import GOSSIP, gossip_schema
from noloco_node.sim.network.link_model import Access, Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork
from research.laboratory.experiments.hardware_model import LATENCY_S, bytes_per_s, compute_s
from research.laboratory.experiments.task import run_of
from research.laboratory.methods.adapters import AlternatingStage
from research.laboratory.methods.appointments import APPOINTMENTS, AppointedRounds, Terms, appointment_schema
from research.laboratory.methods.lagging_roster import Crowd
from research.laboratory.methods.replicas import Replica, Swarm
from research.laboratory.methods.virtual_trainee import Device

LAST_ROUND_S = 60.0


class Gossiper:
    """One replica with its rounds, which go on from a copy that it came with if there is one."""

    def __init__(
        self, swarm: Swarm, replica: Replica, network: PeerNetwork, crowd: Crowd, copied: Origin | None = None
    ) -> None:
        run, peer = run_of(swarm.cell), network.peer_id
        (stage,) = replica.stages
        self.replica = replica
        self._swarm, self._network, self._crowd, self._stage = swarm, network, crowd, stage
        cell = swarm.cell
        charged_s = compute_s(cell.codec, swarm.weight_bytes, replica.step_s) if cell.charged or cell.beside else 0.0
        self._device = Device(charged_s, beside=cell.beside)
        self.alone = self._device.alone
        self._schema = gossip_schema(run, stage.shapes)
        compute, partners = self._device.compute, self._partners
        around = RoundContext(
            seed=run.seed,
            compute=compute,
            partners=partners,
            converse=self._converse,
            record=self._record,
            from_zero=cell.adapters is not None and cell.adapters.trained == "b",
            timeouts=round_timeouts(run, NodeOptions(), swarm.weight_bytes),
        )
        origin = origin_of(replica) if copied is None else copied
        self.rounds: Rounds | AppointedRounds
        if cell.appointments is None:
            self.rounds = Rounds(peer, run.outer, origin, self, around)
        else:
            terms = Terms(self._talk_of_one, replica.step_s, cell.appointments)
            self.rounds = AppointedRounds(peer, run.outer, origin, self, around, terms)
        crowd.join(peer, 1.0 / replica.step_s, origin.rounds)
        self.lateness: list[int] = []
        """Inner steps between each snapshot and its correction."""

    def __repr__(self) -> str:
        return f"<Gossiper {self._network.peer_id}: {self.rounds!r}>"

    async def snapshot(self, slow: Tensors) -> Tensors:
        """Return a copy of the weights, or their difference from slow ones."""
        return self._stage.weights(slow)

    async def correct(self, correction: Tensors) -> None:
        """Add a correction to the fast weights."""
        self._stage.correct(correction)

    async def replace(self, weights: Tensors) -> None:
        """Replace the fast weights."""
        self._stage.set_weights(weights)

    def _partners(self) -> tuple[Candidate, ...]:
        return self._crowd.others(self._network.peer_id)

    @asynccontextmanager
    async def _converse(self, peer: str) -> AsyncIterator[Conversation]:
        async with self._network.talk(peer, GOSSIP, self._schema) as conversation:
            yield conversation

    @asynccontextmanager
    async def _talk_of_one(self, peer: str) -> AsyncIterator[Conversation]:
        async with self._network.talk(peer, APPOINTMENTS, appointment_schema(self._schema)) as conversation:
            yield conversation

    def _record(self, event: Event) -> None:
        if isinstance(event, OuterStepTaken):
            self._crowd.note(self._network.peer_id, self.rounds.finished)
            if isinstance(self._stage, AlternatingStage):
                self._stage.round = self.rounds.finished
            self.replica.rounds += event.partner is not None
            if event.partner is not None:
                self.lateness.append(event.staleness)

    async def serve(self) -> None:
        """Answer whoever asks for a meeting."""
        await self._network.serve(GOSSIP, self._schema, self.rounds.serve)
        if isinstance(self.rounds, AppointedRounds):
            answer = self.rounds.appointments.answer_offer
            await self._network.serve(APPOINTMENTS, appointment_schema(self._schema), answer)

    async def live(self) -> None:
        """Train until the swarm's budget is spent, gossip meanwhile, meet once more, and leave."""
        await self.serve()
        async with asyncio.TaskGroup() as group:
            gossip = group.create_task(self.rounds.run())
            await self.train()
            await self.rounds.last_round(LAST_ROUND_S)
            self._crowd.leave(self._network.peer_id)
            await self.rounds.leave()
            gossip.cancel()

    async def train(self) -> None:
        """Train until the swarm's budget is spent."""
        replica, swarm = self.replica, self._swarm
        while swarm.left > 0:
            async with self._device.at_work:
                await swarm.step(replica)
                await self._device.settle()
            going = RoundProgress(swarm.course, 1.0 / replica.step_s)
            await self.rounds.between_steps(replica.steps, replica.step_s, going)


def origin_of(replica: Replica) -> Origin:
    """Return where the rounds of a replica begin that has no copy of another's."""
    weights = replica.stages[0].weights()
    state = OuterState(weights, tuple(torch.zeros_like(tensor) for tensor in weights))
    return Origin(state, inner_steps=replica.steps)


async def gossip(swarm: Swarm) -> None:
    """Let everybody train and gossip until the budget is spent."""
    cell = swarm.cell
    rate, latency = bytes_per_s(swarm.model_bytes) / cell.slower_lines, Latency(mean_s=LATENCY_S)
    hub = SimNetwork(NetworkConditions(latency=latency), seed=cell.seed)
    crowd = Crowd(cell.roster_lag_s)
    everybody: list[Gossiper] = []
    for replica in swarm.replicas:
        network = hub.network(f"replica {replica.number}", Access(up_bytes_per_s=rate, down_bytes_per_s=rate))
        everybody.append(Gossiper(swarm, replica, network, crowd))
    async with asyncio.TaskGroup() as group:
        for one in everybody:
            group.create_task(one.live())
    if hub.failures:
        raise hub.failures[0][1]
    counts = [one.rounds.statistics() for one in everybody]
    for one, counted in zip(everybody, counts, strict=True):
        one.replica.sent_bytes += counted["bytes_sent"]
    for name in ("met", "solo", "skipped", "retaken", "lost"):
        swarm.notes[name] = sum(counted[name] for counted in counts)
    if cell.appointments is not None:
        swarm.notes["appointed"] = sum(counted["appointed"] for counted in counts)
    late = [steps for one in everybody for steps in one.lateness]
    swarm.notes["steps_late"] = sum(late) / max(1, len(late))
