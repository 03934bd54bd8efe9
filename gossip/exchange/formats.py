"""The forms in which weights may travel, and exactly which tensors travel in each: known from the shapes alone.

    float32    every tensor as it is
    bfloat16   every tensor in its own shape, rounded to 8 significant bits
    int8       codes int8 [values], scales float32 [blocks]: value = code * scale of its block
    int4       codes uint8 [bytes]: two values a byte, of each only value / step mod 16

The last two are one tensor for all parameters, in their order, rather than one a parameter: a header that stays small,
and one allocation. What belongs to one parameter never shares a block or a byte with another. A parameter of n values
takes ceil(n / BLOCK) scales in int8. In int4 it takes h = ceil(n / 2) bytes: byte i holds value i in its low half and
value h + i in its high one, so that both halves are contiguous pieces; an odd n leaves the last high half zero.

Nothing here loads torch: a plan may ask for sizes without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

BLOCK = 256
"""Values of one parameter that share a scale in int8: 1.6 % on top of the codes."""

Shape = tuple[int, ...]


class Format(StrEnum):
    """How weights travel."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def is_modular(self) -> bool:
        """Whether values travel modulo 16 of steps that both sides derive from probes, and are found near the own."""
        return self is Format.INT4


def absolute(form: Format) -> Format:
    """Return the form in which weights travel to somebody who is to take them over, and may be anywhere.

    int4 says where a value is relative to one nearby: with a step that follows the distance, an adopted weight would
    be noise. The other forms are absolute, and stay.
    """
    return Format.BFLOAT16 if form.is_modular else form


class WireSpec(NamedTuple):
    """One tensor that travels: the name of its dtype, and its shape."""

    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * {"float32": 4, "bfloat16": 2}.get(self.dtype, 1)


def wire_specs(form: Format, shapes: Sequence[Shape]) -> tuple[WireSpec, ...]:
    """Return what travels for parameters of these shapes, in order."""
    if form in (Format.FLOAT32, Format.BFLOAT16):
        return tuple(WireSpec(form.value, tuple(shape)) for shape in shapes)
    sizes = [math.prod(shape) for shape in shapes]
    if form is Format.INT8:
        return WireSpec("int8", (sum(sizes),)), WireSpec("float32", (sum(map(blocks, sizes)),))
    return (WireSpec("uint8", (sum(map(packed_bytes, sizes)),)),)


def wire_bytes(form: Format, shapes: Sequence[Shape]) -> int:
    """Return the bytes of all tensors that travel for parameters of these shapes."""
    return sum(spec.size_bytes for spec in wire_specs(form, shapes))


def blocks(size: int) -> int:
    """Return the scales that a parameter of `size` values takes in int8."""
    return -(-size // BLOCK)


def packed_bytes(size: int) -> int:
    """Return the bytes that a parameter of `size` values takes in int4."""
    return -(-size // 2)
