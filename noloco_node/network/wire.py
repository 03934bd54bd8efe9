"""Messages to bytes and back; limits are known before any memory is taken.

A stream carries frames: one byte of kind, four bytes of header length, eight bytes of body length (big endian), a
MessagePack header, then the raw bytes of the message's tensors (little endian), one after the other.

    MESSAGE  header: the message's name, its scalar fields, and dtype and shape of each tensor; body: the tensors
    BEAT     empty: I am alive and still at it
    ERROR    header: a sentence in UTF-8; the stream ends
    END      empty: a polite end; a stream that closes without it broke

A header is decoded strictly (unknown names, missing or surplus fields, a number where a string belongs: all refused)
and compared with the `Schema`; only then are the tensors allocated, each in its final form, and filled straight from
the stream. Nothing is unpickled. Non-finite numbers are refused: one of them would spread from peer to peer and leave
nobody's weights usable. Whatever a stranger sends becomes either a message of the schema or one `Violation`.

The decoder does no I/O (the way of h11 and aioquic): `FrameDecoder.wants()` says where the next bytes belong,
`FrameDecoder.got(n)` takes note of them, so that a socket receives into a tensor with no copy in between.

Nothing here loads torch before a tensor is really handled: a bootstrap peer never does.

`decoded` does the same for records that strangers published: the bounds of their numbers stand with the types
(`noloco_node.units`), and what no type can say is checked for all: a number too near to zero has no finite reciprocal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from noloco_node.network.schema import FieldLayout, MessageRule, Schema, TensorSpec, Violation, listing
from noloco_node.units import LARGEST, LEAST

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=msgspec.Struct)
Buffer: TypeAlias = bytes | memoryview
WIRE_VERSION = 6  # part of every protocol name and of the run's digest
ERROR_BYTES = 1024  # cap of the sentence in an ERROR frame

_PREFIX = struct.Struct(">BIQ")
_PART_BYTES = 16 * 1024  # so much of a header gets its memory at once
_FLOATS = frozenset({"float32", "bfloat16", "float16"})  # the dtypes that can hold what is not finite
_Announced: TypeAlias = list[tuple[str, tuple[int, ...]]] | None
"""What a header says of one field: dtype and shape of each tensor."""


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


class Plan(NamedTuple):
    """An admitted header: the message's rule, its scalar fields, and the layout of each tensor field."""

    rule: MessageRule
    scalars: Any
    layouts: dict[str, FieldLayout]

    @property
    def slots(self) -> list[tuple[str, TensorSpec]]:
        """Name and spec of every tensor in the order of the body."""
        return [
            (f"{self.rule.name}.{name}" + ("" if layout.is_single else f"[{number}]"), spec)
            for name, layout in self.layouts.items()
            for number, spec in enumerate(layout.specs)
        ]


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
        self._plan: Plan | None = None
        self._body_bytes = 0
        self._slots: list[tuple[str, TensorSpec]] = []
        self._tensors: list[Tensor] = []
        self._header, self._header_bytes = bytearray(), 0
        self._head = bytearray(_PREFIX.size)  # the prefix, or the next part of the header
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

        Raises Violation, after which this decoder is useless.
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
            self._plan = read_header(self._schema, self._header, self._body_bytes)
            self._slots = self._plan.slots
        else:
            name, spec = self._slots[len(self._tensors) - 1]
            if spec.dtype in _FLOATS and not _all_finite(self._tensors[-1]):
                raise Violation(f"{name} is not finite")
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

    def _next_tensor(self, plan: Plan) -> Frame | None:
        """Make room for the next tensor that has bytes, or finish the message."""
        while len(self._tensors) < len(self._slots):
            tensor, view = _room(self._slots[len(self._tensors)][1])
            self._tensors.append(tensor)
            if len(view):
                self._view = view
                return None
        return self._finish(Frame(FrameKind.MESSAGE, _message(plan, self._tensors)))

    def _finish(self, frame: Frame) -> Frame:
        self._over = frame.kind in (FrameKind.ERROR, FrameKind.END)
        self._start()
        return frame


# Reading.


def read_header(schema: Schema, header: bytes | bytearray, body_bytes: int) -> Plan:
    """Return what `header` announces; Violation unless the schema admits just that, with `body_bytes` of body."""
    try:
        said = schema.header_decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Violation(f"a header of {len(header)} bytes does not decode: {error}") from None
    rule = schema.by_header[type(said)]
    if len(header) > rule.header_bytes:
        raise Violation(f"header of {rule.name}: {len(header)} bytes, {rule.header_bytes} allowed")
    if said.tensors.keys() != rule.layouts.keys():
        raise Violation(f"{rule.name} has the tensors {listing(said.tensors)}, {listing(rule.layouts)} expected")
    check_numbers(rule, said.fields)
    chosen = {
        name: _choose(f"{rule.name}.{name}", said.tensors[name], layouts) for name, layouts in rule.layouts.items()
    }
    expected = sum(spec.size_bytes for layout in chosen.values() for spec in layout.specs)
    if body_bytes != expected:
        raise Violation(f"body of {rule.name}: {body_bytes} bytes, {expected} expected")
    return Plan(rule, said.fields, chosen)


def check_numbers(rule: MessageRule, message: Any) -> None:
    """Raise Violation where a number of a message, or of its decoded scalars, is outside its bounds."""
    for name, least, most in rule.numbers:
        value = getattr(message, name)
        if not least <= value <= most or not is_usable(value):
            raise Violation(f"{rule.name}.{name} is {value}, from {least:g} to {most:g} expected")


def is_usable(number: float) -> bool:
    """Say whether a number is finite, and zero or far enough from it to divide by."""
    return number == 0.0 or LEAST <= abs(number) <= LARGEST


def _choose(name: str, announced: _Announced, layouts: Sequence[FieldLayout]) -> FieldLayout:
    """Return the layout that was announced; raise Violation when it is none of `layouts`."""
    for layout in layouts:
        if layout.is_none == (announced is None) and [(s.dtype, s.shape) for s in layout.specs] == (announced or []):
            return layout
    expected = " or ".join(map(str, layouts))
    if announced is None:
        raise Violation(f"{name} is none, {expected} expected")
    wanted = max(layouts, key=lambda layout: len(layout.specs)).specs
    if len(announced) == len(wanted):
        for number, ((dtype, shape), spec) in enumerate(zip(announced, wanted, strict=True)):
            if (dtype, shape) != (spec.dtype, spec.shape):
                listed = ", ".join(map(str, shape[:8])) + (", ..." if len(shape) > 8 else "")
                raise Violation(f"tensor {number} of {name} is {dtype[:16]}[{listed}], {spec} expected")
    raise Violation(f"{name} has {len(announced)} tensors, {expected} expected")


def _message(plan: Plan, tensors: Sequence[Tensor]) -> Any:
    """Return the message, given its tensors in the order of `slots`."""
    values: dict[str, Any] = {name: getattr(plan.scalars, name) for name in plan.scalars.__struct_fields__}
    remaining = iter(tensors)
    for name, layout in plan.layouts.items():
        found = tuple(next(remaining) for _ in layout.specs)
        values[name] = None if layout.is_none else found[0] if layout.is_single else found
    return plan.rule.kind(**values)


def _room(spec: TensorSpec) -> tuple[Tensor, memoryview]:
    """Return a new tensor, and its bytes to fill."""
    import torch

    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    return tensor, _view(tensor.reshape(-1))


def _all_finite(tensor: Tensor) -> bool:
    """Say whether no element is infinite or NaN, in one pass and without a temporary of the tensor's size."""
    import torch

    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))


# Writing.


def encode(message: Any, schema: Schema) -> list[Buffer]:
    """Return a MESSAGE frame as buffers to write in order; tensors are viewed, not copied, where possible.

    Floats are cast to the dtype that the schema names. Raises TypeError for a message that the schema does not know,
    ValueError for a tensor that is not as the schema says: both are our own mistakes.
    """
    rule = schema.rules.get(type(message))
    if rule is None:
        raise TypeError(f"{schema!r} has no {type(message).__name__}")
    announced: dict[str, _Announced] = {}
    body: list[Buffer] = []
    for name, layouts in rule.layouts.items():
        announced[name], views = _pack(f"{rule.name}.{name}", getattr(message, name), layouts)
        body += views
    scalars = rule.scalars(**{name: getattr(message, name) for name in rule.scalars.__struct_fields__})
    header = msgspec.msgpack.encode(rule.header(fields=scalars, tensors=announced))
    if len(header) > rule.header_bytes:
        raise ValueError(f"header of {rule.name}: {len(header)} bytes, {rule.header_bytes} allowed")
    return [_PREFIX.pack(FrameKind.MESSAGE, len(header), sum(map(len, body))) + header, *body]


def _pack(name: str, value: Any, layouts: Sequence[FieldLayout]) -> tuple[_Announced, list[Buffer]]:
    """Return what the header announces for one tensor field, and the bytes of its tensors."""
    tensors = () if value is None else (value if isinstance(value, tuple) else (value,))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    for layout in layouts:
        if layout.is_none == (value is None) and [spec.shape for spec in layout.specs] == shapes:
            views: list[Buffer] = [
                _bytes_of(name, tensor, spec) for tensor, spec in zip(tensors, layout.specs, strict=True)
            ]
            return (None if layout.is_none else [(spec.dtype, spec.shape) for spec in layout.specs]), views
    described = " or ".join(map(str, layouts))
    raise ValueError(f"{name} holds {'none' if value is None else shapes}, the schema says {described}")


def _bytes_of(name: str, tensor: Tensor, spec: TensorSpec) -> memoryview:
    import torch

    dtype = getattr(torch, spec.dtype)
    if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        raise ValueError(f"{name} is {tensor.dtype}, the schema says {spec.dtype}")
    return _view(tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1))


def _view(flat: Tensor) -> memoryview:
    import torch

    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


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
    return found if _has_usable(found) else None


def _has_usable(found: object) -> bool:
    if isinstance(found, msgspec.Struct):
        return all(_has_usable(getattr(found, name)) for name in found.__struct_fields__)
    if isinstance(found, tuple):
        return all(map(_has_usable, found))
    return not isinstance(found, float) or is_usable(found)
