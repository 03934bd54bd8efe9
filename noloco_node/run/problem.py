"""What is wrong with a field of a run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec


class Problem(NamedTuple):
    """One broken rule. `field`: its path in the run file; `value`: as given; `hint`: what would be right."""

    field: str
    value: str
    why: str
    hint: str


def within(field: str, value: float, low: float, high: float) -> Iterator[Problem]:
    """Yield a problem unless low <= value <= high, which neither NaN nor an infinity ever is."""
    if not low <= value <= high:
        bounds = " to ".join(f"{bound:,}" if isinstance(bound, int) else f"{bound:,g}" for bound in (low, high))
        yield Problem(field, repr(value), f"it is outside {bounds}", f"a value from {bounds}")


def out_of_bounds(value: Any, kind: Any, field: str = "") -> Iterator[Problem]:
    """Yield every number in a decoded table that is outside of what its field is declared with in the type `kind`."""
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for each in msgspec.structs.fields(kind):
            if each.name in value:
                yield from out_of_bounds(value[each.name], each.type, f"{field}.{each.name}".lstrip("."))
    elif get_origin(kind) is Annotated and isinstance(value, int | float) and not isinstance(value, bool):
        bounds = kind.__metadata__[0]
        yield from within(field, value, bounds.ge, bounds.le)
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from out_of_bounds(item, get_args(kind)[0], f"{field}.{number}")
    elif get_origin(kind) is not Annotated:
        for part in get_args(kind):
            yield from out_of_bounds(value, part, field)
