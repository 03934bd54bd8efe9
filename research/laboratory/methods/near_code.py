"""What a pair that is near each other hears of each other in few bits, in the best case.

As in the production's modular code both round to the same step, and a value is found near the receiver's own. Here the
step is that at which just no value wraps, which takes the largest distance of each parameter; nobody is charged for
the probes that would tell it. Both count with what they said, so what rounding leaves out stays with its owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossip.rule.outer_step import Tensors
from research.laboratory.experiments.choices import BITS
from research.laboratory.methods.coded_mean import SCALE_BYTES


def apart(own: Tensors, theirs: Tensors, codec: str) -> Tensors:
    """Return how far what a partner says lies from what we say to it."""
    return tuple(_apart(mine, other, BITS[codec]) for mine, other in zip(own, theirs, strict=True))


def toward(own: Tensors, others: Sequence[Tensors], shares: Sequence[float], codec: str) -> Tensors:
    """Return weights moved by a share of the way to each of the others, as it was heard."""
    moved = tuple(tensor.clone() for tensor in own)
    for theirs, share in zip(others, shares, strict=True):
        for tensor, distance in zip(moved, apart(own, theirs, codec), strict=True):
            tensor.add_(distance, alpha=share)
    return moved


def message_bytes(weights: Tensors, codec: str) -> int:
    """Return what a message takes on the wire: its codes, and a step a parameter."""
    bits = BITS[codec]
    return sum(tensor.numel() * 4 if bits == 32 else -(-tensor.numel() * bits // 8) + SCALE_BYTES for tensor in weights)


def _apart(own: Tensor, theirs: Tensor, bits: int) -> Tensor:
    distance = torch.sub(theirs, own)
    farthest = float(distance.abs().max())
    if bits == 32 or farthest == 0.0:
        return distance
    step = farthest / (2 ** (bits - 1) - 0.5)
    return theirs.div(step).round_().sub_(own.div(step).round_()).mul_(step)
