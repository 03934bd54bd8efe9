"""What each form of a frozen model takes of a device, and of its time, beside what is planned.

A middle stage of a Llama-like model with adapters on all linear layers, and with all weights trained. Planned and
measured: bytes that the stage holds between two microbatches, and at the peak of one with its whole graph, without the
gradients of the adapters. The weights are random; their values change neither. Times are medians, on a CPU of those for
which the thread had a core; the forms take turns. "passes" is what a microbatch costs in forward passes of the model
that is all trained (`noloco_node.planning.model_layout.training_passes`).

    python -m benchmarks.memory.frozen_forms --device cuda --width 4096 --layers 4
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median
from typing import get_args

import torch

from noloco_node.machine.device import autocast_dtype
from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.planning.plan import memories
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from noloco_node.units import format_bytes
from pipeline.activation_codec import encode
from pipeline.adapters.settings import NO_ADAPTER, AdapterConfig, Form
from pipeline.messages import ACTIVATION_CODECS


@dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    length: int
    batch: int
    rank: int
    repeat: int


def run_of(sizes: Sizes, adapter: AdapterConfig) -> RunConfig:
    """Return a run of three stages, of which the middle one has as many layers as asked for."""
    model = {
        "hidden_size": sizes.width,
        "intermediate_size": 7 * sizes.width // 2,
        "num_hidden_layers": sizes.layers + 2,
        "num_attention_heads": sizes.width // 128 or 1,
        "num_key_value_heads": max(1, sizes.width // 512),
        "vocab_size": 512,
        "max_position_embeddings": sizes.length,
    }
    pipeline = PipelineConfig(
        stages=3,
        boundaries=(1, sizes.layers + 1),
        sequence_length=sizes.length,
        microbatch_size=sizes.batch,
        microbatches_per_step=1,
    )
    return RunConfig(model=ModelConfig(architecture="llama", sizes=model), pipeline=pipeline, adapter=adapter)


class Trial:
    """The middle stage in one form, with what is measured of it."""

    def __init__(self, sizes: Sizes, adapter: AdapterConfig, torch_device: torch.device) -> None:
        run = run_of(sizes, adapter)
        layout, half = model_layout(run), autocast_dtype(torch_device, run.precision) is not None
        planned = memories(run, layout, half=half)[1]
        self.name = adapter.base if adapter.is_trained else "all trained"
        self.forward_s, self.backward_s = list[float](), list[float]()
        self._on_gpu = torch_device.type == "cuda"
        before = self._allocated()
        self._stage = make_stage(run, layout, 1, torch_device)
        held = sum(each.nbytes for each in self._stage._module.state_dict().values())
        held += sum(each.nbytes for each in self._stage.optimiser_state().moments)
        self.held = self._allocated() - before if self._on_gpu else held
        self.peak = 0
        self.lasting = planned.weights + planned.frozen + planned.optimiser + planned.cast_weights
        self.whole = self.lasting + planned.gradients + planned.unpacked + planned.whole_graph
        code, shape = ACTIVATION_CODECS[run.pipeline.codec], (*run.pipeline.ids_shape, layout.width)
        self._hidden, self._gradient = encode(code.down, torch.randn(shape)), encode(code.back, torch.randn(shape))

    def turn(self) -> None:
        """Take a microbatch through the stage, forward and backward."""
        lying, begun_s = self._allocated(), self._clock()
        passed = self._stage.forward(self._hidden)
        middle_s = self._clock()
        passed.backward(self._gradient)
        self.forward_s.append(middle_s - begun_s)
        self.backward_s.append(self._clock() - middle_s)
        if self._on_gpu:
            self.peak = max(self.peak, self.held + torch.cuda.max_memory_allocated() - lying)
        self._stage.discard()

    def row(self, trained_forward_s: float) -> str:
        """Return what was found, in a line; the first turn is not counted."""
        forward_s, backward_s = median(self.forward_s[1:]), median(self.backward_s[1:])
        measured = f"{format_bytes(self.peak):>9} ({self.peak / self.whole:.3f})" if self.peak else "-"
        return (
            f"{self.name:12} held: planned {format_bytes(self.lasting):>9}, measured {format_bytes(self.held):>9} "
            f"({self.held / self.lasting:.3f}); peak: planned {format_bytes(self.whole):>9}, measured {measured}; "
            f"forward {1000 * forward_s:.0f} ms, backward {1000 * backward_s:.0f} ms, "
            f"{(forward_s + backward_s) / trained_forward_s:.2f} passes"
        )

    def _clock(self) -> float:
        if not self._on_gpu:
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._on_gpu else 0


def main() -> None:
    """Print a row for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    for name, default in (("width", 512), ("layers", 4), ("length", 512), ("batch", 2), ("rank", 16), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    torch_device = torch.device(given.pop("device"))
    sizes = Sizes(**given)
    if torch_device.type == "cuda":
        torch_device = torch.device("cuda", 0)
        print(torch.cuda.get_device_name(0), flush=True)
    torch.zeros(1, device=torch_device)
    trials = [
        Trial(sizes, adapter, torch_device)
        for adapter in (NO_ADAPTER, *(AdapterConfig(rank=sizes.rank, base=form) for form in get_args(Form)))
    ]
    for _ in range(sizes.repeat + 1):
        for trial in trials:
            if torch_device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            trial.turn()
    for trial in trials:
        print(trial.row(median(trials[0].forward_s[1:])), flush=True)


if __name__ == "__main__":
    main()
