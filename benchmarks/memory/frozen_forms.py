"""What each form of a frozen model takes of a device, and of its time, beside what is planned.

A middle stage of a Llama-like model with adapters on all linear layers, and with all weights trained. Planned and
measured: bytes that the stage holds between two microbatches, and at the peak of one with its whole graph, without the
gradients of the adapters. The weights are random; their values change neither.

    python -m benchmarks.memory.frozen_forms --device cuda --width 4096 --layers 4
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from typing import get_args

import torch

from noloco_node.machine.device import Device, autocast_dtype
from noloco_node.node.stage_benchmark import measure
from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.planning.plan import memories
from noloco_node.run.config import NO_ADAPTER, AdapterConfig, ModelConfig, PipelineConfig, RunConfig
from noloco_node.units import format_bytes
from pipeline.adapters.frozen_weights import Form


@dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    length: int
    batch: int
    rank: int


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


def row(sizes: Sizes, adapter: AdapterConfig, torch_device: torch.device) -> str:
    """Return what one form takes, in a line."""
    run = run_of(sizes, adapter)
    layout, half = model_layout(run), autocast_dtype(torch_device, run.precision) is not None
    planned = memories(run, layout, half=half)[1]
    on_gpu = torch_device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    stage, device = make_stage(run, layout, 1, torch_device), Device(torch_device, 1.0)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() - before
    else:
        held = sum(each.nbytes for each in stage._module.state_dict().values())
        held += sum(each.nbytes for each in stage.optimiser_state().moments)
    probe = measure(stage, 1, run, layout, device.clock)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    device.close()
    lasting = planned.weights + planned.frozen + planned.optimiser + planned.cast_weights
    whole = lasting + planned.gradients + planned.unpacked + planned.whole_graph
    tokens_per_s = run.pipeline.microbatch_tokens / probe.device_s
    name = adapter.base if adapter.is_trained else "all trained"
    measured = f"{format_bytes(peak):>9} ({peak / whole:.3f})" if on_gpu else "-"
    return (
        f"{name:12} held: planned {format_bytes(lasting):>9}, measured {format_bytes(held):>9} ({held / lasting:.3f}); "
        f"peak: planned {format_bytes(whole):>9}, measured {measured}; {1000 * probe.device_s:.1f} ms, "
        f"{tokens_per_s:,.0f} tokens/s"
    )


def main() -> None:
    """Print a row for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    for name, default in (("width", 512), ("layers", 4), ("length", 512), ("batch", 2), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    torch_device = torch.device(given.pop("device"))
    sizes = Sizes(**given)
    if torch_device.type == "cuda":
        torch_device = torch.device("cuda", 0)
        print(torch.cuda.get_device_name(0), flush=True)
    torch.zeros(1, device=torch_device)
    for adapter in (NO_ADAPTER, *(AdapterConfig(rank=sizes.rank, base=form) for form in get_args(Form))):
        gc.collect()
        print(row(sizes, adapter, torch_device), flush=True)


if __name__ == "__main__":
    main()
