"""Smaller messages: weights to what travels and back, in the forms of `formats`.

Both sides of an exchange must use what was *received*, not what was meant: otherwise each computes another mean, and a
pair that should meet drifts apart. So a sender reads its own weights from what it sent, as the partner does, to the
bit. Nobody keeps decoded weights: a `Reader` decodes piece by piece, where they are used.

In int4 a step per parameter says what a code is worth: see `int4_step`.

**Error feedback.** A residual per parameter (bfloat16) holds what was meant and has not been sent: x + e is encoded,
then e <- x + e - decoded. So what was sent in all differs from what was meant in all by one residual, which is bounded
by the last rounding and does not grow. It does not bring replicas nearer to each other than rounding allows: in an
absolute code (int8) it leaves those that drift by half a step between two rounds where they were, and those that drift
by a twentieth 1.6 times as far apart, for without it they would round alike. What it brings is that nothing is lost for
ever. With int4 probe and decode relative to what is meant, x + e, on both sides. The residual changes only in
`Feedback.settle`, after an exchange that came to its end.

Weights are float32 on the CPU, one tensor per parameter in the stage's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.formats import BLOCK, Format, blocks, packed_bytes, wire_specs
from gossip.exchange.int4_step import largest_of
from gossip.exchange.messages import Implausible
from gossip.exchange.quantise import (
    LARGEST_CODE,
    pieces,
    restore_both_int4,
    restore_int4,
    restore_int8,
    round_int4,
    round_int8,
    scratch,
)
from gossip.exchange.swap import NORM_RATIO, NOT_FINITE, check_norm
from gossip.rule.outer_step import Tensors

OWED = torch.bfloat16
"""Of a residual. Half a step of the code is rounded to a 512th of itself, which is nothing beside the next rounding."""


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


def encode(form: Format, weights: Tensors, residual: Tensors = (), steps: Sequence[float] = ()) -> Encoded:
    """Encode weights plus residual (see `Feedback`); nothing is written into the arguments.

    `steps` belongs to int4: see `common_steps`. What travels is no memory of the weights: they may move while it is on
    its way. Raises ValueError where an argument does not fit the weights, and ConnectionAbortedError where a value is
    not finite in this form: weights that nobody should get.
    """
    _check_steps(form, weights, steps)
    if any(tensor.dtype != torch.float32 for tensor in weights):
        raise ValueError("weights to encode are float32")
    if residual and [tensor.shape for tensor in residual] != [tensor.shape for tensor in weights]:
        raise ValueError("the residual is of other shapes than the weights")
    specs = wire_specs(form, [tuple(tensor.shape) for tensor in weights])
    wire = tuple(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs)
    norms: list[float] = []
    memory = scratch(weights)
    for number, parts in enumerate(_parts(form, wire, weights)):
        own = weights[number].detach().reshape(-1)
        for at in pieces(form, len(own)):
            meant = memory[: at.stop - at.start]
            if residual and form is not Format.FLOAT32:
                meant.copy_(residual[number].reshape(-1)[at]).add_(own[at])
            else:
                meant.copy_(own[at])
            size = float(torch.linalg.vector_norm(meant))
            norms.append(size)
            largest = _write(form, parts, at, meant, steps[number] if steps else 0.0, size)
            # A norm overflows before any value does.
            if not (math.isfinite(size) or math.isfinite(largest())):
                raise ConnectionAbortedError(f"{NOT_FINITE}: tensor {number} in {form}")
    return Encoded(Coded(form, wire, steps), math.hypot(*norms))


def check(theirs: Coded, own: Tensors, owed: Feedback, own_norm: float) -> None:
    """Raise Implausible where what came cannot be right for a receiver of weights `own`, of which it owes something.

    A shape, a dtype, a scale below zero, a value that is not finite, a norm far from `own_norm`. Nothing that is
    decoded is kept. Raises ConnectionAbortedError where `own_norm` is not finite.
    """
    form, sizes = theirs.form, [tensor.numel() for tensor in own]
    reader = Reader(theirs, own)
    if form is Format.INT8 and not (_finite(theirs.wire[1]) and bool((theirs.wire[1] >= 0).all())):
        raise Implausible("weights in int8: a scale is negative or not finite")
    if form.is_modular and math.isfinite(own_norm):
        # Each value is within 8 steps of ours, so mostly the steps alone say that the norm is near ours.
        reach = 8.1 * math.hypot(*(step * math.sqrt(size) for step, size in zip(theirs.steps, sizes, strict=True)))
        if reach <= own_norm * (1 - 1.01 / NORM_RATIO):
            return
    norms, memory, near = [0.0], scratch(own), scratch(own)
    for number, size in enumerate(sizes):
        for at in pieces(form, size):
            values = reader.read(number, at, owed.meant(own, number, at, near), memory)
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
        self._form, self._parts = form, tuple(_parts(form, wire, own))

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

    def read_both(self, number: int, at: slice, meant: Tensor, own: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Return what both have sent of a piece, in `own` and `theirs`: of a modular form, `meant` being ours."""
        parts, mine, out = self._parts[number], own[: len(meant)], theirs[: len(meant)]
        high = at.start >= len(parts[0])
        restore_both_int4(parts[0][_packed(at, parts[0])], meant, self._steps[number], mine, out, high=high)
        return mine, out


class Feedback:
    """What one replica meant to send and has not: a residual per parameter.

    Empty until the first exchange is settled, and for ever in float32, which is exact. Checkpoints do not hold it: a
    restart loses what the last rounding left out, once.
    """

    def __init__(self, form: Format, residual: Tensors = ()) -> None:
        self._form = form
        self.residual = residual

    def probe(self, weights: Tensors, coordinates: Tensors) -> Tensor:
        """Return weights plus residual at these flat indices, one int64 tensor per parameter: float32 [k]."""
        taken = [tensor.flatten()[at] for tensor, at in zip(weights, coordinates, strict=True)]
        if self.residual:
            owed = (tensor.flatten()[at] for tensor, at in zip(self.residual, coordinates, strict=True))
            taken = [here + rest for here, rest in zip(taken, owed, strict=True)]
        return torch.cat(taken) if taken else torch.empty(0)

    def meant(self, weights: Tensors, number: int, at: slice, memory: Tensor) -> Tensor:
        """Return values of a parameter with what is owed of them, in `memory` or where they are."""
        own = weights[number].view(-1)[at]
        if not self.residual:
            return own
        # A sum of two types would make a tensor of one of them before.
        return memory[: len(own)].copy_(self.residual[number].view(-1)[at]).add_(own)

    def begin(self, like: Tensors) -> None:
        """Take the memory for what will be owed: `settle` needs it."""
        if not self.residual and self._form is not Format.FLOAT32:
            self.residual = tuple([torch.zeros_like(tensor, dtype=OWED) for tensor in like])

    def settle(self, number: int, at: slice, meant: Tensor, sent: Tensor) -> None:
        """Take note that `sent` was used for what was `meant` of a parameter, both decoded; `meant` is used up."""
        if self.residual:
            self.residual[number].view(-1)[at].copy_(meant.sub_(sent))


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
    """Say whether all values are finite, without a temporary of the tensor's size."""
    return not tensor.numel() or all(map(math.isfinite, map(float, torch.aminmax(tensor))))
