"""What all parts of the checker know: who is there, since when nothing has happened, and what was found broken.

Below: what the checker reads of a node that no public counter shows. A counter would be updated by the code that is
checked. The checker changes nothing.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from gossip.settings import OuterConfig
from noloco_node.errors import leaves
from noloco_node.node.assignment import RunOver
from noloco_node.node.replica import Replica
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.world import World
from pipeline.admission_window import AdmissionWindow
from tests.explorer.session_records import Delays, SessionRecord, SessionRecords


class InvariantBroken(AssertionError):
    """An invariant does not hold. `kind`: which; `at_s`: virtual seconds."""

    def __init__(self, kind: str, at_s: float, sentence: str) -> None:
        super().__init__(f"{kind}, at {at_s:.2f} s: {sentence}")
        self.kind, self.at_s, self.sentence = kind, at_s, sentence

    def __reduce__(self) -> tuple[type[InvariantBroken], tuple[str, float, str]]:
        """Let a process tell another; an exception would be made anew from its text alone."""
        return type(self), (self.kind, self.at_s, self.sentence)


def told(error: BaseException) -> str:
    """Return what failed and where, in one line; of a group, the first of it."""
    inner = leaves(error)[0]
    frames = traceback.extract_tb(inner.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(inner).__name__}: {inner}{where}"


@dataclass(slots=True, repr=False)
class CheckerContext:
    """The world as the checker has seen it so far. `quiet_s`: since when nothing has happened to it."""

    world: World
    delays: Delays
    quiet_s: float = 0.0
    running: dict[str, int] = field(default_factory=dict)
    """The number of the session of each peer that was there at the last look."""
    present: dict[str, SessionRecord] = field(default_factory=dict)
    """The present session of each peer that has ever trained, or its last."""
    sessions: SessionRecords = field(default_factory=dict)
    checked: Counter[str] = field(default_factory=Counter)
    """How often each invariant was really evaluated."""
    broken: InvariantBroken | None = None
    hostile: frozenset[str] = frozenset()
    """Peers that will attack or have: nothing is expected of them."""
    _spoilt_s: dict[str, float] = field(default_factory=dict)
    """Until when messages of a peer may have arrived wrong."""

    def statistics(self) -> dict[str, int | float]:
        return {f"checked.{kind}": count for kind, count in sorted(self.checked.items())}

    @property
    def outer(self) -> OuterConfig:
        return self.world.setting.run.outer

    @property
    def idle_s(self) -> float:
        """For how long nothing has happened to the world; negative while something lasts."""
        return self.world.now_s - self.quiet_s

    @property
    def sent_home(self) -> bool:
        late = self.world.now_s >= self.world.setting.scenario.swarm.duration_s
        return late or self.world.standstill is not None

    def complain(self, kind: str, sentence: str) -> None:
        if self.broken is None:
            self.broken = InvariantBroken(kind, self.world.now_s, sentence)

    def disturb(self, until_s: float = 0.0) -> None:
        """Note that something happens to the world now, and lasts until `until_s`."""
        self.quiet_s = max(self.quiet_s, until_s, self.world.now_s)

    @property
    def honest_running(self) -> list[str]:
        """The peers of whom something is expected, that were there at the last look."""
        return [name for name in self.running if name not in self.hostile]

    def training(self, *, hostile: bool = False) -> list[tuple[SessionRecord, Replica]]:
        """Return the lives that train, each with its replica. `hostile`: those of hostile peers too."""
        found: list[tuple[SessionRecord, Replica]] = []
        for record in self.present.values():
            expected = hostile or record.name not in self.hostile
            if expected and record.training and self.running.get(record.name) == record.session:
                replica = record.peer.replica
                assert replica is not None
                found.append((record, replica))
        return found

    def look(self) -> None:
        now_s = self.world.now_s
        running = {name: peer.session.number for name, peer in self.world.peers.items() if peer.running}
        if running != self.running:
            self.running = running
            self.disturb()
        for (name, session), record in self.sessions.items():
            if record.ended_s is None and running.get(name) != session:
                record.end(now_s)
        for name, until_s in self._spoilt_s.items():
            if until_s == float("inf") and not self.world.network.is_corrupting(name):
                # The last of them was sent since the last look.
                self._spoilt_s[name] = now_s

    def spoil(self, peer: str) -> None:
        if self.world.network.is_corrupting(peer):
            self._spoilt_s[peer] = float("inf")

    def is_spoilt(self, peer: str, since_s: float) -> bool:
        """Say whether messages of a peer may have arrived other than it sent them since then."""
        if peer in self.hostile:
            return True
        until_s = self._spoilt_s.get(peer)
        return until_s is not None and until_s + self.delays.news_s >= since_s


def is_closed(replica: Replica) -> bool:
    """Say whether the replica lets nobody in any more, for it goes or the run is over."""
    return replica.admission._closed


def is_over(peer: SimulatedPeer) -> bool:
    """Say whether a peer's assignment ends because the run is over."""
    node = None if peer.session is None else peer.session.node
    return node is not None and node.assignment is not None and isinstance(node.assignment._ending, RunOver)


def clipped(replica: Replica) -> int:
    """Return how many meetings counted in part only, for the partner's weights were far away."""
    return replica.rounds._round_state.counts["clipped"]


def doubts_weights(replica: Replica) -> bool:
    """Say whether a replica still doubts the weights that a donor gave it, or has found them worth nothing."""
    return not replica.starting_weights.judged or replica.rounds.disowned


def slots(gate: AdmissionWindow) -> str:
    taken = f"{gate.succeeded} succeeded and {gate.in_flight} in flight of {gate.window}"
    return f"{taken}, {gate.queued} of {gate.queue_limit} queued"


def sizes(replica: Replica) -> Iterator[tuple[str, int, int]]:
    """Yield what a replica remembers of others: what it is, their stage, and the number of entries."""
    stage = replica.stage
    yield "prospects", stage, replica.rounds.view.put_off
    if replica.next_stage is not None:
        yield "replicas of the next stage that rest", stage + 1, len(replica.next_stage._standing._refusals)
        yield "replicas of the next stage that were called", stage + 1, len(replica.next_stage.hop_totals)
        yield "suspects", stage + 1, len(replica.next_stage.suspects)
