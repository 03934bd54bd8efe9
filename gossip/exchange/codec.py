"""Weights to what travels and back, in the formats of `gossip.settings.Format`.

Both sides of an exchange use what was *received*: otherwise a pair that should meet drifts apart. So a sender reads
its own weights from what it sent, as the partner does, to the bit. A `Reader` decodes piece by piece, where values are
used.

**int8**: the largest magnitude of a block of 256 values becomes code 127; the error is at most half a scale.

**int4** is a modular code with side information (lattice mean estimation, Davies et al. 2021; Moniqua, Lu and De Sa
2020). Of k = round(x / step) only k mod 16 travels, and the receiver takes the congruent value nearest to its own
weight y. It is k * step, to the bit what the sender has, whenever |x - y| < 7.5 steps; beyond that the value wraps.
Either way it is within 8 steps of y, which bounds a liar. `swap.common_steps` derives a step per parameter. All
arithmetic is float32, where division and remainder by 16 are exact, so no integer overflows.

**Error feedback** takes no memory of its own. The correction after a meeting starts from what was sent, not from the
exact snapshot (`gossip.rounds.outer_optimiser`), so what rounding has left out stays in the fast weights and is encoded
with the next snapshot. All that a replica has sent lacks one bounded rounding error of all that it has learned.

Weights are float32 on the CPU, one tensor per parameter in the stage's order, or a sum of these and a difference
(`OwnWeights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange import kernels
from gossip.exchange.messages import Implausible
from gossip.rule.outer_step import Tensors
from gossip.settings import BLOCK, Format, blocks, packed_bytes, wire_specs

PIECE = 1024 * BLOCK  # values worked on at a time, a whole number of blocks: 1 MiB, which stays in the cache
DIFFERENCE = torch.bfloat16
"""The type of a difference between weights: its rounding, a 512th, is nothing beside that of what travels."""
LARGEST_CODE = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A scale of a block of zeros, and of values too small to have a normal one."""
NORM_RATIO = 10.0  # a partner's norm outside [ours / ratio, ours * ratio] is implausible
NOT_FINITE = "our own weights are not finite"
_FEW_STEPS = 2.0**21  # so many fit the last bits of a float32 with room to spare


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


def restore_both_int4(codes: Tensor, exact: Tensor, step: float, own: Tensor, theirs: Tensor, *, high: bool) -> None:
    """Write into `theirs` what `restore_int4` does near `exact`, and into `own` what it would of our own codes.

    Our own are those of `exact`: it is the whole number of steps that they were made of, to the bit and without them.
    """
    torch.mul(exact, 1 / step, out=theirs)
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


class OwnWeights(NamedTuple):
    """One's own weights: float32 ones, and what comes on top of them in bfloat16, or nothing."""

    base: Tensors
    difference: Tensors = ()

    def read(self, number: int, at: slice, memory: Tensor) -> Tensor:
        """Return values of a parameter, in `memory` or where they are."""
        base = self.base[number].view(-1)[at]
        if not self.difference:
            return base
        # A sum of two types would make a tensor of one of them before.
        return memory[: len(base)].copy_(self.difference[number].view(-1)[at]).add_(base)

    def probe(self, coordinates: Tensors) -> Tensor:
        """Return the values at these flat indices, one int64 tensor per parameter: float32 [k]."""
        taken = [tensor.flatten()[at] for tensor, at in zip(self.base, coordinates, strict=True)]
        if self.difference:
            on_top = (tensor.flatten()[at] for tensor, at in zip(self.difference, coordinates, strict=True))
            taken = [here + more for here, more in zip(taken, on_top, strict=True)]
        return torch.cat(taken) if taken else torch.empty(0)

    def norm(self) -> float:
        """Return the norm over all; not finite if a value is not, or if that of a piece overflows float32."""
        memory = scratch(self.base)
        places = ((number, at) for number, each in enumerate(self.base) for at in pieces(Format.FLOAT32, each.numel()))
        return math.hypot(*(float(torch.linalg.vector_norm(self.read(*place, memory))) for place in places))

    def addresses(self, number: int) -> tuple[int, int | None]:
        """Return where `kernels` finds a parameter and its difference."""
        return self.base[number].data_ptr(), self.difference[number].data_ptr() if self.difference else None


class Coded(NamedTuple):
    """One set of weights as it travels (`wire_specs`). `steps`: of int4, one a parameter; empty in other forms."""

    form: Format
    wire: Tensors
    steps: Sequence[float] = ()


class Encoded(NamedTuple):
    """What travels, and the norm of what was encoded."""

    coded: Coded
    norm: float


class Sides(NamedTuple):
    """What both have sent. `share`: of the way from ours to theirs that counts (`influence`)."""

    mine: Coded
    theirs: Coded
    share: float = 1.0


def encode(form: Format, weights: OwnWeights, steps: Sequence[float] = ()) -> Encoded:
    """Encode weights; nothing is written into the arguments.

    `steps` belongs to int4: see `common_steps`. What travels is no memory of the weights: they may move while it is on
    its way. Raises ValueError where an argument does not fit the weights, and ConnectionAbortedError where a value is
    not finite in this form: weights that nobody should get.
    """
    base, difference = weights
    _check_steps(form, base, steps)
    if any(tensor.dtype != torch.float32 for tensor in base):
        raise ValueError("weights to encode are float32")
    if any(tensor.dtype != DIFFERENCE for tensor in difference):
        raise ValueError("a difference of weights is bfloat16")
    if difference and [tensor.shape for tensor in difference] != [tensor.shape for tensor in base]:
        raise ValueError("the difference is of other shapes than the weights")
    specs = wire_specs(form, [tuple(tensor.shape) for tensor in base])
    wire = tuple(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs)
    norms: list[float] = []
    memory = scratch(base)
    own = OwnWeights(*(tuple([tensor.detach().contiguous() for tensor in tensors]) for tensors in weights))
    for number, parts in enumerate(_parts(form, wire, base)):
        count = base[number].numel()
        if form.is_modular and kernels.COMPILED:
            places = own.addresses(number)
            squares = kernels.COMPILED.kernels_encode(*places, count, steps[number], parts[0].data_ptr())
            if math.isfinite(squares):
                norms.append(math.sqrt(squares))
                continue
        for at in pieces(form, count):
            values = memory[: at.stop - at.start]
            values.copy_(own.read(number, at, values))
            size = float(torch.linalg.vector_norm(values))
            norms.append(size)
            largest = _write(form, parts, at, values, steps[number] if steps else 0.0, size)
            # A norm overflows before any value does.
            if not (math.isfinite(size) or math.isfinite(largest())):
                raise ConnectionAbortedError(f"{NOT_FINITE}: tensor {number} in {form}")
    return Encoded(Coded(form, wire, steps), math.hypot(*norms))


def check(theirs: Coded, own: OwnWeights, own_norm: float) -> None:
    """Raise Implausible where what came cannot be right for a receiver of weights `own`.

    A shape, a dtype, a scale below zero, a value that is not finite, a norm far from `own_norm`. Nothing that is
    decoded is kept. Raises ConnectionAbortedError where `own_norm` is not finite.
    """
    form, sizes = theirs.form, [tensor.numel() for tensor in own.base]
    reader = Reader(theirs, own.base)
    if form is Format.INT8 and not (_finite(theirs.wire[1]) and bool((theirs.wire[1] >= 0).all())):
        raise Implausible("weights in int8: a scale is negative or not finite")
    if form.is_modular and math.isfinite(own_norm):
        # Each value is within 8 steps of ours, so mostly the steps alone say that the norm is near ours.
        reach = 8.1 * math.hypot(*(step * math.sqrt(size) for step, size in zip(theirs.steps, sizes, strict=True)))
        if reach <= own_norm * (1 - 1.01 / NORM_RATIO):
            return
    norms, memory, near = [0.0], scratch(own.base), scratch(own.base)
    for number, size in enumerate(sizes):
        for at in pieces(form, size):
            values = reader.read(number, at, own.read(number, at, near), memory)
            if not _finite(values):
                raise Implausible(f"weights in {form}, tensor {number}: not finite")
            norms.append(float(torch.linalg.vector_norm(values)))
    check_norm(math.hypot(*norms), own_norm, f"weights in {form}")


class Reader:
    """Decodes what travels, a piece of a parameter at a time, for whoever has weights in the shapes of `own`.

    Raises Implausible where it is of another count, shape or dtype.
    """

    def __init__(self, coded: Coded, own: Tensors) -> None:
        form, wire, self._steps = coded
        _check_steps(form, own, self._steps)
        expected = [(spec.dtype, spec.shape) for spec in wire_specs(form, [tuple(tensor.shape) for tensor in own])]
        came = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in wire]
        if came != expected:
            pairs = zip(came, expected, strict=False)
            count = f"{len(came)} tensors where ours has {len(expected)}"
            what = next((f"{their} where ours is {own_spec}" for their, own_spec in pairs if their != own_spec), count)
            raise Implausible(f"weights in {form}: {what}")
        self._sizes = [tensor.numel() for tensor in own]
        self._form, self._parts = form, tuple(_parts(form, tuple([tensor.contiguous() for tensor in wire]), own))

    def read(self, number: int, at: slice, near: Tensor, memory: Tensor) -> Tensor:
        """Return values of a parameter, one of its `pieces`: float32, in `memory` or where they came.

        `near`: the receiver's own values there, of which int4 yields some within 8 steps.
        """
        parts, out = self._parts[number], memory[: at.stop - at.start]
        if self._form is Format.FLOAT32:
            return parts[0][at]
        if self._form is Format.BFLOAT16:
            out.copy_(parts[0][at])
        elif self._form is Format.INT8:
            restore_int8(parts[0][at], parts[1][_blocks(at)], out)
        else:
            high = at.start >= len(parts[0])
            restore_int4(parts[0][_packed(at, parts[0])], near, self._steps[number], out, high=high)
        return out

    def arguments(self, number: int) -> tuple[float, ...]:
        """Return what functions of `kernels` take after the places of weights: a parameter's size, step and codes."""
        return self._sizes[number], self._steps[number], self._parts[number][0].data_ptr()

    def read_both(self, number: int, at: slice, exact: Tensor, own: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Return what both have sent of a piece, in `own` and `theirs`: of a modular form, `exact` being ours."""
        parts, mine, out = self._parts[number], own[: len(exact)], theirs[: len(exact)]
        high = at.start >= len(parts[0])
        restore_both_int4(parts[0][_packed(at, parts[0])], exact, self._steps[number], mine, out, high=high)
        return mine, out


def _write(form: Format, parts: Tensors, at: slice, values: Tensor, step: float, norm: float) -> Callable[[], float]:
    """Encode a piece to where it belongs; `values`, of this norm, are used up.

    Return what tells its largest magnitude as it will be decoded, if the norm is not finite.
    """
    if form is Format.INT8:
        scales = parts[1][_blocks(at)]
        round_int8(values, parts[0][at], scales)
        return lambda: largest_of(scales * LARGEST_CODE)
    if form is Format.INT4:
        round_int4(values, parts[0][_packed(at, parts[0])], step, high=at.start >= len(parts[0]), norm=norm)
        return lambda: largest_of(torch.stack(torch.aminmax(values)) * step)
    parts[0][at].copy_(values)
    return lambda: largest_of(parts[0][at].float())


def _blocks(at: slice) -> slice:
    """Return which of a parameter's scales in int8 belong to a piece."""
    return slice(at.start // BLOCK, blocks(at.stop))


def _packed(at: slice, codes: Tensor) -> slice:
    """Return which of a parameter's bytes in int4 hold a piece."""
    before = len(codes) if at.start >= len(codes) else 0
    return slice(at.start - before, at.stop - before)


def _parts(form: Format, wire: Tensors, weights: Tensors) -> Iterator[Tensors]:
    """Yield for each parameter the flat views of the wire that are its own: in int8 codes and scales."""
    if form in (Format.FLOAT32, Format.BFLOAT16):
        yield from ((tensor.reshape(-1),) for tensor in wire)
        return
    sizes = [tensor.numel() for tensor in weights]
    counts = (sizes, list(map(blocks, sizes))) if form is Format.INT8 else (list(map(packed_bytes, sizes)),)
    ends = [list(accumulate(count)) for count in counts]
    for number in range(len(sizes)):
        yield tuple(
            flat[end[number] - count[number] : end[number]] for flat, count, end in zip(wire, counts, ends, strict=True)
        )


def _check_steps(form: Format, weights: Tensors, steps: Sequence[float]) -> None:
    if len(steps) != (len(weights) if form.is_modular else 0):
        raise ValueError(f"{len(steps)} steps for {len(weights)} tensors in {form}")


def _finite(tensor: Tensor) -> bool:
    return not tensor.numel() or all(map(math.isfinite, map(float, torch.aminmax(tensor))))


def check_norm(their_norm: float, own_norm: float, what: str) -> None:
    """Raise Implausible unless the norm of the partner's weights is finite and near that of our own.

    Raises ConnectionAbortedError where ours is not finite.
    """
    if not math.isfinite(their_norm):
        raise Implausible(f"{what}: not finite")
    if not math.isfinite(own_norm):
        raise ConnectionAbortedError(NOT_FINITE)
    if not own_norm / NORM_RATIO <= their_norm <= own_norm * NORM_RATIO:
        raise Implausible(f"{what}: norm {their_norm:.3g} where ours is {own_norm:.3g}")


def check_finite(tensors: Tensors, what: str) -> float:
    """Return the norm over all tensors; raise Implausible unless it is finite."""
    total = norm(tensors)
    if not math.isfinite(total):
        raise Implausible(f"{what}: not finite")
    return total


def norm(tensors: Tensors) -> float:
    """Return the norm over all tensors; not finite if a value is not, or if a tensor's norm overflows float32."""
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))


def largest_of(tensor: Tensor) -> float:
    """Return the largest magnitude, 0 of an empty tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
