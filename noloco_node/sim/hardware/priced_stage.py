"""Any stage in virtual time: it names a price for what it does, and watches that it is used as a stage may be.

Wrapped around a bowl or a real slice of a model. What it watches are promises of the gate and the rounds that nothing
else would notice broken: that an inner step gets exactly the passes of its window, and that no weights change between
a microbatch's forward and its backward pass. With two windows in flight they may change once, by one inner step and
what follows it in the same pause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakSet

from torch import Tensor

from noloco_node.machine.interface import StageModel
from pipeline.inner_step import OptimiserState, StepReport
from pipeline.messages import Gradient
from pipeline.worker import WorkerForward


class Prices(NamedTuple):
    """Device seconds of a pass forward (backward takes twice that), of an inner step, and of a copy of the weights.

    `coding_s`: of what a pass, forward or backward, decodes and encodes. `graphs`: passes that may wait for their
    gradient with their graph; a backward pass of another computes the forward one again. None: all.
    """

    forward_s: float = 0.01
    step_s: float = 0.0
    copy_s: float = 0.0
    coding_s: float = 0.0
    graphs: int | None = None


class _Version(NamedTuple):
    """Which weights: inner steps so far, and changes of another kind since the last of them."""

    steps: int = 0
    changes: int = 0


class _WatchedPass:
    """A forward pass that notices when the weights change under it."""

    def __init__(self, stage: PricedStage, forward: WorkerForward) -> None:
        self._stage, self._forward, self._version = stage, forward, stage._version
        self.has_graph = True

    @property
    def output(self) -> Tensor:
        """Activations for the next stage."""
        return self._forward.output

    def backward(self, gradient: Tensor, /) -> Tensor | None:
        """Run the backward pass, at its price."""
        had_graph, self.has_graph = self.has_graph, False
        return self._stage._backward(self._forward, self._version, gradient, again=not had_graph)


class PricedStage:
    """A `noloco_node.machine.interface.StageModel` around another. `wrong` takes the promises that were broken, in
    words.

    `windows`: how many are in flight, 1 or 2.
    """

    def __init__(
        self,
        stage: StageModel,
        prices: Prices,
        charge: Callable[[float], None],
        wrong: Callable[[str], None],
        windows: int = 1,
    ) -> None:
        self._stage, self._prices, self._charge, self._wrong = stage, prices, charge, wrong
        self._windows = windows
        self._collected = 0
        self._version = _Version()
        self._waiting: WeakSet[_WatchedPass] = WeakSet()

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shape of each parameter."""
        return self._stage.shapes

    @property
    def fixed(self) -> frozenset[int]:
        """Numbers of the parameters that are never moved."""
        return self._stage.fixed

    def forward(self, hidden: Tensor, targets: Tensor | None = None, /) -> _WatchedPass:
        """Run a forward pass, at its price."""
        self._charge(self._prices.forward_s + self._prices.coding_s)
        waiting = _WatchedPass(self, self._stage.forward(hidden, targets))
        if self._prices.graphs is not None:
            waiting.has_graph = sum(each.has_graph for each in self._waiting) < self._prices.graphs
            self._waiting.add(waiting)
        return waiting

    def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
        """Run forward and backward of the last stage, at their price."""
        self._charge(3 * self._prices.forward_s + 2 * self._prices.coding_s)
        gradient = self._stage.loss(hidden, targets)
        self._collected += 1
        return gradient

    def _backward(self, forward: WorkerForward, version: _Version, gradient: Tensor, *, again: bool) -> Tensor | None:
        self._charge((3 if again else 2) * self._prices.forward_s + self._prices.coding_s)
        behind = self._version.steps - version.steps
        if behind >= self._windows or (behind == 0 and version != self._version):
            self._wrong("the weights changed between a microbatch's forward and its backward pass")
        hidden = forward.backward(gradient)
        self._collected += 1
        return hidden

    def step(self, learning_rate: float, microbatches: int, /) -> StepReport:
        """Take an inner step, at its price."""
        self._charge(self._prices.step_s)
        if self._collected != microbatches:
            self._wrong(f"an inner step for {microbatches} microbatches was taken on {self._collected}")
        self._collected = 0
        self._version = _Version(steps=self._version.steps + 1)
        return self._stage.step(learning_rate, microbatches)

    def discard(self) -> None:
        """Forget the gradients collected so far."""
        self._collected = 0
        self._stage.discard()

    def weights(self) -> tuple[Tensor, ...]:
        """Return a copy of the fast weights, at its price."""
        self._charge(self._prices.copy_s)
        return self._stage.weights()

    def set_weights(self, weights: Sequence[Tensor], /) -> None:
        """Replace the fast weights."""
        self._note_change()
        self._stage.set_weights(weights)

    def correct(self, delta: Sequence[Tensor], /) -> None:
        """Add to the fast weights, at the price of a copy."""
        self._charge(self._prices.copy_s)
        self._note_change()
        self._stage.correct(delta)

    def _note_change(self) -> None:
        self._version = self._version._replace(changes=self._version.changes + 1)

    def current_weights(self) -> tuple[Tensor, ...]:
        """Return the fast weights themselves, at the price of a copy: somebody reads them all now."""
        self._charge(self._prices.copy_s)
        return self._stage.current_weights()

    def optimiser_state(self) -> OptimiserState:
        """Return the inner optimiser's memory, at the price of two copies of the weights."""
        self._charge(2 * self._prices.copy_s)
        return self._stage.optimiser_state()

    def load_optimiser_state(self, state: OptimiserState, /) -> None:
        """Continue from another inner optimiser's memory."""
        self._stage.load_optimiser_state(state)

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start."""
        return self._stage.statistics()
