"""What each side of a meeting counts: stale weights count for nothing, others alike or by the inner steps behind them.

**Staleness.** A replica remembers the number of the round in which its weights last met anybody's (`last_met`): 0 for
the run's first weights. A copy, a checkpoint and adopted weights keep the number. A stage has round numbers in common,
because they heal (`matching.heal`); a count of one's own rounds would make a slow replica look stale beside a fast one.

In a meeting each side says its round, healed from offer and answer, and its last_met; then for both

    clock     = min(round, partner's round)
    staleness = max(0, clock - last_met)            1 where a side has met in the round before
    last_met <- max(last_met, clock)                afterwards

Two that met each other last are equally stale, whatever either has done since, so neither ever adopts the other's
weights. A replica that has met nobody yet is as stale as can be, so nobody adopts the run's first weights from it.

The clock is the *lower* number, so that no claim makes others stale: a partner's huge number counts as our own, which
has healed from it by a bound; a low one makes both sides fresh; a huge last_met counts as the clock. A liar counts like
anybody, or not at all. In return, where two rounds are far apart, the lower side seems fresher than it is until it has
caught up.

Within a bound on staleness a contribution enters the mean. A replica beyond it contributes nothing and adopts its
partner's weights; two that are both beyond it meet as usual. A replica that has disowned its weights, because their
loss is far above everybody's, contributes nothing until it has adopted a partner's.

**Shares.** With dynamic steps a fast replica comes to a meeting with eleven inner steps, a slow one with two. The plain
mean halves what the fast one did; (n x + k y) / (n + k) counts each of the n and k inner steps alike. The number of
steps is a claim, so nobody counts more than `MOST` times its partner. Both sides compute the same mean to the bit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from gossip.rule.stability import MOST

DISOWNED = -1
"""The last meeting of weights that their own replica has found to be worth nothing."""
ROUND_BOUND = 4
"""Rounds that replicas of a stage may honestly be apart."""
LIFT_BOUND = 1
"""Rounds that claims alone may lift a replica by at an opening: what one that meets nobody falls behind by."""


class WeightAge(NamedTuple):
    """What one side says of itself: the round that it is in, and the one in which its weights last met anybody's.

    `last_met`: 0 if in none, DISOWNED where the replica says that its weights count for nothing.
    """

    round: int
    last_met: int


class WhoseWeights(StrEnum):
    """The replicas whose weights count in a meeting."""

    BOTH = "both"
    MINE = "mine"
    THEIRS = "theirs"


def clock(own: WeightAge, other: WeightAge) -> int:
    """Return the number of the round in which the two meet, the same on both sides."""
    return min(own.round, other.round)


def staleness(side: WeightAge, clock: int) -> int:
    """Return for how many rounds the weights of one side have met nobody's."""
    return max(0, clock - side.last_met)


def whose_weights_count(own: WeightAge, other: WeightAge, at_most: int) -> WhoseWeights:
    """Tell whose weights count, from what the two sides say and the bound on staleness in rounds.

    Mirrored between the two sides: where one says MINE, the other says THEIRS.
    """
    now = clock(own, other)
    own_late, other_late = (staleness(side, now) > at_most for side in (own, other))
    if DISOWNED in (own.last_met, other.last_met):
        own_late, other_late = (side.last_met == DISOWNED for side in (own, other))
    if own_late == other_late:
        return WhoseWeights.BOTH
    return WhoseWeights.THEIRS if own_late else WhoseWeights.MINE


def last_met_after(own: WeightAge, other: WeightAge, *, adopted: bool) -> int:
    """Return the number of the last meeting that our weights have after this one; adopted ones are as stale as theirs.

    Never above our own round.
    """
    now = clock(own, other)
    return min(other.last_met, now) if adopted else max(own.last_met, now)


class Shares(NamedTuple):
    """What two sides count in their mean; they add up to 1."""

    own: float
    theirs: float


EVEN = Shares(0.5, 0.5)


def shares_by_steps(own: int, theirs: int) -> Shares:
    """Return the shares of two sides that bring so many inner steps; none counts as one."""
    mine, other = max(1, own), max(1, theirs)
    if mine == other:
        return EVEN
    mine_bounded, other_bounded = min(mine, MOST * other), min(other, MOST * mine)
    total = mine_bounded + other_bounded
    return Shares(mine_bounded / total, other_bounded / total)
