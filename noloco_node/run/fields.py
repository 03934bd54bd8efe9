"""The fields of a section of a run file or scenario, whether a struct declares it or a dataclass of `gossip`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from noloco_node.errors import UserError, config_error

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
    if isinstance(value, dict) and is_section(kind):
        for each in fields_of(kind):
            if each.name in value:
                yield from out_of_bounds(value[each.name], each.type, f"{field}.{each.name}".lstrip("."))
    elif get_origin(kind) is Annotated and isinstance(value, int | float) and not isinstance(value, bool):
        said = kind.__metadata__[0]
        yield from within(field, value, *((said.ge, said.le) if isinstance(said, msgspec.Meta) else said))
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from out_of_bounds(item, get_args(kind)[0], f"{field}.{number}")
    elif get_origin(kind) is not Annotated:
        for part in get_args(kind):
            yield from out_of_bounds(value, part, field)


def misfit(complaint: str, file: type[msgspec.Struct], origin: str) -> UserError:
    """Turn msgspec's complaint about a file of the type `file`, which came from `origin`, into a `UserError`."""
    # A field that is unknown may have any name, also one that looks like a place.
    placed = re.fullmatch(r"(.*) - at `(\$[^`]*)`", complaint, re.DOTALL)
    why, where = (placed[1], placed[2]) if placed else (complaint, "")
    path = [part for part in re.split(r"[.\[\]`$]+", where) if part]
    if missing := re.search(r"missing required field `(\w+)`", why):
        field = [*path, missing[1]]
        return config_error(
            f"{origin}: {'.'.join(field)} is missing.",
            "it has no default",
            f"give {_in_words(_type_at(file, field))}",
        )
    if unknown := re.search(r"unknown field `(.*)`", why, re.DOTALL):
        return config_error(
            f"{origin}: there is no field {short('.'.join([*path, unknown[1]]))}.",
            "a misspelt field would silently do nothing",
            _probably(short(unknown[1]), file, path),
        )
    return config_error(
        f"{origin}: {short('.'.join(path)) or 'the file'} has the wrong type or value.",
        short(_in_plain_words(why)),
        f"give {_in_words(_type_at(file, path))}",
    )


def short(text: str) -> str:
    """Return a text that a stranger may have written, fit for a terminal: printable, 80 characters at most."""
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return text if text.isprintable() else ascii(text)


def _in_plain_words(why: str) -> str:
    """Return msgspec's complaint with the names that a person has for what stands in a TOML file."""
    found = re.fullmatch(r"Expected `(.*)`, got `(.*)`", why)
    if not found:
        return why.replace("`", "")
    wanted, got = (" or ".join(_NAMES.get(each, each) for each in kinds.split(" | ")) for kinds in found.groups())
    return f"it is {got}, and should be {wanted}"


_NAMES = {
    "object": "a section",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "left out",
}


def _probably(name: str, file: Any, path: list[str]) -> str:
    """Guess which field was meant: one of this section, or one of another (its [section] line is easily forgotten)."""
    section = _type_at(file, path)
    here = [field.name for field in fields_of(section if is_section(section) else file)]
    elsewhere = {
        field.name: f"{section.name}.{field.name}"
        for section in fields_of(file)
        if is_section(section.type)
        for field in fields_of(section.type)
    }
    if close := difflib.get_close_matches(name, here, n=1):
        return f"did you mean {close[0]}?"
    if close := difflib.get_close_matches(name, list(elsewhere), n=1):
        return f"did you mean {elsewhere[close[0]]}?"
    return f"the fields here are {', '.join(here)}"


def _type_at(file: Any, path: list[str]) -> Any:
    """Return the declared type of a field, as far down its path as types are declared."""
    found = file
    for name in path:
        if not is_section(found):
            break
        found = {field.name: field.type for field in fields_of(found)}.get(name)
    return found


def _in_words(annotation: Any) -> str:
    """Say in plain words what a value of this type looks like."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(arguments[0])
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(json.dumps(each.value) for each in annotation)
    if origin in (Union, types.UnionType):
        return _in_words(next(a for a in arguments if a is not type(None))) + ", or leave it out"
    if origin is tuple:
        return f"a list of which each is {_in_words(arguments[0])}"
    if is_section(annotation):
        return "a section with the fields " + ", ".join(field.name for field in fields_of(annotation))
    simple = {int: "a whole number", float: "a number", bool: "true or false", str: 'a text in "quotes"'}
    return simple.get(annotation, "a table such as {hidden_size = 128, num_hidden_layers = 4}")
