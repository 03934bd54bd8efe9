"""Which donor is asked next, which one is believed, and what becomes of the pieces of one that died."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.exchange.messages import Implausible, Manifest
from gossip.rule.outer_step import ROUND_BOUND
from gossip.transfer.assembly import LEAST_SAVING, ROUNDS_APART, mixes
from gossip.transfer.chunks import listed
from gossip.transfer.download import LONGEST_WAIT_S, DonorBusy, DonorQueue, Turn, objection, round_to_start_in

ROW = listed([b"0" * 32])
MANIFEST = Manifest(
    snapshot="one",
    round=20,
    inner_steps=1000,
    progress=0.5,
    optimiser_steps=1000,
    meetings=0,
    last_met=19,
    norm=10.0,
    slow=ROW,
    momentum=ROW,
)
norms = st.floats(1e-3, 1e3)


@given(st.integers(0, 40), st.integers(0, 10**9), st.integers(0, 10**9))
def test_units_stay_where_that_saves_something_and_the_copies_belong_together(
    round: int, afresh: int, settled: int
) -> None:
    afresh, mixed = max(afresh, settled), max(afresh, settled) - settled
    after = replace(MANIFEST, round=round)
    near = abs(round - MANIFEST.round) <= ROUNDS_APART
    found = mixes(MANIFEST, after, afresh_bytes=afresh, mixed_bytes=mixed)
    assert found == (near and mixed <= (1 - LEAST_SAVING) * afresh)


def test_copies_of_other_sections_or_another_place_in_the_period_do_not_mix() -> None:
    saving = {"afresh_bytes": 100, "mixed_bytes": 1}
    assert mixes(MANIFEST, MANIFEST, **saving)
    assert not mixes(MANIFEST, replace(MANIFEST, meetings=1, gathered=ROW), **saving)
    assert not mixes(replace(MANIFEST, meetings=1), replace(MANIFEST, meetings=2), **saving)
    assert not mixes(MANIFEST, replace(MANIFEST, first=ROW, second=ROW), **saving)


@given(st.lists(norms, min_size=1, max_size=3))
def test_of_any_replicas_one_is_left_to_copy_from(found: list[float]) -> None:
    """Each is compared with the others; not all of them are refused."""
    others = [replace(MANIFEST, norm=norm) for norm in found]
    refused = [objection(each, others[:place] + others[place + 1 :]) is not None for place, each in enumerate(others)]
    assert not all(refused)
    assert not any(refused) or max(found) > 10.0 * min(found)


def test_weights_that_blew_up_are_refused_also_where_two_disagree() -> None:
    large, small = replace(MANIFEST, norm=1000.0), replace(MANIFEST, norm=0.1)
    assert objection(large, [MANIFEST]) is not None
    assert objection(MANIFEST, [large]) is None
    assert objection(small, [MANIFEST, replace(MANIFEST, norm=11.0)]) is not None


@given(st.integers(0, 100), st.floats(0.0, 1.0))
def test_round_and_progress_are_compared_with_the_rosters(round: int, progress: float) -> None:
    voices = [replace(MANIFEST, round=at, progress=far) for at, far in ((19, 0.0), (20, 0.5), (1000, 0.5))]
    found = objection(replace(MANIFEST, round=round, progress=progress), voices)
    near = abs(round - 20) <= 16 and abs(progress - 0.5) <= 0.25
    assert (found is None) == near
    assert objection(replace(MANIFEST, round=round, progress=progress), []) is None


@given(st.integers(0, 10**6), st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_a_newcomer_starts_in_the_round_of_its_stage_or_donor_and_no_liar_drags_it(own: int, rounds: list[int]) -> None:
    start = round_to_start_in(own, rounds)
    middle = sorted(rounds)[(len(rounds) - 1) // 2]
    assert min(own, middle) <= start <= min(own, middle) + ROUND_BOUND
    if abs(own - middle) <= ROUND_BOUND:
        assert start == max(own, middle)
    assert round_to_start_in(own, []) == own


def asked(queue: DonorQueue, failures: dict[str, list[ConnectionError]]) -> list[Turn]:
    """Ask until nobody is left; the last failure of each donor repeats."""
    turns: list[Turn] = []
    while (turn := queue.next()) is not None:
        turns.append(turn)
        left = failures[turn.donor]
        queue.note(turn.donor, left.pop(0) if len(left) > 1 else left[0])
    return turns


def test_only_who_may_give_later_is_asked_again_after_the_shortest_wait() -> None:
    queue = DonorQueue(["a", "b", "c", "d"], passes=3)
    failures: dict[str, list[ConnectionError]] = {
        "a": [DonorBusy("busy", 7.0), ConnectionAbortedError("gone")],
        "b": [ConnectionAbortedError("silent")],
        "c": [DonorBusy("busy", 3.0)],
        "d": [Implausible("a norm of 1e9")],
    }
    assert asked(queue, failures) == [
        *(Turn("a"), Turn("b"), Turn("c"), Turn("d")),
        *(Turn("a", 3.0), Turn("c")),
        Turn("c", 3.0),
    ]
    failure = queue.failure()
    assert isinstance(failure, DonorBusy)
    assert failure.retry_after_s == 3.0
    assert str(failure) == "no replica gave its state (a: gone; b: silent; c: busy; d: a norm of 1e9)"


def test_without_donors_there_is_nobody_to_ask() -> None:
    queue = DonorQueue([], passes=5)
    assert queue.next() is None
    failure = queue.failure()
    assert not isinstance(failure, DonorBusy)
    assert "there is none to ask" in str(failure)


@pytest.mark.parametrize("said", [-1.0, 0.0, float("nan"), float("inf"), 1e9])
def test_a_wait_is_bounded_whatever_a_donor_says(said: float) -> None:
    queue = DonorQueue(["a"], passes=2)
    queue.note("a", DonorBusy("busy", said))
    failure = queue.failure()
    assert isinstance(failure, DonorBusy)
    assert failure.retry_after_s == LONGEST_WAIT_S


FAILURES = st.one_of(
    st.builds(DonorBusy, st.just("busy"), st.floats(allow_nan=True)),
    st.just(ConnectionAbortedError("silent")),
    st.just(Implausible("a lie")),
)


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(FAILURES, min_size=1, max_size=4)), st.integers(1, 5))
def test_everybody_is_asked_once_and_nobody_more_often_than_the_passes(
    failures: dict[str, list[ConnectionError]], passes: int
) -> None:
    queue = DonorQueue(tuple(failures), passes)
    turns = asked(queue, failures)
    assert [turn.donor for turn in turns[: len(failures)]] == list(failures)
    assert all(sum(turn.donor == donor for turn in turns) <= passes for donor in failures)
    assert all(0.0 <= turn.wait_s <= LONGEST_WAIT_S for turn in turns)
    assert sum(turn.wait_s > 0.0 for turn in turns) < passes
