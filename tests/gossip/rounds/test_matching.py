"""Who meets whom: the hint is a fair and stable matching, the answer comes at once and leaves nobody waiting."""

import math
import random
from collections import Counter
from itertools import combinations
from statistics import median_low
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from gossip.exchange.messages import Accept, Decline, DeclineReason, Propose
from gossip.rounds import matching
from gossip.rounds.matching import (
    ASKED_AT_MOST,
    PICKY_SHARE,
    TIMES_LOST,
    AnswerState,
    PartnerQueue,
    RoundClaims,
    RoundSchedule,
    answer,
    good_enough_at,
    heal,
    partners_of_round,
    preferences,
)
from gossip.rule.outer_step import LIFT_BOUND
from gossip.settings import RoundTimeouts

names = st.sets(st.text("abcdefgh", min_size=1, max_size=4), min_size=1, max_size=25)
few = settings(max_examples=60)


def roster(count: int) -> list[str]:
    return [f"peer{number:03}" for number in range(count)]


# The hint.


@few
@given(names, st.integers(0, 99), st.integers(0, 999))
def test_matching_is_an_involution_that_leaves_out_at_most_one(replicas: set[str], seed: int, round: int) -> None:
    partner = partners_of_round(replicas, seed, round)
    assert all(partner[partner[peer]] == peer != partner[peer] for peer in partner)
    assert len(replicas) - len(partner) == len(replicas) % 2


@few
@given(names, st.integers(0, 99), st.integers(0, 999))
def test_preferences_list_everybody_once_and_the_partner_first(replicas: set[str], seed: int, round: int) -> None:
    shuffled = random.Random(seed).sample(sorted(replicas), len(replicas))
    partner = partners_of_round(replicas, seed, round)
    for me in replicas:
        order = preferences(me, [peer for peer in shuffled if peer != me], seed, round)
        assert sorted(order) == sorted(replicas - {me})
        assert order == preferences(me, shuffled, seed, round)
        if me in partner:
            assert order[0] == partner[me]


@few
@given(st.lists(st.integers(0, 5) | st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=16), st.integers(0, 99))
def test_the_matching_takes_one_pair_after_another_the_lowest_score_first(tickets: list[int], round: int) -> None:
    """Also where scores are equal: the first pair in the order of names counts."""
    replicas = tuple(roster(2 * (len(tickets) // 2)))
    drawn = torch.tensor(tickets[: len(replicas)])
    pairs = list(combinations(range(len(replicas)), 2))
    scores = [int(matching._scores(drawn[one], drawn[other])) for one, other in pairs]
    expected: dict[str, str] = {}
    for _, (one, other) in sorted(zip(scores, pairs, strict=True)):
        if not expected.keys() & {replicas[one], replicas[other]}:
            expected |= {replicas[one]: replicas[other], replicas[other]: replicas[one]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_tickets", lambda _salt, _peers: drawn)
        matching._greedy.cache_clear()
        assert partners_of_round(replicas, 0, round) == expected
    matching._greedy.cache_clear()


def test_peers_of_all_versions_draw_the_same_pairs() -> None:
    """Recorded: a version that draws others has pairs that do not agree, and waits for nobody's proposal."""
    drawn = [partners_of_round(roster(7), 5, round) for round in range(2)]
    pairs = [sorted(pair for pair in each.items() if pair[0] < pair[1]) for each in drawn]
    assert pairs == [
        [("peer000", "peer002"), ("peer001", "peer006"), ("peer004", "peer005")],
        [("peer000", "peer004"), ("peer001", "peer002"), ("peer003", "peer005")],
    ]
    assert preferences("peer000", roster(7), 5, 0) == ("peer002", "peer004", "peer006", "peer005", "peer003", "peer001")


def test_every_pair_is_equally_likely_over_the_rounds() -> None:
    replicas = roster(8)
    met = Counter(frozenset(pair) for round in range(2800) for pair in partners_of_round(replicas, 5, round).items())
    # Each unordered pair was counted in both directions.
    observed = [met[frozenset(pair)] // 2 for pair in combinations(replicas, 2)]
    assert sum(observed) == 4 * 2800
    assert chisquare(observed).pvalue > 0.001


@pytest.mark.parametrize("count", [3, 5, 9])
def test_with_an_odd_number_each_sits_out_once_a_cycle(count: int) -> None:
    replicas = [f"p{number}" for number in range(count)]
    orders = []
    for cycle in range(6):
        rounds = range(cycle * count, (cycle + 1) * count)
        idle = [min(set(replicas) - set(partners_of_round(replicas, 1, round))) for round in rounds]
        assert sorted(idle) == replicas
        orders.append(tuple(idle))
    assert len(set(orders)) > 1


def test_a_roster_that_differs_by_one_changes_few_pairs() -> None:
    everybody = roster(41)
    kept = []
    for round in range(60):
        all_pairs = {frozenset(pair) for pair in partners_of_round(everybody, 1, round).items()}
        seen = {frozenset(pair) for pair in partners_of_round(everybody[:-1], 1, round).items()}
        kept.append(len(all_pairs & seen) / len(seen))
    assert sum(kept) / len(kept) > 0.8


def test_preferences_never_form_a_cycle() -> None:
    # Among any set of replicas some two like each other best: whoever is still free can always be paired.
    replicas = roster(12)
    for round in range(50):
        order = {me: list(preferences(me, replicas, 9, round)) for me in replicas}
        free = set(random.Random(round).sample(replicas, 5))
        best = {me: min(free - {me}, key=order[me].index) for me in free}
        assert any(best[best[me]] == me for me in free)


def test_large_rosters_follow_their_own_preferences(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = roster(20)
    greedy = {me: preferences(me, replicas, 2, 7) for me in replicas}
    monkeypatch.setattr(matching, "GREEDY_AT_MOST", 19)
    by_hash = {me: preferences(me, replicas, 2, 7) for me in replicas}
    assert all(sorted(greedy[me]) == sorted(by_hash[me]) for me in replicas)
    # The best pair of all agrees in both.
    agreed = [me for me in replicas if by_hash[by_hash[me][0]][0] == me]
    assert agreed
    assert all(greedy[me][0] == by_hash[me][0] for me in agreed)


# The answer.


def standing(**others: Any) -> AnswerState:
    """Return a replica whose round is open and that has nothing to do with anybody, but for these fields."""
    free: dict[str, Any] = {"engaged": False, "asking": None, "leaving": False, "had": False, "preference_delay_s": 0.0}
    return AnswerState(**{"me": "m", "round": 5, "open": True, "ready_in_s": 12.0} | free | others)


@pytest.mark.parametrize(
    ("asked", "sender", "round", "reason"),
    [
        (standing(open=False), "z", 6, DeclineReason.NOT_OPEN),
        (standing(open=False), "z", 5, DeclineReason.MET),
        (standing(open=False), "z", 3, DeclineReason.MET),
        (standing(engaged=True), "z", 5, DeclineReason.ENGAGED),
        (standing(asking="a"), "z", 5, DeclineReason.ASKING),
        (standing(asking="z"), "z", 5, DeclineReason.YIELD),
        (standing(preference_delay_s=12.0), "z", 5, DeclineReason.HOPING),
        (standing(preference_delay_s=12.0, asking="a"), "z", 5, DeclineReason.HOPING),
        (standing(preference_delay_s=12.0, asking="z"), "z", 5, DeclineReason.YIELD),
        (standing(leaving=True), "z", 5, DeclineReason.LEAVING),
        (standing(had=True), "z", 6, DeclineReason.MET),
        (standing(had=True, asking="z", preference_delay_s=12.0), "z", 6, DeclineReason.MET),
    ],
)
def test_reasons_to_decline(asked: AnswerState, sender: str, round: int, reason: DeclineReason) -> None:
    declined = answer(asked, sender, Propose(round=round))
    assert isinstance(declined, Decline)
    assert (declined.reason, declined.round) == (reason, 5)
    waits = reason in (DeclineReason.ASKING, DeclineReason.YIELD)
    assert declined.retry_after_s == (matching.SOON_S if waits else 12.0)


@given(st.text(min_size=1), st.text(min_size=1))
def test_of_two_crossed_proposals_exactly_the_lower_ids_goes_first(a: str, b: str) -> None:
    if a == b:
        return
    to_a, to_b = (answer(standing(me=me, asking=other), other, Propose(round=5)) for me, other in ((a, b), (b, a)))
    assert isinstance(to_b if a < b else to_a, Accept)
    assert isinstance(to_a if a < b else to_b, Decline)


# The number of the round.


def test_healing_is_bounded_by_the_median_of_the_roster() -> None:
    assert heal(5, [10**9], [5, 5, 6, 10**9], 4) == 9
    assert heal(5, [], [5, 10**9], 4) == 9
    assert heal(5, [10**9], [], 4) == 9
    # A straggler far behind may be told the truth, whatever its distance.
    assert heal(3, [80], [80, 79, 80, 3], 4) == 80


@given(st.integers(0, 50), st.lists(st.integers(0, 10**6)), st.lists(st.integers(0, 50), min_size=1), st.integers(0, 9))
def test_healing_never_goes_back_nor_beyond_the_bound(own: int, seen: list[int], listed: list[int], bound: int) -> None:
    healed = heal(own, seen, listed, bound)
    assert healed >= own
    assert healed == own or healed <= sorted(listed)[(len(listed) - 1) // 2] + bound
    assert healed in {own, *seen, *listed, sorted(listed)[(len(listed) - 1) // 2] + bound}


def test_cadence_opens_every_h_steps_and_follows_the_roster() -> None:
    schedule = RoundSchedule(10, rounds=3, inner_steps=100, unknown_s=20.0)
    assert schedule.ready_in_s == 20.0
    schedule.tick(109, 0.5)
    assert not schedule.due
    assert schedule.ready_in_s == 0.5
    schedule.tick(110, 0.5)
    assert schedule.due
    schedule.open(RoundClaims([3, 3]))
    assert (schedule.round, schedule.finished, schedule.due, schedule.healed) == (4, 3, False, 0)
    # Skipped, while the others finished round 4: the next one is 5.
    schedule.tick(120, 0.5)
    schedule.skip()
    schedule.open(RoundClaims([4, 4]))
    assert (schedule.round, schedule.skipped_in_a_row, schedule.healed) == (5, 1, 1)
    schedule.adopt(10**6, RoundClaims([4, 4], of_partners=[4, 4]))
    assert schedule.round == 5 + LIFT_BOUND
    assert schedule.healed == 2
    schedule.adopt(3, RoundClaims([4, 4], of_partners=[4, 4]))
    assert (schedule.round, schedule.healed) == (5 + LIFT_BOUND, 2), "a lower number lifts nobody"
    schedule.finish(schedule.round)
    assert (schedule.finished, schedule.skipped_in_a_row) == (6, 0)


@given(st.lists(st.integers(0, 2**50), max_size=20), st.integers(0, 2**50), st.lists(st.integers(0, 20), max_size=5))
def test_claims_lift_by_one_an_opening_and_who_was_met_by_the_median(
    listed: list[int], offered: int, met: list[int]
) -> None:
    round_schedule = RoundSchedule(10, rounds=10, inner_steps=0, unknown_s=20.0)
    claims = RoundClaims([*listed, *met], met)
    round_schedule.open(claims)
    for _ in range(3):
        round_schedule.adopt(offered, claims)
    shown = max(10, median_low([10, *met]))
    assert 11 <= round_schedule.round <= 1 + shown + LIFT_BOUND


def test_names_that_were_never_met_are_no_majority() -> None:
    round_schedule = RoundSchedule(10, rounds=10, inner_steps=0, unknown_s=20.0)
    round_schedule.open(RoundClaims([2**40] * 100 + [10, 10, 2**40], of_partners=[10, 10, 2**40]))
    assert round_schedule.round == 11 + LIFT_BOUND
    straggler = RoundSchedule(10, rounds=10, inner_steps=0, unknown_s=20.0)
    straggler.open(RoundClaims([40, 41, 42], of_partners=[40, 41, 42]))
    assert straggler.round == 42


def test_a_round_becomes_less_picky_as_it_ages() -> None:
    assert [good_enough_at(place, 5) for place in range(5)] == [PICKY_SHARE * place / 4 for place in range(5)]
    assert good_enough_at(0, 1) == 0.0
    round_schedule = RoundSchedule(20, rounds=0, inner_steps=0, unknown_s=99.0)
    round_schedule.tick(20, 2.0)
    round_schedule.open(RoundClaims([0, 0, 0]))
    # Places 0, 1, 2 become good enough 0, 5 and 10 steps after the opening, 2 s each.
    assert [round_schedule.preference_delay_s(place, 3) for place in range(3)] == [0.0, 10.0, 20.0]
    round_schedule.tick(26, 2.0)
    assert [round_schedule.preference_delay_s(place, 3) for place in range(3)] == [0.0, 0.0, 8.0]
    round_schedule.tick(30, 2.0)
    assert round_schedule.preference_delay_s(2, 3) == 0.0


def test_whoever_found_nobody_or_is_about_to_end_takes_anybody() -> None:
    for last in (False, True):
        round_schedule = RoundSchedule(20, rounds=0, inner_steps=0, unknown_s=99.0)
        round_schedule.tick(20, 1.0)
        if not last:
            round_schedule.skip()
        round_schedule.open(RoundClaims([0]), last=last)
        assert round_schedule.preference_delay_s(9, 10) == 0.0
        round_schedule.finish(1)
        round_schedule.tick(40, 1.0)
        round_schedule.open(RoundClaims([1]))
        assert round_schedule.preference_delay_s(9, 10) == PICKY_SHARE * 20


# Whom to ask next.


def prospects() -> PartnerQueue:
    return PartnerQueue(RoundTimeouts(sleep_s=20.0, jitter_s=0.1), random.Random(0))


def refusal(reason: DeclineReason, retry_after_s: float) -> Decline:
    return Decline(reason=reason, retry_after_s=retry_after_s, round=1)


def test_partners_are_asked_in_order_and_not_before_their_time() -> None:
    some = prospects()
    assert some.next(["a", "b"], 0.0) == ("a", 0.0)
    some.declined("a", refusal(DeclineReason.NOT_OPEN, 7.0), 0.0)
    assert some.next(["a", "b"], 0.0) == ("b", 0.0)
    some.declined("b", refusal(DeclineReason.ENGAGED, 3.0), 0.0)
    peer, wait_s = some.next(["a", "b"], 0.0)
    assert peer is None
    assert 3.05 <= wait_s <= 3.15
    assert some.next(["a", "b"], wait_s)[0] == "b"
    some.clear(["a", "b"], 0.0)
    assert some.next(["a", "b"], 0.0) == ("a", 0.0)


@given(
    st.floats(2.1, 1e6),
    st.lists(st.floats(0.0, 2e7), max_size=6),
    st.lists(st.tuples(st.booleans(), st.floats(0.0, 1e6)), max_size=3),
)
def test_a_partner_is_left_alone_for_ten_times_its_loss_whatever_rounds_open(
    lost_s: float, openings: list[float], more: list[tuple[bool, float]]
) -> None:
    """It is declined for as long where a meeting took the time; a further loss shortens neither."""
    some, both, longest_s = prospects(), ["a", "b"], lost_s
    usual_s = 5.0
    some.met("b", usual_s)
    for in_meeting, also_s in [(True, lost_s), *more]:
        took_s = also_s + (usual_s if in_meeting else 0.0)
        some.note_loss("a", -took_s, math.inf, both, 0.0, in_meeting=in_meeting)
        longest_s = max(longest_s, also_s)
    until_s = TIMES_LOST * longest_s
    for now_s in sorted(openings):
        some.clear(both, now_s)
        if now_s < 0.999 * until_s or now_s > 1.001 * until_s + 1.0:
            left_alone = now_s < until_s
            assert (some.next(["a"], now_s)[0] is None) == some.declines("a", both, now_s) == left_alone
            assert some.left_alone_count(now_s) == left_alone
            assert not some.declines("a", ["a"], now_s), "it is the only one"


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e7))
def test_a_peer_that_did_not_answer_may_propose_itself(lost_s: float, now_s: float) -> None:
    some = prospects()
    some.note_loss("a", -lost_s, math.inf, ["a", "b"], 0.0, in_meeting=False)
    assert not some.declines("a", ["a", "b"], now_s)


@given(
    st.floats(0.0, 1e9), st.sampled_from([reason for reason in DeclineReason if reason is not DeclineReason.LEAVING])
)
def test_estimates_are_believed_until_the_next_round(told_s: float, reason: DeclineReason) -> None:
    """A round may last for hours; its opener asks us then, so that nothing is lost by an estimate that is too long."""
    some = prospects()
    some.declined("a", refusal(reason, told_s), 100.0)
    peer, wait_s = some.next(["a"], 100.0 + 0.9 * told_s)
    assert peer is None
    assert 0.0 < wait_s <= 20.0
    assert (some.put_off_count, some.left_alone_count(0.0)) == (1, 0), "it is asked again as it said"
    assert some.next(["a"], 100.2 + told_s) == ("a", 0.0)
    some.clear(["a"], 100.0)
    assert some.next(["a"], 100.0) == ("a", 0.0)


names = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(names, names, names, names)
def test_peers_that_proposed_are_asked_first_and_once_a_round(
    order: list[str], proposed: list[str], asked: list[str], again: list[str]
) -> None:
    """Once: otherwise one that proposes without end and never meets would keep us from all others."""
    some = prospects()
    for peer in proposed:
        some.proposed(peer)
    for peer in asked:
        some.put_off(peer, 60.0, 0.0)
    for peer in again:
        some.proposed(peer)
    waiting, free = {*proposed, *again}, [peer for peer in order if peer not in asked]
    turns = []
    while (peer := some.next(order, 1.0)[0]) is not None:
        turns.append(peer)
        some.put_off(peer, 60.0, 1.0)
        some.proposed(peer)
    assert turns == sorted(free, key=lambda peer: peer not in waiting)


def test_whoever_is_leaving_is_left_alone() -> None:
    some = prospects()
    assert some.nobody_left([])
    some.declined("a", refusal(DeclineReason.LEAVING, 0.0), 0.0)
    assert some.next(["a"], 1e6) == (None, 20.0)
    assert some.nobody_left(["a"])
    assert not some.nobody_left(["a", "b"])


def test_only_so_many_are_asked_in_one_round() -> None:
    some = prospects()
    order = roster(3 * ASKED_AT_MOST)
    for peer in order[:ASKED_AT_MOST]:
        some.put_off(peer, 5.0, 0.0)
    assert some.next(order, 0.0)[0] is None
    some.proposed(order[-1])
    assert some.next(order, 0.0) == (order[-1], 0.0)
