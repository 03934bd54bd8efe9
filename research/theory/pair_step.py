"""An outer step of whole sets of weights, in new tensors: what a replica does in place and in pieces.

Studies step by it, and tests hold `gossip.rounds.outer_optimiser` to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gossip.rule.outer_step import EVEN, UNDELAYED, Delay, Outer, OuterState, Shares, Tensors, mean_into, move


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
    """Step after a meeting: `own` and `other` are snapshots of fast weights, `other_slow` the partner's slow ones."""
    slow_mean = None if other_slow is None else mean(state.slow, other_slow, shares)
    after = outer_step(state, mean(own, other, shares), slow_mean, outer, delay)
    return Stepped(after, pseudo_gradient(after.slow, own))


def step_alone(state: OuterState, own: Tensors, outer: Outer, delay: Delay = UNDELAYED) -> Stepped:
    """Step without a partner: the means are over one, which is heavy-ball SGD on one's own pseudo-gradient."""
    after = outer_step(state, own, state.slow, outer, delay)
    return Stepped(after, pseudo_gradient(after.slow, own))
