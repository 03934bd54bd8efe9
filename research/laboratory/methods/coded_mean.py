"""A mean over all replicas whose messages are coded, with error feedback both ways.

Each replica sends its pseudo-gradient plus what it still owes, rounded; whoever adds them up sends the mean plus what
it owes, rounded alike. So it is with a ring, in which each replica adds up a part. What is rounded is a block of 128
values with a scale of its own, the largest magnitude among them: absolute, since all know where all started.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossip.rule.outer_step import Tensors
from research.laboratory.experiments.cell import Cell
from research.laboratory.experiments.choices import BITS
from research.laboratory.methods.replicas import Model

BLOCK = 128
SCALE_BYTES = 2


class CodedMean:
    """The mean over a cell's replicas. `sent_bytes`: a full set as it travels."""

    def __init__(self, model: Model, cell: Cell) -> None:
        self._bits = BITS[cell.codec]
        self._owed = [[_zeros(part) for part in model] for _ in range(cell.replicas)]
        self._owed_by_all = [_zeros(part) for part in model]
        self.sent_bytes = sum(_bytes(tensor.numel(), self._bits) for part in model for tensor in part)

    def __repr__(self) -> str:
        return f"<CodedMean in {self._bits} bits>"

    def of(
        self, brought: Sequence[Model], weights: Sequence[int] | None = None, members: Sequence[int] | None = None
    ) -> Model:
        """Return the mean of what the replicas bring, weighed if there are weights.

        `members`: the numbers of those that bring something, in order; None: all.
        """
        owed_by = self._owed if members is None else [self._owed[number] for number in members]
        parts = [1.0] * len(brought) if weights is None else [float(weight) for weight in weights]
        heard = [self._sent(model, owed) for model, owed in zip(brought, owed_by, strict=True)]
        shares = torch.tensor([part / sum(parts) for part in parts])
        mean = [
            tuple(torch.tensordot(shares, torch.stack(tensors), 1) for tensors in zip(*stages, strict=True))
            for stages in zip(*heard, strict=True)
        ]
        return self._sent(mean, self._owed_by_all)

    def forget(self, number: int) -> None:
        """Let a replica owe nothing: its machine has lost it."""
        self._owed[number] = [tuple(map(torch.zeros_like, part)) for part in self._owed[number]]

    def _sent(self, model: Model, owed: list[Tensors]) -> Model:
        """Return what arrives of a model, and take note of what it owes then."""
        if self._bits == 32:
            return model
        sent = []
        for number, part in enumerate(model):
            meant = tuple(torch.add(x, rest) for x, rest in zip(part, owed[number], strict=True))
            came = tuple(rounded(x, self._bits) for x in meant)
            owed[number] = tuple(torch.sub(x, y) for x, y in zip(meant, came, strict=True))
            sent.append(came)
        return sent


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return values rounded to so many bits, by blocks."""
    flat, largest = values.flatten(), 2 ** (bits - 1) - 1
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = rows.abs().amax(1, keepdim=True).div_(largest).to(torch.bfloat16).float()
    scale = torch.where(scale > 0.0, scale, torch.ones(()))
    codes = rows.div(scale).round_().clamp_(-largest, largest)
    return codes.mul_(scale).flatten()[: len(flat)].view_as(values)


def _bytes(size: int, bits: int) -> int:
    """Return what a parameter takes on the wire."""
    return size * 4 if bits == 32 else -(-size * bits // 8) + SCALE_BYTES * -(-size // BLOCK)


def _zeros(part: Tensors) -> Tensors:
    return tuple(torch.zeros_like(tensor) for tensor in part)
