"""Who meets whom: a hint that everybody computes alike, and an answer that decides at once.

**The hint.** All pairs of a stage's replicas are ordered by a hash of (seed, round, pair) and taken greedily: whoever
sees the same roster sees the same pairs, with no message, and a roster that differs by one replica changes few of them
(rendezvous hashing applied to pairs). Of an odd number one sits out, each in turn: left to chance, one of three may be
idle in seven rounds of ten. Beyond `GREEDY_AT_MOST` replicas the quadratic list costs more than it saves:
there each follows its own preferences. One's own preferences are the same hashes. The hash of a pair is the same for
both, so preferences cannot form a cycle (a likes b best, who likes c best, who likes a best): some pair always agrees.

**How long to hope.** Waiting costs nothing, training goes on; but whoever meets just anybody that happens to be open
meets, among replicas of equal speed, the same one for ever: openings keep their distance in time, and the swarm falls
apart into fixed pairs (simulated: 4 or 8 replicas in random phases, each with one single partner in 60 rounds). So a
young round is picky. At its opening only the first preference will do, and the others become good enough one by one,
all by `PICKY_SHARE` of the time to the next opening. Replicas in step find their greedy partner at once all the same.

**The answer.** `answer` is a pure function of what the asked is doing, and comes at once: nobody holds anybody while
asking somebody else, so there is no cycle of waiting. The asked does not care for the other's round number. When two
offers cross, the offer of the lower peer id goes first: its owner declines the other's, and the other accepts although
it is still waiting for an answer (which will be that very refusal).

**The number of the round** is only a seed for the hint, and heals: the lower side adopts the higher, but never more
than a bound beyond the roster's median, so that one liar's number drags nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median_low

import torch
from torch import Tensor

from gossip.exchange.messages import Accepted, Declined, DeclineReason, Offer

GREEDY_AT_MOST = 200
"""Replicas of a stage up to which the whole greedy matching is computed (19 900 pairs)."""
PICKY_SHARE = 0.5
"""Share of the time between two openings after which anybody will do."""
_LOW_31 = 2**31 - 1
"""What a shift of 64 bits by 33 leaves; tensors are signed, and shift copies of the sign into the rest."""
_SIGN = -(2**63)
SOON_S = 0.25
"""When to ask again somebody who is only waiting for an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerState:
    """What a replica is doing at the moment of an offer.

    `round`: the round that it opened last, 0 before the first. `asking`: whose answer it waits for. `had`: whether the
    sender has had meetings enough with us in this round of which nothing came for us.
    `preference_delay_s`: for how long the sender is still not good enough, 0 if it is. `ready_in_s`: estimate of the
    time to the next opening.
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


def answer(state: AnswerState, sender: str, offer: Offer) -> Accepted | Declined:
    """Decide at once whether to meet `sender`."""
    if state.leaving:
        return _declined(state, DeclineReason.LEAVING, state.ready_in_s)
    if state.engaged:
        return _declined(state, DeclineReason.ENGAGED, state.ready_in_s)
    if not state.open:
        done = offer.round <= state.round
        return _declined(state, DeclineReason.MET if done else DeclineReason.NOT_OPEN, state.ready_in_s)
    if state.had:
        # Once a round: otherwise somebody could have our weights sent again and again.
        return _declined(state, DeclineReason.MET, state.ready_in_s)
    if state.asking == sender:
        # We have just offered the same ourselves.
        if sender < state.me:
            return Accepted(round=state.round)
        return _declined(state, DeclineReason.YIELD, SOON_S)
    if state.preference_delay_s > 0.0:
        return _declined(state, DeclineReason.HOPING, state.preference_delay_s)
    if state.asking is not None:
        return _declined(state, DeclineReason.ASKING, SOON_S)
    return Accepted(round=state.round)


def _declined(state: AnswerState, reason: DeclineReason, retry_after_s: float) -> Declined:
    return Declined(reason=reason, retry_after_s=retry_after_s, round=state.round)


def partners_of_round(replicas: Collection[str], seed: int, round: int) -> Mapping[str, str]:
    """Return the greedy matching of one round, both directions of every pair; it leaves out at most one replica."""
    return _greedy(tuple(sorted(set(replicas))), seed, round)


@lru_cache(maxsize=32)
def _greedy(replicas: tuple[str, ...], seed: int, round: int) -> Mapping[str, str]:
    paired = _without_idle(replicas, seed, round)
    tickets = _tickets(f"{seed}|match|{round}", paired)
    low, high = torch.triu_indices(len(paired), len(paired), offset=1)
    order = torch.argsort(_scores(tickets[low], tickets[high]), stable=True)
    partner: dict[str, str] = {}
    for one, other in zip(low[order].tolist(), high[order].tolist(), strict=True):
        if paired[one] not in partner and paired[other] not in partner:
            partner[paired[one]], partner[paired[other]] = paired[other], paired[one]
            if len(partner) == len(paired):
                break
    return partner


def _without_idle(replicas: tuple[str, ...], seed: int, round: int) -> tuple[str, ...]:
    """Leave out one of an odd number: each in turn, in an order that is drawn anew for every cycle of turns."""
    if len(replicas) % 2 == 0:
        return replicas
    cycle, turn = divmod(round, len(replicas))
    idle = sorted(replicas, key=lambda peer: _ticket(f"{seed}|idle|{cycle}", peer))[turn]
    return tuple(peer for peer in replicas if peer != idle)


@lru_cache(maxsize=2**12)
def _ticket(salt: str, peer: str) -> int:
    """Draw a replica's 64-bit number for one purpose."""
    return int.from_bytes(hashlib.sha256(f"{salt}|{peer}".encode()).digest()[:8], "big")


@lru_cache(maxsize=64)
def _tickets(salt: str, peers: tuple[str, ...]) -> Tensor:
    """Return the tickets of many, in their order, as int64 (n); a whole simulated stage asks for the same."""
    return torch.tensor([_signed(_ticket(salt, peer)) for peer in peers], dtype=torch.int64)


def _signed(number: int) -> int:
    """Return the int64 with the bits of an unsigned number of 64."""
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
