"""A mean over all replicas of their largest values: SparseLoCo (arXiv 2508.15706).

Each replica adds its pseudo-gradient to what it still owes, times `DECAY`, and sends of each chunk the largest values
in a few bits; what it has not sent it goes on owing. The memory of what is owed stands for the outer momentum. The
values that two replicas send lie at other places, so their sum is no smaller than both, and everybody hears everybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from research.laboratory.experiments.cell import Cell
from research.laboratory.experiments.choices import BITS
from research.laboratory.methods.coded_mean import SCALE_BYTES
from research.laboratory.methods.replicas import Model, mean_of

CHUNK = 4096
DECAY = 0.95


class SparseMean:
    """The mean over a cell's replicas. `sent_bytes`: what one replica has to say in a round."""

    def __init__(self, model: Model, cell: Cell) -> None:
        self._bits, self._density = BITS[cell.codec], cell.density
        self._owed = [[tuple(map(torch.zeros_like, part)) for part in model] for _ in range(cell.replicas)]
        chunks = [size for part in model for tensor in part for size in chunk_sizes(tensor.numel())]
        self.sent_bytes = sum(chunk_bytes(size, kept(size, self._density), self._bits) for size in chunks)

    def __repr__(self) -> str:
        return f"<SparseMean of {self._density:.1%} in {self._bits} bits>"

    def of(self, brought: Sequence[Model], weights: Sequence[int] | None = None) -> Model:
        """Return the mean of what the replicas send of what they bring, weighed if there are weights."""
        heard = []
        for number, model in enumerate(brought):
            meant = [
                tuple(torch.add(new, old, alpha=DECAY) for new, old in zip(part, rest, strict=True))
                for part, rest in zip(model, self._owed[number], strict=True)
            ]
            came = [tuple(largest(tensor, self._density, self._bits) for tensor in part) for part in meant]
            self._owed[number] = [tuple(map(torch.sub, part, sent)) for part, sent in zip(meant, came, strict=True)]
            heard.append(came)
        return mean_of(heard, weights)


def largest(values: Tensor, density: float, bits: int) -> Tensor:
    """Return values of which each chunk keeps its largest, in so many bits; the others are zero."""
    out = torch.zeros(values.numel())
    for given, taken in zip(torch.split(values.flatten(), CHUNK), torch.split(out, CHUNK), strict=True):
        at = given.abs().topk(kept(len(given), density), sorted=False).indices
        taken[at] = _coarse(given[at], bits)
    return out.view_as(values)


def kept(size: int, density: float) -> int:
    """Return how many values of a chunk are sent."""
    return max(1, round(density * size))


def chunk_sizes(size: int) -> list[int]:
    """Return the sizes of the chunks of a parameter."""
    return [min(CHUNK, size - begin) for begin in range(0, size, CHUNK)]


def chunk_bytes(size: int, count: int, bits: int) -> float:
    """Return what a chunk takes on the wire: values, a scale, and their places as short as any code can say them."""
    places = math.log2(math.comb(size, count))
    return (places + bits * count) / 8 + (SCALE_BYTES if bits < 32 else 0)


def _coarse(values: Tensor, bits: int) -> Tensor:
    """Round to the middle of one of 2^bits equal parts between the largest magnitude and its negative."""
    farthest = float(values.abs().max())
    if bits == 32 or farthest == 0.0:
        return values
    half = 2 ** (bits - 1)
    step = farthest / half
    return values.div(step).floor_().clamp_(-half, half - 1).add_(0.5).mul_(step)
