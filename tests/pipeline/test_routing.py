"""Routes: fair over every few draws, random all the same, and unmoved by what strangers claim."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.routing import (
    MOST_BELIEVED,
    UNPROVEN,
    Bag,
    Hop,
    next_hop,
    quotas,
)

times = st.floats(0.01, 100.0)


def hops_of(device_s: list[float]) -> list[Hop]:
    return [Hop(f"p{number}", each) for number, each in enumerate(device_s)]


def draw(bag: Bag, hops: list[Hop], rng: Random, count: int) -> tuple[Counter[str], Bag]:
    drawn: Counter[str] = Counter()
    for _ in range(count):
        peer, bag = next_hop(bag, hops, (), rng)
        assert peer is not None
        drawn[peer] += 1
    return drawn, bag


@given(st.lists(times, min_size=1, max_size=12), st.integers())
def test_a_full_bag_is_within_one_draw_of_proportion(device_s: list[float], seed: int) -> None:
    hops = hops_of(device_s)
    drawn, bag = draw(Bag(), hops, Random(seed), len(hops))
    assert not bag.entries
    for peer, quota in quotas(hops).items():
        assert abs(drawn[peer] - quota) < 1.0 + 1e-6


@given(st.lists(times, min_size=1, max_size=8), st.integers())
def test_rounding_is_carried_on_so_that_many_bags_are_as_exact_as_one(device_s: list[float], seed: int) -> None:
    hops, bags = hops_of(device_s), 30
    drawn, _ = draw(Bag(), hops, Random(seed), bags * len(hops))
    for peer, quota in quotas(hops).items():
        assert abs(drawn[peer] - bags * quota) < 2.0
        assert drawn[peer] >= 1, "nobody is starved"


@given(st.lists(times, min_size=1, max_size=12))
def test_quotas_follow_speeds_down_to_a_floor(device_s: list[float]) -> None:
    hops = hops_of(device_s)
    shares = quotas(hops)
    assert math.isclose(sum(shares.values()), len(hops))
    assert min(shares.values()) >= 1 / 9 - 1e-9
    ordered = sorted(hops, key=lambda hop: hop.device_s)
    for faster, slower in pairwise(ordered):
        assert shares[faster.peer] >= shares[slower.peer] - 1e-9


def test_shares_are_inverse_to_device_time() -> None:
    assert quotas([Hop("a", 0.1), Hop("b", 0.3)], {"a": 0.1, "b": 0.3}) == pytest.approx({"a": 1.5, "b": 0.5})


@pytest.mark.parametrize("honest", [2, 3, 15])
def test_a_boast_is_worth_a_quarter_more_until_replies_show_it(honest: int) -> None:
    hops = [Hop("liar", 1e-9), *hops_of([1.0] * honest)]
    even = dict.fromkeys((hop.peer for hop in hops), 1.0)
    for reply_s in ({}, even, even | {"liar": 5.0}):
        assert quotas(hops, reply_s)["liar"] / len(hops) == pytest.approx(UNPROVEN / (UNPROVEN + honest))
    # Who invents answers is soonest, and still counts as a number.
    assert quotas(hops, even | {"liar": 1e-9})["liar"] <= len(hops) * MOST_BELIEVED / (MOST_BELIEVED + honest) + 1e-9


def test_noise_does_not_bias_and_unknown_speeds_take_the_median() -> None:
    near = quotas([Hop("a", 1.0), Hop("b", 1.09)])
    assert near["a"] == near["b"]
    assert (
        quotas([Hop("a", 1.0), Hop("b", 1.0), Hop("c", 4.0), Hop("d")])["d"]
        == quotas([Hop("a", 1.0), Hop("b", 1.0), Hop("c", 4.0), Hop("d", 1.0)])["d"]
    )


@pytest.mark.parametrize("claim", [math.nan, math.inf, -1.0, 0.0])
def test_a_claim_that_is_no_time_counts_as_unknown(claim: float) -> None:
    assert quotas([Hop("a", 2.0), Hop("b", claim)]) == {"a": 1.0, "b": 1.0}


def test_avoided_peers_are_not_drawn_and_keep_their_place() -> None:
    hops, rng = hops_of([1.0] * 4), Random(3)
    bag = Bag()
    for _ in range(3):
        peer, bag = next_hop(bag, hops, {"p2"}, rng)
        assert peer != "p2"
    assert bag.entries == ("p2",)
    assert next_hop(bag, hops, (), rng)[0] == "p2"


def test_nobody_to_ask() -> None:
    bag = Bag(("a",), {"a": 0.5})
    assert next_hop(bag, [], (), Random(0)) == (None, bag)
    assert next_hop(bag, [Hop("a")], {"a"}, Random(0)) == (None, bag)


def test_one_that_left_is_dropped_and_one_that_joined_is_drawn_from_the_same_bag() -> None:
    rng = Random(5)
    _, bag = next_hop(Bag(), hops_of([1.0] * 6), (), rng)
    hops = [Hop(f"p{number}", 1.0) for number in (3, 4, 5)] + [Hop("new", 1.0)]
    left = len([entry for entry in bag.entries if entry in ("p3", "p4", "p5")])
    drawn, bag = draw(bag, hops, rng, left + 1)
    assert drawn["new"] == 1
    assert not {"p0", "p1", "p2"} & set(drawn)
    assert set(bag.credit) == {"p3", "p4", "p5", "new"}
    _, bag = next_hop(bag, hops, (), rng)
    _, fewer = next_hop(bag, [hop for hop in hops if hop.peer in bag.entries[:1]], (), rng)
    assert len(bag.entries) == 3
    assert not fewer.entries


def test_the_last_one_standing_is_asked_even_when_the_bag_owes_it_nothing() -> None:
    hops, rng, bag = hops_of([0.01, 100.0]), Random(0), Bag()
    for _ in range(50):
        peer, bag = next_hop(bag, hops, {"p0"}, rng)
        assert peer == "p1"
    drawn, bag = draw(bag, hops, rng, 20)
    assert drawn["p0"] >= 8
    assert all(-1.0 <= owed <= 1.0 for owed in bag.credit.values())


def test_draws_are_a_function_of_the_seed() -> None:
    hops = hops_of([1.0, 2.0, 3.0])
    one, two, other = (draw_in_order(hops, Random(seed)) for seed in (7, 7, 8))
    assert one == two != other


def draw_in_order(hops: list[Hop], rng: Random) -> list[str | None]:
    bag, order = Bag(), []
    for _ in range(60):
        peer, bag = next_hop(bag, hops, (), rng)
        order.append(peer)
    return order
