"""A step in place and in pieces is the outer rule to the bit, and what cannot be right moves nothing."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy_gossip import ToySettings, at_once

from gossip.exchange.codec import OWED, PIECE, Encoded, Feedback, Sides, check, encode
from gossip.exchange.messages import Implausible
from gossip.rounds.outer_optimiser import (
    OuterOptimiser,
    Owed,
    Rule,
    Snapshot,
    Step,
    take_step,
)
from gossip.rule.outer_step import EVEN, Delay, Outer, OuterState, Shares, Tensors, shares_by_steps
from gossip.settings import BLOCK, Format
from research.codec.whole_sets import decode, meant_by
from research.theory.pair_step import pseudo_gradient, step_alone, step_pair

SHAPES = ((3, 700), (), (0,), (2 * BLOCK + 5,), (1,))
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)
coefficients = st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.25])
outers = st.builds(Outer, st.sampled_from([0.0, 0.5]), coefficients, coefficients)
delays = st.builds(lambda period, part: Delay(period, part / period), st.integers(1, 3), st.floats(0.0, 1.0))
both_shares = st.sampled_from([EVEN, shares_by_steps(11, 3), shares_by_steps(1, 9)])
longest = st.sampled_from([BLOCK, 4 * BLOCK, PIECE])


def draw(seed: int, number: int, scale: float = 1.0) -> Tensors:
    source = torch.Generator().manual_seed(seed + number)
    return tuple(torch.randn(shape, generator=source) * scale for shape in SHAPES)


def plus(a: Tensors, b: Tensors) -> Tensors:
    return tuple(torch.add(x, y) for x, y in zip(a, b, strict=True))


def copied(tensors: Tensors) -> Tensors:
    return tuple(tensor.clone() for tensor in tensors)


def same(a: Tensors, b: Tensors) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def state_of(seed: int, outer: Outer, delay: Delay, meetings: int) -> OuterState:
    if not outer.alpha:
        return OuterState(draw(seed, 1))
    meetings %= delay.period
    return OuterState(draw(seed, 1), draw(seed, 2), draw(seed, 3) if meetings else (), meetings)


def sent(form: Format, own: Tensors, residual: Tensors, other: Tensors) -> Sides:
    steps = (0.05,) * len(SHAPES) if form is Format.INT4 else ()
    return Sides(encode(form, own, residual, steps).coded, encode(form, other, (), steps).coded)


def rounded(residual: Tensors) -> Tensors:
    return tuple([tensor.to(OWED) for tensor in residual])


def seen(sides: Sides, own: Tensors, residual: Tensors) -> tuple[Tensors, Tensors]:
    meant = meant_by(own, residual)
    mine, theirs = (decode(side.form, side.wire, meant, side.steps) for side in (sides.mine, sides.theirs))
    if sides.share == 1.0:
        return mine, theirs
    # Ours as they are, however coarsely the partner's probe has had them rounded.
    apart = [(other - each) * sides.share for other, each in zip(theirs, meant, strict=True)]
    return copied(own), tuple(each + way for each, way in zip(own, apart, strict=True))


@few
@given(
    st.sampled_from(Format),
    outers,
    delays,
    st.integers(0, 2),
    seeds,
    st.booleans(),
    longest,
    st.sampled_from([1.0, 0.3]),
    both_shares,
)
def test_a_pair_steps_as_the_rule_says_whatever_the_pieces(
    form: Format,
    outer: Outer,
    delay: Delay,
    meetings: int,
    seed: int,
    owing: bool,
    longest: int,
    share: float,
    shares: Shares,
) -> None:
    state, snapshot = state_of(seed, outer, delay, meetings), draw(seed, 4)
    owes = owing and form is not Format.FLOAT32
    residuals = [rounded(draw(seed, number, 0.01)) if owes else () for number in (5, 6)]
    owed = Owed(*(Feedback(form, copied(each)) for each in residuals))
    fast = sent(form, snapshot, residuals[0], plus(snapshot, draw(seed, 7, 0.05)))._replace(share=share)
    slow = (
        None
        if outer.gamma == outer.beta
        else sent(form, state.slow, residuals[1], plus(state.slow, draw(seed, 8, 0.05)))
    )

    mine, theirs = seen(fast, snapshot, residuals[0])
    mine_slow, their_slow = (state.slow, None) if slow is None else seen(slow, state.slow, residuals[1])
    momentum = state.momentum or tuple(map(torch.zeros_like, state.slow))
    stepped = step_pair(OuterState(mine_slow, momentum, *state[2:]), mine, theirs, their_slow, outer, delay, shares)
    expected = stepped.state
    moved = expected.slow
    if slow is not None and form is not Format.FLOAT32:
        moved = tuple(m + exact - said for m, exact, said in zip(moved, state.slow, mine_slow, strict=True))

    before, correction = copied(snapshot), copied(snapshot)
    slow_before = copied(state.slow)
    after = take_step(Step(correction, fast, slow, shares=shares), state, owed, Rule(outer, delay), longest)
    assert same(after.slow, moved)
    assert same(correction, pseudo_gradient(moved, before))
    if outer.alpha:
        assert same(after.momentum, expected.momentum)
        assert same(after.gathered, expected.gathered)
        assert after.meetings == expected.meetings
    if form is not Format.FLOAT32 and share == 1.0:
        assert same(owed.fast.residual, rounded(pseudo_gradient(meant_by(before, residuals[0]), mine)))
    elif owes:
        assert same(owed.fast.residual, residuals[0])
    if slow is not None and form is not Format.FLOAT32:
        assert same(owed.slow.residual, rounded(pseudo_gradient(meant_by(slow_before, residuals[1]), mine_slow)))


@few
@given(st.sampled_from(list(Format)), outers, delays, seeds, st.sets(st.integers(0, len(SHAPES) - 1), min_size=1))
def test_tensors_that_are_fixed_stay_exactly_as_they_are(
    form: Format, outer: Outer, delay: Delay, seed: int, fixed: set[int]
) -> None:
    state, snapshot = state_of(seed, outer, delay, 0), draw(seed, 4)
    slow = None if outer.gamma == outer.beta else sent(form, state.slow, (), plus(state.slow, draw(seed, 8, 0.05)))
    steps = [Step(copied(snapshot), sent(form, snapshot, (), plus(snapshot, draw(seed, 7, 0.05))), slow)]
    if not form.is_modular:
        steps.append(Step(copied(snapshot), adopts=encode(form, draw(seed, 7)).coded))
    before = copied(state.slow)
    for step in steps:
        state = take_step(step, state, Owed(Feedback(form), Feedback(form)), Rule(outer, delay, frozenset(fixed)))
        for number in fixed:
            assert torch.equal(state.slow[number], before[number])
            assert not step.snapshot[number].any()
        assert all(tensor.isfinite().all() for part in state[:3] for tensor in part)


@few
@given(outers, delays, st.integers(0, 2), seeds, longest)
def test_alone_it_is_the_rule_with_a_mean_over_one(
    outer: Outer, delay: Delay, meetings: int, seed: int, longest: int
) -> None:
    state, snapshot = state_of(seed, outer, delay, meetings), draw(seed, 4)
    momentum = state.momentum or tuple(map(torch.zeros_like, state.slow))
    expected = step_alone(state._replace(momentum=momentum), snapshot, outer, delay)
    owed = Owed(Feedback(Format.INT4), Feedback(Format.INT4))
    after = take_step(Step(snapshot), state, owed, Rule(outer, delay), longest)
    assert same(after.slow, expected.state.slow)
    assert same(snapshot, expected.correction)
    assert same(after.momentum, expected.state.momentum if outer.alpha else ())


@few
@given(seeds, st.integers(0, 2), st.sampled_from([Format.FLOAT32, Format.BFLOAT16, Format.INT8]), longest)
def test_who_adopts_goes_on_as_a_newcomer_beside_its_partner(
    seed: int, meetings: int, form: Format, longest: int
) -> None:
    outer, delay = Outer(0.5, 0.7, 0.7), Delay(3, 0.1)
    state, own, correction = state_of(seed, outer, delay, meetings), draw(seed, 4), draw(seed, 4)
    coded = encode(form, draw(seed, 7)).coded
    owed = Owed(Feedback(form), Feedback(form))
    after = take_step(Step(correction, adopts=coded), state, owed, Rule(outer, delay), longest)
    theirs = decode(form, coded.wire, own)
    assert same(after.slow, theirs)
    assert all(not m.any() and m.shape == shape for m, shape in zip(after.momentum, SHAPES, strict=True))
    assert (after.gathered, after.meetings) == ((), 0)
    assert same(correction, pseudo_gradient(theirs, own))


# What cannot be right moves nothing; what was lent stays.

SETTINGS = ToySettings(seed=1, alpha=0.5, beta=0.7, gamma=0.7, codec=Format.INT8)


class Held:
    """A replica whose fast weights stand still."""

    def __init__(self) -> None:
        self.corrected: Tensors = ()

    async def snapshot(self) -> Tensors:
        return draw(1, 4)

    async def correct(self, correction: Tensors) -> None:
        self.corrected = correction


def optimiser(**others: object) -> OuterOptimiser:
    state = OuterState(draw(1, 1))
    return OuterOptimiser(replace(SETTINGS, **others), state, Held(), at_once, seed=1)  # type: ignore[arg-type]


def everything(one: OuterOptimiser, snapshot: Snapshot) -> Tensors:
    return (*one.state.slow, *one.state.momentum, *one._owed.fast.residual, *snapshot.fast)


def last_scale_is_nan(mine: Encoded) -> Tensors:
    codes, scales = copied(mine.coded.wire)
    scales[-1] = math.nan
    return codes, scales


def too_large(mine: Encoded) -> Tensors:
    codes, scales = mine.coded.wire
    return codes, scales * 11


def of_another_shape(mine: Encoded) -> Tensors:
    return (mine.coded.wire[0][:-1], mine.coded.wire[1])


@pytest.mark.parametrize("spoil", [last_scale_is_nan, too_large, of_another_shape])
async def test_a_meeting_that_breaks_half_way_leaves_everything_as_it_was(spoil: object) -> None:
    one = optimiser()
    for _ in range(2):  # the second time something is owed
        snapshot = await one.snapshot(0)
        mine = await one.encode_fast(snapshot, ())
        before = copied(everything(one, snapshot))
        with pytest.raises(Implausible):
            await one.hear_fast(spoil(mine), snapshot, mine)  # type: ignore[operator]
        assert same(everything(one, snapshot), before)
        await one.correct(await one.take(Step(snapshot.fast, await one.hear_fast(mine.coded.wire, snapshot, mine))))
        assert not same(everything(one, snapshot), before)


async def test_a_step_is_taken_in_the_memory_that_is_there() -> None:
    one = optimiser(alpha=0.0, beta=1.0, gamma=1.0)
    assert one.state.momentum == ()
    places = [tensor.data_ptr() for tensor in one.state.slow]
    snapshot = await one.snapshot(0)
    fast = [tensor.data_ptr() for tensor in snapshot.fast]
    await one.correct(await one.take(Step(snapshot.fast)))
    assert [tensor.data_ptr() for tensor in one.state.slow] == places
    assert [tensor.data_ptr() for tensor in one._replica.corrected] == fast  # type: ignore[attr-defined]


@few
@given(seeds, st.floats(1e-6, 0.2))
def test_a_norm_that_the_steps_vouch_for_is_near_ours(seed: int, step: float) -> None:
    """Whatever the codes are: where `check` computes no norm, there is nothing to find."""
    source = torch.Generator().manual_seed(seed)
    own = draw(seed, 4)
    wire = tuple(
        torch.randint(0, 256, tensor.shape, generator=source, dtype=torch.uint8)
        for tensor in encode(Format.INT4, own, (), (step,) * len(own)).coded.wire
    )
    size = math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in own))
    values = sum(tensor.numel() for tensor in own)
    decoded: list[Tensor] = list(decode(Format.INT4, wire, own, (step,) * len(own)))
    theirs = math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in decoded))
    assert abs(theirs - size) <= 8.1 * step * math.sqrt(values)


def test_coarse_steps_do_not_vouch_for_weights_that_are_nearly_nothing() -> None:
    own, steps = (torch.full((100,), 0.95),), (0.125,)
    nothing = encode(Format.INT4, (torch.zeros(100),), (), steps).coded
    with pytest.raises(Implausible):
        check(nothing, own, Feedback(Format.INT4), 9.5)
