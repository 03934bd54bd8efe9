"""What a partner's weights may do: honest ones all they can, others a bounded amount or nothing."""

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.exchange.codec import Coded, Encoded, OwnWeights, Sides, norm
from gossip.exchange.codec import encode as encode_own
from gossip.exchange.messages import Implausible
from gossip.exchange.swap import (
    CLIP,
    LEAST_ALIKE,
    LEAST_PULL,
    LEAST_VALUES,
    NO_PULL,
    OFTEN,
    PARTNERS,
    REFUSE,
    SELF_DOUBT,
    TYPICAL,
    TYPICAL_LENGTH,
    VOICES,
    Deviation,
    InfluenceBound,
    measure,
)
from gossip.rounds.outer_optimiser import Rule, Step, take_step
from gossip.rule.outer_step import UNDELAYED, Outer, OuterState, Tensors
from gossip.settings import Format
from research.theory.pair_step import pseudo_gradient, step_pair

SHAPES = ((20, 40), (300,))
OUTER = Outer(alpha=0.0, beta=1.0, gamma=1.0)
honest = st.floats(0.2, 2.0)
quick = settings(max_examples=50)


def draw(seed: int, length: float) -> Tensors:
    source = torch.Generator().manual_seed(seed)
    drawn = tuple(torch.randn(shape, generator=source) for shape in SHAPES)
    return tuple(tensor * (length / norm(drawn)) for tensor in drawn)


def plus(*summands: Tensors) -> Tensors:
    return tuple(sum(tensors[1:], tensors[0]) for tensors in zip(*summands, strict=True))


def encode(form: Format, weights: Tensors, steps: tuple[float, ...] = ()) -> Encoded:
    return encode_own(form, OwnWeights(weights), steps)


def measured(theirs: Coded, slow: Tensors, fast: Tensors) -> Deviation:
    """Return what a replica with these weights measures of a partner's fast ones."""
    own = OwnWeights(fast)
    return measure(theirs, own, slow, own)


def at(ratio: float, **other: float) -> Deviation:
    return Deviation(1000, ratio, 1.0, **{"alike": 0.9, "direction": 0.5, **other})


def step_of(slow: Tensors, fast: Tensors, sides: Sides) -> Tensors:
    """Return the slow weights after a meeting."""
    copies = (tuple(tensor.clone() for tensor in each) for each in (fast, slow))
    snapshot, state = next(copies), OuterState(next(copies))
    return take_step(Step(OwnWeights(snapshot), sides), state, Rule(OUTER, UNDELAYED)).slow


@quick
@given(seed=st.integers(0, 2**31), distances=st.lists(honest, min_size=1, max_size=20))
def test_an_honest_partner_is_never_altered(seed: int, distances: list[float]) -> None:
    """The step is what it was without a bound, to the bit."""
    bound, slow = InfluenceBound(), draw(seed, 50.0)
    fast = plus(slow, draw(seed + 1, 1.0))
    for number, distance in enumerate(distances):
        theirs = plus(fast, draw(seed + 2 + number, distance))
        coded = encode(Format.FLOAT32, theirs).coded
        deviation = measured(coded, slow, fast)
        sides = Sides(encode(Format.FLOAT32, fast).coded, coded, bound.share(f"p{number % 3}", deviation))
        assert sides.share == 1.0
        expected = step_pair(OuterState(slow), fast, theirs, None, OUTER).state.slow
        assert all(map(torch.equal, step_of(slow, fast, sides), expected))


@quick
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.floats(0.0, 1e12), min_size=1, max_size=12),
    before=st.lists(honest, max_size=12),
)
def test_the_influence_of_any_partner_on_the_mean_is_bounded(
    seed: int, lengths: list[float], before: list[float]
) -> None:
    """Whatever one partner brings and however often, beside three honest ones."""
    bound, slow = InfluenceBound(), draw(seed, 10.0)
    fast = plus(slow, draw(seed + 1, 1.0))
    for number, distance in enumerate(before):
        bound.share(f"p{number % 3}", at(distance))
    usual = max([TYPICAL, *before])
    for number, length in enumerate(lengths[: VOICES + len(before)]):
        coded = encode(Format.FLOAT32, plus(fast, draw(seed + 2 + number, length))).coded
        deviation = measured(coded, slow, fast)
        try:
            share = bound.share("liar", deviation)
        except ConnectionAbortedError:
            continue
        after = step_of(slow, fast, Sides(encode(Format.FLOAT32, fast).coded, coded, share))
        most = CLIP * usual if len(before) > VOICES else REFUSE * max(usual, *lengths)
        assert norm(pseudo_gradient(after, fast)) <= most / 2 * 1.01


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_never_passes(value: float) -> None:
    fast = draw(1, 10.0)
    theirs = tuple(torch.full_like(tensor, value) for tensor in fast)
    coded = encode(Format.FLOAT32, fast).coded._replace(wire=theirs)
    deviation = measured(coded, draw(2, 10.0), fast)
    with pytest.raises(Implausible):
        InfluenceBound().share("liar", deviation)


@pytest.mark.parametrize("times", [-1.0, 0.0, "noise"])
def test_weights_that_are_not_like_ours_do_not_count(times: float | str) -> None:
    fast = draw(1, 1.0)
    theirs = draw(9, 1.0) if isinstance(times, str) else tuple(tensor * times for tensor in fast)
    coded = encode(Format.FLOAT32, theirs).coded
    # A step as long as the weights: no distance would show it.
    deviation = measured(coded, plus(fast, draw(3, 3.0)), fast)
    assert deviation.alike < LEAST_ALIKE
    with pytest.raises(Implausible, match="not like ours"):
        InfluenceBound().share("liar", deviation)
    with pytest.raises(Implausible, match="not like ours"):
        InfluenceBound().check_adopted(deviation)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1.0, 1.0)), max_size=40))
@quick
def test_nobody_is_refused_for_its_direction(meetings: list[tuple[str, float]]) -> None:
    """A slow machine's replica lags, and lies where the others come from; they refused it once in nine meetings."""
    bound = InfluenceBound()
    for name, direction in meetings:
        assert LEAST_PULL <= bound.share(name, at(1.0, direction=direction)) <= 1.0


def test_whoever_walks_backwards_counts_little_and_one_odd_meeting_does_not_decide() -> None:
    bound = InfluenceBound()
    for direction in (0.6, -0.5, 0.9):
        for name in ("honest", "other", "drifting"):
            assert bound.share(name, at(1.0, direction=direction)) == 1.0
    for name in ("liar", "drifting"):
        shares = [bound.share(name, at(1.0, direction=-0.6)) for _ in range(8)]
        assert shares[-1] == LEAST_PULL
    for _ in range(9):
        bound.share("other", at(1.0))
    for _ in range(5):
        assert bound.share("slow", at(1.0, direction=-0.9)._replace(own=0.1)) == 1.0


@quick
@given(
    directions=st.lists(st.floats(-1.0, 1.0), max_size=40),
    distance=st.floats(0.0, 1e6),
    alike=st.floats(LEAST_ALIKE, 1.0),
)
def test_only_weights_that_lie_back_are_not_adopted_and_not_for_ever(
    directions: list[float], distance: float, alike: float
) -> None:
    """A replica that is late is far from all, and takes what lies ahead of it; it may be the one that went astray."""
    bound, in_a_row = InfluenceBound(), 0
    for direction in directions:
        there = at(distance, alike=alike, direction=direction)
        if direction < NO_PULL and in_a_row < SELF_DOUBT:
            with pytest.raises(ConnectionAbortedError, match="go back") as refused:
                bound.check_adopted(there)
            assert not isinstance(refused.value, Implausible)
            in_a_row += 1
        else:
            bound.check_adopted(there)
            in_a_row = 0
        InfluenceBound().check_adopted(there, only=True)
        InfluenceBound().check_adopted(there._replace(values=LEAST_VALUES - 1))


def test_where_all_pull_apart_all_count_whole() -> None:
    bound = InfluenceBound()
    shares = [bound.share(f"p{number % 3}", at(1.0, direction=-0.3)) for number in range(12)]
    assert min(shares) == pytest.approx(0.4)
    assert shares[2:] == [1.0] * 10
    alone = InfluenceBound()
    for _ in range(20):
        assert alone.share("p", at(1.0, direction=-0.9), only=True) == 1.0
        assert alone.share("p", at(1.0, direction=-0.9)) == LEAST_PULL


def test_the_direction_is_seen_from_our_slow_weights() -> None:
    slow = draw(1, 10.0)
    learned = draw(2, 1.0)
    fast = plus(slow, learned)
    for sign in (1.0, -1.0):
        coded = encode(Format.FLOAT32, plus(slow, tuple(sign * tensor for tensor in learned))).coded
        assert measured(coded, slow, fast).direction == pytest.approx(sign, abs=1e-3)


def test_distances_that_grow_shut_nobody_out_for_ever() -> None:
    bound, refused = InfluenceBound(), 0
    for number in range(8):
        bound.share(f"p{number % 3}", at(1.0))
    for number in range(30):
        try:
            bound.share(f"p{number % 3}", at(30.0))
        except Implausible:
            refused += 1
    assert 0 < refused <= 3 * VOICES
    assert bound.share("p0", at(30.0)) == 1.0


def test_who_is_far_each_time_is_refused_and_once_is_clipped() -> None:
    bound = InfluenceBound()
    for number in range(9):
        bound.share(f"p{number % 3}", at(1.0))
    assert bound.share("p0", at(1.2 * CLIP)) == pytest.approx(1 / 1.2)
    for _ in range(OFTEN - 1):
        assert bound.share("liar", at(1.2 * CLIP)) == pytest.approx(1 / 1.2)
    with pytest.raises(Implausible, match="is usual"):
        bound.share("liar", at(1.2 * CLIP))


def test_whoever_refuses_everybody_doubts_itself() -> None:
    bound = InfluenceBound()
    for _ in range(SELF_DOUBT):
        with pytest.raises(ConnectionAbortedError):
            bound.share("mate", at(30.0))
    assert bound.share("mate", at(30.0)) == 1.0


def test_the_partners_that_are_remembered_are_bounded() -> None:
    bound = InfluenceBound()
    for number in range(3 * PARTNERS):
        assert bound.share(f"passing{number}", at(1.0)) == bound.share("steady", at(1.0)) == 1.0
    assert len(bound._seen) == PARTNERS
    assert "steady" in bound._seen, "the one met longest ago is forgotten"


def test_a_pair_that_agrees_to_the_bit_does_not_shut_out_a_third() -> None:
    bound = InfluenceBound()
    for _ in range(20):
        bound.share("mate", at(1e-4))
    assert bound.share("newcomer", at(CLIP * TYPICAL)) == 1.0


def test_one_partner_alone_does_not_move_what_is_usual() -> None:
    bound = InfluenceBound()
    for number in range(9):
        bound.share(f"p{number % 3}", at(1.0))
    for _ in range(100):
        with pytest.raises(Implausible):
            bound.share("liar", at(1000.0))
    assert bound.share("p0", at(2.0 * CLIP)) == pytest.approx(0.5)


def test_a_short_move_of_ours_makes_nobody_seem_far() -> None:
    bound = InfluenceBound()
    for number in range(9):
        bound.share(f"p{number % 3}", at(1.0))
    assert bound.share("p0", at(1.0)._replace(own=1e-9)) == 1.0


def test_few_values_only_have_to_be_finite() -> None:
    few = Deviation(8, 1e6, 1.0, alike=-1.0, direction=-1.0)
    assert InfluenceBound().share("p", few) == 1.0
    with pytest.raises(Implausible):
        InfluenceBound().share("p", few._replace(distance=math.inf))


@pytest.mark.parametrize("form", list(Format))
def test_every_form_is_measured_as_it_is_decoded(form: Format) -> None:
    fast, apart = draw(1, 10.0), draw(2, 1.0)
    steps = (0.02,) * len(SHAPES) if form.is_modular else ()
    coded = encode(form, plus(fast, apart), steps).coded
    deviation = measured(coded, fast, fast)
    assert deviation.distance == pytest.approx(1.0, rel=0.2)
    assert (deviation.values, deviation.own) == (1100, 0.0)


@pytest.mark.parametrize(("cosine", "counts"), [(0.15, False), (0.29, False), (0.31, True)])
def test_weights_count_from_a_cosine_of_three_tenths_on(cosine: float, counts: bool) -> None:
    """As docs/design/gossip.md says."""
    with contextlib.nullcontext() if counts else pytest.raises(Implausible, match="not like ours"):
        assert InfluenceBound().share("p", at(1.0, alike=cosine)) == 1.0


@pytest.mark.parametrize("near", ["mate", "another"])
def test_only_refusals_in_a_row_make_us_doubt_ourselves(near: str) -> None:
    bound = InfluenceBound()
    for _ in range(3 * SELF_DOUBT):
        with pytest.raises(ConnectionAbortedError):
            bound.share("mate", at(30.0))
        bound.share(near, at(1.0))


def test_a_replica_blames_nobody_for_the_distance_until_it_has_met() -> None:
    """It or its partner may return, or be slow, and so be rounds behind; no liar counts for that."""
    bound = InfluenceBound()
    for _ in range(2):
        with pytest.raises(ConnectionAbortedError, match="either may be behind") as refused:
            bound.share("honest", at(16.3))
        assert not isinstance(refused.value, Implausible)
    for lie in (at(1.0, alike=-0.9), at(math.inf)):
        with pytest.raises(Implausible):
            bound.share("liar", lie)
    assert bound.share("near", at(1.0)) == 1.0
    with pytest.raises(Implausible):
        bound.share("liar", at(30.0))


@quick
@given(times=st.floats(0.3, 10.0), seed=st.integers(0, 2**31), before=st.integers(0, 8))
def test_longer_or_shorter_weights_count_in_part(times: float, seed: int, before: int) -> None:
    """Beside honest partners; the mean is never drawn farther along our weights than the bound says."""
    bound, slow = InfluenceBound(), draw(seed, 10.0)
    fast = plus(slow, draw(seed + 1, 4.0))
    for number in range(before):
        bound.share(f"p{number % 3}", at(1.0, longer=0.003))
    coded = encode(Format.FLOAT32, tuple(tensor * times for tensor in fast)).coded
    deviation = measured(coded, slow, fast)
    assert deviation.longer == pytest.approx(times - 1.0, abs=1e-5)
    with contextlib.suppress(ConnectionAbortedError):
        assert bound.share("liar", deviation) * abs(deviation.longer) <= CLIP * TYPICAL_LENGTH * 1.001


def test_where_most_partners_are_longer_they_count_whole_and_an_only_one_does() -> None:
    bound, longer = InfluenceBound(), at(1.0, longer=0.2)
    shares = [bound.share(f"p{number % 3}", longer) for number in range(12)]
    assert shares[0] == pytest.approx(0.1)
    assert set(shares[4:]) == {1.0}
    assert InfluenceBound().share("p", longer, only=True) == 1.0
    assert InfluenceBound(from_zero=True).share("p", longer) == 1.0


def test_a_replica_that_doubts_itself_before_it_has_met_anybody_measures_the_next_one() -> None:
    bound = InfluenceBound()
    for _ in range(SELF_DOUBT):
        with pytest.raises(ConnectionAbortedError):
            bound.check_adopted(at(1.0, direction=-1.0))
    assert bound.share("p", at(1.0)) == 1.0


@quick
@given(alike=st.floats(-1.0, 1.0), distance=st.floats(0.0, CLIP))
def test_weights_that_began_at_zero_need_not_be_alike(alike: float, distance: float) -> None:
    deviation = at(distance, alike=alike)
    assert InfluenceBound(from_zero=True).share("p", deviation) == 1.0
    if alike < LEAST_ALIKE:
        with pytest.raises(Implausible, match="not like ours"):
            InfluenceBound().share("p", deviation)
    with pytest.raises(ConnectionAbortedError, match="is usual"):
        InfluenceBound(from_zero=True).share("p", at(2 * REFUSE, alike=alike))


@quick
@given(steps=st.integers(1, 64), whole=st.integers(1, 64), distances=st.lists(st.floats(0.1, 12.0), max_size=8))
def test_a_machine_of_few_steps_measures_as_one_that_took_them_all(
    steps: int, whole: int, distances: list[float]
) -> None:
    """A move grows at least with the square root of its steps: few of them make no honest partner implausible."""
    fraction = min(1.0, steps / whole)
    slow, fast = InfluenceBound(), InfluenceBound()
    for number, distance in enumerate(distances):
        told = []
        for bound, share, own in ((slow, fraction, math.sqrt(fraction)), (fast, 1.0, 1.0)):
            try:
                found = bound.share(f"p{number % 2}", at(distance)._replace(own=own), round_fraction=share)
            except ConnectionAbortedError:
                found = 0.0
            told.append(found)
        assert told[0] == pytest.approx(told[1])
