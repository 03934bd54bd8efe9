"""What a microbatch keeps of a graph, as planned from small models, against the stages themselves, for every family."""

from typing import Any

import pytest
import torch

from benchmarks.memory.families import FAMILIES, MOST, compared, spared
from docs import generate_families
from noloco_node.planning import graph_memory
from noloco_node.planning.graph_memory import extrapolated, graph_bytes
from noloco_node.planning.model_layout import ModelLayout, build_stage, make_stage, model_layout
from noloco_node.planning.plan import memories
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from pipeline.adapters.settings import AdapterConfig
from pipeline.forward_pass import StageSettings
from pipeline.inner_step import InnerConfig
from pipeline.stage import Stage


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_a_family_is_within_a_fifth_of_what_its_stages_keep(family: str) -> None:
    for ratio in compared(family, length=96, halves=(False,)):
        assert 1 / MOST <= ratio <= MOST


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_so_it_is_in_bfloat16(family: str) -> None:
    for ratio in compared(family, length=96, halves=(True,)):
        assert 1 / MOST <= ratio <= MOST


@pytest.mark.parametrize(
    ("family", "base"),
    [
        *(("llama", base) for base in ("float32", "bfloat16", "int8", "nf4")),
        *(("gpt2", base) for base in ("float32", "nf4")),
        ("gemma2", "nf4"),
    ],
)
def test_so_it_is_with_adapters_over_any_form_of_the_model(family: str, base: Any) -> None:
    for ratio in compared(family, length=96, halves=(base != "float32",), adapter=AdapterConfig(rank=4, base=base)):
        assert 1 / MOST <= ratio <= MOST


@pytest.mark.parametrize("base", ["float32", "bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("half", [False, True])
def test_a_stage_with_adapters_holds_just_what_is_planned(base: Any, half: bool) -> None:
    model = ModelConfig(architecture="llama", sizes=FAMILIES["llama"])
    run = RunConfig(
        model=model, pipeline=PipelineConfig(stages=2, sequence_length=96), adapter=AdapterConfig(rank=4, base=base)
    )
    layout = model_layout(run)
    for number, planned in enumerate(memories(run, layout, half=half)):
        part = build_stage(run, layout, number, torch.device("cpu"))
        settings = StageSettings(torch.device("cpu"), torch.bfloat16 if half else None)
        stage = Stage(part, InnerConfig(), settings, first=number == 0, last=number == 1)
        held = {each.data_ptr(): each.nbytes for each in part.state_dict().values()}
        cast = sum(leaf.nbytes for leaf in stage._set.leaves.values() if leaf.dtype is torch.bfloat16)
        moments = sum(each.nbytes for each in stage.optimiser_state().moments)
        assert planned.frozen + planned.weights == sum(held.values())
        assert (planned.cast_weights, planned.optimiser) == (cast, moments)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_so_is_what_is_spared_where_layers_are_computed_again(family: str) -> None:
    for ratio in spared(family, length=96):
        assert 1 / MOST <= ratio <= MOST


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_computed_again_have_the_same_bits(family: str) -> None:
    pipeline = PipelineConfig(stages=2, boundaries=(2,), sequence_length=24, microbatch_size=2, codec="float32")
    model = ModelConfig(architecture=family, sizes=generate_families.FAMILIES[family])
    run = RunConfig(model=model, pipeline=pipeline)
    layout = model_layout(run)
    for number in range(2):
        stages = (make_stage(run, layout, number, torch.device("cpu"), by_layers=each) for each in (False, True))
        whole, by_layers = (_after_a_step(stage, layout, last=bool(number)) for stage in stages)
        assert len(whole) == len(by_layers)
        assert all(map(torch.equal, whole, by_layers))


def _after_a_step(stage: Stage, layout: ModelLayout, *, last: bool) -> list[torch.Tensor]:
    """Return what a microbatch sends on or back, and the weights after a step of its gradients."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(layout.vocabulary, (2, 24), generator=random)
    if last:
        sent = stage.loss(torch.randn(2, 24, layout.width, generator=random), ids).hidden
        assert sent is not None
    else:
        waiting = stage.forward(ids)
        waiting.backward(torch.randn(waiting.output.shape, generator=random))
        sent = waiting.output
    assert stage.step(1e-2, 1).gradient_norm > 0.0
    return [sent, *stage.weights()]


def test_a_polynomial_of_these_degrees_is_met_exactly() -> None:
    def bytes_of(scale: float, batch: float, length: float) -> float:
        return 7 + batch * length * (3 * scale + 2) + batch * length**2 + 5 * length**2

    grid = {(s, b, n): bytes_of(s, b, n) for s in (0.25, 0.5) for b in (1.0, 2.0) for n in (8.0, 16.0, 32.0)}
    assert extrapolated(grid, (1.0, 5.0, 300.0)) == pytest.approx(bytes_of(1.0, 5.0, 300.0))


def test_a_family_is_measured_once_and_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight billion parameters, in the memory of a few small layers; later stages and windows ask nothing more."""
    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "vocab_size": 384,
    }
    run = RunConfig(
        model=ModelConfig(architecture="mistral", sizes=sizes), pipeline=PipelineConfig(stages=4, sequence_length=1024)
    )
    layout, filled = model_layout(run), []
    zeros = torch.zeros

    def counted(*shape: Any, **others: Any) -> torch.Tensor:
        tensor: torch.Tensor = zeros(*shape, **others)
        filled.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(graph_memory.torch, "zeros", counted)
    monkeypatch.setattr(graph_memory, "_families", {})
    found = [graph_bytes(run.pipeline, layout, stage, half=True) for stage in range(4)]
    assert found[1] == found[2] < found[3]
    assert sum(filled) < 100e6
    before = len(filled)
    assert [graph_bytes(run.pipeline, layout, stage, half=True) for stage in range(4)] == found
    assert len(filled) == before
