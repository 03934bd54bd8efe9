"""Weights of 24 bits: the bfloat16 that passes compute with, and the 8 bits below it.

A float32 has 16 bits below its upper half. The first eight of them, rounded, are the remainder of a weight: a step far
smaller than bfloat16 can tell adds up there. Both follow from the bits of a float32 by whole numbers alone, so every
device has the same, and a weight that is joined and split again is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_DROPPED, _BELOW = 8, 8  # bits of a float32 that are rounded away, and those of a remainder
LARGEST = torch.tensor(0x7F7F7F00, dtype=torch.int32).view(torch.float32).item()
"""The largest magnitude, 3.39e38: its upper half is bfloat16's largest number. What is beyond becomes this."""


class Split(NamedTuple):
    """Values in two parts of one shape. `upper`: bfloat16. `remainder`: int8, in 1/256 of the upper's last bit."""

    upper: Tensor
    remainder: Tensor


def split(values: Tensor) -> Split:
    """Return the parts of float32 values, each within 2^-16 of itself where it is normal; NaN stays NaN."""
    bounded = torch.where(values.isnan(), torch.nan, values.clamp(-LARGEST, LARGEST))
    kept = (bounded.view(torch.int32) + 2 ** (_DROPPED - 1)) >> _DROPPED
    upper = (kept + 2 ** (_BELOW - 1)) >> _BELOW
    remainder = kept - (upper << _BELOW)
    return Split(upper.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int8))


def join(upper: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 values of two parts."""
    kept = (upper.view(torch.int16).to(torch.int32) << _BELOW) + remainder
    return (kept << _DROPPED).view(torch.float32)


def values_of(held: Sequence[Tensor]) -> Iterator[Tensor]:
    """Return an iterator over the weights of a stage in float32, which exist one after the other.

    `held`: one tensor a parameter, float32 or an upper half, and then the remainders of those halves, in their order.
    Raises ValueError if remainders lack or are too many.
    """
    count = len(held) - sum(tensor.dtype is torch.int8 for tensor in held)
    halves = sum(tensor.dtype is torch.bfloat16 for tensor in held)
    if count + halves != len(held):
        raise ValueError(f"{len(held) - count} remainders for {halves} halves of weights")
    remainders = iter(held[count:])
    return (join(each, next(remainders)) if each.dtype is torch.bfloat16 else each for each in held[:count])
