"""Nobody waits for ever: for a step, for an answer, for a partner, for somebody who was asked to go, for the end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from noloco_node.evaluation.evaluator import LONGEST_END_S
from noloco_node.journal import events
from noloco_node.node.assignment import LONGEST_DRAIN_S
from noloco_node.run.protocols import GOSSIP
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.scenario import NetworkConfig
from noloco_node.sim.world import LOOK_S
from noloco_node.swarm.run_samples import IDLE_S
from tests.explorer.observation import CheckerContext, is_closed, slots
from tests.explorer.session_records import Asked, SessionRecord

STANDSTILL_S = 90.0
"""Without an inner step anywhere: a newcomer's patience with ghosts, and a suspicion, lie within."""
ENDED_S = IDLE_S + LONGEST_DRAIN_S + 40.0
"""After a node has found the run over, until all have: two sources without work may each wait for the other's."""
ANSWER_S = 6.0
"""An answer is due at once; a node with deadlines gives up after 5 s."""
EXCHANGE_S = 60.0
"""A meeting under way is given up after about so long by a node with deadlines."""
GOING_S = LONGEST_DRAIN_S + EXCHANGE_S + 10.0
"""From being asked to leave until the process is gone: microbatches, a meeting, and the slowest of lines and disks."""
STEPS_AFTER = 2
"""Inner steps that may follow a request to leave: the one under way, and that of the window that it let begin."""
EARLY = 0.8
"""Progress before which no honest peer ends: of so short a run the last microbatch may be drawn at 0.9."""
OPENINGS_OF_STAGE = 4
"""Rounds that two replicas of a stage may open without any meeting in it, on a good network."""
OPENINGS_OF_ONE = 3
"""Times as many a replica may open without a meeting, while somebody else of its stage opens rounds too."""
MESSAGES = 8
"""Of a meeting: offer and answer, two probes, two sets of weights, two receipts."""
BAD_LUCK = 0.002
"""Chance of meeting nobody in so many rounds because of the network, above which they are too few to complain.

A run has dozens of such stretches, and a search hundreds of runs.
"""


@dataclass(slots=True, repr=False)
class LivenessInvariants:
    """Checks at every look that everybody gets on. `slowest`: the largest factor by which a device was slowed down."""

    context: CheckerContext
    slowest: float = 1.0
    finished: bool = False
    """Whether somebody has found the run over."""
    deceived: int = 0
    """Honest peers that left as if the run were over, which it was not."""
    stepped_s: float = 0.0
    _met_s: dict[int, float] = field(default_factory=dict)
    """The last meeting of each stage."""
    _talks: dict[object, float] = field(default_factory=dict)
    _asked: dict[tuple[str, int], float] = field(default_factory=dict)

    def look(self) -> None:
        self._check_gone()
        self._check_talks()
        self._check_meetings()
        self._check_end()
        if not self.finished and self._possible():
            self._check_steps()

    # A peer that is asked to leave goes.

    def note_leave(self, peer: SimulatedPeer) -> None:
        if not peer.running:
            return
        now_s = self.context.world.now_s
        self._asked.setdefault((peer.name, peer.session.number), now_s)
        record, replica = self.context.sessions.get((peer.name, peer.session.number)), peer.replica
        if record is not None and record.asked is None and replica is not None:
            record.asked = Asked(now_s, record.steps, record.training and not is_closed(replica))

    def note_step(self, record: SessionRecord) -> None:
        self.stepped_s = self.context.world.now_s
        if record.asked is not None and record.steps - record.asked.steps > STEPS_AFTER:
            since_s = self.context.world.now_s - record.asked.at_s
            self.context.complain("wait", f"{record.name} was asked to leave {since_s:.1f} s ago, and trains on")

    def note_finished(self, record: SessionRecord, why: str) -> None:
        over = why == events.RUN_OVER
        if over and not self.stepped_s:
            self.context.complain("ended", f"{record.name} takes the run for over before anybody has taken a step")
        if over and self.context.hostile and self._progress() < EARLY:
            # One that is cut off with a hostile source may be told so. Nobody else is.
            self.deceived += 1
            if self.context.idle_s > self.context.delays.roster_s:
                sentence = f"{record.name} takes the run for over at {self._progress():.0%}; nothing has happened"
                self.context.complain("ended", f"{sentence} for {self.context.idle_s:.0f} s")
            return
        self.finished = self.finished or over
        if record.asked is not None and record.asked.training:
            self.context.checked["left"] += 1
            if over:
                self.context.complain("wait", f"{record.name} was asked to leave, and stayed until the run was over")

    def _progress(self) -> float:
        """Return how far the run is, as the honest replica knows that is furthest."""
        peers = [peer for name, peer in self.context.world.peers.items() if name not in self.context.hostile]
        return max((peer.replica.progress.value for peer in peers if peer.replica is not None), default=0.0)

    def _check_gone(self) -> None:
        now_s = self.context.world.now_s
        for (name, session), at_s in self._asked.items():
            if self.context.running.get(name) == session:
                self.context.checked["gone"] += 1
                if now_s - at_s > GOING_S + self.context.delays.trip_s:
                    sentence = f"{name} was asked to leave {now_s - at_s:.0f} s ago, and is still there"
                    self.context.complain("wait", f"{sentence}:\n  " + self._waits())

    # A peer that asks is answered.

    def _check_talks(self) -> None:
        """Complain of gossip that lasts between two who neither meet nor swap: somebody waits for an answer."""
        context, now_s = self.context, self.context.world.now_s
        known, self._talks = self._talks, {}
        limit_s = ANSWER_S + context.delays.trip_s
        views = {record.name: replica.rounds.view for record, replica in context.training()}
        partners = {name: (view.meeting_partner, view.prefetch_partner) for name, view in views.items()}
        for name in partners:
            network = context.world.network.peer(name)
            for end in network.ends if network is not None else ():
                engaged = end.peer in partners[name] or name in partners.get(end.peer, ())
                if not end.topic.startswith(GOSSIP) or engaged or end.peer in context.hostile:
                    continue
                context.checked["talk"] += 1
                since_s = self._talks[end] = known.get(end, now_s)
                if now_s - since_s > limit_s and context.idle_s > limit_s:
                    sentence = f"{name} and {end.peer} have waited for an answer for {now_s - since_s:.0f} s"
                    context.complain("wait", sentence)

    # A replica that looks for a partner finds one.

    def note_meeting(self, stage: int) -> None:
        self._met_s[stage] = self.context.world.now_s

    def _check_meetings(self) -> None:
        """Complain of a stage, or of one replica, that meets nobody although somebody else opens rounds too."""
        if self.context.idle_s <= self.context.delays.news_s or self.finished or self.context.sent_home:
            return
        network, per_round = self.context.world.network, self.context.world.setting.run.outer.inner_steps_per_round
        base_s = self.context.quiet_s + self.context.delays.news_s
        records = [record for record, _ in self.context.training()]
        of_stage = _openings(self.context.world.setting.scenario.network)
        for record in records:
            others = [
                other
                for other in records
                if other.stage == record.stage
                and other is not record
                and not (network.dials_only(other.name) and network.dials_only(record.name))
            ]
            for openings, met_s in (
                (of_stage, self._met_s.get(record.stage, 0.0)),
                (OPENINGS_OF_ONE * of_stage, record.met_s),
            ):
                since_s, due = max(base_s, met_s), openings * per_round
                if not any(other.steps_since(since_s) >= of_stage * per_round for other in others):
                    continue
                self.context.checked["meet"] += 1
                if record.steps_since(since_s) >= due:
                    sentence = f"{record.name} has opened {openings} rounds since {since_s:.1f} s and met nobody"
                    self.context.complain("meet", f"{sentence}, nor has anybody else of its stage")

    # A replica that has work takes steps.

    def _check_end(self) -> None:
        context = self.context
        # All wait for the last evaluation, whose microbatches a hostile peer may hold.
        evaluates = context.world.setting.run.data.evaluate_every_rounds > 0
        limit_s = ENDED_S + (LONGEST_END_S if evaluates else 0.0)
        if self.finished and context.idle_s > limit_s and context.honest_running and not context.sent_home:
            names = ", ".join(context.honest_running)
            context.complain("wait", f"the run is over, and {names} do not see it:\n  " + self._waits())

    def _check_steps(self) -> None:
        context, now_s = self.context, self.context.world.now_s
        scenario, run = context.world.setting.scenario, context.world.setting.run
        devices = scenario.devices
        window_s = 3 * devices.forward_s * run.pipeline.microbatches_per_step * max(devices.slowness) * self.slowest
        context.checked["pace"] += 1
        idle_s = now_s - max(context.quiet_s, self.stepped_s)
        if idle_s > STANDSTILL_S + 2 * window_s:
            context.complain("wait", f"nobody has taken an inner step for {idle_s:.0f} s:\n  " + self._waits())
        for record, replica in context.training():
            gate = replica.admission
            if not gate.in_flight and gate.succeeded < gate.window:
                # Nothing is in its hands: whoever suspects it lets it wait for minutes, which are not its own.
                record.idle_s += now_s - (record.looked_s or now_s)
            record.looked_s = now_s
            stepped_s = record.stepped_s[-1] if record.stepped_s else record.began_s
            idle_s = now_s - max(context.quiet_s, stepped_s) - record.idle_s
            if idle_s > STANDSTILL_S + 8 * window_s and (gate.in_flight or gate.succeeded == gate.window):
                sentence = f"{record.name} has begun a window and not ended it for {idle_s:.0f} s"
                context.complain("wait", f"{sentence}: {slots(gate)}\n  " + self._waits())
        if now_s >= scenario.swarm.duration_s - 2 * LOOK_S:
            context.complain("wait", f"the run does not end by itself within {now_s:.0f} s:\n  " + self._waits())

    def _possible(self) -> bool:
        """Say whether every stage has a replica that others can call, or a newcomer that will be one.

        A newcomer copies a living replica or waits (`joining`): where nobody can dial the only ones, it waits on
        purpose, and the run with it. Such runs are counted as `excused`.
        """
        world, found = self.context.world, dict[int, None]()
        training = {record.name for record, _ in self.context.training()}
        peers = [world.peers[name] for name in self.context.honest_running]
        hidden = {peer.name for peer in peers if world.network.dials_only(peer.name)}
        unreachable = {peer.stage for peer in peers if peer.name in training & hidden}
        for peer in peers:
            if peer.stage == 0 or (
                peer.name not in hidden and (peer.name in training or peer.stage not in unreachable)
            ):
                found[peer.stage if peer.stage is not None else -1] = None
        return all(stage in found for stage in range(world.setting.run.pipeline.stages))

    def _waits(self) -> str:
        return "\n  ".join(self.context.world.waits())


def _openings(network: NetworkConfig) -> int:
    """Return the rounds that two replicas may open without meeting: more where each message may break the meeting."""
    breaks = 1.0 - max(0.0, 1.0 - network.loss - network.duplicate) ** MESSAGES
    return max(OPENINGS_OF_STAGE, math.ceil(math.log(BAD_LUCK) / math.log(breaks))) if breaks else OPENINGS_OF_STAGE
