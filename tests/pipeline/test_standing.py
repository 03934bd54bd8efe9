"""Suspicions: how long they last, how they grow, and what ends them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.routing import FIRST_SUSPICION_S, LONGEST_SUSPICION_S, Hop, Standing

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
