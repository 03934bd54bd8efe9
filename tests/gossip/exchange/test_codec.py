"""What travels in each form, what becomes of it, and that sender and receiver end with the same numbers."""

import contextlib
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from torch import Tensor

from gossip.exchange import codec
from gossip.exchange.codec import (
    DIFFERENCE,
    NORM_RATIO,
    PIECE,
    Coded,
    OwnWeights,
    check,
    norm,
    restore_both_int4,
    restore_int4,
    round_int4,
)
from gossip.exchange.messages import Implausible
from gossip.exchange.swap import FAR, FEW, FINEST, STEP_OF_NOTHING, common_steps, probe_coordinates
from gossip.rule.outer_step import Tensors
from gossip.settings import BLOCK, Format, wire_bytes, wire_specs
from noloco_node.network.schema import TensorSpec
from research.codec.whole_sets import decode, encode
from research.theory.pair_step import mean

SHAPES = ((3, 7), (), (0,), (2 * BLOCK + 5,), (BLOCK,), (2, 0, 3), (1,))
TINY, HUGE = torch.finfo(torch.float32).tiny, 3e38

several = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=5).map(tuple)
seeds = st.integers(0, 2**31)
formats = st.sampled_from(Format)
scales = st.sampled_from([1e-45, 1e-38, 1e-20, 1.0, 1e20, 1e37])
few = settings(max_examples=40)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(seed: int, scale: float = 1.0, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Tensors:
    source = generator(seed)
    return tuple(torch.randn(shape, generator=source).mul(scale) for shape in shapes)


def near(weights: Tensors, distance: float, seed: int) -> Tensors:
    """Weights that differ from these by less than `distance` everywhere."""
    source = generator(seed)
    return tuple(w + (torch.rand(w.shape, generator=source) * 2 - 1) * distance for w in weights)


def rounded(tensors: Tensors) -> Tensors:
    return tuple(tensor.to(DIFFERENCE) for tensor in tensors)


def steps_for(form: Format, weights: Tensors, step: float) -> tuple[float, ...]:
    return (step,) * len(weights) if form is Format.INT4 else ()


def bits(tensors: Tensors) -> list[Tensor]:
    """The memory of each tensor, so that minus zero differs from zero."""
    return [tensor.reshape(-1).view(torch.int32) for tensor in tensors]


def same_bits(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def probe(weights: Tensors, coordinates: Tensors) -> Tensor:
    """The weights at these flat indices."""
    return torch.cat([tensor.reshape(-1)[at] for tensor, at in zip(weights, coordinates, strict=True)])


def worst(a: Tensors, b: Tensors) -> float:
    """The largest distance, in double precision."""
    return max(
        (float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True) if x.numel()), default=0
    )


@given(form=formats, shapes=several, seed=seeds)
@few
def test_what_travels_is_known_from_the_shapes(form: Format, shapes: tuple[tuple[int, ...], ...], seed: int) -> None:
    weights = draw(seed, shapes=shapes)
    encoded = encode(form, weights, steps_for(form, weights, 0.01))
    specs = wire_specs(form, shapes)
    assert [(str(t.dtype), tuple(t.shape)) for t in encoded.wire] == [(f"torch.{s.dtype}", s.shape) for s in specs]
    assert sum(tensor.nbytes for tensor in encoded.wire) == wire_bytes(form, shapes)
    assert all(TensorSpec(spec.shape, spec.dtype).size_bytes == spec.size_bytes for spec in specs)
    assert [tensor.shape for tensor in encoded.decoded] == [tensor.shape for tensor in weights]


@given(form=formats, seed=seeds, shared=seeds)
@few
def test_both_sides_hold_the_same_numbers(form: Format, seed: int, shared: int) -> None:
    """To the bit, and so is the mean that either computes."""
    step = 0.01
    centre = draw(shared)
    a, b = near(centre, 3.7 * step, seed), near(centre, 3.7 * step, seed + 1)
    steps = steps_for(form, centre, step)
    sent_a, sent_b = encode(form, a, steps), encode(form, b, steps)
    at_b, at_a = decode(form, sent_a.wire, b, steps), decode(form, sent_b.wire, a, steps)
    assert same_bits(at_b, sent_a.decoded)
    assert same_bits(at_a, sent_b.decoded)
    assert same_bits(mean(sent_a.decoded, at_a), mean(sent_b.decoded, at_b))


@given(form=formats, seed=seeds)
@few
def test_nothing_is_written_into_the_arguments(form: Format, seed: int) -> None:
    weights, difference, own = draw(seed), rounded(draw(seed + 1, 0.001)), draw(seed + 2)
    before = [tensor.clone() for tensor in (*weights, *difference, *own)]
    steps = steps_for(form, weights, 0.01)
    came = codec.encode(form, OwnWeights(weights, difference), steps).coded.wire
    wire = [tensor.clone() for tensor in came]
    decode(form, came, own, steps)
    assert all(torch.equal(now, then) for now, then in zip((*weights, *difference, *own), before, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(came, wire, strict=True))


@given(form=formats, seed=seeds)
@few
def test_a_difference_is_added_before_anything_else(form: Format, seed: int) -> None:
    """Weights as a sum are encoded, probed and measured to the bit as the weights that they add up to."""
    base, difference = draw(seed), rounded(draw(seed + 1, 0.01))
    whole = tuple(torch.add(w, d) for w, d in zip(base, difference, strict=True))
    steps, both = steps_for(form, base, 0.01), OwnWeights(base, difference)
    assert all(map(torch.equal, codec.encode(form, both, steps).coded.wire, encode(form, whole, steps).wire))
    coordinates = probe_coordinates(seed, [tensor.numel() for tensor in base])
    assert torch.equal(both.probe(coordinates), probe(whole, coordinates))
    assert both.norm() == OwnWeights(whole).norm() == pytest.approx(norm(whole), rel=1e-5)


@given(seed=seeds, scale=scales)
@few
def test_bfloat16_is_exact_where_it_can_be_and_within_half_a_unit_elsewhere(seed: int, scale: float) -> None:
    """Some processors take what is too small for a normal number as zero."""
    weights = draw(seed, scale)
    decoded = decode(Format.BFLOAT16, encode(Format.BFLOAT16, weights).wire, weights)
    for value, got in zip(weights, decoded, strict=True):
        size, error = value.double().abs(), (got.double() - value.double()).abs()
        assert bool((error <= torch.where(size < TINY, TINY, size * 2**-8)).all())
    assert same_bits(encode(Format.BFLOAT16, decoded).decoded, decoded)


@given(seed=seeds, exponent=st.integers(-118, 118), size=st.integers(1, 3 * BLOCK))
@few
def test_int8_keeps_multiples_of_its_scale(seed: int, exponent: int, size: int) -> None:
    codes = torch.randint(-127, 128, (size,), generator=generator(seed))
    codes[::BLOCK] = 127
    weights = (torch.ldexp(codes.float(), torch.tensor(exponent)),)
    assert torch.equal(encode(Format.INT8, weights).decoded[0], weights[0])
    assert torch.equal(encode(Format.INT8, weights).wire[0], codes.to(torch.int8))


@given(seed=seeds, scale=scales)
@few
def test_int8_is_within_half_a_scale_of_its_own_block(seed: int, scale: float) -> None:
    """Blocks of one parameter differ by orders of magnitude; a block of zeros stays zero."""
    spread = torch.logspace(-6, 0, 5).repeat_interleave(BLOCK)[: 4 * BLOCK + 9]
    values = torch.randn(len(spread), generator=generator(seed)) * spread * scale
    values[BLOCK : 2 * BLOCK] = 0.0
    decoded = encode(Format.INT8, (values,)).decoded[0]
    for block, got in zip(values.double().split(BLOCK), decoded.double().split(BLOCK), strict=True):
        half = max(float(block.abs().max()) / 127, TINY) / 2
        assert float((got - block).abs().max()) <= half * (1 + 2**-16)
    assert not decoded[BLOCK : 2 * BLOCK].any()


@given(seed=seeds, exponent=st.integers(-100, 100), fraction=st.integers(128, 255))
@few
def test_int4_keeps_multiples_of_its_step_that_are_near(seed: int, exponent: int, fraction: int) -> None:
    """Of a step with 8 significant bits, which `common_steps` returns: up to 7 steps apart whatever the fractions."""
    step = math.ldexp(fraction, exponent)
    source = generator(seed)
    multiples = torch.randint(-30000, 30000, (2 * BLOCK + 1,), generator=source)
    away = torch.rand(multiples.shape, generator=source) * 14.9 - 7.45
    weights = ((multiples * step).float(),)
    own = ((multiples + away).mul(step).float(),)
    encoded = encode(Format.INT4, weights, (step,))
    assert torch.equal(encoded.decoded[0], weights[0])
    assert same_bits(decode(Format.INT4, encoded.wire, own, (step,)), weights)


@given(seed=seeds, step=st.floats(1e-3, 10.0).map(lambda value: float(torch.tensor(value))))
@few
def test_int4_is_within_half_a_step(seed: int, step: float) -> None:
    weights = draw(seed)
    own = near(weights, 7.4 * step, seed + 1)
    steps = (step,) * len(weights)
    encoded = encode(Format.INT4, weights, steps)
    assert worst(encoded.decoded, weights) <= 0.501 * step
    assert same_bits(decode(Format.INT4, encoded.wire, own, steps), encoded.decoded)


@given(seed=seeds, step=st.floats(1e-3, 1.0), apart=st.sampled_from([1.0, 1e3, 1e6]))
@few
def test_a_liar_moves_a_weight_by_eight_steps_at_most(seed: int, step: float, apart: float) -> None:
    """Whatever bytes it sends, and however far its honest weights would be."""
    own = draw(seed, apart)
    source = generator(seed + 1)
    (spec,) = wire_specs(Format.INT4, SHAPES)
    wire = (torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=source),)
    decoded = decode(Format.INT4, wire, own, (step,) * len(own))
    for value, got in zip(own, decoded, strict=True):
        rounding = value.double().abs() * 2**-21
        assert bool(((got.double() - value.double()).abs() <= 8 * step * (1 + 2**-20) + rounding).all())


@pytest.mark.parametrize("form", Format)
def test_pieces_join(form: Format) -> None:
    """A parameter of several pieces: the same as its blocks one by one, and odd at the end."""
    (values,) = draw(3, shapes=((2 * PIECE + BLOCK + 3,),))
    steps = steps_for(form, (values,), 0.25)
    encoded = encode(form, (values,), steps)
    blocks = values.split(BLOCK)
    apart = encode(form, blocks, steps_for(form, blocks, 0.25))
    assert same_bits((torch.cat(apart.decoded),), encoded.decoded)
    assert same_bits(decode(form, encoded.wire, (values + 0.3,), steps), encoded.decoded)


@pytest.mark.parametrize("form", Format)
def test_zeros_and_the_largest(form: Format) -> None:
    zeros = tuple(torch.zeros(shape) for shape in SHAPES)
    assert same_bits(encode(form, zeros, steps_for(form, zeros, 0.5)).decoded, zeros)
    large = tuple(torch.full(shape, HUGE) for shape in SHAPES)
    steps = steps_for(form, large, 2.0**120)
    assert worst(encode(form, large, steps).decoded, large) <= HUGE * 2**-8


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_encoded(form: Format, poison: float) -> None:
    weights = draw(1)
    weights[3][7] = poison
    with pytest.raises(ConnectionAbortedError, match="not finite: tensor 3"):
        encode(form, weights, steps_for(form, weights, 0.01))


@pytest.mark.parametrize("form", Format)
def test_arguments_that_do_not_fit_the_weights_are_an_error(form: Format) -> None:
    weights = draw(1)
    steps = steps_for(form, weights, 0.01)
    with pytest.raises(ValueError, match="float32"):
        encode(form, (*weights[:-1], weights[-1].double()), steps)
    for difference, why in (
        (tuple(torch.zeros(3, dtype=DIFFERENCE) for _ in weights), "other shapes"),
        (tuple(map(torch.zeros_like, weights)), "bfloat16"),
    ):
        with pytest.raises(ValueError, match=why):
            codec.encode(form, OwnWeights(weights, difference), steps)
    with pytest.raises(ValueError, match="steps for"):
        encode(form, weights, (*steps, 1.0))


@pytest.mark.parametrize("form", Format)
def test_what_came_is_of_our_shapes_or_implausible(form: Format) -> None:
    own = draw(1)
    steps = steps_for(form, own, 0.01)
    wire = encode(form, own, steps).wire
    for wrong in (
        wire[:-1],
        (*wire, torch.zeros(1)),
        (*wire[:-1], torch.zeros(9999, dtype=wire[-1].dtype)),
        (wire[0].to(torch.float64), *wire[1:]),
    ):
        with pytest.raises(Implausible, match=f"weights in {form}"):
            decode(form, wrong, own, steps)


def test_what_came_is_finite_or_implausible() -> None:
    own = draw(1)
    for form in (Format.FLOAT32, Format.BFLOAT16):
        for poison in (math.nan, math.inf):
            wire = tuple(tensor.clone() for tensor in encode(form, own).wire)
            wire[0][0, 0] = poison
            with pytest.raises(Implausible, match="tensor 0: not finite"):
                check(Coded(form, wire), OwnWeights(own), norm(own))
    codes, good = encode(Format.INT8, own).wire
    for poison in (math.nan, math.inf, -1.0):
        bad = good.clone()
        bad[1] = poison
        with pytest.raises(Implausible, match="a scale is negative or not finite"):
            check(Coded(Format.INT8, (codes, bad)), OwnWeights(own), norm(own))
    large = torch.full_like(codes, -128), torch.full_like(good, HUGE)
    with pytest.raises(Implausible, match="tensor 0: not finite"):
        check(Coded(Format.INT8, large), OwnWeights(own), norm(own))


@given(length=st.floats(0.01, 7.4), numerator=st.integers(128, 255))
@few
def test_int4_weights_of_nothing_are_implausible_however_near_ours_in_steps(length: float, numerator: int) -> None:
    """No short way round the norm for what may be less than a tenth of ours."""
    step = numerator / 1024
    nothing = Coded(Format.INT4, encode(Format.INT4, (torch.zeros(300),), (step,)).wire, (step,))
    own = (torch.full((300,), length * step),)
    with pytest.raises(Implausible, match="norm 0 where ours is"):
        check(nothing, OwnWeights(own), norm(own))


# The step of int4.


def probed(seed: int, distances: Tensors, size: float = 1.0) -> tuple[Tensor, Tensor, list[int]]:
    """Probes of two replicas that lie this far apart, and how many coordinates each parameter has in them."""
    source = generator(seed)
    own = tuple(torch.randn(d.shape, generator=source).mul(size) for d in distances)
    other = tuple(torch.add(w, d) for w, d in zip(own, distances, strict=True))
    coordinates = probe_coordinates(seed, [d.numel() for d in distances])
    return probe(own, coordinates), probe(other, coordinates), [len(at) for at in coordinates]


@given(seed=seeds, scale=st.sampled_from([0.0, 1e-30, 1e-6, 1e-2, 1.0]), size=scales)
@few
def test_both_sides_find_the_same_steps(seed: int, scale: float, size: float) -> None:
    a, b, counts = probed(seed, draw(seed, scale * size), size)
    steps = common_steps(a, b, counts)
    assert steps == common_steps(b, a, counts)
    assert all(step >= TINY and math.isfinite(step) for step in steps)
    assert all(step == float(torch.tensor(step)) for step in steps)
    assert [math.frexp(step)[0] * 256 % 1 for step in steps] == [0.0] * len(steps)


@given(seed=seeds, shrink=st.integers(0, 9))
@few
def test_steps_follow_the_distance(seed: int, shrink: int) -> None:
    """Halving the distances halves the steps, so the error relative to the distance stays as replicas draw together."""
    (distances,) = draw(seed, shapes=((20000,),))
    wide, narrow = (probed(seed, (distances * factor,)) for factor in (0.1, 0.1 * 2.0**-shrink))
    ratio = common_steps(*narrow)[0] / common_steps(*wide)[0]
    assert ratio == pytest.approx(2.0**-shrink, rel=0.02)


def test_parameters_with_enough_coordinates_have_steps_of_their_own() -> None:
    distances = (torch.full((4096,), 0.1), torch.full((4096,), 0.01), torch.zeros(4096), torch.full((FEW - 1,), 0.001))
    own = torch.ones(sum(map(len, distances)))
    far, own_step, unmoved, rare = common_steps(own, own + torch.cat(distances), [len(d) for d in distances])
    assert far == pytest.approx(1.5 * 0.1 / 8, rel=0.01)
    assert far / 10 < own_step < far / 8
    assert unmoved == rare == far


@pytest.mark.parametrize("seed", range(3))
def test_hardly_any_value_wraps(seed: int) -> None:
    """Below 1e-4 for Gaussian distances of parameters that differ among themselves, and in a Laplace tail."""
    source = generator(seed)
    shapes = tuple((size,) for size in (300000, 100000, 100000, 30000, 500, 500))
    spread = torch.randn(len(shapes), generator=source).mul(0.5).exp()
    for tail in ("Gaussian", "Laplace"):
        distances = []
        for shape, width in zip(shapes, spread, strict=True):
            gaussian = torch.randn(shape, generator=source)
            exponential = torch.empty(shape).exponential_(generator=source)
            distances.append((gaussian if tail == "Gaussian" else exponential * gaussian.sign()) * width * 0.01)
        steps = common_steps(*probed(seed, tuple(distances)))
        wrapped = sum(int((distance.abs() > 7.5 * step).sum()) for distance, step in zip(distances, steps, strict=True))
        assert wrapped < 1e-4 * sum(map(len, distances))


def test_both_sides_find_the_same_finest_step() -> None:
    """It follows the larger of the two: here they differ by less than it, and round to different numbers."""
    own = torch.ones(100)
    theirs = own.clone()
    theirs[7] += 2**-20
    assert common_steps(own, theirs, [100]) == common_steps(theirs, own, [100]) == (FINEST * (1 + 2**-7),)


@given(poison=st.sampled_from([math.nan, math.inf, -math.inf, 3e38, 2 * FAR * NORM_RATIO]), at=st.integers(0, 99))
@few
def test_a_probe_that_is_far_from_ours_is_implausible(poison: float, at: int) -> None:
    """Otherwise it could widen the steps, and with them what its codes may do."""
    own = torch.ones(100)
    theirs = own.clone()
    theirs[at] = poison
    with pytest.raises(Implausible, match="from ours"):
        common_steps(own, theirs, [50, 50])


@given(seed=st.integers(0, 2**31), moved=st.floats(0.01, 0.05), outlier=st.floats(0.1, 1.5))
@few
def test_fresh_weights_believe_a_trained_partners_probe(seed: int, moved: float, outlier: float) -> None:
    """Training makes outliers where the first weights have none: both sides find the same steps for them."""
    generator = torch.Generator().manual_seed(seed)
    fresh = 0.02 * torch.randn(4096, generator=generator)
    trained = fresh + moved * torch.randn(4096, generator=generator)
    trained[7] = outlier
    assert common_steps(fresh, trained, [4096]) == common_steps(trained, fresh, [4096])


def test_a_probe_of_another_form_is_implausible() -> None:
    own = torch.ones(100)
    for theirs in (torch.ones(99), torch.ones(100, dtype=torch.float64), torch.ones(10, 10)):
        with pytest.raises(Implausible, match="probe"):
            common_steps(own, theirs, [100])
    with pytest.raises(ValueError, match="100"):
        common_steps(own, own, [99])
    with pytest.raises(ValueError, match="our own probe is not finite"):
        common_steps(torch.full((100,), math.nan), own, [100])


@given(seed=seeds)
@few
def test_what_is_probed_is_what_is_encoded(seed: int) -> None:
    """The weights with their difference: with both inside the margin the partner decodes what we have."""
    own, b = OwnWeights(draw(seed), rounded(draw(seed + 1, 0.05))), near(draw(seed), 0.01, seed)
    whole = tuple(map(torch.add, *own))
    coordinates = probe_coordinates(seed, [tensor.numel() for tensor in b])
    probes = own.probe(coordinates), OwnWeights(b).probe(coordinates)
    steps = common_steps(*probes, [len(chosen) for chosen in coordinates])
    encoded = encode(Format.INT4, whole, steps)
    assert torch.equal(codec.encode(Format.INT4, own, steps).coded.wire[0], encoded.wire[0])
    assert same_bits(decode(Format.INT4, encoded.wire, b, steps), encoded.decoded)


def agreement(form: Format, rounds: int = 40) -> float:
    """Four replicas go half of the way to the mean of changing pairs; return how far apart they are in the end."""
    replicas = [near(draw(1, shapes=((3000,),)), 0.1, seed) for seed in range(4)]
    coordinates = probe_coordinates(1, [3000])
    for number in range(rounds):
        for pair in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))[number % 3]:
            probes = [probe(replicas[one], coordinates) for one in pair]
            steps = common_steps(*probes, [3000]) if form is Format.INT4 else ()
            encoded = [encode(form, replicas[one], steps) for one in pair]
            got = [
                decode(form, other.wire, replicas[one], steps) for one, other in zip(pair, encoded[::-1], strict=True)
            ]
            for side, one in enumerate(pair):
                assert same_bits(got[side], encoded[1 - side].decoded)
                replicas[one] = mean(replicas[one], mean(encoded[side].decoded, got[side]))
    return max(worst(replicas[0], other) for other in replicas[1:])


def test_only_a_code_that_follows_the_distance_lets_replicas_agree() -> None:
    """Absolute codes put a floor beneath the distance; that of int4 is its finest step, of weights up to 4."""
    assert agreement(Format.FLOAT32) < 1e-6
    assert agreement(Format.INT4) < 4 * FINEST * 1.5
    assert 1e-3 < agreement(Format.BFLOAT16) < 0.05
    assert 1e-3 < agreement(Format.INT8) < 0.05


def test_sizes_are_known_without_torch() -> None:
    program = "import sys, gossip.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=LAST_RESORT_S, check=False).returncode == 0


def test_a_probe_of_nothing_or_of_one_coordinate_has_a_step_too() -> None:
    assert common_steps(torch.empty(0), torch.empty(0), [0]) == (STEP_OF_NOTHING,)
    own = torch.ones(1)
    for times, plausible in ((0.9, True), (1.1, False)):
        theirs = own + times * FAR * NORM_RATIO
        with contextlib.nullcontext() if plausible else pytest.raises(Implausible, match="from ours"):
            common_steps(own, theirs, [1])


# Short ways of rounding give the bits of the long ones.

common = st.tuples(st.integers(128, 255), st.integers(-100, 60)).map(lambda each: each[0] * 2.0 ** each[1])
"""As `common_steps` makes them: numbers of 8 significant bits."""


@settings(max_examples=200)
@given(seeds, common, st.sampled_from([0.0, 0.5, 3.0, 2.0**10, 2.0**20, 2.0**60]), st.booleans())
def test_what_a_sender_reads_of_its_own_is_what_its_codes_say(seed: int, step: float, far: float, high: bool) -> None:
    """In whole steps, between two of them, and where float32 has none between its numbers any more."""
    source = torch.Generator().manual_seed(seed)
    meant = (torch.randn(2000, generator=source) * far + torch.randint(-9, 10, (2000,), generator=source) / 2) * step
    codes = torch.zeros(2000, dtype=torch.uint8)
    round_int4(meant.clone(), codes, step, high=high)
    short = torch.zeros_like(codes)
    round_int4(meant.clone(), short, step, high=high, norm=float(torch.linalg.vector_norm(meant)))
    assert torch.equal(short, codes)
    sent, own, theirs, heard = (torch.empty(2000) for _ in range(4))
    restore_int4(codes, meant, step, sent, high=high)
    came = torch.randint(0, 256, (2000,), generator=source, dtype=torch.uint8)
    restore_both_int4(came, meant, step, own, theirs, high=high)
    restore_int4(came, meant, step, heard, high=high)
    assert torch.equal(own, sent)
    assert torch.equal(theirs, heard)
