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

`delayed_momentum` is the same rule with a momentum that moves once a period; the two share `contributions`, and how a
step meets a partner or none.

All tensors are float32 on the CPU, one per parameter in the stage's order. Nothing here writes into its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class Outer(NamedTuple):
    """The coefficients of the outer rule."""

    alpha: float
    """Decay of the momentum, in [0, 1)."""
    beta: float
    """Step size on the mean pseudo-gradient."""
    gamma: float
    """Pull towards the mean of the pair's slow weights; the stable range is above."""


class OuterState(NamedTuple):
    """Slow weights and outer momentum, alike in shapes. The momentum has the sign of the pseudo-gradient.

    Of the running momentum period of `delayed_momentum`: what its meetings have `gathered` for the momentum (empty
    before the first of them, so always where the period is 1), and how many `meetings` it has had.
    """

    slow: Tensors
    momentum: Tensors
    gathered: Tensors = ()
    meetings: int = 0


class Stepped(NamedTuple):
    """What an outer step yields: the new state, and what to add to the fast weights (new slow minus snapshot)."""

    state: OuterState
    correction: Tensors


def init(slow: Tensors) -> OuterState:
    """Return the state before the first outer step: these slow weights, which are not copied, and no momentum."""
    return OuterState(slow, tuple([torch.zeros_like(phi) for phi in slow]))


Step = Callable[[OuterState, Tensors, Tensors | None], OuterState]
"""A rule with its coefficients bound: (state, mean of fast weights, mean of slow ones or None) -> the state after."""


def pseudo_gradient(slow: Tensors, fast: Tensors) -> Tensors:
    """Return slow minus fast: what the inner steps did, in the sign of a gradient."""
    return tuple(torch.sub(phi, theta) for phi, theta in zip(slow, fast, strict=True))


def mean(a: Tensors, b: Tensors) -> Tensors:
    """Return the mean of two sets of weights, to the bit the same whichever comes first."""
    return tuple(torch.add(x, y).mul_(0.5) for x, y in zip(a, b, strict=True))


def contributions(slow: Tensors, fast_mean: Tensors, slow_mean: Tensors | None, outer: Outer) -> Iterator[Tensor]:
    """Yield, parameter by parameter, what a meeting adds to the momentum: the mean pseudo-gradient and the pull.

    `slow_mean` is needed only where gamma differs from beta; None otherwise. Raises ValueError where it is missing.
    The tensors yielded are new.
    """
    if slow_mean is None and outer.gamma != outer.beta:
        raise ValueError("gamma differs from beta: the mean of the slow weights is needed")
    for number, (phi, theta) in enumerate(zip(slow, fast_mean, strict=True)):
        if slow_mean is None:
            yield torch.sub(phi, theta).mul_(outer.beta)
        else:
            moved = torch.sub(slow_mean[number], theta).mul_(outer.beta)
            yield moved.add_(torch.sub(phi, slow_mean[number]), alpha=outer.gamma)


def outer_step(state: OuterState, fast_mean: Tensors, slow_mean: Tensors | None, outer: Outer) -> OuterState:
    """Apply the outer rule once; `slow_mean` as in `contributions`."""
    added = contributions(state.slow, fast_mean, slow_mean, outer)
    momentum = tuple(moved.add_(m, alpha=outer.alpha) for moved, m in zip(added, state.momentum, strict=True))
    slow = tuple(torch.sub(phi, m) for phi, m in zip(state.slow, momentum, strict=True))
    return OuterState(slow, momentum)


def with_partner(step: Step, state: OuterState, own: Tensors, other: Tensors, other_slow: Tensors | None) -> Stepped:
    """Step after a meeting: `own` and `other` are the snapshots of fast weights, `other_slow` the partner's slow ones.

    Works parameter by parameter, so that the means never exist as a whole.
    """
    parts: list[OuterState] = []
    for number, (mine, theirs) in enumerate(zip(own, other, strict=True)):
        part = OuterState(
            (state.slow[number],), (state.momentum[number],), state.gathered[number : number + 1], state.meetings
        )
        slow_mean = None if other_slow is None else mean(part.slow, (other_slow[number],))
        parts.append(step(part, mean((mine,), (theirs,)), slow_mean))
    after = OuterState(
        tuple([part.slow[0] for part in parts]),
        tuple([part.momentum[0] for part in parts]),
        tuple([tensor for part in parts for tensor in part.gathered]),
        max([part.meetings for part in parts], default=0),
    )
    return Stepped(after, pseudo_gradient(after.slow, own))


def without_partner(step: Step, state: OuterState, own: Tensors) -> Stepped:
    """Step without a partner: the means are over one."""
    after = step(state, own, state.slow)
    return Stepped(after, pseudo_gradient(after.slow, own))


def step_pair(state: OuterState, own: Tensors, other: Tensors, other_slow: Tensors | None, outer: Outer) -> Stepped:
    """Apply the outer rule after a meeting."""
    return with_partner(partial(outer_step, outer=outer), state, own, other, other_slow)


def step_alone(state: OuterState, own: Tensors, outer: Outer) -> Stepped:
    """Apply the outer rule without a partner, which is heavy-ball SGD on one's own pseudo-gradient."""
    return without_partner(partial(outer_step, outer=outer), state, own)
