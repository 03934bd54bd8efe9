"""Runs one cell under the virtual clock and returns what it came to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import torch

from noloco_node.sim import clock
from research.laboratory.experiments.cell import Cell, Result
from research.laboratory.experiments.task import loss_of, losses_of
from research.laboratory.methods import synchronous
from research.laboratory.methods.adapters import loss_of_base, named, product_error
from research.laboratory.methods.async_server import server
from research.laboratory.methods.final_rounds import last_rounds
from research.laboratory.methods.fine_tuning import fine_tuned
from research.laboratory.methods.fragments import shards, streaming
from research.laboratory.methods.gossip import gossip
from research.laboratory.methods.quorum_mean import late_mean, quorum_mean
from research.laboratory.methods.random_peers import epidemic, gasloc
from research.laboratory.methods.replicas import Swarm
from research.laboratory.methods.volunteer_gossip import volunteer_gossip
from research.laboratory.methods.volunteer_swarm import VolunteerSwarm

METHODS: dict[str, Callable[[Swarm], Awaitable[None]]] = {
    "parallel": synchronous.parallel,
    "independent": synchronous.independent,
    "central": synchronous.central,
    "pairs": synchronous.pairs,
    "server": server,
    "gossip": gossip,
    "streaming": streaming,
    "shards": shards,
    "epidemic": epidemic,
    "gasloc": gasloc,
}
VOLUNTEER_METHODS: dict[str, Callable[[VolunteerSwarm], Awaitable[None]]] = {
    "quorum_mean": quorum_mean,
    "late_mean": late_mean,
    "gossip": volunteer_gossip,
}
"""Methods under conditions."""


def run(cell: Cell, tell: Callable[[float], None] = lambda share: None) -> Result:
    """Run a cell to its end; `tell` is told the share of the budget that is spent."""
    torch.set_num_threads(1)
    started_s = time.perf_counter()
    result = clock.run(_run(cell, tell))
    result.wall_s = round(time.perf_counter() - started_s, 1)
    return result


async def _run(cell: Cell, tell: Callable[[float], None]) -> Result:
    held_out: tuple[float, ...] = ()
    if cell.conditions is not None:
        swarm: Swarm = await _under_conditions(cell, tell)
    else:
        swarm = Swarm(cell, tell)
        if cell.common_start:
            await synchronous.common_start(swarm)
        await METHODS[cell.method](swarm)
        await last_rounds(swarm, cell.last_rounds)
        swarm.note_point()
    replicas = swarm.replicas
    if any(each is not None for each in (cell.conditions, cell.adapters, cell.fine_tuning, cell.optimiser)):
        held_out = losses_of(cell, swarm.stages_of(swarm.model()))
    if cell.adapters is not None:
        swarm.notes["before"] = loss_of_base(cell)
        swarm.notes["mean_of_products"] = product_error([named(replica.stages[0]) for replica in replicas])
    if cell.fine_tuning is not None:
        swarm.notes |= fine_tuned(cell, swarm.model())
    busy = [replica.busy_s / swarm.spent_at_s for replica in replicas]
    fastest = min(range(len(replicas)), key=lambda number: replicas[number].step_s)
    return Result(
        cell=cell,
        merged=sum(held_out) / len(held_out) if held_out else swarm.curve[-1].merged,
        single=sum(loss_of(cell, replica.stages) for replica in replicas) / len(replicas),
        spread=swarm.spread(),
        virtual_s=swarm.curve[-1].virtual_s,
        busy=sum(busy) / len(busy),
        fast_busy=busy[fastest],
        bytes_per_step=sum(replica.sent_bytes for replica in replicas) / sum(replica.steps for replica in replicas),
        rounds=sum(replica.rounds for replica in replicas) / len(replicas),
        steps_taken=tuple(replica.steps for replica in replicas),
        curve=tuple(swarm.curve),
        wall_s=0.0,
        notes=swarm.notes,
        held_out=held_out,
    )


async def _under_conditions(cell: Cell, tell: Callable[[float], None]) -> VolunteerSwarm:
    swarm = VolunteerSwarm(cell, tell)
    await VOLUNTEER_METHODS[cell.method](swarm)
    return swarm
