"""What a microbatch takes on this machine: one is made up and taken through the real stage, forward and backward.

The numbers are random, the shapes the run's. It is done twice and the faster one counts: the first also pays for what a
device does once (memory, kernels, caches). The gradients are thrown away.

A GPU is only known to have done its work when a number comes back from it. A source's backward pass returns none, so
time is taken from one output to the next: that is a backward and a forward pass, in whatever order.

What a forward pass keeps for the backward one is counted, the first time (`noloco_node.machine.memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from noloco_node.machine.interface import Dimensions, StageModel
from noloco_node.run.config import PipelineConfig
from pipeline.messages import ACTIVATION_CODECS, ActivationCode

if TYPE_CHECKING:
    from torch import Tensor

TIMES = 2
LOGITS_BESIDE = 3
"""Of the last stage: beside the softmax that autograd keeps its pass holds the logits, and the gradients of both."""


class StageBenchmark(NamedTuple):
    """What a microbatch takes: device seconds, forward and backward, and bytes that lie between the two passes.

    `kept_bytes` does without the weights, which are there anyway; 0 from a stage without autograd.
    """

    device_s: float
    kept_bytes: int


def measure(
    stage: StageModel, number: int, pipeline: PipelineConfig, layout: Dimensions, clock: Callable[[], float]
) -> StageBenchmark:
    """Return what a microbatch takes at stage `number`; a job of the device's thread, as is `clock`."""
    import torch

    from noloco_node.machine.memory import SavedTensors
    from pipeline.activation_codec import encode
    from pipeline.stage import LOGITS

    generator = torch.Generator().manual_seed(0)
    shape = (pipeline.microbatch_size, pipeline.sequence_length)

    def ids(shape: tuple[int, int]) -> Tensor:
        return torch.randint(layout.vocabulary, shape, generator=generator)

    def numbers(code: ActivationCode) -> Tensor:
        return encode(code, torch.randn((*shape, layout.width), generator=generator))

    codec = ACTIVATION_CODECS[pipeline.codec]
    hidden, gradient = ids(shape) if number == 0 else numbers(codec.down), numbers(codec.back)
    targets = ids(pipeline.targets_shape)
    marks, saved = [], SavedTensors()
    if number == pipeline.stages - 1:
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
    last = saved.bytes and number == pipeline.stages - 1
    beside = LOGITS_BESIDE * 4 * min(LOGITS, layout.vocabulary * targets.numel()) if last else 0
    return StageBenchmark(min(after - before for before, after in pairwise(marks)), saved.bytes + beside)
