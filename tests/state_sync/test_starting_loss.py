"""Whether the first losses of a newcomer say that its weights are worth nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.state_sync.starting_state import FAR, JUDGED, JUDGEMENTS, LEAST_OTHERS, StartingLoss

USUAL = 3.0
honest = st.floats(USUAL / FAR**0.4, USUAL * FAR**0.4)


@given(
    st.lists(honest, min_size=JUDGED, max_size=2 * JUDGED),
    st.lists(honest, min_size=2 * LEAST_OTHERS, max_size=20),
    st.lists(st.sampled_from([0.0, -1.0, 1e9]), max_size=LEAST_OTHERS - 1),
    st.lists(st.sampled_from([20.0, math.inf, math.nan]), max_size=JUDGED // 2 - 1),
)
def test_honest_weights_are_kept_whatever_few_liars_and_few_bad_routes_say(
    losses: list[float], others: list[float], lies: list[float], bad: list[float]
) -> None:
    assert StartingLoss(judges=True).failed([*losses, *bad], [*others, *lies]) is None


@pytest.mark.parametrize("loss", [USUAL * FAR * 1.01, 200.0, math.inf, math.nan])
def test_weights_that_are_far_worse_fail_and_not_for_ever(loss: float) -> None:
    start, others = StartingLoss(judges=True), [USUAL] * LEAST_OTHERS
    for _ in range(JUDGEMENTS):
        assert start.failed([loss] * (JUDGED - 1), others) is None
        found = start.failed([loss], others)
        assert found is not None
        assert found[1] == USUAL
    for _ in range(3):
        assert start.failed([loss] * JUDGED, others) is None


def test_once_weights_have_passed_they_are_not_judged_again() -> None:
    start, others = StartingLoss(judges=True), [USUAL] * LEAST_OTHERS
    assert start.failed([USUAL] * JUDGED, others) is None
    assert start.failed([200.0] * JUDGED, others) is None


def test_nobody_is_judged_by_few_or_in_a_run_that_begins() -> None:
    few = StartingLoss(judges=True)
    assert few.failed([200.0] * JUDGED, [USUAL] * (LEAST_OTHERS - 1)) is None
    assert few.failed([], [USUAL] * LEAST_OTHERS) is not None
    assert StartingLoss(judges=False).failed([200.0] * JUDGED, [USUAL] * LEAST_OTHERS) is None
