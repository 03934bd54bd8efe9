"""The replicas of one cell under the virtual clock, and what is counted while they train.

A method (`parallel`, `central`, `pairs`, `server`, `gossip`) moves the replicas; here is what all methods have in
common: an inner step that takes a machine's time, the learning rate that follows the tokens spent, the budget that ends
the run, points of the curve, and the counts that become a `Result`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from random import Random

import torch
from msgspec.structs import replace
from torch import Tensor

from gossip.rounds.matching import steps_per_round
from gossip.rule.outer_step import Tensors
from noloco_node.planning.model_layout import ModelLayout, model_layout
from noloco_node.run.config import RunConfig
from pipeline.inner_step import learning_rate
from pipeline.stage import Stage
from research.laboratory.experiments.cell import Cell, Point
from research.laboratory.experiments.hardware_model import PARAMETERS, step_seconds
from research.laboratory.experiments.task import SharedText, Text, loss_of, open_stages, run_of
from research.laboratory.methods.adapters import adapted_stages
from research.laboratory.methods.muon import MuonStage

POINTS = 8
"""Points of a curve: with 400 steps one every 50, so that all fall on the same moment of a round of 25 or 50 steps."""
STEPS_BETWEEN_POINTS = 3
"""At least: a short run has fewer points."""

Model = list[Tensors]
"""The weights of a whole model, stage by stage."""


class Replica:
    """The replica of each stage that has this number, on one machine, and its text."""

    def __init__(
        self, run: RunConfig, stages: list[Stage], number: int, step_s: float, shards: int = 1, *, shared: bool = False
    ) -> None:
        self.number, self.step_s, self.stages = number, step_s, stages
        self.text: Text = SharedText(run, number) if shared else Text(run, number, shards)
        self.steps = 0
        self.rounds = self.sent_bytes = 0.0
        self.busy_s = 0.0
        self._coming: tuple[int, Model] | None = None
        """A correction that is on its way, and the inner step after which it arrives."""

    def __repr__(self) -> str:
        return f"<Replica {self.number}: {self.steps} inner steps of {self.step_s:.2f} s>"

    def weights(self) -> Model:
        """Return a copy of the fast weights."""
        return [stage.weights() for stage in self.stages]

    def load(self, model: Model) -> None:
        """Replace the fast weights."""
        for stage, weights in zip(self.stages, model, strict=True):
            stage.set_weights(weights)

    def correct(self, corrections: Model) -> None:
        """Add to the fast weights."""
        for stage, correction in zip(self.stages, corrections, strict=True):
            stage.correct(correction)

    def correct_later(self, corrections: Model, steps: int) -> None:
        """Add to the fast weights when so many inner steps more have been taken."""
        self._coming = (self.steps + steps, corrections)

    def arrive(self, *, early: bool = False) -> None:
        """Take the correction that is on its way if it is due, or `early`."""
        if self._coming is not None and (early or self.steps >= self._coming[0]):
            self.correct(self._coming[1])
            self._coming = None


class Swarm:
    """All replicas of a cell. `model`: returns the merged model; the mean of the fast weights unless a method says."""

    def __init__(self, cell: Cell, tell: Callable[[float], None]) -> None:
        run = run_of(cell)
        plan = model_layout(run)
        self.cell = cell
        shards = 1 if cell.sharding == "alike" else cell.replicas
        shared = cell.conditions is not None or cell.adapters is not None
        self.replicas = [
            Replica(run, _fresh(cell, run, plan), number, cell.batch * step_s, shards, shared=shared)
            for number, step_s in enumerate(step_seconds(cell.speeds, cell.replicas))
        ]
        self.model: Callable[[], Model] = self.mean
        self.curve: list[Point] = []
        self.taken = 0
        self.notes: dict[str, float] = {}
        self.spent_at_s = 0.0
        """When the budget was spent; 0 before."""
        self._tell = tell
        self._schedule = run.inner
        self._routes = Random(f"{cell.seed}|routes")
        self._scratch = _fresh(cell, run, plan)

    def __repr__(self) -> str:
        return f"<Swarm: {self.taken} of {self.cell.budget} inner steps>"

    @property
    def weight_bytes(self) -> int:
        """The bytes of a replica's weights as float32, all stages."""
        return sum(tensor.nbytes for part in self.replicas[0].weights() for tensor in part)

    @property
    def model_bytes(self) -> int:
        """The bytes of the whole model as float32, frozen weights included: what lines are measured by."""
        return self.weight_bytes if self.cell.adapters is None else 4 * PARAMETERS[self.cell.scale]

    @property
    def share(self) -> float:
        """The share of the budget that is spent."""
        return self.taken / self.cell.budget

    @property
    def left(self) -> int:
        """Inner steps left in the budget."""
        return self.cell.budget - self.taken

    def rate(self) -> float:
        """Return the learning rate of now."""
        return learning_rate(self.share, self._schedule)

    @property
    def course(self) -> float:
        """The progress that the length of rounds follows: the share, but that the end may be as the beginning."""
        at_end = self.cell.often_at_end
        return 0.0 if at_end and self.share >= 1.0 - at_end else self.share

    def steps_of_round(self) -> int:
        """Return the inner steps of the round that begins now, of the fastest replica."""
        late = self.cell.late_inner_steps
        return steps_per_round(self.course, self.cell.inner_steps, late)

    # Inner steps.

    async def train(self, replica: Replica, steps: int) -> int:
        """Take inner steps on a machine of one stage, in its time; return how many the budget had left."""
        for number in range(steps):
            if self.left <= 0:
                return number
            await self.step(replica)
        return steps

    async def step(self, replica: Replica) -> None:
        """Take one inner step."""
        await self.spend(replica)
        ids, targets = replica.text.draw()
        replica.stages[-1].loss(ids, targets)
        replica.stages[-1].step(self.rate(), 1)
        self.note_step(replica)

    async def step_together(self) -> None:
        """Let every replica take one inner step over routes through all stages; all wait for the slowest."""
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas:
                group.create_task(self.spend(replica))
        received = len(self.replicas[0].stages)
        for _ in range(received):
            order = list(range(len(self.replicas)))
            if self.cell.routing == "random":
                self._routes.shuffle(order)
            for first, second in zip(self.replicas, order, strict=True):
                self._along(first, self.replicas[second])
        for replica in self.replicas:
            for stage in replica.stages:
                stage.step(self.rate(), received)
        for replica in self.replicas:
            self.note_step(replica)

    def _along(self, first: Replica, second: Replica) -> None:
        ids, targets = first.text.draw()
        if len(first.stages) == 1:
            first.stages[0].loss(ids, targets)
            return
        waiting = first.stages[0].forward(ids)
        gradient = second.stages[1].loss(waiting.output, targets)
        assert gradient.hidden is not None
        waiting.backward(gradient.hidden)

    async def spend(self, replica: Replica) -> None:
        """Let the time of one inner step pass on its machine."""
        await asyncio.sleep(replica.step_s)
        late_s = now_s() - self.spent_at_s if self.spent_at_s else 0.0
        replica.busy_s += max(0.0, replica.step_s - late_s)

    def note_step(self, replica: Replica) -> None:
        """Count an inner step that was taken."""
        replica.steps += 1
        replica.arrive()
        self.taken += 1
        if self.left <= 0 and not self.spent_at_s:
            self.spent_at_s = now_s()
        # Of adapters the end alone is told.
        points = 0 if self.cell.adapters else min(POINTS, self.cell.steps // STEPS_BETWEEN_POINTS)
        if self.taken * points // self.cell.budget > len(self.curve) and self.left > 0:
            self.note_point()
        self._tell(self.share)

    # Measuring.

    def mean(self) -> Model:
        """Return the mean of the fast weights of all replicas."""
        return mean_of([replica.weights() for replica in self.replicas])

    def loss(self, model: Model) -> float:
        """Return the loss of a model on held-out text."""
        return loss_of(self.cell, self.stages_of(model))

    def stages_of(self, model: Model) -> list[Stage]:
        """Return stages that hold a model until another is asked for."""
        for stage, weights in zip(self._scratch, model, strict=True):
            stage.set_weights(weights)
        return self._scratch

    def note_point(self) -> None:
        """Add a point to the curve."""
        some = self.replicas[:: max(1, len(self.replicas) // 2)][:2]
        singles = [loss_of(self.cell, replica.stages) for replica in some]
        self.curve.append(
            Point(
                share=self.share,
                virtual_s=now_s(),
                merged=self.loss(self.model()),
                single=sum(singles) / len(singles),
                spread=self.spread(),
                learning_rate=self.rate(),
            )
        )

    def spread(self) -> float:
        """Return the paper's weight standard deviation: over replicas, root mean square over all weights."""
        rows = torch.stack([torch.cat([t.flatten() for part in r.weights() for t in part]) for r in self.replicas])
        return float(rows.std(0, unbiased=False).square().mean().sqrt())


def _fresh(cell: Cell, run: RunConfig, plan: ModelLayout) -> list[Stage]:
    if cell.optimiser == "muon":
        return [MuonStage(run, plan)]
    if cell.adapters is not None:
        return adapted_stages(cell, run, plan)
    if cell.optimiser == "orthogonal":
        run = replace(run, inner=dataclasses.replace(run.inner, orthogonal=True))
    return open_stages(run, plan, nesterov=cell.optimiser in ("adamw_nesterov", "orthogonal"))


def mean_of(models: Sequence[Model], weights: Sequence[int] | None = None) -> Model:
    """Return the mean of several models, weighed if there are weights."""
    shares = None if weights is None else torch.tensor([weight / sum(weights) for weight in weights])

    def mean(tensors: Tensors) -> Tensor:
        rows = torch.stack(tensors)
        return rows.mean(0) if shares is None else torch.tensordot(shares, rows, 1)

    return [tuple(map(mean, zip(*parts, strict=True))) for parts in zip(*models, strict=True)]


def now_s() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()
