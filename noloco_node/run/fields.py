"""The declared fields of a run file or a scenario: reading them, their bounds, and messages about what does not fit.

A section is a msgspec struct, or a dataclass where `gossip` or `pipeline` declares it, which know no msgspec. Bounds
stand in the type of a field, as `msgspec.Meta` or, in a dataclass, as (least, most) or (least, None, below).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from noloco_node.errors import UserError, config_error

T = TypeVar("T")

REQUIRED = object()  # stands for the default of a field that has none


class Field(NamedTuple):
    """One declared field. `default`: REQUIRED if it has none."""

    name: str
    type: Any
    default: Any


def is_section(annotation: Any) -> TypeGuard[type]:
    return isinstance(annotation, type) and (
        issubclass(annotation, msgspec.Struct) or dataclasses.is_dataclass(annotation)
    )


def fields_of(section: Any) -> tuple[Field, ...]:
    if not issubclass(section, msgspec.Struct):
        hints = get_type_hints(section, include_extras=True)
        return tuple(
            Field(each.name, hints[each.name], REQUIRED if each.default is dataclasses.MISSING else each.default)
            for each in dataclasses.fields(section)
        )
    return tuple(Field(each.name, each.type, _default(each)) for each in msgspec.structs.fields(section))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return REQUIRED
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


# What is wrong with a field.


class Problem(NamedTuple):
    """One broken rule. `field`: its path in the file; `value`: as given; `hint`: what would be right."""

    field: str
    value: str
    why: str
    hint: str


def within(field: str, value: float, low: float, high: float, *, below: bool = False) -> Iterator[Problem]:
    """Yield a problem unless low <= value <= high, which neither NaN nor an infinity ever is. `below`: value < high."""
    if not low <= value <= high or (below and value == high):
        least, most = (f"{bound:,}" if isinstance(bound, int) else f"{bound:,g}" for bound in (low, high))
        bounds = f"{least} to {'below ' * below}{most}"
        yield Problem(field, repr(value), f"it is outside {bounds}", f"a value from {bounds}")


def out_of_bounds(value: Any, kind: Any, field: str = "") -> Iterator[Problem]:
    """Yield every number in a decoded table that is outside of what its field is declared with in the type `kind`."""
    if isinstance(value, dict) and is_section(kind):
        for each in fields_of(kind):
            if each.name in value:
                yield from out_of_bounds(value[each.name], each.type, f"{field}.{each.name}".lstrip("."))
    elif get_origin(kind) is Annotated and isinstance(value, int | float) and not isinstance(value, bool):
        said = kind.__metadata__[0]
        low, high, limit = (said.ge, said.le, said.lt) if isinstance(said, msgspec.Meta) else (*said, None)[:3]
        yield from within(field, value, low, high if limit is None else limit, below=limit is not None)
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from out_of_bounds(item, get_args(kind)[0], f"{field}.{number}")
    elif get_origin(kind) is not Annotated:
        for part in get_args(kind):
            yield from out_of_bounds(value, part, field)


def no_line(_field: str) -> str:
    """Name no line: where the text of a file is not at hand."""
    return ""


def refuse(problems: Iterable[Problem], origin: str, line: Callable[[str], str] = no_line) -> None:
    """Raise the `UserError` (Exit.CONFIG) about the first of these problems, if there is one.

    `origin`: where the file came from. `line`: returns ", line N" for the path of a field.
    """
    found = list(dict.fromkeys(problems))
    if not found:
        return
    first = found[0]
    others = [field for field in dict.fromkeys(problem.field for problem in found) if field != first.field]
    also = f" (wrong too: {', '.join(others)})" if others else ""
    missing = first.value == repr(None)
    wrong = f"{short(first.field)} is missing" if missing else f"{short(first.field)} = {short(first.value)} is refused"
    raise config_error(f"{origin}{line(first.field)}: {wrong}{short(also)}.", first.why, first.hint)


# From a text to a struct.


_KEY = r"""[ \t]*(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*"""
_TOO_DEEP = re.compile(rf"(?:^[ \t]*\[{{1,2}}|^|[{{,])(?:{_KEY}\.){{16}}", re.MULTILINE)
"""A key in so many tables: the time and memory that tomllib takes for one grow with the square of their number."""


def toml_table(text: str, origin: str) -> dict[str, Any]:
    """Return the table that a text of TOML holds; raise `UserError` (Exit.CONFIG) that names the line at fault."""
    try:
        if _TOO_DEEP.search(text):
            raise ValueError("a key has more than 16 parts")
        table = tomllib.loads(text)
        repr(table)  # raises ValueError for a number in hexadecimal digits that is too long to be written down
        return table
    except (ValueError, RecursionError) as error:  # tomllib raises the second for brackets nested without end
        raise config_error(
            f"{origin} is not valid TOML.", str(error), "correct that line; see https://toml.io"
        ) from error


def converted(table: Any, kind: type[T], origin: str, line: Callable[[str], str] = no_line, at: str = "") -> T:
    """Return a decoded table as a struct; raise `UserError` (Exit.CONFIG) as `refuse` does where it does not fit.

    `at`: the place of the table in its file.
    """
    try:
        found = msgspec.convert(table, kind)
        if (complaint := _unknown_field(table, kind)) is not None:
            raise msgspec.ValidationError(complaint)
    except msgspec.ValidationError as error:
        refuse(out_of_bounds(table, kind, at), origin, line)
        raise _misfit(str(error), kind, origin, line, at) from error
    return found


def _unknown_field(table: dict[str, Any], section: type) -> str | None:
    """Complain about the first field that a dataclass does not have, as msgspec does for structs alone."""
    for each in fields_of(section):
        given = table.get(each.name)
        if is_section(each.type) and not issubclass(each.type, msgspec.Struct) and isinstance(given, dict):
            known = [field.name for field in fields_of(each.type)]
            for name in given:
                if name not in known:
                    return f"Object contains unknown field `{name}` - at `$.{each.name}`"
    return None


def _misfit(complaint: str, file: type, origin: str, line: Callable[[str], str], at: str) -> UserError:
    """Turn msgspec's complaint about a table of the type `file` into a `UserError`: the field, its value, a remedy."""
    # A field that is unknown may have any name, also one that looks like a place.
    placed = re.fullmatch(r"(.*) - at `(\$[^`]*)`", complaint, re.DOTALL)
    why, where = (placed[1], placed[2]) if placed else (complaint, "")
    path = [part for part in re.split(r"[.\[\]`$]+", where) if part]
    missing = re.search(r"missing required field `(\w+)`", why)
    unknown = re.search(r"unknown field `(.*)`", why, re.DOTALL)
    name = ".".join([*([at] if at else []), *path, *([unknown[1]] if unknown else [])])
    begin = f"{origin}{line(name)}: "
    if missing:
        field = f"{name}.{missing[1]}".lstrip(".")
        hint = f"give {_in_words(_type_at(file, [*path, missing[1]]))}"
        return config_error(f"{begin}{field} is missing.", "it has no default", hint)
    if unknown:
        hint = _probably(short(unknown[1]), file, path)
        return config_error(
            f"{begin}there is no field {short(name)}.", "a misspelt field would silently do nothing", hint
        )
    what = f"{begin}{short(name) or 'the file'} has the wrong type or value."
    return config_error(what, short(_in_plain_words(why)), f"give {_in_words(_type_at(file, path))}")


def short(text: str) -> str:
    """Return a text that a stranger may have written, fit for a terminal: printable, 80 characters at most."""
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return text if text.isprintable() else ascii(text)


def _in_plain_words(why: str) -> str:
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


def toml(value: Any) -> str:
    """Return a value of JSON in TOML, in a line; TypeError for what TOML has not: None, half of a surrogate pair."""
    if value is None:
        raise TypeError("None has no form in TOML")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(name)} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    # JSON escapes what is above U+FFFF by two surrogates, which TOML refuses; and TOML wants U+007F escaped.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        raise TypeError(f"{value!a} is no text of Unicode")
    return text
