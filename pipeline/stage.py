"""One slice of the model at work: forward, loss, backward, and the optimiser between two rounds (AdamW).

The autograd graph of a microbatch lives in the `PendingForward` that its forward pass returns, and dies with it:
whoever gives a microbatch up drops that object, and nothing else is left of it. Gradients of all microbatches of a
window add up in the parameters; `step` takes their mean, clips it to a norm *of this stage* (no stage knows the others'
gradients) and steps. With one replica a stage, one window and no dropout this is single-process training of the whole
model, step for step.

With two windows in flight an inner step, and a correction after it, come while forward passes of the next window still
wait for their gradients. Their graphs refer to the parameters themselves, and a step in place would break them:
autograd notices an optimiser's write, but not one through `.data`, after which some layers' backward silently computes
with the old weights and others' with the new. So before the weights change we look whether a pass still waits on them.
If so, the module and the optimiser move on to a copy, and the old tensors stay with the graphs and die with them: each
backward pass runs on the very weights of its forward pass. What it adds, it adds to the gradients of the window under
way, as all do; `pipeline.window_turns` decides who is in it. If nothing waits, nothing is copied.

Nothing here waits or talks, and nothing is locked: all methods run in the stage's one device thread. What goes in and
out is on the CPU, activations and gradients as `codec` has them; weights are float32 always, and `autocast` says in
what the matrices are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.codec import decode
from pipeline.codec_formats import ACTIVATION_CODECS
from pipeline.forward_pass import Parameters, PendingForward, StageInput, gradient_seed, input_gradient
from pipeline.messages import Gradient

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's own names of the first and the second moment."""


class Inner(NamedTuple):
    """AdamW's constants, and the norm to which a stage's gradient is clipped. Only matrices decay."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float


class StepReport(NamedTuple):
    """`gradient_norm`: before clipping. `applied`: False if it was not finite, and the gradient was thrown away."""

    gradient_norm: float
    applied: bool


class OptimiserState(NamedTuple):
    """AdamW's memory. `moments`: the first moments of all parameters in order, then the second; all zero at step 0."""

    steps: int
    moments: tuple[Tensor, ...]


class Stage:
    """One stage's slice and its optimiser. `first`: its input is ids; `last`: its output is logits."""

    def __init__(
        self,
        module: nn.Module,
        inner: Inner,
        *,
        first: bool,
        last: bool,
        device: torch.device,
        autocast: torch.dtype | None = None,
        codec: str = "float32",
    ) -> None:
        self._module = module.to(device).train()
        self._inner, self._first, self._last, self._device, self._autocast = inner, first, last, device, autocast
        named = dict(self._module.named_parameters())
        self.names = tuple(named)
        self._codec = ACTIVATION_CODECS[codec]
        self.shapes = tuple(tuple(weight.shape) for weight in named.values())
        self._weights: Parameters = list(named.values())
        self._waiting: WeakSet[PendingForward] = WeakSet()
        """Passes that have had no backward pass; whoever gives one up drops it, and then it is not in here either."""
        self._forwards = self._backwards = self._stale = self._copies = 0
        self._steps = self._skipped = self._taken = 0
        self._optimiser = self._new_optimiser()

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start.

        Passes, those whose weights had changed before their backward, copies made for the sake of such, inner steps,
        and steps skipped because of a non-finite gradient.
        """
        return {
            "forwards": self._forwards,
            "backwards": self._backwards,
            "stale_backwards": self._stale,
            "weight_copies": self._copies,
            "inner_steps": self._steps,
            "skipped_steps": self._skipped,
        }

    # One microbatch.

    def forward(self, hidden: Tensor) -> PendingForward:
        """Run ids [b, s] (int64, the first stage) or activations, as they came, through every stage but the last."""
        if self._last:
            raise ValueError("the last stage has no forward pass without a loss")
        given = self._input(hidden)
        self._forwards += 1
        output = self._run(hidden if given.leaf is None else given.leaf)
        waiting = PendingForward(self._codec, output, given, self._weights, self._backward)
        self._waiting.add(waiting)
        return waiting

    def loss(self, hidden: Tensor, targets: Tensor) -> Gradient:
        """Run the last stage forward and backward: mean cross-entropy against `targets` [b, s], int64.

        Raises ValueError if `targets` have another shape or are not in the vocabulary.
        """
        if not self._last:
            raise ValueError("only the last stage has a loss")
        given = self._input(hidden)
        self._forwards += 1
        logits = self._run(hidden if given.leaf is None else given.leaf).float()
        if targets.shape != logits.shape[:2]:
            raise ValueError(f"targets of {list(targets.shape)} for logits of {list(logits.shape)}")
        # On a GPU an id outside the vocabulary would take the whole process down.
        if targets.min() < 0 or targets.max() >= logits.shape[-1]:
            raise ValueError(f"targets outside the vocabulary of {logits.shape[-1]}")
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten().to(self._device))
        torch.autograd.backward(loss)
        self._backwards += 1
        return Gradient(hidden=input_gradient(self._codec, given), loss=loss.item(), tokens=targets.numel())

    @torch.no_grad()
    def infer(self, hidden: Tensor) -> Tensor:
        """Return activations, or logits at the last stage, without dropout, graph and codec (float32, CPU)."""
        self._module.eval()
        try:
            return self._run(hidden).to("cpu", torch.float32)
        finally:
            self._module.train()

    def _input(self, hidden: Tensor) -> StageInput:
        if self._first:
            return StageInput(None)
        leaf = decode(self._codec.down, hidden.to(self._device)).detach().requires_grad_()
        return StageInput(leaf, gradient_seed(self._codec, hidden))

    def _run(self, hidden: Tensor) -> Tensor:
        precision: AbstractContextManager[object] = nullcontext()
        if self._autocast is not None:
            precision = torch.autocast(self._device.type, self._autocast)
        with precision:
            output: Tensor = self._module(hidden.to(self._device))
        return output

    def _backward(self, built_on: Parameters, output: Tensor, gradient: Tensor) -> None:
        if built_on is self._weights:
            torch.autograd.backward(output, gradient)
        else:
            # Autograd adds to the parameters of the graph; for as long as it runs, these hold the window's gradients.
            _hand_gradients(self._weights, built_on)
            try:
                torch.autograd.backward(output, gradient)
            finally:
                _hand_gradients(built_on, self._weights)
            self._stale += 1
        self._backwards += 1

    # The inner optimiser.

    def step(self, learning_rate: float, microbatches: int) -> StepReport:
        """Take one AdamW step on the mean gradient of a window of `microbatches`, and clear the gradients."""
        for weight in self._weights:
            # A weight that no token met has a gradient of zero, so that all have taken the same number of steps.
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.div_(microbatches)
        norm = nn.utils.clip_grad_norm_(self._weights, self._inner.clip_norm).item()
        applied = math.isfinite(norm)
        if applied:
            self._leave_to_waiting()
            for group in self._optimiser.param_groups:
                group["lr"] = learning_rate
            self._optimiser.step()
            self._steps += 1
            self._taken += 1
        else:
            self._skipped += 1
        self._optimiser.zero_grad(set_to_none=True)
        return StepReport(norm, applied)

    def discard(self) -> None:
        """Forget the gradients collected so far, and the graphs that wait for theirs."""
        self._optimiser.zero_grad(set_to_none=True)
        for waiting in list(self._waiting):
            waiting.give_up()

    @torch.no_grad()
    def _leave_to_waiting(self) -> None:
        """Go on with a copy of the weights, gradients included, if a graph refers to those that are to change."""
        if not any(waiting.waits_on(self._weights) for waiting in list(self._waiting)):
            return
        copies = {weight: nn.Parameter(weight.clone(), weight.requires_grad) for weight in self._weights}
        for module in self._module.modules():
            for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, name, copies[weight])
        for group in self._optimiser.param_groups:
            group["params"] = [copies[weight] for weight in group["params"]]
        state = self._optimiser.state
        for weight, copy in copies.items():
            if weight in state:
                state[copy] = state.pop(weight)
        left, self._weights = self._weights, [copies[weight] for weight in self._weights]
        _hand_gradients(left, self._weights)
        self._copies += 1

    def _new_optimiser(self) -> torch.optim.AdamW:
        inner = self._inner
        matrices = [weight for weight in self._weights if weight.ndim >= 2]
        vectors = [weight for weight in self._weights if weight.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": inner.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        # On a CPU the plain loop: bit for bit what a whole model's default AdamW computes, and cheap beside a window.
        fused = self._device.type == "cuda"
        return torch.optim.AdamW(groups, lr=0.0, betas=(inner.beta1, inner.beta2), eps=inner.epsilon, fused=fused)

    def optimiser_state(self) -> OptimiserState:
        """Return a copy of AdamW's memory (float32, CPU); exact."""
        state = self._optimiser.state
        moments = tuple(
            state[weight][name].to("cpu", copy=True) if weight in state else torch.zeros(weight.shape)
            for name in _MOMENTS
            for weight in self._weights
        )
        return OptimiserState(self._taken, moments)

    def load_optimiser_state(self, state: OptimiserState) -> None:
        """Continue from another optimiser's memory; raise ValueError if its shapes are not this stage's."""
        _check_shapes(state.moments, self.shapes * len(_MOMENTS))
        self._taken = state.steps
        self._optimiser = self._new_optimiser()
        first, second = state.moments[: len(self._weights)], state.moments[len(self._weights) :]
        memory = dict(zip(self._weights, zip(first, second, strict=True), strict=True))
        ordered = [weight for group in self._optimiser.param_groups for weight in group["params"]]
        entries = {
            number: {
                "step": torch.tensor(float(state.steps)),
                "exp_avg": memory[weight][0].clone(),
                "exp_avg_sq": memory[weight][1].clone(),
            }
            for number, weight in enumerate(ordered)
        }
        self._optimiser.load_state_dict({**self._optimiser.state_dict(), "state": entries})

    # Fast weights, one tensor a parameter, in the order of `names`.

    def weights(self) -> tuple[Tensor, ...]:
        """Return a copy of the fast weights (float32, CPU)."""
        return tuple(weight.detach().to("cpu", copy=True) for weight in self._weights)

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor]) -> None:
        """Replace the fast weights; raise ValueError, with nothing changed, if shapes are not this stage's."""
        _check_shapes(weights, self.shapes)
        self._leave_to_waiting()
        for own, given in zip(self._weights, weights, strict=True):
            own.copy_(given)

    @torch.no_grad()
    def correct(self, delta: Sequence[Tensor]) -> None:
        """Add `delta` to the fast weights; raise ValueError, with nothing changed, if shapes are not ours."""
        _check_shapes(delta, self.shapes)
        self._leave_to_waiting()
        for own, given in zip(self._weights, delta, strict=True):
            own.add_(given.to(own.device))


def _hand_gradients(giver: Parameters, taker: Parameters) -> None:
    """Move gradients, None included, without a copy."""
    for given, taken in zip(giver, taker, strict=True):
        taken.grad, given.grad = given.grad, None


def _check_shapes(given: Sequence[Tensor], expected: Sequence[tuple[int, ...]]) -> None:
    shapes = [tuple(tensor.shape) for tensor in given]
    if shapes != list(expected):
        wrong = next((pair for pair in zip(shapes, expected, strict=False) if pair[0] != pair[1]), None)
        raise ValueError(
            f"{len(shapes)} tensors for {len(expected)} parameters"
            if wrong is None
            else f"{wrong[0]} is not {wrong[1]}"
        )
