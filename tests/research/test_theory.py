"""The recursion of second moments is the production rule's, and the theory benchmark measures what it says."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import user_error

from gossip.rule.outer_step import Outer, OuterState
from gossip.rule.stability import stability_bound
from noloco_node.errors import Exit
from noloco_node.run.runfile import decode_run
from research.theory.moments import (
    MANY,
    NEVER,
    Law,
    Moments,
    Phase,
    advance,
    contraction,
    critical_gamma,
    fastest,
    inner_phase,
    stationary,
)
from research.theory.noise import exponents, followed, foretold
from research.theory.pair_step import step_alone, step_pair
from research.theory.report import Report
from research.theory.stable_range import RUN
from research.theory.swarm import Swarm, growth

MATCHINGS = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)))
rules = st.builds(
    lambda alpha, beta, gamma: Law(alpha=alpha, beta=beta, gamma=gamma, replicas=4),
    st.floats(0.0, 0.95),
    st.floats(0.1, 1.5),
    st.floats(0.1, 1.9),
)
few = settings(max_examples=25)


def production_map(law: Law, pairs: tuple[tuple[int, int], ...], met: tuple[bool, ...]) -> torch.Tensor:
    """One outer round of four replicas as a matrix [12, 12], columns from the production rule on unit vectors.

    A replica is (phi, delta, theta), delta being minus the momentum.
    """
    units = torch.eye(12, dtype=torch.float64).reshape(12, 4, 3)
    after = units.clone()
    outer = Outer(law.alpha, law.beta, law.gamma)
    for pair, together in zip(pairs, met, strict=True):
        for me, other in (pair, pair[::-1]):
            state = OuterState((units[:, me, 0],), (-units[:, me, 1],))
            fast, theirs, slow = units[:, me, 2], units[:, other, 2], units[:, other, 0]
            if together:
                stepped = step_pair(state, (fast,), (theirs,), (slow,), outer)
            elif law.patience == 0:
                stepped = step_alone(state, (fast,), outer)
            else:
                continue
            after[:, me, 0] = stepped.state.slow[0]
            after[:, me, 1] = -stepped.state.momentum[0]
            after[:, me, 2] = fast + stepped.correction[0]
    return after.reshape(12, 12).T


def exchangeable(own: np.ndarray, cross: np.ndarray) -> np.ndarray:
    return np.kron(np.eye(4), own - cross) + np.kron(np.ones((4, 4)), cross)


@few
@given(rules, st.sampled_from([0, NEVER]), st.floats(0.0, 0.9), st.integers(0, 2**31))
def test_the_recursion_is_the_production_rule_averaged_over_all_matchings(
    rule: Law, patience: int, unmet: float, seed: int
) -> None:
    law = replace(rule, unmet=unmet, patience=patience)
    drawn = np.random.default_rng(seed).normal(size=(2, 3, 5))
    cross = drawn[0] @ drawn[0].T
    own = cross + drawn[1] @ drawn[1].T
    phase = Phase(keep=0.8, noise=0.3)
    train = np.kron(np.eye(4), np.diag([1.0, 1.0, phase.keep]))
    trained = train @ exchangeable(own, cross) @ train.T + np.kron(np.eye(4), np.diag([0.0, 0.0, phase.noise]))
    total = np.zeros((12, 12))
    for pairs in MATCHINGS:
        for met in ((True, True), (True, False), (False, True), (False, False)):
            chance = np.prod([1 - unmet if together else unmet for together in met]) / len(MATCHINGS)
            step = production_map(law, pairs, met).numpy()
            total += chance * step @ trained @ step.T
    after = advance(Moments(own, cross), law, phase)
    scale = np.abs(total).max()
    np.testing.assert_allclose(total, exchangeable(after.own, after.cross), rtol=0, atol=1e-11 * scale)


@few
@given(st.floats(0.0, 0.95), st.integers(1, 500), st.floats(0.0, 0.9))
def test_the_closed_form_is_where_the_mean_square_stops_contracting(alpha: float, pairs: int, unmet: float) -> None:
    law = Law(alpha=alpha, replicas=2 * pairs, unmet=unmet, patience=0)
    edge = critical_gamma(law)
    assert contraction(replace(law, gamma=0.98 * edge)) < 1.0 + 1e-12
    assert contraction(replace(law, gamma=edge)) == pytest.approx(1.0, abs=1e-6)
    assert contraction(replace(law, gamma=1.02 * edge)) > 1.0
    deferring = replace(law, patience=NEVER)
    assert critical_gamma(deferring) == critical_gamma(replace(law, unmet=0.0))
    met = contraction(replace(law, unmet=0.0))
    assert contraction(deferring) == pytest.approx((1 - unmet) * met + unmet)


def test_special_cases_of_the_closed_form() -> None:
    for alpha in (0.0, 0.3, 0.5, 0.9):
        assert critical_gamma(Law(alpha=alpha)) == pytest.approx(stability_bound(alpha))
        assert critical_gamma(Law(alpha=alpha, replicas=2)) == pytest.approx(2 * (1 + alpha))
    assert critical_gamma(Law(unmet=0.5, patience=0)) == pytest.approx(1.2)
    assert critical_gamma(Law(unmet=0.5, patience=4)) == pytest.approx(1.4769, abs=1e-4)
    assert contraction(Law()) == pytest.approx(0.7001, abs=1e-4)
    assert contraction(Law(alpha=0.9)) == pytest.approx(1.0985, abs=1e-4)
    assert fastest(Law()) == (pytest.approx(0.30), pytest.approx(0.625, abs=1e-4))


def test_the_inner_phase_is_its_own_sum() -> None:
    keep, noise = 1.0, 0.0
    for _ in range(7):
        keep, noise = keep * (1 - 0.3), noise * (1 - 0.3) ** 2 + (0.3 * 1.5) ** 2
    assert inner_phase(0.3, 7, 1.5) == pytest.approx((keep, noise))


def test_a_stationary_state_stays_and_its_exponent_is_two_where_the_rate_is_small() -> None:
    law, rates = Law(replicas=32), [1e-6, 2e-6]
    found = [stationary(law, inner_phase(rate, 50)) for rate in rates]
    after = advance(found[0], law, inner_phase(rates[0], 50))
    np.testing.assert_allclose(after.own, found[0].own, rtol=1e-6)
    assert exponents(rates, [moments.among() for moments in found]) == [pytest.approx(2.0, abs=1e-3)]
    # What all have in common is plain SGD's: it goes with the rate, not with its square.
    assert exponents(rates, [moments.of_the_mean(32) for moments in found]) == [pytest.approx(1.0, abs=1e-3)]
    many = stationary(Law(replicas=MANY), inner_phase(rates[0], 50))
    assert many.among() / inner_phase(rates[0], 50).noise == pytest.approx(1.31, abs=5e-3)


def test_simulated_replicas_have_the_variance_that_the_recursion_says() -> None:
    law, span = Law(replicas=16), (10, 40)
    found = [followed(law, (0.02, 10, None), span, 256, seed).slow for seed in range(4)]
    assert sum(found) / 4 == pytest.approx(foretold(law, 0.02, 10, span).slow, rel=0.05)


def test_unmet_replicas_that_defer_contract_where_solo_steps_diverge() -> None:
    # alpha 0.5, half of the pairs not met: the bound is 1.50 with deferral, 1.20 with solo steps.
    between = Law(gamma=1.35, replicas=512, unmet=0.5)
    assert growth(replace(between, patience=NEVER), 80, 20, 0, 8) < 0.98
    assert growth(replace(between, patience=0), 80, 20, 0, 8) > 1.02


def test_a_solo_step_coasts_and_a_deferral_leaves_everything() -> None:
    for patience in (0, NEVER):
        swarm = Swarm(Law(replicas=4, unmet=1.0, patience=patience), 8, 0, torch.float64)
        swarm.scatter()
        swarm.momentum.fill_(2.0)
        slow = swarm.slow.clone()
        swarm.gossip()
        assert torch.equal(swarm.momentum, torch.full_like(slow, 1.0 if patience == 0 else 2.0))
        assert torch.equal(swarm.slow, slow - 1.0 if patience == 0 else slow)
        assert torch.equal(swarm.fast, swarm.slow)
        assert swarm.solo == (4 if patience == 0 else 0)
        assert swarm.deferred == (0 if patience == 0 else 4)


def test_the_diverging_run_file_is_refused() -> None:
    with user_error(Exit.CONFIG, r"outer\.gamma = 0\.7"):
        decode_run(RUN, "diverges.toml")
    decode_run(RUN.replace("alpha = 0.9", "alpha = 0.5"), "converges.toml")


def test_a_figure_that_is_off_is_reported_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    assert report.near("a factor", 0.707, 0.7, 0.02) == "+1.0 %"
    assert report.verdict() == 0
    report.near("another factor", 0.75, 0.7, 0.02)
    assert report.verdict() == 1
    assert "off: another factor: 0.75, expected 0.7" in capsys.readouterr().out
