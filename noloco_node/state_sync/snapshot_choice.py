"""Which snapshots to believe."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from statistics import median_high, median_low
from typing import NamedTuple

from gossip.exchange.messages import Manifest
from gossip.rule.shares import ROUND_BOUND
from gossip.transfer.donor_checks import OUTLYING_PROGRESS
from noloco_node.run.peer_state import AT_WORK, PeerState
from noloco_node.state_sync.replica_mean import ReplicaSummary
from noloco_node.swarm.roster import Roster

MOST_ASKED = 256
"""Of those at work, and a quarter as many of those who are on their way to it."""
AGAIN_S = 10.0
"""Before everybody is asked again."""
ATTEMPTS = 30
"""Where somebody has a snapshot, or may have."""
ATTEMPTS_IN_VAIN = 2
NORM_FACTOR = 4.0
"""By which the norm of a snapshot may differ from the median of three or more: they are of different rounds."""
LEAST_FOR_MEDIAN = 3
"""Offers from which a norm is compared with their median."""
MOST_TIMES = 64
"""As many rounds as the furthest of the other stages may a stage have made: it had the fewer replicas."""


class RunReach(NamedTuple):
    """How far the run is, by its stages at work."""

    round: int
    progress: float

    def allows(self, of: ReplicaSummary | Manifest) -> bool:
        """Say whether a snapshot of another stage may be so far."""
        most = MOST_TIMES * (self.round + ROUND_BOUND)
        return 0 <= of.round <= most and of.progress <= self.progress + OUTLYING_PROGRESS


def donors(own_round: int | None, offers: Sequence[ReplicaSummary], run: RunReach) -> tuple[str, ...]:
    """Return the peers whose snapshot to ask for, the newest first; none where our own checkpoint is as good.

    `own_round`: of our checkpoint of the stage, None without one.
    """
    believed = [offer for offer in offers if run.allows(offer)]
    if len(believed) >= LEAST_FOR_MEDIAN:
        norm = median_low(offer.norm for offer in believed)
        believed = [offer for offer in believed if norm / NORM_FACTOR <= offer.norm <= norm * NORM_FACTOR]
    if own_round is not None:
        believed = [offer for offer in believed if offer.round > own_round + ROUND_BOUND]
    return tuple(offer.peer for offer in sorted(believed, key=lambda offer: -offer.round))


def verify_snapshot(
    offers: Sequence[ReplicaSummary], run: RunReach
) -> Callable[[str, Manifest], Awaitable[str | None]]:
    """Return what refuses whoever gives another snapshot than the one for which `donors` chose it."""
    norms = {offer.peer: offer.norm for offer in offers}

    async def objection(peer: str, manifest: Manifest) -> str | None:
        if not run.allows(manifest):
            return f"its snapshot is of round {manifest.round} and progress {manifest.progress:.2f}, the run at {run}"
        if not norms[peer] / NORM_FACTOR <= manifest.norm <= norms[peer] * NORM_FACTOR:
            return f"its snapshot has the norm {manifest.norm:.4g}, and had {norms[peer]:.4g} a moment ago"
        return None

    return objection


def reached(roster: Roster) -> RunReach:
    """Return how far the stage is that is furthest, by the medians of its replicas at work.

    Newcomers say round 0, and there may be many of them: they count where nobody else is left.
    """
    at_work = [[record for record in records if record.state in AT_WORK] for records in roster.stages]
    stages = [records for records in (at_work if any(at_work) else roster.stages) if records]
    return RunReach(
        max((median_high([record.round for record in records]) for records in stages), default=0),
        max((median_high([record.progress for record in records]) for records in stages), default=0.0),
    )


def asked_of(roster: Roster, me: str, rng: Random) -> list[str]:
    """Return the peers that are asked for a snapshot: whoever works, or has left a stage and not yet arrived."""
    found: list[str] = []
    for states, most in ((AT_WORK, MOST_ASKED), ((PeerState.CATCHING_UP,), MOST_ASKED // 4)):
        records = [record for records in roster.stages for record in records if record.state in states]
        peers = sorted({record.peer for record in records} - {me, *found})
        found += rng.sample(peers, min(most, len(peers)))
    return found


def asks_again(promised: bool, saved: bool, attempt: int) -> bool:
    """Say whether to ask everybody again after this attempt, from 0.

    Where somebody has a snapshot, or is busy giving another one, for some minutes: a stage is at stake. Where nobody
    has, once more if the run's first weights are all that is left, for an answer may have been lost.
    """
    if promised:
        return attempt + 1 < ATTEMPTS
    return not saved and attempt + 1 < ATTEMPTS_IN_VAIN
