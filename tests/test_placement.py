"""Placement: newcomers spread over the stages, and nobody swings."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.placement import Claim, choose_stage, yields

claims_of = st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20).map(
    lambda pairs: [Claim(f"p{number:02}", stage, 0.0, settled) for number, (stage, settled) in enumerate(pairs)]
)


def test_the_stage_with_the_fewest_replicas() -> None:
    assert choose_stage([3, 1, 2], None, Random(0)) == 1
    assert choose_stage([3, 1, 2], 0, Random(0)) == 0
    assert {choose_stage([1, 0, 0], None, Random(f"peer {n}")) for n in range(20)} == {1, 2}


@pytest.mark.parametrize("want", [-1, 3])
def test_a_stage_that_is_not_there(want: int) -> None:
    with pytest.raises(ValueError, match="stages 0 to 2"):
        choose_stage([3, 1, 2], want, Random(0))


def test_of_two_that_chose_alike_the_larger_peer_id_yields() -> None:
    claims = [Claim("a", 0, 10.0, False), Claim("b", 0, 9.0, False)]
    assert (yields("a", claims, 2), yields("b", claims, 2)) == (None, 1)
    assert yields("b", [*claims, Claim("c", 1, 0.0, True)], 2) is None, "no other stage is better off for it"


def test_who_has_settled_stays_and_so_does_an_old_claim() -> None:
    assert yields("a", [Claim("a", 0, 10.0, False), Claim("b", 0, 9.0, True)], 2) == 1
    assert yields("a", [Claim("a", 0, 100.0, False), Claim("b", 0, 9.0, False)], 2) == 1
    assert yields("b", [Claim("a", 0, 100.0, False), Claim("b", 0, 9.0, False)], 2) is None
    assert yields("absent", [Claim("a", 0, 100.0, False)], 2) is None


@given(claims_of)
def test_everybody_following_the_plan_once_makes_it_final(claims: list[Claim]) -> None:
    moved = [claim._replace(stage=s) if (s := yields(claim.peer, claims, 4)) is not None else claim for claim in claims]
    assert all(now == before for now, before in zip(moved, claims, strict=True) if before.settled)
    assert all(yields(claim.peer, moved, 4) is None for claim in moved)
    counts = [sum(claim.stage == stage for claim in moved) for stage in range(4)]
    for claim in moved:
        if not claim.settled:
            assert counts[claim.stage] - min(counts) <= 1


@given(claims_of, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_records(claims: list[Claim], rng: Random) -> None:
    shuffled = rng.sample(claims, len(claims))
    assert [yields(c.peer, claims, 4) for c in claims] == [yields(c.peer, shuffled, 4) for c in claims]


def test_a_swarm_that_starts_at_once_spreads_evenly() -> None:
    for seed in range(20):
        stages = {f"p{n}": choose_stage([0] * 3, None, Random(f"{seed}|placement|p{n}")) for n in range(9)}
        claims = [Claim(peer, stage, float(n), False) for n, (peer, stage) in enumerate(stages.items())]
        final = [claim.stage if (s := yields(claim.peer, claims, 3)) is None else s for claim in claims]
        assert [final.count(stage) for stage in range(3)] == [3, 3, 3]
