"""Weights of 24 bits in two parts: what they keep, and a stage that trains on them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_stages import CPU, INNER, cuts, drawn_ids, make_stage, prepared
from torch import Tensor, nn

from pipeline.adamw import PIECE, AdamW
from pipeline.hardware.split_weights import LARGEST, join, split, values_of
from pipeline.inner_step import BLOCK, OptimiserState
from pipeline.stage import Stage

CODED = replace(INNER, state="int8")
patterns = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64)
ODD = (0.0, -0.0, 1e-45, -1e-40, LARGEST, -LARGEST, 3.4028235e38, 1.0, -1.0, 1.00390625, math.inf, -math.inf)


def drawn(bits: list[int]) -> Tensor:
    """Return the float32 values of these bits, and odd ones."""
    return torch.cat((torch.tensor(bits, dtype=torch.int32).view(torch.float32), torch.tensor(ODD)))


@given(bits=patterns)
def test_a_weight_keeps_24_bits_and_its_upper_half_is_bfloat16(bits: list[int]) -> None:
    values = drawn(bits)
    joined, upper = join(*split(values)), split(values).upper
    known = ~values.isnan()
    assert torch.equal(joined.isnan(), values.isnan())
    bounded = values.clamp(-LARGEST, LARGEST)[known].double()
    smallest = 2.0**-126
    assert bool(((joined[known] - bounded).abs() <= 2.0**-16 * bounded.abs().clamp(min=smallest)).all())
    assert bool((upper[known].double() - bounded).abs().le(2.0**-8 * bounded.abs().clamp(min=smallest)).all())
    assert bool(upper[known].isfinite().all())
    assert torch.equal(joined[known].signbit(), values[known].signbit())


@given(bits=patterns)
def test_what_is_joined_and_split_again_is_the_same(bits: list[int]) -> None:
    first = split(drawn(bits))
    again = split(join(*first))
    assert torch.equal(first.upper.view(torch.int16), again.upper.view(torch.int16))
    assert torch.equal(first.remainder, again.remainder)


@given(bits=patterns)
def test_a_number_of_bfloat16_has_no_remainder(bits: list[int]) -> None:
    values = drawn(bits).clamp(-LARGEST, LARGEST).bfloat16().clamp(-3e38, 3e38)
    found = split(values.float())
    assert torch.equal(found.upper.nan_to_num(), values.nan_to_num())
    assert not found.remainder.any()


def test_remainders_that_lack_are_an_error() -> None:
    upper, remainder = split(torch.randn(4))
    with pytest.raises(ValueError, match="0 remainders for 1"):
        values_of([upper])
    with pytest.raises(ValueError, match="2 remainders for 1"):
        values_of([upper, remainder, remainder])


def staged(family: str = "llama", number: int = 0, state: str = "int8", **sizes: Any) -> Stage:
    """Return a stage that computes in bfloat16."""
    recipe = prepared(family, **sizes)
    inner = replace(INNER, state=state)
    return make_stage(recipe, cuts(recipe, 2)[number], inner=inner, autocast=torch.bfloat16)


def train(stage: Stage, steps: int) -> None:
    for seed in range(steps):
        waiting = stage.forward(drawn_ids(seed, 2, 9))
        waiting.backward(torch.full_like(waiting.output, 0.1))
        assert stage.step(1e-3, 1).applied


@pytest.mark.parametrize(("family", "sizes"), [("llama", {}), ("mixtral", {"num_local_experts": 2})])
def test_a_stage_computes_with_its_weights_themselves(family: str, sizes: dict[str, Any]) -> None:
    stage = staged(family, **sizes)
    train(stage, 2)
    held = dict(zip(stage.names, stage.current_weights(), strict=False))
    halves = [name for name, weight in held.items() if weight.dtype is torch.bfloat16]
    assert len(halves) >= 7
    for name in halves:
        assert stage._set.leaves[name].data_ptr() == held[name].data_ptr(), "no second copy"
        assert stage._masters[name].ndim >= 2
    remainders = stage.current_weights()[len(held) :]
    assert [each.shape for each in remainders] == [held[name].shape for name in halves]
    assert all(bool(each.any()) for each in remainders)


def test_gradients_of_split_weights_add_up_in_bfloat16() -> None:
    split_one, whole = staged(), staged(state="float32")
    # Where a weight lies between two numbers of bfloat16, its upper half may be the other one than autocast's.
    whole.set_weights([each.float() for each in split_one.current_weights()[: len(whole.shapes)]])
    for stage in (split_one, whole):
        for seed in range(3):
            waiting = stage.forward(drawn_ids(seed, 2, 9))
            waiting.backward(torch.full_like(waiting.output, 0.1))
    forms = set()
    for one, other in zip(split_one._weights, whole._weights, strict=True):
        forms.add(one.grad.dtype)
        assert one.grad.dtype is one.dtype
        if one.dtype is torch.float32:
            assert torch.equal(one.grad, other.grad)
        else:  # each of two sums is rounded by a part in 512 at most
            assert torch.dist(one.grad.float(), other.grad) <= 2**-8 * other.grad.norm()
    assert forms == {torch.float32, torch.bfloat16}


@given(seed=st.integers(0, 2**32))
def test_a_step_is_that_on_the_joined_weight_rounded_to_24_bits(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    shape = (3, BLOCK + 20)
    values = join(*split(torch.randn(shape, generator=chance)))
    gradient = torch.randn(shape, generator=chance).bfloat16().float()
    plain, halved = nn.Parameter(values.clone()), nn.Parameter(torch.zeros(shape))
    halved.data, remainder = split(values)
    halved.grad_dtype = torch.bfloat16
    one, other = AdamW([plain], CODED, CPU), AdamW([halved], CODED, CPU, {halved: remainder})
    for number in range(2):
        plain.grad = gradient * (number + 1)
        halved.grad = plain.grad.bfloat16()  # without a rounding
        one.step(1e-3)
        other.step(1e-3)
        with torch.no_grad():
            plain.copy_(join(*split(plain)))
        assert torch.equal(join(halved.detach(), remainder), plain)
    assert all(map(torch.equal, one.moments(), other.moments()))


def test_a_change_far_below_bfloat16_is_kept() -> None:
    stage = staged()
    before = stage.weights()
    for _ in range(8):
        stage.correct([1e-4 * weight for weight in before])
    for was, now in zip(before, stage.weights(), strict=True):
        assert torch.dist(now, was * (1 + 8e-4)) <= 8e-5 * was.norm()


def test_weights_go_out_and_come_in_to_the_bit() -> None:
    stage, other, plain = staged(), staged(), make_stage(*_whole(), inner=CODED)
    train(stage, 2)
    held = tuple(each.clone() for each in stage.current_weights())
    for given_weights in (held, stage.weights()):
        other.set_weights(given_weights)
        assert all(map(torch.equal, other.current_weights(), held))
        other.set_weights([torch.zeros(shape) for shape in other.shapes])
    plain.set_weights(held)
    assert all(map(torch.equal, plain.weights(), stage.weights())), "a stage in float32 takes them too"
    with pytest.raises(ValueError, match="is not"):
        stage.set_weights([torch.zeros(1), *held[1:]])
    with pytest.raises(ValueError, match="remainders"):
        stage.set_weights(held[:-1])
    assert all(map(torch.equal, stage.current_weights(), held)), "nothing has changed"


def _whole() -> tuple[Any, Any]:
    recipe = prepared("llama")
    return recipe, cuts(recipe, 2)[0]


def test_a_pass_under_way_keeps_the_weights_that_it_began_with() -> None:
    stage, calm = staged(), staged()
    late, alone = stage.forward(drawn_ids(1, 2, 9)), calm.forward(drawn_ids(1, 2, 9))
    train(stage, 1)
    stage.correct([torch.ones(shape) for shape in stage.shapes])
    assert stage.statistics()["weight_copies"] == 1
    for each in (late, alone):
        each.backward(torch.full_like(each.output, 0.1))
    for one, other in zip(stage._weights, calm._weights, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_matrix_of_several_pieces_changes_throughout() -> None:
    assert PIECE % BLOCK == 0
    stage, whole = staged(), staged()
    delta = [torch.randn(shape, generator=torch.Generator().manual_seed(2)) for shape in stage.shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.stage.PART", BLOCK)
        stage.correct(delta)
        read = stage.weights()
    whole.correct(delta)
    assert all(map(torch.equal, read, whole.weights()))


def test_a_difference_is_that_of_the_joined_weights() -> None:
    """Rounded once, and a correction in bfloat16 is added as one in float32."""
    stage, other = staged(), staged()
    train(stage, 2)
    before = other.weights()
    found = stage.weights(before)
    assert any(each.any() for each in found)
    due = [(own - was).bfloat16() for own, was in zip(stage.weights(), before, strict=True)]
    assert all(map(torch.equal, found, due))
    stage.correct(found)
    expected = [own + each for own, each in zip(before, due, strict=True)]
    other.correct([each.float() for each in found])
    assert all(torch.allclose(*pair, rtol=1e-4) for pair in zip(other.weights(), expected, strict=True))


def test_an_optimiser_goes_on_after_a_restart_to_the_bit() -> None:
    first, second = staged(), staged()
    train(first, 2)
    second.set_weights(tuple(each.clone() for each in first.current_weights()))
    state = first.optimiser_state()
    second.load_optimiser_state(OptimiserState(state.steps, tuple(each.clone() for each in state.moments)))
    for stage in (first, second):
        train(stage, 2)
    assert all(map(torch.equal, first.current_weights(), second.current_weights()))


def test_training_goes_as_in_float32() -> None:
    """Losses of the last stage after some steps, of weights in 24 and in 32 bits; moments are codes in one of them."""
    losses = []
    hidden = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))
    targets = drawn_ids(2, 4, 9)
    for state in ("float32", "int8"):
        stage = staged(number=1, state=state)
        for _ in range(30):
            loss = stage.loss(hidden, targets).loss
            stage.step(1e-2, 1)
        losses.append(loss)
    assert losses[1] < 2.0
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
