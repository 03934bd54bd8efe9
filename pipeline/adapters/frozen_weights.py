"""Weights that stay as a checkpoint has them, in the form in which a run keeps them.

A frozen weight is a buffer: the parameters of a slice are what is trained, and nothing else. Vectors are float32.
Matrices of linear layers and embeddings are float32 or bfloat16. Those of linear layers may be codes as well, which are
made on the CPU, so that every replica has the same:

- "int8": 8 bits a value, and one float32 scale for each row, its largest magnitude over 127;
- "nf4": 4 bits a value, the nearest of 16 quantiles of a normal distribution (QLoRA, arXiv 2305.14314), and one
  bfloat16 scale for each `NF4_BLOCK` values, their largest magnitude.

A product computes in the type of what it is given, or in that of autocast. What autograd keeps of a product holds no
weight in that type: the backward pass makes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.adapters.settings import Form

PLAIN = ("float32", "bfloat16")  # forms that are no codes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "nf4": torch.uint8}
NF4_BLOCK = 64  # values that share a scale
# fmt: off
_QUANTILES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


def is_linear(part: nn.Module) -> bool:
    # GPT-2's linear layers have a class of their own, which only `pipeline.partition` may import.
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


class FrozenLinear(nn.Module):
    """A linear layer whose weight, [outputs, inputs], is frozen. It begins without memory."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, whole: nn.Module, form: Form) -> None:
        super().__init__()
        weight, bias = whole.weight, whole.bias
        assert isinstance(weight, Tensor)
        self.turned = not isinstance(whole, nn.Linear)  # whether a checkpoint has the weight as [inputs, outputs]
        self.out_features, self.in_features = reversed(weight.shape) if self.turned else weight.shape
        self.form, rows, columns = form, self.out_features, self.in_features
        blocks = -(-rows * columns // NF4_BLOCK)
        shape = (blocks, NF4_BLOCK // 2) if form == "nf4" else (rows, columns)
        self.register_buffer("weight", torch.empty(shape, dtype=_DTYPES[form], device="meta"))
        if form == "int8":
            self.register_buffer("scales", torch.empty(rows, 1, device="meta"))
        elif form == "nf4":
            self.register_buffer("scales", torch.empty(blocks, 1, dtype=torch.bfloat16, device="meta"))
        self.register_buffer("bias", bias if bias is None else torch.empty(self.out_features, device="meta"))

    def forward(self, given: Tensor) -> Tensor:
        return self.product(as_multiplied(given))

    def product(self, given: Tensor) -> Tensor:
        product: Tensor = _Product.apply(given, self)  # type: ignore[no-untyped-call]
        return product

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in this type; it is no copy where it is kept so."""
        if self.form in PLAIN:
            return self.weight.to(dtype)
        if self.form == "int8":
            return self.weight.to(dtype).mul_(self.scales)
        values = _pairs(dtype, self.weight.device)[self.weight.int()].view(-1, NF4_BLOCK).mul_(self.scales)
        return values.view(-1)[: self.out_features * self.in_features].view(self.out_features, self.in_features)

    def kept(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the weight of a checkpoint, float32 on the CPU, as it is kept, by the names of the buffers."""
        weight = weight.t() if self.turned else weight
        if self.form in PLAIN:
            return {"weight": weight.to(self.weight.dtype)}
        scales, codes = _int8(weight) if self.form == "int8" else _nf4(weight)
        return {"weight": codes, "scales": scales}

    def ordinary(self) -> Tensor:
        """Return the weight as a checkpoint has it, float32."""
        weight = self.dense(torch.float32)
        return weight.t().contiguous() if self.turned else weight


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and codes."""
    scales = weight.abs().amax(1, keepdim=True) / 127.0
    return scales, (weight / scales.where(scales > 0.0, 1.0)).round().to(torch.int8)


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and codes, two in a byte."""
    blocks = functional.pad(weight.reshape(-1), (0, -weight.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).bfloat16()
    quantiles = torch.tensor(_QUANTILES)
    shares = blocks / scales.float().where(scales > 0.0, 1.0)
    codes = torch.bucketize(shares, (quantiles[1:] + quantiles[:-1]) / 2).to(torch.uint8)
    return scales, codes[:, ::2] << 4 | codes[:, 1::2]


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two values of each byte of codes."""
    quantiles = torch.tensor(_QUANTILES, dtype=dtype, device=device)
    return torch.cartesian_prod(quantiles, quantiles)


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
    """Put weights, by their names in a checkpoint or from `coded`, where a slice keeps them frozen.

    Raises ValueError for codes of another form or shape, or of what is kept in no form.
    """
    for name, weight in weights:
        owner, _, own = name.rpartition(".")
        holder = part.get_submodule(owner)
        found, buffers = {own: weight}, dict(holder.named_buffers(recurse=False))
        if isinstance(holder, FrozenLinear) and own == "weight" and weight.is_floating_point():
            found = holder.kept(weight)
        for each, tensor in found.items():
            if (buffer := buffers.get(each)) is None:
                raise ValueError(f"{name} is no frozen weight of this model")
            same = tensor.dtype == buffer.dtype or (tensor.is_floating_point() and buffer.is_floating_point())
            if not same or tensor.shape != buffer.shape:
                raise ValueError(f"{name} is {_described(tensor)}, not {_described(buffer)}")
            buffer.copy_(tensor)


@torch.no_grad()
def coded(part: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of a checkpoint, float32 on the CPU, as they travel to machines that keep them frozen as `part`.

    Those that it keeps as codes are codes and scales, [name].weight and [name].scales; others have their shape and are
    in its dtype. `part` needs no memory. Weights on the meta device yield shapes and dtypes.
    """
    for name, weight in weights:
        owner, _, own = name.rpartition(".")
        holder = part.get_submodule(owner)
        if isinstance(holder, FrozenLinear) and own == "weight" and holder.form not in PLAIN:
            yield from ((f"{owner}.{each}", tensor) for each, tensor in holder.kept(weight).items())
        else:
            yield name, weight.to(holder.get_buffer(own).dtype)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
