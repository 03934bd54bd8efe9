"""Adapters (LoRA) over a frozen model, which one machine has trained on another text: the production's own.

The frozen model of a text and a seed is trained once in a process. Adapters train, meet and are merged by the methods
of whole models, for they are all the parameters that a stage has. Only alternating ones need a stage of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean

import torch
from msgspec.structs import replace
from torch import Tensor

from noloco_node.planning.model_layout import ModelLayout, build_stage, model_layout
from noloco_node.run.config import RunConfig
from pipeline.forward_pass import StageSettings
from pipeline.inner_step import StepReport, learning_rate
from pipeline.stage import Stage
from research.laboratory.experiments.cell import Cell, Corpus, Prose
from research.laboratory.experiments.task import CPU, Text, as_published, losses_of, open_stages, run_of

BASE_BATCH = 2
"""By which factor an inner step of the frozen model has more sequences."""
A, B = ".lora_A.weight", ".lora_B.weight"


class AlternatingStage(Stage):
    """A stage that trains every B in one round and every A in the next. `round`: the one that has ended last.

    B comes first: it is zero, and while it is, A has no gradient. A matrix that rests keeps its moments.
    """

    round = 0

    def step(self, learning_rate: float, microbatches: float) -> StepReport:
        """Take an inner step on the matrices whose turn it is."""
        resting = [weight for name, weight in self._masters.items() if name.endswith(B if self.round % 2 else A)]
        for weight in resting:
            weight.grad = None
            weight.requires_grad_(False)
        report = super().step(learning_rate, microbatches)
        for weight in resting:
            weight.requires_grad_(True)
        return report


def adapted_stages(cell: Cell, run: RunConfig, plan: ModelLayout) -> list[Stage]:
    """Return a fresh stage, the only one, of new adapters over the frozen model of a cell."""
    assert cell.adapters is not None, "adapters are trained"
    stage = (AlternatingStage if cell.adapters.trained == "alternating" else Stage)(
        build_stage(run, plan, 0, CPU),
        as_published(run).inner,
        StageSettings(CPU, None),
        first=True,
        last=True,
    )
    stage.load_frozen(named(trained_base(base_cell(cell))).items())
    return [stage]


def base_cell(cell: Cell) -> Cell:
    """Return the run that trains the frozen model of a cell."""
    made = cell.adapters
    assert made is not None, "adapters are trained"
    return Cell(
        method="parallel",
        replicas=1,
        steps=made.base_steps,
        learning_rate=made.base_rate,
        seed=cell.seed,
        scale=cell.scale,
        text=made.base_text,
        batch=BASE_BATCH,
    )


@lru_cache(maxsize=16)
def trained_base(cell: Cell) -> Stage:
    """Return the model that this run ends with."""
    run = run_of(cell)
    (stage,), text, course = open_stages(run, model_layout(run)), Text(run, 0), run.inner
    for step in range(cell.steps):
        stage.loss(*text.draw())
        stage.step(learning_rate(step / cell.steps, course), 1)
    return stage


def loss_of_base(cell: Cell) -> float:
    """Return the loss of a cell's frozen model without adapters, on all held-out text of what they are trained on."""
    return _loss(base_cell(cell), cell.text)


@lru_cache(maxsize=16)
def _loss(base: Cell, text: Corpus | Prose) -> float:
    return fmean(losses_of(replace(base, text=text), [trained_base(base)]))


def named(stage: Stage) -> dict[str, Tensor]:
    """Return a copy of the parameters of a stage, by name."""
    return dict(zip(stage.names, stage.weights(), strict=True))


def product_error(replicas: Sequence[Mapping[str, Tensor]]) -> float:
    """Return how far the product of the mean matrices is from the mean of the replicas' products B A, over all layers.

    As a share of the latter's norm. 0 where A is not among the parameters: then it is the same everywhere.
    """
    apart = whole = 0.0
    for name in (name for name in replicas[0] if name.endswith(A)):
        pairs = [(each[name.removesuffix(A) + B], each[name]) for each in replicas]
        b, a = (torch.stack(matrices).mean(0) for matrices in zip(*pairs, strict=True))
        mean = torch.stack([b @ a for b, a in pairs]).mean(0)
        apart += float((b @ a - mean).square().sum())
        whole += float(mean.square().sum())
    return (apart / whole) ** 0.5 if whole else 0.0
