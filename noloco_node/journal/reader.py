"""Finding journals, and reading them, also one that grows or was cut in the middle of a line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from noloco_node.errors import config_error, os_errors_as
from noloco_node.journal.events import Event, decode
from noloco_node.journal.writer import rotated
from noloco_node.storage.home import JOURNAL

LONGEST_LINE_BYTES = 2**20  # no event is that long
END_BYTES = 4096  # by so many bytes before the place where we read a file is known again


def read(path: Path) -> Iterator[Event]:
    """Yield the events of a journal, its rotated half first; pass over lines that do not decode, as a torn one.

    A missing journal has no events; one that cannot be read is a `UserError`.
    """
    hint = "give the home of a node, and read it as the user who runs that node"
    with os_errors_as(config_error, f"The journal {path} cannot be read.", hint), ExitStack() as opened:
        halves: list[BinaryIO] = []
        # Both are open before a line is read, the newer one first: a node that rotates them meanwhile hides no event.
        for half in (path, rotated(path)):
            with suppress(FileNotFoundError):
                halves.append(opened.enter_context(half.open("rb")))
        if len(halves) == 2 and os.path.sameopenfile(halves[0].fileno(), halves[1].fileno()):
            halves.pop()
        for line in chain.from_iterable(map(_lines, reversed(halves))):
            if (event := decode(line)) is not None:
                yield event


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, one without an end in parts: the disk may have filled it with zeros."""
    return iter(partial(file.readline, LONGEST_LINE_BYTES), b"")


class Tail:
    """Reads a journal while a node writes it: follows rotation, and awaits a missing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._inode = -1
        self._rest = b""
        self._read, self._end = 0, b""
        """How many bytes of this file we have read, and the last of them."""

    def poll(self) -> list[Event]:
        """Return the events written since the last call, at most about a mebibyte."""
        if self._file < 0 and not self._open():
            return []
        moved_on = self._moved_on()  # first: what is read after it is all that this file ever has
        chunk = os.read(self._file, LONGEST_LINE_BYTES)
        if not chunk and moved_on:
            os.close(self._file)
            if not self._open():
                self._rest = b""
                return []
            chunk = os.read(self._file, LONGEST_LINE_BYTES)
        self._read, self._end = self._read + len(chunk), (self._end + chunk)[-END_BYTES:]
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-LONGEST_LINE_BYTES:]  # what is cut here would not decode anyway
        return [event for line in lines if line and (event := decode(line)) is not None]

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._rest, self._read, self._end = -1, b"", 0, b""

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._file = -1
            return False
        self._inode = os.fstat(self._file).st_ino
        # The same file with another number, as some file systems give it: going on where we were.
        if self._read and os.pread(self._file, len(self._end), self._read - len(self._end)) == self._end:
            os.lseek(self._file, self._read, os.SEEK_SET)
        else:
            self._rest, self._read, self._end = b"", 0, b""
        return True

    def _moved_on(self) -> bool:
        try:
            return os.stat(self._path).st_ino != self._inode
        except FileNotFoundError:
            return False


def journals_in(places: Sequence[Path]) -> dict[str, Path]:
    """Return the journals in files, homes or directories of homes by name; raise `UserError` if there is none."""
    if not places:
        raise config_error("There is no journal.", "no directory was given", "give the home of a node")
    files = list(dict.fromkeys(path.absolute() for place in places for path in _journals_in(place)))
    return dict(zip(_names(files), files, strict=True))


def _journals_in(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    for found in ([place / JOURNAL], sorted(path / JOURNAL for path in place.glob("*"))):
        there = [path for path in found if path.is_file() or rotated(path).is_file()]
        if there:
            return there
    raise config_error(
        f"There is no journal in {place}.",
        f"neither it nor a directory in it holds {JOURNAL}",
        "give the home of a node, or the directory of a demo",
    )


def _names(files: Sequence[Path]) -> list[str]:
    """Return for each journal the name of its home, with as much of its path as tells them apart."""
    depth = 1
    while True:
        # The name of a directory may be no text, which no table could hold.
        names = ["/".join(path.parent.parts[-depth:]).encode(errors="backslashreplace").decode() for path in files]
        if len(set(names)) == len(names) or depth > 16:
            return names
        depth += 1
