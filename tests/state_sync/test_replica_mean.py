"""Which replicas of a stage belong in its mean, and the mean."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.state_sync.replica_mean import (
    FACTOR,
    ReplicaSummary,
    drop_outliers,
    drop_strangers,
    mean_of,
    products_of,
)


@given(count=st.integers(1, 5), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_mean_is_exact_and_rounded_once(count: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    replicas = [torch.randn(3, 4, generator=generator, dtype=dtype) for _ in range(count)]
    before = [tensor.clone() for tensor in replicas]
    mean = mean_of(replicas)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), torch.stack(before).double().mean(0), rtol=1e-7, atol=1e-12)
    assert all(torch.equal(tensor, old) for tensor, old in zip(replicas, before, strict=True))


@pytest.mark.parametrize("lie", ["flipped", "noise"])
@pytest.mark.parametrize("honest", [2, 3, 5])
def test_a_stranger_to_the_others_is_not_in_the_mean(lie: str, honest: int) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(2000, generator=generator)
    replicas = [start + 0.5 * torch.randn(2000, generator=generator) for _ in range(honest)]
    replicas.append(-replicas[0] if lie == "flipped" else torch.randn(2000, generator=generator))
    products = products_of([[each[:900] for each in replicas], [each[900:] for each in replicas]])
    kept, strangers = drop_strangers(products, range(honest + 1))
    assert (kept, list(strangers)) == (list(range(honest)), [honest])
    assert strangers[honest] < 0.1


def test_of_two_nobody_is_a_stranger_and_without_a_half_that_agrees_neither() -> None:
    products = products_of([[torch.ones(9), -torch.ones(9)]])
    assert drop_strangers(products, [0, 1]) == ([0, 1], {})
    products = products_of([list(torch.eye(4))])
    assert drop_strangers(products, range(4)) == (list(range(4)), {})


def standing(norm: float, round: int = 100, peer: str = "a") -> ReplicaSummary:
    return ReplicaSummary(peer=peer, round=round, inner_steps=10 * round, progress=0.5, norm=norm)


@given(
    honest=st.lists(st.tuples(st.floats(0.8, 1.2), st.integers(90, 100)), min_size=2, max_size=9),
    lies=st.lists(
        st.one_of(
            st.floats(1e-9, 0.8 / FACTOR * 0.99),
            st.floats(1.2 * FACTOR * 1.01, 1e9),
            st.sampled_from([math.nan, math.inf]),
        ),
        max_size=4,
    ),
    stale=st.lists(st.integers(0, 70), max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_outliers_and_stragglers_stay_out_as_long_as_they_are_the_fewer(
    honest: list[tuple[float, int]], lies: list[float], stale: list[int], order: Any
) -> None:
    bad = len(lies) + len(stale)
    if bad >= len(honest):
        lies, stale = lies[:1], []
    good = [standing(norm, round, f"good {n}") for n, (norm, round) in enumerate(honest)]
    mixed = [*good, *(standing(lie, 10**9, f"lie {n}") for n, lie in enumerate(lies))]
    mixed += [standing(1.0, round, f"stale {n}") for n, round in enumerate(stale)]
    order.shuffle(mixed)
    kept, left_out = drop_outliers(mixed, rounds_behind=16)
    assert sorted(mixed[place].peer for place in kept) == sorted(each.peer for each in good)
    assert sorted([each.peer for each in left_out] + [mixed[place].peer for place in kept]) == sorted(
        each.peer for each in mixed
    )


@given(
    honest=st.lists(st.integers(90, 100), min_size=1, max_size=6), claims=st.lists(st.integers(0, 2**40), max_size=6)
)
def test_no_half_claims_a_round_by_which_others_leave(honest: list[int], claims: list[int]) -> None:
    claims = claims[: len(honest)]
    mixed = [standing(1.0, round, "good") for round in honest] + [standing(1.0, 100 + lie, "lie") for lie in claims]
    kept, _ = drop_outliers(mixed, rounds_behind=16)
    assert [mixed[place].peer for place in kept].count("good") == len(honest)


@given(norms=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=6), rounds=st.integers(0, 10**6))
def test_somebody_is_kept_wherever_anybody_is_finite(norms: list[float], rounds: int) -> None:
    kept, left_out = drop_outliers([standing(abs(norm), rounds) for norm in norms], 16)
    assert bool(kept) == any(map(math.isfinite, norms))
    assert len(kept) + len(left_out) == len(norms)
