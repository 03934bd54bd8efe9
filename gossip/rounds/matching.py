"""When a replica's rounds are due, how many inner steps they take, and who meets whom: decisions without effects.

A round is due H own inner steps after the last opening, met or not; H is settled when a round opens. With *dynamic
local updates* (Asynchronous Local-SGD, arXiv 2401.09135, equation 6) a replica of speed v takes max(1, floor(v / v_max
* H)) inner steps, v_max being that of the stage's fastest replica. A speed counts as up to `TOLERANCE` more than
measured, and v_max as at most `LARGEST_MULTIPLE` times the lower median, for speeds are claims.

All pairs of a stage's replicas are ordered by a hash of (seed, round, pair) and matched greedily, so equal rosters give
equal pairs without a message. Beyond `GREEDY_AT_MOST` replicas each asks others in the order of their pairs' hashes. A
pair has one hash for both, so preferences form no cycle. A young round accepts only its first preference; otherwise
replicas of equal speed would fall into fixed pairs. The replica with the lower round number adopts its partner's,
within a bound that neither a liar nor many false names can move (docs/design/gossip.md).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.messages import Accept, Decline, DeclineReason, Propose
from gossip.interface import Candidate, RoundProgress
from gossip.rule.outer_step import LIFT_BOUND
from gossip.settings import OuterConfig, RoundTimeouts

GREEDY_AT_MOST = 200  # replicas of a stage up to which the whole greedy matching is computed (19 900 pairs)
PICKY_SHARE = 0.5  # share of the time between two openings after which anybody will do
_LOW_31 = 2**31 - 1  # the bits that a shift of 64 bits by 33 leaves; a signed shift copies the sign into the rest
_SIGN = -(2**63)
SOON_S = 0.25  # when to ask a peer again that is only waiting for an answer
ASKED_AT_MOST = 32  # preferences that are followed in one round; the others may still ask us
TOLERANCE = 0.1  # share of a measured speed within which two speeds count as equal
LARGEST_MULTIPLE = 8.0  # how many times the stage's median the highest speed may be that is believed
SLACK_S = 1e-3  # times nearer than this are equal: a timer may fire a little early
TIMES_LOST = 10.0
"""A peer is left alone for so many times as long as we have lost by it: it takes a tenth of our time at most."""
USUAL_OF = 16  # meetings with a step of ours whose median duration is usual
VAIN_AT_MOST = 3  # meetings without a step of ours that one partner may have in a round; more are no accident


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerState:
    """What a replica is doing at the moment of a proposal.

    `round`: the round that it opened last, 0 before the first. `asking`: the peer whose answer it waits for. `had`: the
    sender has had enough meetings that came to nothing for us. `preference_delay_s`: the time until the sender is good
    enough, 0 if it is. `ready_in_s`: estimate of the time to the next opening.
    """

    me: str
    round: int
    open: bool
    engaged: bool
    asking: str | None
    leaving: bool
    had: bool
    preference_delay_s: float
    ready_in_s: float


def answer(state: AnswerState, sender: str, proposal: Propose) -> Accept | Decline:
    if state.leaving:
        return _declined(state, DeclineReason.LEAVING, state.ready_in_s)
    if state.engaged:
        return _declined(state, DeclineReason.ENGAGED, state.ready_in_s)
    if not state.open:
        done = proposal.round <= state.round
        return _declined(state, DeclineReason.MET if done else DeclineReason.NOT_OPEN, state.ready_in_s)
    if state.had:
        # A few times a round at most: otherwise somebody could have our weights sent again and again.
        return _declined(state, DeclineReason.MET, state.ready_in_s)
    if state.asking == sender:
        # We have just proposed the same ourselves.
        if sender < state.me:
            return Accept(round=state.round)
        return _declined(state, DeclineReason.YIELD, SOON_S)
    if state.preference_delay_s > 0.0:
        return _declined(state, DeclineReason.HOPING, state.preference_delay_s)
    if state.asking is not None:
        return _declined(state, DeclineReason.ASKING, SOON_S)
    return Accept(round=state.round)


def _declined(state: AnswerState, reason: DeclineReason, retry_after_s: float) -> Decline:
    return Decline(reason=reason, retry_after_s=retry_after_s, round=state.round)


def partners_of_round(replicas: Collection[str], seed: int, round: int) -> Mapping[str, str]:
    """Return the greedy matching of one round, both directions of every pair; it leaves out at most one replica."""
    return _greedy(tuple(sorted(set(replicas))), seed, round)


@lru_cache(maxsize=32)
def _greedy(replicas: tuple[str, ...], seed: int, round: int) -> Mapping[str, str]:
    """Match those first who are each other's best, then those of the rest, and so on.

    These pairs are the greedy ones: nothing before such a pair takes either away. `argmin` returns the first of equals,
    as the order of all pairs would.
    """
    paired = _without_idle(replicas, seed, round)
    tickets = _tickets(f"{seed}|match|{round}", paired)
    scores = _scores(tickets[:, None], tickets).fill_diagonal_(-1 - _SIGN)
    left, partner = torch.arange(len(paired)), dict[str, str]()
    while len(left):
        best = scores.argmin(1)
        matched = best[best] == torch.arange(len(left))
        pairs = zip(left[matched].tolist(), left[best[matched]].tolist(), strict=True)
        partner.update((paired[one], paired[other]) for one, other in pairs)
        left, scores = left[~matched], scores[~matched][:, ~matched]
    return partner


def _without_idle(replicas: tuple[str, ...], seed: int, round: int) -> tuple[str, ...]:
    """Leave out one of an odd number: each in turn, in an order that is drawn anew for every cycle of turns."""
    if len(replicas) % 2 == 0:
        return replicas
    cycle, turn = divmod(round, len(replicas))
    idle = sorted(replicas, key=lambda peer: _ticket(f"{seed}|idle|{cycle}", peer))[turn]
    return tuple(peer for peer in replicas if peer != idle)


@lru_cache(maxsize=2**14)  # a thousand simulated peers are in several rounds at a time
def _ticket(salt: str, peer: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{salt}|{peer}".encode()).digest()[:8], "big")


@lru_cache(maxsize=64)
def _tickets(salt: str, peers: tuple[str, ...]) -> Tensor:
    """Return the tickets of many, in their order, as int64 (n); a whole simulated stage asks for the same."""
    return torch.tensor([_signed(_ticket(salt, peer)) for peer in peers], dtype=torch.int64)


def _signed(number: int) -> int:
    return number - 2**64 if number >> 63 else number


_FACTORS = (_signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53))
"""Of the last step of MurmurHash3 (public domain): every bit of a ticket moves every bit of a score."""


def _scores(some: Tensor, others: Tensor) -> Tensor:
    """Hash pairs of tickets, the same for both sides, to int64 whose order is the scores'; products are modulo 2^64.

    A cryptographic hash for each of twenty thousand pairs would cost far more.
    """
    mixed = some ^ others
    for factor in _FACTORS:
        mixed = (mixed ^ (mixed >> 33 & _LOW_31)) * factor
    return mixed ^ (mixed >> 33 & _LOW_31) ^ _SIGN


def preferences(me: str, replicas: Collection[str], seed: int, round: int) -> tuple[str, ...]:
    """Return the others in the order in which to ask them: first the greedy partner, if any, then in hash order."""
    everybody = tuple(sorted({me, *replicas}))
    tickets = _tickets(f"{seed}|match|{round}", everybody)
    mine = everybody.index(me)
    by_hash = torch.argsort(_scores(tickets, tickets[mine]), stable=True).tolist()
    order = tuple([everybody[place] for place in by_hash if place != mine])
    if len(order) >= GREEDY_AT_MOST:
        return order
    first = partners_of_round(everybody, seed, round).get(me)
    if first is None:
        return order
    return (first, *(peer for peer in order if peer != first))


def good_enough_at(place: int, count: int) -> float:
    """Return the share of the time to the next opening after which preference number `place`, from 0, will do."""
    return PICKY_SHARE * place / (count - 1) if place else 0.0


def heal(own_round: int, seen_rounds: Iterable[int], roster_rounds: Collection[int], bound: int) -> int:
    """Return the round to be in: the highest one seen or listed, at most `bound` beyond the roster's median.

    `roster_rounds` includes the own one. Never goes back.
    """
    highest = max((own_round, *seen_rounds, *roster_rounds))
    if highest == own_round:
        return own_round
    ceiling = (median_low(roster_rounds) if roster_rounds else own_round) + bound
    return max(own_round, min(highest, ceiling))


class PartnerView:
    """The other replicas of our stage as the roster has them, and our order of preference.

    An order costs a hash per replica, so it is computed anew only where the roster or the round is another one.
    `partners` returns the same tuple until the roster changes.
    """

    def __init__(self, me: str, seed: int, partners: Callable[[], tuple[Candidate, ...]]) -> None:
        self._me, self._seed, self.candidates = me, seed, partners
        self._known: tuple[Candidate, ...] = ()
        self._peers: tuple[str, ...] = ()
        self._order: tuple[str, ...] = ()
        self._order_of: tuple[tuple[str, ...], int] | None = None

    @property
    def peers(self) -> tuple[str, ...]:
        candidates = self.candidates()
        if candidates is not self._known:
            self._known, self._peers = candidates, tuple([candidate.peer for candidate in candidates])
        return self._peers

    def order(self, round: int) -> tuple[str, ...]:
        """Return them in the order in which we would meet them in this round."""
        peers = self.peers
        if self._order_of != (peers, round):
            self._order = preferences(self._me, peers, self._seed, round)
            self._order_of = (peers, round)
        return self._order


class _Alone(NamedTuple):
    """A peer by which we have lost much time is not asked until then; `declined`: nor are its proposals accepted."""

    until: float
    declined: bool


class PartnerQueue:
    """Decides which partner a replica asks next in an open round, when it asks each again, and whom it leaves alone.

    A peer that proposes has a round open itself. The queue remembers those that we declined until our next step, and
    asks them before peers that may have no round open. A peer by which we have lost much time is left alone for ten
    times as long, whatever rounds open meanwhile. The only partner (`peers`: all that there are) never is.
    """

    def __init__(self, patience: RoundTimeouts, rng: random.Random) -> None:
        self._patience, self._rng = patience, rng
        self._not_before: dict[str, float] = {}
        self._alone: dict[str, _Alone] = {}
        self._proposed: set[str] = set()
        self._vain_meetings: Counter[str] = Counter()
        """By partner, the meetings of this round that ended without a step of ours."""
        self._durations: deque[float] = deque(maxlen=USUAL_OF)
        """Seconds of the latest meetings that ended in a step of ours."""
        self._forgiven_s = -math.inf
        """No time before this is lost by a partner."""

    @property
    def put_off_count(self) -> int:
        """The number of partners that are asked later, or not at all."""
        return len(self._not_before)

    def left_alone_count(self, now: float) -> int:
        """Return how many partners are left alone, because we have lost much time by them."""
        return sum(alone.until > now for alone in self._alone.values())

    def clear(self, peers: Collection[str], now: float) -> None:
        """Let everybody be asked anew, as a round opens, but those that are left alone."""
        if len(peers) < 2:
            self.forgive(now)
        self._alone = {peer: alone for peer, alone in self._alone.items() if alone.until > now}
        self._not_before = {peer: alone.until for peer, alone in self._alone.items()}
        self._vain_meetings.clear()

    def forget_proposals(self) -> None:
        self._proposed.clear()

    def proposed(self, peer: str) -> None:
        """Remember a proposal that we declined: this peer waits for a partner."""
        self._proposed.add(peer)

    def next(self, order: Sequence[str], now: float) -> tuple[str | None, float]:
        """Return the peer to ask now, or None and how many seconds to wait at most."""
        # Once a round: otherwise a peer that proposes for ever would keep us from all others.
        proposed = self._proposed - self._not_before.keys()
        for peer in order if proposed else ():
            if peer in proposed:
                return peer, 0.0
        order = order[:ASKED_AT_MOST]
        for peer in order:
            if self._not_before.get(peer, now) <= now + SLACK_S:
                return peer, 0.0
        return None, min([self._patience.sleep_s, *(self._not_before[peer] - now for peer in order)])

    def declined(self, peer: str, declined: Decline, now: float) -> None:
        """Ask this peer again when it says, for which no bound is needed: once its round is open, it may ask us."""
        if declined.reason is DeclineReason.LEAVING:
            self._not_before[peer] = math.inf
        else:
            self.put_off(peer, declined.retry_after_s, now)

    def put_off(self, peer: str, seconds: float, now: float) -> None:
        """Ask this peer again only after so long and a jitter."""
        until = now + seconds + self._rng.uniform(0.5, 1.5) * self._patience.jitter_s
        self._not_before[peer] = max(until, self._alone[peer].until) if peer in self._alone else until

    def note_loss(
        self, peer: str, since: float, allowed_s: float, peers: Collection[str], now: float, *, in_meeting: bool
    ) -> None:
        """Put a peer off that has not answered our proposal since then; its own are accepted.

        `in_meeting`: it was a meeting that came to nothing. That counts against the peer's bound for this round, and
        only what it took beyond the usual time is lost. Lost is at most `allowed_s`, and no time that we were away.
        """
        lost_s = min(now - max(since, self._forgiven_s), allowed_s)
        if in_meeting:
            self._vain_meetings[peer] += 1
            lost_s -= median(self._durations) if self._durations else self._patience.sleep_s
        alone_s = TIMES_LOST * lost_s
        if alone_s > self._patience.sleep_s and _has_other(peer, peers):
            self.put_off(peer, alone_s, now)
            self._alone[peer] = _Alone(self._not_before[peer], in_meeting or self._held_us_up(peer, now))
        else:
            self.put_off(peer, self._patience.sleep_s, now)

    def met(self, peer: str, seconds: float) -> None:
        """Leave this peer alone no longer, as a meeting with it has ended in a step of ours."""
        self._durations.append(seconds)
        self._alone.pop(peer, None)

    def forgive(self, now: float) -> None:
        """Let no time until now count as lost by a partner, and leave nobody alone from the next opening on."""
        self._alone.clear()
        self._forgiven_s = now

    def declines(self, peer: str, peers: Collection[str], now: float) -> bool:
        """Say whether a peer has had enough meetings that came to nothing for us: in this round, or for some time."""
        return self._vain_meetings[peer] >= VAIN_AT_MOST or (self._held_us_up(peer, now) and _has_other(peer, peers))

    def _held_us_up(self, peer: str, now: float) -> bool:
        alone = self._alone.get(peer)
        return alone is not None and alone.declined and alone.until > now

    def nobody_left(self, peers: Iterable[str]) -> bool:
        """Say whether all of these have told us that they are leaving; true where there are none."""
        return all(self._not_before.get(peer) == math.inf for peer in peers)


def _has_other(peer: str, peers: Collection[str]) -> bool:
    return any(other != peer for other in peers)


class RoundClaims(NamedTuple):
    """The rounds that others say they have finished: all in the roster, and those `of_partners` that we have met."""

    listed: Sequence[int] = ()
    of_partners: Sequence[int] = ()


class RoundSchedule:
    """One replica's counters. `round`: the one opened last (0 before the first); `finished`: the last one finished.

    `steps`: inner steps from the last opening to the next. `unknown_s`: what counts for times before the first step has
    been measured.
    """

    def __init__(self, inner_steps_per_round: int, rounds: int, inner_steps: int, unknown_s: float) -> None:
        self.steps = self._next_steps = inner_steps_per_round
        self._unknown_s = unknown_s
        self._opened = False
        self._opened_at = inner_steps
        self._seconds_per_step: float | None = None
        self.inner_steps = inner_steps
        self.of_fastest = inner_steps_per_round  # inner steps that the fastest replica takes in a round now
        self.round = self.finished = rounds
        self.skipped_in_a_row = 0
        self.healed = 0
        self._last = False

    def tick(
        self, inner_steps: int, seconds_per_step: float, next_steps: int | None = None, of_fastest: int | None = None
    ) -> None:
        """Take note of the inner steps done, and of the seconds that one takes now.

        `next_steps`: inner steps that the next round to be opened will last; `of_fastest`: those of the fastest replica
        in a round. None leaves them as they are.
        """
        self.inner_steps, self._seconds_per_step = inner_steps, seconds_per_step
        self.of_fastest = of_fastest or self.of_fastest
        self._next_steps = next_steps or self._next_steps
        if not self._opened:
            self.steps = self._next_steps

    @property
    def due(self) -> bool:
        return self.inner_steps - self._opened_at >= self.steps

    @property
    def ready_in_s(self) -> float:
        """Estimate the seconds until the next opening."""
        if self._seconds_per_step is None:
            return self._unknown_s
        return max(1, self._opened_at + self.steps - self.inner_steps) * self._seconds_per_step

    def preference_delay_s(self, place: int, count: int) -> float:
        """Return for how long preference number `place` of `count` is not good enough; 0 if it is.

        A replica that skipped its last round, or will open no further one, is not picky.
        """
        if self._last or self.skipped_in_a_row:
            return 0.0
        steps = good_enough_at(place, count) * self.steps - (self.inner_steps - self._opened_at)
        return max(0.0, steps) * (self._unknown_s if self._seconds_per_step is None else self._seconds_per_step)

    def next_round(self, claims: RoundClaims) -> int:
        """Return the number that the next round has, after those that the others say are finished."""
        return max(self.round, 1 + heal(self.finished, claims.listed, (self._shown(claims),), LIFT_BOUND))

    def _shown(self, claims: RoundClaims) -> int:
        """Return the last round finished by our own evidence: ours, or the median of ours and our partners'."""
        return max(self.finished, median_low((self.finished, *claims.of_partners)))

    def open(self, claims: RoundClaims, *, last: bool = False) -> None:
        self._last = last
        following = self.next_round(claims)
        self.healed += following > max(self.round, self.finished + 1)
        self.round = following
        self._opened_at, self._opened = self.inner_steps, True
        self.steps = self._next_steps

    def adopt(self, seen_round: int, claims: RoundClaims) -> None:
        """Move up to a partner's number, within a bound on what the partners we have met claim."""
        healed = heal(self.round, (seen_round,), (1 + self._shown(claims),), LIFT_BOUND)
        self.healed += healed > self.round
        self.round = healed

    def skip(self) -> None:
        self.skipped_in_a_row += 1

    def finish(self, round: int) -> None:
        self.finished = round
        self.skipped_in_a_row = 0


def fastest(speed: float, others: Sequence[float]) -> float:
    """Return the highest speed that is believed in a stage: our own, a positive number, at least.

    `others`: what the others claim, in the same unit; what is not a positive, finite number is unknown.
    """
    known = [speed, *(claim for claim in others if _is_speed(claim))]
    return max(speed, min(max(known), LARGEST_MULTIPLE * median_low(known)))


def dynamic_steps(speed: float, others: Sequence[float], steps: int) -> int:
    """Return how many of the `steps` of the fastest replica one of this `speed` takes: from 1 to `steps`.

    `others`: the speeds that the stage's other replicas claim. A speed of our own that is unknown leaves all `steps`.
    """
    if not _is_speed(speed):
        return steps
    # The ratio first: no product of two large speeds, and exactly 1 between equals.
    share = min(1.0, speed / fastest(speed, others) * (1.0 + TOLERANCE))
    return max(1, math.floor(share * steps))


def steps_per_round(progress: float, early: int, late: int | None) -> int:
    """Return H at this progress of the run: `early` at 0, `late` at 1, a geometric course between, whole numbers.

    `progress` outside 0 to 1 counts as the nearer end. `late` None: constant.
    """
    if late is None:
        return early
    # Rounded to whole steps, both ends are exact: a power of 0 and of 1 is.
    course = round(early * math.pow(late / early, min(1.0, max(0.0, progress))))
    return min(max(course, min(early, late)), max(early, late))


def steps_of_fastest(settings: OuterConfig, progress: float) -> int:
    """Return the inner steps that the fastest replica takes in a round at this progress of the run."""
    return steps_per_round(progress, settings.inner_steps_per_round, settings.late_inner_steps_per_round)


def local_step_count(settings: OuterConfig, going: RoundProgress, others: Sequence[float]) -> int:
    """Return the inner steps from this replica's next round to the one after, as the run's settings have it."""
    steps = steps_of_fastest(settings, going.progress)
    return dynamic_steps(going.speed, others, steps) if settings.dynamic_steps else steps


def _is_speed(claim: float) -> bool:
    return math.isfinite(claim) and claim > 0.0
