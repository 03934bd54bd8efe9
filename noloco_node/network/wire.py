"""Messages to bytes and back; limits are known before any memory is taken.

A stream carries frames: one byte of kind, four bytes of header length, eight bytes of body length (big endian), a
MessagePack header, then the raw bytes of the message's tensors (little endian), one after the other.

    MESSAGE  header: the message's name, its scalar fields, and dtype and shape of each tensor; body: the tensors
    BEAT     empty: I am alive and still at it
    ERROR    header: a sentence in UTF-8; the stream ends
    END      empty: a polite end; a stream that closes without it broke

Both ends know the run, so both know which messages a conversation may carry and the exact shape and dtype of every
tensor in them: that is a `Schema`. A header is decoded strictly (unknown names, missing or surplus fields, a number
where a string belongs: all refused) and compared with the schema; only then are the tensors allocated, each in its
final form, and filled straight from the stream. Nothing is unpickled. Non-finite numbers are refused: one of them would
spread from peer to peer and leave nobody's weights usable. Whatever a stranger sends becomes either a message of the
schema or one `Violation`.

The decoder does no I/O (the way of h11 and aioquic): `FrameDecoder.wants()` says where the next bytes belong,
`FrameDecoder.got(n)` takes note of them, so that a socket receives into a tensor with no copy in between.

Nothing here loads torch before a tensor is really handled: a bootstrap peer never does.

`decoded` does the same for records that strangers published: the bounds of their numbers stand with the types
(`noloco_node.units`), and what no type can say is checked for all: a number too near to zero has no finite reciprocal.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from noloco_node.network.schema import FLOATS, Buffer, ReceivePlan, Schema, TensorSpec, Violation, all_finite, room
from noloco_node.units import is_usable

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=msgspec.Struct)
WIRE_VERSION = 5
"""Part of every protocol name and of the run's digest."""

ERROR_BYTES = 1024
"""Cap of the sentence in an ERROR frame."""

_PREFIX = struct.Struct(">BIQ")
_PART_BYTES = 16 * 1024
"""Of a header, for which memory is taken at once."""


class FrameKind(IntEnum):
    """What a frame is."""

    MESSAGE = 1
    BEAT = 2
    ERROR = 3
    END = 4


class Frame(NamedTuple):
    """One complete frame: `content` is the message of a MESSAGE, the sentence of an ERROR, and None otherwise."""

    kind: FrameKind
    content: Any = None


class FrameDecoder:
    """Bytes in, frames out: fill (part of) `wants()`, then say how much with `got`.

    Holds at most one header and one body, both within the schema's limits. After an END, an ERROR or a Violation
    nothing more may come.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._over = False
        self._start()

    def _start(self) -> None:
        self._kind: FrameKind | None = None
        self._plan: ReceivePlan | None = None
        self._body_bytes = 0
        self._slots: list[tuple[str, TensorSpec]] = []
        self._tensors: list[Tensor] = []
        self._header, self._header_bytes = bytearray(), 0
        self._head = bytearray(_PREFIX.size)
        """The prefix, or the next part of the header."""
        self._view = memoryview(self._head)

    def wants(self) -> memoryview:
        """Return where the next bytes belong: never empty, and never beyond the current frame."""
        return self._view

    @property
    def in_message(self) -> bool:
        """Whether a message is under way, beyond its prefix."""
        return self._kind is FrameKind.MESSAGE

    def got(self, count: int) -> Frame | None:
        """Note that the first `count` bytes of `wants()` were filled; return the frame that they complete, if any.

        Raises Violation, after which this intake is useless.
        """
        if self._over:
            raise Violation("bytes after the end of the stream")
        self._view = self._view[count:]
        if self._view:
            return None
        try:
            return self._advance()
        except Violation:
            self._over = True
            self._view = memoryview(self._head)
            raise

    def _advance(self) -> Frame | None:
        """Take the step that the filled buffer allows."""
        if self._kind is None:
            self._kind, self._header_bytes = self._read_prefix()
            if not self._header_bytes:
                return self._finish(Frame(self._kind, "" if self._kind is FrameKind.ERROR else None))
            self._next_part()
            return None
        if len(self._header) < self._header_bytes:
            self._header += self._head
            if len(self._header) < self._header_bytes:
                self._next_part()
                return None
        if self._kind is FrameKind.ERROR:
            return self._finish(Frame(FrameKind.ERROR, self._header.decode("utf-8", "replace")))
        if self._plan is None:
            self._plan = self._schema.plan(self._header, self._body_bytes)
            self._slots = list(self._plan.slots())
        else:
            self._check_last()
        return self._next_tensor(self._plan)

    def _read_prefix(self) -> tuple[FrameKind, int]:
        """Check the prefix; return the kind of the frame and the length of its header."""
        number, header_bytes, self._body_bytes = _PREFIX.unpack(self._head)
        try:
            kind = FrameKind(number)
        except ValueError:
            raise Violation(f"no frame is of kind {number}") from None
        cap = {FrameKind.MESSAGE: self._schema.header_bytes, FrameKind.ERROR: ERROR_BYTES}.get(kind, 0)
        if header_bytes > cap:
            raise Violation(f"header of a {kind.name} frame: {header_bytes} bytes, {cap} allowed")
        if kind is FrameKind.MESSAGE and not header_bytes:
            raise Violation("a MESSAGE frame without a header")
        if kind is not FrameKind.MESSAGE and self._body_bytes:
            raise Violation(f"body of a {kind.name} frame: {self._body_bytes} bytes, none allowed")
        return kind, header_bytes

    def _next_part(self) -> None:
        """Make room for the next part of the header: a long one takes its memory as it comes."""
        self._head = bytearray(min(_PART_BYTES, self._header_bytes - len(self._header)))
        self._view = memoryview(self._head)

    def _next_tensor(self, plan: ReceivePlan) -> Frame | None:
        """Make room for the next tensor that has bytes, or finish the message."""
        while len(self._tensors) < len(self._slots):
            tensor, view = room(self._slots[len(self._tensors)][1])
            self._tensors.append(tensor)
            if len(view):
                self._view = view
                return None
        return self._finish(Frame(FrameKind.MESSAGE, plan.build(self._tensors)))

    def _check_last(self) -> None:
        name, spec = self._slots[len(self._tensors) - 1]
        if spec.dtype in FLOATS and not all_finite(self._tensors[-1]):
            raise Violation(f"{name} is not finite")

    def _finish(self, frame: Frame) -> Frame:
        self._over = frame.kind in (FrameKind.ERROR, FrameKind.END)
        self._start()
        return frame


def encode(message: Any, schema: Schema) -> list[Buffer]:
    header, body = schema.pack(message)
    return [_PREFIX.pack(FrameKind.MESSAGE, len(header), sum(map(len, body))) + header, *body]


def message_bytes(message: Any, schema: Schema) -> int:
    """Return the size of the MESSAGE frame of `message`."""
    return sum(map(len, encode(message, schema)))


def beat() -> bytes:
    return _PREFIX.pack(FrameKind.BEAT, 0, 0)


def end() -> bytes:
    return _PREFIX.pack(FrameKind.END, 0, 0)


def error(sentence: str) -> bytes:
    """Return an ERROR frame; a sentence that is too long is cut."""
    text = sentence.encode()[:ERROR_BYTES]
    return _PREFIX.pack(FrameKind.ERROR, len(text), 0) + text


def decoded(raw: bytes, kind: type[T], most_bytes: int) -> T | None:
    """Return the value that these bytes hold; None where they are too long, or none of `kind`."""
    if len(raw) > most_bytes:
        return None
    try:
        found = msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if _is_usable(found) else None


def _is_usable(found: msgspec.Struct) -> bool:
    for name in found.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, float):
            if not is_usable(value):
                return False
        elif isinstance(value, msgspec.Struct) and not _is_usable(value):
            return False
    return True
