"""What must hold of the rounds, as far as journals and the state of both sides show it.

With gamma = beta the outer rule is m' = alpha m + beta (phi - mean theta). So the mean that a side applied follows from
its own state before and after the step, mean theta = phi + (alpha m - m') / beta, and needs no look at the exchange:

- the two sides of a meeting must have applied the same mean (two sides are of one meeting if they saw the same gap: the
  numbers of their rounds may differ, since healing is bounded by each side's own roster);
- the mean of a solo round is one's own fast weights;
- phi' = phi - m' always.

A step that forgets its momentum shows in both: the sides of a pair have different momenta as soon as they have met
different partners.

**Numbers.** Within a life each step's round is above the last one. Who is behind heals: a round is opened at

    1 + min(highest finished, median finished + ROUND_BOUND)

of the roster or above (`matching.heal`), where the roster's numbers are at most `Delays.news_s` old. The step that ends
a round comes at most H + overlap inner steps after its opening; so the numbers of that moment, less the delay, bound
the round of every step from below. A replica that fell behind by k rounds is therefore there again with the next step
that it takes, unless the median itself is behind: then it is within k / (ROUND_BOUND + 1) steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gossip.matching import ROUND_BOUND
from gossip.nesterov import OuterState
from noloco_node import journal
from noloco_node.config import OuterConfig
from noloco_node.sim.peer import SimulatedPeer

TOLERANCE = 1e-3
"""Of a recovered mean, relative to the largest number that it was recovered from: float32, divided by beta."""


NO_GAP = 1e-6
"""A gap that tells no meeting from another: of two replicas alone, by arithmetic."""
MOST_UNMATCHED = 16
"""Of two lives."""


class Complain(Protocol):
    """Takes a broken invariant: its kind, and a sentence."""

    def __call__(self, kind: str, sentence: str) -> None:
        """Take note of it."""


@dataclass(kw_only=True, slots=True, eq=False)
class LifeRecord:
    """What is known of one life of a peer. `began_s`: when it began to train."""

    peer: SimulatedPeer
    life: int
    stage: int
    began_s: float
    state: OuterState
    fast: Tensor
    finished: list[tuple[float, int]]
    """Rounds finished, each with the time since when."""
    stepped_s: deque[float]
    """When the last inner steps were taken: as many as a round may be open, and one."""
    steps: int = 0
    training: bool = True

    @property
    def name(self) -> str:
        """The peer's name."""
        return self.peer.name

    def finished_at(self, then_s: float) -> int:
        """Return the round that was the last finished one at a time."""
        return max((number for since_s, number in self.finished if since_s <= then_s), default=0)


class Delays(NamedTuple):
    """How late news may be in a world that has come to rest, in seconds.

    `news_s`: a number in a record, until every roster shows it. `roster_s`: that somebody is gone.
    """

    news_s: float
    roster_s: float


@dataclass(kw_only=True, slots=True)
class _Side:
    """One side of a meeting: who, in which round, the gap that it saw, and the mean that it applied."""

    name: str
    round: int
    gap: float
    mean: Tensor
    scale: float


@dataclass(slots=True)
class RoundsWatch:
    """Checks every outer step."""

    outer: OuterConfig
    delays: Delays
    lives: dict[str, LifeRecord]
    """The present life of each peer that has ever trained."""
    spoilt: Callable[[str], bool]
    """Whether messages of a peer may have arrived other than it sent them."""
    complain: Complain
    met: int = 0
    solo: int = 0
    compared: int = 0
    _meetings: dict[tuple[tuple[str, int], tuple[str, int]], list[_Side]] = field(default_factory=dict)
    """Sides that have no other side yet, by the two lives."""

    def statistics(self) -> dict[str, int | float]:
        """Return outer steps seen with and without a partner, and meetings whose two sides were compared."""
        return {"met": self.met, "solo": self.solo, "compared": self.compared}

    def __repr__(self) -> str:
        return f"RoundsWatch({self.met} met, {self.solo} solo, {self.compared} compared)"

    def hear(self, record: LifeRecord, event: journal.OuterStep, now_s: float, quiet_s: float) -> None:
        """Check a step that has just been applied. `quiet_s`: since when nothing has happened to the world."""
        after, fast = _state_of(record.peer), fast_of(record.peer)
        before, before_fast = record.state, record.fast
        record.state, record.fast = after, fast
        self._check_number(record, event, now_s, quiet_s)
        record.finished.append((now_s, event.round))
        (phi,), (m,), (phi_next,), (m_next,) = before.slow, before.momentum, after.slow, after.momentum
        scale = max(1.0, *(float(part.abs().max()) for part in (phi, m, m_next, fast)))
        if not torch.allclose(phi_next, phi - m_next, atol=TOLERANCE * scale):
            self.complain("rule", f"{record.name} moved its slow weights by other than its momentum")
        mean = phi + (self.outer.alpha * m - m_next) / self.outer.beta
        if event.partner is not None:
            self.met += 1
            self._compare(
                record, event, _Side(name=record.name, round=event.round, gap=event.gap or 0.0, mean=mean, scale=scale)
            )
            return
        self.solo += 1
        away = float((mean - before_fast).abs().max())
        if away > TOLERANCE * scale:
            sentence = f"{record.name} took a solo step for round {event.round} that its own weights do not explain"
            self.complain("rule", f"{sentence}: the mean that it applied is {away:.3g} off")

    def _check_number(self, record: LifeRecord, event: journal.OuterStep, now_s: float, quiet_s: float) -> None:
        last = record.finished[-1][1]
        if event.round <= last:
            self.complain("round", f"{record.name} finished round {event.round} after round {last}")
        opened_s = record.stepped_s[0] if len(record.stepped_s) == record.stepped_s.maxlen else record.began_s
        then_s = opened_s - self.delays.news_s
        if then_s < quiet_s + self.delays.roster_s:
            return
        others = [o.finished_at(then_s) for o in self.lives.values() if o.training and o.stage == record.stage]
        least = 1 + min(max(others), median_low(others) + ROUND_BOUND)
        if event.round < least:
            sentence = f"{record.name} finished round {event.round}, which was behind already when it opened"
            self.complain("round", f"{sentence}: its stage was at {sorted(others)} at {then_s:.1f} s")

    def _compare(self, record: LifeRecord, event: journal.OuterStep, side: _Side) -> None:
        assert event.partner is not None
        partner = self.lives.get(event.partner)
        if partner is None or self.spoilt(record.name) or self.spoilt(event.partner):
            return
        ends = sorted([(record.name, record.life), (partner.name, partner.life)])
        unmatched = self._meetings.setdefault((ends[0], ends[1]), [])
        other = next((each for each in unmatched if _of_one_meeting(each, side)), None)
        if other is None:
            # The other side has not applied it yet; or never will, where the last receipt was lost.
            unmatched.append(side)
            del unmatched[:-MOST_UNMATCHED]
            return
        unmatched.remove(other)
        self.compared += 1
        away = float((side.mean - other.mean).abs().max())
        if not away <= TOLERANCE * max(side.scale, other.scale):
            sentence = f"{side.name} and {other.name} met in round {event.round} and applied means that differ"
            self.complain("pair", f"{sentence} by {away:.3g}")


def _of_one_meeting(one: _Side, other: _Side) -> bool:
    """Say whether two sides are of one meeting: both see the same gap, and their numbers differ by what healing may."""
    if one.name == other.name or not math.isclose(one.gap, other.gap, rel_tol=1e-4, abs_tol=NO_GAP):
        return False
    return one.round == other.round if one.gap <= NO_GAP else abs(one.round - other.round) <= ROUND_BOUND


def begin_record(peer: SimulatedPeer, kept_steps: int, now_s: float) -> LifeRecord:
    """Return the record of a life that begins to train now. `kept_steps`: times of inner steps to remember."""
    node = peer.life.node
    assert node is not None
    assert node.replica is not None
    return LifeRecord(
        peer=peer,
        life=peer.life.number,
        stage=node.replica.post.stage,
        began_s=now_s,
        state=_state_of(peer),
        fast=fast_of(peer),
        finished=[(now_s, node.replica.rounds.finished)],
        stepped_s=deque(maxlen=kept_steps),
    )


def _state_of(peer: SimulatedPeer) -> OuterState:
    node = peer.life.node
    assert node is not None
    assert node.replica is not None
    return node.replica.rounds.state


def fast_of(peer: SimulatedPeer) -> Tensor:
    """Return the fast weights of a bowl."""
    assert peer.life.stage is not None
    (weights,) = peer.life.stage.weights()
    return weights
