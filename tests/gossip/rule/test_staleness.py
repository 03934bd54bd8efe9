"""Whose weights count in a meeting: by numbers that a stage has in common, and no liar can turn against others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gossip.rule.staleness import (
    DISOWNED,
    ContributionWeights,
    Met,
    clock,
    contribution_weights,
    last_met_after,
    staleness,
)

bounds = st.integers(0, 30)


@st.composite
def sides(draw: st.DrawFn) -> Met:
    round = draw(st.integers(0, 60))
    return Met(round, draw(st.integers(0, round)))


def judged(own: Met, other: Met, at_most: int) -> ContributionWeights:
    return contribution_weights(own, other, at_most)


@given(sides(), sides(), bounds)
def test_terms_mirror_each_other_and_who_is_too_stale_counts_for_nothing(own: Met, other: Met, at_most: int) -> None:
    mirrored = {
        ContributionWeights.BOTH: ContributionWeights.BOTH,
        ContributionWeights.MINE: ContributionWeights.THEIRS,
        ContributionWeights.THEIRS: ContributionWeights.MINE,
    }
    found = contribution_weights(own, other, at_most)
    assert contribution_weights(other, own, at_most) == mirrored[found]
    now = clock(own, other)
    ages = (ContributionWeights.MINE, staleness(own, now)), (ContributionWeights.THEIRS, staleness(other, now))
    fresh = {side for side, age in ages if age <= at_most}
    assert found == (fresh.pop() if len(fresh) == 1 else ContributionWeights.BOTH)


@given(sides(), st.integers(0, 60), bounds)
def test_disowned_weights_count_for_nothing_in_any_round(other: Met, round: int, at_most: int) -> None:
    disowned = Met(round, DISOWNED)
    assert judged(disowned, other, at_most) is ContributionWeights.THEIRS
    assert judged(other, disowned, at_most) is ContributionWeights.MINE
    assert judged(disowned, Met(other.round, DISOWNED), at_most) is ContributionWeights.BOTH


@given(sides(), sides(), st.integers(0, 50), st.integers(0, 50), bounds)
def test_two_that_met_each_other_last_never_adopt(
    one: Met, other: Met, alone: int, other_alone: int, at_most: int
) -> None:
    """However many rounds each has taken alone since, and whatever each may know of the other's number."""
    fresh, newer = Met(one.round, 0), Met(other.round, 0)
    ones, others = last_met_after(fresh, newer, adopted=False), last_met_after(newer, fresh, adopted=False)
    assert ones == others
    assert (
        judged(Met(one.round + alone, ones), Met(other.round + other_alone, others), at_most)
        is ContributionWeights.BOTH
    )


@given(sides(), st.integers(0, 60), bounds)
def test_nobody_adopts_from_who_has_met_nobody(own: Met, round: int, at_most: int) -> None:
    assert judged(own, Met(round, 0), at_most) is not ContributionWeights.THEIRS


@given(sides(), sides(), bounds)
def test_no_claim_makes_another_one_stale(own: Met, liar: Met, at_most: int) -> None:
    """By our own number we are as stale as we are; what a partner claims may make us fresher, never staler."""
    assert staleness(own, clock(own, liar)) <= staleness(own, own.round)
    if staleness(own, own.round) <= at_most:
        assert judged(own, liar, at_most) is not ContributionWeights.THEIRS


@given(sides(), sides(), st.booleans())
def test_a_last_meeting_never_lies_ahead_and_only_adopting_moves_it_back(own: Met, other: Met, adopted: bool) -> None:
    after = last_met_after(own, other, adopted=adopted)
    assert 0 <= after <= own.round
    assert adopted or after >= own.last_met
    if adopted:
        now = clock(own, other)
        assert staleness(Met(own.round, after), now) == staleness(other, now)
