"""Replicas of a quadratic bowl under the production rule: every outer step is `gossip.rule.outer_step`'s, to the
letter.

The rule works coordinate by coordinate, so the replicas of a stage are the rows of one tensor [replicas, coordinates]
and one call of `step_pair` serves them all: row i meets row partner[i]. Coordinates are independent worlds that share
their matchings; seeds draw new matchings. Pairs come from `gossip.rounds.matching.partners_of_round` up to 200
replicas, where production computes it too, and from a random permutation beyond (1024 replicas would be half a
million hashes a round).

Inner steps are plain SGD on 1/2 (theta - c)^T A (theta - c), c ~ N(0, I) drawn for every replica and step. float32, as
in production, where there is noise; float64 where an exponent is followed over hundreds of rounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from gossip.rounds.matching import GREEDY_AT_MOST, partners_of_round
from gossip.rule.outer_step import Outer, OuterState
from research.theory.moments import Law
from research.theory.pair_step import step_alone, step_pair

RESCALED_EVERY = 10


def generator(seed: int, purpose: str) -> torch.Generator:
    """Return a generator of torch for one purpose."""
    return torch.Generator().manual_seed(random.Random(f"{seed}|{purpose}|theory").getrandbits(63))


@cache
def partners(replicas: int, seed: int, round: int) -> Tensor:
    """Return whom each replica meets in this round: int64 [replicas], an involution without fixed points."""
    if replicas <= GREEDY_AT_MOST:
        names = [f"{number:04d}" for number in range(replicas)]
        pairs = partners_of_round(names, seed, round)
        return torch.tensor([int(pairs[name]) for name in names])
    order = torch.randperm(replicas, generator=generator(seed, f"matching {replicas} {round}"))
    met = torch.empty_like(order)
    half = replicas // 2
    met[order[:half]], met[order[half:]] = order[half:], order[:half]
    return met


class Swarm:
    """The replicas of one stage. `slow`, `momentum`, `fast`: [replicas, coordinates]."""

    def __init__(self, law: Law, coordinates: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self._law, self._seed = law, seed
        self._outer = Outer(law.alpha, law.beta, law.gamma)
        self._noise = generator(seed, "gradients")
        self._chance = generator(seed, "unmet")
        self._streak = torch.zeros(law.replicas, dtype=torch.int64)
        self._centres = torch.empty(law.replicas, coordinates, dtype=dtype)
        self.round = self.solo = self.deferred = 0
        self.slow = torch.zeros(law.replicas, coordinates, dtype=dtype)
        self.momentum = torch.zeros_like(self.slow)
        self.fast = self.slow.clone()

    def scatter(self) -> None:
        """Draw slow weights apart, N(0, 1) with mean zero over replicas; no momentum, fast weights equal to slow."""
        self.slow.normal_(generator=self._noise)
        self.slow -= self.slow.mean(0)
        self.momentum.zero_()
        self.fast = self.slow.clone()

    def train(self, rate: float, steps: int, curvature: Tensor | None = None) -> None:
        """Take SGD steps at learning rate `rate`; `curvature`: A, [coordinates, coordinates], None for the identity."""
        for _ in range(steps):
            self._centres.normal_(generator=self._noise)
            if curvature is None:
                self.fast.lerp_(self._centres, rate)  # theta - omega (theta - c)
            else:
                self.fast -= rate * (self.fast - self._centres) @ curvature

    def gossip(self) -> None:
        """Let every pair of this round meet, or not, and the unmet do what the law says."""
        partner = partners(self._law.replicas, self._seed, self.round)
        self.round += 1
        state = OuterState((self.slow,), (self.momentum,))
        needs_slow = self._outer.gamma != self._outer.beta
        other_slow = (self.slow[partner],) if needs_slow else None
        stepped = step_pair(state, (self.fast,), (self.fast[partner],), other_slow, self._outer)
        slow, momentum = stepped.state.slow[0], stepped.state.momentum[0]
        fast = self.fast + stepped.correction[0]
        if self._law.unmet > 0.0:
            pair = torch.minimum(partner, torch.arange(self._law.replicas))
            unmet = torch.rand(self._law.replicas, generator=self._chance)[pair] < self._law.unmet
            alone = unmet & (self._streak >= self._law.patience)
            self._streak = torch.where(unmet & ~alone, self._streak + 1, 0)
            self.solo += int(alone.sum())
            self.deferred += int((unmet & ~alone).sum())
            slow, momentum, fast = self._chosen(unmet, (self.slow, self.momentum, self.fast), (slow, momentum, fast))
            if alone.any():
                solo = step_alone(state, (self.fast,), self._outer)
                after = (solo.state.slow[0], solo.state.momentum[0], self.fast + solo.correction[0])
                slow, momentum, fast = self._chosen(alone, after, (slow, momentum, fast))
        self.slow, self.momentum, self.fast = slow, momentum, fast

    @staticmethod
    def _chosen(rows: Tensor, then: tuple[Tensor, ...], otherwise: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """Yield each tensor of `then` in these rows, and of `otherwise` in the others."""
        return (torch.where(rows[:, None], a, b) for a, b in zip(then, otherwise, strict=True))

    def variance_among(self, fast: bool = False) -> float:
        """Return the variance among replicas of slow (or fast) weights, the mean over coordinates."""
        return float((self.fast if fast else self.slow).double().var(0).mean())

    def variance_of_the_mean(self) -> float:
        """Return the mean square over coordinates of the replicas' mean slow weight."""
        return float(self.slow.double().mean(0).square().mean())

    def rescale(self) -> float:
        """Divide all by the size of the disagreement and return that, without progress a change of units only.

        Weights are centred at zero, which the rule does not see: it works on differences.
        """
        apart = self.slow - self.slow.mean(0)
        size = math.sqrt(float(apart.square().mean() + self.momentum.square().mean()))
        self.slow, self.momentum = apart / size, self.momentum / size
        self.fast = self.slow.clone()
        return size


def growth(law: Law, rounds: int, settle: int, seed: int, coordinates: int) -> float:
    """Return the factor a round on the disagreement's variance over `rounds` after `settle`, no inner progress."""
    swarm = Swarm(law, coordinates, seed, torch.float64)
    swarm.scatter()
    logarithm = 0.0
    for number in range(1, settle + rounds + 1):
        swarm.gossip()
        if number % RESCALED_EVERY == 0 or number in (settle, settle + rounds):
            size = swarm.rescale()
            logarithm += math.log(size) if number > settle else 0.0
    return math.exp(2.0 * logarithm / rounds)


def decay(law: Law, rounds: int, seed: int, coordinates: int) -> list[float]:
    """Return the variance among replicas at the start and after each round, in units of the start's."""
    swarm = Swarm(law, coordinates, seed, torch.float64)
    swarm.scatter()
    start = swarm.variance_among()
    found = [1.0]
    for _ in range(rounds):
        swarm.gossip()
        found.append(swarm.variance_among() / start)
    return found


def crossing(law: Law, low: float, high: float, rounds: int, seed: int) -> float:
    """Return the gamma between `low` and `high` at which the growth passes 1, by bisection to a thousandth.

    All trials of a seed see the same matchings, meetings and starts, so that the growth is smooth in gamma.
    """
    while high - low > 1e-3:
        middle = (low + high) / 2
        if growth(replace(law, gamma=middle), rounds, rounds // 4, seed, 8) < 1.0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
