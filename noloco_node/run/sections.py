"""The fields of a section of a run file or scenario, whether a struct declares it or a dataclass of `gossip`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeGuard, cast, get_type_hints

import msgspec

REQUIRED = object()
"""Stands for the default of a field that has none."""


class Field(NamedTuple):
    """One declared field. `default`: REQUIRED if it has none."""

    name: str
    type: Any
    default: Any


def is_section(annotation: Any) -> TypeGuard[type]:
    """Say whether a declared type has fields of its own."""
    return isinstance(annotation, type) and (
        issubclass(annotation, msgspec.Struct) or dataclasses.is_dataclass(annotation)
    )


def fields_of(section: type) -> tuple[Field, ...]:
    """Return the fields of a section in their order."""
    if not issubclass(section, msgspec.Struct):
        hints = get_type_hints(section, include_extras=True)
        return tuple(
            Field(each.name, hints[each.name], REQUIRED if each.default is dataclasses.MISSING else each.default)
            for each in dataclasses.fields(cast(Any, section))
        )
    return tuple(Field(each.name, each.type, _default(each)) for each in msgspec.structs.fields(section))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return REQUIRED
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def unknown_field(table: dict[str, Any], section: type) -> str | None:
    """Return a complaint about the first field of a decoded table that its dataclass does not have.

    msgspec complains so about the fields of structs, and passes over those of dataclasses.
    """
    for each in fields_of(section):
        given = table.get(each.name)
        if is_section(each.type) and not issubclass(each.type, msgspec.Struct) and isinstance(given, dict):
            known = [field.name for field in fields_of(each.type)]
            for name in given:
                if name not in known:
                    return f"Object contains unknown field `{name}` - at `$.{each.name}`"
    return None
