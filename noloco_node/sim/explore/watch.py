"""What must hold in every simulated run, whatever happens to it: the invariants, each with the kind it is reported as.

- `wait`: nobody waits for ever. While every stage has a replica that can be reached, somebody takes an inner step every
  `Delays` and then some; the run ends by itself before `duration_s`; whoever is asked to leave goes; an offer is
  answered at once, so that no conversation of two replicas that are not engaged lasts.
- `slot`: after the last life every gate is free and no task is left.
- `batch`: each inner step uses exactly its microbatches, on weights that did not change under them.
- `finite`: weights and momenta are finite.
- `pair`, `rule`, `round`: see `watch_rounds`.
- `roster`: when nothing has happened for a record's lifetime and a few refreshes, all rosters show who is there.
- `bound`: queues, conversations and messages held back stay within what windows and replicas allow.
- `failure`: no answer to a call and no node ends with an error that is neither a loss nor the node's own message.

Everything is read from journals and public counters; nothing here touches the run. A violation is kept until the next
look, for an exception in the middle of a node's work would be that node's.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import torch

from noloco_node import journal
from noloco_node.errors import Exit, trouble_of
from noloco_node.roster import State
from noloco_node.sim import clock, faults
from noloco_node.sim.explore.broken import Broken, told
from noloco_node.sim.explore.watch_rounds import Delays, LifeRecord, RoundsWatch, begin_record, fast_of
from noloco_node.sim.faults import Fault
from noloco_node.sim.peer import Life, SimulatedPeer
from noloco_node.sim.world import LOOK_S, World
from noloco_node.topics import GOSSIP

LIFETIME_S = 30.0
"""Of a record in the roster (`Presence`)."""
STANDSTILL_S = 90.0
"""Without an inner step anywhere: a newcomer's patience with ghosts, and a suspicion, lie within."""
ENDED_S = 200.0
"""After a node has found the run over, until all have: the records that say so live longer."""
ANSWER_S = 6.0
"""An answer is due at once; a node that has patience gives up after 5 s."""
SETTLED_S = 60.0
"""After the end, before what is left counts as left for ever."""
SPARE_CALLS = 8


class Watch:
    """Watches a world; a `world.Watcher`. `end` is to be awaited after the run."""

    def __init__(self, world: World) -> None:
        run, network = world.setting.run, world.setting.scenario.network
        self._world, self._window = world, run.pipeline.microbatches_per_step
        refresh_s = 1.1 * world.setting.scenario.swarm.refresh_s
        trip_s = 2 * (network.latency.mean_s + 6 * network.latency.std_s) + 2 * (network.late_s if network.late else 0)
        self._trip_s = trip_s
        # A record is made every half refresh, published every refresh, read every refresh.
        news_s = 3 * refresh_s + network.roster_lag_s + 3 * trip_s
        delays = Delays(news_s=news_s, roster_s=LIFETIME_S + news_s)
        self._delays = delays
        self._lives: dict[str, LifeRecord] = {}
        self._spoilt: dict[str, None] = {}
        self._rounds = RoundsWatch(run.outer, delays, self._lives, self._spoilt.__contains__, self._complain)
        self._kept_steps = run.outer.inner_steps_per_round + run.outer.overlap_steps + 2
        self._quiet_s = self._stepped_s = self._looked_s = 0.0
        self._states: dict[str, tuple[int, State]] = {}
        self._running: dict[str, int] = {}
        self._talks: dict[object, float] = {}
        self._finished = False
        self._steps = 0
        self._struck: Counter[str] = Counter()
        self._disks: dict[str, None] = {}
        self._broken: Broken | None = None
        self._slowest = 1.0

    def __repr__(self) -> str:
        return f"Watch({self._steps} inner steps, {sum(self._struck.values())} faults, {self._rounds!r})"

    def statistics(self) -> dict[str, int | float]:
        """Return virtual seconds, inner steps, rounds, faults by kind, and whether it was excused from ending."""
        struck = {f"struck.{kind}": count for kind, count in self._struck.items()}
        late = self._looked_s >= self._world.setting.scenario.swarm.duration_s - 2 * LOOK_S
        seen = {"virtual_s": self._looked_s, "inner_steps": self._steps, "excused": int(late and not self._finished)}
        return {**seen, **self._rounds.statistics(), **struck}

    def _complain(self, kind: str, sentence: str) -> None:
        if self._broken is None:
            self._broken = Broken(kind, self._world.now_s, sentence)

    def _raise(self) -> None:
        if self._broken is not None:
            raise self._broken

    # What happens.

    def hear(self, peer: SimulatedPeer, event: journal.Event) -> None:
        """Take note of an event, and check what it tells."""
        now_s = self._world.now_s
        record = self._lives.get(peer.name)
        if record is not None and record.life != peer.life.number:
            record = None
        match event:
            case journal.StateChanged(state=state):
                self._note_state(peer, state, now_s)
            case journal.InnerStep() if record is not None:
                self._steps += 1
                record.steps += 1
                self._stepped_s = now_s
                record.stepped_s.append(now_s)
                record.fast = fast_of(peer)
            case journal.OuterStep() if record is not None:
                self._rounds.hear(record, event, now_s, self._quiet_s)
                self._check_finite(record)
            case journal.Finished() if record is not None:
                record.training = False
                self._quiet_s = max(self._quiet_s, now_s)
                self._finished = self._finished or event.why == "the run is over"

    def _note_state(self, peer: SimulatedPeer, state: State, now_s: float) -> None:
        known = (peer.life.number, state)
        if self._states.get(peer.name) == known:
            return
        self._states[peer.name] = known
        self._quiet_s = max(self._quiet_s, now_s)
        if state is State.TRAINING:
            self._lives[peer.name] = begin_record(peer, self._kept_steps, now_s)

    def struck(self, fault: Fault) -> None:
        """Take note of a fault."""
        self._struck[type(fault).__name__.lower()] += 1
        self._quiet_s = max(self._quiet_s, faults.ends_s(fault), self._world.now_s)
        match fault:
            case faults.Tamper():
                # What was wrong is believed where it is plausible: such means may differ.
                self._spoilt[fault.peer] = None
            case faults.Disk():
                self._disks[fault.peer] = None
            case faults.Slow():
                self._slowest = max(self._slowest, fault.factor)

    # The look around, once a second.

    def look(self) -> None:
        """Check all that can be seen from outside; raise `Broken`."""
        self._looked_s = self._world.now_s
        self._note_lives()
        self._check_lives()
        self._check_talks()
        self._check_bounds()
        self._check_rosters()
        self._check_pace()
        self._raise()

    def _note_lives(self) -> None:
        running = {name: peer.life.number for name, peer in self._world.peers.items() if peer.running}
        if running != self._running:
            self._running, self._quiet_s = running, max(self._quiet_s, self._world.now_s)

    def _training(self) -> list[LifeRecord]:
        return [r for r in self._lives.values() if r.training and self._running.get(r.name) == r.life]

    def _check_lives(self) -> None:
        for name, error in self._world.hub.failures:
            self._complain("failure", f"{name} failed to answer: {told(error)}")
        for peer in self._world.peers.values():
            for life in peer.lives:
                if life.wrong:
                    self._complain("batch", f"{peer.name}: {life.wrong[0]}")
                self._check_task(peer, life)

    def _check_task(self, peer: SimulatedPeer, life: Life) -> None:
        task = life.task
        if task is None or not task.done() or task.cancelled():
            return
        error = task.exception()
        trouble = trouble_of(error)
        refused = trouble is not None and trouble.code is Exit.STORAGE and peer.name in self._disks
        if error is not None and not refused:
            self._complain("failure", f"{peer.name} ended with an error: {told(error)}")

    def _check_talks(self) -> None:
        """Complain of gossip that lasts between two who are not engaged: somebody waits for an answer."""
        now_s, known, self._talks = self._world.now_s, self._talks, {}
        limit_s = ANSWER_S + 2 * self._trip_s
        for record in self._training():
            network = self._world.hub.peer(record.name)
            node = record.peer.life.node
            if network is None or node is None or node.replica is None:
                continue
            for end in network.ends:
                other = self._lives.get(end.peer)
                if not end.topic.startswith(GOSSIP) or self._engaged(record) or (other and self._engaged(other)):
                    continue
                since_s = self._talks[end] = known.get(end, now_s)
                if now_s - since_s > limit_s and now_s - self._quiet_s > limit_s:
                    sentence = f"{record.name} and {end.peer} have waited for an answer for {now_s - since_s:.0f} s"
                    self._complain("wait", sentence)

    def _engaged(self, record: LifeRecord) -> bool:
        node = record.peer.life.node
        return node is not None and node.replica is not None and bool(node.replica.rounds.statistics()["engaged"])

    def _check_bounds(self) -> None:
        hub, replicas = (
            self._world.hub,
            max(Counter(record.stage for record in self._lives.values()).values(), default=0),
        )
        for record in self._training():
            node = record.peer.life.node
            assert node is not None
            assert node.replica is not None
            gate = node.replica.gate
            if gate.queued > gate.queue_limit or gate.in_flight + gate.succeeded > gate.window:
                self._complain("bound", f"{record.name} has let in too many: {gate!r}")
            calls, limit = hub.open_calls(record.name), (replicas + 1) * self._window + 2 * replicas + SPARE_CALLS
            if calls > limit:
                self._complain("bound", f"{record.name} has {calls} conversations open, more than {limit}")
        held, most = len(hub.holding), 100 * len(self._world.peers)
        if held > most:
            self._complain("bound", f"{held} streams hold messages back, more than {most}")

    def _check_rosters(self) -> None:
        if self._world.now_s - self._quiet_s <= self._delays.roster_s or self._sent_home():
            return
        stages = range(self._world.setting.run.pipeline.stages)
        training = self._training()
        truth = {stage: {record.name for record in training if record.stage == stage} for stage in stages}
        for record in training:
            node = record.peer.life.node
            assert node is not None
            for stage in sorted({0, record.stage, min(record.stage + 1, stages[-1])}):
                seen = {entry.peer for entry in node.roster.stage(stage) if entry.state is State.TRAINING}
                if seen != truth[stage]:
                    sentence = f"{record.name} sees {sorted(seen)} at stage {stage}, where {sorted(truth[stage])} train"
                    quiet = f"nothing has happened for {self._world.now_s - self._quiet_s:.0f} s"
                    self._complain("roster", f"{sentence}; {quiet}")

    def _check_pace(self) -> None:
        """Complain when nobody steps, or the run does not end, though nothing is in the way."""
        setting, now_s = self._world.setting, self._world.now_s
        if self._finished and now_s - self._quiet_s > ENDED_S and self._running and not self._sent_home():
            names = ", ".join(self._running)
            self._complain("wait", f"the run is over, and {names} do not see it:\n  " + self._waits())
        if self._finished or not self._possible():
            return
        devices = setting.scenario.devices
        window_s = 3 * devices.forward_s * self._window * max(devices.slowness) * self._slowest
        idle_s = now_s - max(self._quiet_s, self._stepped_s)
        if idle_s > STANDSTILL_S + 2 * window_s:
            self._complain("wait", f"nobody has taken an inner step for {idle_s:.0f} s:\n  " + self._waits())
        for record in self._training():
            idle_s = now_s - max(self._quiet_s, record.stepped_s[-1] if record.stepped_s else record.began_s)
            if idle_s > STANDSTILL_S + 8 * window_s and self._holds_some(record):
                sentence = f"{record.name} has begun a window and not ended it for {idle_s:.0f} s"
                self._complain("wait", f"{sentence}:\n  " + self._waits())
        if now_s >= setting.scenario.swarm.duration_s - 2 * LOOK_S:
            self._complain("wait", f"the run does not end by itself within {now_s:.0f} s:\n  " + self._waits())

    def _holds_some(self, record: LifeRecord) -> bool:
        node = record.peer.life.node
        return node is not None and node.replica is not None and node.replica.gate.in_flight > 0

    def _sent_home(self) -> bool:
        return self._world.now_s >= self._world.setting.scenario.swarm.duration_s

    def _possible(self) -> bool:
        """Say whether every stage has a replica that others can call, or a newcomer that will be one.

        A newcomer copies a living replica or waits (`joining`): where nobody can dial the only ones, it waits on
        purpose, and the run with it. Such runs are counted as `excused`.
        """
        found: dict[int, None] = {}
        training = {record.name for record in self._training()}
        peers = [self._world.peers[name] for name in self._running]
        hidden = {peer.name for peer in peers if self._world.hub.dials_only(peer.name)}
        unreachable = {peer.stage for peer in peers if peer.name in training & hidden}
        for peer in peers:
            if peer.stage == 0 or (
                peer.name not in hidden and (peer.name in training or peer.stage not in unreachable)
            ):
                found[peer.stage if peer.stage is not None else -1] = None
        return all(stage in found for stage in range(self._world.setting.run.pipeline.stages))

    def _waits(self) -> str:
        return "\n  ".join(self._world.waits())

    def _check_finite(self, record: LifeRecord) -> None:
        for what, tensors in (("slow weights", record.state.slow), ("momentum", record.state.momentum)):
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                self._complain("finite", f"{record.name}: its {what} are not finite")
        if not bool(torch.isfinite(record.fast).all()):
            self._complain("finite", f"{record.name}: its fast weights are not finite")

    # The end.

    async def end(self) -> None:
        """Check what must be so when all lives are over; raise `Broken`."""
        await asyncio.sleep(SETTLED_S)
        self._check_lives()
        for peer in self._world.peers.values():
            for life in peer.lives:
                self._check_rest(peer, life)
        for record in self._lives.values():
            self._check_finite(record)
            self._check_samples(record)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            places = "\n  ".join(sorted(f"{task.get_name()}: {clock.waits_at(task)}" for task in left))
            self._complain("slot", f"all lives are over, and these tasks are left:\n  {places}")
        self._raise()

    def _check_rest(self, peer: SimulatedPeer, life: Life) -> None:
        replica = life.node.replica if life.node is not None else None
        if replica is not None and (replica.gate.in_flight or replica.gate.queued):
            self._complain(
                "slot", f"life {life.number} of {peer.name} is over, and not all slots are free: {replica.gate!r}"
            )
        if self._world.hub.open_calls(peer.name):
            self._complain("slot", f"{peer.name} is gone, and has {self._world.hub.open_calls(peer.name)} calls open")

    def _check_samples(self, record: LifeRecord) -> None:
        """Each microbatch that succeeded is in an inner step, or in the partial window that the last life left."""
        life = record.peer.lives[record.life]
        if life.crashed or life.node is None or life.node.replica is None:
            return
        replica = life.node.replica
        succeeded = int(replica.worker.statistics()["succeeded"])
        used = record.steps * self._window + replica.gate.succeeded
        # The window of the last step may not have been opened again.
        if succeeded != used and succeeded != used - replica.gate.succeeded:
            self._complain("batch", f"{record.name}: {succeeded} microbatches succeeded and {used} are accounted for")
