"""A forward pass that waits for its gradient, with the autograd graph of one microbatch.

The graph lives here and dies with this object: whoever gives a microbatch up drops it, and nothing else is left. It
refers to the parameters that the pass was computed with, and to no copy of them: `pipeline.stage` sees to it that they
do not change as long as they are waited on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Parameters = list[nn.Parameter]
Backward = Callable[[Parameters, Tensor, Tensor], None]
"""Runs autograd: the parameters that the graph refers to, the output, and its gradient."""


class PendingForward:
    """A forward pass that waits for its gradient. `output`: activations [b, s, width], float32, CPU."""

    def __init__(self, output: Tensor, leaf: Tensor | None, built_on: Parameters, run: Backward) -> None:
        self.output = output.detach().to("cpu", torch.float32)
        self._graph: tuple[Tensor, Tensor | None, Parameters] | None = (output, leaf, built_on)
        self._run = run

    def waits_on(self, parameters: Parameters) -> bool:
        """Say whether the graph is still there and refers to these very parameters."""
        return self._graph is not None and self._graph[2] is parameters

    def give_up(self) -> None:
        """Free the graph: there will be no backward pass."""
        self._graph = None

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add to the parameters' gradients; return that of the input (float32, CPU), or None if the input was ids.

        Raises ValueError if `gradient` has not the output's shape, and RuntimeError the second time or once given up.
        """
        if self._graph is None:
            raise RuntimeError("this forward pass has had its backward pass, or was given up")
        output, leaf, built_on = self._graph
        if gradient.shape != output.shape:
            raise ValueError(f"a gradient of {list(gradient.shape)} for activations of {list(output.shape)}")
        self._graph = None
        self._run(built_on, output, gradient.to(output.device, output.dtype))
        return input_gradient(leaf)


def input_gradient(leaf: Tensor | None) -> Tensor | None:
    """Return the gradient that backward left at a pass's input (float32, CPU), None where the input was ids."""
    if leaf is None:
        return None
    assert leaf.grad is not None
    return leaf.grad.to("cpu", torch.float32)
