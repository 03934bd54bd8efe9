"""Suspicions: how long they last, how they grow, and what ends them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.trials import FIRST_SUSPICION_S, LONGEST_SUSPICION_S, SuspectList


def test_suspicion_doubles_once_for_each_new_disappointment() -> None:
    suspects = SuspectList()
    for _ in range(8):
        suspects = suspects.suspect("a", 100.0)
    assert suspects.active(100.0 + FIRST_SUSPICION_S - 0.01) == {"a"}
    assert suspects.active(100.0 + FIRST_SUSPICION_S) == set()
    suspects = suspects.suspect("a", 200.0)
    assert suspects.active(200.0 + 2 * FIRST_SUSPICION_S - 0.01) == {"a"}
    assert suspects.active(200.0 + 2 * FIRST_SUSPICION_S) == set()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0.0, 60.0)), max_size=40))
def test_a_peer_is_suspected_then_on_trial_until_it_succeeds(story: list[tuple[str, bool, float]]) -> None:
    suspects, now_s, blamed = SuspectList(), 0.0, set[str]()
    for peer, succeeds, passed_s in story:
        now_s += passed_s
        suspects = suspects.clear(peer) if succeeds else suspects.suspect(peer, now_s)
        blamed = blamed - {peer} if succeeds else blamed | {peer}
        assert not suspects.active(now_s) & suspects.on_trial(now_s)
        assert suspects.active(now_s) | suspects.on_trial(now_s) <= blamed
        assert all(FIRST_SUSPICION_S <= one.length_s <= LONGEST_SUSPICION_S for one in suspects.suspicions.values())


def test_suspicion_is_bounded_cleared_by_success_and_forgotten() -> None:
    suspects, now_s = SuspectList(), 0.0
    for _ in range(20):
        suspects = suspects.suspect("a", now_s)
        now_s = suspects.suspicions["a"].until_s
    assert suspects.suspicions["a"].length_s == 600.0
    cleared = suspects.clear("a")
    assert not cleared.active(now_s - 1.0)
    assert not cleared.on_trial(now_s)
    assert cleared.suspect("a", now_s + LONGEST_SUSPICION_S - 1.0).suspicions["a"].length_s == LONGEST_SUSPICION_S
    assert cleared.suspect("a", now_s + LONGEST_SUSPICION_S).suspicions["a"].length_s == FIRST_SUSPICION_S
    later_s = now_s + 2 * LONGEST_SUSPICION_S
    assert set(suspects.suspect("b", later_s).suspicions) == {"b"}
    assert suspects.clear("unknown") is suspects
