"""What each peer of a simulation did at each stage, and the sum of it.

What is over is added to totals once, and its node let go of: in a day of comings and goings a peer lives a dozen lives,
and a look at all of them must not become dearer with each, nor the memory fuller.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass

from noloco_node.journal import events
from noloco_node.node.replica import Replica
from noloco_node.sim.network.bandwidth import LinkUse
from noloco_node.sim.peer import PeerLife, SimulatedPeer

SETTLED_S = 10.0
"""After the end of a time at a stage its counters may still move: its last calls break."""
FORGOTTEN = 100
"""Lives after which garbage is collected: the parts of a node refer to each other, and by itself the collector looks
through what is old once in many hours (`noloco_node.sim.clock`).
"""


@dataclass(kw_only=True, slots=True, eq=False)
class StageTime:
    """One life of a peer at one stage, until its training there was over.

    `lines`: use of its uplink and downlink by then. `before_s`: for which its device had worked at other stages.
    `left`: what it trained, where it went on to another stage. `counted`: its replica's counters, once it is settled.
    """

    peer: SimulatedPeer
    life: PeerLife
    stage: int | None
    begun_s: float
    ended_s: float | None = None
    busy_s: float = 0.0
    lines: tuple[LinkUse, LinkUse] | None = None
    suspects: frozenset[str] = frozenset()
    traffic: events.Traffic | None = None
    before_s: float = 0.0
    left: Replica | None = None
    counted: Mapping[str, int | float] | None = None

    def worked_s(self) -> float:
        """Return the seconds that the device was at work so far."""
        return self.life.device.busy_s - self.before_s if self.ended_s is None else self.busy_s

    def alive_s(self, now_s: float) -> float:
        """Return how long the peer has been there."""
        return (now_s if self.ended_s is None else self.ended_s) - self.begun_s

    @property
    def replica(self) -> Replica | None:
        """What trains in this life, at this stage."""
        return self.life.replica if self.left is None else self.left

    @property
    def succeeded(self) -> int:
        """Microbatches whose gradient came back here."""
        if self.counted is not None:
            return int(self.counted.get("worker.succeeded", 0))
        return int(self.replica.worker.statistics()["succeeded"]) if self.replica is not None else 0

    def counters(self) -> Mapping[str, int | float]:
        """Return the counters of what trains, or trained, in this life; none where it never began."""
        if self.counted is not None:
            return self.counted
        return self.replica.statistics() if self.replica is not None else {}

    @property
    def past(self) -> bool:
        """Whether its peer is at another stage by now, or lives another life."""
        return self.left is not None or (self.life is not self.peer.life and not self.life.device.busy)

    def settle(self) -> bool:
        """Keep the counters, and let go of what trained; say whether a whole life is over."""
        self.counted, moved = self.counters(), self.left is not None
        self.left = None
        if not moved:
            self.life.forget()
        return not moved


class StageTimes:
    """All times of peers at stages in one world: those that may still change, and the totals of the others."""

    def __init__(self, stages: int) -> None:
        self.all: list[StageTime] = []
        self.open: dict[StageTime, None] = {}
        """Those that may still change."""
        self._now: dict[str, StageTime] = {}
        self._busy_s, self._alive_s = [0.0] * stages, [0.0] * stages
        self._microbatches = self._forgotten = 0

    def begin(self, peer: SimulatedPeer, now_s: float) -> None:
        """Note that a peer has come, or gone on to another stage."""
        stage_time = StageTime(peer=peer, life=peer.life, stage=peer.stage, begun_s=now_s, before_s=peer.device.busy_s)
        self.all.append(stage_time)
        self.open[stage_time] = None
        self._now[peer.name] = stage_time

    def of(self, peer: SimulatedPeer) -> StageTime:
        """Return the present stage time of a peer, or its last."""
        return self._now[peer.name]

    def settle(self, now_s: float) -> None:
        """Add what is over to the totals."""
        for stage_time in list(self.open):
            if stage_time.ended_s is not None and now_s - stage_time.ended_s >= SETTLED_S and stage_time.past:
                self._settle(stage_time)

    def _settle(self, stage_time: StageTime) -> None:
        self._forgotten += stage_time.settle()
        del self.open[stage_time]
        if stage_time.stage is not None:
            self._busy_s[stage_time.stage] += stage_time.busy_s
            self._alive_s[stage_time.stage] += stage_time.alive_s(0.0)
        if stage_time.stage == 0:
            self._microbatches += stage_time.succeeded
        if self._forgotten == FORGOTTEN:
            self._forgotten = 0
            gc.collect()

    def microbatches(self) -> int:
        """Return the microbatches whose gradient came back where they were drawn."""
        return self._microbatches + sum(stage_time.succeeded for stage_time in self.open if stage_time.stage == 0)

    def seconds(self, now_s: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return by stage for how long devices were at work so far, and for how long peers were there."""
        busy_s, alive_s = self._busy_s.copy(), self._alive_s.copy()
        for stage_time in self.open:
            if stage_time.stage is not None:
                busy_s[stage_time.stage] += stage_time.worked_s()
                alive_s[stage_time.stage] += stage_time.alive_s(now_s)
        return tuple(busy_s), tuple(alive_s)
