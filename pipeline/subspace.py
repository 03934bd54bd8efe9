"""A subspace of the residual stream: all that stages send each other of a token.

With a subspace, stages send each other only the first k channels of a token. Every layer below the last boundary adds
to these channels alone, and only these channels of the embedding are learnt. All other channels hold fixed features of
the token, which every stage computes from the ids that travel anyway. docs/design/pipeline.md says why nothing is lost.
"""

from __future__ import annotations

from hashlib import shake_256
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

WRITERS = frozenset(
    {"o_proj", "out_proj", "dense", "wo", "down_proj", "dense_4h_to_h", "c_proj", "fc2", "fc_out", "w2"}
)
"""Names of the linear layers that write into the residual stream, in attention and in the feed-forward part."""


class Subspace(NamedTuple):
    """`numbers`: what travels of a token. `seed`: the run's."""

    numbers: int
    seed: int


class TokenFeatures(nn.Module):
    """The channels of the embedding that are not learnt: [..., width - k] of ids [...]."""

    def __init__(self, config: Any, subspace: Subspace) -> None:
        super().__init__()
        self._columns = isqrt(config.vocab_size - 1) + 1
        channels = config.hidden_size - subspace.numbers
        for name in ("_first", "_second"):
            signs = _signs(self._columns, channels, f"{subspace.seed}|fixed features|{name}")
            self.register_buffer(name, signs, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        first: Tensor = self._first[ids // self._columns]  # type: ignore[index]
        return first * self._second[ids % self._columns]  # type: ignore[index]


class NarrowEmbedding(nn.Embedding):
    """An embedding of which the first k channels are learnt, and the others fixed."""

    def __init__(self, whole: nn.Embedding, config: Any, subspace: Subspace) -> None:
        super().__init__(whole.num_embeddings, subspace.numbers, whole.padding_idx, device="meta")
        self.fixed = TokenFeatures(config, subspace)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat((super().forward(ids), self.fixed(ids)), -1)


class NarrowLinear(nn.Linear):
    """A linear layer that writes into the first k channels alone."""

    def __init__(self, whole: nn.Linear, subspace: Subspace) -> None:
        super().__init__(whole.in_features, subspace.numbers, whole.bias is not None, device="meta")
        self._rest = whole.out_features - subspace.numbers

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.pad(super().forward(hidden), (0, self._rest))


def constrain(whole: nn.Module, embedding: str, layers: str, config: Any, subspace: Subspace) -> None:
    """Narrow the embedding of a model without weights, and what writes into the stream in its layers."""
    table = whole.get_submodule(embedding)
    assert isinstance(table, nn.Embedding)
    whole.set_submodule(embedding, NarrowEmbedding(table, config, subspace))
    for name, part in list(whole.get_submodule(layers).named_modules()):
        writes = name.rpartition(".")[2] in WRITERS and isinstance(part, nn.Linear)
        if writes and part.out_features == config.hidden_size:
            whole.set_submodule(f"{layers}.{name}", NarrowLinear(part, subspace))


def widened(weight: Tensor, expected: tuple[int, ...], features: TokenFeatures | None) -> Tensor:
    """Return a parameter in the `expected` shape of an ordinary checkpoint. `features`: of the embedding."""
    if weight.shape == expected:
        return weight
    if features is not None:
        return torch.cat((weight, features(torch.arange(len(weight))).to(weight.dtype)), 1)
    return functional.pad(weight, (0, 0) * (weight.ndim - 1) + (0, expected[0] - len(weight)))


def _signs(rows: int, columns: int, name: str) -> Tensor:
    drawn = bytearray(shake_256(name.encode()).digest(-(-rows * columns // 8)))
    bits = torch.frombuffer(drawn, dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[: rows * columns].view(rows, columns).float().mul_(2.0).sub_(1.0)
