"""Records that strangers published: their bytes become a value of its declared type, or nothing.

The bounds of the numbers stand with the types (`noloco_node.units`). What no type can say is checked here for all
records: a number too near to zero has no finite reciprocal.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from noloco_node.units import is_usable

T = TypeVar("T", bound=msgspec.Struct)


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
