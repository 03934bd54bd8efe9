"""Rounding pieces of a parameter to 8 or 4 bits and back.

**int8**: the largest magnitude of a block of 256 values becomes code 127; the error is at most half a scale.

**int4** is a modular code with side information: replicas of a stage are near each other, so of k = round(x / step)
only k mod 16 travels, and the receiver takes the congruent value that is nearest to its own weight y (lattice mean
estimation, Davies et al. 2021; Moniqua, Lu and De Sa 2020). It is k * step, to the bit what the sender has, whenever
|x - y| < 7.5 steps; beyond that the value wraps. Either way it is within 8 steps of y: a liar can move a weight by so
much and no more. An absolute code puts a floor beneath the distance that replicas can reach; the error of this one is
a fraction of the distance, so it shrinks as they draw together.

The arithmetic stays in float32, where division and remainder by 16 are exact: no integer overflows, whatever a weight
is. A piece of `PIECE` values stays in the cache from the first operation to the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gossip.exchange.formats import BLOCK, Format, packed_bytes

PIECE = 1024 * BLOCK
"""Values worked on at a time, a whole number of blocks: 1 MiB. Smaller ones cost more in calls than they gain."""
LARGEST_CODE = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A scale of a block of zeros, and of values too small to have a normal one."""
_FEW_STEPS = 2.0**21
"""So many fit the last bits of a float32 with room to spare."""


def pieces(form: Format, size: int, longest: int = PIECE) -> Iterator[slice]:
    """Yield the ranges of a parameter's values that are worked on at once; `longest`: a whole number of blocks.

    None holds values of both halves that int4 packs into the same bytes.
    """
    half = packed_bytes(size) if form.is_modular else size
    for first, end in ((0, half), (half, size)):
        for start in range(first, end, longest):
            yield slice(start, min(start + longest, end))


def scratch(weights: Sequence[Tensor], longest: int = PIECE) -> Tensor:
    """Return memory for any piece of these weights."""
    return torch.empty(min(longest, max((tensor.numel() for tensor in weights), default=0)))


def round_int8(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write `codes` int8 [n] and `scales` float32 [blocks] of float32 `values` [n], which are used up."""
    for at, rows in _rows(values):
        scale = scales[at // BLOCK : at // BLOCK + len(rows)].unsqueeze(1)
        torch.amax(rows.abs(), dim=1, keepdim=True, out=scale).div_(LARGEST_CODE).clamp_(min=SMALLEST_SCALE)
        codes[at : at + rows.numel()].view_as(rows).copy_(rows.div_(scale).round_())


def restore_int8(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the values of `codes` int8 [n] and `scales` float32 [blocks] into `out` float32 [n]."""
    out.copy_(codes)
    for at, rows in _rows(out):
        rows.mul_(scales[at // BLOCK : at // BLOCK + len(rows)].unsqueeze(1))


def round_int4(values: Tensor, codes: Tensor, step: float, *, high: bool, norm: float = math.inf) -> None:
    """Round float32 `values` [n] to whole numbers of steps; write them mod 16 into one half of `codes` uint8 [n].

    The high half goes over a low one that is there, and a high half of zeros. `norm`: of the values. They are used up:
    where it is not finite they are the whole numbers.
    """
    values.mul_(1 / step)
    if norm < _FEW_STEPS * step:
        # Above 2^23 float32 holds whole numbers alone: the sum is rounded to one, and its last bits are theirs.
        whole = values.add_(1.5 * 2**23).view(torch.int32)
    else:
        values.round_()
        whole = torch.sub(values, torch.mul(values, 1 / 16).floor_(), alpha=16)
    # By way of int8: torch is eight times as fast there.
    if high:
        codes.bitwise_or_(whole.to(torch.int8).bitwise_left_shift_(4).view(torch.uint8))
    else:
        codes.view(torch.int8).copy_(whole).bitwise_and_(15)


def restore_int4(codes: Tensor, near: Tensor, step: float, out: Tensor, *, high: bool) -> None:
    """Write into `out` float32 [n] the values congruent to one half of `codes` uint8 [n] nearest to `near` float32 [n].

    (code + 16 j) * step for the integer j that brings it nearest. To multiply by a power of two loses nothing, so each
    sum is rounded once, and equal on all machines whether or not they fuse it with its product.
    """
    _nearest(codes, torch.mul(near, 1 / step, out=out), high=high).mul_(step)


def restore_both_int4(codes: Tensor, meant: Tensor, step: float, own: Tensor, theirs: Tensor, *, high: bool) -> None:
    """Write into `theirs` what `restore_int4` does near `meant`, and into `own` what it would of our own codes.

    Our own are those of `meant`: it is the whole number of steps that they were made of, to the bit and without them.
    """
    torch.mul(meant, 1 / step, out=theirs)
    torch.round(theirs, out=own).mul_(step)
    _nearest(codes, theirs, high=high).mul_(step)


def _nearest(codes: Tensor, steps: Tensor, *, high: bool) -> Tensor:
    """Replace numbers of `steps` by the nearest whole ones that are congruent to one half of `codes`."""
    code = (codes.bitwise_right_shift(4) if high else codes.bitwise_and(15)).float()
    return torch.add(code, steps.sub_(code).mul_(1 / 16).round_(), alpha=16, out=steps)


def _rows(piece: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield views [blocks, values] of the whole blocks of a piece and of the short one at its end, with their index."""
    whole = len(piece) - len(piece) % BLOCK
    if whole:
        yield 0, piece[:whole].view(-1, BLOCK)
    if whole < len(piece):
        yield whole, piece[whole:].view(1, -1)
