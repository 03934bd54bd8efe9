"""Whole sets of weights encoded and decoded at once: what a round does a piece at a time, for whoever compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gossip.exchange import codec
from gossip.exchange.codec import PIECE, Coded, Feedback, Reader, pieces
from gossip.rule.outer_step import Tensors
from gossip.settings import Format


class Encoded(NamedTuple):
    """What travels, and the sender's own weights as both read them from it."""

    wire: Tensors
    decoded: Tensors


def encode(form: Format, weights: Tensors, residual: Tensors = (), steps: Sequence[float] = ()) -> Encoded:
    """Encode weights plus residual."""
    wire = codec.encode(form, weights, residual, steps).coded.wire
    return Encoded(wire, decode(form, wire, meant_by(weights, residual), steps))


def decode(form: Format, wire: Tensors, own: Tensors, steps: Sequence[float] = (), longest: int = PIECE) -> Tensors:
    """Return what a receiver of weights `own` reads, in pieces of so many values at most."""
    own = tuple(tensor.detach().contiguous() for tensor in own)
    reader, decoded = Reader(Coded(form, wire, steps), own), tuple(map(torch.empty_like, own))
    for number, values in enumerate(decoded):
        for at in pieces(form, values.numel(), longest):
            out = values.view(-1)[at]
            out.copy_(reader.read(number, at, own[number].view(-1)[at], out))
    return decoded


def meant_by(weights: Tensors, residual: Tensors) -> Tensors:
    """Return weights and what is owed, that is what is meant."""
    return tuple(torch.add(w, e) for w, e in zip(weights, residual, strict=True)) if residual else weights


def settle(feedback: Feedback, weights: Tensors, decoded: Tensors) -> None:
    """Take note that `decoded` was used for `weights`."""
    feedback.begin(weights)
    for number, (meant, sent) in enumerate(zip(meant_by(weights, feedback.residual), decoded, strict=True)):
        feedback.settle(number, slice(None), meant.reshape(-1), sent.reshape(-1))
