"""Who is asked next, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.exchange.messages import Implausible
from gossip.transfer.download import LONGEST_WAIT_S, DonorBusy, DonorQueue, Turn


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
