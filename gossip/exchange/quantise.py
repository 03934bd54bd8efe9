"""Rounding one parameter to 8 or 4 bits and back, in place, a piece at a time.

**int8**: the largest magnitude of a block of 256 values becomes code 127; the error is at most half a scale.

**int4** is a modular code with side information: replicas of a stage are near each other, so of k = round(x / step)
only k mod 16 travels, and the receiver takes the congruent value that is nearest to its own weight y (lattice mean
estimation, Davies et al. 2021; Moniqua, Lu and De Sa 2020). It is k * step, to the bit what the sender has, whenever
|x - y| < 7.5 steps; beyond that the value wraps. Either way it is within 8 steps of y: a liar can move a weight by so
much and no more. An absolute code puts a floor beneath the distance that replicas can reach; the error of this one is
a fraction of the distance, so it shrinks as they draw together.

The arithmetic stays in float32, where division and remainder by 16 are exact: no integer overflows, whatever a weight
is. Pieces of `PIECE` values stay in the cache from the first operation to the last; memory beyond the result is a few
such pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gossip.exchange.formats import BLOCK, packed_bytes

PIECE = 256 * BLOCK
"""Values worked on at a time: 256 KiB."""
LARGEST_CODE = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A scale of a block of zeros, and of values too small to have a normal one."""


def round_int8(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Replace float32 `values` [n] by what int8 makes of them; write `codes` int8 [n] and `scales` float32 [blocks]."""
    for start, piece in _pieces(values):
        for at, rows in _rows(piece):
            first = (start + at) // BLOCK
            scale = scales[first : first + len(rows)].unsqueeze(1)
            torch.amax(rows.abs(), dim=1, keepdim=True, out=scale).div_(LARGEST_CODE).clamp_(min=SMALLEST_SCALE)
            codes[start + at : start + at + rows.numel()].view_as(rows).copy_(rows.div_(scale).round_())
            rows.add_(0.0).mul_(scale)


def restore_int8(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the values of `codes` int8 [n] and `scales` float32 [blocks] into `out` float32 [n]."""
    for start, piece in _pieces(out):
        piece.copy_(codes[start : start + len(piece)])
        for at, rows in _rows(piece):
            first = (start + at) // BLOCK
            rows.mul_(scales[first : first + len(rows)].unsqueeze(1))


def round_int4(values: Tensor, codes: Tensor, step: float) -> None:
    """Replace float32 `values` [n] by multiples of `step`; write `codes` uint8 [ceil(n / 2)], two a byte."""
    half = packed_bytes(len(values))
    scratch = torch.empty(min(half, PIECE))
    for start, low in _pieces(values[:half]):
        codes[start : start + len(low)].copy_(_residue(low, step, scratch))
    for start, high in _pieces(values[half:]):
        above = _residue(high, step, scratch).to(torch.uint8).bitwise_left_shift_(4)
        codes[start : start + len(high)].bitwise_or_(above)


def restore_int4(codes: Tensor, own: Tensor, step: float, out: Tensor) -> None:
    """Write into `out` float32 [n] the values congruent to `codes` uint8 [ceil(n / 2)] nearest to `own` float32 [n]."""
    half = packed_bytes(len(out))
    for start, low in _pieces(out[:half]):
        code = codes[start : start + len(low)].bitwise_and(15)
        _nearest(own[start : start + len(low)], code.float(), step, low)
    for start, high in _pieces(out[half:]):
        code = codes[start : start + len(high)].bitwise_right_shift(4)
        _nearest(own[half + start : half + start + len(high)], code.float(), step, high)


def _residue(values: Tensor, step: float, scratch: Tensor) -> Tensor:
    """Replace `values` by multiples of `step`; return the multiples mod 16, float32, in the memory of `scratch`."""
    values.mul_(1 / step).round_()
    residue = scratch[: len(values)]
    torch.mul(values, 1 / 16, out=residue).floor_()
    torch.sub(values, residue, alpha=16, out=residue)
    values.add_(0.0).mul_(step)
    return residue


def _nearest(own: Tensor, code: Tensor, step: float, out: Tensor) -> None:
    """Write into `out` (code + 16 j) * step for the integers j that make it nearest to `own`."""
    torch.mul(own, 1 / step, out=out).sub_(code).mul_(1 / 16).round_().mul_(16).add_(code).mul_(step)


def _pieces(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of a flat tensor, each with the index of its first value."""
    for start in range(0, len(flat), PIECE):
        yield start, flat[start : start + PIECE]


def _rows(piece: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield views [blocks, values] of the whole blocks of a piece and of the short one at its end, with their index."""
    whole = len(piece) - len(piece) % BLOCK
    if whole:
        yield 0, piece[:whole].view(-1, BLOCK)
    if whole < len(piece):
        yield whole, piece[whole:].view(1, -1)
