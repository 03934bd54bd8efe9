"""Learning rate and progress: exact where they can be, and moved by no liar."""

import math
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.inner_step import InnerConfig, Mark, Progress, advance, begin, learning_rate, moment_ratio, rate_per_s

SCHEDULE = InnerConfig(learning_rate=6e-4, steps=1000, warmup_steps=100, final_fraction=0.1)


def test_the_schedule_by_hand() -> None:
    assert learning_rate(0.0, SCHEDULE) == pytest.approx(6e-6)
    assert learning_rate(0.049, SCHEDULE) == pytest.approx(3e-4)
    assert learning_rate(0.1, SCHEDULE) == pytest.approx(6e-4)
    assert learning_rate(0.55, SCHEDULE) == pytest.approx(0.5 * (6e-4 + 6e-5))
    assert learning_rate(1.0, SCHEDULE) == pytest.approx(6e-5)


@given(st.floats(0.0, 1.0), st.floats(0.0, 0.01))
def test_the_schedule_has_no_jumps_and_one_peak(progress: float, further: float) -> None:
    now, then = learning_rate(progress, SCHEDULE), learning_rate(progress + further, SCHEDULE)
    assert abs(then - now) <= 6e-4 * (further * SCHEDULE.steps / SCHEDULE.warmup_steps + 1e-9)
    assert 0.0 < now <= SCHEDULE.learning_rate * (1.0 + 1e-12)


def test_a_schedule_without_warm_up_begins_at_the_peak() -> None:
    flat = InnerConfig(learning_rate=1.0, steps=10, warmup_steps=0, final_fraction=1.0)
    assert [learning_rate(progress, flat) for progress in (0.0, 0.5, 1.0, 7.0, -1.0)] == [1.0] * 5


def follow(progress: Progress, windows: int, per_s: float, from_s: float = 0.0) -> Progress:
    """Feed windows of four honest stamps, one a second, that rise at a steady rate from 0 at time 0."""
    for second in range(1, windows + 1):
        now_s = from_s + second
        progress = advance(progress, [per_s * (now_s - lag) for lag in (0.0, 0.1, 0.2, 0.3)], now_s)
    return progress


def test_progress_follows_an_honest_swarm() -> None:
    assert follow(begin(0.0, 0.0), 4, 1e-3).value == 0.0
    assert follow(begin(0.0, 0.0), 6, 1e-3).value == pytest.approx(6e-3, rel=0.1)
    assert follow(begin(0.0, 0.0), 500, 1e-3).value == pytest.approx(0.5, rel=0.01)


def test_progress_follows_a_swarm_that_becomes_twenty_times_faster() -> None:
    progress = follow(begin(0.0, 0.0), 200, 1e-4)
    aim = 0.0
    for second in range(1, 301):
        aim = 0.02 + 2e-3 * second
        progress = advance(progress, [aim] * 4, 200.0 + second)
    assert progress.value == pytest.approx(aim, rel=0.05)


def test_stamps_that_rise_in_the_roster_s_steps_hold_nobody_back() -> None:
    progress = begin(0.0, 0.0)
    for second in range(1, 301):
        progress = advance(progress, [1e-3 * (second // 10 * 10)] * 4, float(second))
    assert progress.value >= 0.28


def test_a_newcomer_starts_where_its_stage_is() -> None:
    newcomer = begin(0.4, 1000.0)
    assert newcomer.value == 0.4
    for second in range(1, 20):
        newcomer = advance(newcomer, [0.4 + 1e-3 * second] * 4, 1000.0 + second)
    assert newcomer.value == pytest.approx(0.419, abs=2e-3)


@given(
    st.lists(st.lists(st.floats(0.0, 1.0) | st.floats(), max_size=5), max_size=60),
    st.lists(st.floats(0.0, 100.0), min_size=60, max_size=60),
)
def test_progress_never_goes_back_leaves_its_range_or_outruns_the_shown_rate(
    windows: list[list[float]], pauses: list[float]
) -> None:
    progress, now_s = begin(0.0, 0.0), 0.0
    for stamps, pause_s in zip(windows, pauses, strict=False):
        now_s += pause_s
        before, progress = progress, advance(progress, stamps, now_s)
        allowed = 2.0 * (rate_per_s(before.marks) or 0.0) * (now_s - before.at_s)
        assert before.value <= progress.value <= min(1.0, before.value + allowed + 1e-12)
        assert len(progress.marks) <= 16


@given(st.integers(0, 300), st.integers(0, 2), st.integers())
def test_a_liar_below_half_of_each_window_moves_nobody(honest_windows: int, liars: int, seed: int) -> None:
    rng, truthful, lied_to = Random(seed), begin(0.0, 0.0), begin(0.0, 0.0)
    for second in range(1, honest_windows + 1):
        honest = [1e-3 * second] * (liars + 1)
        truthful = advance(truthful, honest, float(second))
        stamps = honest + [1.0] * liars
        rng.shuffle(stamps)
        lied_to = advance(lied_to, stamps, float(second))
    assert lied_to == truthful


@given(st.integers(1, 200), st.integers(1, 60))
def test_a_liar_that_owns_one_whole_window_moves_nobody_far(when: int, then: int) -> None:
    progress, peak = begin(0.0, 0.0), 0.0
    for second in range(1, when + then + 1):
        stamps = [1.0] * 4 if second == when else [1e-3 * second] * 4
        progress = advance(progress, stamps, float(second))
        peak = max(peak, progress.value - 1e-3 * second)
    # The first window that may move at all has the time of the four before it to make up for.
    assert peak <= (5.1e-3 if when <= 5 else 2.1e-3), "a few windows of the swarm's own pace"
    if then > 20:
        assert progress.value == pytest.approx(1e-3 * (when + then), abs=5e-3)


def test_stamps_that_are_no_numbers_count_for_nothing() -> None:
    progress = follow(begin(0.0, 0.0), 10, 1e-3)
    assert advance(progress, [math.nan, math.inf], 11.0) == progress
    assert advance(progress, [], 11.0) == progress
    assert advance(progress, [math.nan, 0.011], 11.0).value == pytest.approx(0.011)


def test_no_rate_without_time_or_marks() -> None:
    assert rate_per_s([Mark(0.0, 0.0)] * 3) is None
    assert rate_per_s([Mark(1.0, 0.1 * n) for n in range(8)]) is None
    assert rate_per_s([Mark(float(n), 1.0 - 0.1 * n) for n in range(8)]) == 0.0
    assert rate_per_s([Mark(float(n), 0.1 * n) for n in range(8)]) == pytest.approx(0.1)


@pytest.mark.parametrize("first", range(14))
def test_three_lies_in_a_row_of_sixteen_marks_are_no_rate(first: int) -> None:
    """Of a swarm that stands still: only lies in half of either half could say that it moves."""
    marks = [Mark(float(n), 1.0 if first <= n < first + 3 else 0.1) for n in range(16)]
    assert rate_per_s(marks) == 0.0


def test_marks_cover_minutes_of_a_long_run() -> None:
    progress = follow(begin(0.0, 0.0), 2000, 1e-4)
    assert progress.marks[-1].at_s - progress.marks[0].at_s >= 200.0


def test_a_schedule_of_warm_up_alone_ends_at_its_peak() -> None:
    whole = InnerConfig(learning_rate=1.0, steps=10, warmup_steps=10, final_fraction=0.1)
    assert [learning_rate(progress, whole) for progress in (0.0, 0.5, 1.0)] == pytest.approx([0.1, 0.6, 1.0])


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.9, 0.999), (0.5, 0.3)])
def test_no_gradients_bring_the_moments_farther_apart_than_their_bound_and_some_reach_it(
    beta1: float, beta2: float
) -> None:
    def ratio(gradients: Sequence[float]) -> float:
        first = second = 0.0
        for gradient in gradients:
            first = beta1 * first + (1.0 - beta1) * gradient
            second = beta2 * second + (1.0 - beta2) * gradient**2
        return first / math.sqrt(second)

    worst = ratio([(beta1 / beta2) ** (200 - step) for step in range(200)])
    assert worst == pytest.approx(moment_ratio(beta1, beta2), rel=1e-3)
    rng = Random(0)
    assert all(ratio([rng.gauss(0.3, 1.0) for _ in range(50)]) <= moment_ratio(beta1, beta2) for _ in range(20))


def test_nothing_bounds_moments_whose_first_is_remembered_longer() -> None:
    assert moment_ratio(0.9, 0.8) == moment_ratio(0.9, 0.0) == math.inf
