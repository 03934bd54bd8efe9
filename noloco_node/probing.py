"""How long a microbatch takes on this machine: one is made up and taken through the real stage, forward and backward.

The numbers are random, the shapes the run's. It is done twice and the faster one counts: the first also pays for what a
device does once (memory, kernels, caches). The gradients are thrown away.

A GPU is only known to have done its work when a number comes back from it. A source's backward pass returns none, so
time is taken from one output to the next: that is a backward and a forward pass, in whatever order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from noloco_node.config import PipelineConfig
    from noloco_node.machine import Dimensions, Stage

TIMES = 2


def measure(stage: Stage, number: int, pipeline: PipelineConfig, plan: Dimensions, clock: Callable[[], float]) -> float:
    """Return the device seconds of a microbatch at stage `number`; a job of the device's thread, as is `clock`."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (pipeline.microbatch_size, pipeline.sequence_length)

    def ids() -> Tensor:
        return torch.randint(plan.vocabulary, shape, generator=generator)

    def numbers() -> Tensor:
        return torch.randn((*shape, plan.width), generator=generator)

    hidden, targets, gradient = ids() if number == 0 else numbers(), ids(), numbers()
    marks = []
    if number == pipeline.stages - 1:
        marks.append(clock())
        for _ in range(TIMES):
            stage.loss(hidden, targets)
            marks.append(clock())
    else:
        for _ in range(TIMES):
            passed = stage.forward(hidden)
            marks.append(clock())
            passed.backward(gradient)
        stage.forward(hidden)
        marks.append(clock())
    stage.discard()
    return min(after - before for before, after in pairwise(marks))
