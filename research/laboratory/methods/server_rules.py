"""How a central server turns pseudo-gradients into new weights: the baselines that gossip is measured against.

A pseudo-gradient has the field's sign, g = what a worker started from minus what it arrived at. With outer momentum m,
decay mu and rate eps, the two rules that apply one g at once are

    Nesterov (look-ahead)   m <- mu m + g;   theta <- theta - eps (mu m + g)      m in the last term is the new one
    heavy ball              m <- mu m + g;   theta <- theta - eps m

the first being equation 4 of Asynchronous Local-SGD (arXiv 2401.09135) and DiLoCo's rule, the second what NoLoCo
(arXiv 2506.10911) compares itself with. Around them:

**Synchronous**: all workers arrive, and the rule is applied to their mean.

**Naive asynchronous**: the rule is applied to each g as it arrives; there is no function for that. Each arrival is
amplified by those before it. k equal ones move theta, in units of eps, by the sum over j < k of

    g (1 + mu (1 + mu + ... + mu^j)) + mu^(j+2) m

which for four at mu = 0.9 is 12.14 g + 2.79 m, where one synchronous step moves 1.9 g + 0.81 m.

**Buffered** (FedBuff): the rule is applied to the mean of every N arrivals, and nothing moves in between.

**Delayed Nesterov** (algorithm 3 of 2401.09135), with a spread c in [0, 1/N]: the gradient acts at every arrival, the
momentum once in N.

    Delta <- Delta + g
    N-th arrival:   m <- mu m + Delta / N;   theta <- theta - eps ((1 - c N + c) mu m + g / N);   Delta <- 0
    other ones:     theta <- theta - eps (c mu m + g / N)

N equal workers and c = 0 make one cycle of either of the last two equal to one synchronous Nesterov step.

A pseudo-gradient that is s server's steps late (its *staleness*) may be worth less (the same paper, section 4.2):

    Poly                                 g <- g (1 + s)^(-1/2)
    PolyThres                            the same, and those of s > 10 are dropped
    delay compensation, of strength c    g <- g + c g g (theta - what the worker started from), by value

Tensors are float32, one per parameter; nothing here writes into its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gossip.rule.outer_step import Delay, Tensors


class Server(NamedTuple):
    """Rate eps and decay mu of the outer momentum."""

    rate: float
    momentum: float


class ServerState(NamedTuple):
    """The server's weights and outer momentum; of the running cycle, the sum of what arrived and the number of it."""

    weights: Tensors
    momentum: Tensors
    gathered: Tensors = ()
    arrivals: int = 0


Rule = Callable[[ServerState, Tensors, Server], ServerState]
STALENESS_AT_MOST = 10
"""Of a pseudo-gradient that PolyThres takes in."""


def begin(weights: Tensors) -> ServerState:
    """Return a server that holds these weights and has no momentum."""
    return ServerState(weights, tuple(torch.zeros_like(tensor) for tensor in weights))


def nesterov(state: ServerState, pseudo_gradient: Tensors, server: Server) -> ServerState:
    """Apply one pseudo-gradient with look-ahead."""
    momentum = _decayed(state.momentum, pseudo_gradient, server.momentum)
    moves = tuple(torch.add(g, m, alpha=server.momentum) for g, m in zip(pseudo_gradient, momentum, strict=True))
    return state._replace(weights=_moved(state.weights, moves, server.rate), momentum=momentum)


def heavy_ball(state: ServerState, pseudo_gradient: Tensors, server: Server) -> ServerState:
    """Apply one pseudo-gradient without look-ahead."""
    momentum = _decayed(state.momentum, pseudo_gradient, server.momentum)
    return state._replace(weights=_moved(state.weights, momentum, server.rate), momentum=momentum)


def synchronous(rule: Rule, state: ServerState, pseudo_gradients: Sequence[Tensors], server: Server) -> ServerState:
    """Apply the rule once, to the mean over all workers."""
    total = pseudo_gradients[0]
    for more in pseudo_gradients[1:]:
        total = _sum(total, more)
    return rule(state, _divided(total, len(pseudo_gradients)), server)


def buffered(rule: Rule, state: ServerState, pseudo_gradient: Tensors, server: Server, size: int) -> ServerState:
    """Take in one arrival, and apply the rule to the mean of the buffer when it holds `size`."""
    state = _arrived(state, pseudo_gradient)
    if state.arrivals < size:
        return state
    return rule(_emptied(state), _divided(state.gathered, size), server)


def delayed_nesterov(state: ServerState, pseudo_gradient: Tensors, server: Server, delay: Delay) -> ServerState:
    """Take in one arrival: apply its N-th part at once, and the momentum when the cycle of N = `delay.period` ends."""
    state = _arrived(state, pseudo_gradient)
    parts = _divided(pseudo_gradient, delay.period)
    share = delay.spread
    if state.arrivals >= delay.period:
        mean = _divided(state.gathered, delay.period)
        state = _emptied(state)._replace(momentum=_decayed(state.momentum, mean, server.momentum))
        share = 1.0 - (delay.period - 1) * delay.spread
    alpha = share * server.momentum
    moves = tuple(torch.add(part, m, alpha=alpha) for part, m in zip(parts, state.momentum, strict=True))
    return state._replace(weights=_moved(state.weights, moves, server.rate))


def discounted(pseudo_gradient: Tensors, staleness: int) -> Tensors:
    """Return a pseudo-gradient as Poly counts it."""
    return tuple(torch.mul(g, (1.0 + staleness) ** -0.5) for g in pseudo_gradient)


def compensated(pseudo_gradient: Tensors, started: Tensors, now: Tensors, strength: float) -> Tensors:
    """Return the pseudo-gradient as it might be where the weights are now."""
    return tuple(
        torch.addcmul(g, g * g, there - here, value=strength)
        for g, here, there in zip(pseudo_gradient, started, now, strict=True)
    )


def _decayed(momentum: Tensors, added: Tensors, decay: float) -> Tensors:
    return tuple(torch.add(g, m, alpha=decay) for m, g in zip(momentum, added, strict=True))


def _moved(weights: Tensors, moves: Tensors, rate: float) -> Tensors:
    return tuple(torch.sub(theta, move, alpha=rate) for theta, move in zip(weights, moves, strict=True))


def _sum(a: Tensors, b: Tensors) -> Tensors:
    return tuple(torch.add(x, y) for x, y in zip(a, b, strict=True))


def _divided(tensors: Tensors, by: int) -> Tensors:
    return tuple(torch.div(tensor, by) for tensor in tensors)


def _arrived(state: ServerState, pseudo_gradient: Tensors) -> ServerState:
    gathered = _sum(state.gathered, pseudo_gradient) if state.arrivals else pseudo_gradient
    return state._replace(gathered=gathered, arrivals=state.arrivals + 1)


def _emptied(state: ServerState) -> ServerState:
    return state._replace(gathered=(), arrivals=0)
