"""What may be said in a conversation: which messages, and the exact shape and dtype of each of their tensors.

Both ends know the run, and a schema follows from it before the first byte arrives. `noloco_node.network.wire` writes
and reads messages by it. The types of the scalar fields are read from the message classes themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

from noloco_node.errors import one_line
from noloco_node.units import LARGEST

HEADER_BYTES = 64 * 1024  # cap of an ordinary header: room for the shapes of some two thousand tensors
LONG_HEADER_BYTES = 1024 * 1024  # the largest cap that a message may ask for: replies that are text, such as a run file

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}


class Violation(ConnectionAbortedError):
    """A peer sent what no peer of this run may send; the text names what, and by how much.

    It may quote the peer, and it is logged and journalled: so it is one line of bounded length.
    """

    def __init__(self, why: str) -> None:
        super().__init__(one_line(why))


class TensorSpec(NamedTuple):
    """Exactly which tensor is expected: its shape, and the name of its dtype on the wire."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


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
    the encoded header, and with it every text in it. `added`: texts, bytes or flags that earlier versions of the
    message did not have; an empty one is not written.
    """

    name: str
    tensors: Mapping[str, Layout | OneOf] = {}
    header_bytes: int = HEADER_BYTES
    added: tuple[str, ...] = ()


class FieldLayout(NamedTuple):
    """A `Layout` with its tensors in a tuple, whether it holds none, one or several."""

    specs: tuple[TensorSpec, ...]
    is_none: bool = False
    is_single: bool = False

    def __str__(self) -> str:
        return "none" if self.is_none else str(self.specs[0]) if self.is_single else f"{len(self.specs)} tensors"


class MessageRule(NamedTuple):
    """How one message maps to a header and to tensors."""

    name: str
    kind: type
    scalars: Any  # a struct with the scalar fields
    header: Any  # a struct with the scalars, and what the tensors are
    numbers: tuple[tuple[str, float, float], ...]  # each number with its least and its most
    layouts: Mapping[str, tuple[FieldLayout, ...]]
    header_bytes: int


class Schema:
    """The messages that one conversation may carry: frozen dataclasses, each with its `MessageSpec`."""

    def __init__(self, messages: Mapping[type, MessageSpec]) -> None:
        self.rules = {kind: _rule(kind, spec) for kind, spec in messages.items()}
        self.names = {kind: spec.name for kind, spec in messages.items()}
        """The name on the wire of each kind of message."""
        if len(set(self.names.values())) != len(messages):
            raise ValueError("two messages of one schema share a name")
        self.header_bytes = max(spec.header_bytes for spec in messages.values())
        self.by_header = {rule.header: rule for rule in self.rules.values()}
        self.header_decoder = _decoder(tuple(self.by_header))

    def __repr__(self) -> str:
        return f"Schema({', '.join(self.names.values())})"

    @property
    def body_bytes(self) -> int:
        """The size of the largest body."""
        return max(
            sum(
                max(sum(spec.size_bytes for spec in each.specs) for each in layouts)
                for layouts in rule.layouts.values()
            )
            for rule in self.rules.values()
        )


def _rule(kind: type, spec: MessageSpec) -> MessageRule:
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass")
    if not 0 < spec.header_bytes <= LONG_HEADER_BYTES:
        raise ValueError(f"{spec.name}: header_bytes is {spec.header_bytes}, at most {LONG_HEADER_BYTES} allowed")
    tensors, scalars, header, numbers = _parts(kind, spec.name, spec.added)
    if set(tensors) != set(spec.tensors):
        raise ValueError(f"{spec.name} has the tensors {listing(tensors)}, the schema says {listing(spec.tensors)}")
    layouts: dict[str, tuple[FieldLayout, ...]] = {}
    for name in tensors:
        said = spec.tensors[name]
        layouts[name] = tuple(map(_field_layout, said.layouts if isinstance(said, OneOf) else (said,)))
    return MessageRule(spec.name, kind, scalars, header, numbers, layouts, spec.header_bytes)


def _field_layout(layout: Layout) -> FieldLayout:
    if layout is None:
        return FieldLayout((), is_none=True)
    return FieldLayout((layout,), is_single=True) if isinstance(layout, TensorSpec) else FieldLayout(tuple(layout))


class _TensorMark:
    """Stands for `torch.Tensor` while annotations are read, so that torch need not be loaded."""


@lru_cache(maxsize=64)
def _parts(
    kind: type, message_name: str, added: tuple[str, ...]
) -> tuple[tuple[str, ...], Any, Any, tuple[tuple[str, float, float], ...]]:
    """Return what follows from a message's class alone: its tensors, and `scalars`, `header`, `numbers` of its rule.

    It is worked out once, for the peers of a simulation make thousands of equal schemas.
    """
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
        [("fields", scalars), ("tensors", dict[str, list[tuple[str, tuple[int, ...]]] | None])],
        forbid_unknown_fields=True,
        tag_field="message",
        tag=message_name,
    )
    bounds = {name: _bounds(hints[name]) for name in names}
    numbers = tuple((name, *between) for name, between in bounds.items() if between is not None)
    return tensors, scalars, header, numbers


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


def _mentions_tensor(hint: Any) -> bool:
    named = (getattr(hint, "__module__", None), getattr(hint, "__name__", None))
    return hint is _TensorMark or named == ("torch", "Tensor") or any(map(_mentions_tensor, get_args(hint)))


def listing(names: Any) -> str:
    return ", ".join(sorted(names)) or "(none)"
