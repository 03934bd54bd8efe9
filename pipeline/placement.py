"""Decides which stage a newcomer serves, and who moves when several newcomers chose alike.

A newcomer takes the stage with the fewest replicas: the swarm runs at the speed of its weakest stage. Ties are broken
by chance, with a generator salted by the peer, not by the lowest number: newcomers that start together (a demo, a
cluster job) see the same empty roster, and would all claim stage 0.

Chance still makes some of them choose alike. So each announces its claim, reads the roster again and asks `yields`. All
compute the same plan from the same records: as long as one stage has two replicas more than another, the newcomer with
the largest peer id in the fullest stage moves to the emptiest. Only as many move as are needed, so the plan does not
swing; and where rosters differ for a moment, the next reading repairs it. A settled replica never moves: it holds
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

SAME_MOMENT_S = 60.0


class Claim(NamedTuple):
    """One live record of the roster. `claimed_at`: Unix time. `settled`: it serves, or its owner chose the stage."""

    peer: str
    stage: int
    claimed_at: float
    settled: bool


def choose_stage(replicas: Sequence[int], want: int | None, rng: Random) -> int:
    """Return the stage wanted, or else one with the fewest live replicas, by chance among equals.

    Raises ValueError when the run has no such stage.
    """
    if want is None:
        fewest = min(replicas)
        return rng.choice([stage for stage, count in enumerate(replicas) if count == fewest])
    if not 0 <= want < len(replicas):
        raise ValueError(f"stage {want} is not there: the run has stages 0 to {len(replicas) - 1}")
    return want


def yields(me: str, claims: Sequence[Claim], stages: int) -> int | None:
    """Return the stage that this newcomer should move to; None when it stays where it is.

    `claims`: all live records, ours among them. A claim that is a minute older than the newest counts as settled.
    """
    counts = [sum(claim.stage == stage for claim in claims) for stage in range(stages)]
    newest = max((claim.claimed_at for claim in claims), default=0.0)
    newcomers = sorted(
        (claim for claim in claims if not claim.settled and newest - claim.claimed_at <= SAME_MOMENT_S), reverse=True
    )
    plan = {claim.peer: claim.stage for claim in newcomers if 0 <= claim.stage < stages}
    if me not in plan:
        return None
    claimed = plan[me]
    while (move := _improvement(plan, counts)) is not None:
        peer, stage = move
        counts[plan[peer]] -= 1
        counts[stage] += 1
        plan[peer] = stage
    return None if plan[me] == claimed else plan[me]


def _improvement(plan: dict[str, int], counts: Sequence[int]) -> tuple[str, int] | None:
    """Return who moves where to make stages more equal; `plan` is in the order in which newcomers yield."""
    emptiest = min(range(len(counts)), key=counts.__getitem__)
    best = max(plan, key=lambda peer: counts[plan[peer]])
    return (best, emptiest) if counts[plan[best]] - counts[emptiest] >= 2 else None
