"""How stale a replica's weights are, and whose weights count in a meeting.

A replica remembers the number of the round in which its weights last met anybody's (`last_met`): 0 for the run's first
weights. A copy, a checkpoint, and whoever adopts weights take the number over with them. Rounds that one counts for
oneself would not do: of two unequal speeds the fast one counts twenty to one of the slow, and would throw its own work
away because the other is slow. The numbers of rounds are what a stage has in common: they heal (`matching.heal`).

In a meeting each side says its round, healed from offer and answer, and its last_met; then for both

    clock     = min(round, partner's round)
    staleness = max(0, clock - last_met)            1 for somebody who has met in the round before
    last_met <- max(last_met, clock)                afterwards

Two that met each other last are equally stale, whatever either has done since: neither ever adopts the other's
weights. Somebody who has met nobody yet is as stale as can be, so nobody adopts the run's first weights from it.

The *lower* number, because no claim may make others stale. A partner's huge number counts as our own, which has healed
from it by a bound; a low one makes both sides fresh; a huge last_met counts as the clock. So whoever lies contributes
like anybody, or not at all. The price is paid where healing is bounded: far apart in numbers, the lower one is taken
for fresher than it is until it has caught up.

Within a bound a late contribution enters the mean like any other. Beyond it a replica's weights come from another time,
and half of them would be a blow to its partner: it contributes nothing, and goes on from the partner's weights. Two
that are both beyond have no better partner, and meet as usual.

A replica that has disowned its weights, because their loss is far above everybody's, contributes nothing in any round,
until it has adopted a partner's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

DISOWNED = -1
"""The last meeting of weights that their own replica has found to be worth nothing."""


class Met(NamedTuple):
    """What one side says of itself: the round that it is in, and the one in which its weights last met anybody's.

    `last_met`: 0 if in none, DISOWNED where the replica says that its weights count for nothing.
    """

    round: int
    last_met: int


class ContributionWeights(StrEnum):
    """Whose weights count in a meeting."""

    BOTH = "both"
    MINE = "mine"
    THEIRS = "theirs"


def clock(own: Met, other: Met) -> int:
    """Return the number of the round in which the two meet, the same on both sides."""
    return min(own.round, other.round)


def staleness(side: Met, clock: int) -> int:
    """Return for how many rounds the weights of one side have met nobody's."""
    return max(0, clock - side.last_met)


def contribution_weights(own: Met, other: Met, at_most: int) -> ContributionWeights:
    """Tell whose weights count, from what the two sides say and the bound on staleness in rounds.

    Mirrored between the two sides: where one says MINE, the other says THEIRS.
    """
    now = clock(own, other)
    own_late, other_late = (staleness(side, now) > at_most for side in (own, other))
    if DISOWNED in (own.last_met, other.last_met):
        own_late, other_late = (side.last_met == DISOWNED for side in (own, other))
    if own_late == other_late:
        return ContributionWeights.BOTH
    return ContributionWeights.THEIRS if own_late else ContributionWeights.MINE


def last_met_after(own: Met, other: Met, *, adopted: bool) -> int:
    """Return the number of the last meeting that our weights have after this one; adopted ones are as stale as theirs.

    Never above our own round.
    """
    now = clock(own, other)
    return min(other.last_met, now) if adopted else max(own.last_met, now)


ROUND_BOUND = 4
"""Rounds that replicas of a stage may honestly be apart."""
LIFT_BOUND = 1
"""Rounds that claims alone may lift a replica by at an opening: what one that meets nobody falls behind by."""
