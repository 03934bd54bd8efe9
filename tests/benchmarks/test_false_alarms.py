"""The benchmark of false alarms: what it counts is what the verdicts say, and odd replicas are odd."""

from itertools import combinations
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.robustness.false_alarms import KINDS, LOSSY, Apart, in_precision, judged, swarm, watched

REPLICAS = "abcd"


def answers(rng: Random, liar: str = "") -> Apart:
    """Return distances between three answers, of which one is opposite to the others if the liar's is among them."""
    asked = rng.sample(REPLICAS, 3)
    return {pair: 1.9 if liar in pair else rng.uniform(0.04, 0.06) for pair in combinations(asked, 2)}


@settings(max_examples=20)
@given(st.integers(0, 99))
def test_a_liar_is_counted_and_replicas_that_are_alike_are_not(seed: int) -> None:
    rng = Random(seed)
    assert not judged([answers(rng) for _ in range(64)], rng, 640)["quarantined"]
    assert judged([answers(rng, "b") for _ in range(64)], rng, 640)["quarantined"] > 0


@settings(max_examples=20)
@given(st.integers(0, 99))
def test_a_constant_offset_is_counted_and_noise_is_not(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = [(REPLICAS[number % 4], torch.randn(64, generator=generator) / 40.0) for number in range(256)]
    pushed = [(peer, each + (0.09 if peer == "b" else 0.0)) for peer, each in noise]
    assert watched([noise], Random(seed), 640) == {"judged": 768}
    assert watched([pushed], Random(seed), 640)["quarantined"] > 0


def test_odd_swarms_are_odd() -> None:
    setups = {kind: swarm(kind, 0) for kind in KINDS}
    assert {kind for kind, setup in setups.items() if setup.scenario.network == LOSSY} == {"lossy", "all"}
    assert {kind for kind, setup in setups.items() if setup.run.inner.state == "int8"} == {"int8", "all"}
    assert {kind for kind, setup in setups.items() if max(setup.scenario.devices.slowness) > 1.0} == {"slow", "all"}
    ids = torch.arange(128).view(4, 32)
    computed = [
        in_precision(setups["mixed"], 0, precision).infer(ids) for precision in (None, torch.bfloat16, torch.float16)
    ]
    assert not any(torch.equal(one, other) for one, other in combinations(computed, 2))
    assert all(torch.allclose(computed[0], each, atol=0.05) for each in computed[1:])
