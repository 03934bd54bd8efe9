"""`noloco-node` with a pause in place of a GPU: all but the matrices is real.

    python -m benchmarks.pipeline_efficiency.paced_node SECONDS_FILE join INVITE ...

SECONDS_FILE holds the seconds that a microbatch takes a device: a third of them forward, the rest backward. It is read
before every pass, so whoever measures may change it. Coding is done, and counts towards these seconds: a GPU does it in
next to nothing. Activations and gradients are noise of their usual shapes; steps, rounds and messages are as ever.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import pipeline.stage
from pipeline.forward_pass import Graph, Known, PendingForward, WeightSet
from pipeline.messages import Gradient

T = TypeVar("T")
FORWARD, BACKWARD = 1 / 3, 2 / 3


class Pace:
    """How long a microbatch takes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, share: float, work: Callable[[], T]) -> T:
        """Do some work, and let the rest of its share of a microbatch's seconds pass."""
        begun_s, whole_s = time.perf_counter(), float(self._path.read_text())
        result = work()
        time.sleep(max(0.0, begun_s + share * whole_s - time.perf_counter()))
        return result


class PacedStage(pipeline.stage.Stage):
    """A stage whose layers are one sum. `pace` is set before any is made."""

    pace: Pace
    _noise = torch.empty(0)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> PendingForward:
        """Return noise, after a forward pass's time."""
        return self.pace.keep(FORWARD, lambda: super(PacedStage, self).forward(hidden, targets))

    def loss(self, hidden: Tensor, targets: Tensor) -> Gradient:
        """Return a gradient of noise, after a microbatch's time."""
        return self.pace.keep(FORWARD + BACKWARD, lambda: super(PacedStage, self).loss(hidden, targets))

    def _loss(self, hidden: Tensor, targets: Tensor, known: Known) -> Graph:
        graph = self._graph(hidden, self._set, known)
        loss = graph.output.square().mean()
        torch.autograd.backward(loss)
        return graph._replace(output=loss)

    def _run(self, given: Tensor, weights: WeightSet, known: Known, *, logits: bool = True) -> Tensor:
        norm = next(leaf for leaf in weights.leaves.values() if leaf.ndim == 1)
        shape = (*given.shape[:2], len(norm))
        if self._noise.shape != shape:
            self._noise = torch.randn(shape)
        return self._noise + norm if self._first else given + norm


def main() -> None:
    """Become noloco-node with such stages."""
    PacedStage.pace = pace = Pace(Path(sys.argv.pop(1)))
    pipeline.stage.Stage = PacedStage  # type: ignore[misc]
    backward = PendingForward.backward

    def paced(waiting: PendingForward, gradient: Tensor) -> Tensor | None:
        return pace.keep(BACKWARD, lambda: backward(waiting, gradient))

    PendingForward.backward = paced  # type: ignore[method-assign, assignment]
    from noloco_node.cli.main import main as noloco_node

    noloco_node()


if __name__ == "__main__":
    main()
