"""Messages that arrive wrong, as a broken or hostile sender would have them: through the production wire.

Nothing here decides what a receiver makes of a wrong message. It is encoded as its sender would, spoilt, and decoded by
`wire.FrameDecoder` against the schema of the receiver: what comes out is what a real peer would get, another message or
a `Violation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from noloco_node.network.schema import MessageSpec, Schema, TensorSpec, Violation
from noloco_node.network.wire import FrameDecoder, beat, encode


class Corruption(StrEnum):
    """What is wrong with a message."""

    FLIP = "flip"
    """Some bytes of the frame are others."""
    SHAPE = "shape"
    """Its tensors have one element more in their last dimension, and its header says so."""
    NOT_FINITE = "not finite"
    """A tensor contains a NaN."""
    GARBLED_VALUES = "garbled values"
    """All floats are a million times what they were: finite, and absurd."""


GARBLING = 1e6
_MOST_FLIPS = 4


@cache
def tensor_fields(kind: type) -> tuple[str, ...]:
    """Return the names of the fields whose annotations mention `Tensor`, as the schema reads them."""
    return tuple(field.name for field in dataclasses.fields(kind) if "Tensor" in str(field.type))


def tensors_of(message: Any) -> list[Tensor]:
    """Return all tensors of a message in the order of its fields."""
    values = [getattr(message, name) for name in tensor_fields(message.__class__)]
    several = [value if isinstance(value, tuple) else (value,) for value in values if value is not None]
    return [tensor for group in several for tensor in group]


def spoil(message: Any, how: Corruption, said: Schema, heard: Schema, rng: Random) -> Any:
    """Return what a receiver with the schema `heard` decodes of a message that a sender with the schema `said` spoilt.

    Raises Violation where the receiver does. A message without floats cannot be `NOT_FINITE` or `GARBLED_VALUES`: bytes
    are flipped instead.
    """
    floats = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors_of(message))
    if how is Corruption.FLIP or (how is not Corruption.SHAPE and not floats):
        return _decode(_flip(_frame(message, said), len(encode(message, said)[0]), rng), heard)
    if how is Corruption.SHAPE:
        wrong = dataclasses.replace(message, **_mapped(message, _grown))
        # By this schema, of this name, it is as it should be.
        spec = MessageSpec(said.names[message.__class__], _mapped(wrong, _spec))
        return _decode(_frame(wrong, Schema({message.__class__: spec})), heard)
    change = _with_nan if how is Corruption.NOT_FINITE else _garbled
    spoilt = dataclasses.replace(message, **_mapped(message, change))
    return _decode(_frame(spoilt, said), heard)


def _frame(message: Any, schema: Schema) -> bytearray:
    return bytearray().join(encode(message, schema))


def _flip(frame: bytearray, head_bytes: int, rng: Random) -> bytearray:
    """Change one to four bytes: of prefix and header in half of all cases, for the tensors are mostly far longer."""
    reach = head_bytes if rng.random() < 0.5 else len(frame)
    for _ in range(rng.randint(1, _MOST_FLIPS)):
        frame[rng.randrange(reach)] ^= rng.randint(1, 255)
    return frame


def _decode(frame: bytearray, schema: Schema) -> Any:
    """Return the message that a receiver reads.

    Lengths that grew make it wait for bytes that the sender's beats bring in time. Here they come at once.
    """
    intake, rest = FrameDecoder(schema), memoryview(frame)
    while True:
        space = intake.wants()
        if not rest:
            rest = memoryview(beat())
        count = min(len(space), len(rest))
        space[:count] = rest[:count]
        rest = rest[count:]
        found = intake.got(count)
        if found is not None:
            if rest:
                raise Violation(f"{len(rest)} bytes follow a frame of the kind {found.kind.name}")
            return found.content


def _mapped(message: Any, change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Return what `change` makes of every tensor of a message, by field."""
    found: dict[str, Any] = {}
    for name in tensor_fields(message.__class__):
        value = getattr(message, name)
        several = isinstance(value, tuple)
        found[name] = tuple(map(change, value)) if several else None if value is None else change(value)
    return found


def _grown(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor[..., :1]], dim=-1) if tensor.dim() else tensor.reshape(1).repeat(2)


def _with_nan(tensor: Tensor) -> Tensor:
    spoilt = tensor.detach().clone()
    if spoilt.is_floating_point() and spoilt.numel():
        spoilt.view(-1)[0] = float("nan")
    return spoilt


def _garbled(tensor: Tensor) -> Tensor:
    return tensor.detach() * GARBLING if tensor.is_floating_point() else tensor


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
