"""The step of int4: derived by both sides of an exchange from the probes that both hold.

It must be the same on both sides without a word, and follow the distance between them. Both hold both
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

`MARGIN` is measured (`research/codec/margins.py`): three pairs of replicas of 0.4M parameters after 50 steps of AdamW
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
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gossip.exchange.messages import Implausible
from gossip.exchange.swap import NORM_RATIO

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
    own_size, their_size = largest_of(own_probe), largest_of(their_probe)
    if not math.isfinite(own_size):
        raise ValueError("our own probe is not finite")
    farthest, plausible = largest_of(distances), FAR * max(own_size, NORM_RATIO * _root_mean_square(own_probe))
    if not farthest <= plausible:
        raise Implausible(f"probe: {farthest:.3g} from ours, where {plausible:.3g} is plausible")
    size = max(own_size, their_size)
    finest = max(FINEST * size, torch.finfo(torch.float32).tiny) if size else STEP_OF_NOTHING
    moved = int(torch.count_nonzero(distances))
    radii = (_radius(part, moved, farthest) for part in torch.split(distances, list(counts)))
    return tuple(_rounded_up(max(MARGIN * radius / 8, finest)) for radius in radii)


def largest_of(tensor: Tensor) -> float:
    """Return the largest magnitude, 0 of an empty tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _radius(distances: Tensor, moved: int, farthest: float) -> float:
    """Return how far this parameter's values may be expected to lie from the partner's, before the margin.

    `moved`: coordinates that differ in the whole probe; `farthest`: the largest distance among them.
    """
    here = int(torch.count_nonzero(distances))
    if here < FEW:
        return farthest
    return min(farthest, largest_of(distances) * math.log(moved) / math.log(here))


def _rounded_up(step: float) -> float:
    """Return the next number of 8 significant bits.

    Both sides agree whatever the last bit of their logarithm is, and products with integers up to 2^16 are exact.
    """
    fraction, exponent = math.frexp(step)
    return math.ldexp(math.ceil(fraction * 256) / 256, exponent)


def _root_mean_square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(max(1, tensor.numel()))
