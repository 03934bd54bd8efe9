"""What windows cost in the forecast, against production nodes in virtual time, and what `check` advises by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from benchmarks.pipeline_efficiency.production_utilisation import PipelineShape, Trial, measure, spread_speeds
from noloco_node.planning.throughput import MicrobatchSeconds, way_seconds
from noloco_node.planning.windows import MESSAGES, in_words, predict_efficiency, seconds_each, suggest_windows
from noloco_node.run.config import PipelineConfig


def pipeline(stages: int, replicas: int, window: int, windows_in_flight: int = 1) -> PipelineConfig:
    return PipelineConfig(
        stages=stages,
        replicas=replicas,
        microbatches_per_step=window,
        windows_in_flight=1 if windows_in_flight == 1 else 2,
        microbatch_size=1,
    )


def efficiency(planned: PipelineConfig, latency: float) -> float:
    loads = [MicrobatchSeconds(3.0, 0.0, 0.0)] * planned.stages
    return 3.0 / seconds_each(planned, 3.0, way_seconds(loads, latency))


@given(st.integers(1, 6), st.integers(1, 12))
def test_one_chain_of_equal_stages_fills_and_drains(stages: int, window: int) -> None:
    """The well-known M / (M + S - 1) of pipelines with a flush."""
    assert efficiency(pipeline(stages, 1, window), 0.0) == pytest.approx(window / (window + stages - 1))


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 64), st.floats(0, 8), st.sampled_from([1, 2]))
def test_no_pipeline_gains_by_latency_or_loses_by_a_longer_even_window(
    stages: int, replicas: int, share: int, latency: float, windows: int
) -> None:
    planned = pipeline(stages, replicas, share * replicas, windows)
    longer = structs.replace(planned, microbatches_per_step=2 * share * replicas)
    assert 0 < efficiency(planned, latency) <= 1
    assert efficiency(planned, latency + 1) <= efficiency(planned, latency) <= efficiency(longer, latency)


@pytest.mark.parametrize(
    ("stages", "replicas", "window", "latency", "windows"),
    [
        (1, 2, 4, 0.0, 1),
        (2, 3, 4, 0.0, 1),
        (3, 1, 8, 3.0, 1),
        (4, 4, 8, 1.0, 1),
        (4, 3, 8, 1.0, 1),
        (2, 2, 4, 3.0, 2),
        (5, 3, 4, 0.4, 2),
        (4, 4, 8, 1.0, 2),
        (4, 3, 8, 1.0, 2),
    ],
)
def test_production_nodes_are_about_as_busy_as_forecast(
    stages: int, replicas: int, window: int, latency: float, windows: int
) -> None:
    passes = spread_speeds((1.0,) * stages, (1.0,) * replicas)
    shape = PipelineShape(passes=passes, window=window, latency=latency, windows_in_flight=windows)
    measured = measure(shape, Trial(warm_up=32, microbatches=64)).efficiency
    forecast = efficiency(pipeline(stages, replicas, window, windows), latency)
    assert measured == pytest.approx(forecast, abs=0.1)


@pytest.mark.parametrize("windows", [1, 2])
def test_a_measurement_is_the_same_twice(windows: int) -> None:
    passes = spread_speeds((1.0, 1.0), (1.0, 1.0, 1.0))
    shape = PipelineShape(passes=passes, window=4, latency=1.0, jitter=0.5, windows_in_flight=windows)
    assert measure(shape, Trial(warm_up=10, microbatches=20)) == measure(shape, Trial(warm_up=10, microbatches=20))


def test_remedies_keep_the_batch_where_they_can() -> None:
    planned = PipelineConfig(stages=2, replicas=2, microbatch_size=8, microbatches_per_step=4)
    work = (1.0, 1.5)
    twice, four_times = suggest_windows(planned, work)
    assert (twice.microbatches_per_step, twice.microbatch_size, twice.batch) == (8, 4, 1.0)
    assert (four_times.microbatches_per_step, four_times.microbatch_size, four_times.batch) == (16, 2, 1.0)
    assert predict_efficiency(planned, work)[2] < twice.efficiency[2] < four_times.efficiency[2]
    lines = in_words(predict_efficiency(planned, work), (twice,), 2)
    assert lines[-1].endswith(
        "microbatches_per_step = 8, microbatch_size = 4 (the same batch, a multiple of the replicas)"
    )
    # A message takes twice as long as the smaller microbatch's forward pass.
    longer = structs.replace(planned, microbatches_per_step=8, microbatch_size=4)
    assert twice.efficiency[2] < predict_efficiency(longer, work)[2]


@pytest.mark.parametrize(
    ("window", "replicas", "windows"),
    [(4, 2, [8, 16]), (8, 16, [16, 32]), (8, 12, [12, 24]), (7, 1000, [14, 28]), (8, 1, [16, 32]), (200, 2, [])],
)
def test_remedies_are_multiples_of_the_replicas_where_that_is_near(
    window: int, replicas: int, windows: list[int]
) -> None:
    planned = pipeline(2, replicas, window)
    found = suggest_windows(planned, (1.0, 1.0))
    assert len(predict_efficiency(planned, (1.0, 1.0))) == len(MESSAGES)
    assert [other.microbatches_per_step for other in found] == windows
    assert [other.batch for other in found] == [number / window for number in windows]
