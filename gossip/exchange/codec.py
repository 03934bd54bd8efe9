"""Smaller messages: weights to what travels and back, in the forms of `formats`.

Both sides of an exchange must use what was *received*, not what was meant: otherwise each computes another mean, and a
pair that should meet drifts apart. So `encode` returns, beside the tensors that travel, the sender's own weights as the
partner will see them, to the bit. The outer rule is given these and the partner's decoded ones.

**The step of int4** must be the same on both sides without a word, and follow the distance between them. Both hold both
probes (see `swap`: some 4096 coordinates of either side's weights), so `common_steps` derives it from them, a step
per parameter:

    radius = the largest distance that the probes show in this parameter, times log(all moved) / log(moved here),
             and at most the largest in all
    step   = MARGIN * radius / 8

- *Largest* rather than root mean square: of n draws from any distribution the next exceeds the largest with
  probability 1 / (n + 1), whatever the tail; a root mean square says nothing of it. A radius of 5.25 of those, ample
  for a Gaussian, wraps 3e-3 of distances with a heavy tail (Student t3) and 7e-3 where most rows of the embeddings did
  not move; the largest widens the step there, and wraps 2e-4 and 2e-6.
- *A parameter each* where at least FEW of its probed coordinates moved: distances of one model's parameters lie a
  factor of four apart, and one step for all would round the nearest ones as coarsely as the farthest need. The
  logarithm lengthens the largest of a few to that of many, exactly so for an exponential tail, more than enough for a
  Gaussian.
- *Moved* counts distances that are not zero: the rows of an embedding that nobody has seen say nothing of the others.
  Parameters with fewer (norms, biases, rare rows) take the largest in all.

`MARGIN` is measured (`benchmarks/codec/margins.py`): three pairs of replicas of 0.4M parameters after 50 steps of AdamW
apart, and synthetic distances whose scale varies between parameters (standard deviation of its logarithm 0.5). Share of
values that wrap, and root mean square of the rounding over that of the distance:

    margin         1.25             1.5              2
    transformer    1e-5   0.22      0      0.27      0      0.36
    Gaussian       2e-5   0.17      1e-6   0.20      0      0.27      (of one scale, margin 1.5: 5e-7)
    Laplace        9e-5   0.26      2e-5   0.31      6e-7   0.41
    Student t3     3e-4   0.53      2e-4   0.63      7e-5   0.84

A wrapped value is no disaster: it is within 8 steps of the receiver's own weight, so it is off by less than its
distance and those 8 steps together. What a liar may do is bounded by the same 8 steps, and the steps by refusing a
probe that is `FAR` from one's own.

**Error feedback.** A residual per parameter holds what was meant and has not been sent: x + e is encoded, then
e <- x + e - decoded. So what was sent in all differs from what was meant in all by one residual, which is bounded by
the last rounding and does not grow. It does not bring replicas nearer to each other than rounding allows: in an
absolute code (int8) it leaves those that drift by half a step between two rounds where they were, and those that drift
by a twentieth 1.6 times as far apart, for without it they would round alike. What it brings is that nothing is lost for
ever. With int4 probe and decode relative to what is meant, x + e, on both sides. The residual changes only in
`Feedback.settle`, after an exchange that came to its end.

Weights are float32 on the CPU, one tensor per parameter in the stage's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.exchange.formats import Format, blocks, packed_bytes, wire_specs
from gossip.exchange.messages import Implausible
from gossip.exchange.quantise import restore_int4, restore_int8, round_int4, round_int8
from gossip.exchange.swap import NORM_RATIO, NOT_FINITE
from gossip.rule.outer_step import Tensors

MARGIN = 1.5
"""How much farther than the probes show a value may lie before int4 wraps."""
FEW = 32
"""With fewer probed coordinates that moved, a parameter takes the step of all."""
FAR = 10.0
"""A probe that differs from ours by more than this times our size is implausible.

Our size is our largest probed weight, or `NORM_RATIO` times their root mean square, whichever is more: fresh weights
have no large ones yet, and must not take a trained partner's for a lie.
"""
FINEST = 2.0**-18
"""The smallest step over the largest probed weight: beneath it float32 could not tell the multiples apart."""
STEP_OF_NOTHING = 2.0**-24
"""The step where all probed weights are zero."""


class Encoded(NamedTuple):
    """What travels, and the sender's own weights as the partner will see them."""

    wire: Tensors
    decoded: Tensors


def encode(form: Format, weights: Tensors, residual: Tensors = (), steps: Sequence[float] = ()) -> Encoded:
    """Encode weights plus residual (see `Feedback`); nothing is written into the arguments.

    `steps` belongs to int4: see `common_steps`. `wire` is as `wire_specs` says; in float32 it is the weights
    themselves. Raises ValueError where an argument does not fit the weights, and ConnectionAbortedError where a value
    is not finite in this form: weights that nobody should get.
    """
    _check_steps(form, weights, steps)
    if any(tensor.dtype != torch.float32 for tensor in weights):
        raise ValueError("weights to encode are float32")
    if residual and [tensor.shape for tensor in residual] != [tensor.shape for tensor in weights]:
        raise ValueError("the residual is of other shapes than the weights")
    if form is Format.FLOAT32:
        encoded = Encoded(weights, weights)
    elif form is Format.BFLOAT16:
        meant = (w + e for w, e in zip(weights, residual, strict=True)) if residual else weights
        wire = tuple(tensor.detach().bfloat16() for tensor in meant)
        encoded = Encoded(wire, tuple(tensor.float() for tensor in wire))
    else:
        encoded = _quantised(form, weights, residual, steps)
    for number, tensor in enumerate(encoded.decoded):
        if not _finite(tensor):
            raise ConnectionAbortedError(f"{NOT_FINITE}: tensor {number} in {form}")
    return encoded


def decode(form: Format, wire: Tensors, own: Tensors, steps: Sequence[float] = ()) -> Tensors:
    """Return the partner's weights, float32, in the shapes of `own`, the receiver's weights.

    int4 needs `steps`, the same as the sender's, and yields values within 8 steps of `own`. Raises Implausible where
    what came cannot be right: a shape, a dtype, a scale below zero, a value that is not finite.
    """
    _check_steps(form, own, steps)
    expected = [(spec.dtype, spec.shape) for spec in wire_specs(form, [tuple(tensor.shape) for tensor in own])]
    came = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in wire]
    if came != expected:
        pairs = zip(came, expected, strict=False)
        count = f"{len(came)} tensors where ours has {len(expected)}"
        what = next((f"{their} where ours is {own_spec}" for their, own_spec in pairs if their != own_spec), count)
        raise Implausible(f"weights in {form}: {what}")
    if form is Format.INT8 and not (_finite(wire[1]) and bool((wire[1] >= 0).all())):
        raise Implausible("weights in int8: a scale is negative or not finite")
    if form is Format.FLOAT32:
        decoded = wire
    elif form is Format.BFLOAT16:
        decoded = tuple(tensor.float() for tensor in wire)
    else:
        decoded = _restored(form, wire, own, steps)
    for number, tensor in enumerate(decoded):
        if not _finite(tensor):
            raise Implausible(f"weights in {form}, tensor {number}: not finite")
    return decoded


def common_steps(own_probe: Tensor, their_probe: Tensor, counts: Sequence[int]) -> tuple[float, ...]:
    """Return the step of int4 for each parameter, the same on both sides to the bit, never zero.

    `counts`: how many of the probed coordinates lie in each parameter. The probes, float32 [sum of counts], are of
    what either side means to send. Raises Implausible where theirs is of another shape, not finite, or far from ours;
    ValueError where ours is not finite or of another number of coordinates.
    """
    if own_probe.shape != (sum(counts),):
        raise ValueError(f"a probe of {list(own_probe.shape)} for {sum(counts)} coordinates")
    if their_probe.shape != own_probe.shape or their_probe.dtype != own_probe.dtype:
        raise Implausible(f"probe: {their_probe.dtype} {list(their_probe.shape)} where ours is {list(own_probe.shape)}")
    distances = torch.sub(own_probe, their_probe).abs_()
    own_size, their_size = _largest(own_probe), _largest(their_probe)
    if not math.isfinite(own_size):
        raise ValueError("our own probe is not finite")
    farthest, plausible = _largest(distances), FAR * max(own_size, NORM_RATIO * _root_mean_square(own_probe))
    if not farthest <= plausible:
        raise Implausible(f"probe: {farthest:.3g} from ours, where {plausible:.3g} is plausible")
    size = max(own_size, their_size)
    finest = max(FINEST * size, torch.finfo(torch.float32).tiny) if size else STEP_OF_NOTHING
    moved = int(torch.count_nonzero(distances))
    radii = (_radius(part, moved, farthest) for part in torch.split(distances, list(counts)))
    return tuple(_rounded_up(max(MARGIN * radius / 8, finest)) for radius in radii)


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

    def settle(self, weights: Tensors, decoded: Tensors) -> None:
        """Take note that `decoded` was used for `weights`, both as in the `encode` before. Writes into the residual."""
        if self._form is Format.FLOAT32:
            return
        if not self.residual:
            self.residual = tuple(torch.zeros_like(tensor) for tensor in decoded)
        for owed, meant, sent in zip(self.residual, weights, decoded, strict=True):
            owed.add_(meant.detach()).sub_(sent)


def _quantised(form: Format, weights: Tensors, residual: Tensors, steps: Sequence[float]) -> Encoded:
    """Encode to int8 or int4: each parameter is copied to where its decoded values will be, and rounded there."""
    specs = wire_specs(form, [tuple(tensor.shape) for tensor in weights])
    wire = tuple(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs)
    decoded = tuple(torch.empty(tensor.shape) for tensor in weights)
    for number, (values, parts) in enumerate(zip(decoded, _parts(form, wire, weights), strict=True)):
        values.copy_(weights[number].detach())
        if residual:
            values.add_(residual[number])
        if form is Format.INT8:
            round_int8(values.view(-1), parts[0], parts[1])
        else:
            round_int4(values.view(-1), parts[0], steps[number])
    return Encoded(wire, decoded)


def _restored(form: Format, wire: Tensors, own: Tensors, steps: Sequence[float]) -> Tensors:
    """Decode int8 or int4, whose wire has been found to be of the right shapes."""
    decoded = tuple(torch.empty(tensor.shape) for tensor in own)
    for number, (values, parts) in enumerate(zip(decoded, _parts(form, wire, own), strict=True)):
        if form is Format.INT8:
            restore_int8(parts[0], parts[1], values.view(-1))
        else:
            restore_int4(parts[0], own[number].detach().reshape(-1), steps[number], values.view(-1))
    return decoded


def _parts(form: Format, wire: Tensors, weights: Tensors) -> Iterator[Tensors]:
    """Yield for each parameter the views of the wire that are its own: codes and scales in int8, codes in int4."""
    sizes = [tensor.numel() for tensor in weights]
    counts = (sizes, list(map(blocks, sizes))) if form is Format.INT8 else (list(map(packed_bytes, sizes)),)
    ends = [list(accumulate(count)) for count in counts]
    for number in range(len(sizes)):
        yield tuple(
            flat[end[number] - count[number] : end[number]] for flat, count, end in zip(wire, counts, ends, strict=True)
        )


def _radius(distances: Tensor, moved: int, farthest: float) -> float:
    """Return how far this parameter's values may be expected to lie from the partner's, before the margin.

    `moved`: coordinates that differ in the whole probe; `farthest`: the largest distance among them.
    """
    here = int(torch.count_nonzero(distances))
    if here < FEW:
        return farthest
    return min(farthest, _largest(distances) * math.log(moved) / math.log(here))


def _rounded_up(step: float) -> float:
    """Return the next number of 8 significant bits.

    Both sides agree whatever the last bit of their logarithm is, and products with integers up to 2^16 are exact.
    """
    fraction, exponent = math.frexp(step)
    return math.ldexp(math.ceil(fraction * 256) / 256, exponent)


def _check_steps(form: Format, weights: Tensors, steps: Sequence[float]) -> None:
    if len(steps) != (len(weights) if form.is_modular else 0):
        raise ValueError(f"{len(steps)} steps for {len(weights)} tensors in {form}")


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _root_mean_square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(max(1, tensor.numel()))


def _finite(tensor: Tensor) -> bool:
    """Say whether all values are finite, without a temporary of the tensor's size."""
    return not tensor.numel() or all(map(math.isfinite, map(float, torch.aminmax(tensor))))
