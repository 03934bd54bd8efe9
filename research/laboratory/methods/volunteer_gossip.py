"""Asynchronous gossip under churn: the production's rounds on machines of volunteers.

A replica that vanishes is silent: a partner that meets it notices after the silence of a stream, a replica that asks it
after a dial into the dark, and for a while it is still in everybody's roster. A replica that comes back copies the slow
weights of one that is there, and its rounds go on from that one's.
"""

from __future__ import annotations

import asyncio

from gossip.interface import Origin
from gossip.rule.outer_step import OuterState
from research.laboratory.experiments.volunteer_model import ROSTER_LAG_S
from research.laboratory.methods.gossip import Gossiper
from research.laboratory.methods.lagging_roster import Crowd
from research.laboratory.methods.replicas import Replica, now_s
from research.laboratory.methods.volunteer_swarm import VolunteerSwarm, name_of

COUNTS = ("met", "solo", "skipped", "retaken", "lost", "adopted")


class VolunteerGossip:
    """The gossip of all replicas of a swarm."""

    def __init__(self, swarm: VolunteerSwarm) -> None:
        self._swarm, self._crowd = swarm, Crowd(ROSTER_LAG_S)
        self._gossipers: dict[Replica, Gossiper] = {}
        self.counts = dict.fromkeys(COUNTS, 0.0)
        self.lateness: list[int] = []

    def __repr__(self) -> str:
        return f"<VolunteerGossip: {self.counts}>"

    async def life(self, replica: Replica) -> None:
        """Catch up, train, and gossip, without end."""
        swarm, network, name = self._swarm, self._swarm.network, name_of(replica)
        copied: Origin | None = None
        if now_s() > 0.0:
            if network.peer(name) is not None:
                network.kill(name)
            network.resume(name)
            found = await swarm.copy(replica, self._given)
            copied = self._given(replica) if found is None else found
            copied = copied._replace(inner_steps=replica.steps)
            replica.load([copied.state.slow])
        gossiper = Gossiper(swarm, replica, network.network(name), self._crowd, copied)
        self._gossipers[replica] = gossiper
        await gossiper.serve()
        swarm.enter(replica)
        async with asyncio.TaskGroup() as group:
            group.create_task(gossiper.rounds.run())
            await gossiper.train()

    def _given(self, donor: Replica) -> Origin:
        """Return what a donor gives: a copy of its slow weights, and the rounds that they have."""
        rounds = self._gossipers[donor].rounds
        age = rounds.slow_age
        slow, momentum = (tuple(tensor.clone() for tensor in part) for part in rounds.state[:2])
        return Origin(OuterState(slow, momentum), age.round, 0, age.last_met)

    def gone(self, replica: Replica) -> None:
        """Note that a replica has vanished."""
        name = name_of(replica)
        if replica in self._gossipers and self._swarm.network.peer(name) is not None:
            self._swarm.network.silence(name)
            self._crowd.leave(name)
            self.count(replica)

    def count(self, replica: Replica) -> None:
        """Add up what the rounds of a life came to."""
        gossiper = self._gossipers[replica]
        counted = gossiper.rounds.statistics()
        for name in COUNTS:
            self.counts[name] += counted[name]
        if "appointed" in counted:
            self.counts["appointed"] = self.counts.get("appointed", 0.0) + counted["appointed"]
        self.lateness += gossiper.lateness


async def volunteer_gossip(swarm: VolunteerSwarm) -> None:
    """Let everybody train and gossip while it is there."""
    gossip = VolunteerGossip(swarm)
    await swarm.live(gossip.life, gossip.gone)
    for replica in swarm.ready:
        gossip.count(replica)
    if swarm.network.failures:
        raise swarm.network.failures[0][1]
    swarm.notes |= gossip.counts | {"steps_late": sum(gossip.lateness) / max(1, len(gossip.lateness))}
