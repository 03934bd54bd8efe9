"""The laws of the outer rule, a trajectory worked by hand, and where its disagreement contracts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.rule.outer_step import Outer, OuterState, Tensors, mean, outer_step, pseudo_gradient, step_alone, step_pair
from gossip.rule.stability import stability_bound

REFERENCE = Outer(alpha=0.5, beta=0.7, gamma=0.7)
SHAPES = ((3, 2), (5,), ())

coefficients = st.floats(min_value=0.0, max_value=1.5)
outers = st.builds(Outer, coefficients, coefficients, coefficients)
seeds = st.integers(min_value=0, max_value=2**31)
few = settings(max_examples=40, deadline=None)


def draw(generator: torch.Generator) -> Tensors:
    return tuple(torch.randn(shape, generator=generator) for shape in SHAPES)


def draw_pair(seed: int) -> tuple[OuterState, Tensors, OuterState, Tensors]:
    generator = torch.Generator().manual_seed(seed)
    return (
        OuterState(draw(generator), draw(generator)),
        draw(generator),
        OuterState(draw(generator), draw(generator)),
        draw(generator),
    )


def close(a: Tensors, b: Tensors, tolerance: float = 2e-6) -> bool:
    return all(torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True))


def distance(a: Tensors, b: Tensors) -> float:
    return math.sqrt(sum(float((x.double() - y.double()).square().sum()) for x, y in zip(a, b, strict=True)))


@few
@given(seeds, outers)
def test_equals_the_reference_rule_as_the_paper_means_it(seed: int, outer: Outer) -> None:
    # Equations 1 to 3 with the sign of the beta term put right: delta is minus our momentum, Delta minus g.
    state, fast, other, other_fast = draw_pair(seed)
    after = step_pair(state, fast, other_fast, other.slow, outer)
    for number in range(len(SHAPES)):
        phi_i, phi_j = state.slow[number].double(), other.slow[number].double()
        moves = (fast[number].double() - phi_i, other_fast[number].double() - phi_j)
        delta = (
            outer.alpha * -state.momentum[number].double()
            + outer.beta / 2 * (moves[0] + moves[1])
            - outer.gamma * (phi_i - (phi_i + phi_j) / 2)
        )
        assert torch.allclose(after.state.momentum[number].double(), -delta, atol=2e-6)
        assert torch.allclose(after.state.slow[number].double(), phi_i + delta, atol=2e-6)
        assert torch.allclose(after.correction[number].double(), phi_i + delta - fast[number].double(), atol=4e-6)


@few
@given(seeds, coefficients, coefficients)
def test_only_fast_weights_are_needed_where_gamma_equals_beta(seed: int, alpha: float, beta: float) -> None:
    state, fast, other, other_fast = draw_pair(seed)
    outer = Outer(alpha, beta, beta)
    without = outer_step(state, mean(fast, other_fast), None, outer)
    with_slow = outer_step(state, mean(fast, other_fast), mean(state.slow, other.slow), outer)
    assert close(without.slow, with_slow.slow)
    assert close(without.momentum, with_slow.momentum)


def test_slow_mean_is_required_where_gamma_differs() -> None:
    state, fast, _, _ = draw_pair(0)
    with pytest.raises(ValueError, match="gamma differs"):
        outer_step(state, fast, None, Outer(0.5, 0.7, 0.6))


@few
@given(seeds, outers, coefficients)
def test_the_mean_of_the_pair_does_not_depend_on_gamma(seed: int, outer: Outer, gamma: float) -> None:
    state, fast, other, other_fast = draw_pair(seed)

    def pair_mean(rule: Outer) -> Tensors:
        first = step_pair(state, fast, other_fast, other.slow, rule).state
        second = step_pair(other, other_fast, fast, state.slow, rule).state
        return mean(first.slow, second.slow)

    assert close(pair_mean(outer), pair_mean(outer._replace(gamma=gamma)), 4e-6)


@few
@given(seeds, outers)
def test_without_momentum_the_gap_shrinks_by_one_minus_gamma(seed: int, outer: Outer) -> None:
    state, fast, other, other_fast = draw_pair(seed)
    still = tuple(torch.zeros(shape) for shape in SHAPES)
    first = step_pair(OuterState(state.slow, still), fast, other_fast, other.slow, outer).state
    second = step_pair(OuterState(other.slow, still), other_fast, fast, state.slow, outer).state
    for before, after in zip(
        pseudo_gradient(state.slow, other.slow), pseudo_gradient(first.slow, second.slow), strict=True
    ):
        assert torch.allclose(after, (1 - outer.gamma) * before, atol=5e-6)


def test_alone_it_is_heavy_ball_on_ones_own_pseudo_gradient() -> None:
    generator = torch.Generator().manual_seed(3)
    outer = Outer(alpha=0.6, beta=0.4, gamma=0.9)
    start = draw(generator)
    state = OuterState(start, tuple(torch.zeros(shape) for shape in SHAPES))
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    heavy_ball = torch.optim.SGD(parameters, lr=outer.beta, momentum=outer.alpha)
    for _ in range(5):
        fast = draw(generator)
        for parameter, theta in zip(parameters, fast, strict=True):
            parameter.grad = parameter.detach() - theta
        heavy_ball.step()
        state = step_alone(state, fast, outer).state
    assert close(state.slow, tuple(parameter.detach() for parameter in parameters))


@few
@given(seeds, outers)
def test_the_two_sides_compute_the_same_means_to_the_bit(seed: int, outer: Outer) -> None:
    state, fast, _, other_fast = draw_pair(seed)
    assert all(torch.equal(x, y) for x, y in zip(mean(fast, other_fast), mean(other_fast, fast), strict=True))
    # A pair with equal slow weights and momentum ends equal to the bit, whatever the fast ones were.
    twin = OuterState(state.slow, state.momentum)
    first = step_pair(state, fast, other_fast, twin.slow, outer).state
    second = step_pair(twin, other_fast, fast, state.slow, outer).state
    assert all(torch.equal(x, y) for x, y in zip(first.slow, second.slow, strict=True))


def test_a_trajectory_worked_by_hand() -> None:
    # alpha 1/2, beta = gamma = 3/4. a starts at phi 8, m 0; b at phi 4, m 4. All numbers are exact in binary.
    outer = Outer(alpha=0.5, beta=0.75, gamma=0.75)
    a = OuterState((torch.tensor(8.0),), (torch.tensor(0.0),))
    b = OuterState((torch.tensor(4.0),), (torch.tensor(4.0),))
    # Round 1: fast weights 4 and 0, mean 2.
    # a: m = 0 + 3/4 (8 - 2) = 4.5, phi = 3.5. b: m = 2 + 3/4 (4 - 2) = 3.5, phi = 0.5.
    fast_a, fast_b = (torch.tensor(4.0),), (torch.tensor(0.0),)
    after_a, after_b = step_pair(a, fast_a, fast_b, None, outer), step_pair(b, fast_b, fast_a, None, outer)
    assert (after_a.state.momentum[0].item(), after_a.state.slow[0].item()) == (4.5, 3.5)
    assert (after_b.state.momentum[0].item(), after_b.state.slow[0].item()) == (3.5, 0.5)
    assert (after_a.correction[0].item(), after_b.correction[0].item()) == (-0.5, 0.5)
    # Round 2: fast weights 3 and 1, mean 2.
    # a: m = 2.25 + 3/4 (3.5 - 2) = 3.375, phi = 0.125. b: m = 1.75 + 3/4 (0.5 - 2) = 0.625, phi = -0.125.
    fast_a, fast_b = (torch.tensor(3.0),), (torch.tensor(1.0),)
    final_a = step_pair(after_a.state, fast_a, fast_b, None, outer).state
    final_b = step_pair(after_b.state, fast_b, fast_a, None, outer).state
    assert (final_a.momentum[0].item(), final_a.slow[0].item()) == (3.375, 0.125)
    assert (final_b.momentum[0].item(), final_b.slow[0].item()) == (0.625, -0.125)


def test_nothing_is_written_into_the_arguments() -> None:
    state, fast, other, other_fast = draw_pair(11)
    given_tensors = (*state.slow, *state.momentum, *fast, *other.slow, *other_fast)
    copies = [tensor.clone() for tensor in given_tensors]
    for outer in (REFERENCE, Outer(0.5, 0.7, 0.3)):
        stepped = step_pair(state, fast, other_fast, other.slow, outer)
        alone = step_alone(state, fast, outer)
        for result in (stepped, alone):
            for tensor in (*result.state.slow, *result.state.momentum, *result.correction):
                tensor.fill_(7.0)
    assert all(torch.equal(before, after) for before, after in zip(copies, given_tensors, strict=True))


def growth(alpha: float, gamma: float, rounds: int) -> float:
    """Factor on the variance of the disagreement a round, many scalars in random disjoint pairs, no inner progress."""
    generator = torch.Generator().manual_seed(1)
    replicas = 8192
    state = OuterState((torch.randn(replicas, generator=generator),), (torch.zeros(replicas),))
    variances = []
    for _ in range(rounds):
        order = torch.randperm(replicas, generator=generator)
        partner = torch.empty_like(order)
        half = replicas // 2
        partner[order[:half]], partner[order[half:]] = order[half:], order[:half]
        fast = state.slow
        state = step_pair(state, fast, (fast[0][partner],), (fast[0][partner],), Outer(alpha, 0.7, gamma)).state
        variances.append(float(state.slow[0].var()))
    late = rounds // 3
    return float((variances[-1] / variances[late - 1]) ** (1 / (rounds - late)))


@pytest.mark.parametrize(
    ("alpha", "gamma", "factor"), [(0.0, 1.0, 0.500), (0.5, 0.7, 0.700), (0.5, 0.3, 0.625), (0.7, 0.7, 0.891)]
)
def test_disagreement_contracts_as_the_second_moments_say(alpha: float, gamma: float, factor: float) -> None:
    assert growth(alpha, gamma, 30) == pytest.approx(factor, rel=0.04)


def test_disagreement_diverges_where_the_printed_range_admits_it() -> None:
    assert growth(0.9, 0.7, 60) == pytest.approx(1.0985, rel=0.02)
    # The range as the paper prints it: alpha < gamma < sqrt(2 + alpha^2); and (0.7, 1.1) lies inside it.
    assert 0.7 < 1.1 < math.sqrt(2 + 0.7**2)
    assert growth(0.7, 1.1, 60) > 1.0


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8])
def test_the_stability_bound_is_where_growth_crosses_one(alpha: float) -> None:
    bound = stability_bound(alpha)
    assert growth(alpha, 0.93 * bound, 60) < 1.0 < growth(alpha, 1.07 * bound, 60)


def test_stability_bound_in_numbers() -> None:
    assert [round(stability_bound(alpha), 2) for alpha in (0.0, 0.3, 0.5, 0.7, 0.9)] == [2.0, 1.82, 1.5, 1.02, 0.38]


@few
@given(seeds)
def test_pseudo_gradient_is_slow_minus_fast(seed: int) -> None:
    state, fast, _, _ = draw_pair(seed)
    moved = tuple(phi - g for phi, g in zip(state.slow, pseudo_gradient(state.slow, fast), strict=True))
    assert distance(moved, fast) < 1e-5
