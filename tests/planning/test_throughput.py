"""The forecast of a plan against production nodes in virtual time, on lines that are too narrow."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from benchmarks.pipeline_efficiency.volunteers import measure, volunteers
from noloco_node.planning.model_layout import model_layout
from noloco_node.planning.throughput import forecast, gpu_memories, settled
from noloco_node.run.presets import run_text
from noloco_node.run.runfile import decode_run
from pipeline.placement import StageClaim, capacities, choose_stage

UP = 100.0


@pytest.mark.parametrize(("stages", "window", "rounds"), [(2, 8, 3), (4, 8, 3), (4, 32, 1)])
def test_a_forecast_for_narrow_lines_is_within_15_percent_of_a_simulation(
    stages: int, window: int, rounds: int
) -> None:
    """The forecast is of as many replicas in each stage. With this seed peers, which choose their stages, end so."""
    run = decode_run(run_text("125m"), "the preset")
    pipeline = structs.replace(run.pipeline, stages=stages, replicas=2, microbatches_per_step=window)
    run = structs.replace(run, pipeline=pipeline)
    layout = model_layout(run)
    found = forecast(run, layout, volunteers(UP), gpu_memories(run, layout, volunteers(UP)))
    often = max(run.outer.inner_steps_per_round, found.steps_per_round)
    run = structs.replace(run, outer=replace(run.outer, inner_steps_per_round=often, late_inner_steps_per_round=often))
    report = measure(run_text("125m"), run, UP, seed=0, rounds=rounds)
    assert all(stage.peers == 2 for stage in report.stages)
    assert "links" in found.bound
    assert found.tokens_per_s == pytest.approx(report.tokens_per_s, rel=0.15)


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=8), st.integers(0, 16), st.integers(0, 2**31))
def test_peers_settle_as_newcomers_choose(seconds: list[float], more: int, seed: int) -> None:
    """Each says what a microbatch takes of it, on its device or its line: no stage is left much weaker than planned."""
    rng, work = Random(seed), [1.0] * len(seconds)
    claims: list[StageClaim] = []
    for number in range(len(seconds) + more):
        stage = choose_stage(capacities(claims, work), range(len(seconds)), rng)
        claims.append(StageClaim(str(number), stage, device_s=seconds[stage]))
    found = settled(seconds, len(claims))
    assert sum(found) == len(claims)
    assert min(found) >= 1
    weakest = min(count / each for count, each in zip(found, seconds, strict=True))
    chosen = [sum(claim.stage == stage for claim in claims) / each for stage, each in enumerate(seconds)]
    assert weakest / 1.05 - 1e-9 <= min(chosen) <= weakest * (1 + 1e-9)


def test_a_line_that_carries_less_up_asks_for_more_replicas_of_who_sends_most() -> None:
    run = decode_run(run_text("125m"), "the preset")
    run = structs.replace(
        run, pipeline=structs.replace(run.pipeline, stages=2, replicas=8, codec="int5-int3", windows_in_flight=2)
    )
    layout = model_layout(run)
    needs = gpu_memories(run, layout, volunteers(UP))
    alike, narrow = (forecast(run, layout, volunteers(up), needs) for up in (UP, 20.0))
    assert alike.replicas == (8, 8)
    assert narrow.replicas == (9, 7)
    assert narrow.tokens_per_s > 1.12 * alike.tokens_per_s * 20.0 / UP


@given(
    seconds=st.lists(st.sampled_from([0.1, 0.5, 1.0]) | st.floats(1e-9, 1e9), min_size=1, max_size=8),
    count=st.integers(0, 60),
)
def test_thousands_of_peers_settle_as_one_after_the_other_would(seconds: list[float], count: int) -> None:
    found = [0] * len(seconds)
    for _ in range(count):
        found[min(range(len(seconds)), key=lambda stage: found[stage] / seconds[stage])] += 1
    assert settled(seconds, count) == tuple(found)
    assert sum(settled(seconds, 10**7)) == 10**7  # at once
