"""What NoLoCo must do under a quadratic loss: the exact recursion of second moments, and what follows from it.

Loss 1/2 (theta - c)^T A (theta - c) with c ~ N(0, sigma^2 I) drawn anew for every inner step. Inner SGD, averages and
the outer rule all commute with a rotation, so each eigenvalue lambda of A is a world of its own; all below is scalar.

**Inner phase.** m steps at rate omega make theta <- rho theta + xi, rho = (1 - omega lambda)^m, and xi has variance

    s^2 = (omega lambda sigma)^2 (1 - rho^2) / (1 - (1 - omega lambda)^2)

which is (omega lambda sigma)^2 m while x = omega lambda m is small, and bends to omega lambda sigma^2 / 2 beyond.

**Outer step.** A replica is z = (phi, delta, theta), delta = -momentum. The rule treats the mean of a pair and half its
difference apart: the mean goes through G (which is also the solo step, a mean over one), the half difference through H:

    G: delta <- alpha delta + beta (theta - phi), phi <- phi + delta, theta <- phi
    H: delta <- alpha delta - gamma phi,          phi <- phi + delta, theta <- phi

What the inner steps did to the *difference* of a pair is thrown away. An unmet replica goes through U: the identity
where it defers, G where it steps alone.

**Moments.** Replicas are exchangeable, so two matrices say all: S = E z_i z_i^T and K = E z_i z_k^T, i and k distinct.
After the inner phase (S <- R S R^T + noise, K <- R K R^T, R = diag(1, 1, rho)) the mean of a pair has (S + K)/2 and the
half difference (S - K)/2, uncorrelated. With N replicas (even) in uniformly random pairs, each unmet with chance p:

    M = G (S + K)/2 G^T,  W = H (S - K)/2 H^T,  B = (1 - p) G + p U
    S <- (1 - p)(M + W) + p U S U^T
    K <- [(1 - p)(M - W) + p U K U^T] / (N - 1)  +  B K B^T (N - 2)/(N - 1)

The variance among replicas is S - K: nothing was neglected, so this is the mean square over gradient noise *and*
matchings. With p = 0 it is closed in D = S - K:

    D <- (1 - w) G D G^T + w H D H^T + noise,   w = N / (2 (N - 1)), which is 1/2 among many

**The stable range.** Without progress or noise (theta = phi) the condition that D has the eigenvalue 1 can be solved:
E phi^2 stays, so E delta^2 = 2 E phi delta after a step; put into the other two equations this gives

    gamma_c = 2 (1 - alpha^2) / (1 + alpha (1 - 2w)),   w = (1 - q) N / (2 (N - 1))

where q is the share of solo steps among all outer steps. Many replicas that all meet: 2 (1 - alpha^2). Two alone:
2 (1 + alpha). Many, a share q of the steps solo: 2 (1 - alpha^2) / (1 + alpha q). Deferral mixes the operator with the
identity, L -> (1 - p) L + p: its largest eigenvalue (real, as L maps covariances to covariances) crosses 1 where L's
does, so it slows the contraction and leaves the range as it is. Who steps alone after K deferrals in a row has
q = p c / (1 - p + p c) with c = p^K (1 - p) / (1 - p^(K + 1)), by summing over the lengths of streaks at eigenvalue 1.

The mean square is what grows in expectation. Few replicas that draw their pairs again and again grow less than that
in a typical run (an exponent of random matrices, Jensen's inequality); among many the two agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
NEVER = 10**9
"""A patience that never ends in a solo step."""
MANY = 10**9
"""Replicas without number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """One experiment: the rule, how many replicas, the chance that a pair is not met, and what the unmet do then.

    `patience`: deferrals in a row after which an unmet replica steps alone; 0 at once, NEVER never.
    """

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    replicas: int = MANY
    unmet: float = 0.0
    patience: int = NEVER


class Phase(NamedTuple):
    """An inner phase: what it keeps of the weights, and the variance of what it adds."""

    keep: float
    noise: float


class Moments(NamedTuple):
    """Second moments of (phi, delta, theta): of one replica, and across two distinct ones."""

    own: Matrix
    cross: Matrix

    def among(self, fast: bool = False) -> float:
        """Return the variance of slow (or fast) weights among replicas (the unbiased one of a sample)."""
        at = 2 if fast else 0
        return float(self.own[at, at] - self.cross[at, at])

    def of_the_mean(self, replicas: int) -> float:
        """Return the mean square of the replicas' mean slow weight: the distance that they have in common."""
        return float(self.own[0, 0] + (replicas - 1) * self.cross[0, 0]) / replicas


def inner_phase(rate: float, steps: int, sigma: float = 1.0) -> Phase:
    """Return the inner phase of `steps` SGD steps, `rate` being omega times lambda."""
    keep = (1.0 - rate) ** steps
    return Phase(keep, (rate * sigma) ** 2 * (1.0 - keep**2) / (1.0 - (1.0 - rate) ** 2))


def _maps(law: Law) -> tuple[Matrix, Matrix, Matrix]:
    """Return G, H and U, 3 x 3."""
    a, b, g = law.alpha, law.beta, law.gamma
    together = np.array([[1 - b, a, b], [-b, a, b], [1 - b, a, b]])
    apart = np.array([[1 - g, a, 0.0], [-g, a, 0.0], [1 - g, a, 0.0]])
    if law.patience not in (0, NEVER):
        raise ValueError(
            "the moments are closed for a patience of 0 or NEVER only: otherwise they depend on the streak"
        )
    return together, apart, together if law.patience == 0 else np.eye(3)


def advance(moments: Moments, law: Law, phase: Phase) -> Moments:
    """Return the moments after one inner phase and one outer round."""
    together, apart, unmet = _maps(law)
    train = np.diag([1.0, 1.0, phase.keep])
    own = train @ moments.own @ train.T + np.diag([0.0, 0.0, phase.noise])
    cross = train @ moments.cross @ train.T
    of_mean = together @ ((own + cross) / 2) @ together.T
    of_half = apart @ ((own - cross) / 2) @ apart.T
    p, others = law.unmet, law.replicas - 1
    on_average = (1 - p) * together + p * unmet
    partners = (1 - p) * (of_mean - of_half) + p * unmet @ cross @ unmet.T
    strangers = on_average @ cross @ on_average.T
    return Moments(
        (1 - p) * (of_mean + of_half) + p * unmet @ own @ unmet.T,
        partners / others + strangers * (others - 1) / others,
    )


def trajectory(law: Law, phase: Phase, rounds: int) -> list[Moments]:
    """Return the moments after each of `rounds` rounds, all replicas starting at the optimum."""
    moments, found = Moments(np.zeros((3, 3)), np.zeros((3, 3))), []
    for _ in range(rounds):
        moments = advance(moments, law, phase)
        found.append(moments)
    return found


def stationary(law: Law, phase: Phase) -> Moments:
    """Return the moments that a round leaves as they are, by solving the 18 linear equations; needs keep below 1."""
    silent = phase._replace(noise=0.0)
    columns = []
    for number in range(18):
        unit = np.zeros(18)
        unit[number] = 1.0
        columns.append(_flat(advance(_shaped(unit), law, silent)))
    source = _flat(advance(_shaped(np.zeros(18)), law, phase))
    left = np.eye(18) - np.column_stack(columns)
    return _shaped(np.asarray(np.linalg.solve(left, source), dtype=np.float64))


def _flat(moments: Moments) -> Matrix:
    return np.concatenate([moments.own.ravel(), moments.cross.ravel()])


def _shaped(flat: Matrix) -> Moments:
    return Moments(flat[:9].reshape(3, 3), flat[9:].reshape(3, 3))


def contraction(law: Law) -> float:
    """Return the asymptotic factor a round on the variance among replicas, without inner progress.

    Exact where all meet or the unmet step alone; where they defer, up to what a common momentum does (order p / N).
    """
    together, apart, _ = _maps(law)
    at_rest = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])  # theta = phi
    together, apart = (matrix[:2] @ at_rest for matrix in (together, apart))
    w = law.replicas / (2.0 * (law.replicas - 1))
    met = (1 - w) * np.kron(together, together) + w * np.kron(apart, apart)
    unmet = np.kron(together, together) if law.patience == 0 else np.eye(4)
    return float(np.abs(np.linalg.eigvals((1 - law.unmet) * met + law.unmet * unmet)).max())


def solo_share(law: Law) -> float:
    """Return the share of solo steps among all outer steps, q."""
    p = law.unmet
    if p == 0.0 or law.patience == NEVER:
        return 0.0
    ripe = p**law.patience * (1 - p) / (1 - p ** (law.patience + 1))
    return p * ripe / (1 - p + p * ripe)


def critical_gamma(law: Law) -> float:
    """Return the gamma below which the variance among replicas contracts, in closed form; `law.gamma` is not read."""
    w = (1 - solo_share(law)) * law.replicas / (2.0 * (law.replicas - 1))
    return 2.0 * (1.0 - law.alpha**2) / (1.0 + law.alpha * (1.0 - 2.0 * w))


def fastest(law: Law) -> tuple[float, float]:
    """Return the gamma that contracts fastest, to 0.01, and its factor."""
    grid = [hundredths / 100 for hundredths in range(1, math.ceil(100 * critical_gamma(law)))]
    factor, gamma = min((contraction(replace(law, gamma=gamma)), gamma) for gamma in grid)
    return gamma, factor
