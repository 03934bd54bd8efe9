"""What a simulation is seen to do: counted as it happens, without the knowledge of the nodes.

`figures` reads the totals that nodes keep anyway. The collector counts the rest.

- Waiting: about once a virtual second it looks at every peer, and counts an idle device under the first `Cause` that
  holds. Times at work are exact, so only the division of idle time is sampled.
- Suspicions: one is true if its peer was gone, silent, cut off, could not be dialled or tampered with its messages,
  then or within `RECENT_S`.
- Time: rows hold running totals, so leaving out every second one, when there are too many, loses no count.
- The time of a peer at a stage is added to totals once, when it is over, and its node is released.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

from gossip.interface import OuterStepTaken
from noloco_node.journal import events
from noloco_node.node.replica import Replica
from noloco_node.observe.bottleneck import Cause
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.network.link_model import LinkUse
from noloco_node.sim.peer import PeerSession, SimulatedPeer
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.world import Watcher, World
from pipeline.next_stage import Wanted

SETTLED_S = 10.0
"""After the end of a time at a stage its counters may still move: its last calls break."""
FORGOTTEN = 100
"""Sessions after which garbage is collected: the parts of a node refer to each other, and by itself the collector looks
through what is old once in many hours (`noloco_node.sim.clock`).
"""


@dataclass(kw_only=True, slots=True, eq=False)
class StageTime:
    """One session of a peer at one stage, until its training there was over.

    `lines`: use of its uplink and downlink by then. `before_s`: for which its device had worked at other stages.
    `left`: what it trained, where it went on to another stage. `counted`: its replica's counters, once it is settled.
    """

    peer: SimulatedPeer
    session: PeerSession
    stage: int | None
    begun_s: float
    ended_s: float | None = None
    busy_s: float = 0.0
    lines: tuple[LinkUse, LinkUse] | None = None
    suspects: frozenset[str] = frozenset()
    traffic: events.Traffic | None = None
    before_s: float
    left: Replica | None = None
    counted: Mapping[str, int | float] | None = None

    def worked_s(self) -> float:
        return self.session.device.busy_s - self.before_s if self.ended_s is None else self.busy_s

    def alive_s(self, now_s: float) -> float:
        return (now_s if self.ended_s is None else self.ended_s) - self.begun_s

    @property
    def replica(self) -> Replica | None:
        return self.session.replica if self.left is None else self.left

    @property
    def succeeded(self) -> int:
        if self.counted is not None:
            return int(self.counted.get("worker.succeeded", 0))
        return int(self.replica.worker.statistics()["succeeded"]) if self.replica is not None else 0

    def counters(self) -> Mapping[str, int | float]:
        """Return the counters of what trains, or trained, in this session; none where it never began."""
        if self.counted is not None:
            return self.counted
        return self.replica.statistics() if self.replica is not None else {}

    @property
    def past(self) -> bool:
        """Whether its peer is at another stage by now, or is in another session."""
        return self.left is not None or (self.session is not self.peer.session and not self.session.device.busy)

    def settle(self) -> bool:
        """Keep the counters, and let go of what trained; say whether a whole session is over."""
        self.counted, moved = self.counters(), self.left is not None
        self.left = None
        if not moved:
            self.session.forget()
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
        stage_time = StageTime(
            peer=peer, session=peer.session, stage=peer.stage, begun_s=now_s, before_s=peer.device.busy_s
        )
        self.all.append(stage_time)
        self.open[stage_time] = None
        self._now[peer.name] = stage_time

    def of(self, peer: SimulatedPeer) -> StageTime:
        """Return the present stage time of a peer, or its last."""
        return self._now[peer.name]

    def settle(self, now_s: float) -> None:
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


RECENT_S = 30.0
SEEN_AT_ONCE = 1024
"""Peers whose waiting is looked at in one look; of more, each look sees some."""
MOST_ROWS = 4096


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that happened."""

    at_s: float
    fault: Fault


class Migrated(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that went on to another stage."""

    at_s: float
    peer: str
    origin: int
    target: int
    why: str


class Row(NamedTuple):
    """Running totals at a moment; those in tuples by stage."""

    at_s: float
    microbatches: int
    busy_s: tuple[float, ...]
    alive_s: tuple[float, ...]
    gap: tuple[float, ...]
    gaps: tuple[int, ...]
    loss: float
    losses: int


@dataclass(kw_only=True, slots=True)
class _Sums:
    """Sums by stage that only events tell."""

    gap: list[float]
    gaps: list[int]
    loss: float = 0.0
    losses: int = 0
    inner_steps: Counter[int] = field(default_factory=Counter)
    discarded: int = 0


class EventCollector(Watcher):
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stages = world.setting.run.pipeline.stages
        self.stage_times = StageTimes(self._stages)
        self.happened: list[Happened] = []
        self.moved: list[Migrated] = []
        self.causes: tuple[Counter[Cause], ...] = tuple(Counter() for _ in range(self._stages))
        self.true_suspects = self.false_suspects = 0
        self.sums = _Sums(gap=[0.0] * self._stages, gaps=[0] * self._stages)
        self.rows: list[Row] = []
        self._stride, self._looks = 1, 0
        self.budget = world.setting.run.budget_samples // world.setting.run.pipeline.microbatch_size
        self._bad_until_s: dict[str, float] = {}
        self._cut_until_s, self._sides = 0.0, dict[str, int]()

    # What the world tells.

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        match event:
            case events.StateChanged(state=PeerState.JOINING):
                self.stage_times.begin(peer, self._world.now_s)
            case events.Moved():
                self._note_move(peer, event)
            case events.Started():
                self.stage_times.of(peer).stage = event.stage
            case events.InnerStep():
                self._note_step(self.stage_times.of(peer).stage or 0, event)
            case OuterStepTaken() if event.gap is not None:
                stage = self.stage_times.of(peer).stage or 0
                self.sums.gap[stage] += event.gap
                self.sums.gaps[stage] += 1
            case events.Traffic():
                self.stage_times.of(peer).traffic = event
            case events.Finished():
                self.sums.discarded += event.discarded
                self._end(self.stage_times.of(peer))
            case _:
                pass

    def _note_move(self, peer: SimulatedPeer, event: events.Moved) -> None:
        """End the time at one stage; what the peer says next begins that at the other."""
        stage_time = self.stage_times.of(peer)
        # Traffic is counted for a session: that at its last stage tells all of it.
        stage_time.left, stage_time.traffic = stage_time.replica, None
        self._end(stage_time)
        self.moved.append(
            Migrated(at_s=self._world.now_s, peer=peer.name, origin=event.origin, target=event.target, why=event.why)
        )
        self.sums.discarded += event.discarded

    def _note_step(self, stage: int, event: events.InnerStep) -> None:
        self.sums.inner_steps[stage] += 1
        if stage == self._stages - 1 and event.loss is not None:
            self.sums.loss += event.loss
            self.sums.losses += 1

    def struck(self, fault: Fault) -> None:
        """Note a fault, and whom it puts under a suspicion that is true."""
        now_s = self._world.now_s
        self.happened.append(Happened(at_s=now_s, fault=fault))
        match fault:
            case faults.Crash() | faults.Leave() | faults.Restart() | faults.Tamper():
                self._suspect(fault.peer, now_s + RECENT_S)
            case faults.Hostile():
                self._suspect(fault.peer, math.inf)
            case faults.Silence():
                self._suspect(fault.peer, faults.ends_s(fault) + RECENT_S)
            case faults.Partition():
                self._cut_until_s = faults.ends_s(fault) + RECENT_S
                self._sides = {peer: number for number, group in enumerate(fault.groups) for peer in group}
            case _:
                pass
        if isinstance(fault, faults.Crash | faults.Hostile) and fault.peer in self._world.peers:
            self._end(self.stage_times.of(self._world.peers[fault.peer]))

    def _suspect(self, peer: str, until_s: float) -> None:
        self._bad_until_s[peer] = max(until_s, self._bad_until_s.get(peer, 0.0))

    def look(self) -> None:
        """Look at whom everybody suspects, and at times at what everybody does, and write a row."""
        for stage_time in self.stage_times.open:
            if stage_time.ended_s is None:
                if stage_time.session.running:
                    self._note_suspects(stage_time)
                else:
                    self._end(stage_time)
        if self._looks % self._stride == 0:
            self.stage_times.settle(self._world.now_s)
            done = self.stage_times.microbatches()
            self._see(done >= self.budget)
            self.rows.append(self._row(done))
            if len(self.rows) > MOST_ROWS:
                self.rows, self._stride = self.rows[::2], 2 * self._stride
        self._looks += 1

    def _see(self, over: bool) -> None:
        """Count what those wait for that have nothing to do; one look counts for those that are left out."""
        step = len(self.stage_times.open) // SEEN_AT_ONCE + 1
        for stage_time in islice(self.stage_times.open, len(self.rows) % step, None, step):
            if stage_time.ended_s is None and stage_time.stage is not None and not stage_time.session.device.busy:
                self.causes[stage_time.stage][waits_for(stage_time, over)] += self._stride

    def _note_suspects(self, stage_time: StageTime) -> None:
        """Count new suspicions. They may be over after a few seconds, so that no look is left out."""
        replica = stage_time.replica
        if replica is None or replica.next_stage is None:
            return
        suspects = replica.next_stage.suspects
        if suspects != stage_time.suspects:
            rightly = [self._is_bad(stage_time.peer.name, peer) for peer in suspects - stage_time.suspects]
            self.true_suspects += sum(rightly)
            self.false_suspects += len(rightly) - sum(rightly)
            stage_time.suspects = suspects

    # What follows.

    def close(self) -> None:
        for stage_time in self.stage_times.open:
            self._end(stage_time)
        self.rows.append(self._row(self.stage_times.microbatches()))

    def _row(self, microbatches: int) -> Row:
        now_s, sums = self._world.now_s, self.sums
        busy_s, alive_s = self.stage_times.seconds(now_s)
        return Row(
            at_s=now_s,
            microbatches=microbatches,
            busy_s=busy_s,
            alive_s=alive_s,
            gap=tuple(sums.gap),
            gaps=tuple(sums.gaps),
            loss=sums.loss,
            losses=sums.losses,
        )

    def _end(self, stage_time: StageTime) -> None:
        if stage_time.ended_s is None:
            stage_time.ended_s = self._world.now_s
            stage_time.busy_s = min(
                stage_time.session.device.busy_s - stage_time.before_s, stage_time.ended_s - stage_time.begun_s
            )
            stage_time.lines = self._world.network.link_use(stage_time.peer.name)

    def _is_bad(self, me: str, name: str) -> bool:
        """Say whether a suspicion of `me` against a peer is true."""
        peer, now_s = self._world.peers[name], self._world.now_s
        if not peer.running or peer.replica is None or peer.access.dials_only:
            return True
        if now_s < self._bad_until_s.get(name, 0.0) or self._world.network.is_cut(me, name):
            return True
        return now_s < self._cut_until_s and self._sides.get(me) != self._sides.get(name)


def waits_for(stage_time: StageTime, over: bool) -> Cause:
    """Return what an idle device waits for. `over`: the run's tokens are used up."""
    replica = stage_time.replica
    if replica is None:
        return Cause.JOINING
    admission, next_stage = replica.admission, replica.next_stage
    if (over and not admission.in_flight) or stage_time.session.leave.is_set():
        return Cause.ENDING
    if admission.succeeded == admission.window or replica.rounds.holds_training:
        return Cause.GOSSIP
    wait = next_stage.waiting if next_stage is not None else None
    if wait is not None:
        if wait.wanted is Wanted.ROOM:
            return Cause.ROOM
        return Cause.ENDING if over else Cause.ROUTE  # at the end those whom it looks for have left
    if admission.turns.waiting:
        return Cause.WINDOW
    if admission.succeeded + admission.in_flight == admission.windows * admission.window:
        return Cause.WINDOW if admission.queued else Cause.REPLIES
    # A source fills its window at once; where it does not it was refused, and pauses.
    return Cause.ROUTE if stage_time.stage == 0 else Cause.MICROBATCHES
