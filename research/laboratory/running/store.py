"""The record of the laboratory: every finished run as one JSON line, under the digest of its cell.

A line is written and flushed to the disk when its run ends, so an interruption loses at most the line that was being
written; such a torn line is skipped with a warning, and the next one begins on a line of its own. Of two lines with the
same key the later counts. A loss that is not finite (a run that diverged is a result too) is written as Python's `json`
does, NaN or Infinity.

A result says by which code it was made: a digest of the sources on which its numbers depend, as they were when the
record was opened. Comments count too, so another digest need not mean other numbers; the same one means the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec

from research.laboratory.experiments.cell import Cell, Result

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    "gossip/**/*.py",
    "pipeline/adapters/*.py",
    "pipeline/forward_pass.py",
    "pipeline/stage.py",
    "pipeline/inner_step.py",
    "research/laboratory/methods/*.py",
    "research/laboratory/experiments/hardware_model.py",
    "research/laboratory/experiments/task.py",
    "research/laboratory/experiments/volunteer_model.py",
)
"""What decides the numbers of a run."""
Warn = Callable[[str], None]


def say(text: str) -> None:
    """Print a line on the standard error."""
    print(text, file=sys.stderr, flush=True)


@cache
def code() -> str:
    """Return the digest of the sources, as they were at the first call in this process."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


class Store:
    """Results by cell, and the file that they are kept in."""

    def __init__(self, path: Path, warn: Warn = say) -> None:
        """Read what is there; a missing file is an empty record. Lines that are no results are warned of and skipped.

        Raises OSError if the file is there and cannot be read.
        """
        self.path = path
        self._code = code()
        self._results: dict[str, Result] = {}
        self._torn = False
        if not path.exists():
            return
        content = path.read_bytes()
        self._torn = bool(content) and not content.endswith(b"\n")
        for number, line in enumerate(content.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                result = decode(line)
            except ValueError as error:
                warn(f"{path}, line {number}: skipped, it is no result ({error})")
                continue
            self._results[result.cell.key] = result

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results.values())

    def __contains__(self, cell: Cell) -> bool:
        return cell.key in self._results

    def get(self, cell: Cell) -> Result | None:
        """Return the result of a cell, if it has run."""
        return self._results.get(cell.key)

    def add(self, result: Result) -> None:
        """Append a result, and the code that made it; it is on the disk when this returns."""
        result = msgspec.structs.replace(result, code=result.code or self._code)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            # What an interruption tore must not swallow the line after it.
            file.write((b"\n" if self._torn else b"") + encode(result))
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self._results[result.cell.key] = result


def encode(result: Result) -> bytes:
    """Return the line of a result, with its end."""
    return json.dumps(msgspec.to_builtins(result), separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Result:
    """Return the result of a line. Raises ValueError where it is none."""
    return msgspec.convert(json.loads(line), Result)
