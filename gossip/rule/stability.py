"""The range of gamma in which the outer rule draws replicas together. Does not load torch: `check` uses it.

The question: many replicas, no inner progress (theta = phi), random disjoint pairs. Does their disagreement die out?
A replica's slow weights phi, momentum m and gathered Delta, measured from the mean of all, move in a meeting by

    phi <- phi - gamma/2 (phi - psi) - s alpha m,   Delta <- Delta + gamma/2 (phi - psi),   psi the partner's phi

with s = c in the first N - 1 meetings of a period and s = 1 - (N - 1) c in the last, where m <- alpha m + Delta and
Delta <- 0. Among many, partners are independent, so the second moments close: S <- A S A^T + V b b^T, with A the map of
one's own (phi, m, Delta), b what the partner's phi adds, and V = E psi^2.

**In step.** Where all replicas are in the same place of the period, V is S's own first entry, and a period is a linear
map on (E phi^2, E phi m, E m^2), Delta being zero at its ends. It maps covariances to covariances, hence its spectral
radius is below 1 exactly where S = L(S) + I has a solution that is a covariance. With N = 1 that gives
gamma < 2 (1 - alpha^2) in closed form.

**Out of step.** Skipped rounds and newcomers spread the replicas evenly over the places of the period. Then V is one
number, the mean of E phi^2 over the places: a loop of positive gain. It dies out exactly where a replica's own map is
stable and V = 1 as input yields less than 1 as the mean output. The bound is the smaller of the two.

**Weighed means.** With a partner's share s the pull is g = s gamma, gamma / 2 in the mean of the two sides. With N = 1,
u = g (phi - psi), E g^2 = q gamma^2 / 4, and V, C, M for E phi^2, E phi m, E m^2:

    M' = alpha^2 M + alpha gamma C + q gamma^2 / 2 V
    C' = alpha C + gamma / 2 V - M'
    V' = V - 2 (alpha C + gamma / 2 V) + M'

They stand still at gamma = 2 (1 - alpha^2) / (q (1 + alpha) - alpha), the bound. It is narrowest where every pair is as
unequal as shares may be, either side of it by chance, so with q the mean of (2 s)^2 over both.

Momentum near 1 with a period can leave islands: stable, unstable, stable again as gamma grows. The bound is the lowest
edge: all that lies below it is stable. It never falls below that of N = 1, and never exceeds 2: out of step, what the
partner's phi adds, which is independent of one's own, is gamma^2 / 4 V alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MOST = 4.0  # how many times its partner's share in a mean a replica's share may be
_FINENESS = 1.04  # ratio of neighbouring gammas that are tried for the lowest edge

_Matrix = list[list[float]]

_PHI_PHI, _PHI_M, _, _M_M, _, _, _ONE, _SUM = range(8)
_AT_START = (_PHI_PHI, _PHI_M, _M_M)
_PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


class Momentum(NamedTuple):
    """Decay of the outer momentum, outer steps in its period, and the share that each but the last one applies."""

    alpha: float
    period: int
    spread: float


def stability_bound(alpha: float, period: int = 1, spread: float = 0.0) -> float:
    """Return the gamma below which (and above 0) the disagreement of many randomly paired replicas contracts.

    `alpha` in [0, 1), `period` at least 1, `spread` in [0, 1 / period].
    """
    lowest = 2.0 * (1.0 - alpha * alpha)
    if period == 1 or alpha == 0.0:
        return lowest
    momentum = Momentum(alpha, period, spread)
    stable, unstable = lowest * 0.999, lowest * 0.999
    while contracts(momentum, unstable):
        stable, unstable = unstable, unstable * _FINENESS
    while unstable - stable > 1e-9:
        middle = (stable + unstable) / 2
        stable, unstable = (middle, unstable) if contracts(momentum, middle) else (stable, middle)
    return stable


def weighed_stability_bound(alpha: float, most: float) -> float:
    """Return the bound where means are weighed, with shares at most so many times each other, and a period of 1."""
    larger = most / (1.0 + most)
    unequal = 2.0 * (larger**2 + (1.0 - larger) ** 2)
    return 2.0 * (1.0 - alpha * alpha) / (unequal * (1.0 + alpha) - alpha)


def contracts(momentum: Momentum, gamma: float) -> bool:
    """Tell whether disagreement dies out at this gamma, in step and out of step."""
    return _in_step(momentum, gamma) and _out_of_step(momentum, gamma)


def _in_step(momentum: Momentum, gamma: float) -> bool:
    """Solve S = L(S) + I for S at the start of a period, and tell whether it is a covariance."""
    variance, covariance, of_momentum = _stationary(_period(momentum, gamma, fed=False), [1.0, 0.0, 1.0])
    return variance > 0.0 and of_momentum > 0.0 and variance * of_momentum > covariance * covariance


def _out_of_step(momentum: Momentum, gamma: float) -> bool:
    """Feed V = 1 into every meeting, and tell whether a mean of less than 1 comes back, from a stable replica."""
    alone = _power(_own(momentum, gamma, last=False), momentum.period - 1)
    transition = _product(_own(momentum, gamma, last=True), alone)
    trace = transition[0][0] + transition[1][1]
    determinant = transition[0][0] * transition[1][1] - transition[0][1] * transition[1][0]
    if not abs(trace) < 1.0 + determinant < 2.0:
        return False
    period = _period(momentum, gamma, fed=True)
    start = _stationary(period, [period[row][_ONE] for row in _AT_START])
    back = period[_SUM][_ONE] + sum(period[_SUM][at] * value for at, value in zip(_AT_START, start, strict=True))
    return back < momentum.period


def _own(momentum: Momentum, gamma: float, last: bool) -> _Matrix:
    """Return A, what a meeting makes of one's own (phi, m, Delta)."""
    alpha, period, spread = momentum
    pull = gamma / 2.0
    if last:
        return [[1.0 - pull, -(1.0 - (period - 1) * spread) * alpha, 0.0], [pull, alpha, 1.0], [0.0, 0.0, 0.0]]
    return [[1.0 - pull, -spread * alpha, 0.0], [0.0, 1.0, 0.0], [pull, 0.0, 1.0]]


def _period(momentum: Momentum, gamma: float, fed: bool) -> _Matrix:
    """Return a period's map on the six second moments, a constant one, and a running sum of E phi^2 before meetings.

    `fed`: the partner's E psi^2 is the constant; otherwise it is one's own E phi^2.
    """
    within = _power(_meeting(momentum, gamma, False, fed), momentum.period - 1)
    return _product(_meeting(momentum, gamma, True, fed), within)


def _meeting(momentum: Momentum, gamma: float, last: bool, fed: bool) -> _Matrix:
    own = _own(momentum, gamma, last)
    pull = gamma / 2.0
    partner = (pull, -pull, 0.0) if last else (pull, 0.0, -pull)
    rows = []
    for i, j in _PAIRS:
        row = [own[i][a] * own[j][b] + (own[i][b] * own[j][a] if a != b else 0.0) for a, b in _PAIRS] + [0.0, 0.0]
        row[_ONE if fed else _PHI_PHI] += partner[i] * partner[j]
        rows.append(row)
    rows.append([float(column == _ONE) for column in range(8)])
    rows.append([float(column in (_PHI_PHI, _SUM)) for column in range(8)])
    return rows


def _product(a: _Matrix, b: _Matrix) -> _Matrix:
    columns = list(zip(*b, strict=True))
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in a]


def _power(matrix: _Matrix, exponent: int) -> _Matrix:
    """Return the matrix to this power, by squaring: a period may be long."""
    result = [[float(i == j) for j in range(len(matrix))] for i in range(len(matrix))]
    while exponent:
        if exponent & 1:
            result = _product(result, matrix)
        exponent >>= 1
        if exponent:
            matrix = _product(matrix, matrix)
    return result


def _stationary(period: _Matrix, source: list[float]) -> list[float]:
    """Return the moments S = L(S) + source at the start of a period, by Cramer's rule; NaN where there are none."""
    left = [[float(row == column) - period[row][column] for column in _AT_START] for row in _AT_START]
    determinant = _determinant(left)
    if determinant == 0.0:
        return [math.nan] * 3
    return [
        _determinant([[*row[:at], value, *row[at + 1 :]] for row, value in zip(left, source, strict=True)])
        / determinant
        for at in range(3)
    ]


def _determinant(m: _Matrix) -> float:
    (a, b, c), (d, e, f), (g, h, i) = m
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
