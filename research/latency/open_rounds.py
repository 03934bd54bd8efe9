"""The same inner steps under this project's own rounds: what is left of the waiting, and what it costs in meetings.

Replicas with the inner-step times of `blocking` gossip through the production's `gossip.rounds.rounds.Rounds` over the
production's port, in virtual time, on lines without latency. An *open* round never stops training: partners are asked
meanwhile, and a replica without one at its next opening skips the round. The *blocking* form (the paper's) stops both
once a partner has accepted: the free one waits until the other's inner step has ended, not until its m steps have.

Measured: how long a replica took for its inner steps, over the time that these steps take by themselves (1 is no
waiting at all), and which share of its openings met a partner. The paper's pairs meet every time, for they wait.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import torch

from gossip.exchange.messages import Accept, Acknowledge, Decline, Probe, Propose, Weights
from gossip.interface import Candidate, Event, Origin, RoundContext
from gossip.rounds.rounds import Rounds
from gossip.rule.outer_step import OuterState, Tensors
from gossip.settings import Format, OuterConfig
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.schema import MessageSpec, OneOf, Schema, TensorSpec
from noloco_node.sim import clock
from noloco_node.sim.network.sim_network import SimNetwork
from research.laboratory.methods.virtual_trainee import Device
from research.latency.blocking import MU, SIGMA, STILL, step_seconds

TOPIC = "gossip"
WIDTH = 4
MEAN_STEP_S = math.exp(MU + SIGMA**2 / 2)
_VECTOR = TensorSpec((WIDTH,), "float32")
SCHEMA = Schema(
    {
        Propose: MessageSpec("Propose"),
        Accept: MessageSpec("Accept"),
        Decline: MessageSpec("Decline"),
        Probe: MessageSpec("Probe", {"slow": _VECTOR, "fast": None}),
        Weights: MessageSpec("Weights", {"fast": OneOf(((_VECTOR,), ())), "slow": ()}),
        Acknowledge: MessageSpec("Acknowledge"),
    }
)


class Form(NamedTuple):
    """One setting: `outer_steps` times `inner_steps` inner steps of each replica."""

    replicas: int
    inner_steps: int
    outer_steps: int
    blocking: bool
    seed: int


class Found(NamedTuple):
    """Means over the replicas. `overhead`: time taken over the time of the inner steps alone."""

    overhead: float
    met: float
    skipped: float
    solo: float
    openings: float


class Trainee:
    """A replica: a vector of weights that rolls towards its own optimum, one inner step after the other."""

    def __init__(self, network: PeerNetwork, form: Form, number: int, here: dict[str, Trainee]) -> None:
        self._network, self._here, self._form = network, here, form
        self._weights = torch.full((WIDTH,), 20.0)
        self._optimum = 10.0 + number % 3
        self._steps_s = step_seconds(form.seed, number, form.inner_steps * form.outer_steps).tolist()
        self._device = Device()
        self.alone = self._device.alone
        self.took_s = 0.0
        settings = OuterConfig(
            alpha=0.5,
            beta=0.7,
            gamma=0.7,
            dynamic_steps=False,
            codec=Format.FLOAT32,
            inner_steps_per_round=form.inner_steps,
            overlap_steps=0 if form.blocking else min(8, form.inner_steps),
            blocking=form.blocking,
        )
        origin = Origin(OuterState((self._weights.clone(),), (torch.zeros(WIDTH),)))
        compute, partners = self._device.compute, self._partners
        around = RoundContext(
            seed=form.seed, compute=compute, partners=partners, converse=self._converse, record=_forget
        )
        self.rounds = Rounds(network.peer_id, settings, origin, self, around)

    def statistics(self) -> dict[str, int | float]:
        """Return the virtual seconds that its inner steps took, waiting included and alone, and its rounds' counts."""
        return {"took_s": self.took_s, "steps_s": sum(self._steps_s)} | self.rounds.statistics()

    async def snapshot(self, slow: Tensors) -> Tensors:
        """Return a copy of the weights; no codec has them as a difference from slow ones."""
        return (self._weights.clone(),)

    async def correct(self, correction: Tensors) -> None:
        """Add a correction to the weights."""
        self._weights = self._weights + correction[0]

    async def replace(self, weights: Tensors) -> None:
        """Replace the weights."""
        self._weights = weights[0].clone()

    def _partners(self) -> tuple[Candidate, ...]:
        mine = self._network.peer_id
        return tuple(Candidate(peer, other.rounds.finished) for peer, other in self._here.items() if peer != mine)

    def _converse(self, peer: str) -> AbstractAsyncContextManager[Conversation]:
        return self._network.talk(peer, TOPIC, SCHEMA)

    async def live(self) -> None:
        """Train to the end, gossip meanwhile, and leave."""
        await self._network.serve(TOPIC, SCHEMA, self.rounds.serve)
        async with asyncio.TaskGroup() as group:
            gossip = group.create_task(self.rounds.run())
            await self._train()
            del self._here[self._network.peer_id]
            await self.rounds.leave()
            gossip.cancel()

    async def _train(self) -> None:
        for number, step_s in enumerate(self._steps_s, 1):
            async with self._device.at_work:
                await asyncio.sleep(step_s)
                self._weights = self._weights - 0.05 * (self._weights - self._optimum)
            await self.rounds.between_steps(number, MEAN_STEP_S)
        self.took_s = asyncio.get_running_loop().time()


def _forget(event: Event) -> None:
    """Keep no event: the rounds count them."""


def measure(form: Form) -> Found:
    """Let all replicas train and gossip; return what it cost them."""
    return clock.run(_run(form))


async def _run(form: Form) -> Found:
    hub = SimNetwork(STILL, seed=form.seed)
    here: dict[str, Trainee] = {}
    for number in range(form.replicas):
        peer = f"replica {number:04}"
        here[peer] = Trainee(hub.network(peer), form, number, here)
    trainees = list(here.values())
    async with asyncio.TaskGroup() as group:
        for trainee in trainees:
            group.create_task(trainee.live())
    if hub.failures:
        raise hub.failures[0][1]
    rows = [trainee.statistics() for trainee in trainees]
    met, skipped, solo = (sum(row[name] for row in rows) for name in ("met", "skipped", "solo"))
    openings = met + skipped + solo
    overhead = sum(row["took_s"] / row["steps_s"] for row in rows) / len(rows)
    return Found(overhead, met / openings, skipped / openings, solo / openings, openings / len(rows))
