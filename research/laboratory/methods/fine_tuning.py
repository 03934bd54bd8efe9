"""A short training of a finished model on another text, by one machine: what somebody does with the work of a swarm."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from torch import Tensor

from noloco_node.planning.model_layout import model_layout
from pipeline.inner_step import learning_rate
from research.laboratory.experiments.cell import Cell
from research.laboratory.experiments.task import Text, losses_of, open_stages, run_of

BEFORE = "before fine-tuning"


def after(rate: float) -> str:
    """Return the name of the note on a fine-tuning at this rate."""
    return f"fine-tuned at {rate:g}"


def fine_tuned(cell: Cell, model: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """Return the losses of a model of one stage on all held-out text of what it is fine-tuned on, nats a token.

    `BEFORE` it, and `after` it at each rate. Each fine-tuning begins at the same weights, with fresh moments, and draws
    the same text. Its learning rate follows the schedule of a run of as many steps.
    """
    wish = cell.fine_tuning
    assert wish is not None, "the model is fine-tuned"
    found: dict[str, float] = {}
    for rate in wish.rates:
        tuning = Cell(
            method="parallel",
            replicas=1,
            steps=wish.steps,
            learning_rate=rate,
            seed=cell.seed,
            scale=cell.scale,
            text=wish.text,
        )
        run = run_of(tuning)
        (stage,), text, course = open_stages(run, model_layout(run)), Text(run, 0), run.inner
        stage.set_weights(model[0])
        if not found:
            found[BEFORE] = fmean(losses_of(tuning, [stage]))
        for step in range(wish.steps):
            stage.loss(*text.draw())
            stage.step(learning_rate(step / wish.steps, course), 1)
        found[after(rate)] = fmean(losses_of(tuning, [stage]))
    return found
