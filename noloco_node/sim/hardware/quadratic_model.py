"""A model that costs next to nothing: each stage is a quadratic function, and a microbatch a noisy look at its slope.

Stage weights w are `SIZE` numbers with the loss 1/2 (w - c) A (w - c): A is diagonal, from `FLATTEST` to 1, and the
centre c is zero plus noise that follows from the microbatch's number alone. So swarms really descend, replicas really
disagree, and the theory of the outer rule applies. Activations are the microbatch's number, one float a sample, exact
below 2**24. Those of wide models also carry what the stages before have lost, so that the loss shows the whole route.
The inner step is plain SGD at the run's learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from noloco_node.data.held_out_text import EVALUATED_TOKENS, HeldOutText, evaluated_sequences
from noloco_node.run.config import RunConfig
from pipeline.inner_step import OptimiserState, StepReport
from pipeline.messages import Gradient

SIZE = 8
"""Weights of a stage."""
FLATTEST = 0.05
"""Least curvature; the greatest is 1."""
NOISE = 0.3
"""Standard deviation of a microbatch's centre."""
START = 1.0
"""Each weight of every replica at the start."""
WIDE, WIDE_CENTRE = 256, 3.0
"""Weights of a wide quadratic model's stage, enough of them for partners to be judged by, and where each of them is
best: away from zero, so that the wrong sign, noise and old weights do harm."""
VOCABULARY = 2**24
"""Numbers that microbatches may have."""


class QuadraticLayout(NamedTuple):
    """The dimensions of a model of quadratic models (`noloco_node.machine.interface.Dimensions`)."""

    shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    work: tuple[float, ...]
    width: int
    vocabulary: int = VOCABULARY


def quadratic_layout(stages: int, work: Sequence[float] | None = None, size: int = SIZE) -> QuadraticLayout:
    """Return the dimensions of a pipeline of quadratic models. `work`: of a microbatch at each stage, else even."""
    shapes = tuple({"weights": (size,)} for _ in range(stages))
    return QuadraticLayout(shapes, tuple(work or (1.0,) * stages), _width(size))


def _width(size: int) -> int:
    """Return how many floats a sample's activations are: one, and of a wide quadratic model the loss so far."""
    return 2 if size >= WIDE else 1


class _Pass:
    """A forward pass that waits for its gradient. `away`: the weights of then from the microbatch's centre."""

    def __init__(self, model: QuadraticModel, output: Tensor, away: list[float]) -> None:
        self._model, self.output, self._away = model, output, away

    def backward(self, gradient: Tensor, /) -> Tensor | None:
        if gradient.shape != self.output.shape:
            raise ValueError(f"a gradient of {list(gradient.shape)} for activations of {list(self.output.shape)}")
        self._model._collect(self._away)
        return gradient


class QuadraticModel:
    """One stage (`noloco_node.machine.interface.StageModel`).

    What a microbatch asks for is computed on Python's floats: for eight numbers a call of torch costs more than the
    arithmetic. The weights that others see are float32, and the sums here are never less exact.
    """

    def __init__(self, number: int, size: int = SIZE, centre: float = 0.0) -> None:
        self._size, self._middle = size, centre
        self._weights = torch.full((size,), START)
        self._values = [START] * size
        self._gradient = [0.0] * size
        self._curvature: list[float] = [FLATTEST ** (1.0 - place / (size - 1)) for place in range(size)]
        # Frequencies that no two coordinates or stages share: their sines look like noise of one number.
        self._frequencies = [place * (7.0 + math.sqrt(2.0) * (number + 1)) for place in range(1, size + 1)]
        self._steps = self._skipped = self._passes = 0

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self._size,),)

    @property
    def fixed(self) -> frozenset[int]:
        return frozenset()

    def forward(self, hidden: Tensor, targets: Tensor | None = None, /) -> _Pass:
        """Hand the microbatch's number on: activations [batch, sequence, width]."""
        output, away = self._passed(hidden)
        return _Pass(self, output, away)

    def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
        """Take the last stage's whole work at once."""
        output, away, loss = self._ended(hidden)
        self._collect(away)
        return Gradient(hidden=torch.zeros_like(output), loss=loss, tokens=hidden.shape[0] * hidden.shape[1])

    def activations(self, hidden: Tensor, targets: Tensor | None = None, /) -> Tensor:
        return self._passed(hidden)[0]

    def token_losses(self, hidden: Tensor, targets: Tensor, /) -> Tensor:
        return torch.full(targets.shape, self._ended(hidden)[2])

    def infer(self, hidden: Tensor, /) -> NoReturn:
        raise NotImplementedError("a quadratic model writes no text")

    def _passed(self, hidden: Tensor) -> tuple[Tensor, list[float]]:
        """Return the activations for the next stage, and the weights from the microbatch's centre."""
        width = _width(self._size)
        output = hidden.float().unsqueeze(-1) if hidden.ndim == 2 else hidden
        if output.shape[-1] < width:
            output = torch.nn.functional.pad(output, (0, 1))
        away = self._away(output)
        if width > 1:
            output = output.clone()
            output[..., 1] += self._lost(away)
        return output, away

    def _ended(self, hidden: Tensor) -> tuple[Tensor, list[float], float]:
        """Return the activations that came, the weights from the microbatch's centre, and the last stage's loss."""
        output = hidden.float().unsqueeze(-1) if hidden.ndim == 2 else hidden
        away = self._away(output)
        before = float(output[0, 0, 1]) if output.shape[-1] > 1 else 0.0
        return output, away, before + self._lost(away)

    def _away(self, output: Tensor) -> list[float]:
        return [value - centre for value, centre in zip(self._values, self._centre(output), strict=True)]

    def _lost(self, away: list[float]) -> float:
        return 0.5 * sum(curvature * each * each for curvature, each in zip(self._curvature, away, strict=True))

    def _centre(self, output: Tensor) -> list[float]:
        number, scale = float(output.numpy()[0, 0, 0]), NOISE * math.sqrt(2.0)
        if not math.isfinite(number):
            return [math.nan] * self._size
        return [self._middle + scale * math.sin(frequency * number) for frequency in self._frequencies]

    def _collect(self, away: list[float]) -> None:
        terms = zip(self._gradient, self._curvature, away, strict=True)
        self._gradient = [sum_so_far + curvature * each for sum_so_far, curvature, each in terms]
        self._passes += 1

    def step(self, learning_rate: float, microbatches: float, /) -> StepReport:
        """Take one SGD step on the mean slope; a slope that is not finite is thrown away."""
        slope = [each / microbatches if microbatches else math.nan for each in self._gradient]
        norm = math.hypot(*slope)
        self.discard()
        if not math.isfinite(norm):
            self._skipped += 1
            return StepReport(norm, False)
        self._put(torch.tensor([value - learning_rate * each for value, each in zip(self._values, slope, strict=True)]))
        self._steps += 1
        return StepReport(norm, True)

    def discard(self) -> None:
        self._gradient = [0.0] * self._size

    def weights(self, less: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        return tuple([(self._weights - other).bfloat16() for other in less]) or (self._weights.clone(),)

    def set_weights(self, weights: Sequence[Tensor], /) -> None:
        (only,) = weights
        self._put(only.clone())

    def correct(self, delta: Sequence[Tensor], /) -> None:
        self._put(self._weights + delta[0])

    def _put(self, weights: Tensor) -> None:
        self._weights, self._values = weights, weights.tolist()

    def current_weights(self) -> tuple[Tensor, ...]:
        return (self._weights,)

    def optimiser_state(self) -> OptimiserState:
        """Return the moments, which SGD does not use."""
        return OptimiserState(self._steps, (torch.zeros(self._size), torch.zeros(self._size)))

    def load_optimiser_state(self, state: OptimiserState, /) -> None:
        self._steps = state.steps

    def statistics(self) -> dict[str, int | float]:
        return {"passes": self._passes, "inner_steps": self._steps, "skipped_steps": self._skipped}


def held_out_numbers(run: RunConfig, microbatch_tokens: int) -> HeldOutText:
    """Return numbers to evaluate on, the same for all peers of a run; sources hardly draw them.

    `microbatch_tokens`: that a number stands for.
    """
    rng = Random(f"{run.seed}|held out")
    count = min(evaluated_sequences(run), max(1, EVALUATED_TOKENS // microbatch_tokens))
    rows = [[rng.randrange(VOCABULARY)] * (run.pipeline.sequence_length + 1) for _ in range(count)]
    return HeldOutText([torch.tensor(rows)], [f"number {row[0]}" for row in rows], len(rows), complete=True)


class RandomBatches:
    """The text of quadratic models (`noloco_node.machine.interface.Text`): numbers that no two sources share, as far as
    there are enough."""

    def __init__(self, shape: tuple[int, int], first: int) -> None:
        """`shape`: sequences of a microbatch and tokens of a sequence. `first`: where this source begins."""
        self._shape, self._first = shape, first
        self.drawn = 0

    async def draw(self) -> Tensor:
        self.drawn += 1
        batch, sequence = self._shape
        return torch.full((batch, sequence + 1), (self._first + self.drawn) % VOCABULARY)

    def position(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    async def restore(self, position: Mapping[str, Any]) -> bool:
        self.drawn = int(position["drawn"])
        return True

    def news(self) -> list[str]:
        return []
