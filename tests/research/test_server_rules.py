"""The rules of a central server: what each must equal, in double precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.rule.outer_step import Delay, Tensors
from research.laboratory.methods.server_rules import (
    Rule,
    Server,
    ServerState,
    begin,
    buffered,
    compensated,
    delayed_nesterov,
    discounted,
    heavy_ball,
    nesterov,
    synchronous,
)

SHAPES = ((3, 2), (5,), ())
servers = st.builds(Server, st.floats(0.01, 1.5), st.floats(0.0, 0.99))
periods = st.integers(1, 6)
seeds = st.integers(0, 2**31)
rules = st.sampled_from([nesterov, heavy_ball])
few = settings(max_examples=40)


def draw(generator: torch.Generator) -> Tensors:
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES)


def draw_server(seed: int, workers: int) -> tuple[ServerState, list[Tensors]]:
    generator = torch.Generator().manual_seed(seed)
    return ServerState(draw(generator), draw(generator)), [draw(generator) for _ in range(workers)]


def close(a: ServerState, b: ServerState) -> bool:
    pairs = [*zip(a.weights, b.weights, strict=True), *zip(a.momentum, b.momentum, strict=True)]
    return all(torch.allclose(x, y, rtol=1e-12, atol=1e-12) for x, y in pairs) and a.arrivals == b.arrivals


@few
@given(seeds, servers)
def test_nesterov_is_the_papers_equation_and_torchs_optimiser(seed: int, server: Server) -> None:
    state, arrivals = draw_server(seed, 3)
    mu = server.momentum
    by_equation = [
        theta - server.rate * (mu**2 * m + (1 + mu) * g)
        for theta, m, g in zip(state.weights, state.momentum, arrivals[0], strict=True)
    ]
    after = nesterov(state, arrivals[0], server)
    assert all(torch.allclose(x, y, rtol=1e-12, atol=1e-12) for x, y in zip(after.weights, by_equation, strict=True))
    for rule, looks_ahead in ((nesterov, True), (heavy_ball, False)):
        state = begin(state.weights)
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in state.weights]
        reference = torch.optim.SGD(parameters, server.rate, mu, nesterov=looks_ahead and mu > 0)
        for arrival in arrivals:
            for parameter, g in zip(parameters, arrival, strict=True):
                parameter.grad = g.clone()
            reference.step()
            state = rule(state, arrival, server)
        assert all(torch.allclose(x, y, rtol=1e-12) for x, y in zip(state.weights, parameters, strict=True))


@few
@given(seeds, servers, periods)
def test_a_cycle_of_equal_workers_is_one_synchronous_step(seed: int, server: Server, workers: int) -> None:
    state, arrivals = draw_server(seed, workers)
    for _ in range(2):
        expected = synchronous(nesterov, state, arrivals, server)
        delayed = state
        for arrival in arrivals:
            delayed = delayed_nesterov(delayed, arrival, server, Delay(workers, 0.0))
        assert close(delayed, expected)
        state = expected


@few
@given(seeds, servers, periods, rules)
def test_a_full_buffer_is_one_synchronous_step_and_nothing_moves_before(
    seed: int, server: Server, size: int, rule: Rule
) -> None:
    state, arrivals = draw_server(seed, size)
    after = state
    for number, arrival in enumerate(arrivals):
        assert (after.weights, after.momentum, after.arrivals) == (state.weights, state.momentum, number)
        after = buffered(rule, after, arrival, server, size)
    assert close(after, synchronous(rule, state, arrivals, server))


@few
@given(seeds, servers, periods, st.floats(0.0, 1.0))
def test_the_spread_moves_the_old_momentum_forward_and_nothing_else(
    seed: int, server: Server, period: int, fraction: float
) -> None:
    state, arrivals = draw_server(seed, period)
    spread = fraction / period
    plain, spread_out = state, state
    for arrival in arrivals:
        plain = delayed_nesterov(plain, arrival, server, Delay(period, 0.0))
        spread_out = delayed_nesterov(spread_out, arrival, server, Delay(period, spread))
    # The others of a cycle apply c of the momentum before it, and the last as much less of the one after it.
    for theta, other, before, after in zip(
        plain.weights, spread_out.weights, state.momentum, plain.momentum, strict=True
    ):
        shift = server.rate * server.momentum * spread * (period - 1) * (before - after)
        assert torch.allclose(other, theta - shift, rtol=1e-11, atol=1e-11)
    assert all(torch.equal(x, y) for x, y in zip(plain.momentum, spread_out.momentum, strict=True))


def moved(after: ServerState, before: ServerState) -> float:
    return float(before.weights[0] - after.weights[0])


def test_four_equal_pseudo_gradients_one_after_the_other_go_much_too_far() -> None:
    server, zero, one = Server(1.0, 0.9), torch.tensor(0.0).double(), torch.tensor(1.0).double()
    for momentum, g, naive, at_once in ((zero, one, 12.1441, 1.9), (one, zero, 2.78559, 0.81)):
        state = ServerState((zero,), (momentum,))
        after = state
        for _ in range(4):
            after = nesterov(after, (g,), server)
        assert moved(after, state) == pytest.approx(naive, abs=1e-12)
        assert moved(synchronous(nesterov, state, [(g,)] * 4, server), state) == pytest.approx(at_once, abs=1e-12)
        delayed = state
        for _ in range(4):
            delayed = delayed_nesterov(delayed, (g,), server, Delay(4, 0.0))
        assert moved(delayed, state) == pytest.approx(at_once, abs=1e-12)


@few
@given(seeds, st.integers(0, 50))
def test_a_later_pseudo_gradient_counts_less_and_in_the_same_direction(seed: int, staleness: int) -> None:
    (arrived, *_) = draw_server(seed, 1)[1]
    assert all(torch.equal(x, y) for x, y in zip(discounted(arrived, 0), arrived, strict=True))
    worth = discounted(arrived, staleness)
    assert all(torch.allclose(x * (1 + staleness) ** 0.5, y) for x, y in zip(worth, arrived, strict=True))


@few
@given(seeds, st.floats(0.0, 30.0))
def test_delay_compensation_follows_a_bowl_to_where_the_weights_are(seed: int, strength: float) -> None:
    state, (arrived, moved) = draw_server(seed, 2)
    started = state.weights
    now = tuple(theta + step for theta, step in zip(started, moved, strict=True))
    unmoved = compensated(arrived, started, started, strength)
    assert all(torch.equal(x, y) for x, y in zip(unmoved, arrived, strict=True))
    # The curvature that it assumes is strength times the square: exact for a quadratic that has it.
    there = compensated(arrived, started, now, strength)
    for g, theta, other, corrected in zip(arrived, started, now, there, strict=True):
        assert torch.allclose(corrected, g + strength * g**2 * (other - theta), rtol=1e-9, atol=1e-9)
