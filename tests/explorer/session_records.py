"""The record of each session of a peer, from its journal alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from gossip.rule.outer_step import OuterState
from noloco_node.sim.peer import SimulatedPeer


class Asked(NamedTuple):
    """A request to leave. `training`: and nothing had told the peer yet that the run is over."""

    at_s: float
    steps: int
    training: bool


class Break(NamedTuple):
    """An exchange that a replica gave up, and with whom."""

    at_s: float
    partner: str


@dataclass(kw_only=True, slots=True, eq=False)
class SessionRecord:
    """One session of a peer. `began_s`: when it began to train. `ended_s`: when it trained no more."""

    peer: SimulatedPeer
    session: int
    stage: int
    began_s: float
    state: OuterState
    fast: Tensor
    finished: list[tuple[float, int]]
    """Rounds finished, each with the time since when."""
    stepped_s: deque[float]
    """When the last inner steps were taken: as many as a round may be open, and one."""
    pauses: dict[int, Tensor]
    """The fast weights at the end of the last pauses, by the inner steps of this session."""
    all_steps_s: list[float] = field(default_factory=list)
    met_s: float = -1.0
    breaks: list[Break] = field(default_factory=list)
    asked: Asked | None = None
    training: bool = True
    ended_s: float | None = None
    clipped: int = 0
    """Meetings that counted in part only, as of the last outer step."""
    closed_s: float | None = None
    """Since when it lets nobody in any more, though nobody asked it to leave: it moves."""
    looked_s: float = 0.0
    idle_s: float = 0.0
    """For how long, since its last inner step, it was seen with nothing in its hands and its window not full."""

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def steps(self) -> int:
        return len(self.all_steps_s)

    def steps_since(self, then_s: float) -> int:
        return sum(1 for _ in takewhile(lambda at_s: at_s > then_s, reversed(self.all_steps_s)))

    def note_step(self, now_s: float, fast: Tensor) -> None:
        self.idle_s = 0.0
        self.all_steps_s.append(now_s)
        self.stepped_s.append(now_s)
        self.note_fast(fast)

    def note_fast(self, fast: Tensor) -> None:
        self.fast = self.pauses[self.steps] = fast

    def forget_pauses(self, kept: int) -> None:
        for step in [step for step in self.pauses if step < self.steps - kept]:
            del self.pauses[step]

    def finished_at(self, then_s: float) -> int:
        """Return the round that was the last finished one at a time."""
        return max((number for since_s, number in self.finished if since_s <= then_s), default=0)

    def end(self, now_s: float) -> None:
        self.training = False
        if self.ended_s is None:
            self.ended_s = now_s


class Delays(NamedTuple):
    """How late news may be in a world that has come to rest, in seconds.

    `news_s`: a number in a record, until every roster shows it. `roster_s`: that somebody is gone. `trip_s`: a message
    and its answer.
    """

    news_s: float
    roster_s: float
    trip_s: float


SessionRecords = dict[tuple[str, int], SessionRecord]
"""All lives that ever trained, by peer and number."""


def begin_record(peer: SimulatedPeer, kept_steps: int, now_s: float) -> SessionRecord:
    """Return the record of a session that begins to train now. `kept_steps`: times of inner steps to remember."""
    replica, fast = peer.replica, fast_of(peer)
    assert replica is not None
    return SessionRecord(
        peer=peer,
        session=peer.session.number,
        stage=replica.stage,
        began_s=now_s,
        state=state_of(peer),
        fast=fast,
        finished=[(now_s, replica.rounds.finished)],
        stepped_s=deque(maxlen=kept_steps),
        pauses={0: fast},
    )


def state_of(peer: SimulatedPeer) -> OuterState:
    assert peer.replica is not None
    state = peer.replica.rounds.state
    slow, momentum, gathered = (tuple([tensor.clone() for tensor in tensors]) for tensors in state[:3])
    return OuterState(slow, momentum, gathered, state.meetings)


def fast_of(peer: SimulatedPeer) -> Tensor:
    assert peer.session.stage is not None
    (weights,) = peer.session.stage.weights()
    return weights
