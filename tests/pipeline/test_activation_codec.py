"""The codecs of activations: what of a value survives, what is free of bias, and what a stranger may not send."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor

from pipeline.activation_codec import LARGEST, bound_of_norm, check, decode, encode, seed_of
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
    assert code.width(code.row(shape[-1])) == shape[-1]
    restored = decode(code, wire)
    assert restored.shape == shape
    assert restored.dtype == torch.float32


def test_five_bits_down_and_three_back_are_a_seventh_of_float32() -> None:
    down, back = (code.size_bytes(1, 2048) for code in ACTIVATION_CODECS["int5-int3"])
    assert (4 + 4) * 2048 / (down + back) > 7.5


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
        ActivationCode(5).width(45)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_a_row_without_a_value_is_no_row(bits: int) -> None:
    code = ActivationCode(bits)
    with pytest.raises(ValueError, match="no token"):
        code.width(code.row(0))


def test_the_bound_of_a_norm_is_the_norm_where_all_channels_are_equally_loud() -> None:
    """One value a block: the rotation makes all channels of the block as loud."""
    values = torch.zeros(3, 2 * BLOCK)
    values[:, ::BLOCK] = 1.0
    for code in (ActivationCode(8), ActivationCode(8, dithered=True)):
        norm = float(values.norm())
        assert norm <= bound_of_norm(code, encode(code, values)) <= 1.02 * norm
