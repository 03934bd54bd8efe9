"""The outer rule: how a replica's slow weights move when it has met a partner, or nobody; and how weights are adopted.

With fast weights theta, slow weights phi, outer momentum m, and the mean taken over the two replicas of a pair, weighed
where the run says so (`shares`):

    u = beta (mean(phi) - mean(theta)) + gamma (phi - mean(phi))
    m <- alpha m + u;    phi <- phi - m;    theta <- phi

The first term is the mean pseudo-gradient g = phi - theta, the second one pulls the pair together (NoLoCo, arXiv
2506.10911, equations 1 to 3; the printed equation has the opposite sign on the beta term, a misprint: it would undo the
inner progress). It is heavy-ball momentum, without the look-ahead of torch's `nesterov=True`, as in the reference.

With gamma = beta the slow weights of the partner cancel: u = beta (phi - mean(theta)). Then only fast weights travel,
half the bytes.

Among many replicas that pair at random, their disagreement contracts exactly for 0 < gamma < 2 (1 - alpha^2). The paper
prints another range, which admits diverging choices (alpha 0.9, gamma 0.7).

The replica trains on while it waits for a partner, so theta <- phi becomes a correction: new slow weights minus the
snapshot that was exchanged, added to whatever the fast weights are by then.

**Delayed momentum.** The momentum may move once in a period of N outer steps instead. With a spread c in [0, 1/N], and
Delta, what a period gathers, zero at its start:

    every step of the period:         Delta <- Delta + u
    k-th step of the period, k < N:   phi <- phi - u - c alpha m
    N-th step:                        phi <- phi - u - (1 - (N - 1) c) alpha m;   m <- alpha m + Delta;   Delta <- 0

Gradient and pull act at once; what is delayed is the momentum, so that contributions that arrive one by one are not
each amplified by all that came before (Asynchronous Local-SGD, arXiv 2401.09135, algorithm 3, for a server). N counts
this replica's own outer steps, in pairs and solo; the two of a pair need not be in the same place of their periods.
The server divides each contribution by N, as N of them are parallel work on one stretch. Here the pair's mean has
averaged the parallel work, and N steps in a row hold work done in a row: nothing is divided. What a period moves in
total is its last m, whatever c; with N = 1 it is the rule above to the bit.

All tensors are float32 on the CPU, one per parameter in the stage's order. Each value moves by itself, so the rule may
be applied a piece at a time. `move` writes into the state that it is given; nothing else here writes into an argument.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossip.rule.shares import EVEN, Shares

Tensors = tuple[Tensor, ...]


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


class Stepped(NamedTuple):
    """What an outer step yields: the new state, and what to add to the fast weights (new slow minus snapshot)."""

    state: OuterState
    correction: Tensors


def pseudo_gradient(slow: Tensors, fast: Tensors) -> Tensors:
    """Return slow minus fast: what the inner steps did, in the sign of a gradient."""
    return tuple(torch.sub(phi, theta) for phi, theta in zip(slow, fast, strict=True))


def mean(own: Tensors, theirs: Tensors, shares: Shares = EVEN) -> Tensors:
    """Return the mean of two sets of weights, to the bit the same on both sides."""
    return tuple(mean_into(torch.empty_like(x), x, y, shares) for x, y in zip(own, theirs, strict=True))


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
        phi.sub_(torch.add(u, m, alpha=share) if share else u)
        total = state.gathered[number].add_(u) if state.gathered else u
        if last:
            torch.add(total, m, alpha=outer.alpha, out=m)
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


def outer_step(
    state: OuterState, fast_mean: Tensors, slow_mean: Tensors | None, outer: Outer, delay: Delay = UNDELAYED
) -> OuterState:
    """Do what `move` does, in new tensors."""
    slow, momentum, gathered = map(_copied, state[:3])
    means = _copied(fast_mean), None if slow_mean is None else _copied(slow_mean)
    return move(OuterState(slow, momentum, gathered, state.meetings), *means, outer, delay)


def _copied(tensors: Tensors) -> Tensors:
    return tuple([tensor.clone() for tensor in tensors])


def step_pair(
    state: OuterState,
    own: Tensors,
    other: Tensors,
    other_slow: Tensors | None,
    outer: Outer,
    delay: Delay = UNDELAYED,
    shares: Shares = EVEN,
) -> Stepped:
    """Step after a meeting: `own` and `other` are the snapshots of fast weights, `other_slow` the partner's slow ones.

    A replica does the same in place, of weights that are still coded: `gossip.rounds.outer_optimiser`.
    """
    slow_mean = None if other_slow is None else mean(state.slow, other_slow, shares)
    after = outer_step(state, mean(own, other, shares), slow_mean, outer, delay)
    return Stepped(after, pseudo_gradient(after.slow, own))


def step_alone(state: OuterState, own: Tensors, outer: Outer, delay: Delay = UNDELAYED) -> Stepped:
    """Step without a partner: the means are over one, which is heavy-ball SGD on one's own pseudo-gradient."""
    after = outer_step(state, own, state.slow, outer, delay)
    return Stepped(after, pseudo_gradient(after.slow, own))
