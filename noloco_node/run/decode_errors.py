"""What does not fit the declared fields of a file, said to a person: which field, what is there, what would be right.

msgspec checks and says where (`Expected ... - at `$.section.field``); the declared types say what belongs there, and
which name was probably meant.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from noloco_node.errors import UserError, config_error


def misfit(complaint: str, file: type[msgspec.Struct], origin: str) -> UserError:
    """Turn msgspec's complaint about a file of the type `file`, which came from `origin`, into a `UserError`."""
    why, _, where = complaint.partition(" - at ")
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
    here = [field.name for field in msgspec.structs.fields(_type_at(file, path))]
    elsewhere = {
        field.name: f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(file)
        if _is_struct(section.type)
        for field in msgspec.structs.fields(section.type)
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
        if not _is_struct(found):
            break
        found = {field.name: field.type for field in msgspec.structs.fields(found)}[name]
    return found


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _in_words(annotation: Any) -> str:
    """Say in plain words what a value of this type looks like."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(arguments[0])
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return _in_words(next(a for a in arguments if a is not type(None))) + ", or leave it out"
    if origin is tuple:
        return f"a list of which each is {_in_words(arguments[0])}"
    if _is_struct(annotation):
        return "a section with the fields " + ", ".join(field.name for field in msgspec.structs.fields(annotation))
    simple = {int: "a whole number", float: "a number", bool: "true or false", str: 'a text in "quotes"'}
    return simple.get(annotation, "a table such as {hidden_size = 128, num_hidden_layers = 4}")
