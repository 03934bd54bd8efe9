"""What `check` prints of a run of adapters in one stage, beside arithmetic and beside real tensors.

Llama-3-8B by arithmetic alone; a Llama of 0.13 billion parameters for real: its stage is built, and a round's weights
are coded. A row: bytes of the frozen model, of adapters with their moments, and of a round.

    python -m benchmarks.memory.adapter_run [--rank 16] [--base nf4]
"""

from __future__ import annotations

import argparse
from math import ceil
from typing import get_args

import torch

from gossip.exchange.codec import OwnWeights, encode
from noloco_node.planning.model_layout import make_stage, model_layout
from noloco_node.planning.plan import plan
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from noloco_node.units import format_bytes
from pipeline.adapters.frozen_weights import NF4_BLOCK
from pipeline.adapters.settings import AdapterConfig, Form

LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SMALL = LARGE | {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
}


def run_of(sizes: dict[str, int], adapter: AdapterConfig) -> RunConfig:
    pipeline = PipelineConfig(stages=1, replicas=3, sequence_length=512, microbatch_size=1)
    return RunConfig(model=ModelConfig(architecture="llama", sizes=sizes), pipeline=pipeline, adapter=adapter)


def by_arithmetic(sizes: dict[str, int], rank: int, form: Form) -> tuple[float, float, float]:
    """Return the bytes of the frozen model, of adapters in float32 with two moments, and of their int4 codes, twice."""
    width, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    keys = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    linear = [(width, width), (width, keys), (width, keys), (width, width), *[(width, inner)] * 2, (inner, width)]
    numbers = layers * sum(one * other for one, other in linear)
    rows = layers * sum(other for _, other in linear)
    bits = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "nf4": 4.0 + 16.0 / NF4_BLOCK}[form]
    scales = 4 * rows if form == "int8" else 0
    outside = 4 if form == "float32" else 2
    frozen = numbers * bits / 8 + scales + outside * 2 * sizes["vocab_size"] * width + 4 * (2 * layers + 1) * width
    adapters = layers * sum(rank * (one + other) for one, other in linear)
    return frozen, 12.0 * adapters, ceil(adapters / 2)


def by_tensors(run: RunConfig) -> tuple[int, int, int]:
    """Return the same bytes of a stage that is really built, and of its weights as they travel."""
    stage = make_stage(run, model_layout(run), 0, torch.device("cpu"))
    weights = stage.current_weights()
    trained = sum(each.nbytes for each in weights)
    held = sum(each.nbytes for each in stage._module.state_dict().values())
    moments = sum(each.nbytes for each in stage.optimiser_state().moments)
    moved = tuple(each + 0.01 for each in weights)
    steps = [0.01] * len(weights) if run.outer.codec.is_modular else []
    coded = encode(run.outer.codec, OwnWeights(moved), steps).coded
    return held - trained, trained + moments, run.outer.weight_sets * sum(each.nbytes for each in coded.wire)


def main() -> None:
    """Print what is planned, and what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--base", choices=get_args(Form), default="nf4")
    args = parser.parse_args()
    adapter = AdapterConfig(rank=args.rank, alpha=2.0 * args.rank, base=args.base)
    for name, sizes in (("Llama-3-8B", LARGE), ("0.13B", SMALL)):
        run = run_of(sizes, adapter)
        (stage,) = plan(run).stages
        planned = (stage.memory.frozen, stage.memory.weights + stage.memory.optimiser, stage.round_bytes)
        rows = {"planned": planned, "arithmetic": by_arithmetic(sizes, args.rank, args.base)}
        if name != "Llama-3-8B":
            rows["tensors"] = by_tensors(run)
        for origin, found in rows.items():
            told = (f"{format_bytes(each):>9} ({each / mine:.3f})" for each, mine in zip(found, planned, strict=True))
            print(f"{name:10} {origin:10} frozen, adapters, a round: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
