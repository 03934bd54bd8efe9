"""Placement: newcomers go where they are needed, spread over the stages, and nobody swings."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.placement import (
    EQUAL_WITHIN,
    MOST_AHEAD_S,
    MOST_BELIEVED,
    MOST_NEWCOMERS,
    StageClaim,
    capacities,
    choose_stage,
    parse_stage,
    powers,
    reason,
    should_yield,
    stages_that_fit,
)

EVEN = (1.0, 1.0, 1.0, 1.0)
works = st.tuples(*[st.floats(0.1, 10.0)] * 4)
device_times = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


@st.composite
def swarms(draw: st.DrawFn) -> list[StageClaim]:
    """Records of up to twenty peers at four stages; some newcomers do not fit everywhere."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.booleans(),
                device_times,
                st.one_of(st.none(), st.sets(st.integers(0, 3), min_size=1)),
            ),
            max_size=20,
        )
    )
    return [
        StageClaim(f"p{number:02}", stage, 0.0, settled, device_s, None if serves is None else serves | {stage})
        for number, (stage, settled, device_s, serves) in enumerate(rows)
    ]


def after(claims: list[StageClaim], work: tuple[float, ...]) -> list[StageClaim]:
    """Return the records when everybody has followed the plan: a peer that moves tells its time at the new stage."""
    moved = []
    for claim in claims:
        to = should_yield(claim.peer, claims, work)
        if to is not None:
            claim = claim._replace(stage=to, device_s=claim.device_s * work[to] / work[claim.stage])
        moved.append(claim)
    return moved


# The stage that limits the swarm.


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=6), st.integers(), st.data())
def test_a_newcomer_takes_the_weakest_stage_that_fits(capacity: list[float], seed: int, data: st.DataObject) -> None:
    fits = data.draw(st.sets(st.integers(0, len(capacity) - 1), min_size=1))
    chosen = choose_stage(capacity, fits, Random(seed))
    assert chosen in fits
    assert all(capacity[chosen] <= EQUAL_WITHIN * capacity[stage] for stage in fits)
    for before in fits:
        again = choose_stage(capacity, fits, Random(seed), before)
        equal = capacity[before] <= EQUAL_WITHIN * min(capacity[stage] for stage in fits)
        assert (again == before) if equal else (again == chosen)


def test_chance_decides_among_equals() -> None:
    chosen = {choose_stage([1.0, 0.0, 0.0], (0, 1, 2), Random(f"peer {n}")) for n in range(20)}
    assert chosen == {1, 2}


@pytest.mark.parametrize("want", [-1, 3])
def test_a_stage_that_is_not_there(want: int) -> None:
    assert parse_stage(2, 3) == 2
    with pytest.raises(ValueError, match="stages 0 to 2"):
        parse_stage(want, 3)


def test_what_fits_into_memory() -> None:
    assert stages_that_fit((3, 2, 5), 3, 3) == (0, 1)
    assert stages_that_fit((3, 2, 5), 1, 3) == ()
    assert stages_that_fit((3, 2, 5), None, 3) == stages_that_fit((), 1, 3) == (0, 1, 2)


def test_the_sentence_says_what_limits_and_what_we_add() -> None:
    limits = "stage 2 limits the swarm: 1.3 of 2 microbatches/s; with us 1.9"
    assert reason(2, [2.0, 2.5, 1.3], 0.6) == limits
    assert reason(1, [2.0, 0.0, 1.3], 0.6) == "stage 1 has nobody; with us 0.6 microbatches/s"
    assert reason(0, [2.0, 2.0], 0.5).startswith("no stage is weaker than stage 0: 2 microbatches/s")
    assert "we cannot serve stage 1, which is weaker (1)" in reason(0, [2.0, 1.0], 0.5)
    assert reason(0, [2.0], 0.5).startswith("stage 0 is the whole model")


# What is believed.


@given(swarms(), works)
def test_nobody_is_believed_to_be_far_from_the_median(claims: list[StageClaim], work: tuple[float, ...]) -> None:
    power = powers(claims, work)
    believed = sorted(power.values())
    assert power.keys() == {claim.peer for claim in claims}
    assert all(0.0 < each < math.inf for each in believed)
    if believed:
        assert believed[-1] <= MOST_BELIEVED**2 * believed[0] * (1 + 1e-9)


def test_a_boast_neither_fills_a_stage_nor_empties_one() -> None:
    honest = [StageClaim(f"p{n}", n % 2, device_s=0.1) for n in range(6)]
    boast = [*honest, StageClaim("boast", 1, device_s=1e-300), StageClaim("dead", 0, device_s=1e300)]
    capacity = capacities(boast, (1.0, 1.0))
    assert capacity[1] == pytest.approx(30.0 + MOST_BELIEVED * 10.0)
    assert capacity[0] == pytest.approx(30.0 + 10.0 / MOST_BELIEVED)
    for nonsense in (0.0, -1.0, math.nan, math.inf):
        assert capacities([*honest, StageClaim("odd", 0, device_s=nonsense)], (1.0, 1.0)) == pytest.approx([40.0, 30.0])


def test_a_device_is_known_at_all_stages_by_their_work() -> None:
    claims = [StageClaim("a", 0, device_s=1.0), StageClaim("b", 2, device_s=3.0)]
    assert powers(claims, (2.0, 2.0, 6.0)) == {"a": 2.0, "b": 2.0}
    assert capacities(claims, (2.0, 2.0, 6.0)) == [1.0, 0.0, pytest.approx(1 / 3)]


# Newcomers that chose alike.


def test_of_two_that_chose_alike_the_larger_peer_id_yields() -> None:
    claims = [StageClaim("a", 0, 10.0, False), StageClaim("b", 0, 9.0, False)]
    assert (should_yield("a", claims, EVEN[:2]), should_yield("b", claims, EVEN[:2])) == (None, 1)
    assert should_yield("b", [*claims, StageClaim("c", 1)], EVEN[:2]) is None, "no other stage is better off for it"


def test_who_has_settled_stays_and_so_does_an_old_claim() -> None:
    assert should_yield("a", [StageClaim("a", 0, 10.0, False), StageClaim("b", 0, 9.0, True)], EVEN[:2]) == 1
    assert should_yield("a", [StageClaim("a", 0, 100.0, False), StageClaim("b", 0, 9.0, False)], EVEN[:2]) == 1
    assert should_yield("b", [StageClaim("a", 0, 100.0, False), StageClaim("b", 0, 9.0, False)], EVEN[:2]) is None
    assert should_yield("absent", [StageClaim("a", 0, 100.0, False)], EVEN[:2]) is None


@given(
    st.lists(st.tuples(st.integers(0, 1), st.floats(0.0, 50.0)), min_size=2, max_size=8),
    st.lists(st.tuples(st.integers(0, 1), st.floats(1.001 * MOST_AHEAD_S + 50.0, 2.0**60)), min_size=1, max_size=3),
)
def test_a_claim_from_the_future_counts_as_settled_and_makes_nobody_old(
    rows: list[tuple[int, float]], ahead: list[tuple[int, float]]
) -> None:
    claims = [StageClaim(f"p{n}", stage, 1e9 + at, False) for n, (stage, at) in enumerate(rows)]
    strangers = [StageClaim(f"z{n}", stage, 1e9 + at, False) for n, (stage, at) in enumerate(ahead)]
    settled = [claim._replace(claimed_at=0.0, settled=True) for claim in strangers]
    for claim in claims:
        assert should_yield(claim.peer, [*claims, *strangers], EVEN[:2]) == should_yield(
            claim.peer, claims + settled, EVEN[:2]
        )


def test_of_very_many_newcomers_some_stay_and_the_others_spread_around_them() -> None:
    claims = [StageClaim(f"p{n:03}", 0, 0.0, False) for n in range(MOST_NEWCOMERS + 20)]
    asked = {number: should_yield(claims[number].peer, claims, EVEN[:2]) for number in (0, 117, 118, 255, 256, 275)}
    assert asked == {0: None, 117: None, 118: 1, 255: 1, 256: None, 275: None}


def test_the_one_who_fits_goes() -> None:
    claims = [StageClaim("a", 0, 0.0, False, may_serve=(0, 1)), StageClaim("b", 0, 0.0, False, may_serve=(0,))]
    assert (should_yield("a", claims, EVEN[:2]), should_yield("b", claims, EVEN[:2])) == (1, None)


@given(swarms(), works)
def test_everybody_following_the_plan_once_makes_it_final(claims: list[StageClaim], work: tuple[float, ...]) -> None:
    moved = after(claims, work)
    assert all(now == was for now, was in zip(moved, claims, strict=True) if was.settled)
    assert all(claim.serves(claim.stage) for claim in moved)
    assert all(should_yield(claim.peer, moved, work) is None for claim in moved)


@given(swarms(), works)
def test_the_plan_never_makes_the_weakest_stage_weaker(claims: list[StageClaim], work: tuple[float, ...]) -> None:
    before, now = sorted(capacities(claims, work)), sorted(capacities(after(claims, work), work))
    assert now >= [each * (1 - 1e-6) for each in before]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_peers_of_whom_nothing_is_known_are_counted(pairs: list[tuple[int, bool]]) -> None:
    claims = [StageClaim(f"p{number:02}", stage, 0.0, settled) for number, (stage, settled) in enumerate(pairs)]
    moved = after(claims, EVEN)
    counts = [sum(claim.stage == stage for claim in moved) for stage in range(4)]
    for claim in moved:
        if not claim.settled:
            assert counts[claim.stage] - min(counts) <= 1


@given(swarms(), works, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_records(
    claims: list[StageClaim], work: tuple[float, ...], rng: Random
) -> None:
    shuffled = rng.sample(claims, len(claims))
    assert [should_yield(c.peer, claims, work) for c in claims] == [
        should_yield(c.peer, shuffled, work) for c in claims
    ]


@given(st.integers(0, 3), st.integers(1, 4))
def test_a_newcomer_alone_stays_for_each_stage_is_as_empty_without_it(stage: int, stages: int) -> None:
    claims = [StageClaim("a", stage % stages, 10.0, False)]
    assert should_yield("a", claims, EVEN[:stages]) is None
