"""Whole sets of weights encoded and decoded at once: what a round does a piece at a time, for whoever compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gossip.exchange import codec
from gossip.exchange.codec import PIECE, Coded, OwnWeights, Reader, pieces
from gossip.rule.outer_step import Tensors
from gossip.settings import Format


class Encoded(NamedTuple):
    """What travels, and the sender's own weights as both read them from it."""

    wire: Tensors
    decoded: Tensors


def encode(form: Format, weights: Tensors, steps: Sequence[float] = ()) -> Encoded:
    """Encode weights."""
    wire = codec.encode(form, OwnWeights(weights), steps).coded.wire
    return Encoded(wire, decode(form, wire, weights, steps))


def decode(form: Format, wire: Tensors, own: Tensors, steps: Sequence[float] = (), longest: int = PIECE) -> Tensors:
    """Return what a receiver of weights `own` reads, in pieces of so many values at most."""
    own = tuple(tensor.detach().contiguous() for tensor in own)
    reader, decoded = Reader(Coded(form, wire, steps), own), tuple(map(torch.empty_like, own))
    for number, values in enumerate(decoded):
        for at in pieces(form, values.numel(), longest):
            out = values.view(-1)[at]
            out.copy_(reader.read(number, at, own[number].view(-1)[at], out))
    return decoded
