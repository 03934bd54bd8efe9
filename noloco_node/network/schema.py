"""What may be said in a conversation: which messages, and the exact shape and dtype of each of their tensors.

Both ends know the run, and everything here follows from it before the first byte arrives. So a header is not asked what
it brings: it is decoded strictly, compared, and either it is exactly what the schema says or it is a `Violation`. The
types of the scalar fields are read from the message classes themselves.

Nothing here loads torch before a tensor is really handled: a bootstrap peer never does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

from noloco_node.units import LARGEST, is_usable

if TYPE_CHECKING:
    from torch import Tensor

HEADER_BYTES = 64 * 1024
"""Cap of an ordinary header: room for the shapes of some two thousand tensors."""
LONG_HEADER_BYTES = 1024 * 1024
"""The largest cap that a message may ask for: replies that are text, such as a run file."""
FLOATS = frozenset({"float32", "bfloat16", "float16"})
"""The dtypes that can hold what is not finite."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}


class Violation(ConnectionAbortedError):
    """A peer sent what no peer of this run may send; the text names what, and by how much."""


class TensorSpec(NamedTuple):
    """Exactly which tensor is expected: its shape, and the name of its dtype on the wire."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


Buffer: TypeAlias = bytes | memoryview

Layout: TypeAlias = TensorSpec | tuple[TensorSpec, ...] | None
"""What one tensor field holds: one tensor, a tuple of tensors (perhaps empty), or None."""


class OneOf(NamedTuple):
    """A field that may come in one of several layouts, such as slow weights in full or not at all."""

    layouts: tuple[Layout, ...]


class MessageSpec(NamedTuple):
    """What the schema says of one message: its name on the wire, and the layout of each field whose annotation mentions
    `Tensor`.

    The name is given and not the class's: a class may be renamed, and peers of other versions must still understand.
    The other fields are scalars, checked against their annotations: a number is `Annotated` with the least and the most
    that it may be, as one of `noloco_node.units` or, where no such import is allowed, as a tuple. `header_bytes` caps
    the encoded header, and with it every text in it. `added`: texts, or bytes, that the message once had
    not, and that are not written where they are empty.
    """

    name: str
    tensors: Mapping[str, Layout | OneOf] = {}
    header_bytes: int = HEADER_BYTES
    added: tuple[str, ...] = ()


class Schema:
    """The messages that one conversation may carry: frozen dataclasses, each with its `MessageSpec`."""

    def __init__(self, messages: Mapping[type, MessageSpec]) -> None:
        self._rules = {kind: _rule(kind, spec) for kind, spec in messages.items()}
        self.names = {kind: spec.name for kind, spec in messages.items()}
        """The name on the wire of each kind of message."""
        if len(set(self.names.values())) != len(messages):
            raise ValueError("two messages of one schema share a name")
        self.header_bytes = max(spec.header_bytes for spec in messages.values())
        self._by_header = {rule.header: rule for rule in self._rules.values()}
        self._decoder = _decoder(tuple(self._by_header))

    def __repr__(self) -> str:
        return f"Schema({', '.join(self.names.values())})"

    @property
    def body_bytes(self) -> int:
        return max(sum(_largest_bytes(layouts) for layouts in rule.layouts.values()) for rule in self._rules.values())

    def pack(self, message: Any) -> tuple[bytes, list[Buffer]]:
        """Return the header of `message` and its body as buffers to write in order; tensors are viewed, not copied,
        where possible.

        Floats are cast to the dtype that the schema names. Raises TypeError for a message that the schema does not
        know, ValueError for a tensor that is not as the schema says: both are our own mistakes.
        """
        rule = self._rules.get(type(message))
        if rule is None:
            raise TypeError(f"{self!r} has no {type(message).__name__}")
        announced: dict[str, _Announced] = {}
        body: list[Buffer] = []
        for name, layouts in rule.layouts.items():
            announced[name], views = _pack(f"{rule.name}.{name}", getattr(message, name), layouts)
            body += views
        scalars = rule.scalars(**{name: getattr(message, name) for name in rule.scalars.__struct_fields__})
        header = msgspec.msgpack.encode(rule.header(fields=scalars, tensors=announced))
        if len(header) > rule.header_bytes:
            raise ValueError(f"header of {rule.name}: {len(header)} bytes, {rule.header_bytes} allowed")
        return header, body

    def check_numbers(self, message: Any) -> None:
        """Raise Violation where a number of `message` is outside its bounds: for who hands messages over undecoded."""
        rule = self._rules.get(type(message))
        if rule is not None:
            _check_numbers(rule, message)

    def plan(self, header: bytes | bytearray, body_bytes: int) -> ReceivePlan:
        """Return what `header` announces; Violation unless the schema admits just that, with `body_bytes` of body."""
        try:
            decoded = self._decoder.decode(header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Violation(f"a header of {len(header)} bytes does not decode: {error}") from None
        rule = self._by_header[type(decoded)]
        if len(header) > rule.header_bytes:
            raise Violation(f"header of {rule.name}: {len(header)} bytes, {rule.header_bytes} allowed")
        if decoded.tensors.keys() != rule.layouts.keys():
            raise Violation(
                f"{rule.name} has the tensors {_listing(decoded.tensors)}, {_listing(rule.layouts)} expected"
            )
        _check_numbers(rule, decoded.fields)
        chosen = {
            name: _choose(f"{rule.name}.{name}", decoded.tensors[name], layouts)
            for name, layouts in rule.layouts.items()
        }
        expected = sum(spec.size_bytes for layout in chosen.values() for spec in _specs(layout))
        if body_bytes != expected:
            raise Violation(f"body of {rule.name}: {body_bytes} bytes, {expected} expected")
        return ReceivePlan(rule.name, rule.kind, decoded.fields, chosen)


class ReceivePlan(NamedTuple):
    """An admitted header: the message's name and type, its scalar fields, and the layout of each tensor field."""

    name: str
    kind: type
    scalars: Any
    layouts: Mapping[str, Layout]

    def slots(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield name and spec of every tensor in the order of the body."""
        for name, layout in self.layouts.items():
            single = isinstance(layout, TensorSpec)
            for number, spec in enumerate(_specs(layout)):
                yield f"{self.name}.{name}" + ("" if single else f"[{number}]"), spec

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


_Shape: TypeAlias = tuple[str, tuple[int, ...]]
_Announced: TypeAlias = list[_Shape] | None


class _TensorMark:
    """Stands for `torch.Tensor` while annotations are read, so that torch need not be loaded."""


class _Rule(NamedTuple):
    """How one message maps to a header struct and to tensors."""

    name: str
    kind: type
    scalars: Any
    header: Any
    numbers: tuple[tuple[str, float, float], ...]
    layouts: Mapping[str, tuple[Layout, ...]]
    header_bytes: int


class _Parts(NamedTuple):
    """What follows from a message's class and name alone."""

    tensors: tuple[str, ...]
    scalars: Any
    header: Any
    numbers: tuple[tuple[str, float, float], ...]
    """The least and the most of each number, by its name."""


def _rule(kind: type, spec: MessageSpec) -> _Rule:
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    if not 0 < spec.header_bytes <= LONG_HEADER_BYTES:
        raise ValueError(f"{spec.name}: header_bytes is {spec.header_bytes}, at most {LONG_HEADER_BYTES} allowed")
    parts = _parts(kind, spec.name, spec.added)
    if set(parts.tensors) != set(spec.tensors):
        raise ValueError(
            f"{spec.name} has the tensors {_listing(parts.tensors)}, the schema says {_listing(spec.tensors)}"
        )
    layouts: dict[str, tuple[Layout, ...]] = {}
    for name in parts.tensors:
        layout = spec.tensors[name]
        layouts[name] = layout.layouts if isinstance(layout, OneOf) else (layout,)
    return _Rule(spec.name, kind, parts.scalars, parts.header, parts.numbers, layouts, spec.header_bytes)


@lru_cache(maxsize=64)
def _parts(kind: type, message_name: str, added: tuple[str, ...]) -> _Parts:
    """Take a message's class apart: once, for the peers of a simulation make thousands of equal schemas."""
    hints = get_type_hints(kind, localns={"Tensor": _TensorMark}, include_extras=True)
    names = [field.name for field in dataclass_fields(kind)]
    tensors = tuple(name for name in names if _mentions_tensor(hints[name]))
    fields: list[Any] = [
        (name, hints[name], hints[name]()) if name in added else (name, hints[name])
        for name in names
        if name not in tensors
    ]
    scalars = msgspec.defstruct(message_name, fields, forbid_unknown_fields=True, omit_defaults=True, kw_only=True)
    header = msgspec.defstruct(
        message_name,
        [("fields", scalars), ("tensors", dict[str, _Announced])],
        forbid_unknown_fields=True,
        tag_field="message",
        tag=message_name,
    )
    bounds = {name: _bounds(hints[name]) for name in names}
    numbers = tuple((name, *between) for name, between in bounds.items() if between is not None)
    return _Parts(tensors, scalars, header, numbers)


@lru_cache(maxsize=64)
def _decoder(headers: tuple[Any, ...]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Union[headers])  # noqa: UP007


def _bounds(hint: Any) -> tuple[float, float] | None:
    """Return the least and the most that a number may be by its type; None for what is no number, or has no bounds."""
    if get_origin(hint) is Annotated:
        said: Any = hint.__metadata__[0]
        if isinstance(said, msgspec.Meta):
            said = said.ge, said.le
        least, most = said
        return least, most
    return (-LARGEST, LARGEST) if hint is float else None


def _check_numbers(rule: _Rule, message: Any) -> None:
    for name, least, most in rule.numbers:
        value = getattr(message, name)
        if not least <= value <= most or not is_usable(value):
            raise Violation(f"{rule.name}.{name} is {value}, from {least:g} to {most:g} expected")


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
    import torch

    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def room(spec: TensorSpec) -> tuple[Tensor, memoryview]:
    """Return a new tensor, and its bytes to fill."""
    import torch

    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    return tensor, _view(tensor.reshape(-1))


def all_finite(tensor: Tensor) -> bool:
    """Say whether no element is infinite or NaN, in one pass and without a temporary of the tensor's size."""
    import torch

    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
