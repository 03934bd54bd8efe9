"""The joint rule: the outer rule of `outer_step` with a momentum that moves once a period; and how weights are adopted.

With alpha, beta, gamma and the means as there, a period of N outer steps, a spread c in [0, 1/N], and Delta, what a
period gathers, zero at its start:

    u = beta (mean(phi) - mean(theta)) + gamma (phi - mean(phi));   Delta <- Delta + u
    k-th step of the period, k < N:   phi <- phi - u - c alpha m
    N-th step:                        phi <- phi - u - (1 - (N - 1) c) alpha m;   m <- alpha m + Delta;   Delta <- 0

Gradient and pull act at once; what is delayed is the momentum, so that contributions that arrive one by one are not
each amplified by all that came before (Asynchronous Local-SGD, arXiv 2401.09135, algorithm 3, for a server). N counts
this replica's own outer steps, in pairs and solo; the two of a pair need not be in the same place of their periods.

The server divides each contribution by N, as N of them are parallel work on one stretch. Here the pair's mean has
averaged the parallel work, and N steps in a row hold work done in a row: nothing is divided.

What a period moves in total is its last m, whatever c; with N = 1 it is the outer rule to the bit.

Who is too stale to contribute goes on from its partner's weights (`staleness`).

All tensors are float32 on the CPU, one per parameter in the stage's order. Nothing here writes into its arguments, but
a result may hold tensors of an argument (a momentum that did not move, weights that were adopted): tensors of a state
are never written into.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from gossip.rule.outer_step import (
    Outer,
    OuterState,
    Stepped,
    Tensors,
    contributions,
    pseudo_gradient,
    with_partner,
    without_partner,
)


class Delay(NamedTuple):
    """How the momentum is delayed."""

    period: int = 1
    """N, outer steps in a period, at least 1."""
    spread: float = 0.0
    """c, the share of the momentum that each step but the last of a period applies: in [0, 1/N]."""


def outer_step(
    state: OuterState, fast_mean: Tensors, slow_mean: Tensors | None, outer: Outer, delay: Delay
) -> OuterState:
    """Apply the joint rule once.

    `slow_mean` is needed only where gamma differs from beta; None otherwise. Raises ValueError where it is missing.
    """
    last = state.meetings + 1 >= delay.period
    share = outer.alpha * (1.0 - (delay.period - 1) * delay.spread if last else delay.spread)
    added = contributions(state.slow, fast_mean, slow_mean, outer)
    before = state.gathered or (None,) * len(state.slow)
    slow, momentum, gathered = [], [], []
    for phi, m, u, earlier in zip(state.slow, state.momentum, added, before, strict=True):
        slow.append(torch.sub(phi, torch.add(u, m, alpha=share) if share else u))
        total = u if earlier is None else torch.add(earlier, u)
        if last:
            momentum.append(total.add_(m, alpha=outer.alpha))
        else:
            momentum.append(m)
            gathered.append(total)
    return OuterState(tuple(slow), tuple(momentum), tuple(gathered), 0 if last else state.meetings + 1)


def step_pair(
    state: OuterState, own: Tensors, other: Tensors, other_slow: Tensors | None, outer: Outer, delay: Delay
) -> Stepped:
    """Apply the joint rule after a meeting; the arguments as in `outer_step.with_partner`."""
    return with_partner(partial(outer_step, outer=outer, delay=delay), state, own, other, other_slow)


def step_alone(state: OuterState, own: Tensors, outer: Outer, delay: Delay) -> Stepped:
    """Apply the joint rule without a partner: its means are over one."""
    return without_partner(partial(outer_step, outer=outer, delay=delay), state, own)


def adopt(state: OuterState, own: Tensors, theirs: Tensors) -> Stepped:
    """Take the partner's weights for our slow ones; `own` is the snapshot.

    The momentum starts at zero and its period afresh: both spoke of weights that are left behind.
    """
    still = tuple([torch.zeros_like(m) for m in state.momentum])
    return Stepped(OuterState(theirs, still), pseudo_gradient(theirs, own))
