"""What must hold in every simulated run, whatever happens to it: the invariants, each with the kind it is reported as.

- `wait`: nobody waits for ever (`liveness_invariants`). While every stage has a replica that can be reached, somebody
  takes an inner step every now and then; no window that was begun stays; the run ends by itself before `duration_s`; a
  peer that is asked to leave goes, for that reason; an offer is answered at once.
- `meet`: while nothing happens, replicas of a stage that can reach each other meet (`liveness_invariants`).
- `slot`: each slot and each place in the queue belongs to a microbatch that is being handled; after the last session
  every gate is free and no task is left.
- `batch`: each inner step uses exactly its microbatches, on weights that did not change under them.
- `finite`: weights and momenta are finite.
- `evaluated`: an evaluation has a finite loss, and is of no round that its peer has not finished.
- `pair`, `rule`, `round`: see `round_invariants` and `meetings`.
- `roster`: when nothing has happened for a record's lifetime and a few refreshes, all rosters show who is there. A peer
  that hears nobody, since no other is left, doubts its own connection for `ISOLATED_S` first.
- `bound`: queues, conversations, memory and timers stay within what windows and replicas allow (`bound_invariants`).
- `distance`: honest weights come no farther from where they should go than they began, and end about as near as
  without the hostile peers, of which there are a quarter of a stage at most (`distance_invariants`).
- `failure`: no answer to a call and no node ends with an error that is neither a loss nor the node's own message.

Everything is read from journals, public counters and the little in `observation`; nothing here touches the run. A
violation is kept until the next look, for an exception in the middle of a node's work would be that node's. How often
each invariant was really evaluated is counted. Nothing is expected of a hostile peer, but that rosters show it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import torch

from gossip.interface import OuterStepTaken
from noloco_node.errors import Exit, user_error_of
from noloco_node.journal import events
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.peer import PeerSession, SimulatedPeer
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.world import LOOK_S, Watcher, World
from noloco_node.swarm.membership import LIFETIME_S
from noloco_node.swarm.stage_records import ISOLATED_S
from tests.explorer.bound_invariants import BoundInvariants
from tests.explorer.distance_invariants import DistanceInvariants
from tests.explorer.liveness_invariants import LivenessInvariants
from tests.explorer.meetings import MeetingChecker
from tests.explorer.observation import CheckerContext, is_closed, is_over, slots, told
from tests.explorer.round_invariants import RoundInvariants
from tests.explorer.session_records import Break, Delays, SessionRecord, begin_record, fast_of

SETTLED_S = 60.0
"""After the end, before what is left counts as left for ever."""
KEPT_PAUSES = 64
"""Pauses whose weights are remembered: a snapshot is older only where an exchange takes that many inner steps."""


class InvariantChecker(Watcher):
    """Watches a world. `end` is to be awaited after the run."""

    def __init__(self, world: World) -> None:
        run = world.setting.run
        self._world, self._window = world, run.pipeline.microbatches_per_step
        hostile = frozenset(fault.peer for fault in world.setting.faults if isinstance(fault, faults.Hostile))
        context = self._context = CheckerContext(world, delays_of(world), hostile=hostile)
        self._meetings = MeetingChecker(context)
        self._rounds = RoundInvariants(context, self._meetings)
        self._liveness, self._bounds = LivenessInvariants(context), BoundInvariants(context)
        self._distances = DistanceInvariants(context)
        self._kept_steps = run.outer.inner_steps_per_round + run.outer.overlap_steps + 2
        self._looked_s = 0.0
        self._states: dict[str, tuple[int, PeerState]] = {}
        self._steps = 0
        self._struck: Counter[str] = Counter()
        self._moved = 0
        self._disks: dict[str, None] = {}
        self._compared: dict[str, float] = {}

    def statistics(self) -> dict[str, int | float]:
        """Return virtual seconds, inner steps, moves, rounds, faults by kind, whether it was excused from ending, and
        how often each invariant was evaluated.
        """
        struck = {f"struck.{kind}": count for kind, count in self._struck.items()}
        late = self._looked_s >= self._world.setting.scenario.swarm.duration_s - 2 * LOOK_S
        excused = int((late or self._world.standstill is not None) and not self._liveness.finished)
        seen = {"virtual_s": self._looked_s, "inner_steps": self._steps, "moved": self._moved, "excused": excused}
        seen["deceived"] = self._liveness.deceived
        return {**seen, **self._compared, **self._rounds.statistics(), **self._context.statistics(), **struck}

    def _raise(self) -> None:
        if self._context.broken is not None:
            raise self._context.broken

    # What happens.

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        now_s = self._world.now_s
        record = self._context.sessions.get((peer.name, peer.session.number))
        match event:
            case events.StateChanged(state=state):
                self._note_state(peer, state, now_s)
            case events.Finished() | events.Moved() if record is not None and peer.name in self._context.hostile:
                record.end(now_s)
                self._context.disturb()
            case _ if peer.name in self._context.hostile:
                pass
            case events.InnerStep() if record is not None:
                self._steps += 1
                record.note_step(now_s, fast_of(peer))
                record.forget_pauses(KEPT_PAUSES)
                self._liveness.note_step(record)
            case OuterStepTaken() if record is not None:
                self._rounds.hear(record, event)
                self._check_finite(record)
                if event.partner is not None:
                    self._liveness.note_meeting(record.stage)
            case events.Evaluated() if record is not None:
                self._context.checked["evaluated"] += 1
                if not math.isfinite(event.loss) or event.round > record.finished[-1][1]:
                    sentence = f"{record.name} evaluated round {event.round} after round {record.finished[-1][1]}"
                    self._context.complain("evaluated", f"{sentence}: a loss of {event.loss:.3g}")
            case events.Lost(what="exchange") | events.PeerViolation(topic="gossip") if record is not None:
                record.breaks.append(Break(now_s, event.peer))
            case events.Finished() if record is not None:
                record.end(now_s)
                self._context.disturb()
                self._liveness.note_finished(record, event.why)
            case events.Moved() if record is not None:
                self._note_moved(record, now_s)

    def _note_moved(self, record: SessionRecord, now_s: float) -> None:
        """Close the record of a stage that a peer leaves; the other stage begins its own, in the same session."""
        self._moved += 1
        record.end(now_s)
        self._context.disturb()
        self._check_samples(record)
        sessions = self._context.sessions
        sessions[record.name, -len(sessions)] = sessions.pop((record.name, record.session))

    def _note_state(self, peer: SimulatedPeer, state: PeerState, now_s: float) -> None:
        known = (peer.session.number, state)
        if self._states.get(peer.name) == known:
            return
        self._states[peer.name] = known
        self._context.disturb()
        if state is PeerState.TRAINING:
            record = begin_record(peer, self._kept_steps, now_s)
            self._context.present[peer.name] = self._context.sessions[peer.name, record.session] = record

    def struck(self, fault: Fault) -> None:
        self._struck[faults.kind_of(fault)] += 1
        self._context.disturb(faults.ends_s(fault))
        match fault:
            case faults.Tamper():
                self._context.spoil(fault.peer)
            case faults.Disk():
                self._disks[fault.peer] = None
            case faults.Slow():
                self._liveness.slowest = max(self._liveness.slowest, fault.factor)
            case faults.Leave() if fault.peer in self._world.peers:
                self._liveness.note_leave(self._world.peers[fault.peer])

    # The look around, once a second.

    def look(self) -> None:
        self._looked_s = self._world.now_s
        self._context.look()
        self._check_lives()
        self._check_rosters()
        self._bounds.look()
        self._distances.look()
        self._liveness.look()
        self._raise()

    def _check_lives(self) -> None:
        for name, error in self._world.network.failures:
            if name not in self._context.hostile:
                self._context.complain("failure", f"{name} failed to answer: {told(error)}")
        for peer in self._expected():
            for session in peer.sessions:
                if session.wrong:
                    self._context.complain("batch", f"{peer.name}: {session.wrong[0]}")
                self._check_task(peer, session)

    def _expected(self) -> list[SimulatedPeer]:
        return [peer for name, peer in self._world.peers.items() if name not in self._context.hostile]

    def _check_task(self, peer: SimulatedPeer, session: PeerSession) -> None:
        task = session.task
        if task is None or not task.done() or task.cancelled():
            return
        self._context.checked["failure"] += 1
        error = task.exception()
        trouble = user_error_of(error)
        refused = trouble is not None and trouble.code is Exit.STORAGE and peer.name in self._disks
        if error is not None and not refused:
            self._context.complain("failure", f"{peer.name} ended with an error: {told(error)}")

    def _check_rosters(self) -> None:
        training, now_s = self._context.training(hostile=True), self._world.now_s
        roster_s = self._context.delays.roster_s
        # A peer that drains before it moves says that it leaves: others may see that for a while, and then no more.
        # Where the run is over it says nothing while it drains; in a blocking run neither, before a meeting: a silent
        # partner may hold it for as long.
        going, gone = set[str](), set[str]()
        for record, replica in training:
            moves = record.asked is None and is_closed(replica) and not is_over(record.peer)
            record.closed_s = (record.closed_s or now_s) if moves else None
            if record.closed_s is not None:
                is_gone = now_s - record.closed_s > roster_s and not self._world.setting.run.outer.blocking
                (gone if is_gone else going).add(record.name)
        if self._context.idle_s <= roster_s or self._context.sent_home:
            return
        if self._context.idle_s <= roster_s + ISOLATED_S and len(self._context.running) == 1:
            return
        stages = range(self._world.setting.run.pipeline.stages)
        truth = {stage: {record.name for record, _ in training if record.stage == stage} for stage in stages}
        for record, _ in self._context.training():
            node = record.peer.session.node
            assert node is not None
            for stage in sorted({0, record.stage, min(record.stage + 1, stages[-1])}):
                seen = {entry.peer for entry in node.roster.stage(stage) if entry.state is PeerState.TRAINING}
                self._context.checked["roster"] += 1
                if seen - going != truth[stage] - going - gone:
                    sentence = f"{record.name} sees {sorted(seen)} at stage {stage}, where {sorted(truth[stage])} train"
                    quiet = f"nothing has happened for {self._context.idle_s:.0f} s"
                    self._context.complain("roster", f"{sentence}; {quiet}")

    def _check_finite(self, record: SessionRecord) -> None:
        self._context.checked["finite"] += 1
        for what, tensors in (("slow weights", record.state.slow), ("momentum", record.state.momentum)):
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                self._context.complain("finite", f"{record.name}: its {what} are not finite")
        if not bool(torch.isfinite(record.fast).all()):
            self._context.complain("finite", f"{record.name}: its fast weights are not finite")

    # The end.

    async def end(self) -> None:
        await asyncio.sleep(SETTLED_S)
        self._context.look()
        self._check_lives()
        for peer in self._expected():
            for session in peer.sessions:
                self._check_rest(peer, session)
        for (name, number), record in self._context.sessions.items():
            if number == record.session and name not in self._context.hostile:
                self._check_finite(record)
                self._check_samples(record)
        self._meetings.end()
        left = self._world.waits()
        if left:
            places = "\n  ".join(left)
            self._context.complain("slot", f"all sessions are over, and these tasks are left:\n  {places}")
        self._raise()

    def compare(self) -> None:
        """Compare with the run that this one would have been without attacks, when it is over."""
        self._compared = self._distances.compare(self._looked_s)

    def _check_rest(self, peer: SimulatedPeer, session: PeerSession) -> None:
        replica = session.replica
        self._context.checked["rest"] += 1
        if replica is not None and (replica.admission.in_flight or replica.admission.queued):
            sentence = (
                f"session {session.number} of {peer.name} is over, and slots are taken: {slots(replica.admission)}"
            )
            self._context.complain("slot", sentence)
        if self._world.network.open_calls(peer.name):
            calls = self._world.network.open_calls(peer.name)
            self._context.complain("slot", f"{peer.name} is gone, and has {calls} calls open")

    def _check_samples(self, record: SessionRecord) -> None:
        """Each microbatch that succeeded is in an inner step, or in the partial window that the last session left."""
        session = record.peer.sessions[record.session]
        replica = session.replica
        if session.crashed or replica is None:
            return
        succeeded = int(replica.worker.statistics()["succeeded"])
        used = record.steps * self._window + replica.admission.succeeded
        self._context.checked["batch"] += 1
        # The window of the last step may not have been opened again.
        if succeeded != used and succeeded != used - replica.admission.succeeded:
            sentence = f"{record.name}: {succeeded} microbatches succeeded and {used} are accounted for"
            self._context.complain("batch", sentence)


def delays_of(world: World) -> Delays:
    """Return how late news may be in this world's conditions: a record is made every half refresh, published every
    refresh, and read every refresh.
    """
    network, swarm = world.setting.scenario.network, world.setting.scenario.swarm
    trip_s = 2 * (network.latency.mean_s + 6 * network.latency.std_s) + 2 * (network.late_s if network.late else 0)
    news_s = 3.3 * swarm.refresh_s + network.roster_lag_s + 3 * trip_s
    return Delays(news_s=news_s, roster_s=LIFETIME_S + news_s, trip_s=trip_s)
