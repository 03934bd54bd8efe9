"""Which parts of a text are held out for validation, and which are trained on.

A part is a few kilobytes of whole lines, and held out when the SHA-256 of its own characters falls into the share asked
for. So the choice depends on no path, no peer, no seed, and on no other file: a part that any peer holds out no peer
trains on, wherever it stands. A part ends where the hash of a line says so, and not at a fixed distance from the
beginning: an edit moves the parts around it and leaves the others as they were.

Held-out parts leave holes in a long text; what is left of it between two holes is trained on as a document of its own.
A document shorter than a part is held out whole or not at all.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from itertools import groupby
from typing import Literal

Part = Literal["train", "validation"]

LEAST_CHARACTERS, MOST_CHARACTERS = 2048, 8192
"""Of a part."""
_ENDS = 8
"""Beyond the least length one line in so many ends a part."""


def side_of(text: str, part: Part, percent: float) -> tuple[str, ...]:
    """Return the stretches of a document that are trained on, or those held out; () where it has none."""
    held_out = part == "validation"
    if percent <= 0.0 or percent >= 100.0:
        return (text,) if text and held_out == (percent > 0.0) else ()
    stretches = groupby(parts_of(text), lambda each: is_held_out(each, percent))
    return tuple("".join(parts) for out, parts in stretches if out == held_out)


def is_held_out(part: str, percent: float) -> bool:
    """Say whether a part is held out. White space at its ends does not count: the last line may lack its end."""
    digest = hashlib.sha256(part.strip().encode(errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < percent / 100


def parts_of(text: str) -> Iterator[str]:
    """Yield the parts of a text, which join to it."""
    part: list[str] = []
    length = 0
    for line in _lines(text):
        part.append(line)
        length += len(line)
        if length >= LEAST_CHARACTERS and (length >= MOST_CHARACTERS or _ends(line)):
            yield "".join(part)
            part, length = [], 0
    if part:
        yield "".join(part)


def _ends(line: str) -> bool:
    return zlib.crc32(line.encode(errors="replace")) % _ENDS == 0


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        if len(line) <= LEAST_CHARACTERS:
            yield line
        else:
            yield from (line[at : at + LEAST_CHARACTERS] for at in range(0, len(line), LEAST_CHARACTERS))
