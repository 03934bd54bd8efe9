"""The inner step of a stage: AdamW on the clipped mean gradient of a window, at a rate that follows the progress.

Stages with unequal numbers of replicas take unequal numbers of inner steps, so no replica's step counter says how far
the run is. Each microbatch carries the progress of the run as its source knows it, 0 to 1. A stamp is what a stranger
says, so a replica's progress moves

- to the lower median of each window's stamps: half a window of lies moves nothing;
- never back;
- never at more than twice the rate that the swarm has shown. The rate is measured on at most 16 marks, spread over the
  last minutes (over the whole session of a young replica): the lower median of the newer half less that of the older
  half, by the time between the two. One window of lies is one mark, which neither median takes.

Progress stays until four marks show a rate. The time meanwhile counts, so the fifth window finds a replica in place.

A step may be made orthogonal, by products of matrices alone (`orthogonalise`). A matrix is U S V' with orthogonal U and
V. Each iteration maps its singular values S by one odd polynomial, and leaves U and V: five bring all but the tiniest
between 0.68 and 1.13. This is Newton and Schulz' iteration with the coefficients of Muon (Jordan and others 2024): they
raise small values fast, and do not converge, which the direction of a step need not.

This module does not load torch, because plans count with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import median_low
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

MOST_STEPS = 10**9
MomentForm: TypeAlias = Literal["float32", "int8"]  # how a stage keeps its weights and moments
Forgetting = Annotated[float, (0.0, None, 1.0)]  # from 0 to below 1; Adam forgets at the rate 1 - beta


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerConfig:
    """AdamW by Nesterov's momentum inside a replica, between two rounds, and its schedule over the run's progress.

    The rate warms up linearly, then falls by a cosine to a fraction of `learning_rate`. A stage's gradient is clipped
    to `clip_norm`. Only matrices decay. Bounds are (least, most); `noloco_node.run.fields` holds a run file to them.
    """

    nesterov: ClassVar[bool] = True
    """Whether a step takes the first moment as it would be after the same gradient once more (research/results.md)."""

    steps: Annotated[int, (1, MOST_STEPS)] = 25_000
    """Inner steps that each planned source takes: with the batch and the planned replicas, the run's token budget."""
    learning_rate: Annotated[float, (1e-12, 100.0)] = 6e-4
    warmup_steps: int = 1000
    final_fraction: Annotated[float, (0.0, 1.0)] = 0.1
    beta1: Forgetting = 0.9
    beta2: Forgetting = 0.999
    epsilon: Annotated[float, (1e-30, 1.0)] = 1e-8
    weight_decay: Annotated[float, (0.0, 100.0)] = 0.0
    clip_norm: Annotated[float, (1e-12, 1e12)] = 1.0
    state: MomentForm = "float32"
    """What the optimiser keeps: "float32", or "int8" (moments as 8-bit codes; on a device that computes in bfloat16
    weights as bfloat16 with an 8-bit correction: half the memory)."""
    orthogonal: bool = False
    """Whether matrices of the layers step by the orthogonal matrix that is nearest to AdamW's step, as Muon takes that
    of a mean gradient: less loss for the same tokens, and more work for each step."""


class StepReport(NamedTuple):
    """`gradient_norm`: before clipping. `applied`: False if the gradient was not finite, or not whole."""

    gradient_norm: float
    applied: bool


class OptimiserState(NamedTuple):
    """AdamW's memory. `moments`: the first moments of all parameters in order, then the second; all zero at step 0.

    A moment is float32 in its parameter's shape, or coded: int8 [bytes], the scales and then the codes.
    """

    steps: int
    moments: tuple[Tensor, ...]


BLOCK = 256  # values of a coded moment that share a scale
SCALE_BYTES = 4


def is_coded(shape: Sequence[int], state: str) -> bool:
    """Say whether the moments of a parameter are codes: those of matrices in the form "int8"."""
    return state == "int8" and len(shape) >= 2


def moment_bytes(shape: Sequence[int], state: str) -> int:
    """Return the bytes that one moment of a parameter takes: its scales and codes, or float32."""
    values = prod(shape)
    return values + SCALE_BYTES * -(-values // BLOCK) if is_coded(shape, state) else 4 * values


def moment_ratio(beta1: float, beta2: float) -> float:
    """Return the most that a first moment of AdamW can be, in roots of its second; infinite where nothing bounds it.

    Both are sums over the same gradients, with weights that fall by beta1 and by beta2 a step: Cauchy and Schwarz.
    """
    left = 1.0 - beta1**2 / beta2 if beta2 > 0.0 else 0.0
    return (1.0 - beta1) / math.sqrt((1.0 - beta2) * left) if left > 0.0 else math.inf


_FIRST, _THIRD, _FIFTH = 3.4445, -4.7750, 2.0315
"""Of a singular value, of its third power and of its fifth."""
ITERATIONS = 5
_LEAST_NORM = 1e-30
_TOGETHER = 2**24
"""Numbers of the matrices that are computed at once, where several share a tensor, as those of experts do."""
_TIMES = 5
"""Times the memory of what is computed at once, at most, that the computation takes beside it."""


def orthogonalise(matrices: Tensor) -> None:
    """Replace each of some matrices, [..., rows, columns], by U V' of its own, within the accuracy of its dtype.

    A matrix of zeros stays. The memory is `matrices`' own, and some for a moment (`orthogonal_bytes`).
    """
    stacked = matrices.view(-1, *matrices.shape[-2:])
    for some in stacked.split(_at_once(stacked.shape)):  # type: ignore[no-untyped-call]
        wide = some if some.shape[1] <= some.shape[2] else some.mT
        wide.copy_(_iterated(wide))


def _iterated(wide: Tensor) -> Tensor:
    found: Tensor = wide / wide.norm(dim=(1, 2), keepdim=True).clamp_min(_LEAST_NORM)
    for _ in range(ITERATIONS):
        square = found @ found.mT
        mixed = square.baddbmm(square, square, beta=_THIRD, alpha=_FIFTH)
        found = found.baddbmm(mixed, found, beta=_FIRST)
    return found


def _at_once(shape: Sequence[int]) -> int:
    return max(1, _TOGETHER // prod(shape[1:]))


def orthogonal_bytes(shape: Sequence[int], value_bytes: int) -> int:
    """Return the bytes that a matrix, or experts', and the computation take while a step is made orthogonal."""
    stacked = (prod(shape[:-2]), *shape[-2:])
    return value_bytes * (prod(shape) + _TIMES * min(stacked[0], _at_once(stacked)) * prod(shape[-2:]))


def orthogonal_operations(shape: Sequence[int]) -> int:
    """Return the floating-point operations for one matrix, or for those of experts."""
    less, more = sorted(shape[-2:])
    return prod(shape[:-2]) * ITERATIONS * (4 * less**2 * more + 2 * less**3)


MOST_MARKS = 16
FEWEST_MARKS = 4
LONGEST_SPACING_S = 15.0
"""Seconds between two marks in the long run; longer than a roster's refresh, in whose steps stamps may rise."""
HASTE = 2.0  # how many times the rate that the swarm has shown a replica's progress may move at


def learning_rate(progress: float, inner: InnerConfig) -> float:
    """Return the learning rate of an inner step that is taken at this progress of the run.

    A run at progress p has done p * steps inner steps; the one after n steps has (n + 1) / warmup_steps of the peak
    while it warms up, so that the very first step moves something. Of `steps` and `warmup_steps` only the ratio to the
    progress matters: they are a planned source's.
    """
    peak, done = inner.learning_rate, min(max(progress, 0.0), 1.0) * inner.steps
    if done + 1.0 < inner.warmup_steps:
        return peak * (done + 1.0) / inner.warmup_steps
    phase = (done - inner.warmup_steps) / max(1, inner.steps - inner.warmup_steps)
    fall = 0.5 * (1.0 + math.cos(math.pi * min(max(phase, 0.0), 1.0)))
    return peak * (inner.final_fraction + (1.0 - inner.final_fraction) * fall)


class Mark(NamedTuple):
    """The lower median of one window's stamps, and when that window ended."""

    at_s: float
    stamp: float


class Progress(NamedTuple):
    """How far the run is, as one replica believes.

    `value`: 0 to 1. `at_s`: when it last could move. `since_s`: when this replica began to look.
    """

    value: float
    at_s: float
    since_s: float
    marks: tuple[Mark, ...] = ()


def begin(value: float, now_s: float) -> Progress:
    """Start at a known progress: 0 at the start of a run, the median of its stage for a newcomer."""
    return Progress(value, now_s, now_s)


def advance(progress: Progress, stamps: Sequence[float], now_s: float) -> Progress:
    """Move to the lower median of a window's stamps, as far as the rate that the swarm has shown allows."""
    finite = [min(max(stamp, 0.0), 1.0) for stamp in stamps if math.isfinite(stamp)]
    if not finite:
        return progress
    aim = median_low(finite)
    # The allowance is taken from the marks before this window: a window cannot speak for itself.
    per_s = rate_per_s(progress.marks)
    marks = _marked(progress, Mark(now_s, aim))
    if per_s is None:
        return progress._replace(marks=marks)
    furthest = progress.value + HASTE * per_s * max(0.0, now_s - progress.at_s)
    return Progress(max(progress.value, min(aim, furthest)), now_s, progress.since_s, marks)


def rate_per_s(marks: Sequence[Mark]) -> float | None:
    """Return the progress a second that the marks show, 0 or more; None while there are too few of them."""
    half = len(marks) // 2
    if len(marks) < FEWEST_MARKS:
        return None
    older, newer = marks[:half], marks[-half:]
    elapsed_s = median_low([mark.at_s for mark in newer]) - median_low([mark.at_s for mark in older])
    risen = median_low([mark.stamp for mark in newer]) - median_low([mark.stamp for mark in older])
    return max(0.0, risen) / elapsed_s if elapsed_s > 0.0 else None


def _marked(progress: Progress, mark: Mark) -> tuple[Mark, ...]:
    marks = progress.marks
    spacing_s = min(LONGEST_SPACING_S, (mark.at_s - progress.since_s) / MOST_MARKS)
    if len(marks) >= FEWEST_MARKS and mark.at_s - marks[-1].at_s < spacing_s:
        return marks
    return (*marks, mark)[-MOST_MARKS:]
