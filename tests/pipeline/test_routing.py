"""Routes: fair over every few draws, random all the same; and suspicions: how long they last, and what ends them."""

import math
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.routing import (
    FIRST_SUSPICION_S,
    LONGEST_SUSPICION_S,
    MOST_BELIEVED,
    TIMES_COST,
    UNPROVEN,
    Bag,
    Hop,
    Standing,
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


@given(st.lists(times, min_size=1, max_size=12), st.integers(), st.sampled_from([1, 30]))
def test_a_full_bag_is_within_one_draw_of_proportion_and_many_are_as_exact_as_one(
    device_s: list[float], seed: int, bags: int
) -> None:
    hops = hops_of(device_s)
    drawn, bag = draw(Bag(), hops, Random(seed), bags * len(hops))
    assert not bag.entries
    for peer, quota in quotas(hops).items():
        assert abs(drawn[peer] - bags * quota) < (1.0 + 1e-6 if bags == 1 else 2.0)
        assert bags == 1 or drawn[peer] >= 1, "nobody is starved"


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


@given(st.integers(2, 60), st.integers(1, 30), st.integers(0, 60), st.integers())
def test_newcomers_are_drawn_every_other_time_and_nobody_loses_an_entry_by_it(
    others: int, newcomers: int, drawn: int, seed: int
) -> None:
    known, rng = hops_of([1.0] * others), Random(seed)
    before, bag = draw(Bag(), known, rng, drawn % others + 1)
    assert not bag.new, "in the first bag nobody came later"
    hops = [*known, *(Hop(f"new{number}", 1.0) for number in range(newcomers))]
    order = []
    while bag.entries or not order:
        peer, bag = next_hop(bag, hops, (), rng)
        order.append(peer)
    due = {hop.peer: 1 for hop in hops}
    if drawn % others + 1 < others:
        assert {hop.peer: before[hop.peer] + order.count(hop.peer) for hop in hops} == due
    assert Counter(order).keys() >= {f"new{number}" for number in range(newcomers)}
    assert not bag.new


@given(st.integers(1, 40), st.integers())
def test_names_that_flood_a_bag_leave_others_half_of_the_draws_while_these_have_any(names: int, seed: int) -> None:
    rng, known = Random(seed), hops_of([1.0] * 40)
    _, bag = next_hop(Bag(), known, (), rng)
    hops = [*known, *(Hop(f"new{number}", 1.0) for number in range(names))]
    drawn, _ = draw(bag, hops, rng, 30)
    of_others = sum(count for peer, count in drawn.items() if not peer.startswith("new"))
    assert of_others >= 2, "fewer once in thirty million times"


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


HOPS = tuple(Hop(peer) for peer in "abc")


def lose(standing: Standing, peer: str, now_s: float) -> None:
    standing.lose(peer, now_s, 0.0, accused=True, hung=False)


def on_trial(standing: Standing, now_s: float) -> set[str]:
    """Return who has no second call while it has one, where nobody is proved."""
    for hop in HOPS:
        standing.begin(hop.peer)
    occupied = standing.occupied(now_s)
    for hop in HOPS:
        standing.end(hop.peer)
    return occupied


def test_suspicion_doubles_once_for_each_new_loss() -> None:
    standing = Standing(lambda: HOPS)
    for _ in range(8):
        lose(standing, "a", 100.0)
    assert standing.suspects(100.0 + FIRST_SUSPICION_S - 0.01) == {"a"}
    assert standing.suspects(100.0 + FIRST_SUSPICION_S) == set()
    lose(standing, "a", 200.0)
    assert standing.suspects(200.0 + 2 * FIRST_SUSPICION_S - 0.01) == {"a"}
    assert standing.suspects(200.0 + 2 * FIRST_SUSPICION_S) == set()


@given(st.lists(st.sampled_from([0.0, 1.0, 5.0, 30.0]), min_size=1, max_size=6))
def test_a_failed_dial_does_not_double_what_a_silence_has_earned(costs_s: list[float]) -> None:
    """A cost of 0 stands for a failed dial; each call begins when the rest before it is over."""
    standing, now_s = Standing(lambda: HOPS), 0.0
    for losses, cost_s in enumerate(costs_s):
        now_s += cost_s
        standing.lose("a", now_s, cost_s, accused=True, hung=cost_s > 0.0)
        length_s = standing.suspicions["a"].until_s - now_s
        assert length_s >= min(LONGEST_SUSPICION_S, TIMES_COST * cost_s)
        assert cost_s or length_s == FIRST_SUSPICION_S * 2**losses
        now_s += length_s


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0.0, 60.0)), max_size=40))
def test_a_replica_is_suspected_then_on_trial_until_it_succeeds(story: list[tuple[str, bool, float]]) -> None:
    standing, now_s, blamed = Standing(lambda: HOPS), 0.0, set[str]()
    for peer, succeeds, passed_s in story:
        now_s += passed_s
        if succeeds:
            standing.succeed(peer, 1.0)
        else:
            lose(standing, peer, now_s)
        blamed = blamed - {peer} if succeeds else blamed | {peer}
        unproved = {hop.peer for hop in HOPS} - standing.reply_s.keys() if standing.reply_s else set()
        tried = on_trial(standing, now_s) - unproved
        assert not standing.suspects(now_s) & tried
        assert standing.suspects(now_s) | tried <= blamed
        assert not any(standing.proved(each) for each in blamed)
        assert all(FIRST_SUSPICION_S <= one.length_s <= LONGEST_SUSPICION_S for one in standing.suspicions.values())


def test_suspicion_is_bounded_cleared_by_success_and_forgotten() -> None:
    standing, now_s = Standing(lambda: HOPS), 0.0
    for _ in range(20):
        lose(standing, "a", now_s)
        now_s = standing.suspicions["a"].until_s
    for later_s, length_s in ((-1.0, LONGEST_SUSPICION_S), (0.0, FIRST_SUSPICION_S)):
        standing.suspicions["a"] = standing.suspicions["a"]._replace(until_s=now_s, length_s=LONGEST_SUSPICION_S)
        standing.succeed("a", 1.0)
        assert not standing.suspects(now_s - 1.0)
        assert not on_trial(standing, now_s) & {"a"}
        lose(standing, "a", now_s + LONGEST_SUSPICION_S + later_s)
        assert standing.suspicions["a"].length_s == length_s
    lose(standing, "b", now_s + 4 * LONGEST_SUSPICION_S)
    assert set(standing.suspicions) == {"b"}


def test_a_replica_that_was_proved_and_is_a_suspect_is_not_relied_on() -> None:
    standing = Standing(lambda: HOPS)
    standing.succeed("a", 1.0)
    assert (standing.favoured(), standing.favoured(but="a")) == (True, False)
    lose(standing, "a", 0.0)
    assert not standing.favoured()
