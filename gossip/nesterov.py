"""The outer rule: how a replica's slow weights move when it has met a partner, or nobody.

With fast weights theta, slow weights phi, outer momentum m, and the mean taken over the two replicas of a pair:

    m <- alpha m + beta (mean(phi) - mean(theta)) + gamma (phi - mean(phi));    phi <- phi - m;    theta <- phi

The middle term is the mean pseudo-gradient g = phi - theta, the last one pulls the pair together (NoLoCo, arXiv
2506.10911, equations 1 to 3; the printed equation has the opposite sign on the beta term, a misprint: it would undo the
inner progress). It is heavy-ball momentum, without the look-ahead of torch's `nesterov=True`, as in the reference.

With gamma = beta the slow weights of the partner cancel: m <- alpha m + beta (phi - mean(theta)). Then only fast
weights travel, half the bytes.

Among many replicas that pair at random, their disagreement contracts exactly for 0 < gamma < 2 (1 - alpha^2). The paper
prints another range, which admits diverging choices (alpha 0.9, gamma 0.7).

The replica trains on while it waits for a partner, so theta <- phi becomes a correction: new slow weights minus the
snapshot that was exchanged, added to whatever the fast weights are by then.

All tensors are float32 on the CPU, one per parameter in the stage's order. Nothing here writes into its arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class Outer(NamedTuple):
    """Momentum, step size on the mean pseudo-gradient, and pull towards the partner's slow weights."""

    alpha: float
    beta: float
    gamma: float


class OuterState(NamedTuple):
    """Slow weights and outer momentum, alike in shapes. The momentum has the sign of the pseudo-gradient."""

    slow: Tensors
    momentum: Tensors


class Stepped(NamedTuple):
    """What an outer step yields: the new state, and what to add to the fast weights (new slow minus snapshot)."""

    state: OuterState
    correction: Tensors


def pseudo_gradient(slow: Tensors, fast: Tensors) -> Tensors:
    """Return slow minus fast: what the inner steps did, in the sign of a gradient."""
    return tuple(torch.sub(phi, theta) for phi, theta in zip(slow, fast, strict=True))


def mean(a: Tensors, b: Tensors) -> Tensors:
    """Return the mean of two sets of weights, to the bit the same whichever comes first."""
    return tuple(torch.add(x, y).mul_(0.5) for x, y in zip(a, b, strict=True))


def outer_step(state: OuterState, fast_mean: Tensors, slow_mean: Tensors | None, outer: Outer) -> OuterState:
    """Apply the outer rule once.

    `slow_mean` is needed only where gamma differs from beta; None otherwise. Raises ValueError where it is missing.
    """
    if slow_mean is None and outer.gamma != outer.beta:
        raise ValueError("gamma differs from beta: the mean of the slow weights is needed")
    momentum = []
    for number, (phi, m, theta) in enumerate(zip(state.slow, state.momentum, fast_mean, strict=True)):
        if slow_mean is None:
            moved = torch.sub(phi, theta).mul_(outer.beta)
        else:
            moved = torch.sub(slow_mean[number], theta).mul_(outer.beta)
            moved.add_(torch.sub(phi, slow_mean[number]), alpha=outer.gamma)
        momentum.append(moved.add_(m, alpha=outer.alpha))
    slow = tuple(torch.sub(phi, m) for phi, m in zip(state.slow, momentum, strict=True))
    return OuterState(slow, tuple(momentum))


def step_pair(state: OuterState, own: Tensors, other: Tensors, other_slow: Tensors | None, outer: Outer) -> Stepped:
    """Step after a meeting: `own` and `other` are the snapshots of fast weights, `other_slow` the partner's slow ones.

    Works parameter by parameter, so that the means never exist as a whole.
    """
    slow, momentum, correction = [], [], []
    for number, (mine, theirs) in enumerate(zip(own, other, strict=True)):
        part = OuterState((state.slow[number],), (state.momentum[number],))
        slow_mean = None if other_slow is None else mean(part.slow, (other_slow[number],))
        after = outer_step(part, mean((mine,), (theirs,)), slow_mean, outer)
        slow.append(after.slow[0])
        momentum.append(after.momentum[0])
        correction.append(torch.sub(after.slow[0], mine))
    return Stepped(OuterState(tuple(slow), tuple(momentum)), tuple(correction))


def step_alone(state: OuterState, own: Tensors, outer: Outer) -> Stepped:
    """Step without a partner: the rule with a mean over one, which is heavy-ball SGD on one's own pseudo-gradient."""
    after = outer_step(state, own, state.slow, outer)
    return Stepped(after, tuple(torch.sub(phi, theta) for phi, theta in zip(after.slow, own, strict=True)))
