"""The mean of a stage's replicas, tensor by tensor. (Who belongs in it: tests/export.)"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.state_sync.replica_mean import drop_strangers, mean_of, products_of


@given(count=st.integers(1, 5), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_mean_is_exact_and_rounded_once(count: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    replicas = [torch.randn(3, 4, generator=generator, dtype=dtype) for _ in range(count)]
    before = [tensor.clone() for tensor in replicas]
    mean = mean_of(replicas)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean.double(), torch.stack(before).double().mean(0), rtol=1e-7, atol=1e-12)
    assert all(torch.equal(tensor, old) for tensor, old in zip(replicas, before, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_the_mean_of_equal_replicas_is_theirs(count: int) -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean_of([tensor] * count), tensor)


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
