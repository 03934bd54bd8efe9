"""What activations and gradients of a size may do: usual ones all they can, others a bounded amount or nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.activation_codec import (
    LEAST_KNOWN,
    REFUSE,
    SCALE,
    SizeBound,
    UnusualSizeError,
    bound_of_norm,
    decode,
    encode,
    scaled,
)
from pipeline.messages import ACTIVATION_CODECS, ActivationCode

CODES = tuple(dict.fromkeys(code for codec in ACTIVATION_CODECS.values() for code in codec))
PLAIN = ACTIVATION_CODECS["bfloat16"].down
quick = settings(max_examples=40, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def enough_is_known() -> Iterator[None]:
    module = "pipeline.activation_codec"
    with mock.patch(f"{module}.CERTAIN", 0), mock.patch(f"{module}.LEAST_VALUES", 256):
        yield


def numbers(seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed)) * size


def taught(code: ActivationCode, peers: int = 3) -> SizeBound:
    bound = SizeBound(code)
    for number in range(3 * peers):
        bound.bounded(f"p{number % peers}", encode(code, numbers(number)))
    return bound


@pytest.mark.parametrize("code", CODES)
@quick
@given(seed=st.integers(0, 2**31), sizes=st.lists(st.floats(0.1, 2.5), min_size=1, max_size=20))
def test_a_usual_message_is_never_altered(code: ActivationCode, seed: int, sizes: list[float]) -> None:
    bound = taught(code)
    for number, size in enumerate(sizes):
        wire = encode(code, numbers(seed + number, size / 2.5 + 0.5))
        assert bound.bounded(f"p{number % 3}", wire) is wire
    assert bound.statistics() == {"scaled": 0, "refused": 0}


@pytest.mark.parametrize("code", CODES)
@quick
@given(seed=st.integers(0, 2**31), size=st.floats(1e-6, 1e9), times=st.integers(1, 30))
def test_a_message_counts_for_a_bounded_amount(code: ActivationCode, seed: int, size: float, times: int) -> None:
    """However often one peer of four sends it, what is decoded is not larger than SCALE times what others send."""
    bound, usual = taught(code), float(numbers(0).norm())
    wire = encode(code, numbers(seed, size))
    for _ in range(times):
        try:
            counts = bound.bounded("liar", wire)
        except ValueError:
            continue
        # In a code with scales the size is that of what the scales allow, twice the values' own.
        assert float(decode(code, counts, seed).norm()) <= SCALE * usual * (1.2 if code.plain else 3.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("known", [0, 9])
def test_what_is_not_finite_never_passes(value: float, known: int) -> None:
    bound = taught(PLAIN) if known else SizeBound(PLAIN)
    for shape in ((2, 8, 64), (1, 1, 1)):
        with pytest.raises(ValueError, match="size"):
            bound.bounded("liar", torch.full(shape, value).bfloat16() * 2)
    assert bound.statistics()["refused"] == 2


@pytest.mark.parametrize("code", CODES)
def test_between_the_bounds_it_is_scaled_and_beyond_it_is_refused(code: ActivationCode) -> None:
    bound = taught(code)
    louder = encode(code, numbers(5, 0.7 * REFUSE))
    counts = bound.bounded("p0", louder)
    assert bound_of_norm(code, counts) == pytest.approx(bound_of_norm(code, encode(code, numbers(5))) * SCALE, rel=0.1)
    with pytest.raises(ValueError, match="usual"):
        bound.bounded("p0", encode(code, numbers(5, 2 * REFUSE)))
    assert bound.statistics() == {"scaled": 1, "refused": 1}


@pytest.mark.parametrize("code", CODES)
def test_the_bound_of_a_norm_holds_and_a_scaled_message_is_that_many_times_it(code: ActivationCode) -> None:
    wire = encode(code, numbers(1), 7)
    values = decode(code, wire, 7)
    assert float(values.norm()) <= bound_of_norm(code, wire) * 1.001
    halved = scaled(code, wire, 0.5)
    assert (halved.shape, halved.dtype) == (wire.shape, wire.dtype)
    assert torch.allclose(decode(code, halved, 7), values / 2, rtol=0.01, atol=1e-4)


def test_small_messages_of_one_have_nobody_elses_refused() -> None:
    bound = SizeBound(PLAIN)
    for number in range(40):
        bound.bounded("liar", encode(PLAIN, numbers(number, 1e-9)))
        wire = encode(PLAIN, numbers(number))
        if number >= LEAST_KNOWN:
            assert bound.bounded("honest", wire) is wire
            continue
        try:
            bound.bounded("honest", wire)
        except ValueError:
            pytest.fail("an honest message was refused")


def test_little_knowledge_bounds_less() -> None:
    with mock.patch("pipeline.activation_codec.CERTAIN", 32):
        bound = taught(PLAIN)
        wire = encode(PLAIN, numbers(0, SCALE * 3))
        assert bound.bounded("p0", wire) is wire
        for number in range(200):
            bound.bounded(f"p{number % 3}", encode(PLAIN, numbers(number)))
        assert bound.bounded("p0", wire) is not wire


def test_sizes_that_grow_are_followed() -> None:
    bound = taught(PLAIN)
    refused = 0
    for number in range(60):
        try:
            bound.bounded(f"p{number % 3}", encode(PLAIN, numbers(number, 10 * REFUSE)))
        except ValueError:
            refused += 1
    assert 0 < refused < 40
    wire = encode(PLAIN, numbers(0, 10 * REFUSE))
    assert bound.bounded("p0", wire) is wire


@pytest.mark.parametrize("code", CODES)
def test_the_least_size_counts_values_whatever_they_take_on_the_wire(code: ActivationCode) -> None:
    with mock.patch("pipeline.activation_codec.LEAST_VALUES", 1024):
        bound = taught(code)  # of 1,024 values each, in 3 bits no 500 bytes
        with pytest.raises(ValueError, match="of the size"):
            bound.bounded("liar", encode(code, numbers(1, 1e6)))
        few = encode(code, numbers(1, 1e6)[:, :7])
        assert bound.bounded("liar", few) is few


def test_the_first_messages_are_bounded_by_nothing_usual_and_the_next_are() -> None:
    loud = encode(PLAIN, numbers(9, 2.0 * REFUSE))
    for known in range(LEAST_KNOWN + 1):
        bound = SizeBound(PLAIN)
        for number in range(known):
            bound.bounded(f"p{number}", encode(PLAIN, numbers(number)))
        if known < LEAST_KNOWN:
            assert bound.bounded("loud", loud) is loud
        else:
            with pytest.raises(UnusualSizeError):
                bound.bounded("loud", loud)
