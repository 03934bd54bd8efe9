"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the frozen linear layers of a slice, as PEFT has them.

A layer computes W x + alpha / rank * B A x, of which B and A are trained. They have the names of PEFT's files and the
initial values of its rule: A is drawn, from the run's seed and its own name, and B is zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.adapters.frozen_weights import PLAIN, FrozenLinear, as_multiplied, freeze, is_linear
from pipeline.adapters.settings import AdapterConfig, Form

_A, _B = "lora_A", "lora_B"


class AdaptedLinear(FrozenLinear):
    """A frozen linear layer with an adapter, which begins without memory."""

    def __init__(self, whole: nn.Module, adapter: AdapterConfig) -> None:
        super().__init__(whole, adapter.base)
        self._scale = adapter.scale
        self.lora_dropout = nn.Dropout(adapter.dropout)
        self.lora_A = nn.Linear(self.in_features, adapter.rank, bias=False, device="meta")
        self.lora_B = nn.Linear(adapter.rank, self.out_features, bias=False, device="meta")
        if adapter.freeze_a:
            freeze(self.lora_A, "float32")

    def forward(self, given: Tensor) -> Tensor:
        given = as_multiplied(given)
        added: Tensor = self.lora_B(self.lora_A(self.lora_dropout(given)))
        return self.product(given) + added * self._scale

    def ordinary(self) -> Tensor:
        """Return the weight with its adapter's product added, as a checkpoint has it, float32."""
        delta = self._scale * (self.lora_B.weight.detach() @ self.lora_A.weight.detach())
        return super().ordinary() + (delta.t() if self.turned else delta)


def adapt(whole: nn.Module, layers: str, adapter: AdapterConfig) -> None:
    """Freeze a model without weights, and give adapters to the linear layers below `layers` that are its targets."""
    outside: Form = "float32" if adapter.base == "float32" else "bfloat16"
    freeze(whole, outside)
    for name, part in list(whole.named_modules()):
        if is_linear(part):
            inside = name.startswith(f"{layers}.")
            adapted = inside and adapter.is_for(name)
            form = adapter.base if inside else outside
            whole.set_submodule(name, AdaptedLinear(part, adapter) if adapted else FrozenLinear(part, form))


def targets_of(whole: nn.Module, layers: str) -> list[str]:
    """Return the names of the linear layers below `layers`."""
    return [name for name, part in whole.named_modules() if is_linear(part) and name.startswith(f"{layers}.")]


class FrozenSize(NamedTuple):
    """What the frozen weights of a slice take.

    `plain` and `coded`: the numbers of the largest matrix that is multiplied and is no codes, and of one that is.
    """

    bytes: int = 0
    plain: int = 0
    coded: int = 0


def frozen_size(part: nn.Module) -> FrozenSize:
    trained = dict(part.named_parameters())
    layers = [each for each in part.modules() if isinstance(each, FrozenLinear)]
    sizes = [(each.form in PLAIN, each.in_features * each.out_features) for each in layers]
    return FrozenSize(
        sum(each.nbytes for name, each in part.state_dict().items() if name not in trained),
        *(max((size for plain, size in sizes if plain is wanted), default=0) for wanted in (True, False)),
    )


def begin(part: nn.Module, seed: int, device: torch.device | str) -> None:
    """Give a slice memory on a device: its adapters begin, and its frozen weights are zero until they are loaded."""
    for name, empty in part.state_dict(keep_vars=True).items():
        owner, _, own = name.rpartition(".")
        if owner.endswith(f".{_A}"):
            values = _initial(name, empty, seed).to(device)
        else:
            values = torch.zeros_like(empty, device=device)
        trained = isinstance(empty, nn.Parameter)
        setattr(part.get_submodule(owner), own, nn.Parameter(values) if trained else values)


def _initial(name: str, empty: Tensor, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}|adapter|{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return nn.init.kaiming_uniform_(torch.empty(empty.shape), a=math.sqrt(5), generator=generator)


def drawn(part: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return every A of a slice that stays as it was drawn; the slice needs no memory."""
    return {name: _initial(name, empty, seed) for name, empty in part.named_buffers() if name.endswith(f".{_A}.weight")}


def ordinary(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of an ordinary checkpoint, float32: those of a slice with its adapters added to them."""
    for name, holder in part.named_modules():
        if name.endswith((f".{_A}", f".{_B}")):
            continue
        frozen = isinstance(holder, FrozenLinear)
        for own, weight in holder.state_dict().items():
            if "." not in own and not (frozen and own == "scales"):
                yield f"{name}.{own}", holder.ordinary() if frozen and own == "weight" else weight.float()
