"""Rounds after the last inner step: what a few meetings more do to single replicas, and what they cost.

Nobody trains any more, so a meeting is a plain mean of two: the mean of all replicas stays where it is but for what the
codec rounds, and each of them comes nearer to it. The production's outer optimiser says, hears and steps. All replicas
meet at once, in random pairs; with an odd number of them one is left out.
"""

from __future__ import annotations

import asyncio
from random import Random

from gossip.interface import Compute
from gossip.rounds.outer_optimiser import OuterOptimiser, Step
from gossip.rule.outer_step import OuterState, Tensors
from gossip.settings import Format, OuterConfig
from pipeline.stage import Stage
from research.laboratory.experiments.hardware_model import exchange_s
from research.laboratory.methods.replicas import Replica, Swarm
from research.laboratory.methods.synchronous import groups
from research.laboratory.methods.virtual_trainee import Device


def plain_mean(form: Format) -> OuterConfig:
    """Return the settings of a meeting after which both have the mean of their weights."""
    return OuterConfig(alpha=0.0, beta=1.0, gamma=1.0, codec=form)


class Still:
    """A stage that has ended its training, as the outer optimiser moves it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.alone = Device().alone

    def __repr__(self) -> str:
        return f"<Still: {self._stage!r}>"

    async def snapshot(self, slow: Tensors) -> Tensors:
        """Return a copy of the weights, or their difference from slow ones."""
        return self._stage.weights(slow)

    async def correct(self, correction: Tensors) -> None:
        """Add to the weights."""
        self._stage.correct(correction)

    async def replace(self, weights: Tensors) -> None:
        """Replace the weights."""
        self._stage.set_weights(weights)

    def optimiser(self, settings: OuterConfig, seed: int, compute: Compute) -> OuterOptimiser:
        """Return what says, hears and moves its weights."""
        return OuterOptimiser(settings, OuterState(self._stage.weights()), self, compute, seed=seed)


async def last_rounds(swarm: Swarm, count: int) -> None:
    """Let all replicas of one stage meet so often; charge each meeting's bytes and its time on the line."""
    if not count:
        return
    drawing = Random(f"{swarm.cell.seed}|last rounds")
    settings, seed = plain_mean(Format(swarm.cell.codec)), swarm.cell.seed
    for _ in range(count):
        sent = 0
        for pair in groups(drawing, len(swarm.replicas), 2):
            if len(pair) == 2:
                sides = [
                    Still(swarm.replicas[one].stages[0]).optimiser(settings, seed, Device().compute) for one in pair
                ]
                sent = await meet(*sides)
                for one in pair:
                    _note(swarm.replicas[one], sent)
        await asyncio.sleep(exchange_s(sent, swarm.weight_bytes))


async def meet(one: OuterOptimiser, other: OuterOptimiser) -> int:
    """Move both to their mean; return the bytes that each of them sent."""
    pair = (one, other)
    snapshots = [await optimiser.snapshot(0) for optimiser in pair]
    probes = [optimiser.fast_probe(snapshot) for optimiser, snapshot in zip(pair, snapshots, strict=True)]
    steps, slow_probe = one.steps(*probes), one.slow_probe()
    said = [await optimiser.encode_fast(snapshot, steps) for optimiser, snapshot in zip(pair, snapshots, strict=True)]
    for number, optimiser in enumerate(pair):
        heard = await optimiser.hear_fast(said[1 - number].coded.wire, snapshots[number], said[number])
        await optimiser.correct(await optimiser.take(Step(snapshots[number].fast, heard)))
    sent = [slow_probe, *said[0].coded.wire, *([] if probes[0] is None else [probes[0]])]
    return sum(tensor.nbytes for tensor in sent)


def _note(replica: Replica, sent: int) -> None:
    replica.sent_bytes += sent
    replica.rounds += 1
