"""What a microbatch takes of a stage on this machine: a made-up one goes through the real stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from noloco_node.machine.interface import Dimensions, StageModel
from noloco_node.run.config import RunConfig
from pipeline.messages import ACTIVATION_CODECS, ActivationCode

if TYPE_CHECKING:
    from torch import Tensor

TIMES = 2
LOGITS_BESIDE = 3
"""Beside the softmax that autograd keeps, a pass of the last stage holds the logits and the gradients of both."""


class StageBenchmark(NamedTuple):
    """Device seconds of a microbatch, forward and backward, and the bytes that it keeps between the two passes.

    `kept_bytes` leaves out the weights, and is 0 for a stage without autograd, or one that computes its layers again.
    """

    device_s: float
    kept_bytes: int


def measure(
    stage: StageModel, number: int, run: RunConfig, layout: Dimensions, clock: Callable[[], float]
) -> StageBenchmark:
    """Measure a microbatch at stage `number`; a job of the device's thread, as is `clock`.

    A made-up microbatch goes forward and backward through the real stage, twice. The faster pass counts, since the
    first one also pays for one-time work of the device; the first pass counts the kept bytes. A GPU has surely done its
    work only once a number comes back from it, and a source's backward pass returns none. So time runs from one output
    to the next: a backward and a forward pass, in either order.
    """
    import torch

    from noloco_node.machine.memory import SavedTensors
    from pipeline.activation_codec import encode, first
    from pipeline.forward_pass import LOGIT_BYTES, LOGITS

    generator, pipeline = torch.Generator().manual_seed(0), run.pipeline
    shape = pipeline.ids_shape

    def ids(shape: tuple[int, int]) -> Tensor:
        return torch.randint(layout.vocabulary, shape, generator=generator)

    def numbers(code: ActivationCode, size: float = 1.0) -> Tensor:
        return encode(code, size * torch.randn((*shape, layout.width), generator=generator))

    codec = ACTIVATION_CODECS[pipeline.codec]
    hidden = ids(shape) if number == 0 else numbers(codec.down)
    # Of the size of a mean loss' gradient: a larger one overflows float16, and the stage would keep a smaller factor.
    gradient = numbers(codec.back, 1.0 / prod(shape))
    targets = ids(pipeline.targets_shape)
    if run.data.packs:  # attention within rows takes a mask
        middle = targets[:, targets.shape[1] // 2]
        middle.copy_(first(middle))
    marks, saved = [], SavedTensors()
    if pipeline.is_last(number):
        marks.append(clock())
        for attempt in range(TIMES):
            with nullcontext() if attempt else saved:
                stage.loss(hidden, targets)
            marks.append(clock())
    else:
        for attempt in range(TIMES):
            with nullcontext() if attempt else saved:
                passed = stage.forward(hidden, targets)
            marks.append(clock())
            passed.backward(gradient)
        stage.forward(hidden, targets)
        marks.append(clock())
    stage.discard()
    device_s = min(after - before for before, after in pairwise(marks))
    if stage.statistics().get("recomputed"):
        return StageBenchmark(device_s, 0)
    logits = layout.vocabulary * targets.numel() if saved.bytes and pipeline.is_last(number) else 0
    # In chunks autograd keeps no softmax.
    beside = LOGITS_BESIDE * 4 * logits if logits <= LOGITS else LOGIT_BYTES * LOGITS
    return StageBenchmark(device_s, saved.bytes + beside)
