"""Replicas on machines of volunteers: they come and go, lines are shared and stall, and the clock ends the run.

What a method does is the life of one replica while its machine is there; here is what all methods have in common. A
peer that goes vanishes without a word, and what is under way to or from it breaks after `SILENCE_S`. A peer that comes
back copies the weights of a last round from a random peer that has caught up, over both lines, from the start again
where the donor vanishes. All that travels shares the lines of the simulated network, whose uplinks count its bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import NamedTuple, TypeVar

from gossip.exchange.messages import Weights
from noloco_node.planning.model_layout import model_layout
from noloco_node.sim.network.link_model import SILENCE_S, Access, Latency, NetworkConditions, Transfer
from noloco_node.sim.network.medium import message_bytes
from noloco_node.sim.network.sim_network import SimNetwork
from research.laboratory.experiments.cell import Cell, Conditions, Point
from research.laboratory.experiments.hardware_model import LATENCY_S, PARAMETERS
from research.laboratory.experiments.task import open_stages, run_of
from research.laboratory.experiments.volunteer_model import (
    COPY_BYTES,
    FLOAT32_BYTES,
    PARAMETERS_MEANT,
    ROSTER_LAG_S,
    SETTLED_S,
    STALLED_SHARE,
    absences,
    line_bytes_per_s,
    stalls,
    volunteer_step_s,
)
from research.laboratory.methods.replicas import Model, Replica, Swarm, mean_of, now_s

T = TypeVar("T")
Life = Callable[[Replica], Coroutine[None, None, None]]
"""Of a replica since it is there, without end."""

POINTS = 9
"""Points of a curve, at equal times."""


class _Flow(NamedTuple):
    """Bytes on their way between two replicas."""

    ends: tuple[Replica, Replica]
    transfer: Transfer
    through: asyncio.Future[None]


class VolunteerSwarm(Swarm):
    """All replicas of a cell under conditions, and the network between them.

    `ready`: the replicas that are there and have caught up, and since when. `away`: those that are not there.
    """

    def __init__(self, cell: Cell, tell: Callable[[float], None]) -> None:
        super().__init__(cell, tell)
        self.conditions = conditions_of(cell)
        self.end_s = self.conditions.hours * 3600.0
        self.magnified = PARAMETERS_MEANT / PARAMETERS[cell.scale]
        self.network = SimNetwork(
            NetworkConditions(latency=Latency(mean_s=LATENCY_S)), seed=cell.seed, size_bytes=self._message_bytes
        )
        for replica in self.replicas:
            replica.step_s = volunteer_step_s(self.conditions, replica.number)
            self.network.set_access(name_of(replica), self._access(1.0))
        self.ready: dict[Replica, float] = {}
        self.away: set[Replica] = set()
        self._donors = Random(f"{cell.seed}|donors")
        self._flows: dict[_Flow, None] = {}
        self._last_ready, self._last_left = self.replicas[0], self.replicas[0].weights()
        self._layout = model_layout(run_of(cell))

    def __repr__(self) -> str:
        return f"<VolunteerSwarm: {len(self.ready)} of {len(self.replicas)} are ready>"

    @property
    def weight_bytes(self) -> int:
        """The bytes of the meant model as float32."""
        return FLOAT32_BYTES

    @property
    def share(self) -> float:
        """The share of the hours that are over."""
        return min(1.0, now_s() / self.end_s)

    @property
    def left(self) -> int:
        """Inner steps that may follow: there is no budget but time."""
        return int(now_s() < self.end_s)

    def note_step(self, replica: Replica) -> None:
        """Count an inner step that was taken."""
        replica.steps += 1
        self.taken += 1
        self._tell(self.share)

    def mean(self) -> Model:
        """Return the mean of the fast weights of all that are ready and did not come back only now.

        Of all that are ready where there is none of these, and where nobody is ready the weights of the last that was.
        """
        settled = [replica for replica, since_s in self.ready.items() if since_s <= now_s() - SETTLED_S]
        counted = settled or list(self.ready)
        return mean_of([replica.weights() for replica in counted]) if counted else self._last_left

    def sent(self, replica: Replica) -> float:
        """Return the bytes that a replica has sent."""
        return self.network.link_use(name_of(replica))[0].moved_bytes

    # Time.

    async def live(self, life: Life, gone: Callable[[Replica], None]) -> None:
        """Let everybody live and be away by turns until the hours are over.

        `life`: of a replica since it is there, without end; it is `ready` when the life says so. `gone` is told of each
        that vanishes, at that moment.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._change_line(replica)) for replica in self.replicas]
            tasks += [group.create_task(self._come_and_go(replica, life, gone)) for replica in self.replicas]
            for number in range(1, POINTS):
                await _until(self.end_s * number / POINTS)
                self._note_time()
            await _until(self.end_s)
            self.spent_at_s = self.end_s
            self._note_time()
            for task in tasks:
                task.cancel()
        for replica in self.replicas:
            replica.sent_bytes = self.sent(replica)

    async def _come_and_go(self, replica: Replica, life: Life, gone: Callable[[Replica], None]) -> None:
        for absence in absences(self.conditions, self.cell.seed, replica.number):
            async with asyncio.TaskGroup() as group:
                present = group.create_task(life(replica))
                await _until(absence.begin_s)
                self._vanish(replica)
                gone(replica)
                present.cancel()
            if absence.kind == "crash":
                nesterov = self.cell.optimiser == "adamw_nesterov"
                replica.stages = open_stages(run_of(self.cell), self._layout, nesterov=nesterov)
            await _until(absence.end_s)
            self.away.discard(replica)
        await life(replica)

    def _vanish(self, replica: Replica) -> None:
        self.away.add(replica)
        if [*self.ready] == [replica]:
            self._last_ready, self._last_left = replica, replica.weights()
        self.ready.pop(replica, None)
        for flow in [flow for flow in self._flows if replica in flow.ends]:
            self._stop(flow)
            asyncio.get_running_loop().call_later(SILENCE_S, _fail, flow.through)

    async def _change_line(self, replica: Replica) -> None:
        for stall in stalls(self.conditions, self.cell.seed, replica.number):
            await _until(stall.begin_s)
            self.network.set_access(name_of(replica), self._access(STALLED_SHARE))
            await _until(stall.end_s)
            self.network.set_access(name_of(replica), self._access(1.0))

    # Lines.

    def enter(self, replica: Replica) -> None:
        """Note that a replica has caught up."""
        self.ready[replica] = now_s() if now_s() > 0.0 else -math.inf

    async def copy(self, replica: Replica, given: Callable[[Replica], T]) -> T | None:
        """Return what a donor gave when a copy of it began, once the copy is there.

        Where nobody is ready, the last replica that was has the newest weights: it copies none, and gets None. All
        others wait for it.
        """
        while self.ready or replica is not self._last_ready:
            if not self.ready:
                await asyncio.sleep(ROSTER_LAG_S)
                continue
            donor = self.draw(list(self.ready))
            found = given(donor)
            with suppress(ConnectionError):
                await self.send(donor, replica, COPY_BYTES)
                return found
        return None

    async def send(self, sender: Replica, receiver: Replica, size_bytes: float) -> None:
        """Send so many bytes; ConnectionError some time after an end has vanished."""
        if self.away & {sender, receiver}:
            await asyncio.sleep(SILENCE_S)
            raise ConnectionResetError("the other end is away")
        through = asyncio.get_running_loop().create_future()
        up, down = self.network.line(name_of(sender)).up, self.network.line(name_of(receiver)).down

        def arrived() -> None:
            if not through.done():
                through.set_result(None)

        flow = _Flow((sender, receiver), Transfer(up, down, size_bytes, arrived), through)
        self._flows[flow] = None
        try:
            await through
            await asyncio.sleep(LATENCY_S)
        finally:
            if flow in self._flows:
                self._stop(flow)

    def draw(self, donors: list[Replica]) -> Replica:
        """Return one of some donors."""
        return self._donors.choice(donors)

    def _stop(self, flow: _Flow) -> None:
        del self._flows[flow]
        if flow.transfer.remaining_bytes:
            flow.transfer.cancel()

    def _access(self, share: float) -> Access:
        down, up = line_bytes_per_s(self.conditions.line)
        return Access(up_bytes_per_s=share * up, down_bytes_per_s=share * down)

    def _message_bytes(self, message: object, topic: str) -> int:
        size = message_bytes(message, topic)
        return round(size * self.magnified) if isinstance(message, Weights) else size

    def _note_time(self) -> None:
        loss = self.loss(self.model())
        self.curve.append(
            Point(
                share=self.share,
                virtual_s=now_s(),
                merged=loss,
                single=loss,
                spread=0.0,
                learning_rate=self.rate(),
                sent_bytes=sum(map(self.sent, self.replicas)),
            )
        )


def conditions_of(cell: Cell) -> Conditions:
    """Return the conditions of a cell that has some."""
    assert cell.conditions is not None
    return cell.conditions


def name_of(replica: Replica) -> str:
    """Return the name of a replica in the network."""
    return f"replica {replica.number}"


async def _until(then_s: float) -> None:
    await asyncio.sleep(max(0.0, then_s - now_s()))


def _fail(through: asyncio.Future[None]) -> None:
    if not through.done():
        through.set_exception(ConnectionResetError("the other end has vanished"))
