"""Decides which stage a newcomer serves, and who moves when several newcomers chose alike.

The swarm runs at the speed of its weakest stage: its capacity is the sum over its replicas of one over the device
seconds that each takes for a microbatch. So a newcomer takes the weakest stage among those that fit its memory. Stages
as strong as that, within a twentieth, count as equal, and chance decides among them with a generator salted by the
peer: newcomers that start together (a demo, a cluster job) see the same roster, and would all claim stage 0.

Stages cost differently: the first looks tokens up, the last multiplies with the vocabulary. `work` says what a
microbatch costs at each, in any unit. It follows from the run file, so all peers know the same numbers, and a peer that
was measured at one stage is known at all of them. What strangers say of themselves is read with care: a speed that is
not known counts as the median of all, and none as more than eight times it or less than an eighth.

Chance still makes some newcomers choose alike. So each announces its claim, reads the roster again and asks
`should_yield`. All compute the same plan from the same records: as long as a newcomer can go to a weaker stage and
leave its own behind stronger than that one was, the one who gains most goes (of equals the largest peer id). Each such
move makes the sorted capacities strictly larger, read from the weakest on, so the plan ends; only as many move as are
needed, so it does not swing; and where rosters differ for a moment, the next reading repairs it. A settled replica
never moves by this rule: it holds weights (`pipeline.migration`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from random import Random
from statistics import fmean, median
from typing import NamedTuple

SAME_MOMENT_S = 60.0
MOST_AHEAD_S = 300.0
"""By which a claim may be later than our own and still count as one of a newcomer: clocks differ by minutes."""
MOST_NEWCOMERS = 256
"""That a plan is made for; the rest stay. Strangers may claim to be any number, and each costs everybody time."""
EQUAL_WITHIN = 1.05
"""Capacities whose ratio is at most this count as equal."""
MOST_BELIEVED = 8.0
"""Times the median that a peer is believed to be faster, or slower."""
_LEAST_GAIN = 1e-9


class StageClaim(NamedTuple):
    """One live record of the roster.

    `claimed_at`: Unix time. `settled`: it serves, or its owner chose the stage. `device_s`: that a microbatch takes it
    at its stage, as it says; 0 where that is not known. `may_serve`: stages that it would go to; None is any.
    `moves_to`: the stage that it is about to move to. `training`: it works.
    """

    peer: str
    stage: int
    claimed_at: float = 0.0
    settled: bool = True
    device_s: float = 0.0
    may_serve: Collection[int] | None = None
    moves_to: int | None = None
    training: bool = True

    def serves(self, stage: int) -> bool:
        """Say whether it would go to a stage."""
        return self.may_serve is None or stage in self.may_serve


def powers(claims: Sequence[StageClaim], work: Sequence[float]) -> dict[str, float]:
    """Return the work that each peer does in a second, as far as it is believed: its speed, whatever the stage."""
    said = {
        claim.peer: work[claim.stage] / claim.device_s
        for claim in claims
        if 0.0 < claim.device_s < math.inf and 0 <= claim.stage < len(work)
    }
    known = {peer: power for peer, power in said.items() if 0.0 < power < math.inf}
    typical = median(known.values()) if known else fmean(work)
    return {
        claim.peer: min(max(known.get(claim.peer, typical), typical / MOST_BELIEVED), typical * MOST_BELIEVED)
        for claim in claims
    }


def capacities(claims: Sequence[StageClaim], work: Sequence[float]) -> list[float]:
    """Return the microbatches that each stage can do in a second, all its replicas together."""
    power = powers(claims, work)
    found = [0.0] * len(work)
    # In an order of their own, so that all sum up to the same last digit.
    for claim in sorted(claims, key=lambda claim: (claim.peer, claim.stage)):
        if 0 <= claim.stage < len(work):
            found[claim.stage] += power[claim.peer] / work[claim.stage]
    return found


def parse_stage(want: int, stages: int) -> int:
    """Return the stage that an owner asked for; raise ValueError when the run has no such stage."""
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

    `before`: the stage that the peer served in an earlier life; of equals it takes that one. Raises ValueError for an
    empty `fits`.
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
    capacity, power = capacities(claims, work), powers(claims, work)
    # Each move is an improvement for good, so this ends; the bound is for arithmetic that nobody foresaw.
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
    """Return who moves where to make a weak stage stronger, the weakest that anybody can help first."""
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
