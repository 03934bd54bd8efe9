"""A step in place and in pieces is the outer rule to the bit, and what cannot be right moves nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy_gossip import ToySettings, at_once

from gossip.exchange.codec import DIFFERENCE, PIECE, Encoded, OwnWeights, Sides, check, encode
from gossip.exchange.messages import Implausible
from gossip.exchange.swap import InfluenceBound
from gossip.interface import Candidate
from gossip.rounds.outer_optimiser import OuterOptimiser, Rule, Snapshot, Step, take_step
from gossip.rule.outer_step import EVEN, Delay, Outer, OuterState, Shares, Tensors, shares_by_steps
from gossip.settings import BLOCK, Format
from research.codec.whole_sets import decode
from research.theory.pair_step import step_alone, step_pair

T = TypeVar("T")
SHAPES = ((3, 700), (), (0,), (2 * BLOCK + 5,), (1,))
few = settings(max_examples=25)
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


def negative(tensors: Tensors) -> Tensors:
    return tuple(map(torch.neg, tensors))


def distance(a: Tensors, b: Tensors) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if x.numel())


def copied(tensors: Tensors) -> Tensors:
    return tuple(tensor.clone() for tensor in tensors)


def same(a: Tensors, b: Tensors) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def state_of(seed: int, outer: Outer, delay: Delay, meetings: int) -> OuterState:
    if not outer.alpha:
        return OuterState(draw(seed, 1))
    meetings %= delay.period
    return OuterState(draw(seed, 1), draw(seed, 2), draw(seed, 3) if meetings else (), meetings)


def rounded(tensors: Tensors) -> Tensors:
    return tuple([tensor.to(DIFFERENCE) for tensor in tensors])


def snapshot_of(form: Format, slow: Tensors, learned: Tensors) -> OwnWeights:
    """Return the fast weights as a round of this form holds them."""
    return OwnWeights(plus(slow, learned)) if form is Format.FLOAT32 else OwnWeights(slow, rounded(learned))


def values_of(weights: OwnWeights) -> Tensors:
    return plus(*weights) if weights.difference else copied(weights.base)


def sent(form: Format, own: OwnWeights, apart: Tensors) -> Sides:
    steps = (0.05,) * len(SHAPES) if form is Format.INT4 else ()
    theirs = OwnWeights(plus(values_of(own), apart))
    return Sides(encode(form, own, steps).coded, encode(form, theirs, steps).coded)


def seen(sides: Sides, exact: Tensors) -> tuple[Tensors, Tensors]:
    mine, theirs = (decode(side.form, side.wire, exact, side.steps) for side in (sides.mine, sides.theirs))
    if sides.share == 1.0:
        return mine, theirs
    # Ours as they are, however coarsely the partner's probe has had them rounded.
    apart = [(other - each) * sides.share for other, each in zip(theirs, exact, strict=True)]
    return copied(exact), tuple(each + way for each, way in zip(exact, apart, strict=True))


@few
@given(
    st.sampled_from(Format), outers, delays, st.integers(0, 2), seeds, longest, st.sampled_from([1.0, 0.3]), both_shares
)
def test_a_pair_steps_as_the_rule_says_whatever_the_pieces(
    form: Format, outer: Outer, delay: Delay, meetings: int, seed: int, longest: int, share: float, shares: Shares
) -> None:
    """And so is the correction, of what both sides decode."""
    state = state_of(seed, outer, delay, meetings)
    snapshot = snapshot_of(form, state.slow, draw(seed, 4, 0.3))
    fast = sent(form, snapshot, draw(seed, 7, 0.05))._replace(share=share)
    slow = None if outer.gamma == outer.beta else sent(form, OwnWeights(state.slow), draw(seed, 8, 0.05))

    mine, theirs = seen(fast, values_of(snapshot))
    mine_slow, their_slow = (state.slow, None) if slow is None else seen(slow, state.slow)
    momentum = state.momentum or tuple(map(torch.zeros_like, state.slow))
    stepped = step_pair(OuterState(mine_slow, momentum, *state[2:]), mine, theirs, their_slow, outer, delay, shares)
    expected = stepped.state
    moved = expected.slow
    if slow is not None and form is not Format.FLOAT32:
        moved = tuple(m + exact - said for m, exact, said in zip(moved, state.slow, mine_slow, strict=True))

    step = Step(snapshot, fast, slow, shares=shares)
    after = take_step(step, state, Rule(outer, delay), longest)
    assert same(after.slow, moved)
    due = stepped.correction if form is Format.FLOAT32 else rounded(stepped.correction)
    assert same(step.correction, due)
    if outer.alpha:
        assert same(after.momentum, expected.momentum)
        assert same(after.gathered, expected.gathered)
        assert after.meetings == expected.meetings


@given(st.sampled_from([Format.BFLOAT16, Format.INT8, Format.INT4]), seeds, st.sampled_from([1.0, 0.6]))
@settings(max_examples=15)
def test_what_rounding_leaves_out_goes_out_later(form: Format, seed: int, gamma: float) -> None:
    """Two replicas that learn and meet lose nothing: in the mean they stand where all that they have learned leads.

    Their slow weights lack one rounding of it, however many rounds they have met in.
    """
    rounds, rule = 60, Rule(Outer(0.0, 1.0, gamma), Delay())
    slow = [copied(draw(seed, 1)) for _ in range(2)]
    fast = [copied(each) for each in slow]
    learned = copied(slow[0])
    for number in range(rounds):
        fasts = [OwnWeights(mine, rounded(plus(own, negative(mine)))) for mine, own in zip(slow, fast, strict=True)]
        apart = max(distance(*map(values_of, fasts)), distance(*slow), 1e-6)
        steps = (1.5 * apart / 8,) * len(SHAPES) if form is Format.INT4 else ()
        said = [encode(form, own, steps).coded for own in fasts]
        said_slow = [encode(form, OwnWeights(own), steps).coded for own in slow]
        for side in range(2):
            slows = None if gamma == 1.0 else Sides(said_slow[side], said_slow[1 - side])
            step = Step(fasts[side], Sides(said[side], said[1 - side]), slows)
            take_step(step, OuterState(slow[side]), rule)
            more = draw(seed, 10 + 2 * number + side, 0.02)
            fast[side] = plus(fast[side], plus(step.correction, more))
            learned = plus(learned, tuple(each / 2 for each in more))
    middle = tuple(torch.add(*pair) / 2 for pair in zip(*fast, strict=True))
    assert distance(middle, learned) < 0.002
    # What is on its way: the last learning, and one rounding.
    rounding = {Format.BFLOAT16: 2.0**-6, Format.INT8: 0.04, Format.INT4: 0.0}[form]
    assert distance(slow[0], learned) < 0.3 + rounding


@few
@given(st.sampled_from(list(Format)), outers, delays, seeds, st.sets(st.integers(0, len(SHAPES) - 1), min_size=1))
def test_tensors_that_are_fixed_stay_exactly_as_they_are(
    form: Format, outer: Outer, delay: Delay, seed: int, fixed: set[int]
) -> None:
    state = state_of(seed, outer, delay, 0)
    slow = None if outer.gamma == outer.beta else sent(form, OwnWeights(state.slow), draw(seed, 8, 0.05))
    snapshot = snapshot_of(form, state.slow, draw(seed, 4, 0.3))
    steps = [Step(snapshot, sent(form, snapshot, draw(seed, 7, 0.05)), slow)]
    if not form.is_modular:
        steps.append(Step(snapshot, adopts=encode(form, OwnWeights(draw(seed, 7))).coded))
    before = copied(state.slow)
    for step in steps:
        state = take_step(step, state, Rule(outer, delay, frozenset(fixed)))
        for number in fixed:
            assert torch.equal(state.slow[number], before[number])
            assert not step.correction[number].any()
        assert all(tensor.isfinite().all() for part in state[:3] for tensor in part)


@few
@given(outers, delays, st.integers(0, 2), seeds, longest)
def test_alone_it_is_the_rule_with_a_mean_over_one(
    outer: Outer, delay: Delay, meetings: int, seed: int, longest: int
) -> None:
    state, snapshot = state_of(seed, outer, delay, meetings), draw(seed, 4)
    momentum = state.momentum or tuple(map(torch.zeros_like, state.slow))
    expected = step_alone(state._replace(momentum=momentum), snapshot, outer, delay)
    after = take_step(Step(OwnWeights(snapshot)), state, Rule(outer, delay), longest)
    assert same(after.slow, expected.state.slow)
    assert same(snapshot, expected.correction)
    assert same(after.momentum, expected.state.momentum if outer.alpha else ())


@few
@given(seeds, st.integers(0, 2), st.sampled_from([Format.FLOAT32, Format.BFLOAT16, Format.INT8]), longest)
def test_who_adopts_goes_on_as_a_newcomer_beside_its_partner(
    seed: int, meetings: int, form: Format, longest: int
) -> None:
    outer, delay = Outer(0.5, 0.7, 0.7), Delay(3, 0.1)
    state, own = state_of(seed, outer, delay, meetings), draw(seed, 4)
    coded = encode(form, OwnWeights(draw(seed, 7))).coded
    after = take_step(Step(OwnWeights(own), adopts=coded), state, Rule(outer, delay), longest)
    theirs = decode(form, coded.wire, own)
    assert same(after.slow, theirs)
    assert all(not m.any() and m.shape == shape for m, shape in zip(after.momentum, SHAPES, strict=True))
    assert (after.gathered, after.meetings) == ((), 0)


# What cannot be right moves nothing; what was lent stays.

SETTINGS = ToySettings(seed=1, alpha=0.5, beta=0.7, gamma=0.7, codec=Format.INT8)


class Held:
    """A replica whose fast weights stand still."""

    def __init__(self) -> None:
        self.corrected: Tensors = ()

    async def snapshot(self, slow: Tensors) -> Tensors:
        fast = draw(1, 4)
        return rounded(plus(fast, negative(slow))) if slow else fast

    async def correct(self, correction: Tensors) -> None:
        self.corrected = correction


def optimiser(**others: object) -> OuterOptimiser:
    state = OuterState(draw(1, 1))
    return OuterOptimiser(replace(SETTINGS, **others), state, Held(), at_once, seed=1)


def everything(one: OuterOptimiser, snapshot: Snapshot) -> Tensors:
    return (*one.state.slow, *one.state.momentum, *snapshot.fast.difference)


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
    for _ in range(2):
        snapshot = await one.snapshot(0)
        mine = await one.encode_fast(snapshot, ())
        before = copied(everything(one, snapshot))
        with pytest.raises(Implausible):
            await one.hear_fast(spoil(mine), snapshot, mine)
        assert same(everything(one, snapshot), before)
        await one.correct(await one.take(Step(snapshot.fast, await one.hear_fast(mine.coded.wire, snapshot, mine))))
        assert not same(everything(one, snapshot), before)


async def test_no_computation_asks_for_the_roster() -> None:
    """It runs in another thread than what changes the roster."""
    asked, computes = [], False

    def partners() -> tuple[Candidate, ...]:
        asked.append(computes)
        return (Candidate("a", 0), Candidate("b", 0))

    async def compute(function: Callable[..., T], /, *args: object) -> T:
        nonlocal computes
        computes = True
        try:
            return function(*args)
        finally:
            computes = False

    state = OuterState(draw(1, 1))
    one = OuterOptimiser(SETTINGS, state, Held(), compute, seed=1, partners=partners)
    snapshot = await one.snapshot(0)
    for encoded, hear, bound in (
        (await one.encode_fast(snapshot, ()), one.hear_fast, one.bound_fast),
        (await one.encode_slow(()), lambda wire, _, mine: one.hear_slow(wire, mine), one.bound_slow),
    ):
        heard = await hear(encoded.coded.wire, snapshot, encoded)
        assert (await bound("a", heard, snapshot)).share == 1.0
    wire = (await one.encode_absolute(snapshot)).coded.wire
    await one.adopting("a", wire, snapshot, disowned=False)
    assert asked == [False] * 3


@pytest.mark.parametrize(("listed", "only"), [((), True), (("a",), True), (("b",), False), (("a", "b"), False)])
async def test_a_partner_is_the_only_one_where_no_other_is_listed(listed: tuple[str, ...], only: bool) -> None:
    """One that lists itself nowhere would else be bounded as an only partner is, beside the one that is listed."""
    found = list[bool]()

    class Bound(InfluenceBound):
        def share(self, *told: Any, only: bool, **named: Any) -> float:
            found.append(only)
            return super().share(*told, only=only, **named)

        def check_adopted(self, *told: Any, only: bool) -> None:
            found.append(only)

    partners = tuple(Candidate(each, 0) for each in listed)
    state = OuterState(draw(1, 1))
    one = OuterOptimiser(SETTINGS, state, Held(), at_once, seed=1, partners=lambda: partners)  # type: ignore[arg-type]
    one._fast_bound = Bound()
    snapshot = await one.snapshot(0)
    mine = await one.encode_fast(snapshot, ())
    await one.bound_fast("a", await one.hear_fast(mine.coded.wire, snapshot, mine), snapshot)
    await one.adopting("a", (await one.encode_absolute(snapshot)).coded.wire, snapshot, disowned=False)
    assert found == [only, only]


async def test_a_step_is_taken_in_the_memory_that_is_there() -> None:
    one = optimiser(alpha=0.0, beta=1.0, gamma=1.0)
    assert one.state.momentum == ()
    places = [tensor.data_ptr() for tensor in one.state.slow]
    snapshot = await one.snapshot(0)
    assert snapshot.fast.base is one.state.slow
    fast = [tensor.data_ptr() for tensor in snapshot.fast.difference]
    await one.correct(await one.take(Step(snapshot.fast)))
    assert [tensor.data_ptr() for tensor in one.state.slow] == places
    assert [tensor.data_ptr() for tensor in one._replica.corrected] == fast


@few
@given(seeds, st.floats(1e-6, 0.2))
def test_a_norm_that_the_steps_vouch_for_is_near_ours(seed: int, step: float) -> None:
    """Whatever the codes are: where `check` computes no norm, there is nothing to find."""
    source = torch.Generator().manual_seed(seed)
    own = draw(seed, 4)
    wire = tuple(
        torch.randint(0, 256, tensor.shape, generator=source, dtype=torch.uint8)
        for tensor in encode(Format.INT4, OwnWeights(own), (step,) * len(own)).coded.wire
    )
    size = math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in own))
    values = sum(tensor.numel() for tensor in own)
    decoded: list[Tensor] = list(decode(Format.INT4, wire, own, (step,) * len(own)))
    theirs = math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in decoded))
    assert abs(theirs - size) <= 8.1 * step * math.sqrt(values)


def test_coarse_steps_do_not_vouch_for_weights_that_are_nearly_nothing() -> None:
    own, steps = (torch.full((100,), 0.95),), (0.125,)
    nothing = encode(Format.INT4, OwnWeights((torch.zeros(100),)), steps).coded
    with pytest.raises(Implausible):
        check(nothing, OwnWeights(own), 9.5)
