"""How often honest replicas of odd kinds would be shut out: verdicts of spot checks on what they really returned.

    python -m benchmarks.robustness.false_alarms                               # all kinds, three seeds: 10^6 checks
    python -m benchmarks.robustness.false_alarms --kinds slow all --seeds 0 1  # some
    python -m benchmarks.robustness.false_alarms --keep DIR                    # goes on where it was interrupted

The clean swarm of `training_attacks` trains, and every second microbatch is computed by two more replicas. A sender
judges each of these microbatches once: a pair first, by chance, the third where the two disagree. It sees them in
stretches of 16 in random order, which is harder than the real one, for what is usual moves with it. New senders do so
until `--checks` checks have been judged. So it is with the gradients that each sender got, and their offsets.

    alike     float32 on equal machines, one text
    mixed     of four replicas of a stage one computes in bfloat16, one in float16
    lossy     2 % of messages are lost with their stream, 10 % come two seconds late
    slow      one replica of four of a stage is ten times slower
    domain    one source of four reads another language: the same text with all tokens exchanged
    int8      the moments of the inner optimiser are kept in 8 bits
    all       all of these together

`--live` runs each swarm as it is instead, and prints what its own nodes found: verdicts of their checks, and the
gradients, activations and meetings that a bound refused.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, product
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from benchmarks.robustness.training_attacks import CLEAN, COUNTED, Outcome, outcome, prepared
from noloco_node.machine import device
from noloco_node.machine.interface import StageModel
from noloco_node.sim.hardware.memory_host import BlockText
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.scenario import NetworkConfig
from noloco_node.sim.scenario.setup import SimSetup
from pipeline.messages import Gradient, Microbatch
from pipeline.spot_checks import CheckFinding, SpotChecks, Verdicts
from tests.explorer.attacks import Attack

CHECKS, STRETCH = 50_000, 16
EVERY = 2
VOCABULARY = 384
Apart = dict[tuple[str, str], float]
"""Distances between three answers to one microbatch."""


Mean = tuple[str, Tensor]
"""A replica, and the mean of a gradient of it."""


LOSSY = NetworkConfig(loss=0.02, late=0.1, late_s=2.0)
ODD = ("lossy", "slow", "int8", "mixed", "domain")
KINDS: dict[str, tuple[str, ...]] = {"alike": (), **{kind: (kind,) for kind in ODD}, "all": ODD}
"""By name, what is odd."""
PRECISIONS = {"r1": torch.bfloat16, "r2": torch.float16}
"""Of these replicas of each stage; the others compute in float32."""
FOREIGN = "s0r3"
"""The source that reads another language."""


class ForeignText(BlockText):
    """Text whose tokens are exchanged, always alike."""

    async def draw(self) -> Tensor:
        return torch.arange(VOCABULARY).flip(0)[await super().draw()]


def swarm(kind: str, seed: int) -> SimSetup:
    """Return a swarm with what all its replicas share."""
    odd = KINDS[kind]
    return prepared(
        seed,
        slowness=(1.0, 1.0, 1.0, 10.0) if "slow" in odd else (1.0,),
        network=LOSSY if "lossy" in odd else CLEAN,
        state="int8" if "int8" in odd else "float32",
    )


def trained(kind: str, seed: int) -> Outcome:
    """Train a swarm whose odd replicas compute in another precision, or read another language."""
    setup, odd = swarm(kind, seed), KINDS[kind]
    start, open_text = SimulatedPeer.start, SimulatedPeer._open_text

    def started(peer: SimulatedPeer) -> None:
        if "mixed" in odd and (precision := PRECISIONS.get(peer.name[2:])) is not None:
            peer.tampering = Attack(arithmetic=lambda _: in_precision(setup, int(peer.name[1]), precision))
        start(peer)

    async def opened(peer: SimulatedPeer) -> Any:
        if peer.name != FOREIGN or "domain" not in odd:
            return await open_text(peer)
        return ForeignText(setup.run, peer.name, setup.dimensions.vocabulary)

    with mock.patch.multiple(SimulatedPeer, start=started, _open_text=opened):
        return outcome(setup)


def in_precision(setup: SimSetup, number: int, precision: torch.dtype) -> StageModel:
    """Return a stage as a device builds it that computes in this precision."""
    with mock.patch.object(device, "autocast_dtype", return_value=precision):
        return setup.build(number)


def found_by_itself(kind: str, seed: int) -> Counter[str]:
    """Return what the nodes of a swarm found about each other, and how much they judged."""
    seen = trained(kind, seed)
    return Counter({name: seen.counts[name] for name in COUNTED}) + seen.violations


def recorded(kind: str, seed: int) -> tuple[list[Apart], list[list[Mean]]]:
    """Return what three replicas were apart, microbatch by microbatch, and the means of each sender's gradients."""
    found: list[Apart] = []
    means: defaultdict[SpotChecks, list[Mean]] = defaultdict(list)
    calls: Counter[SpotChecks] = Counter()

    async def check(checks: SpotChecks, peer: str, microbatch: Microbatch, reply: Gradient, _: float) -> Gradient:
        calls[checks] += 1
        means[checks].append((peer, checks._mean(reply)))
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
        trained(kind, seed)
    return found, list(means.values())


def kept(directory: Path | None, kind: str, seed: int) -> tuple[list[Apart], list[list[Mean]]]:
    """Return what was recorded, from a file of `directory` if it is there; else record it, and write that file."""
    path = None if directory is None else directory / f"{kind}-{seed}.pt"
    if path is not None and path.exists():
        found: tuple[list[Apart], list[list[Mean]]] = torch.load(path, weights_only=True)
        return found
    found = recorded(kind, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)
    return found


T = TypeVar("T")


def lives(found: Sequence[T], stretch: int, rng: Random, checks: int) -> Iterator[tuple[Verdicts, float, T]]:
    """Yield what new senders judge, one after the other, and when (seconds): so many checks or a few more."""
    for _ in range(-(-checks // len(found))):
        verdicts, stretches = Verdicts(deep=False), range(0, len(found), stretch)
        order = chain.from_iterable(found[first : first + stretch] for first in rng.sample(stretches, len(stretches)))
        for now_s, each in enumerate(order):
            verdicts.paroled(now_s)
            yield verdicts, now_s, each


def judged(found: list[Apart], rng: Random, checks: int) -> Counter[str]:
    """Return the verdicts of so many checks, their number, and how many asked a third."""
    counts = Counter[str]()
    replicas = sorted({peer for apart in found for pair in apart for peer in pair})
    for verdicts, now_s, apart in lives(found, STRETCH, rng, checks):
        counts["judged"] += 1
        pair = rng.choice(list(apart))
        if not verdicts.agree(*pair, apart[pair]):
            counts["third"] += 1
            counts.update(str(verdict.finding) for verdict in verdicts.judge(apart, replicas, now_s))
    return counts


def watched(senders: list[list[Mean]], rng: Random, checks: int) -> Counter[str]:
    """Return the verdicts on the offsets of so many gradients, and their number."""
    counts = Counter[str]()
    for means in senders:
        replicas = sorted({peer for peer, _ in means})
        for verdicts, now_s, (peer, each) in lives(means, STRETCH, rng, checks // len(senders)):
            counts["judged"] += 1
            counts.update(str(verdict.finding) for verdict in verdicts.watch(peer, each, replicas, now_s))
    return counts


def main() -> None:
    """Print verdicts by seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--checks", type=int, default=CHECKS, help="of each kind and seed")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where recordings are kept, and read again")
    parser.add_argument("--live", action="store_true", help="what the nodes of each swarm find themselves")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    total = Counter[str]()
    for kind, seed in product(wanted.kinds, wanted.seeds):
        if wanted.live:
            total += (seen := found_by_itself(kind, seed))
            print(f"{kind}, seed {seed}: {dict(seen)}", flush=True)
            continue
        found, means = kept(wanted.keep, kind, seed)
        cuts = quantiles((distance for apart in found for distance in apart.values()), n=20)
        spread = f"distances {cuts[9]:.3f} (median), {cuts[18]:.3f} (95 %)"
        print(f"{kind}, seed {seed}: {len(found)} microbatches, {spread}")
        verdicts = judged(found, Random(seed), wanted.checks), watched(means, Random(seed), wanted.checks)
        for of, each in zip(("checks", "offsets"), verdicts, strict=True):
            print(f"    {of}: {dict(each)}", flush=True)
            total[f"{of} judged"] += each["judged"]
            total[f"quarantines by {of}"] += each[CheckFinding.QUARANTINED]
    print(", ".join(f"{count:,} {what}" for what, count in total.items()))


if __name__ == "__main__":
    main()
