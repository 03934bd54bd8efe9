"""What two sides count in their mean: the laws of shares and of staleness, and where the disagreement contracts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.rule.outer_step import (
    DISOWNED,
    EVEN,
    MOST,
    WeightAge,
    WhoseWeights,
    clock,
    last_met_after,
    shares_by_steps,
    staleness,
    whose_weights_count,
)
from gossip.rule.stability import weighed_stability_bound
from research.theory.pair_step import mean

claims = st.integers(0, 2**62)
honest = st.integers(1, 60)
few = settings(max_examples=40)


@given(claims, claims)
def test_both_sides_see_the_same_shares_to_the_bit(own: int, theirs: int) -> None:
    mine, other = shares_by_steps(own, theirs), shares_by_steps(theirs, own)
    assert (mine.own, mine.theirs) == (other.theirs, other.own)


@given(claims, claims)
def test_whatever_is_claimed_nobody_counts_more_than_its_bound(own: int, theirs: int) -> None:
    shares = shares_by_steps(own, theirs)
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) <= MOST / (1.0 + MOST) + 1e-12


@given(honest, honest)
def test_within_the_bound_each_inner_step_counts_alike(own: int, theirs: int) -> None:
    shares = shares_by_steps(own, theirs)
    assert (shares == EVEN) == (own == theirs)
    assert (shares.own >= shares.theirs) == (own >= theirs)
    if 1.0 / MOST <= own / theirs <= MOST:
        assert shares.own * theirs == pytest.approx(shares.theirs * own)


@few
@given(st.integers(0, 2**20), honest, honest)
def test_both_sides_arrive_at_the_same_mean_to_the_bit_and_between_the_two(seed: int, own: int, theirs: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x, y = torch.randn(1000, generator=source), torch.randn(1000, generator=source)
    shares = shares_by_steps(own, theirs)
    (here,), (there,) = mean((x,), (y,), shares), mean((y,), (x,), shares_by_steps(theirs, own))
    assert torch.equal(here, there)
    torch.testing.assert_close(here, shares.own * x + shares.theirs * y)
    assert bool((here >= torch.minimum(x, y) - 1e-6).all())
    assert bool((here <= torch.maximum(x, y) + 1e-6).all())


def growth(alpha: float, gamma: float, most: float) -> float:
    """The factor by which the second moments grow where each pair is as unequal as it may be, either side by chance."""
    larger = most / (1.0 + most)
    total = torch.zeros(3, 3, dtype=torch.float64)
    for pull in (gamma * larger, gamma * (1.0 - larger)):
        # (phi, m) of one's own, and what the partner's phi adds, which is as far from the mean and independent.
        own = torch.tensor([[1.0 - pull, -alpha], [pull, alpha]], dtype=torch.float64)
        partner = torch.tensor([pull, -pull], dtype=torch.float64)
        pairs = ((0, 0), (0, 1), (1, 1))
        for row, (i, j) in enumerate(pairs):
            for column, (a, b) in enumerate(pairs):
                both = own[i, a] * own[j, b] + (own[i, b] * own[j, a] if a != b else 0.0)
                total[row, column] += 0.5 * (both + (partner[i] * partner[j] if column == 0 else 0.0))
    return float(torch.linalg.eigvals(total).abs().max())


@few
@given(st.floats(0.0, 0.95), st.floats(1.0, 8.0), st.floats(0.05, 0.99))
def test_the_disagreement_contracts_below_the_bound_and_grows_above(alpha: float, most: float, part: float) -> None:
    bound = weighed_stability_bound(alpha, most)
    assert growth(alpha, part * bound, most) < 1.0
    assert growth(alpha, bound * 1.001, most) > 1.0


@few
@given(st.integers(0, 2**20), st.lists(honest, min_size=4, max_size=12))
def test_replicas_that_stand_still_agree_after_a_while(seed: int, steps: list[int]) -> None:
    source = torch.Generator().manual_seed(seed)
    weights = [torch.randn(50, generator=source) for _ in steps]
    lowest, highest = torch.stack(weights).amin(0), torch.stack(weights).amax(0)
    for _ in range(60):
        order = torch.randperm(len(steps), generator=source).tolist()
        for one, other in zip(order[::2], order[1::2], strict=False):
            (weights[one],) = (weights[other],) = mean(
                (weights[one],), (weights[other],), shares_by_steps(steps[one], steps[other])
            )
    end = torch.stack(weights)
    assert float((end - end.mean(0)).abs().max()) < 1e-2 * float((highest - lowest).max())
    assert bool((end >= lowest - 1e-4).all() and (end <= highest + 1e-4).all())


# Staleness: by numbers that a stage has in common, and that no liar can turn against others.

bounds = st.integers(0, 30)


@st.composite
def sides(draw: st.DrawFn) -> WeightAge:
    round = draw(st.integers(0, 60))
    return WeightAge(round, draw(st.integers(0, round)))


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
    assert whose_weights_count(disowned, other, at_most) is WhoseWeights.THEIRS
    assert whose_weights_count(other, disowned, at_most) is WhoseWeights.MINE
    assert whose_weights_count(disowned, WeightAge(other.round, DISOWNED), at_most) is WhoseWeights.BOTH


@given(sides(), sides(), st.integers(0, 50), st.integers(0, 50), bounds)
def test_two_that_met_each_other_last_never_adopt(
    one: WeightAge, other: WeightAge, alone: int, other_alone: int, at_most: int
) -> None:
    """However many rounds each has taken alone since, and whatever each may know of the other's number."""
    fresh, newer = WeightAge(one.round, 0), WeightAge(other.round, 0)
    ones, others = last_met_after(fresh, newer, adopted=False), last_met_after(newer, fresh, adopted=False)
    assert ones == others
    assert (
        whose_weights_count(WeightAge(one.round + alone, ones), WeightAge(other.round + other_alone, others), at_most)
        is WhoseWeights.BOTH
    )


@given(sides(), st.integers(0, 60), bounds)
def test_nobody_adopts_from_who_has_met_nobody(own: WeightAge, round: int, at_most: int) -> None:
    assert whose_weights_count(own, WeightAge(round, 0), at_most) is not WhoseWeights.THEIRS


@given(sides(), sides(), bounds)
def test_no_claim_makes_another_one_stale(own: WeightAge, liar: WeightAge, at_most: int) -> None:
    """By our own number we are as stale as we are; what a partner claims may make us fresher, never staler."""
    assert staleness(own, clock(own, liar)) <= staleness(own, own.round)
    if staleness(own, own.round) <= at_most:
        assert whose_weights_count(own, liar, at_most) is not WhoseWeights.THEIRS


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
