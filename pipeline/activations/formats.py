"""The codecs of activations and gradients: their names, and exactly how many bytes each takes.

    float32, bfloat16     values as they are, or rounded to 8 significant bits
    int8                  8 bits a value, both ways
    int6-int4, int5-int3  as many bits down the pipeline (activations) and back (gradients)

What is sent of a token is one row of bytes in a code of fewer than 16 bits:

    top      bfloat16: a bound of all that follows, in magnitude
    scales   uint8 a block: a bound of the block, as a fraction of the top
    codes    `bits` bits a value

Gradients need fewer bits than activations, provided that their rounding is unbiased (docs/design.md).

Nothing here loads torch: a plan may ask for sizes without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

BLOCK = 32
"""Values of one token that share a scale: a quarter of a bit a value, and what a loud channel can spoil."""
TOP_BYTES = 2
_PLAIN = {32: "float32", 16: "bfloat16"}


class ActivationCode(NamedTuple):
    """How values travel one way. `dithered`: rounded without a bias; else to the nearest."""

    bits: int
    dithered: bool = False

    @property
    def plain(self) -> bool:
        """Whether values travel as floating-point numbers."""
        return self.bits in _PLAIN

    @property
    def dtype(self) -> str:
        """The name of the dtype on the wire."""
        return _PLAIN.get(self.bits, "uint8")

    def row(self, width: int) -> int:
        """Return the length of a token's row on the wire, in elements of `dtype`."""
        return width if self.plain else TOP_BYTES + width // BLOCK + width * self.bits // 8

    def width(self, row: int) -> int:
        """Return the values of a token, given the length of its row; ValueError where there is no such row."""
        width = row if self.plain else (row - TOP_BYTES) * 8 * BLOCK // (8 + self.bits * BLOCK)
        if width < 1 or self.row(width) != row:
            raise ValueError(f"no token takes {row} bytes in {self.bits} bits a value")
        return width

    def values(self, wire: Sequence[int]) -> int:
        """Return how many values a message of this shape on the wire holds."""
        *tokens, row = wire
        return prod(tokens) * self.width(row)

    def size_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes of so many tokens."""
        return tokens * self.row(width) * {"float32": 4, "bfloat16": 2, "uint8": 1}[self.dtype]


class ActivationCodec(NamedTuple):
    """How activations travel down the pipeline, and their gradients back."""

    down: ActivationCode
    back: ActivationCode


def _ladder(down: int, back: int) -> ActivationCodec:
    return ActivationCodec(ActivationCode(down), ActivationCode(back, dithered=True))


ACTIVATION_CODECS = {
    "float32": ActivationCodec(ActivationCode(32), ActivationCode(32)),
    "bfloat16": ActivationCodec(ActivationCode(16), ActivationCode(16)),
    "int8": _ladder(8, 8),
    "int6-int4": _ladder(6, 4),
    "int5-int3": _ladder(5, 3),
}


def check_width(codec: str, width: int, subspace: int | None = None) -> None:
    """Raise ValueError where a subspace is not smaller than the model's width, or what travels not whole blocks."""
    if subspace is not None and subspace >= width:
        raise ValueError(f"a subspace of {subspace} numbers is no smaller than the model's width, {width}")
    sent, whose = (width, "the model's") if subspace is None else (subspace, "the subspace's")
    if sent % BLOCK and not ACTIVATION_CODECS[codec].down.plain:
        raise ValueError(f"the codec {codec} takes widths that are multiples of {BLOCK}, and {whose} is {sent}")
