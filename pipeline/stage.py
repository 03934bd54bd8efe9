"""One slice of the model at work: forward, loss, backward, and the steps of its optimiser.

The autograd graph of a microbatch lives in the `PendingForward` that its forward pass returns, and dies with it. At
most `graphs` of them are kept; other passes keep their input, and backward computes the graph again, with the same
gradient to the bit. Gradients of a window add up in the masters; `step` takes their mean, clips it to a norm *of this
stage* (no stage knows the others' gradients) and steps. With one replica a stage, one window and no dropout this is
single-process training of the whole model, step for step.

With two windows in flight, weights change while passes of the next window wait for their gradients. Then the masters
move on to a copy, and the old weights stay with the passes: each backward runs on the weights of its forward, and adds
to the window under way (`pipeline.admission_window` decides which passes are in it). If nothing waits, nothing is
copied.

If memory runs out, all graphs are dropped and none is kept any more. A forward pass is tried again. A backward pass may
have added a part of its gradient: the step of its window is skipped, and the microbatch gets MemoryError. Weights and
moments are never changed in part.

All methods run in the stage's one device thread, so nothing is locked. Inputs and outputs are on the CPU, activations
and gradients in the run's codec. Weights are float32; `autocast` says in what the matrices are multiplied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from pipeline.activation_codec import decode, gradient_seed
from pipeline.decoder_slice import Slice, multiplied_weights
from pipeline.forward_pass import (
    Graph,
    PassInput,
    PendingForward,
    WeightSet,
    check_targets,
    chunked_cross_entropy,
    input_gradient,
    or_memory_error,
    random_state,
    replayed,
)
from pipeline.inner_step import MOMENTS, Inner, InnerOptimiser, OptimiserState, StepReport
from pipeline.messages import ACTIVATION_CODECS, Gradient

T = TypeVar("T")
_COUNTED = (
    *("forwards", "backwards", "recomputed", "stale_backwards", "weight_copies", "shortages"),
    *("inner_steps", "skipped_steps"),
)
LOGITS = 2**24
"""The loss of a microbatch with more logits is computed in chunks of so many."""
STAGED = 2**24
"""Numbers of a correction that lie on a GPU at once."""


class StageSettings(NamedTuple):
    """How a stage computes. `autocast`: what the matrices are multiplied in; None: float32.

    `graphs`: how many passes that wait for their gradient may keep their graph; None for all.
    """

    device: torch.device
    autocast: torch.dtype | None = None
    graphs: int | None = None


class Stage:
    """One stage's slice and its optimiser. `first`: its input is ids; `last`: its output is logits."""

    def __init__(
        self,
        module: Slice,
        inner: Inner,
        settings: StageSettings,
        *,
        first: bool,
        last: bool,
        codec: str = "float32",
    ) -> None:
        device, autocast, graphs = settings
        self._module = module.to(device).train()
        self._first, self._last, self._device, self._autocast = first, last, device, autocast
        self._codec = ACTIVATION_CODECS[codec]
        masters = dict(self._module.named_parameters())
        self.names = tuple(masters)
        self.shapes = tuple(tuple(weight.shape) for weight in masters.values())
        self.fixed = frozenset(n for n, weight in enumerate(masters.values()) if not weight.requires_grad)
        self._weights: list[nn.Parameter] = list(masters.values())
        """The masters: float32, with the gradients, and the optimiser's own."""
        self._set = WeightSet(masters) if autocast is None else WeightSet(masters, multiplied_weights(module), autocast)
        self._waiting: WeakSet[PendingForward] = WeakSet()
        """Passes that have had no backward pass and were not dropped."""
        self._graphs = math.inf if graphs is None else graphs
        self._plain: bool | None = None
        self._spoiled = False
        """A backward pass of this window has failed half-way."""
        self._counts: Counter[str] = Counter()
        self._optimiser = InnerOptimiser(self._weights, inner, device)
        # On a GPU the memory for a correction is taken now: a change must not fail half-way. A CPU needs none.
        self._staging = torch.empty(0 if device.type == "cpu" else STAGED, device=device)

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start; a skipped step had a gradient that was not finite, or not whole."""
        return {name: self._counts[name] for name in _COUNTED}

    # One microbatch.

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> PendingForward:
        """Run ids [b, s] (int64, the first stage) or activations, as they came, through every stage but the last.

        `targets`: as `loss` has them; looked at where activations come in a subspace, and have each sequence's first
        token before them, [b, s + 1].
        """
        if self._last:
            raise ValueError("the last stage has no forward pass without a loss")
        tokens = self._tokens(targets)
        waiting = self._with_room(lambda: self._pass(hidden, tokens))
        if sum(each.has_graph for each in list(self._waiting)) >= self._graphs:
            waiting.drop_graph()
        self._waiting.add(waiting)
        self._counts["forwards"] += 1
        return waiting

    def _tokens(self, targets: Tensor | None) -> Tensor | None:
        """Return the ids behind activations that come in a subspace, from the targets that came with them."""
        return None if self._module.fixed is None or targets is None else targets[:, :-1].to(self._device)

    def _pass(self, hidden: Tensor, tokens: Tensor | None) -> PendingForward:
        before, weights = random_state(self._device), self._set
        graph = self._graph(hidden, weights, tokens)
        drew = not torch.equal(before, random_state(self._device))
        origin = PassInput(hidden, tokens, weights, weights.version, before if drew else None)
        return PendingForward(self._codec, origin, graph, self._backward)

    def loss(self, hidden: Tensor, targets: Tensor) -> Gradient:
        """Run the last stage forward and backward: mean cross-entropy against `targets` [b, s], int64.

        Where activations come in a subspace: [b, s + 1], each sequence's first token before them. Raises ValueError
        if `targets` have another shape or are not in the vocabulary.
        """
        if not self._last:
            raise ValueError("only the last stage has a loss")
        self._counts["forwards"] += 1
        tokens = self._tokens(targets)
        wanted = targets if tokens is None else targets[:, 1:]
        graph = self._spoiling(lambda: self._loss(hidden, wanted, tokens))
        self._counts["backwards"] += 1
        gradient = input_gradient(self._codec, graph)
        return Gradient(hidden=gradient, loss=graph.output.item(), tokens=wanted.numel())

    def _loss(self, hidden: Tensor, targets: Tensor, tokens: Tensor | None) -> Graph:
        name = self._module.head
        head, weights = self._module.get_submodule(name), self._set.leaves
        own = {key.removeprefix(f"{name}."): leaf for key, leaf in weights.items() if key.startswith(f"{name}.")}
        vocabulary = len(own["weight"])
        check_targets(targets, hidden, vocabulary)
        targets = targets.to(self._device)

        def logits_of(states: Tensor) -> Tensor:
            with self._precision():
                logits: Tensor = functional_call(head, own, (states,))
                return logits

        if targets.numel() * vocabulary > LOGITS and self._has_plain_head(hidden, tokens, logits_of):
            graph = self._graph(hidden, self._set, tokens, logits=False)
            loss = chunked_cross_entropy(graph.output, targets, logits_of, LOGITS // vocabulary)
        else:
            graph = self._graph(hidden, self._set, tokens)
            loss = functional.cross_entropy(graph.output.float().flatten(0, 1), targets.flatten())
            torch.autograd.backward(loss)
        return graph._replace(output=loss)

    @torch.no_grad()
    def _has_plain_head(self, hidden: Tensor, tokens: Tensor | None, logits_of: Callable[[Tensor], Tensor]) -> bool:
        """Say whether the logits are the head's output; some families scale or cap them."""
        if self._plain is None:
            self._module.eval()
            try:
                few = None if tokens is None else tokens[:1, :2]
                whole, states = (
                    self._graph(hidden[:1, :2], self._set, few, logits=each).output for each in (True, False)
                )
            finally:
                self._module.train()
            self._plain = torch.equal(whole, logits_of(states))
        return self._plain

    @torch.no_grad()
    def infer(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return activations, or logits at the last stage, without dropout, graph and codec (float32, CPU).

        `tokens`: the ids behind activations that come in a subspace.
        """
        self._module.eval()
        try:
            return self._run(hidden.to(self._device), self._set, tokens).to("cpu", torch.float32)
        finally:
            self._module.train()

    def _graph(self, hidden: Tensor, weights: WeightSet, tokens: Tensor | None, *, logits: bool = True) -> Graph:
        given = hidden.to(self._device)
        if self._first:
            return Graph(None, self._run(given, weights, logits=logits))
        leaf = decode(self._codec.down, given).detach().requires_grad_()
        return Graph(leaf, self._run(leaf, weights, tokens, logits=logits), gradient_seed(self._codec, hidden))

    def _run(self, given: Tensor, weights: WeightSet, tokens: Tensor | None = None, *, logits: bool = True) -> Tensor:
        with self._precision():
            output: Tensor = functional_call(self._module, weights.leaves, (given, tokens), {"logits": logits})
            return output

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast)

    def _backward(self, origin: PassInput, graph: Graph | None, gradient: Tensor) -> Tensor | None:
        origin.check()
        if graph is None:
            graph = self._with_room(lambda: self._again(origin))
            self._counts["recomputed"] += 1
        output = graph.output
        self._spoiling(lambda: torch.autograd.backward(output, gradient.to(output.dtype)))
        self._counts["backwards"] += 1
        self._counts["stale_backwards"] += origin.weights is not self._set
        return input_gradient(self._codec, graph)

    def _again(self, origin: PassInput) -> Graph:
        with replayed(self._device, origin.random):
            return self._graph(origin.hidden, origin.weights, origin.tokens)

    def _with_room(self, forward: Callable[[], T]) -> T:
        try:
            return or_memory_error(forward)
        except MemoryError:
            self._make_room()
        return or_memory_error(forward)

    def _spoiling(self, backward: Callable[[], T]) -> T:
        """Run a backward pass; where memory runs out a part of it may have been added, and the window is lost."""
        try:
            return or_memory_error(backward)
        except MemoryError:
            self._spoiled = True
            self._make_room()
            raise

    def _make_room(self) -> None:
        """Drop all graphs, and keep none from now on."""
        self._counts["shortages"] += 1
        self._graphs = 0
        for waiting in list(self._waiting):
            waiting.drop_graph()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # The inner optimiser.

    def step(self, learning_rate: float, microbatches: int) -> StepReport:
        """Take one AdamW step on the mean gradient of a window of `microbatches`, and clear the gradients."""
        try:
            norm = or_memory_error(lambda: self._optimiser.clip(microbatches))
        except MemoryError:
            self._make_room()
            norm = math.nan
        applied = math.isfinite(norm) and not self._spoiled
        if applied:
            self._leave_to_waiting()
            self._optimiser.step(learning_rate)
            self._set.refresh()
            self._counts["inner_steps"] += 1
        else:
            self._counts["skipped_steps"] += 1
        self._forget_gradients()
        return StepReport(norm, applied)

    def discard(self) -> None:
        """Forget the gradients so far, and give up the passes that wait for theirs."""
        self._forget_gradients()
        for waiting in list(self._waiting):
            waiting.give_up()

    def _forget_gradients(self) -> None:
        self._optimiser.forget_gradients()
        self._spoiled = False

    def _leave_to_waiting(self) -> None:
        """Move to a copy of the weights if a pass waits on them; without memory for it, give the passes up."""
        if not any(waiting.waits_on(self._set) for waiting in list(self._waiting)):
            return
        try:
            self._set = or_memory_error(self._set.successor)
            self._counts["weight_copies"] += 1
        except MemoryError:
            self._make_room()
            for waiting in list(self._waiting):
                if waiting.waits_on(self._set):
                    waiting.give_up(short=True)

    def optimiser_state(self) -> OptimiserState:
        """Return AdamW's memory itself, on the device; the next step changes it."""
        return self._optimiser.state()

    def load_optimiser_state(self, state: OptimiserState) -> None:
        """Continue from another optimiser's memory; raise ValueError if its shapes are not this stage's."""
        check_shapes(state.moments, self.shapes * len(MOMENTS))
        self._optimiser.load(state)

    # Fast weights, one tensor a parameter, in the order of `names`.

    def current_weights(self) -> tuple[Tensor, ...]:
        """Return the fast weights themselves, on the device; the next step or correction changes them."""
        return tuple(weight.detach() for weight in self._weights)

    def weights(self) -> tuple[Tensor, ...]:
        """Return a copy of the fast weights (float32, CPU)."""
        return tuple(weight.detach().to("cpu", copy=True) for weight in self._weights)

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Replace the fast weights; raise ValueError, with nothing changed, if shapes are not this stage's."""
        check_shapes(weights, self.shapes)
        self._leave_to_waiting()
        for own, given in zip(self._weights, weights, strict=True):
            own.copy_(given)
        self._set.refresh()

    @torch.no_grad()
    def correct(self, delta: Sequence[Tensor]) -> None:
        """Add `delta` to the fast weights; raise ValueError, with nothing changed, if shapes are not ours."""
        check_shapes(delta, self.shapes)
        self._leave_to_waiting()
        for own, given in zip(self._weights, delta, strict=True):
            parts = (torch.split(tensor.reshape(-1), STAGED) for tensor in (own, given))
            for part, more in zip(*parts, strict=True):
                part.add_(more if part.device == more.device else self._staging[: len(more)].copy_(more))
        self._set.refresh()


def check_shapes(given: Sequence[Tensor], expected: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError if tensors have other shapes than expected."""
    for tensor, shape in zip(given, expected, strict=False):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{tuple(tensor.shape)} is not {shape}")
    if len(given) != len(expected):
        raise ValueError(f"{len(given)} tensors for {len(expected)} parameters")
