"""Whose weights count in a meeting: by numbers that a stage has in common, and no liar can turn against others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gossip.rule.shares import (
    DISOWNED,
    WeightAge,
    WhoseWeights,
    clock,
    last_met_after,
    staleness,
    whose_weights_count,
)

bounds = st.integers(0, 30)


@st.composite
def sides(draw: st.DrawFn) -> WeightAge:
    round = draw(st.integers(0, 60))
    return WeightAge(round, draw(st.integers(0, round)))


def judged(own: WeightAge, other: WeightAge, at_most: int) -> WhoseWeights:
    return whose_weights_count(own, other, at_most)


@given(sides(), sides(), bounds)
def test_terms_mirror_each_other_and_who_is_too_stale_counts_for_nothing(
    own: WeightAge, other: WeightAge, at_most: int
) -> None:
    mirrored = {
        WhoseWeights.BOTH: WhoseWeights.BOTH,
        WhoseWeights.MINE: WhoseWeights.THEIRS,
        WhoseWeights.THEIRS: WhoseWeights.MINE,
    }
    found = whose_weights_count(own, other, at_most)
    assert whose_weights_count(other, own, at_most) == mirrored[found]
    now = clock(own, other)
    ages = (WhoseWeights.MINE, staleness(own, now)), (WhoseWeights.THEIRS, staleness(other, now))
    fresh = {side for side, age in ages if age <= at_most}
    assert found == (fresh.pop() if len(fresh) == 1 else WhoseWeights.BOTH)


@given(sides(), st.integers(0, 60), bounds)
def test_disowned_weights_count_for_nothing_in_any_round(other: WeightAge, round: int, at_most: int) -> None:
    disowned = WeightAge(round, DISOWNED)
    assert judged(disowned, other, at_most) is WhoseWeights.THEIRS
    assert judged(other, disowned, at_most) is WhoseWeights.MINE
    assert judged(disowned, WeightAge(other.round, DISOWNED), at_most) is WhoseWeights.BOTH


@given(sides(), sides(), st.integers(0, 50), st.integers(0, 50), bounds)
def test_two_that_met_each_other_last_never_adopt(
    one: WeightAge, other: WeightAge, alone: int, other_alone: int, at_most: int
) -> None:
    """However many rounds each has taken alone since, and whatever each may know of the other's number."""
    fresh, newer = WeightAge(one.round, 0), WeightAge(other.round, 0)
    ones, others = last_met_after(fresh, newer, adopted=False), last_met_after(newer, fresh, adopted=False)
    assert ones == others
    assert (
        judged(WeightAge(one.round + alone, ones), WeightAge(other.round + other_alone, others), at_most)
        is WhoseWeights.BOTH
    )


@given(sides(), st.integers(0, 60), bounds)
def test_nobody_adopts_from_who_has_met_nobody(own: WeightAge, round: int, at_most: int) -> None:
    assert judged(own, WeightAge(round, 0), at_most) is not WhoseWeights.THEIRS


@given(sides(), sides(), bounds)
def test_no_claim_makes_another_one_stale(own: WeightAge, liar: WeightAge, at_most: int) -> None:
    """By our own number we are as stale as we are; what a partner claims may make us fresher, never staler."""
    assert staleness(own, clock(own, liar)) <= staleness(own, own.round)
    if staleness(own, own.round) <= at_most:
        assert judged(own, liar, at_most) is not WhoseWeights.THEIRS


@given(sides(), sides(), st.booleans())
def test_a_last_meeting_never_lies_ahead_and_only_adopting_moves_it_back(
    own: WeightAge, other: WeightAge, adopted: bool
) -> None:
    after = last_met_after(own, other, adopted=adopted)
    assert 0 <= after <= own.round
    assert adopted or after >= own.last_met
    if adopted:
        now = clock(own, other)
        assert staleness(WeightAge(own.round, after), now) == staleness(other, now)
