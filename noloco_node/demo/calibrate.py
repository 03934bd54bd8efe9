"""How many inner steps fit into the time asked for: a short training of the run's own model on this machine.

    python -m noloco_node.demo.calibrate RUN_FILE        prints seconds_per_microbatch and a number

Peers compute in one thread each, so a swarm has the arithmetic of as many cores as it has peers, at most all of them.
The parent starts that many calibrations at once: cores that share a cache, a clock or a quota are slow here as they
will be in earnest. What is left over, daemons, serialisation and waiting, is one measured factor
(`noloco_node.demo.swarm_processes.EFFICIENCY`).
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor

from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.run.config import InnerConfig, PipelineConfig, RunConfig
from noloco_node.run.runfile import load_run
from pipeline.stage import Stage

MEASURE_S = 3.0


def measure(run: RunConfig, measure_s: float) -> float:
    """Train the whole model of `run` for `measure_s` seconds, stage by stage in one thread.

    Returns the seconds of a microbatch: through all stages, forward, backward and inner steps.
    """
    torch.set_num_threads(1)
    layout, device = model_layout(run), torch.device("cpu")
    stages = [make_stage(run, layout, number, device) for number in range(run.pipeline.stages)]
    tokens = _tokens(run)
    _window(stages, tokens, run.pipeline, run.inner)  # the first is slow: memory is taken, kernels are chosen
    begun, windows = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < measure_s or windows == 0:
        _window(stages, tokens, run.pipeline, run.inner)
        windows += 1
    return elapsed / (windows * run.pipeline.microbatches_per_step)


def _tokens(run: RunConfig) -> Tensor:
    shape = (run.pipeline.microbatch_size, run.pipeline.sequence_length + 1)
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


def _window(stages: list[Stage], tokens: Tensor, pipeline: PipelineConfig, inner: InnerConfig) -> None:
    for _ in range(pipeline.microbatches_per_step):
        hidden, passes = tokens[:, :-1], []
        for stage in stages[:-1]:
            passes.append(stage.forward(hidden))
            hidden = passes[-1].output
        gradient = stages[-1].loss(hidden, tokens[:, 1:]).hidden
        for waiting in reversed(passes):
            assert gradient is not None
            gradient = waiting.backward(gradient)
    for stage in stages:
        stage.step(inner.learning_rate, pipeline.microbatches_per_step)


if __name__ == "__main__":
    print("seconds_per_microbatch", measure(load_run(sys.argv[1]), MEASURE_S))
