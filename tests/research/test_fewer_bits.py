"""What rounding does to the disagreement of replicas that meet in pairs."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from research.codec.fewer_bits import PROBED, Code, growth, meet, meet_by_copies, settled


@settings(max_examples=15)
@given(st.floats(0.3, 5.0), st.integers(0, 2**20))
def test_a_meeting_changes_the_variance_as_the_law_says(ratio: float, seed: int) -> None:
    source, order = torch.Generator().manual_seed(seed), Random(seed)
    rows = torch.randn(64, PROBED, generator=source) + 100.0 * torch.rand(PROBED, generator=source)
    code = Code(16, "rms", ratio * 2**15)  # so many levels that nothing wraps
    before = float(rows.var(0).mean())
    pairs = order.sample(range(64), 64)
    assert {meet(rows[one], rows[other], code) for one, other in zip(pairs[::2], pairs[1::2], strict=True)} == {0.0}
    assert float(rows.var(0).mean()) / before == pytest.approx(growth(ratio), rel=0.06)


@settings(max_examples=15)
@given(st.integers(2, 8), st.sampled_from(["largest", "rms"]), st.floats(0.5, 4.0), st.integers(0, 2**20))
def test_what_a_pair_has_together_stays_unless_it_wraps(bits: int, by: str, factor: float, seed: int) -> None:
    one, other = torch.randn(2, 2 * PROBED, generator=torch.Generator().manual_seed(seed))
    total = one + other
    wrapped = meet(one, other, Code(bits, by, factor))
    kept = ((one + other - total).abs() < 1e-4).float().mean()
    assert float(kept) >= 1.0 - 2.0 * wrapped - 1e-6


def test_the_law_has_its_edge_where_it_says() -> None:
    assert growth(2.4) < 1.0 < growth(2.6)
    assert growth(1.0) == pytest.approx(0.5 + 1.0 / 12.0, rel=0.01)


@settings(max_examples=10)
@given(st.integers(3, 8), st.integers(0, 2**20))
def test_public_copies_keep_what_a_pair_has_together(bits: int, seed: int) -> None:
    one, other, *told = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
    total, distance = one + other, (one - other).norm()
    for _ in range(40):
        meet_by_copies(one, other, (told[0], told[1]), bits)
    torch.testing.assert_close(one + other, total, atol=1e-4, rtol=0)
    assert (one - other).norm() < 0.05 * distance


def test_fewer_bits_leave_replicas_farther_apart_at_the_same_bytes() -> None:
    four, three, two = (settled(Code(bits, "largest", 1.5), "Gaussian", 0.0).apart for bits in (4, 3, 2))
    assert settled(None, "Gaussian", 0.0).apart < four < three < two
