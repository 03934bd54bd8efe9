"""How often spot checks would shut out an honest replica: their verdicts on what honest replicas really returned.

    python -m benchmarks.robustness.false_alarms --seeds 0 1 2
    python -m benchmarks.robustness.false_alarms --seeds 0 1 2 --slowness 1 1 1 10

The clean swarm of `training_attacks` trains, and every second microbatch is computed by two more replicas. Of these
distances stretches of 16 are drawn by chance until 10^5 checks have been judged, as one sender would: a pair first,
the third where the two disagree. The random order is harder than the real one, for what is usual moves with it. So
are stretches of four times as many gradients of all replicas, until the offsets of 10^5 have been judged.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from random import Random
from statistics import quantiles
from unittest import mock

import torch
from torch import Tensor

from benchmarks.robustness.training_attacks import outcome, prepared
from pipeline.messages import Gradient, Microbatch
from pipeline.spot_checks import SpotChecks, Verdicts

CHECKS, STRETCH = 100_000, 16
EVERY = 2
Apart = dict[tuple[str, str], float]
"""Distances between three answers to one microbatch."""


Mean = tuple[str, Tensor]
"""A replica, and the mean of a gradient of it."""


def recorded(seed: int, slowness: Sequence[float]) -> tuple[list[Apart], list[Mean]]:
    """Return what three replicas were apart, microbatch by microbatch, and the means of all gradients."""
    found: list[Apart] = []
    means: list[Mean] = []
    calls: Counter[SpotChecks] = Counter()

    async def check(checks: SpotChecks, peer: str, microbatch: Microbatch, reply: Gradient, _: float) -> Gradient:
        calls[checks] += 1
        means.append((peer, checks._mean(reply)))
        if calls[checks] % EVERY == 0:
            others = [hop.peer for hop in checks._ways.hops() if hop.peer != peer]
            answers = {peer: reply}
            for other in checks._rng.sample(others, min(2, len(others))):
                answer = await checks._ask(other, microbatch)
                if answer is not None:
                    answers[other] = answer
            if len(answers) > 2:
                pairs = combinations(answers, 2)
                found.append({(a, b): checks._distance(answers[a], answers[b], microbatch) for a, b in pairs})
        return reply

    with mock.patch.object(SpotChecks, "check", check):
        outcome(prepared(seed, slowness=slowness))
    return found, means


def judged(found: list[Apart], rng: Random) -> Counter[str]:
    """Return the verdicts of 10^5 checks, and how many asked a third."""
    verdicts, counts = Verdicts(deep=False), Counter[str]()
    replicas = sorted({peer for apart in found for pair in apart for peer in pair})
    for begun in range(0, CHECKS, STRETCH):
        first = rng.randrange(len(found) - STRETCH)
        for now_s, apart in enumerate(found[first : first + STRETCH], begun):
            verdicts.paroled(now_s)
            pair = rng.choice(list(apart))
            if not verdicts.agree(*pair, apart[pair]):
                counts["third"] += 1
                counts.update(str(verdict.finding) for verdict in verdicts.judge(apart, replicas, now_s))
    return counts


def watched(means: list[Mean], rng: Random) -> Counter[str]:
    """Return the verdicts on the offsets of 10^5 gradients."""
    verdicts, counts = Verdicts(deep=False), Counter[str]()
    replicas, length = sorted({peer for peer, _ in means}), 4 * STRETCH
    for begun in range(0, CHECKS, length):
        first = rng.randrange(len(means) - length)
        for now_s, (peer, each) in enumerate(means[first : first + length], begun):
            verdicts.paroled(now_s)
            counts.update(str(verdict.finding) for verdict in verdicts.watch(peer, each, replicas, now_s))
    return counts


def main() -> None:
    """Print verdicts by seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--slowness", nargs="+", type=float, default=[1.0], help="of each stage's replicas in turn")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    for seed in wanted.seeds:
        found, means = recorded(seed, wanted.slowness)
        cuts = quantiles((distance for apart in found for distance in apart.values()), n=20)
        print(f"seed {seed}: {len(found)} microbatches, distances {cuts[9]:.3f} (median), {cuts[18]:.3f} (95 %)")
        print(f"    of {CHECKS:,} checks {dict(judged(found, Random(seed)))}")
        print(f"    of {CHECKS:,} gradients {dict(watched(means, Random(seed)))}", flush=True)


if __name__ == "__main__":
    main()
