"""The journal on the disk: one JSON object a line, appended, and rotated.

Each event is one write to a file opened for appending, so a crash tears one line at most. The reader skips what it
cannot decode, and the writer begins a new line after a torn one. At MAX_BYTES the file moves to `journal.1.jsonl`, over
the one before: the two together bound the disk that a journal takes. A disk that is full or gone costs events, and
never the training: a journal is worth less than the run that it describes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from noloco_node.errors import Exit, UserError
from noloco_node.journal.events import Event, fields_of

MAX_BYTES = 64 * 2**20
"""Some 300,000 inner steps."""


class Journal:
    """The writing end; one process, one journal."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, now: Callable[[], float] = time.time) -> None:
        """Open `path` for appending; raise `UserError` where it cannot be opened at all."""
        self._path, self._max_bytes, self._now = path, max_bytes, now
        self._closed = False
        try:
            self._file = _open(path)
        except OSError as error:
            raise UserError(
                f"cannot open the journal {path}",
                why=error.strerror or str(error),
                hint="free some space, or give another directory with --home",
                code=Exit.STORAGE,
            ) from error
        self._size, self._torn = _size_and_torn(path)

    def write(self, event: Event) -> None:
        """Append `event` with the time of now; never raises for the disk's sake."""
        if self._closed:
            return
        line = msgspec.json.encode({**fields_of(event), "at": self._now()}) + b"\n"
        if self._torn:
            line = b"\n" + line
        try:
            if self._file < 0 or (self._size and self._size + len(line) > self._max_bytes):
                self._rotate()
                line = line.lstrip(b"\n")
            written = os.write(self._file, line)
        except OSError:
            return
        self._size += written
        self._torn = written < len(line)

    def close(self) -> None:
        """Close the file; closing twice is harmless, and whatever is written later is lost."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._closed = -1, True

    def _rotate(self) -> None:
        if self._file >= 0:
            os.replace(self._path, rotated(self._path))
            os.close(self._file)
            self._file = -1  # stays so when the next line raises, and the next write tries again
        self._file = _open(self._path)
        self._size, self._torn = 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rotated(path: Path) -> Path:
    """Return where a journal's older half lies: `journal.jsonl` -> `journal.1.jsonl`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _size_and_torn(path: Path) -> tuple[int, bool]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return 0, False
        file.seek(-1, os.SEEK_END)
        return size, file.read(1) != b"\n"
