"""Rows of which the answers are learnt: prompts with completions, and conversations.

A row travels from the file to the tokenizer as one text: JSON of the fields that its form has. By this text it is
held out for validation, whole or not at all. `noloco_node.data.row_encoder` turns it into tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from noloco_node.errors import Exit, UserError
from noloco_node.run.config import DataConfig

ASSISTANT = "assistant"
MOST_NAMES, LONGEST_NAME = 12, 40  # of the fields of a row that a message shows
_NO_ROW = object()


class GoodRow(NamedTuple):
    """The text of a row. `where`: file and line."""

    text: str
    where: str


class BadRow(NamedTuple):
    """A row, or several, that cannot be used. `kind`: why, as for `UnreadText.note`."""

    kind: str
    where: str
    rows: int = 1


Row = GoodRow | BadRow


def data_error(what: str, why: str, hint: str) -> UserError:
    """Return the error of data that does not fit its form."""
    return UserError(what, why=why, hint=hint, code=Exit.DATA)


# From fields to a row.


def row_of(data: DataConfig, fields: Mapping[str, Any], names: Iterable[str], where: str) -> Row:
    """Return a row with the text that a run reads of it. `fields`: those that are read; `names`: of all that it has."""
    for name in data.row_fields:
        value = fields.get(name, _NO_ROW)
        if value is _NO_ROW:
            return BadRow(f"has no field {name!r} and is left out", f"{where}, whose fields are {_shown(names)},")
        if value is None:
            return BadRow(f"has null in the field {name!r} and is left out", where)
        if data.form == "messages":
            if (trouble := _trouble_with(value)) is not None:
                return BadRow(f"has in the field {name!r} {trouble} and is left out", where)
        elif not isinstance(value, str):
            kind = f"{where}, where it is {type(value).__name__},"
            return BadRow(f"has no text in the field {name!r} and is left out", kind)
        elif name == data.completion_field and data.form == "prompt" and not value:
            return BadRow(f"has an empty text in the field {name!r} and is left out", where)
    if data.form == "text":
        return GoodRow(fields[data.field], where)
    if data.form == "prompt":
        content: Any = [fields[name] for name in data.row_fields]
    else:
        # A table has each field in each message.
        content = [{key: each[key] for key in sorted(each) if each[key] is not None} for each in fields[name]]
    try:
        return GoodRow(msgspec.json.encode(content).decode(), where)
    except (TypeError, ValueError, RecursionError):
        return BadRow(f"has in the field {name!r} what is no JSON and is left out", where)


def printable(text: str) -> str:
    """Return a text of somebody's so that it moves no cursor."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _shown(names: Iterable[str]) -> str:
    """Return the names of fields, of which a row may have any number of any length."""
    first = list(islice(names, MOST_NAMES + 1))
    shown = [printable(name[:LONGEST_NAME]) for name in first[:MOST_NAMES]]
    return ", ".join([*shown, "..."] if len(first) > MOST_NAMES else shown) or "none"


def _trouble_with(messages: Any) -> str | None:
    """Return what is wrong with a list of messages; None if nothing is."""
    if not isinstance(messages, list) or not messages:
        return "no list of messages"
    for message in messages:
        if not isinstance(message, dict):
            return "a message that is no object with role and content"
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                return f"a message whose {name} is no text"
    if all(message["role"] != ASSISTANT for message in messages):
        return f"no message whose role is {ASSISTANT!r}"
    return None
