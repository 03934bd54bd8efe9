"""How much each of two replicas counts in the mean of a meeting: alike, or by the inner steps that each brings.

With dynamic steps a fast replica comes to a meeting with eleven inner steps since its weights last met anybody's, a
slow one with two. Their plain mean halves what the fast one did; weighed by the work behind them, with n and k steps,

    mean = (n x + k y) / (n + k)

each inner step counts alike, as in the mean over a swarm that weighs replicas by their tokens. The number of steps is a
claim. A liar gains what `MOST` allows and no more: nobody counts more than that many times what its partner counts.

Both sides compute the same mean to the bit: the two shares follow from the same numbers, and which of them is one's own
changes nothing but the order of a sum of two.
"""

from __future__ import annotations

from typing import NamedTuple

MOST = 4.0
"""How many times its partner's share a replica's share may be."""


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
