"""Decides which stage a newcomer serves, and when a replica leaves its stage for another that needs it.

The swarm runs at the speed of its weakest stage. A stage's capacity is the sum over its replicas of one over the device
seconds of a microbatch. `work` says what a microbatch costs at each stage, in any unit, so a speed measured at one
stage holds for all. An unknown speed counts as the median, and none as more than eight times that, or less than an
eighth.

A newcomer takes the weakest stage that fits its memory, announces it, reads the roster again and asks `should_yield`.
All newcomers compute the same plan from the same records: as long as one can go to a weaker stage and leave its own
stronger than that one was, the newcomer that gains most goes. Each move makes the sorted capacities larger, so the plan
ends.

Later a replica may move to the weakest stage (`movers`). For each willing replica every peer computes the capacities
of the stage that it would leave and of the weakest one with it; the best mover makes the smaller of the two largest. A
hash of seed and peer decides among movers within a tenth of the best, so all peers name the same one.

Of a large stage only a sample of its records is known: each stands for several, and capacities are estimates.

A move costs a copy of the weights, and records are noisy and late. So the stage that is left must stay clearly
stronger, several readings in a row must agree, and the time that a replica stays doubles with each of its moves. Movers
go one at a time: each announces its move in its record, waits until all must have read it, and heeds earlier
announcements for a bounded time (`decide`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from random import Random
from statistics import fmean, median
from types import MappingProxyType
from typing import NamedTuple

SAME_MOMENT_S = 60.0
MOST_AHEAD_S = 300.0  # a newcomer's claim may be later than ours by so much: clocks differ by minutes
MOST_NEWCOMERS = 256
"""Newcomers in a plan; the others stay. Strangers may claim to be any number, and each costs all peers time."""
EQUAL_WITHIN = 1.05  # capacities whose ratio is at most this count as equal
MOST_BELIEVED = 8.0  # times the median that a peer is believed to be faster, or slower
_LEAST_GAIN = 1e-9


class StageClaim(NamedTuple):
    """One live record of the roster.

    `claimed_at`: Unix time. `settled`: it serves, or its owner chose the stage. `device_s`: that a microbatch takes it
    at its stage, as it says; 0 where that is not known. `may_serve`: stages that it would go to; None is any.
    `moves_to`: the stage that it is about to move to. `training`: it works. `stands_for`: how many replicas of its
    stage it stands for, where records are a sample.
    """

    peer: str
    stage: int
    claimed_at: float = 0.0
    settled: bool = True
    device_s: float = 0.0
    may_serve: Collection[int] | None = None
    moves_to: int | None = None
    training: bool = True
    stands_for: float = 1.0

    def serves(self, stage: int) -> bool:
        """Say whether it would go to a stage."""
        return self.may_serve is None or stage in self.may_serve


def powers(claims: Sequence[StageClaim], work: Sequence[float]) -> dict[str, float]:
    """Return the speed of each peer, as far as it is believed, with those it stands for, in work a second anywhere."""
    said = {
        claim.peer: work[claim.stage] / claim.device_s
        for claim in claims
        if 0.0 < claim.device_s < math.inf and 0 <= claim.stage < len(work)
    }
    known = {peer: power for peer, power in said.items() if 0.0 < power < math.inf}
    typical = median(known.values()) if known else fmean(work)
    return {
        claim.peer: min(max(known.get(claim.peer, typical), typical / MOST_BELIEVED), typical * MOST_BELIEVED)
        * claim.stands_for
        for claim in claims
    }


def capacities(
    claims: Sequence[StageClaim], work: Sequence[float], power: Mapping[str, float] | None = None
) -> list[float]:
    """Return the microbatches that each stage can do in a second, all its replicas together.

    `power`: `powers` of the same claims, where it is there already.
    """
    power = powers(claims, work) if power is None else power
    found = [0.0] * len(work)
    # In an order of their own, so that all sum up to the same last digit.
    for claim in sorted(claims, key=lambda claim: (claim.peer, claim.stage)):
        if 0 <= claim.stage < len(work):
            found[claim.stage] += power[claim.peer] / work[claim.stage]
    return found


def parse_stage(want: int, stages: int) -> int:
    """Return the stage that an owner asked for; raise ValueError if the run has no such stage."""
    if not 0 <= want < stages:
        raise ValueError(f"stage {want} is not there: the run has stages 0 to {stages - 1}")
    return want


def stages_that_fit(needs: Sequence[int], free: int | None, stages: int) -> tuple[int, ...]:
    """Return the stages that fit into `free` bytes of memory; none where none does.

    `needs`: bytes of each stage. All fit as long as either is unknown: () or None.
    """
    return tuple(stage for stage in range(stages) if free is None or not needs or needs[stage] <= free)


def choose_stage(capacity: Sequence[float], fits: Collection[int], rng: Random, before: int | None = None) -> int:
    """Return the stage of `fits` that limits the swarm, by chance among equals.

    `before`: the stage that the peer served in an earlier session; of equals it takes that one. Raises ValueError for
    an empty `fits`.
    """
    weakest = min(capacity[stage] for stage in fits)
    equals = [stage for stage in sorted(fits) if capacity[stage] <= EQUAL_WITHIN * weakest]
    return before if before in equals else rng.choice(equals)


def reason(stage: int, capacity: Sequence[float], ours: float) -> str:
    """Say in one sentence why a newcomer takes a stage. `ours`: microbatches a second that it adds."""
    here, with_us = capacity[stage], capacity[stage] + ours
    others = [each for number, each in enumerate(capacity) if number != stage]
    if not others:
        return f"stage 0 is the whole model: {here:.3g} microbatches/s; with us {with_us:.3g}"
    rest = min(others)
    if here == 0.0:
        return f"stage {stage} has nobody; with us {with_us:.3g} microbatches/s"
    if here <= rest / EQUAL_WITHIN:
        return f"stage {stage} limits the swarm: {here:.3g} of {rest:.3g} microbatches/s; with us {with_us:.3g}"
    if here <= rest * EQUAL_WITHIN:
        return f"no stage is weaker than stage {stage}: {here:.3g} microbatches/s; with us {with_us:.3g}"
    weaker = f"stage {capacity.index(rest)}, which is weaker ({rest:.3g})"
    return f"stage {stage} does {here:.3g} microbatches/s, with us {with_us:.3g}; we cannot serve {weaker}"


def should_yield(me: str, claims: Sequence[StageClaim], work: Sequence[float]) -> int | None:
    """Return the stage that this newcomer should move to; None when it stays where it is.

    `claims`: all live records, ours among them. A claim that is a minute older than the newest counts as settled, and
    so does one that is later than ours by more than clocks differ: it shall not make all others old.
    """
    latest = max((claim.claimed_at + MOST_AHEAD_S for claim in claims if claim.peer == me), default=math.inf)
    newest = max((claim.claimed_at for claim in claims if claim.claimed_at <= latest), default=0.0)
    newcomers = {
        claim.peer: claim
        for claim in sorted(claims, key=lambda claim: claim.peer)
        if not claim.settled and newest - SAME_MOMENT_S <= claim.claimed_at <= latest and 0 <= claim.stage < len(work)
    }
    plan = {peer: claim.stage for peer, claim in islice(newcomers.items(), MOST_NEWCOMERS)}
    if me not in plan:
        return None
    power = powers(claims, work)
    capacity = capacities(claims, work, power)
    # Each move is an improvement for good, so this ends; the bound guards against rounding.
    for _ in range(len(plan) * len(work)):
        move = _improvement(plan, newcomers, capacity, power, work)
        if move is None:
            break
        peer, stage = move
        capacity[plan[peer]] -= power[peer] / work[plan[peer]]
        capacity[stage] += power[peer] / work[stage]
        plan[peer] = stage
    return None if plan[me] == newcomers[me].stage else plan[me]


def _improvement(
    plan: Mapping[str, int],
    newcomers: Mapping[str, StageClaim],
    capacity: Sequence[float],
    power: Mapping[str, float],
    work: Sequence[float],
) -> tuple[str, int] | None:
    """Return the newcomer that moves, and its stage: the weakest stage that a newcomer can help."""
    for target in sorted(range(len(work)), key=capacity.__getitem__):
        best: tuple[float, str] | None = None
        for peer, stage in plan.items():
            left = capacity[stage] - power[peer] / work[stage]
            if stage != target and left > capacity[target] * (1.0 + _LEAST_GAIN) and newcomers[peer].serves(target):
                candidate = (min(left, capacity[target] + power[peer] / work[target]), peer)
                best = candidate if best is None else max(best, candidate)
        if best is not None:
            return best[1], target
    return None


GAP_REPLICAS = 0.5
GAP_SHARE = 0.1  # the gap that a move must leave, in replicas and as a share of the starving stage
ERRORS = 3.0  # standard errors of the difference that it must leave too, where capacities are estimates
AS_GOOD = 0.9  # a move of this share of the best one's worth is as good
READINGS = 3  # in a row that find the same stage starving
DOUBLINGS = 6  # of the stay, at most
MOST_READINGS = 12  # readings for which a peer heeds another's announcement, or waits for the first in order
MOST_KEPT = 2 * MOST_READINGS
"""Readings in which all announcements together may keep us, while no peer helps the starving stage."""
NOT_IN_THE_LAST = 0.05  # the last share of a run, in which no peer moves: the copy would not pay


class StagePace(NamedTuple):
    """How slowly decisions are made, in seconds.

    `look_s`: between two readings. `settle_s`: from an announcement until all must have read it. `delay_s`: within
    which each draws a moment of its own. `stay_s`: at a stage before the first move. `empty_s`: for which a stage
    without any replica is left to those who come back.
    """

    look_s: float = 30.0
    settle_s: float = 30.0
    delay_s: float = 30.0
    stay_s: float = 600.0
    empty_s: float = 600.0

    @classmethod
    def of(cls, refresh_s: float) -> StagePace:
        """Return what goes with records that are made and read every `refresh_s`."""
        return cls(3 * refresh_s, 3 * refresh_s, 3 * refresh_s, 60 * refresh_s, 60 * refresh_s)


class Move(NamedTuple):
    """A peer's move from one stage to another; `before`, `after`: microbatches a second of the starving stage.

    In a move to its own stage the peer begins there again, with other weights.
    """

    peer: str
    origin: int
    target: int
    before: float
    after: float

    def __str__(self) -> str:
        starving = f"stage {self.target} " + ("has nobody" if self.before == 0.0 else f"does {self.before:.3g}")
        return f"{starving}, with us {self.after:.3g} microbatches/s, and stage {self.origin} can spare us"


class OwnPlacement(NamedTuple):
    """The peer that decides: its id, the seed of the run, and since when it serves its stage (seconds, any clock)."""

    peer: str
    seed: int
    came_s: float
    moves: int = 0


class MigrationState(NamedTuple):
    """A replica's memory from one reading to the next; never changed, only replaced.

    `starving`: the stage that the last `readings` in a row found so, since `since_s`. `ready_s`: the moment of our own.
    `announced_s`: since when our record says that we go. `heard`: for how many readings others have announced.
    `kept`: readings in which they have kept us, since the starving stage did `kept_at` microbatches a second.
    """

    starving: int | None = None
    readings: int = 0
    since_s: float = 0.0
    ready_s: float = 0.0
    announced_s: float | None = None
    heard: Mapping[str, int] = MappingProxyType({})
    kept: int = 0
    kept_at: float = 0.0


class MigrationDecision(NamedTuple):
    """The decision after a reading. `announce`: our record shall name its target. `go`: leave now."""

    state: MigrationState
    move: Move | None = None
    go: bool = False

    @property
    def announce(self) -> int | None:
        """The stage that our record shall say we go to."""
        return self.move.target if self.move is not None and self.state.announced_s is not None else None


def stay_s(moves: int, pace: StagePace) -> float:
    """Return how long a peer stays at its stage after so many moves."""
    return pace.stay_s * 2.0 ** min(moves, DOUBLINGS)


def may_move(me: OwnPlacement, pace: StagePace, now_s: float, progress: float) -> bool:
    """Say whether we may go at all: we have stayed long enough, and the run is not about to end."""
    return now_s - me.came_s >= stay_s(me.moves, pace) and progress < 1.0 - NOT_IN_THE_LAST


def movers(claims: Sequence[StageClaim], work: Sequence[float], seed: int) -> list[Move]:
    """Return the moves to the weakest stage that are worth it, the one that should go first at the front.

    `claims`: all live records; `may_serve` says where each is willing to go. `work`: of a microbatch at each stage.
    """
    power = powers(claims, work)
    capacity = capacities(claims, work, power)
    target = min(range(len(work)), key=capacity.__getitem__)
    staying = [0] * len(work)
    variance = [0.0] * len(work)  # of the capacity, where it is estimated from a sample
    for claim in claims:
        if 0 <= claim.stage < len(work):
            variance[claim.stage] += (power[claim.peer] / work[claim.stage]) ** 2 * (1.0 - 1.0 / claim.stands_for)
        if claim.training and claim.moves_to is None and 0 <= claim.stage < len(work):
            staying[claim.stage] += 1
    found: list[tuple[float, float, Move]] = []
    for claim in claims:
        origin, willing = claim.stage, claim.training and claim.may_serve is not None and target in claim.may_serve
        if not willing or origin == target or not 0 <= origin < len(work):
            continue
        brought = power[claim.peer] / work[target]
        left, joined = capacity[origin] - power[claim.peer] / work[origin], capacity[target] + brought
        chance = ERRORS * math.sqrt(variance[origin] + variance[target])
        gap = max(GAP_REPLICAS * brought, GAP_SHARE * capacity[target], chance)
        if staying[origin] - (claim.moves_to is None) >= 1 and left >= capacity[target] + gap:
            move = Move(claim.peer, origin, target, capacity[target], joined)
            found.append((min(left, joined), left, move))
    least = AS_GOOD * max((worth for worth, _, _ in found), default=0.0)
    good = [(left, move) for worth, left, move in found if worth >= least]
    spare = AS_GOOD * max((left for left, _ in good), default=0.0)
    return sorted([move for left, move in good if left >= spare], key=lambda move: _order(seed, move.peer))


def decide(
    me: OwnPlacement,
    state: MigrationState,
    claims: Sequence[StageClaim],
    work: Sequence[float],
    pace: StagePace,
    now_s: float,
    proved: Collection[str],
) -> MigrationDecision:
    """Judge one reading of all stages: stay, announce to go, or go.

    `proved`: peers of our stage that have brought weights to us; we do not leave it to names alone.
    """
    others = [claim for claim in claims if claim.moves_to is not None and claim.peer != me.peer]
    heard = {claim.peer: state.heard.get(claim.peer, 0) + 1 for claim in others}
    found = movers(claims, work, me.seed)
    if not found:
        return MigrationDecision(MigrationState(heard=heard))
    state = _after_reading(me, state._replace(heard=heard), found[0], pace, now_s)
    stays = state._replace(announced_s=None)
    move = _own_move(me, state, found)
    early = state.readings < READINGS or now_s < state.ready_s
    left_to_returning = found[0].before == 0.0 and now_s - state.since_s < pace.empty_s
    if move is None or early or left_to_returning or not _is_held(move.origin, claims, proved):
        return MigrationDecision(stays)
    if _gives_way(me, state, move, others):
        return MigrationDecision(stays._replace(kept=state.kept + 1))
    if state.announced_s is None:
        return MigrationDecision(state._replace(announced_s=now_s), move)
    return MigrationDecision(state, move, go=now_s - state.announced_s >= pace.settle_s)


def _after_reading(
    me: OwnPlacement, state: MigrationState, first: Move, pace: StagePace, now_s: float
) -> MigrationState:
    """Return what is remembered after one more reading, by which `first` should go."""
    if first.target != state.starving:
        state = MigrationState(first.target, since_s=now_s, heard=state.heard)
    state = state._replace(readings=state.readings + 1)
    if first.before > state.kept_at * (1.0 + GAP_SHARE):
        # Somebody has come, so that announcements are kept.
        state = state._replace(kept=0, kept_at=first.before)
    if state.readings == READINGS:
        rng = Random(f"{me.seed}|moving|{me.peer}|{me.moves}|{state.starving}")
        state = state._replace(ready_s=now_s + rng.uniform(0.0, pace.delay_s))
    return state


def _own_move(me: OwnPlacement, state: MigrationState, found: Sequence[Move]) -> Move | None:
    """Return our move, if it is our turn by the order of `found`.

    A peer that has announced its move goes on, even if another would be first now. A peer that could have gone for long
    and has not keeps no other.
    """
    candidates = found if state.announced_s is not None else found[: 1 + state.readings // MOST_READINGS]
    return next((each for each in candidates if each.peer == me.peer), None)


def _is_held(stage: int, claims: Sequence[StageClaim], proved: Collection[str]) -> bool:
    """Say whether a peer of `proved` stays at a stage."""
    return any(
        claim.stage == stage and claim.training and claim.moves_to is None and claim.peer in proved for claim in claims
    )


def _gives_way(me: OwnPlacement, state: MigrationState, move: Move, others: Sequence[StageClaim]) -> bool:
    """Say whether an announcement of `others` keeps us: any before we made ours, then an earlier one by the hash."""
    if state.kept >= MOST_KEPT:
        return False
    rivals = [
        claim.peer
        for claim in others
        if (claim.moves_to == move.target or claim.stage == move.origin) and state.heard[claim.peer] <= MOST_READINGS
    ]
    if state.announced_s is None:
        return bool(rivals)
    return any(_order(me.seed, rival) < _order(me.seed, me.peer) for rival in rivals)


def _order(seed: int, peer: str) -> tuple[bytes, str]:
    return blake2b(f"{seed}|moving|{peer}".encode(), digest_size=8).digest(), peer
