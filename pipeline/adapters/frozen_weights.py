"""Weights that stay as a checkpoint has them, in the form in which a run keeps them.

A frozen weight is a buffer: the parameters of a slice are what is trained, and nothing else. Vectors are float32.
Matrices of linear layers and embeddings are float32 or bfloat16; a product computes in the type of what it is given, or
in that of autocast. What autograd keeps of a product holds no weight in that type: the backward pass makes it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Form = Literal["float32", "bfloat16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def is_linear(part: nn.Module) -> bool:
    # GPT-2's linear layers have a class of their own, which only `pipeline.partition` may import.
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


class FrozenLinear(nn.Module):
    """A linear layer whose weight, [outputs, inputs], is frozen. It begins without memory."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, whole: nn.Module, form: Form) -> None:
        super().__init__()
        weight, bias = whole.weight, whole.bias
        assert isinstance(weight, Tensor)
        self.turned = not isinstance(whole, nn.Linear)
        """Whether a checkpoint has the weight as [inputs, outputs]."""
        self.out_features, self.in_features = reversed(weight.shape) if self.turned else weight.shape
        shape = (self.out_features, self.in_features)
        self.register_buffer("weight", torch.empty(shape, dtype=_DTYPES[form], device="meta"))
        self.register_buffer("bias", bias if bias is None else torch.empty(self.out_features, device="meta"))

    def forward(self, given: Tensor) -> Tensor:
        return self.product(as_multiplied(given))

    def product(self, given: Tensor) -> Tensor:
        product: Tensor = _Product.apply(given, self)  # type: ignore[no-untyped-call]
        return product

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in this type; it is no copy where it is kept so."""
        return self.weight.to(dtype)

    def put(self, weight: Tensor) -> None:
        """Take the weight of a checkpoint."""
        self.weight.copy_(weight.t() if self.turned else weight)

    def ordinary(self) -> Tensor:
        """Return the weight as a checkpoint has it, float32."""
        weight = self.dense(torch.float32)
        return weight.t().contiguous() if self.turned else weight


def as_multiplied(given: Tensor) -> Tensor:
    """Return activations in the type in which they are multiplied: that of autocast, if it is on."""
    kind = given.device.type
    return given.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else given


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer  # and not its weight: autograd would keep that in the type of the product
        bias = None if layer.bias is None else layer.bias.to(given.dtype)
        return functional.linear(given, layer.dense(given.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.dense(gradient.dtype) if ctx.needs_input_grad[0] else None, None


def freeze(whole: nn.Module, form: Form) -> None:
    """Make all parameters of a model without weights buffers, plain embeddings in this form."""
    for part in whole.modules():
        # An embedding of a class of its own may compute with its weight, and would do so in fewer bits.
        kind = _DTYPES[form] if type(part) is nn.Embedding else torch.float32
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight.ndim > 2:
                raise ValueError("a model with experts cannot be trained by adapters")
            delattr(part, name)
            part.register_buffer(name, torch.empty_like(weight, dtype=kind, device="meta"))
        if kind is not torch.float32:
            part.register_forward_hook(lambda _part, _given, found: found.float())


@torch.no_grad()
def load(part: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Put weights of a checkpoint, by the names of their parameters, where a slice keeps them frozen."""
    for name, weight in weights:
        owner, _, own = name.rpartition(".")
        holder = part.get_submodule(owner)
        if isinstance(holder, FrozenLinear) and own == "weight":
            holder.put(weight)
        else:
            holder.get_buffer(own).copy_(weight)
