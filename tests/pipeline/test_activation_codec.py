"""Activation codecs: what of a value survives, what is free of bias, what is refused; and how much of a size counts."""

import hashlib
import math
from collections.abc import Iterator
from math import sqrt
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.activation_codec import (
    LARGEST,
    LEAST_KNOWN,
    REFUSE,
    SCALE,
    SizeBound,
    UnusualSizeError,
    bounds_of_norms,
    check,
    decode,
    encode,
    scaled,
    seed_of,
    width_of,
)
from pipeline.messages import ACTIVATION_CODECS, BLOCK, TOP_BYTES, ActivationCode, check_width

CODES = tuple(dict.fromkeys(code for codec in ACTIVATION_CODECS.values() for code in codec))
CODED = tuple(code for code in CODES if not code.plain)
DITHERED = tuple(code for code in CODED if code.dithered)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps(code: ActivationCode, values: Tensor) -> Tensor:
    """Return for each value the longest step that its block can be rounded in: eighths of an octave lie between scales,
    and a rotation lengthens the largest magnitude to the block's whole length at most."""
    length = values.unflatten(-1, (-1, BLOCK)).norm(dim=-1, keepdim=True)
    levels = 2**code.bits - 1 if code.dithered else 2**code.bits
    top = length.amax(-2, keepdim=True)
    scale = torch.maximum(length * 2 ** (1 / 8) * 1.01, top * 2.0 ** (-255 / 8))
    return (2 * scale / levels).expand(*length.shape[:-1], BLOCK).flatten(-2)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 3, 96), (1, 7, 2048)])
def test_sizes_are_known_before_anything_is_coded(code: ActivationCode, shape: tuple[int, ...]) -> None:
    wire = encode(code, numbers(*shape))
    assert wire.shape == (*shape[:-1], code.row(shape[-1]))
    assert str(wire.dtype) == f"torch.{code.dtype}"
    assert wire.nbytes == code.size_bytes(shape[0] * shape[1], shape[-1])
    assert width_of(code, code.row(shape[-1])) == shape[-1]
    restored = decode(code, wire)
    assert restored.shape == shape
    assert restored.dtype == torch.float32


@pytest.mark.parametrize("code", CODED)
@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1.0, 1e15])
def test_an_error_is_at_most_half_a_step(code: ActivationCode, scale: float) -> None:
    """Dithered it is half a step too, for the receiver takes the same away; a rotation spreads it over a block."""
    values = numbers(4, 8, 96) * scale
    values[0, 0] = 0.0
    values[1, :, 5] *= 1000.0
    values[2, 3, :32] *= 1e-6
    error = (decode(code, encode(code, values, 3), 3) - values).unflatten(-1, (-1, BLOCK)).norm(dim=-1) / sqrt(BLOCK)
    allowed = steps(code, values).unflatten(-1, (-1, BLOCK))[..., 0]
    assert bool((error <= 0.5 * allowed + 1e-37).all())
    assert bool((decode(code, encode(code, values[:1, :1], 3), 3) == 0.0).all()), "nothing comes of nothing"


@pytest.mark.parametrize("code", CODED)
def test_silence_beside_a_loud_block_is_kept_32_octaves_below_it(code: ActivationCode) -> None:
    """Half a step of the least scale, 255 eighths of an octave below the top; a rotated single value is spread over its
    block, and a top is rounded up by a 64th at most."""
    values = torch.zeros(1, 1, 2 * BLOCK)
    values[..., 0] = 1.0
    error = float(decode(code, encode(code, values, 3), 3)[..., BLOCK:].norm()) / sqrt(BLOCK)
    levels = 2**code.bits - 1 if code.dithered else 2**code.bits
    assert error <= (1 + 1 / 64) / sqrt(BLOCK) * 2.0 ** (-255 / 8) / levels


@pytest.mark.parametrize("code", CODED)
def test_an_error_is_that_of_equal_steps(code: ActivationCode) -> None:
    """Half a step's twelfth in the mean square: a Gaussian block of 32 reaches 2.36 standard deviations, and a scale is
    rounded up by the half of an eighth of an octave in the mean."""
    values = numbers(1, 64, 2048)
    error = float((decode(code, encode(code, values, 1), 1) - values).std())
    levels = 2**code.bits - 1 if code.dithered else 2**code.bits
    assert error == pytest.approx(2 * 2.38 * 2 ** (1 / 16) / levels / sqrt(12), rel=0.03)


@pytest.mark.parametrize("code", DITHERED)
def test_what_is_dithered_has_no_bias(code: ActivationCode) -> None:
    """The mean over n seeds misses a value by step / sqrt(12 n) in the mean square, if nothing is biased; and by a
    fixed error, of some tenths of a step, if rounding were to the nearest."""
    draws, values = 256, numbers(1, 4, 256)
    mean = sum(decode(code, encode(code, values, seed), seed) for seed in range(draws)) / draws
    one = float((decode(code, encode(code, values, 0), 0) - values).square().mean().sqrt())
    off = float((mean - values).square().mean().sqrt())
    # A thousand values: the root mean square of a thousand means is within a tenth of what it should be.
    assert off == pytest.approx(one / sqrt(draws), rel=0.1)
    # And there is none in any direction: the errors of all draws and values add up to nothing.
    assert abs(float((mean - values).mean())) < 4 * one / sqrt(draws * values.numel())
    assert abs(float(((mean - values) * values).mean())) < 4 * one / sqrt(draws * values.numel())


def test_the_dither_is_independent_of_place_and_seed() -> None:
    """Errors of equal values show the dither itself: neighbours, tokens and seeds have nothing in common."""
    code = ActivationCode(3, dithered=True)
    values = torch.zeros(1, 64, 1024)
    values[..., ::BLOCK] = 1.0
    seeds = (1, 2, 2**31 + 1, 2**40 + 1)
    errors = [decode(code, encode(code, values, seed), seed) - values for seed in seeds]
    first = errors[0].flatten()
    noise = float(first.square().mean())
    limit = 5 * noise / sqrt(first.numel())
    for shift in (1, 2, BLOCK, 1024, 2048, 2**15):
        assert abs(float((first * first.roll(shift)).mean())) < limit
    for other in errors[1:]:
        assert abs(float((first * other.flatten()).mean())) < limit


@pytest.mark.parametrize("code", CODES)
def test_the_same_message_is_coded_to_the_same_bytes(code: ActivationCode) -> None:
    values = numbers(2, 40, 2048)
    wire = encode(code, values, 7)
    assert torch.equal(wire, encode(code, values.clone(), 7))
    # However many tokens are worked on at a time.
    alone = encode(code, values[:1], 7)
    assert torch.equal(wire[:1], alone)
    assert torch.equal(encode(code, values, 8), wire) != code.dithered


def test_a_seed_is_that_of_the_bytes() -> None:
    wire = encode(ACTIVATION_CODECS["int5-int3"].down, numbers(2, 3, 64))
    assert seed_of(wire) == seed_of(wire.clone())
    assert 0 <= seed_of(wire) < 2**64
    other = wire.clone()
    other[1, 2, -1] ^= 1
    assert seed_of(other) != seed_of(wire)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", CODED)
def test_any_floating_point_dtype_is_taken_and_left_as_it_was(code: ActivationCode, dtype: torch.dtype) -> None:
    values = numbers(1, 5, 64).to(dtype)
    before = values.clone()
    assert torch.equal(encode(code, values), encode(code, values.float()))
    assert torch.equal(values, before)
    turned = numbers(5, 1, 64).to(dtype).transpose(0, 1)
    assert torch.equal(encode(code, turned), encode(code, turned.contiguous()))


@pytest.mark.parametrize("top", [float("nan"), float("inf"), -1.0, 2 * LARGEST])
def test_a_top_that_is_no_bound_is_refused(top: float) -> None:
    code = ActivationCode(5)
    wire = encode(code, numbers(2, 3, 64))
    check(code, wire)
    wire[1, 2, :TOP_BYTES] = torch.tensor([top]).bfloat16().view(torch.uint8)
    with pytest.raises(ValueError, match="top of a token"):
        check(code, wire)


@pytest.mark.parametrize("code", CODED)
def test_whatever_passes_the_check_decodes_to_numbers_that_may_be_squared(code: ActivationCode) -> None:
    source = torch.Generator().manual_seed(0)
    refused = 0
    for seed in range(200):
        wire = torch.randint(256, (1, 2, code.row(96)), dtype=torch.uint8, generator=source)
        try:
            check(code, wire)
        except ValueError:
            refused += 1
            continue
        assert bool(decode(code, wire, seed).square().sum().isfinite())
    assert 0 < refused < 200


@pytest.mark.parametrize("code", CODED)
def test_what_a_stage_cannot_compute_is_refused_at_the_next(code: ActivationCode) -> None:
    for wrong in (float("nan"), float("inf"), -float("inf"), 1e30):
        values = numbers(1, 2, 64)
        values[0, 1, 40] = wrong
        with pytest.raises(ValueError, match="top of a token"):
            check(code, encode(code, values))


def test_a_width_that_makes_no_blocks_is_refused() -> None:
    check_width("bfloat16", 33)
    check_width("int8", 64)
    with pytest.raises(ValueError, match="multiples of 32, and the model's is 33"):
        check_width("int5-int3", 33)
    with pytest.raises(ValueError, match="no token takes 45 bytes in 5 bits"):
        width_of(ActivationCode(5), 45)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_a_row_without_a_value_is_no_row(bits: int) -> None:
    code = ActivationCode(bits)
    with pytest.raises(ValueError, match="no token"):
        width_of(code, code.row(0))


def norm_bound(code: ActivationCode, wire: Tensor) -> float:
    return float(bounds_of_norms(code, wire).norm())


def test_the_bound_of_a_norm_is_the_norm_where_all_channels_are_equally_loud() -> None:
    """One value a block: the rotation makes all channels of the block as loud."""
    values = torch.zeros(3, 2 * BLOCK)
    values[:, ::BLOCK] = 1.0
    for code in (ActivationCode(8), ActivationCode(8, dithered=True)):
        norm = float(values.norm())
        assert norm <= norm_bound(code, encode(code, values)) <= 1.02 * norm


# How much of a message counts.

PLAIN = ACTIVATION_CODECS["bfloat16"].down
quick = settings(max_examples=40)


@pytest.fixture(autouse=True, scope="module")
def enough_is_known() -> Iterator[None]:
    with mock.patch.multiple("pipeline.activation_codec", CERTAIN=0, LEAST_VALUES=256):
        yield


def sized(seed: int, size: float = 1.0) -> Tensor:
    return numbers(2, 8, 64, seed=seed) * size


def taught(code: ActivationCode, peers: int = 3) -> SizeBound:
    bound = SizeBound(code)
    for number in range(3 * peers):
        bound.bounded(f"p{number % peers}", encode(code, sized(number)))
    return bound


@pytest.mark.parametrize("code", CODES)
@quick
@given(seed=st.integers(0, 2**31), sizes=st.lists(st.floats(0.1, 2.5), min_size=1, max_size=20))
def test_a_usual_message_is_never_altered(code: ActivationCode, seed: int, sizes: list[float]) -> None:
    bound = taught(code)
    for number, size in enumerate(sizes):
        wire = encode(code, sized(seed + number, size / 2.5 + 0.5))
        assert bound.bounded(f"p{number % 3}", wire) is wire
    assert bound.statistics() == {"scaled": 0, "refused": 0}


@pytest.mark.parametrize("code", CODES)
@quick
@given(st.integers(0, 2**31), st.floats(-6.0, 9.0), st.sampled_from((1, 2, 8, 16)), st.integers(1, 30))
def test_a_message_counts_for_a_bounded_amount(
    code: ActivationCode, seed: int, power: float, tokens: int, times: int
) -> None:
    """However often one peer of four sends it, what is decoded is not larger than SCALE times what others send.

    All but so many of its `tokens` are zero.
    """
    bound, usual, values = taught(code), float(sized(0).norm()), sized(seed, 10.0**power)
    values.view(16, 64)[tokens:] = 0.0
    wire = encode(code, values)
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
    louder = encode(code, sized(5, 0.7 * REFUSE))
    counts = bound.bounded("p0", louder)
    assert norm_bound(code, counts) == pytest.approx(norm_bound(code, encode(code, sized(5))) * SCALE, rel=0.1)
    with pytest.raises(ValueError, match="usual"):
        bound.bounded("p0", encode(code, sized(5, 2 * REFUSE)))
    assert bound.statistics() == {"scaled": 1, "refused": 1}


@pytest.mark.parametrize("code", CODES)
@quick
@given(seed=st.integers(0, 2**31), places=st.sets(st.integers(0, 15), min_size=1), times=st.floats(20.0, 1e3))
def test_a_few_loud_tokens_count_like_others_and_many_are_refused(
    code: ActivationCode, seed: int, places: set[int], times: float
) -> None:
    """Of sixteen tokens two may be of any size: a token that no replica has learnt yet honestly is."""
    bound, loud = taught(code), sized(seed)
    loud.view(16, 64)[sorted(places)] *= times * REFUSE
    wire = encode(code, loud)
    if len(places) > 2:
        with pytest.raises(UnusualSizeError):
            bound.bounded("p0", wire)
        return
    counts = bound.bounded("p0", wire).view(16, -1)
    changed = (counts != wire.view(16, -1)).any(dim=1)
    assert int(changed.sum()) <= 2
    assert changed[sorted(places)].all()
    norms = bounds_of_norms(code, counts)
    assert float(norms[changed].max()) <= 1.01 * float(norms[~changed].max())


@pytest.mark.parametrize("code", CODES)
def test_loud_tokens_become_as_large_as_those_that_are_learnt(code: ActivationCode) -> None:
    """Of 64 tokens a quarter is learnt, and the gradients of the others are zero."""
    bound, some = taught(code), torch.zeros(64, 64)
    some[:16] = numbers(16, 64, seed=7)
    some[:2] *= 100.0 * REFUSE
    counts = bound.bounded("p0", encode(code, some.view(2, 32, 64)), 0.25)
    norms = bounds_of_norms(code, counts)
    learnt = float(norms[2:16].square().mean().sqrt())
    assert norms[:2].tolist() == pytest.approx([learnt, learnt], rel=0.15)


@pytest.mark.parametrize("code", CODES)
def test_the_bound_of_a_norm_holds_and_a_scaled_message_is_that_many_times_it(code: ActivationCode) -> None:
    wire = encode(code, sized(1), 7)
    values = decode(code, wire, 7)
    assert bool((values.flatten(0, -2).norm(dim=1) <= bounds_of_norms(code, wire) * 1.001).all())
    halved = scaled(code, wire, 0.5)
    assert (halved.shape, halved.dtype) == (wire.shape, wire.dtype)
    assert torch.allclose(decode(code, halved, 7), values / 2, rtol=0.01, atol=1e-4)


def test_small_messages_of_one_have_nobody_elses_refused() -> None:
    bound = SizeBound(PLAIN)
    for number in range(40):
        bound.bounded("liar", encode(PLAIN, sized(number, 1e-9)))
        wire = encode(PLAIN, sized(number))
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
        wire = encode(PLAIN, sized(0, SCALE * 3))
        assert bound.bounded("p0", wire) is wire
        for number in range(200):
            bound.bounded(f"p{number % 3}", encode(PLAIN, sized(number)))
        assert bound.bounded("p0", wire) is not wire


def test_sizes_that_grow_are_followed() -> None:
    bound = taught(PLAIN)
    refused = 0
    for number in range(60):
        try:
            bound.bounded(f"p{number % 3}", encode(PLAIN, sized(number, 10 * REFUSE)))
        except ValueError:
            refused += 1
    assert 0 < refused < 40
    wire = encode(PLAIN, sized(0, 10 * REFUSE))
    assert bound.bounded("p0", wire) is wire


@pytest.mark.parametrize("code", CODES)
def test_the_least_size_counts_values_whatever_they_take_on_the_wire(code: ActivationCode) -> None:
    with mock.patch("pipeline.activation_codec.LEAST_VALUES", 1024):
        bound = taught(code)  # of 1,024 values each, in 3 bits no 500 bytes
        with pytest.raises(ValueError, match="of the size"):
            bound.bounded("liar", encode(code, sized(1, 1e6)))
        few = encode(code, sized(1, 1e6)[:, :7])
        assert bound.bounded("liar", few) is few


def test_the_first_messages_are_bounded_by_nothing_usual_and_the_next_are() -> None:
    loud = encode(PLAIN, sized(9, 2.0 * REFUSE))
    for known in range(LEAST_KNOWN + 1):
        bound = SizeBound(PLAIN)
        for number in range(known):
            bound.bounded(f"p{number}", encode(PLAIN, sized(number)))
        if known < LEAST_KNOWN:
            assert bound.bounded("loud", loud) is loud
        else:
            with pytest.raises(UnusualSizeError):
                bound.bounded("loud", loud)


def test_a_codec_has_the_bits_that_its_name_says() -> None:
    for name, codec in ACTIVATION_CODECS.items():
        if name.startswith("int"):
            down, _, back = name.partition("-")
            assert [code.bits for code in codec] == [int(bits.removeprefix("int")) for bits in (down, back or down)]


def test_the_dither_is_the_one_that_peers_of_this_version_remove() -> None:
    code = ActivationCode(3, dithered=True)
    values = torch.zeros(1, 16, 8 * BLOCK)
    values[..., ::BLOCK] = 1.0
    decoded = [decode(code, encode(code, values, seed), seed).numpy().tobytes() for seed in (7, 2**63 + 5)]
    assert (
        hashlib.sha256(b"".join(decoded)).hexdigest()
        == "6f6002c3c916486851ee8e660042112f9c41630908a8810ff9d0963e344e7f21"
    )
