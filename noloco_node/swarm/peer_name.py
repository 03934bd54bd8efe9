"""The name that an owner gives a peer: shown beside the short id, never in its place, and worth nothing as a proof."""

from __future__ import annotations

import unicodedata

from noloco_node.errors import Exit, UserError

MOST_LETTERS = 24


def checked_name(text: str | None) -> str:
    """Return the name that a person asks for, "" for none; raise `UserError` where others would not show it so."""
    name = "" if text is None else unicodedata.normalize("NFC", text)
    if shown_name(name) != name:
        raise UserError(
            f"{text!r} is no name for a peer.",
            why=f"a name has at most {MOST_LETTERS} letters, digits, signs or single spaces, and none beside them",
            hint="give --name something shorter and plainer",
            code=Exit.USAGE,
        )
    return name


def shown_name(name: str) -> str:
    """Return a stranger's name as it may be shown: bounded, printable, without signs that stack or turn around."""
    letters = [each for each in name[: 4 * MOST_LETTERS] if each.isprintable() and unicodedata.category(each)[0] != "M"]
    return " ".join("".join(letters).split())[:MOST_LETTERS].strip()
