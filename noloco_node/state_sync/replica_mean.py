"""Which replicas of a stage belong in its mean, and the mean.

Three kinds stay out of it, each named with the reason: outliers (weights that are not finite, or far from the median
norm), stragglers (rounds far behind the median) and strangers (weights that have nothing in common with the others').
The lower median is the measure, so that no half of them, and not one of two, moves others out by the rounds that it
claims. Of two, no rule tells the liar. An export judges by loss where it can (`export.held_out_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median_high, median_low
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 2.0  # a norm may differ by this factor from the median
LEAST_ALIKE = 0.1  # cosine of two replicas. Honest ones have more
LEAST_REPLICAS = 3  # of fewer, none can be told from the others


class ReplicaSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The peer of a replica, its counters, and the norm of its slow weights."""

    peer: str
    round: int
    inner_steps: int
    progress: float
    norm: float


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is not in the mean, and why."""

    peer: str
    why: str


def drop_outliers(standings: Sequence[ReplicaSummary], rounds_behind: int) -> tuple[list[int], list[LeftOut]]:
    """Return the places of the replicas in the mean, one at least if any is finite, and the replicas left out."""
    left_out = [
        LeftOut(peer=each.peer, why="its weights are not finite") for each in standings if not math.isfinite(each.norm)
    ]
    finite = [place for place, each in enumerate(standings) if math.isfinite(each.norm)]
    if not finite:
        return [], left_out
    norm = median_low(standings[place].norm for place in finite)
    near = [place for place in finite if norm / FACTOR <= standings[place].norm <= norm * FACTOR]
    left_out += [
        LeftOut(peer=standings[place].peer, why=f"norm {standings[place].norm:.4g}, the median is {norm:.4g}")
        for place in finite
        if place not in near
    ]
    round = median_low(standings[place].round for place in near)
    kept = [place for place in near if standings[place].round >= round - rounds_behind]
    left_out += [
        LeftOut(peer=standings[place].peer, why=f"round {standings[place].round}, the median is {round}")
        for place in near
        if place not in kept
    ]
    return kept, left_out


def drop_strangers(products: Tensor, places: Sequence[int]) -> tuple[list[int], dict[int, float]]:
    """Return the places that belong in the mean, and of the others the median cosine.

    `products`: of the weights of all, each with each. If no half agrees, all belong in the mean.
    """
    if len(places) < LEAST_REPLICAS:
        return list(places), {}
    norms = products.diagonal().sqrt()
    cosines = (products / norms / norms[:, None]).nan_to_num().tolist()
    usual = {i: median_high(cosines[i][j] for j in places if j != i) for i in places}
    kept = [place for place in places if usual[place] >= LEAST_ALIKE]
    if not kept:
        return list(places), {}
    return kept, {place: usual[place] for place in places if place not in kept}


def products_of(tensors: Iterable[Sequence[Tensor]]) -> Tensor:
    """Return the products of replicas, each with each, given each tensor of all of them in turn."""
    import torch

    total = torch.zeros(())
    for replicas in tensors:
        rows = torch.stack([replica.to("cpu", torch.float32).flatten() for replica in replicas])
        total = total + (rows @ rows.T).double()
    return total


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the norm of tensors together, read one at a time; not finite where they are not."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def mean_of(replicas: Sequence[Tensor]) -> Tensor:
    """Return the exact mean, rounded once to float32."""
    import torch

    total = replicas[0].to("cpu", torch.float64, copy=True)
    for other in replicas[1:]:
        total += other.to("cpu")
    return (total / len(replicas)).float()
