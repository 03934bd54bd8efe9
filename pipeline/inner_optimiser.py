"""The optimiser of a stage between two rounds: AdamW over its masters, on the clipped mean gradient of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

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


class InnerOptimiser:
    """AdamW with its memory. All of it is taken at once: a step must not fail half-way."""

    def __init__(self, weights: Sequence[nn.Parameter], inner: Inner, device: torch.device) -> None:
        self._weights, self._clip_norm = weights, inner.clip_norm
        self._taken = 0
        matrices, vectors = ([w for w in weights if (w.ndim >= 2) == many] for many in (True, False))
        groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        # On a CPU the plain loop: bit for bit what a whole model's default AdamW computes, and cheap beside a window.
        fused = device.type == "cuda"
        betas = (inner.beta1, inner.beta2)
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=inner.epsilon, fused=fused)
        for weight in weights:
            # As AdamW itself would in its first step, but before there is anything that it could leave half done.
            self._adamw.state[weight] = {
                "step": torch.zeros((), device=device if fused else None),
                **{name: torch.zeros_like(weight, memory_format=torch.preserve_format) for name in _MOMENTS},
            }

    def clip(self, microbatches: int) -> float:
        """Make the gradients the clipped mean of a window of so many; return its norm before."""
        for weight in self._weights:
            if not weight.requires_grad:
                continue  # without a gradient AdamW leaves it as it is
            # A weight that no token met has a gradient of zero, so that all have taken the same number of steps.
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.div_(microbatches)
        return nn.utils.clip_grad_norm_(self._weights, self._clip_norm).item()

    def step(self, learning_rate: float) -> None:
        """Move the weights by their gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._taken += 1

    def forget_gradients(self) -> None:
        """Let go of the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> OptimiserState:
        """Return AdamW's memory itself, on the device: it moves with the next step."""
        state = self._adamw.state
        return OptimiserState(self._taken, tuple(state[weight][name] for name in _MOMENTS for weight in self._weights))

    def load(self, state: OptimiserState) -> None:
        """Continue from another optimiser's memory; raise ValueError if its shapes are not those of the weights."""
        check_shapes(state.moments, [tuple(weight.shape) for weight in self._weights] * len(_MOMENTS))
        self._taken = state.steps
        moments = iter(state.moments)
        for name in _MOMENTS:
            for weight in self._weights:
                memory = self._adamw.state[weight]
                memory["step"].fill_(float(state.steps))
                memory[name].copy_(next(moments))


def moment_ratio(beta1: float, beta2: float) -> float:
    """Return the most that a first moment of AdamW can be, in roots of its second; infinite where nothing bounds it.

    Both are sums over the same gradients, with weights that fall by beta1 and by beta2 a step: Cauchy and Schwarz.
    """
    left = 1.0 - beta1**2 / beta2 if beta2 > 0.0 else 0.0
    return (1.0 - beta1) / math.sqrt((1.0 - beta2) * left) if left > 0.0 else math.inf


def check_shapes(given: Sequence[Tensor], expected: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError if tensors have other shapes than expected."""
    for tensor, shape in zip(given, expected, strict=False):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{tuple(tensor.shape)} is not {shape}")
    if len(given) != len(expected):
        raise ValueError(f"{len(given)} tensors for {len(expected)} parameters")
