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

The decoder does no I/O (the way of h11 and aioquic): `Intake.wants()` says where the next bytes belong, `Intake.got(n)`
takes note of them, so that a socket receives into a tensor with no copy in between.

Nothing here loads torch before a tensor is really handled: a bootstrap peer never does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union, get_args, get_type_hints

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

WIRE_VERSION = 1
"""Part of every protocol name and of the run's digest."""

HEADER_BYTES = 64 * 1024
"""Cap of an ordinary header: room for the shapes of some two thousand tensors."""
LONG_HEADER_BYTES = 1024 * 1024
"""The largest cap that a message may ask for: replies that are text, such as a run file."""
ERROR_BYTES = 1024
"""Cap of the sentence in an ERROR frame."""

_PREFIX = struct.Struct(">BIQ")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
_FLOATS = frozenset({"float32", "bfloat16", "float16"})


class Violation(ConnectionAbortedError):
    """A peer sent what no peer of this run may send; the text names what, and by how much."""


class Kind(IntEnum):
    """What a frame is."""

    MESSAGE = 1
    BEAT = 2
    ERROR = 3
    END = 4


class Frame(NamedTuple):
    """One complete frame: `content` is the message of a MESSAGE, the sentence of an ERROR, and None otherwise."""

    kind: Kind
    content: Any = None


class TensorSpec(NamedTuple):
    """Exactly which tensor is expected: its shape, and the name of its dtype on the wire."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


Buffer: TypeAlias = bytes | memoryview

Layout: TypeAlias = TensorSpec | tuple[TensorSpec, ...] | None
"""What one tensor field holds: one tensor, a tuple of tensors (perhaps empty), or None."""


class Either(NamedTuple):
    """A field that may come in one of several layouts, such as slow weights in full or not at all."""

    layouts: tuple[Layout, ...]


class MessageSpec(NamedTuple):
    """What the schema says of one message: the layout of each field whose annotation mentions `Tensor`.

    The other fields are scalars, checked against their annotations. `header_bytes` caps the encoded header, and with it
    every text in it.
    """

    tensors: Mapping[str, Layout | Either] = {}
    header_bytes: int = HEADER_BYTES


class Schema:
    """The messages that one conversation may carry: frozen dataclasses, each with its `MessageSpec`."""

    def __init__(self, messages: Mapping[type, MessageSpec]) -> None:
        self._rules = {kind.__name__: _rule(kind, spec) for kind, spec in messages.items()}
        if len(self._rules) != len(messages):
            raise ValueError("two messages of one schema share a name")
        self.header_bytes = max(spec.header_bytes for spec in messages.values())
        headers = tuple(rule.header for rule in self._rules.values())
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[headers])  # noqa: UP007

    def __repr__(self) -> str:
        return f"Schema({', '.join(self._rules)})"

    @property
    def body_bytes(self) -> int:
        """Bytes of the largest body that a message of this schema may have."""
        return max(sum(_largest_bytes(layouts) for layouts in rule.layouts.values()) for rule in self._rules.values())

    def encode(self, message: Any) -> list[Buffer]:
        """Return the frame of `message` as buffers to write in order; tensors are viewed, not copied, where possible.

        Floats are cast to the dtype that the schema names. Raises TypeError for a message that the schema does not
        know, ValueError for a tensor that is not as the schema says: both are our own mistakes.
        """
        rule = self._rules.get(type(message).__name__)
        if rule is None or rule.kind is not type(message):
            raise TypeError(f"{self!r} has no {type(message).__name__}")
        announced: dict[str, _Announced] = {}
        body: list[Buffer] = []
        for name, layouts in rule.layouts.items():
            layout, views = _pack(f"{type(message).__name__}.{name}", getattr(message, name), layouts)
            announced[name] = layout
            body += views
        scalars = rule.scalars(**{name: getattr(message, name) for name in rule.scalars.__struct_fields__})
        header = msgspec.msgpack.encode(rule.header(fields=scalars, tensors=announced))
        if len(header) > rule.header_bytes:
            raise ValueError(f"header of {type(message).__name__}: {len(header)} bytes, {rule.header_bytes} allowed")
        prefix = _PREFIX.pack(Kind.MESSAGE, len(header), sum(len(view) for view in body))
        return [prefix + header, *body]

    def plan(self, header: bytes | bytearray, body_bytes: int) -> Plan:
        """Return what `header` announces; Violation unless the schema admits just that, with `body_bytes` of body."""
        try:
            decoded = self._decoder.decode(header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Violation(f"a header of {len(header)} bytes does not decode: {error}") from None
        rule = self._rules[type(decoded).__name__]
        if len(header) > rule.header_bytes:
            raise Violation(f"header of {rule.kind.__name__}: {len(header)} bytes, {rule.header_bytes} allowed")
        if decoded.tensors.keys() != rule.layouts.keys():
            raise Violation(
                f"{rule.kind.__name__} has the tensors {_listing(decoded.tensors)}, {_listing(rule.layouts)} expected"
            )
        for name in rule.scalars.__struct_fields__:
            value = getattr(decoded.fields, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise Violation(f"{rule.kind.__name__}.{name} is {value}")
        chosen = {
            name: _choose(f"{rule.kind.__name__}.{name}", decoded.tensors[name], layouts)
            for name, layouts in rule.layouts.items()
        }
        expected = sum(spec.size_bytes for layout in chosen.values() for spec in _specs(layout))
        if body_bytes != expected:
            raise Violation(f"body of {rule.kind.__name__}: {body_bytes} bytes, {expected} expected")
        return Plan(rule.kind, decoded.fields, chosen)


class Plan(NamedTuple):
    """An admitted header: the message's type, its scalar fields, and the layout of each tensor field."""

    kind: type
    scalars: Any
    layouts: Mapping[str, Layout]

    def slots(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield name and spec of every tensor in the order of the body."""
        for name, layout in self.layouts.items():
            single = isinstance(layout, TensorSpec)
            for number, spec in enumerate(_specs(layout)):
                yield f"{self.kind.__name__}.{name}" + ("" if single else f"[{number}]"), spec

    def build(self, tensors: list[Tensor]) -> Any:
        """Return the message, given its tensors in the order of `slots`."""
        values: dict[str, Any] = {name: getattr(self.scalars, name) for name in self.scalars.__struct_fields__}
        remaining = iter(tensors)
        for name, layout in self.layouts.items():
            if layout is None:
                values[name] = None
            elif isinstance(layout, TensorSpec):
                values[name] = next(remaining)
            else:
                values[name] = tuple(next(remaining) for _ in layout)
        return self.kind(**values)


class Intake:
    """Bytes in, frames out: fill (part of) `wants()`, then say how much with `got`.

    Holds at most one header and one body, both within the schema's limits. After an END, an ERROR or a Violation
    nothing more may come.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._over = False
        self._start()

    def _start(self) -> None:
        self._kind: Kind | None = None
        self._plan: Plan | None = None
        self._body_bytes = 0
        self._slots: list[tuple[str, TensorSpec]] = []
        self._tensors: list[Tensor] = []
        self._head = bytearray(_PREFIX.size)
        self._view = memoryview(self._head)

    def wants(self) -> memoryview:
        """Return where the next bytes belong: never empty, and never beyond the current frame."""
        return self._view

    @property
    def between_frames(self) -> bool:
        """Whether the bytes so far end with a complete frame."""
        return self._kind is None and len(self._view) == _PREFIX.size

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
            header_bytes = self._read_prefix()
            if header_bytes:
                self._head = bytearray(header_bytes)
                self._view = memoryview(self._head)
                return None
        elif self._plan is None:
            if self._kind is Kind.ERROR:
                return self._finish(Frame(Kind.ERROR, self._head.decode("utf-8", "replace")))
            self._plan = self._schema.plan(self._head, self._body_bytes)
            self._slots = list(self._plan.slots())
        else:
            self._check_last()
        return self._next_tensor()

    def _read_prefix(self) -> int:
        """Check the prefix and return the length of the header that follows."""
        number, header_bytes, self._body_bytes = _PREFIX.unpack(self._head)
        try:
            self._kind = Kind(number)
        except ValueError:
            raise Violation(f"no frame is of kind {number}") from None
        cap = {Kind.MESSAGE: self._schema.header_bytes, Kind.ERROR: ERROR_BYTES}.get(self._kind, 0)
        if header_bytes > cap:
            raise Violation(f"header of a {self._kind.name} frame: {header_bytes} bytes, {cap} allowed")
        if self._kind is Kind.MESSAGE:
            if not header_bytes:
                raise Violation("a MESSAGE frame without a header")
        elif self._body_bytes:
            raise Violation(f"body of a {self._kind.name} frame: {self._body_bytes} bytes, none allowed")
        return int(header_bytes)

    def _next_tensor(self) -> Frame | None:
        """Make room for the next tensor that has bytes, or finish the frame."""
        if self._plan is None:
            return self._finish(Frame(self._kind or Kind.BEAT, "" if self._kind is Kind.ERROR else None))
        while len(self._tensors) < len(self._slots):
            tensor, view = _room(self._slots[len(self._tensors)][1])
            self._tensors.append(tensor)
            if len(view):
                self._view = view
                return None
        return self._finish(Frame(Kind.MESSAGE, self._plan.build(self._tensors)))

    def _check_last(self) -> None:
        name, spec = self._slots[len(self._tensors) - 1]
        if spec.dtype in _FLOATS and not _all_finite(self._tensors[-1]):
            raise Violation(f"{name} is not finite")

    def _finish(self, frame: Frame) -> Frame:
        self._over = frame.kind in (Kind.ERROR, Kind.END)
        self._start()
        return frame


def beat() -> bytes:
    """Return a BEAT frame."""
    return _PREFIX.pack(Kind.BEAT, 0, 0)


def end() -> bytes:
    """Return an END frame."""
    return _PREFIX.pack(Kind.END, 0, 0)


def error(sentence: str) -> bytes:
    """Return an ERROR frame; a sentence that is too long is cut."""
    text = sentence.encode()[:ERROR_BYTES]
    return _PREFIX.pack(Kind.ERROR, len(text), 0) + text


_Shape: TypeAlias = tuple[str, tuple[int, ...]]
_Announced: TypeAlias = list[_Shape] | None


class _TensorMark:
    """Stands for `torch.Tensor` while annotations are read, so that torch need not be loaded."""


class _Rule(NamedTuple):
    """How one message maps to a header struct and to tensors."""

    kind: type
    scalars: Any
    header: Any
    layouts: Mapping[str, tuple[Layout, ...]]
    header_bytes: int


def _rule(kind: type, spec: MessageSpec) -> _Rule:
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    if not 0 < spec.header_bytes <= LONG_HEADER_BYTES:
        raise ValueError(f"{kind.__name__}: header_bytes is {spec.header_bytes}, at most {LONG_HEADER_BYTES} allowed")
    hints = get_type_hints(kind, localns={"Tensor": _TensorMark})
    names = [field.name for field in dataclass_fields(kind)]
    tensors = [name for name in names if _mentions_tensor(hints[name])]
    if set(tensors) != set(spec.tensors):
        raise ValueError(
            f"{kind.__name__} has the tensors {_listing(tensors)}, the schema says {_listing(spec.tensors)}"
        )
    layouts: dict[str, tuple[Layout, ...]] = {}
    for name in tensors:
        layout = spec.tensors[name]
        layouts[name] = layout.layouts if isinstance(layout, Either) else (layout,)
    scalars = msgspec.defstruct(
        kind.__name__, [(name, hints[name]) for name in names if name not in layouts], forbid_unknown_fields=True
    )
    header = msgspec.defstruct(
        kind.__name__,
        [("fields", scalars), ("tensors", dict[str, _Announced])],
        forbid_unknown_fields=True,
        tag_field="message",
        tag=kind.__name__,
    )
    return _Rule(kind, scalars, header, layouts, spec.header_bytes)


def _mentions_tensor(hint: Any) -> bool:
    named = (getattr(hint, "__module__", None), getattr(hint, "__name__", None))
    return hint is _TensorMark or named == ("torch", "Tensor") or any(map(_mentions_tensor, get_args(hint)))


def _specs(layout: Layout) -> tuple[TensorSpec, ...]:
    if layout is None:
        return ()
    return (layout,) if isinstance(layout, TensorSpec) else layout


def _largest_bytes(layouts: tuple[Layout, ...]) -> int:
    return max(sum(spec.size_bytes for spec in _specs(layout)) for layout in layouts)


def _listing(names: Any) -> str:
    return ", ".join(sorted(names)) or "(none)"


def _choose(name: str, announced: _Announced, layouts: tuple[Layout, ...]) -> Layout:
    """Return the layout that was announced; raise Violation when it is none of `layouts`."""
    for layout in layouts:
        if (layout is None) == (announced is None) and [(s.dtype, s.shape) for s in _specs(layout)] == (
            announced or []
        ):
            return layout
    expected = " or ".join(_describe(layout) for layout in layouts)
    if announced is None:
        raise Violation(f"{name} is none, {expected} expected")
    nearest = max(layouts, key=lambda layout: len(_specs(layout)))
    wanted = _specs(nearest)
    if len(announced) == len(wanted):
        for number, ((dtype, shape), spec) in enumerate(zip(announced, wanted, strict=True)):
            if (dtype, shape) != (spec.dtype, spec.shape):
                listed = ", ".join(map(str, shape[:8])) + (", ..." if len(shape) > 8 else "")
                raise Violation(f"tensor {number} of {name} is {dtype[:16]}[{listed}], {spec} expected")
    raise Violation(f"{name} has {len(announced)} tensors, {expected} expected")


def _describe(layout: Layout) -> str:
    if layout is None:
        return "none"
    return str(layout) if isinstance(layout, TensorSpec) else f"{len(layout)} tensors"


def _pack(name: str, value: Any, layouts: tuple[Layout, ...]) -> tuple[_Announced, list[Buffer]]:
    """Return what the header announces for one tensor field, and the bytes of its tensors."""
    tensors = () if value is None else (tuple(value) if isinstance(value, tuple) else (value,))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    for layout in layouts:
        if (layout is None) == (value is None) and [spec.shape for spec in _specs(layout)] == shapes:
            specs = _specs(layout)
            views: list[Buffer] = [_bytes_of(name, tensor, spec) for tensor, spec in zip(tensors, specs, strict=True)]
            return (None if layout is None else [(spec.dtype, spec.shape) for spec in specs]), views
    described = " or ".join(_describe(layout) for layout in layouts)
    raise ValueError(f"{name} holds {'none' if value is None else shapes}, the schema says {described}")


def _bytes_of(name: str, tensor: Tensor, spec: TensorSpec) -> memoryview:
    import torch

    dtype = getattr(torch, spec.dtype)
    if tensor.dtype != dtype and not (tensor.dtype.is_floating_point and dtype.is_floating_point):
        raise ValueError(f"{name} is {tensor.dtype}, the schema says {spec.dtype}")
    flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1)
    return _view(flat)


def _view(flat: Tensor) -> memoryview:
    """Return the memory of a flat CPU tensor as bytes."""
    import torch

    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


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
