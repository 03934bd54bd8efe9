"""How far apart replicas stay that average in groups."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from research.laboratory.methods.synchronous import groups
from research.theory.groups import apart, left, over_all


@settings(max_examples=10)
@given(st.sampled_from([(4, 2), (8, 2), (8, 4), (8, 8), (16, 2)]), st.integers(1, 6), st.integers(0, 2**20))
def test_replicas_that_drift_stay_as_far_apart_as_the_law_says(sizes: tuple[int, int], every: int, seed: int) -> None:
    (replicas, group), source, order = sizes, torch.Generator().manual_seed(seed), Random(seed)
    rows, seen = torch.zeros(replicas, 300), []
    for _ in range(40):
        for _ in range(every):
            before = float(rows.var(0, unbiased=False).mean())
            rows += torch.randn(rows.shape, generator=source)
            seen.append((before + float(rows.var(0, unbiased=False).mean())) / 2)
        for members in groups(order, replicas, group):
            rows[members] = rows[members].mean(0)
    late = seen[len(seen) // 4 :]
    assert sum(late) / len(late) == pytest.approx(apart(replicas, group, every), rel=0.1)


@given(st.integers(1, 6), st.integers(1, 6))
def test_larger_groups_are_nearer_and_all_together_agree(power: int, other: int) -> None:
    replicas, group = 2 ** max(power, other), 2 ** min(power, other)
    assert 0.0 <= left(replicas, group) < 1.0
    assert (left(replicas, group) == 0.0) == (replicas == group)
    assert 1.0 <= over_all(replicas, group) <= 1.5
    assert over_all(2 * replicas, group) >= over_all(replicas, group)
