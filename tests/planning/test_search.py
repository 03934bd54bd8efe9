"""Plans from machines: nothing is planned that does not fit, more never gives less, and presets keep their promise."""

import re
import shlex
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import pytest
from command_line import printed, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from user_errors import user_error

from noloco_node.cli.run_file import MachineOptions
from noloco_node.doctor.machine_checks import Grade, judge_gpu, judge_memory
from noloco_node.errors import Exit, UserError
from noloco_node.machine.memory import free_of_gpu, usable_bytes
from noloco_node.planning import model_layout as model_layouts
from noloco_node.planning.expectation import IDLE, describe_expectation
from noloco_node.planning.model_layout import model_layout
from noloco_node.planning.plan import LEAST_ROUNDS, LEAST_STEPS, memories, plan
from noloco_node.planning.plan_text import WIDTH
from noloco_node.planning.search import (
    CLEARLY,
    DOUBLING,
    MOST_TOKENS,
    Planned,
    in_fewer_stages,
    plan_for,
    plan_in,
    plan_in_any_form,
)
from noloco_node.planning.throughput import Machines, fits, forecast, gpu_memories
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from noloco_node.run.presets import PRESETS, numbers_of, run_text
from noloco_node.run.runfile import decode_run, load_run, validate
from pipeline.adapters.settings import AdapterConfig
from pipeline.inner_step import MOST_STEPS, InnerConfig

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 384,
    "max_position_embeddings": 64,
}
RUN = RunConfig(
    model=ModelConfig(architecture="llama", sizes=SIZES),
    pipeline=PipelineConfig(sequence_length=64, microbatch_size=1, microbatches_per_step=8, replicas=4),
    inner=InnerConfig(steps=1000, warmup_steps=10),
)
LARGE = Machines(
    count=8, gpu_bytes=1e9, ram_bytes=1e9, up_bytes_per_s=1e6, down_bytes_per_s=1e6, flops=1e12, latency_s=0.05
)
MACHINES = st.builds(
    Machines,
    count=st.integers(1, 12),
    gpu_bytes=st.floats(6.005e8, 6.3e8),
    ram_bytes=st.floats(5e5, 4e7),
    up_bytes_per_s=st.floats(1e4, 1e9),
    down_bytes_per_s=st.floats(1e4, 1e9),
    flops=st.floats(1e9, 1e14),
    latency_s=st.floats(0, 1),
)


def planned(machines: Machines, run: RunConfig = RUN) -> Planned | None:
    try:
        return plan_for(run, machines)
    except UserError as refusal:
        if "does not fit on" not in refusal.what:
            raise
        return None


def merit(found: Planned) -> float:
    return found.expected.tokens_per_s / DOUBLING ** abs(log2(found.run.batch / RUN.batch))


EXAMPLES = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EXAMPLES
@given(MACHINES)
def test_what_is_planned_is_a_run_that_fits_and_is_planned_again(machines: Machines) -> None:
    found = planned(machines)
    if found is None:
        return
    validate(found.run)
    assert found.needs == gpu_memories(found.run, found.layout, machines)
    assert fits(found.needs, machines)
    assert found.run.pipeline.stages * found.run.pipeline.replicas <= machines.count
    assert found.run.budget_samples == pytest.approx(RUN.budget_samples, rel=0.05)
    assert found.run.inner.steps >= LEAST_STEPS
    assert plan(found.run).rounds >= LEAST_ROUNDS
    assert found.run.tokens(found.run.batch) <= MOST_TOKENS
    assert 0 < found.expected.busy <= 1 + 1e-9
    assert found.expected.tokens_per_s <= found.expected.possible * (1 + 1e-9)
    assert found == planned(machines)


@EXAMPLES
@given(MACHINES, st.sampled_from(["gpu_bytes", "ram_bytes", "up_bytes_per_s", "down_bytes_per_s", "flops"]), st.data())
def test_more_of_anything_never_gives_fewer_tokens(machines: Machines, name: str, data: st.DataObject) -> None:
    before = planned(machines)
    more: dict[str, Any] = {name: getattr(machines, name) * data.draw(st.floats(1, 10))}
    after = planned(structs.replace(machines, **more))
    if before is not None:
        assert after is not None
        if name not in ("gpu_bytes", "ram_bytes"):
            # A plan may give up a larger batch, or 8-bit codes, that are no longer worth it.
            kept = after.run.inner.state == before.run.inner.state
            assert merit(after) * (1 if kept else CLEARLY) >= merit(before) * (1 - 1e-9)


@EXAMPLES
@given(MACHINES)
def test_the_state_is_float32_unless_codes_bring_clearly_more_and_one_stage_is_enough_where_it_fits(
    machines: Machines,
) -> None:
    plain, coded = (plan_in(state, RUN, machines) for state in ("float32", "int8"))
    found = planned(machines)
    assert (found is None) == (plain is coded is None)
    if found is None:
        return
    assert coded is not None, "codes take less"
    wins = plain is None or merit(coded) >= CLEARLY * merit(plain)
    assert found == (coded if wins else plain)
    for each in (plain, coded):
        if each is not None and each.run.pipeline.stages > 1:
            alone = structs.replace(each.run.pipeline, stages=1, windows_in_flight=1, microbatch_size=1)
            whole = structs.replace(each.run, pipeline=alone)
            assert not fits(gpu_memories(whole, model_layout(whole), machines), machines)
    fewer = in_fewer_stages(found, machines)
    assert (fewer is None) == (found.run.pipeline.stages == 1)
    if fewer is not None:
        plan, larger = fewer
        assert fits(plan.needs, larger)
        assert plan.run.pipeline.replicas > found.run.pipeline.replicas


def test_a_frozen_model_has_fewer_bits_only_where_they_bring_clearly_more() -> None:
    """Of eight billion parameters: on large cards as it came, on smaller ones coded; one stage on each."""
    model = ModelConfig(
        architecture="llama",
        sizes=SIZES
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 1024},
    )
    pipeline = PipelineConfig(sequence_length=1024, microbatch_size=1, microbatches_per_step=16, replicas=4)
    run = RunConfig(model=model, pipeline=pipeline, inner=RUN.inner, adapter=AdapterConfig(rank=16))
    found = []
    for gpu_bytes in (80e9, 24e9, 12e9):
        machines = structs.replace(LARGE, count=4, gpu_bytes=gpu_bytes, ram_bytes=16e9, flops=40e12)
        best = plan_in_any_form(run, machines)
        assert best.run.pipeline.stages == 1
        assert fits(best.needs, machines)
        found.append(best.run.adapter.base)
    assert found == ["bfloat16", "int8", "nf4"]
    with pytest.raises(UserError):
        plan_in_any_form(run, structs.replace(LARGE, count=1))


def test_an_ample_line_is_not_squeezed_and_a_narrow_one_is() -> None:
    ample = planned(
        structs.replace(LARGE, gpu_bytes=6.022e8, up_bytes_per_s=1e12, down_bytes_per_s=1e12, latency_s=0.0)
    )
    narrow = planned(structs.replace(LARGE, gpu_bytes=6.022e8, up_bytes_per_s=1e4, down_bytes_per_s=1e4))
    assert ample is not None
    assert narrow is not None
    assert ample.run.pipeline.codec == "bfloat16"
    assert narrow.run.pipeline.codec == "int5-int3"
    assert narrow.run.outer.inner_steps_per_round >= RUN.outer.inner_steps_per_round


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_a_width_that_goes_into_no_blocks_gets_a_codec_without_blocks(codec: str) -> None:
    model, pipeline = structs.replace(RUN.model, sizes=SIZES | {"hidden_size": 48}), RUN.pipeline
    odd = structs.replace(RUN, model=model, pipeline=structs.replace(pipeline, codec=codec))
    found = planned(structs.replace(LARGE, gpu_bytes=6.025e8, up_bytes_per_s=1e4), odd)
    assert found.run.pipeline.codec == "bfloat16"


def test_no_layout_is_worked_out_twice_for_a_plan_and_for_what_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out = list[tuple[object, ...]]()

    def noted(run: RunConfig) -> model_layouts.ModelLayout:
        worked_out.append((run.pipeline.stages, run.pipeline.subspace))
        return layout(run)

    layout = model_layouts._model_layout
    monkeypatch.setattr(model_layouts, "_model_layout", noted)
    monkeypatch.setattr(model_layouts, "_layouts", {})
    narrow = structs.replace(LARGE, gpu_bytes=6.025e8, up_bytes_per_s=1e4)
    found = planned(narrow)
    assert found is not None
    assert describe_expectation(found, narrow)
    assert found.run.pipeline.codec != RUN.pipeline.codec
    assert len(set(worked_out)) == len(worked_out) > 1


def test_machines_on_which_nothing_fits_get_one_message() -> None:
    with user_error(Exit.CONFIG) as caught:
        plan_for(RUN, structs.replace(LARGE, gpu_bytes=1e5))
    assert caught.value.what.startswith("run does not fit on 8 machines with 100 kB on the GPU")
    assert "6 stages" not in caught.value.what
    assert "--peers" in caught.value.hint


def test_rounds_take_no_more_than_their_share_of_the_forecast() -> None:
    machines = structs.replace(LARGE, gpu_bytes=6.022e8, up_bytes_per_s=2e5)
    found = planned(machines)
    needs = gpu_memories(found.run, found.layout, machines)
    again = forecast(found.run, found.layout, machines, needs)
    assert found.run.outer.inner_steps_per_round >= again.steps_per_round


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_leaves_the_devices_idle_that_it_is_meant_for(preset: str, tmp_path: Path) -> None:
    path, machines = tmp_path / "run.toml", numbers_of(preset)["machines"]
    path.write_text(run_text(preset))
    assert f"noloco-node check FILE {machines}\n" in path.read_text()
    said = printed("check", path)
    if preset == PRESETS[0]:
        assert said == printed("check", path, *shlex.split(machines))
    busy = re.search(r"stage are (\d+)% busy", said.replace("\n", " "))
    assert int(busy[1]) >= 100 * IDLE
    assert "Warning" not in said


def test_init_writes_a_plan_that_check_agrees_with_and_warns_where_the_line_is_narrow(tmp_path: Path) -> None:
    path, machines = tmp_path / "run.toml", ["--gpu", "24GiB", "--ram", "32GiB", "--line", "100mbit/40mbit"]
    said = printed("init", path, "--preset", "125m", *machines)
    run = load_run(path)
    expected = said.partition("\n\n")[2]
    stages = f"{run.pipeline.stages} stage{'s' * (run.pipeline.stages > 1)}"
    assert f"{stages} of {run.pipeline.replicas} replicas" in expected.replace("\n", " ")
    assert all(len(line) <= WIDTH for line in expected.splitlines())
    assert "--peers 16 --gpu 24GiB --ram 32GiB --line 100mbit/40mbit --tflops 60 --latency-ms 60" in path.read_text()
    assert expected.strip() in printed("check", path, *machines)
    path.write_text(run_text("125m"))
    idle = printed("check", path, "--line", "2mbit").replace("\n", " ")
    assert "devices stand still more than half of the time" in idle
    assert "A plan for them reaches about" in idle
    assert "With subspace = 192 or subspace = 96 in [pipeline] it would be about" in idle
    path.write_text(run_text("125m").replace("# subspace = 256", "subspace = 96"))
    assert "With subspace" not in printed("check", path, "--line", "2mbit")


def test_init_says_what_else_there_is_in_three_alternatives_at_most(tmp_path: Path) -> None:
    path, machines = tmp_path / "run.toml", ["--gpu", "8GiB", "--ram", "24GiB", "--line", "100mbit/20mbit"]
    said = printed("init", path, "--preset", "1b", *machines).replace("\n", " ")
    assert load_run(path).inner.state == "int8"
    assert "2 stages of 9 and 7 replicas" in said
    assert "The model does not fit one such machine, by" in said
    assert "kept in 8-bit codes (inner.state); in float32 5 stages would reach about" in said
    assert re.search("With .* on the GPU and .* beside it 1 stage of 16 replicas would do: about", said)
    assert "On lines twice as fast this plan would reach about" in said
    assert "With subspace = 512 or subspace = 256 in [pipeline] it would be about" in said
    enough = printed("init", path, "--force", "--preset", "1b", "--gpu", "24GiB")
    assert load_run(path).pipeline.stages == 1
    assert not any(word in enough for word in ("would do:", "twice as fast", "subspace"))
    path.write_text(run_text("tiny"))
    roomy = printed("check", path, *machines).replace("\n", " ")
    assert "With the memory that these machines have 1 stage of" in roomy


@pytest.mark.parametrize(
    ("preset", "count", "times"), [("tiny", 16, 1), ("tiny", 200, 1), ("125m", 64, 1), ("1b", 16, 1), ("1b", 256, 8)]
)
def test_many_machines_keep_the_batch_or_say_what_becomes_of_it(
    preset: str, count: int, times: int, tmp_path: Path
) -> None:
    """Each replica takes steps of its own, so a window for each would multiply the batch by the replicas."""
    path, asked = tmp_path / "run.toml", decode_run(run_text(preset), preset)
    said = printed("init", path, "--preset", preset, "--peers", count)
    run = load_run(path)
    batch = run.batch / asked.batch
    assert 0.7 <= batch <= times
    assert run.budget_samples == pytest.approx(asked.budget_samples, rel=0.01)
    assert run.inner.steps >= asked.inner.steps / times
    assert plan(run).rounds >= LEAST_ROUNDS
    told = said.replace("\n", " ")
    assert ("times the" in told) == (batch != 1)
    assert ("This run leaves out" in told) == (count - run.pipeline.peers >= run.pipeline.stages)
    assert "One such machine alone: about" in told or "The model does not fit one such machine" in told
    assert "a parameter (20 use the work best" in told
    assert ("of the 20 rounds that mix the replicas" in told) == (preset == "tiny")


@EXAMPLES
@given(MACHINES)
def test_a_plan_of_the_longest_run_keeps_to_the_steps_that_a_run_file_may_have(machines: Machines) -> None:
    found = planned(machines, structs.replace(RUN, inner=replace(RUN.inner, steps=MOST_STEPS)))
    if found is not None:
        validate(found.run)


def test_a_plan_keeps_to_the_windows_that_a_run_file_may_have() -> None:
    many = structs.replace(RUN.pipeline, sequence_length=64, microbatches_per_step=8, replicas=8192)
    found = planned(structs.replace(LARGE, count=1), structs.replace(RUN, pipeline=many))
    validate(found.run)


@pytest.mark.parametrize("count", [40, 300])
def test_microbatches_that_cannot_be_halved_leave_fewer_replicas(count: int) -> None:
    run = decode_run(run_text("tiny"), "the preset")
    run = structs.replace(run, pipeline=structs.replace(run.pipeline, microbatch_size=3, microbatches_per_step=4))
    found = plan_for(run, structs.replace(LARGE, count=count)).run
    assert (found.batch, found.pipeline.replicas) == (24, 8)


@pytest.mark.parametrize(
    ("gpu", "ram", "beside"), [("12GiB", "24GiB", True), ("12GiB", "16GiB", False), ("24GiB", "24GiB", False)]
)
def test_moments_lie_in_main_memory_where_a_stage_fits_in_no_other_way(gpu: str, ram: str, beside: bool) -> None:
    run = decode_run(run_text("1b"), "preset")
    run = structs.replace(run, inner=replace(run.inner, state="int8"), precision="auto")
    run = structs.replace(run, pipeline=structs.replace(run.pipeline, stages=1, replicas=16, microbatch_size=1))
    machines, layout = MachineOptions(gpu=gpu, ram=ram).machines(), model_layout(run)
    (needs,) = gpu_memories(run, layout, machines)
    (plain,) = memories(run, layout, half=True)
    assert (needs.moments_beside > 0) == beside
    assert needs.optimiser + needs.moments_beside == plain.optimiser
    assert needs.phases["steps"] - plain.phases["steps"] == needs.moments_beside
    assert fits((needs,), machines) == (beside or gpu == "24GiB")


@pytest.mark.parametrize("size", [12 * 2**30, int(17.9e9), int(22.9e9), 24 * 2**30])
def test_doctor_finds_what_is_planned_for_a_gpu_good_on_that_gpu(size: int) -> None:
    machines = structs.replace(LARGE, count=16, gpu_bytes=size, ram_bytes=32 * 2**30, flops=6e13)
    found = plan_for(decode_run(run_text("1b"), "preset"), machines)
    free, main = free_of_gpu(size), machines.ram_bytes
    needs = [stage.gpu.placed(usable_bytes(free), usable_bytes(main)) for stage in plan(found.run).stages]
    assert [(need.computing, need.beside) for need in needs] == [(each.computing, each.beside) for each in found.needs]
    assert judge_memory(int(main), [need.beside for need in needs]).grade is Grade.GOOD
    assert judge_gpu(int(free), [need.computing for need in needs]).grade is Grade.GOOD


def test_fewer_machines_than_a_run_plans_get_a_plan_of_their_own_and_no_forecast(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_text("125m"))
    said = printed("check", path, "--peers", "1").replace("\n", " ")
    assert "peers, more than 1 machine with 8.59 GB on the GPU and 17.2 GB beside it." in said
    assert "A plan for them reaches about" in said
    assert "without a network" not in said


def test_without_machines_check_says_how_to_name_them_and_a_comment_that_names_none_is_told(tmp_path: Path) -> None:
    path, text = tmp_path / "run.toml", run_text("tiny")
    path.write_text(text.replace("#     noloco-node check FILE", "#"))
    assert "name the machines, with --peers" in printed("check", path)
    for nonsense in ("--peers many", "--colour red", "--peers"):
        path.write_text(re.sub("check FILE .*", f"check FILE {nonsense}", text))
        assert refused("check", path).what.startswith("The comment of")


@pytest.mark.parametrize(("options", "named"), [(["--line", "fast"], "--line"), (["--gpu", "big"], "--gpu")])
def test_machines_that_cannot_be_read_are_named(options: list[str], named: str, tmp_path: Path) -> None:
    result = refused("init", tmp_path / "run.toml", *options, code=Exit.USAGE)
    assert result.what.startswith(named)
    assert not (tmp_path / "run.toml").exists()
    checked = refused("check", tmp_path / "run.toml", *options, code=Exit.USAGE)
    assert str(checked) == str(result), "said before the file is read"
