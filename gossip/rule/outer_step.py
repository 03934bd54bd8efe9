"""The outer rule: whose weights count in a meeting, how much, and how a replica's slow weights then move.

With fast weights theta, slow weights phi, outer momentum m, and the mean over the two of a pair (NoLoCo, arXiv
2506.10911, equations 1 to 3, but for the sign of the beta term, a misprint there):

    u = beta (mean(phi) - mean(theta)) + gamma (phi - mean(phi))
    m <- alpha m + u;    phi <- phi - m;    theta <- phi

The first term is the mean pseudo-gradient, the second pulls the pair together. With gamma = beta the partner's slow
weights cancel, and only fast weights travel. The replica trains on while it waits for a partner, so theta <- phi
becomes a correction: new slow weights minus the snapshot that was exchanged, added to the fast weights as they are by
then.

**Delayed momentum.** The momentum may move once in a period of N own outer steps instead. With a spread c in [0, 1/N],
and Delta, what a period gathers, zero at its start:

    every step of the period:         Delta <- Delta + u
    k-th step of the period, k < N:   phi <- phi - u - c alpha m
    N-th step:                        phi <- phi - u - (1 - (N - 1) c) alpha m;   m <- alpha m + Delta;   Delta <- 0

**Staleness.** `last_met` is the round in which weights last met anybody's: 0 for the run's first ones. A copy, a
checkpoint and adopted weights keep it. In a meeting each side says its round and its last_met; then for both

    clock     = min(round, partner's round)
    staleness = max(0, clock - last_met)            1 where a side has met in the round before
    last_met <- max(last_met, clock)                afterwards

The clock is the *lower* number, so that no claim makes others stale. A replica beyond the bound on staleness
contributes nothing and adopts its partner's weights; two that are both beyond it meet as usual. So does a replica that
has disowned its weights, because their loss is far above everybody's, until it has adopted a partner's.

**Shares.** With dynamic steps a fast replica comes to a meeting with eleven inner steps, a slow one with two. The mean
(n x + k y) / (n + k) counts each of the n and k inner steps alike. The number of steps is a claim, so no side counts
more than `MOST` times the other. Both sides compute the same mean to the bit.

All tensors are float32 on the CPU, one per parameter in the stage's order. Each value moves by itself, so the rule may
be applied a piece at a time. docs/design/outer-rule.md has the reasons.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.rule.stability import MOST

Tensors = tuple[Tensor, ...]

DISOWNED = -1  # the last meeting of weights that their own replica has found to be worth nothing
ROUND_BOUND = 4  # rounds that replicas of a stage may honestly be apart
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


class Outer(NamedTuple):
    """The coefficients of the outer rule."""

    alpha: float
    """Decay of the momentum, in [0, 1)."""
    beta: float
    """Step size on the mean pseudo-gradient."""
    gamma: float
    """Pull towards the mean of the pair's slow weights; the stable range is above."""


class Delay(NamedTuple):
    """How the momentum is delayed."""

    period: int = 1
    """N, outer steps in a period, at least 1."""
    spread: float = 0.0
    """c, the share of the momentum that each step but the last of a period applies: in [0, 1/N]."""


UNDELAYED = Delay()


class OuterState(NamedTuple):
    """Slow weights and outer momentum, alike in shapes. The momentum has the sign of the pseudo-gradient.

    `momentum` is empty where the rule has none (alpha = 0). Of the running momentum period: what its meetings have
    `gathered` for the momentum (empty before the first of them, so always where the period is 1), and how many
    `meetings` it has had.
    """

    slow: Tensors
    momentum: Tensors = ()
    gathered: Tensors = ()
    meetings: int = 0


def mean_into(out: Tensor, own: Tensor, theirs: Tensor, shares: Shares) -> Tensor:
    """Write the mean of two tensors; `out` may be one of them."""
    if shares == EVEN:
        return torch.add(own, theirs, out=out).mul_(0.5)
    # Two products and a sum, each rounded: fused, a side would round its partner's part and not its own.
    return torch.add(torch.mul(own, shares.own), torch.mul(theirs, shares.theirs), out=out)


def move(
    state: OuterState, fast_mean: Tensors, slow_mean: Tensors | None, outer: Outer, delay: Delay = UNDELAYED
) -> OuterState:
    """Apply the outer rule once, in the memory of the state; the means are used up, and may become what is gathered.

    `slow_mean` is needed only where gamma differs from beta; None otherwise. Raises ValueError where it is missing.
    """
    if slow_mean is None and outer.gamma != outer.beta:
        raise ValueError("gamma differs from beta: the mean of the slow weights is needed")
    last = state.meetings + 1 >= delay.period
    share = outer.alpha * (1.0 - (delay.period - 1) * delay.spread if last else delay.spread)
    gathered = []
    for number, (phi, theta) in enumerate(zip(state.slow, fast_mean, strict=True)):
        u = _contribution(phi, theta, None if slow_mean is None else slow_mean[number], outer)
        if not state.momentum:
            phi.sub_(u)
            continue
        m = state.momentum[number]
        phi.sub_(torch.mul(m, share).add_(u) if share else u)
        total = state.gathered[number].add_(u) if state.gathered else u
        if last:
            m.mul_(outer.alpha).add_(total)
        else:
            gathered.append(total)
    meetings = 0 if last or not state.momentum else state.meetings + 1
    return OuterState(state.slow, state.momentum, tuple(gathered), meetings)


def _contribution(phi: Tensor, theta: Tensor, slow: Tensor | None, outer: Outer) -> Tensor:
    """Return u, in the memory of the mean `theta` of the fast weights; that of the `slow` ones is used up."""
    torch.sub(phi if slow is None else slow, theta, out=theta)
    if outer.beta != 1.0:
        theta.mul_(outer.beta)
    if slow is not None:
        theta.add_(torch.sub(phi, slow, out=slow), alpha=outer.gamma)
    return theta
