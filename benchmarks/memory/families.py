"""What autograd keeps of a microbatch, as planned and as counted, for every family that can be trained in stages.

    python -m benchmarks.memory.families [--families llama gemma2] [--length 1024]

A model of four layers and width 256 in two stages of two, microbatches of three sequences. A row: planned bytes over
those of a real forward pass, at the first and the last stage, in float32 and in bfloat16; the same of what a microbatch
takes less at its peak where each layer is computed again, by torch's profiler, in float32; and the seconds that
planning takes. `noloco_node.planning.graph_memory` measures models of a quarter of these widths and less, and
sequences of at most 32 tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from noloco_node.machine.memory import SavedTensors
from noloco_node.node.stage_benchmark import LOGITS_BESIDE
from noloco_node.planning.graph_memory import graph_bytes
from noloco_node.planning.model_layout import ModelLayout, build_stage, make_stage, model_layout
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from pipeline.adapters.settings import NO_ADAPTER, AdapterConfig
from pipeline.forward_pass import StageSettings
from pipeline.inner_step import InnerConfig
from pipeline.stage import Stage

MOST = 1.25
"""Times that a plan may be off, up or down."""
_BASE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 704,
    "vocab_size": 384,
    "max_position_embeddings": 2048,
}
_GROUPED = _BASE | {"num_key_value_heads": 4}
_GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 384, "n_positions": 2048}
_EXPERTS = {"moe_intermediate_size": 192, "num_experts_per_tok": 2}
_HEAD = {"head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 256, "n_layer": 4, "n_head": 8, "vocab_size": 384},
    "cohere": _GROUPED,
    "deepseek_v3": _BASE
    | _EXPERTS
    | {"num_key_value_heads": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    | {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "falcon": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 384},
    "gemma": _GROUPED | _HEAD,
    "gemma2": _GROUPED | _HEAD,
    "gemma3_text": _GROUPED | _HEAD | {"sliding_window": 64},
    "glm4": _GROUPED | _HEAD,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {
        "hidden_size": 256,
        "num_layers": 4,
        "num_heads": 8,
        "attention_types": [[["global", "local"], 2]],
        "vocab_size": 384,
        "max_position_embeddings": 2048,
    },
    "gpt_neox": _BASE,
    "gpt_oss": _GROUPED | _HEAD | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gptj": _GPT2 | {"rotary_dim": 16},
    "granite": _GROUPED,
    "llama": _GROUPED,
    "mistral": _GROUPED | _HEAD,
    "mixtral": _GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mpt": {"d_model": 256, "n_heads": 8, "n_layers": 4, "vocab_size": 384},
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "olmoe": _GROUPED | {"num_experts": 16, "num_experts_per_tok": 4},
    "opt": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "ffn_dim": 1024,
        "vocab_size": 384,
        "word_embed_proj_dim": 256,
    },
    "phi": _GROUPED,
    "phi3": _GROUPED,
    "qwen2": _GROUPED,
    "qwen2_moe": _GROUPED | _EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 256},
    "qwen3": _GROUPED | _HEAD,
    "qwen3_moe": _GROUPED | _EXPERTS | _HEAD | {"num_experts": 16, "num_experts_per_tok": 8},
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
}
"""Sizes under the names of each family's config: those of docs/families.md that can be trained in stages."""


def compared(
    family: str, *, length: int, halves: Sequence[bool] = (False, True), adapter: AdapterConfig = NO_ADAPTER
) -> Iterator[float]:
    """Yield planned over real bytes, for the first and the last stage and each precision."""
    pipeline = PipelineConfig(stages=2, boundaries=(2,), sequence_length=length, microbatch_size=3)
    model = ModelConfig(architecture=family, sizes=FAMILIES[family])
    run = RunConfig(model=model, pipeline=pipeline, adapter=adapter)
    layout = model_layout(run)
    for half in halves:
        for number in range(2):
            yield graph_bytes(pipeline, layout, number, half=half).whole / _kept(run, layout, number, half)


def spared(family: str, *, length: int) -> Iterator[float]:
    """Yield planned over real bytes that a microbatch takes less by layers, for the first and the last stage."""
    pipeline = PipelineConfig(stages=2, boundaries=(2,), sequence_length=length, microbatch_size=3, codec="float32")
    run = RunConfig(model=ModelConfig(architecture=family, sizes=FAMILIES[family]), pipeline=pipeline)
    layout = model_layout(run)
    for number in range(2):
        planned = graph_bytes(pipeline, layout, number, half=False)
        whole, by_layers = (_peak(run, layout, number, by_layers=each) for each in (False, True))
        yield (planned.whole - planned.by_layers) / (whole - by_layers)


def _peak(run: RunConfig, layout: ModelLayout, number: int, *, by_layers: bool) -> int:
    """Return the bytes that a forward and a backward pass take at most, beside weights and gradients."""
    stage = make_stage(run, layout, number, torch.device("cpu"), by_layers=by_layers)
    shape, random = run.pipeline.ids_shape, torch.Generator().manual_seed(0)
    ids = torch.randint(layout.vocabulary, shape, generator=random)

    def microbatch() -> None:
        if run.pipeline.is_last(number):
            stage.loss(torch.randn(*shape, layout.width, generator=random), ids)
        else:
            waiting = stage.forward(ids)
            waiting.backward(torch.zeros_like(waiting.output))

    microbatch()  # the gradients' memory is there then
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        microbatch()
    found = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


def _kept(run: RunConfig, layout: ModelLayout, number: int, half: bool) -> int:
    cut, device = layout.cuts[number], torch.device("cpu")
    stage = Stage(
        build_stage(run, layout, number, device),
        InnerConfig(),
        StageSettings(device, torch.bfloat16 if half else None),
        first=cut.embeds,
        last=cut.head,
    )
    shape = (run.pipeline.microbatch_size, run.pipeline.sequence_length)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(layout.vocabulary, shape, generator=random)
    saved = SavedTensors()
    with saved:
        if cut.head:
            stage.loss(torch.randn(*shape, layout.width, generator=random), ids)
        else:
            stage.forward(ids)
    return saved.bytes + (LOGITS_BESIDE * 4 * layout.vocabulary * ids.numel() if cut.head else 0)


def main() -> None:
    """Print a row for each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for family in arguments.families:
        begun_s = time.perf_counter()
        run = RunConfig(
            model=ModelConfig(architecture=family, sizes=FAMILIES[family]),
            pipeline=PipelineConfig(stages=2, boundaries=(2,), sequence_length=arguments.length),
        )
        layout = model_layout(run)
        laid_s = time.perf_counter()
        for half in (False, True):
            for number in range(2):
                graph_bytes(run.pipeline, layout, number, half=half)
        took_s = time.perf_counter() - laid_s
        ratios = " ".join(f"{ratio:.3f}" for ratio in compared(family, length=arguments.length))
        ratios += " ".join(f" {ratio:.3f}" for ratio in spared(family, length=arguments.length))
        print(f"{family:12} {ratios}  {took_s:.1f} s, after {laid_s - begun_s:.1f} s for the layout", flush=True)


if __name__ == "__main__":
    main()
