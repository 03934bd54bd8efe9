"""How much time replicas lose by waiting for one another: all for all, or two for two.

NoLoCo (arXiv 2506.10911, its figure on blocking): an inner step takes a random time, LogNormal(mu = 1, sigma^2 = 0.5),
3.5 s on average; messages take none. After m inner steps comes an outer one. In **DiLoCo** nobody goes on before all
have come: here a tree all-reduce (`tree`), whose messages are really sent. In **NoLoCo** a random perfect matching is
drawn for each outer step, and nobody goes on before its partner has come: one message each way. Total time is when the
last replica has finished the last outer step; both see the same inner steps.

A replica is a coroutine. Its m inner steps are drawn one by one and slept through in one piece, for nothing can happen
between them. The values that travel are real: the barrier's sum must be right, and pair averages must keep the mean.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from noloco_node.sim import clock
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork
from research.latency.tree import Carry, Member, carrier, plant

MU, SIGMA = 1.0, math.sqrt(0.5)
"""Of the logarithm of an inner step's seconds."""
STILL = NetworkConditions(latency=Latency(mean_s=0.0))
"""Lines on which a message takes no time."""


class Cell(NamedTuple):
    """One setting of the experiment."""

    replicas: int
    inner_steps: int
    outer_steps: int
    seed: int


class Waits(NamedTuple):
    """When the last replica had finished each outer step, in seconds, and what waiting cost in all.

    An overhead is the time until a replica has finished over the time of its inner steps alone: the mean of replicas.
    """

    diloco_s: tuple[float, ...]
    noloco_s: tuple[float, ...]
    diloco_overhead: float
    noloco_overhead: float


def step_seconds(seed: int, replica: int, count: int) -> NDArray[np.float64]:
    """Return the seconds of a replica's first inner steps."""
    source = np.random.default_rng(Random(f"{seed}|inner steps|{replica}").getrandbits(64))
    return source.lognormal(MU, SIGMA, count)


def _phases(cell: Cell) -> list[list[float]]:
    """Return the seconds between two outer steps: by replica, by outer step."""
    shape = (cell.outer_steps, cell.inner_steps)
    steps = cell.outer_steps * cell.inner_steps
    return [step_seconds(cell.seed, number, steps).reshape(shape).sum(1).tolist() for number in range(cell.replicas)]


class InStep:
    """A replica of DiLoCo: waits for all."""

    def __init__(self, worker: Member, phases: Sequence[float]) -> None:
        self._worker, self._phases = worker, phases
        self._result: asyncio.Future[float] | None = None
        self.ends_s: list[float] = []
        worker.arrived = self._arrived

    async def live(self, replicas: int) -> None:
        """Train and wait, so many times."""
        loop = asyncio.get_running_loop()
        for phase_s in self._phases:
            await asyncio.sleep(phase_s)
            self._result = loop.create_future()
            self._worker.collect(1.0)
            if (total := await self._result) != replicas:
                raise ArithmeticError(f"the sum of {replicas} ones was {total}")
            self.ends_s.append(loop.time())

    def _arrived(self, total: float) -> None:
        assert self._result is not None
        self._result.set_result(total)


class InPairs:
    """A replica of NoLoCo: waits for the partner that the draw gave it."""

    def __init__(self, number: int, carry: Carry, phases: Sequence[float]) -> None:
        self.number, self._carry, self._phases = number, carry, phases
        self.value = float(number)
        self.ends_s: list[float] = []
        self._letters: dict[int, float] = {}
        """What partners of this and later outer steps have sent: one that is ahead waits here for us."""
        self._news = asyncio.Event()

    async def live(self, others: Sequence[InPairs], seed: int) -> None:
        """Train, send the partner one's value, and wait for its, so many times."""
        loop = asyncio.get_running_loop()
        for outer_step, phase_s in enumerate(self._phases):
            await asyncio.sleep(phase_s)
            partner = others[partners(len(others), seed, outer_step)[self.number]]
            self._carry(str(self.number), str(partner.number), partial(partner.hear, outer_step, self.value))
            while outer_step not in self._letters:
                self._news.clear()
                await self._news.wait()
            self.value = (self.value + self._letters.pop(outer_step)) / 2
            self.ends_s.append(loop.time())

    def hear(self, outer_step: int, value: float) -> None:
        """Keep what a partner has sent."""
        self._letters[outer_step] = value
        self._news.set()


@lru_cache(maxsize=4096)
def partners(replicas: int, seed: int, outer_step: int) -> tuple[int, ...]:
    """Return each replica's partner in a random perfect matching."""
    order = list(range(replicas))
    Random(f"{seed}|pairs|{outer_step}").shuffle(order)
    found = [0] * replicas
    for one, other in zip(order[::2], order[1::2], strict=True):
        found[one], found[other] = other, one
    return tuple(found)


def measure(cell: Cell) -> Waits:
    """Run both forms of one setting."""
    phases = _phases(cell)
    diloco, noloco = clock.run(all_for_all(cell, phases)), clock.run(two_for_two(cell, phases))
    return Waits(_last(diloco), _last(noloco), _overhead(diloco, phases), _overhead(noloco, phases))


async def all_for_all(cell: Cell, phases: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return when each replica finished each outer step of DiLoCo; `phases`: its seconds between two of them."""
    hub = SimNetwork(STILL, seed=cell.seed)
    workers = plant("complete", cell.replicas, carrier(hub))
    replicas = [InStep(worker, mine) for worker, mine in zip(workers, phases, strict=True)]
    async with asyncio.TaskGroup() as group:
        for replica in replicas:
            group.create_task(replica.live(cell.replicas))
    return [replica.ends_s for replica in replicas]


async def two_for_two(cell: Cell, phases: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return when each replica finished each outer step of NoLoCo."""
    hub = SimNetwork(STILL, seed=cell.seed)
    replicas = [InPairs(number, carrier(hub), mine) for number, mine in enumerate(phases)]
    async with asyncio.TaskGroup() as group:
        for replica in replicas:
            group.create_task(replica.live(replicas, cell.seed))
    mean = sum(replica.value for replica in replicas) / cell.replicas
    if abs(mean - (cell.replicas - 1) / 2) > 1e-6 * cell.replicas:
        raise ArithmeticError(f"averages of pairs moved the mean to {mean}")
    return [replica.ends_s for replica in replicas]


def _last(ends_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return when the last replica had finished each outer step."""
    return tuple(max(moments) for moments in zip(*ends_s, strict=True))


def _overhead(ends_s: Sequence[Sequence[float]], phases: Sequence[Sequence[float]]) -> float:
    """Return what waiting made of the time of a replica's own work: 1 if nothing."""
    return sum(ends[-1] / sum(own) for ends, own in zip(ends_s, phases, strict=True)) / len(phases)
