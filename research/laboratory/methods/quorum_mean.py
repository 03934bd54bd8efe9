"""A mean over all replicas that are there, under churn: with a barrier and a deadline, or with nobody waiting.

The group of a round is formed when all replicas have come that are believed to be there, or a grace after half of them
have: as a quorum of torchft. The mean goes round as a ring of the members, in the number format of gossip with error
feedback. A ring in which a member vanishes is noticed after the silence of a stream, and begins again with the members
that are left. A replica that is not in a round's group goes on from the round's mean, which a member sends to it, and
keeps its work for the next round.

`waits`: a replica that has come stands still until the mean is there. Otherwise it trains on, and the mean corrects the
weights that it had come with. A round begins when the last one's group was formed, or, where all wait, when its mean
was there. Where all wait, a round takes at least as long as the last mean did: nobody waits for more than half of the
time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from gossip.rounds.matching import TOLERANCE
from research.laboratory.experiments.hardware_model import LATENCY_S, ring_messages
from research.laboratory.experiments.volunteer_model import ROSTER_LAG_S, STEP_S
from research.laboratory.methods.coded_mean import CodedMean
from research.laboratory.methods.replicas import Model, Replica, now_s
from research.laboratory.methods.volunteer_swarm import VolunteerSwarm
from research.theory.pair_step import pseudo_gradient

MOST_SETS = 4
"""Coded sets that cost as much as a copy of the weights."""


def closes_s(came_s: Mapping[int, float], believed: Collection[int], grace_s: float) -> float:
    """Return when the group of a round is formed, infinite while nobody knows.

    `came_s`: when each has come that waits for the round. `believed`: the replicas that are believed to be there.
    """
    times = sorted(came_s.values())
    quorum = max(1, math.ceil(len(believed) / 2))
    if len(times) < quorum:
        return math.inf
    deadline = times[quorum - 1] + grace_s
    return min(deadline, times[-1]) if set(believed) <= came_s.keys() else deadline


def steps_in_time(left_s: float, step_s: float, most: int) -> int:
    """Return how many inner steps a machine takes before a round is due: as many as fit, a tenth of tolerance, one."""
    return max(1, min(most, math.floor((1.0 + TOLERANCE) * left_s / step_s + 1e-9)))


def ring(members: Sequence[Replica]) -> list[tuple[Replica, Replica]]:
    """Return which member sends to which in a mean over these; none where there is one member."""
    if len(members) < 2:
        return []
    return list(zip(members, [*members[1:], members[0]], strict=True))


class _Coming(NamedTuple):
    """A replica that waits for a round: since when, with which weights, and the model that it goes on from then."""

    since_s: float
    weights: Model
    steps: int
    outcome: asyncio.Future[Model]


class _Course(NamedTuple):
    """Where a replica stands: the round that its weights go on from, that round's model, its inner steps by then."""

    version: int
    base: Model
    steps: int


class MeanRounds:
    """The rounds of all replicas of a swarm."""

    def __init__(self, swarm: VolunteerSwarm, *, waits: bool) -> None:
        self._swarm, self._waits = swarm, waits
        self._mean = CodedMean(swarm.replicas[0].weights(), swarm.cell)
        self._set_bytes = self._mean.sent_bytes * swarm.magnified
        self._grace_s = max(replica.step_s for replica in swarm.replicas)
        self._last = _Course(0, swarm.replicas[0].weights(), 0)
        self._courses = dict.fromkeys(swarm.replicas, self._last)
        self._coming: dict[Replica, _Coming] = {}
        self._believed: dict[Replica, None] = dict.fromkeys(swarm.replicas)
        self._changed = asyncio.Event()
        self._begun_s, self._lasted_s = 0.0, 0.0
        self._meeting: asyncio.Future[None] | None = None
        self.counts = {"rounds": 0, "members": 0, "left_out": 0, "broken": 0, "late_s": 0.0}

    def __repr__(self) -> str:
        return f"<MeanRounds: {self.counts}>"

    # A replica's life.

    async def life(self, replica: Replica) -> None:
        """Catch up, train, and take part in rounds, without end."""
        swarm = self._swarm
        self._coming.pop(replica, None)
        if now_s() > 0.0:
            copied = await swarm.copy(replica, lambda donor: self._courses[donor])
            course = self._courses[replica] = (copied or self._courses[replica])._replace(steps=replica.steps)
            replica.load(course.base)
        swarm.enter(replica)
        if self._is_behind(replica):
            await self._late(replica)
        self._believed[replica] = None
        self._changed.set()
        while True:
            steps = self._steps(replica)
            for _ in range(steps):
                await swarm.step(replica)
            if self._is_behind(replica):
                self.counts["left_out"] += 1
                await self._late(replica)
            else:
                await self._take_part(replica)

    def _is_behind(self, replica: Replica) -> bool:
        """Return whether a round that a replica is not in is under way or over."""
        return self._meeting is not None or self._courses[replica].version != self._last.version

    def _steps(self, replica: Replica) -> int:
        """Return how many inner steps a replica takes from now to the round that is due next."""
        most = self._swarm.steps_of_round()
        if self._waits:
            most = max(most, math.ceil(self._lasted_s / STEP_S))
        return steps_in_time(self._begun_s + most * STEP_S - now_s(), replica.step_s, most)

    async def _take_part(self, replica: Replica) -> None:
        outcome: asyncio.Future[Model] = asyncio.get_running_loop().create_future()
        brought = replica.weights()
        self._coming[replica] = _Coming(now_s(), brought, replica.steps, outcome)
        self._changed.set()
        await self._beside(replica, outcome)
        model = outcome.result()
        replica.correct([_difference(new, old) for new, old in zip(model, brought, strict=True)])

    async def _late(self, replica: Replica) -> None:
        """Take over the rounds that a replica has missed; what it has trained meanwhile counts in the next one."""
        task = asyncio.ensure_future(self._catch_up(replica))
        try:
            await self._beside(replica, task)
        finally:
            task.cancel()
        task.result()

    async def _beside(self, replica: Replica, awaited: asyncio.Future[Model] | asyncio.Future[None]) -> None:
        """Wait, or train on, until something is there."""
        if self._waits:
            await asyncio.wait({awaited})
        while not awaited.done():
            await self._swarm.step(replica)

    async def _catch_up(self, replica: Replica) -> None:
        """Let the means of all rounds that a replica has missed come from those that have them."""
        while True:
            if self._meeting is not None:
                await asyncio.wait({self._meeting})
            course, last = self._courses[replica], self._last
            donors = [other for other in self._swarm.ready if self._courses[other].version == last.version]
            if course.version == last.version:
                return
            if not donors:
                # All that had the last mean have gone: the newest that is left is the last one now.
                newest = max(self._swarm.ready, key=lambda other: self._courses[other].version)
                self._last = self._courses[newest]
                continue
            missed = abs(last.version - course.version)
            with suppress(ConnectionError):
                await self._swarm.send(self._swarm.draw(donors), replica, min(missed, MOST_SETS) * self._set_bytes)
                replica.correct([_difference(new, old) for new, old in zip(last.base, course.base, strict=True)])
                self._courses[replica] = course._replace(version=last.version, base=last.base)

    def gone(self, replica: Replica) -> None:
        """Note that a replica has vanished: it is still believed to be there for a while."""
        self._mean.forget(replica.number)
        asyncio.get_running_loop().call_later(ROSTER_LAG_S, self._disbelieve, replica)

    def _disbelieve(self, replica: Replica) -> None:
        if replica in self._swarm.away:
            self._believed.pop(replica, None)
            self._coming.pop(replica, None)
            self._changed.set()

    # The rounds.

    async def run(self) -> None:
        """Form groups and take their means, without end."""
        while True:
            await self._formed()
            coming, self._coming = self._coming, {}
            begun_s = now_s()
            self._meeting = asyncio.get_running_loop().create_future()
            members = await self._averaged(list(coming))
            if members:
                self._end_round({member: coming[member] for member in members}, begun_s)
            self._meeting.set_result(None)
            self._meeting = None

    async def _formed(self) -> None:
        """Wait until the group of the next round is formed."""
        while True:
            came_s = {replica.number: coming.since_s for replica, coming in self._coming.items()}
            close_s = closes_s(came_s, [replica.number for replica in self._believed], self._grace_s)
            if close_s <= now_s():
                return
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(close_s if math.isfinite(close_s) else None):
                    await self._changed.wait()

    async def _averaged(self, members: list[Replica]) -> list[Replica]:
        """Return whose mean was taken, after the time that it took; none where all have vanished."""
        while members:
            try:
                size = 2 * (len(members) - 1) / len(members) * self._set_bytes
                async with asyncio.TaskGroup() as group:
                    for one, other in ring(members):
                        group.create_task(self._swarm.send(one, other, size))
                await asyncio.sleep(LATENCY_S * max(0, ring_messages(len(members)) - 1))
            except* ConnectionError:
                self.counts["broken"] += 1
            left = [member for member in members if member not in self._swarm.away]
            if left == members:
                break
            members = left
        return members

    def _end_round(self, group: dict[Replica, _Coming], begun_s: float) -> None:
        members = list(group)
        brought = [
            [pseudo_gradient(base, part) for base, part in zip(self._courses[one].base, coming.weights, strict=True)]
            for one, coming in group.items()
        ]
        taken = [max(1, coming.steps - self._courses[one].steps) for one, coming in group.items()]
        gradient = self._mean.of(brought, taken, [member.number for member in members])
        model = [_difference(old, part) for old, part in zip(self._last.base, gradient, strict=True)]
        self._last = _Course(self._last.version + 1, model, 0)
        self._lasted_s = now_s() - begun_s
        self._begun_s = now_s() if self._waits else begun_s
        for member, coming in group.items():
            self._courses[member] = self._last._replace(steps=coming.steps)
            member.rounds += 1
            coming.outcome.set_result(model)
            self.counts["late_s"] += now_s() - coming.since_s
        self.counts["rounds"] += 1
        self.counts["members"] += len(members)


def _difference(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.sub(one, other) for one, other in zip(new, old, strict=True))


async def quorum_mean(swarm: VolunteerSwarm) -> None:
    """Take means over all that are there, everybody waiting for them, up to a deadline."""
    await _mean(swarm, waits=True)


async def late_mean(swarm: VolunteerSwarm) -> None:
    """Take means over all that are there, nobody waiting for them."""
    await _mean(swarm, waits=False)


async def _mean(swarm: VolunteerSwarm, *, waits: bool) -> None:
    rounds = MeanRounds(swarm, waits=waits)
    task = asyncio.create_task(rounds.run())
    await swarm.live(rounds.life, rounds.gone)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    swarm.notes |= rounds.counts
