"""What `check` says: exact where it can be."""

import json
from math import prod
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from user_errors import user_error

from gossip.rounds.matching import steps_per_round
from noloco_node.errors import Exit
from noloco_node.machine.memory import GraphBytes, bytes_beside, usable_bytes
from noloco_node.planning.bandwidth import PROBE_BYTES
from noloco_node.planning.model_layout import ModelLayout, build_stage, model_layout
from noloco_node.planning.plan import RunPlan, graphs_that_fit, mean_steps_per_round, memories, plan
from noloco_node.planning.plan_text import describe, report
from noloco_node.planning.throughput import Machines, stage_loads
from noloco_node.planning.windows import MESSAGES
from noloco_node.run.config import RunConfig
from noloco_node.run.presets import PRESETS, run_text
from noloco_node.run.runfile import decode_run, validate
from pipeline.forward_pass import StageSettings
from pipeline.stage import Stage

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 384,
    "max_position_embeddings": 128,
}

PAPER = {"inner_steps_per_round": 50, "alpha": 0.5, "beta": 0.7, "gamma": 0.7, "codec": "float32"}


def run_with(architecture: str = "llama", sizes: dict[str, Any] = LLAMA, **sections: dict[str, Any]) -> RunConfig:
    pipeline = {"sequence_length": 64, "microbatch_size": 2, "microbatches_per_step": 8, **sections.pop("pipeline", {})}
    sections["outer"] = PAPER | sections.get("outer", {})
    table = {"model": {"architecture": architecture, "sizes": sizes}, "pipeline": pipeline, **sections}
    run = msgspec.convert(table, RunConfig)
    validate(run)
    return run


def test_the_numbers_of_a_small_run() -> None:
    found = plan(run_with(pipeline={"replicas": 3}, inner={"steps": 1000, "warmup_steps": 10}))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert [stage.parameters for stage in found.stages] == [384 * 64 + 4 * layer, 4 * layer + 64 + 384 * 64]
    assert [stage.layers for stage in found.stages] == [(0, 4), (4, 8)]
    assert found.parameters == sum(stage.parameters for stage in found.stages)
    assert sum(stage.work for stage in found.stages) == pytest.approx(1)
    assert found.stages[1].work > found.stages[0].work, "the vocabulary head is work, the embedding is not"
    assert found.hop_up_bytes == 2 * 64 * 64 * 2
    assert found.hop_down_bytes == found.hop_up_bytes + 2 * 64 * 8
    assert found.tokens_per_step == 64 * 2 * 8
    assert found.tokens == 1000 * 3 * found.tokens_per_step
    assert found.rounds == 20
    memory = found.stages[0].memory
    assert (
        memory.weights == memory.gradients == memory.slow_weights == memory.snapshot == 4 * found.stages[0].parameters
    )
    assert memory.optimiser == 2 * memory.weights
    # Both sides' weights as they travel.
    assert memory.exchange == 2 * memory.weights
    gpu, once = found.stages[0].gpu, memory.weights
    assert gpu.phases == {
        "steps": 3 * once + gpu.waiting,
        "a round": 5 * once + gpu.waiting,
        "adopting": 4 * once + gpu.waiting,
        "catching up": 4 * once,
    }
    assert gpu.beside == 5 * once + gpu.waiting
    assert memory.total == 9 * once + memory.graph + memory.waiting
    assert memory.other_graphs == 7 * memory.whole_graph
    assert found.stages[1].memory.other_graphs == 0, "the last stage has one microbatch at a time"
    assert len(found.efficiency) == len(MESSAGES)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("codec", "down", "back"), [("float32", 256, 256), ("int8", 68, 68), ("int6-int4", 52, 36), ("int5-int3", 44, 28)]
)
def test_a_hop_weighs_what_the_codec_says(codec: str, down: int, back: int) -> None:
    """Per token of 64 values: codes, two scales and a top; on the way down also a target of eight bytes."""
    found, tokens = plan(run_with(pipeline={"codec": codec})), 2 * 64
    assert (found.hop_down_bytes, found.hop_up_bytes) == (tokens * (down + 8), tokens * back)


def test_what_travels_halves_with_bfloat16_and_doubles_without_the_shortcut() -> None:
    plain, lean = plan(run_with(pipeline={"codec": "float32"})), plan(run_with())
    assert 2 * lean.hop_up_bytes == plain.hop_up_bytes
    assert plain.stages[0].round_bytes == plain.stages[0].memory.weights + PROBE_BYTES
    gathering = plan(run_with(outer={"momentum_period": 2})).stages[0].memory
    assert gathering.gathered == gathering.weights
    both = plan(run_with(outer={"gamma": 0.6}))
    # A probe ahead of the round is one more.
    assert both.stages[0].round_bytes == 2 * both.stages[0].memory.weights + 2 * PROBE_BYTES
    assert both.stages[0].memory.ahead == 2 * both.stages[0].memory.weights


@pytest.mark.parametrize(("codec", "smaller", "probes"), [("bfloat16", 2.0, 1), ("int8", 3.9, 1), ("int4", 8.0, 2)])
def test_what_a_round_moves_follows_the_codec(codec: str, smaller: float, probes: int) -> None:
    plain, coded = plan(run_with()).stages[0], plan(run_with(outer={"codec": codec})).stages[0]
    weights = plain.round_bytes - PROBE_BYTES
    assert weights / (coded.round_bytes - probes * PROBE_BYTES) == pytest.approx(smaller, rel=0.01)
    assert 2 * coded.memory.snapshot == plain.memory.snapshot
    # Both sides' weights as they travel.
    assert coded.memory.exchange == pytest.approx(2 * weights / smaller, rel=0.01)
    assert plain.memory.gathered == 0


def test_the_default_keeps_no_momentum_and_a_round_takes_7_bytes_a_parameter_beside_the_device() -> None:
    run = msgspec.convert(
        {"model": {"architecture": "llama", "sizes": LLAMA}, "pipeline": {"sequence_length": 64}}, RunConfig
    )
    for stage in plan(run).stages:
        memory = stage.memory
        assert memory.outer_momentum == memory.gathered == 0
        beside = {phase: (size - memory.waiting) / stage.parameters for phase, size in memory.phases.items()}
        assert beside.pop("catching up") == pytest.approx(12 - memory.waiting / stage.parameters)
        assert beside == pytest.approx({"steps": 6, "a round": 7, "adopting": 8}, rel=0.01)
        assert stage.gpu.beside >= 8 * stage.parameters


@pytest.mark.parametrize("period", [1, 20, 21, 900])
def test_a_momentum_that_never_moves_is_worth_a_warning(period: int) -> None:
    run = run_with(inner={"steps": 1000, "warmup_steps": 10}, outer={"momentum_period": period})
    found = plan(run)
    assert found.rounds == 20
    assert any("never moves" in warning for warning in found.warnings) == (period > 20)


@given(early=st.integers(8, 100), factor=st.floats(1 / 8, 8.0), steps=st.integers(1000, 20_000))
def test_rounds_follow_the_course_of_the_steps_between_them(early: int, factor: float, steps: int) -> None:
    """Walked round by round, as a replica whose progress is even does."""
    late = max(8, round(early * factor))
    sections = {"outer": {"inner_steps_per_round": early, "late_inner_steps_per_round": late, "overlap_steps": 4}}
    run = run_with(inner={"steps": steps, "warmup_steps": 1}, **sections)
    done = rounds = 0
    while done + (next_round := steps_per_round(done / steps, early, late)) <= steps:
        done, rounds = done + next_round, rounds + 1
    assert steps / mean_steps_per_round(run.outer) == pytest.approx(rounds, rel=0.1, abs=2)
    assert min(early, late) <= mean_steps_per_round(run.outer) <= max(early, late)


def test_one_stage_has_no_hops() -> None:
    found = plan(run_with(pipeline={"stages": 1}))
    assert (found.hop_down_bytes, found.hop_up_bytes, round(found.efficiency[-1], 3)) == (0, 0, 1.0)
    assert not any("hop" in line for line in describe(found))


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state", ["float32", "int8"])
@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize(("family", "experts"), [("llama", 1), ("mixtral", 3)])
def test_bytes_a_parameter_are_those_that_a_stage_has(
    half: torch.dtype | None, state: str, windows: int, family: str, experts: int
) -> None:
    """Counted as storages: weights, gradients, moments, and the sets in use after a step under a pass that waits."""
    sizes = LLAMA | ({"num_local_experts": experts} if experts > 1 else {})
    run = run_with(family, sizes, pipeline={"windows_in_flight": windows}, inner={"state": state})
    layout = model_layout(run)
    stage = staged(run, layout, 0, half)
    planned = memories(run, layout, half=half is not None, splits=half is not torch.float16)[0]
    ids = torch.randint(0, 384, (2, 64))
    passes = [stage.forward(ids) for _ in range(windows)]
    late = [each._origin.weights for each in passes if each._origin is not None][1:]
    sent = passes[0].output
    passes[0].backward(torch.full_like(sent, 1e-4))
    gradients = [weight.grad for weight in stage._weights if weight.grad is not None]
    stage.step(1e-3, 1)
    moments = stage.optimiser_state().moments
    sets = [leaf for each in (stage._set, *late) for leaf in each.leaves.values()]
    storages = {t.untyped_storage().data_ptr(): t for t in (*stage.current_weights(), *gradients, *moments, *sets)}
    counted = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    assert counted == planned.computing - planned.graph
    assert planned.waiting == 8 * windows * (ids.nbytes + sent.nbytes)
    assert sum(tensor.nbytes for tensor in moments) == planned.optimiser
    if half is not None and windows == 1 and state == "float32":
        # All but the embedding and the norms once more in 16 bits.
        assert planned.cast_weights == 2 * (4 * (4 * 64 * 64 + experts * 3 * 64 * 128))


def staged(run: RunConfig, layout: ModelLayout, number: int, half: torch.dtype | None) -> Stage:
    return Stage(
        build_stage(run, layout, number, torch.device("cpu")),
        run.inner,
        StageSettings(torch.device("cpu"), half),
        first=number == 0,
        last=number == 1,
        codec=run.pipeline.codec,
    )


@pytest.mark.parametrize(("family", "sizes"), [("llama", LLAMA), ("mixtral", LLAMA | {"num_local_experts": 3})])
def test_a_plan_counts_what_orthogonal_steps_take(family: str, sizes: dict[str, Any]) -> None:
    plain, turned = (
        run_with(family, sizes, pipeline={"stages": 1}, inner={"orthogonal": orthogonal})
        for orthogonal in (False, True)
    )
    layout, line = model_layout(turned), {"up_bytes_per_s": 1e7, "down_bytes_per_s": 1e7, "latency_s": 0.05}
    machines = Machines(count=2, gpu_bytes=2**30, ram_bytes=2**33, flops=1e12, **line)
    shapes = [shape for name, shape in layout.shapes[0].items() if "layers" in name and len(shape) > 1]
    inside = [shape for shape in shapes if shape != (3, 64)]  # without routers
    assert list(layout.sizes[0].matrices) == inside
    # Five times X X', its square, and their product with X.
    smaller = [(prod(shape[:-2]), *sorted(shape[-2:])) for shape in inside]
    operations = sum(5 * count * (4 * a * a * b + 2 * a**3) for count, a, b in smaller)
    (usual,), (found,) = (memories(run, layout) for run in (plain, turned))
    assert found.computing - usual.computing == found.orthogonal_step == 6 * 4 * max(map(prod, inside))
    (bfloat16,), (float16,) = (memories(turned, layout, half=True, splits=splits) for splits in (True, False))
    assert 2 * bfloat16.orthogonal_step == float16.orthogonal_step == found.orthogonal_step
    (before,), (after,) = (stage_loads(run, layout, machines, [usual]) for run in (plain, turned))
    assert after.device_s - before.device_s == pytest.approx(operations / 1e12 / 8)


@given(
    free=st.none() | st.integers(0, 10**12),
    lasting=st.integers(1, 10**11),
    graph=st.tuples(st.integers(1, 10**10), st.integers(1, 10**10)),
    most=st.integers(1, 64),
)
def test_graphs_are_kept_while_they_fit(free: int | None, lasting: int, graph: tuple[int, int], most: int) -> None:
    whole, least = max(graph), min(graph)
    kept = graphs_that_fit(free, lasting + least, GraphBytes(whole, least), most)
    each = least if kept.by_layers else whole
    assert not kept.by_layers or (free is not None and lasting + whole > usable_bytes(free)), "whole where one fits"
    if kept.number is None:
        assert free is None or most == 1 or lasting + most * each <= free
    else:
        assert free is not None
        assert 0 <= kept.number < most - 1
        assert kept.number == 0 or lasting + (kept.number + 1) * each <= free
    assert 0.0 <= kept.computed_again(most) <= 1.0


@given(
    computing=st.integers(1, 10**11),
    beside=st.integers(0, 10**11),
    moments=st.integers(0, 10**11),
    graph=st.integers(0, 10**11),
    gpu=st.floats(0, 10**12),
    ram=st.floats(0, 10**12),
)
def test_as_few_moments_lie_beside_a_gpu_as_let_a_stage_fit_and_keep_its_graph(
    computing: int, beside: int, moments: int, graph: int, gpu: float, ram: float
) -> None:
    most = min(moments, ram - beside)
    moved = bytes_beside(computing, beside, moments, graph, gpu, ram)
    assert 0 <= moved <= max(0.0, most)
    if computing + graph - most <= gpu - 1.0 and most >= 0.0:
        assert computing + graph - moved <= gpu, "there is room for the graph"
        assert moved == 0 or computing + graph - moved > gpu - 1.0, "no more than that"
    elif moved:
        assert gpu - 1.0 < computing - moved <= gpu


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"pipeline": {"stages": 5, "microbatches_per_step": 10}}, "5 stages with one window in flight"),
        ({"pipeline": {"stages": 2, "microbatches_per_step": 3}}, "give microbatches_per_step 4 or more"),
        ({"pipeline": {"boundaries": [1]}}, "Stage 1 has 1."),
        ({"pipeline": {"replicas": 1}}, "nobody gossips"),
        ({"inner": {"steps": 100, "warmup_steps": 1}}, "hardly ever meet"),
        (
            {"inner": {"steps": 200, "warmup_steps": 1}, "outer": {"late_inner_steps_per_round": 400}},
            "every 50 to 400: the replicas hardly ever meet. Fewer inner_steps_per_round and late_inner",
        ),
    ],
)
def test_a_warning_for_each_costly_choice(sections: dict[str, Any], says: str) -> None:
    found = plan(run_with(**sections))
    assert any(says in warning for warning in found.warnings)
    assert len(found.warnings) == 1
    assert describe(found)[-1] == f"Warning: {found.warnings[0]}"


def test_check_says_what_would_help() -> None:
    found = plan(run_with(pipeline={"stages": 4, "replicas": 6, "microbatches_per_step": 8}))
    text = "\n".join(describe(found))
    assert "with microbatches_per_step = 12 (a batch 1.5 times as large, a multiple of the replicas)" in text
    assert [other.microbatches_per_step for other in found.remedies] == [12, 24]
    assert all(other.efficiency > found.efficiency for other in found.remedies)
    assert plan(run_with(pipeline={"microbatches_per_step": 32})).remedies == (), "nothing to be gained"


@pytest.mark.parametrize(
    ("architecture", "change", "says"),
    [
        ("llama", {"vocab_size": 100}, "vocabulary of 100"),
        ("llama", {"hidden": 3}, "no field hidden"),
        ("nosuch", {}, "no model type 'nosuch'"),
        ("llama", {"max_position_embeddings": 32}, "do not fit the model's longest, 32"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(architecture: str, change: dict[str, Any], says: str) -> None:
    with user_error(Exit.CONFIG) as caught:
        plan(run_with(architecture, {**LLAMA, **change}))
    assert says in str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_gives_cause_for_a_warning(preset: str) -> None:
    found = plan(decode_run(run_text(preset), preset))
    assert found.warnings == ()
    size = {"tiny": 0.75e6, "125m": 114e6, "1b": 1.6e9, "7b": 8.6e9}[preset]
    assert found.parameters == pytest.approx(size, rel=0.02)
    most = {"tiny": 2**27, "125m": 10 * 2**30, "1b": 24 * 2**30, "7b": 96 * 2**30}[preset]
    assert found.stages[0].gpu.computing < most
    assert found.stages[0].memory.total < 2 * most, "as much again in main memory"


def test_the_report_is_text_or_json() -> None:
    run = decode_run(run_text("tiny"), "x")
    text, found = report(run), msgspec.json.decode(report(run, as_json=True), type=RunPlan)
    assert found == plan(run)
    assert json.loads(report(run, as_json=True))["stages"][0]["memory"]["weights"] > 10**6
    for part in ("754,816 parameters in 2 stages", found.run_id[:16], "0 to 1", "221 kB", "3.28 million"):
        assert part in text
    assert all(len(line) <= 80 for line in text.splitlines())
