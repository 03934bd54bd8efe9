"""A forward pass that waits for its gradient, with the autograd graph of one microbatch.

The graph lives here and dies with this object: whoever gives a microbatch up drops it, and nothing else is left. It
refers to the parameters that the pass was computed with, and to no copy of them: `pipeline.stage` sees to it that they
do not change as long as they are waited on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from pipeline.codec import decode, encode, seed_of
from pipeline.codec_formats import ActivationCodec

Parameters = list[nn.Parameter]
Backward = Callable[[Parameters, Tensor, Tensor], None]
"""Runs autograd: the parameters that the graph refers to, the output, and its gradient."""


class StageInput(NamedTuple):
    """What a pass began with. `leaf`: activations as the graph has them, None for ids; `seed`: of their gradient."""

    leaf: Tensor | None
    seed: int = 0


class PendingForward:
    """A forward pass that waits for its gradient. `output`: activations [b, s, width] as they travel, on the CPU.

    They are coded before they are copied to the CPU. Backward computes as if the codec were not there.
    """

    def __init__(
        self, codec: ActivationCodec, output: Tensor, given: StageInput, built_on: Parameters, run: Backward
    ) -> None:
        self.output = encode(codec.down, output.detach()).cpu()
        self._codec, self._run = codec, run
        self._graph: tuple[Tensor, StageInput, Parameters] | None = (output, given, built_on)

    def waits_on(self, parameters: Parameters) -> bool:
        """Say whether the graph is still there and refers to these very parameters."""
        return self._graph is not None and self._graph[2] is parameters

    def give_up(self) -> None:
        """Free the graph: there will be no backward pass."""
        self._graph = None

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Add to the parameters' gradients; return that of the input, or None if the input was ids.

        Both gradients are as they travel, on the CPU. Raises ValueError if `gradient` has not the output's shape, and
        RuntimeError the second time or once given up.
        """
        if self._graph is None:
            raise RuntimeError("this forward pass has had its backward pass, or was given up")
        output, given, built_on = self._graph
        code = self._codec.back
        expected = [*output.shape[:-1], code.row(output.shape[-1])]
        if list(gradient.shape) != expected:
            raise ValueError(f"a gradient of {list(gradient.shape)} where {expected} is expected")
        self._graph = None
        seed = gradient_seed(self._codec, self.output)
        self._run(built_on, output, decode(code, gradient.to(output.device), seed).to(output.dtype))
        return input_gradient(self._codec, given)


def gradient_seed(codec: ActivationCodec, activations: Tensor) -> int:
    """Return the seed of the gradient of activations that travelled; 0 where it needs none."""
    return seed_of(activations) if codec.back.dithered else 0


def input_gradient(codec: ActivationCodec, given: StageInput) -> Tensor | None:
    """Return the gradient that backward left at a pass's input, as it travels, None where the input was ids."""
    if given.leaf is None:
        return None
    assert given.leaf.grad is not None
    return encode(codec.back, given.leaf.grad, given.seed).cpu()
