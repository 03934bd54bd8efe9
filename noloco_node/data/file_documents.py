"""Documents out of files, in an order of each peer's own that can be resumed anywhere.

A document is a file, or, of a file longer than a piece, one piece of it, cut at the end of a line: a novel in one
file is then shuffled like many short documents, and nobody holds more of it in memory than a piece. A training epoch
is a permutation of all documents by (seed, peer, epoch); unshuffled it is their sorted order, begun at a place by
(seed, peer), so that peers still read different text. Epochs follow one another without end. The place in this
sequence is two numbers.

Held out for validation is every document the SHA-256 of whose name (path below the source's root, and piece) falls
into the share asked for, and if that is none the one with the smallest: the choice depends on no seed and no peer, so
a document that any peer holds out no peer trains on. Validation is one pass in one mixed order.

The source `stdlib` is the text of the modules of the running Python's standard library, which is there without a
network. Minor versions of Python differ in a few per cent of it, so peers on different versions train on slightly
different text.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from noloco_node.errors import config_error

Part = Literal["train", "validation"]
Place = dict[str, Any]
"""Where a document stands in its source's order: small, and JSON can hold it."""

MOST_FILES = 1_000_000
SAVED_TO_DISK = ("state.json", "dataset_dict.json")
"""What `save_to_disk` of the library datasets leaves at the top of its directory."""
LINE_BYTES = 16 * 1024
"""How far a cut looks for the end of a line before it cuts between two characters."""
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})


class Documents(Protocol):
    """A sequence of documents: without end for training, one pass for validation."""

    fingerprint: str
    """Equal for equal sources: a place means nothing in another."""

    @property
    def place(self) -> Place:
        """The place of the next document."""

    def seek(self, place: Place) -> None:
        """Go on with the document at `place`."""

    def next(self) -> tuple[Place, str] | None:
        """Return the next document that has any text, and its place; None at the end. Blocks on disk and network."""

    def close(self) -> None:
        """Let go of files and connections; a call that waits in another thread ends soon."""


class ReadingOrder(NamedTuple):
    """Whose order it is, and which; for validation neither `peer` nor `seed` matters."""

    part: Part
    seed: int
    peer: str
    shuffle: bool

    def rng(self, *purpose: object) -> Random:
        """Return a generator for one purpose of this peer's order."""
        return Random("|".join(map(str, (self.seed, "data", self.peer, *purpose))))

    def permutation(self, count: int, *purpose: object) -> Sequence[int]:
        """Return in which order `count` things come; `purpose` tells apart permutations, the epoch first."""
        if self.part == "validation":
            # The same for everybody, and mixed: so that the first few are a sample of all.
            order = list(range(count))
            Random("validation").shuffle(order)
            return order
        if not self.shuffle:
            start = self.rng("start").randrange(count)
            return (*range(start, count), *range(start))
        order = list(range(count))
        self.rng("order", *purpose).shuffle(order)
        return order


class TextRange(NamedTuple):
    """Bytes `start` to `end` of a file, both moved to the end of a line when read. `name` is what is hashed."""

    path: Path
    name: str
    start: int
    end: int
    size: int


class FileDocuments:
    """The documents of a list of pieces."""

    def __init__(self, pieces: Sequence[TextRange], order: ReadingOrder, validation_percent: float) -> None:
        """Take the pieces of `order.part`; raise `UserError` if there are none."""
        outside = held_out([piece.name for piece in pieces], validation_percent)
        wanted = order.part == "validation"
        self._pieces = [piece for piece, out in zip(pieces, outside, strict=True) if out == wanted]
        if not self._pieces:
            raise config_error(
                f"The data source has no documents for {order.part}.",
                why=f"it has {len(pieces)} in all, of which {sum(outside)} are held out for validation",
                hint="more text, or another data.validation_percent",
            )
        self._order = order
        self._epoch, self._index = 0, 0
        self._permutation = order.permutation(len(self._pieces), 0)
        listing = "\n".join(f"{piece.name}|{piece.start}|{piece.size}" for piece in self._pieces)
        self.fingerprint = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()

    @property
    def place(self) -> Place:
        return {"epoch": self._epoch, "index": self._index}

    def seek(self, place: Place) -> None:
        epoch, index = place["epoch"], place["index"]
        if not (isinstance(epoch, int) and isinstance(index, int) and 0 <= index <= len(self._pieces) and epoch >= 0):
            raise ValueError(f"{place} is no place here")
        self._epoch, self._index = epoch, index
        self._permutation = self._order.permutation(len(self._pieces), epoch)

    def next(self) -> tuple[Place, str] | None:
        unread = 0
        while True:
            if self._index == len(self._pieces):
                if self._order.part == "validation":
                    return None
                self.seek({"epoch": self._epoch + 1, "index": 0})
            place = self.place
            text = _text_of(self._pieces[self._permutation[self._index]])
            self._index += 1
            if text:
                return place, text
            unread += 1
            if unread > 2 * len(self._pieces):
                raise config_error(
                    "The data source has no text.",
                    why=f"each of its {len(self._pieces)} documents is empty, unreadable or not UTF-8",
                    hint="another data.path",
                )

    def close(self) -> None:
        """Nothing stays open between two documents."""


def unit_hash(name: bytes) -> float:
    """Return a number in [0, 1) that the SHA-256 of `name` decides."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") / 2**64


def held_out(names: Sequence[str], percent: float) -> list[bool]:
    """Say of each document whether it is held out: those of the smallest shares, one at least where there are two."""
    shares = [unit_hash(name.encode(errors="surrogateescape")) for name in names]
    limit = percent / 100
    if percent > 0 and len(names) > 1 and min(shares) >= limit:
        return [value == min(shares) for value in shares]
    return [value < limit for value in shares]


def _text_of(piece: TextRange) -> str:
    """Read a piece; return nothing where it is gone, unreadable or not UTF-8."""
    try:
        with piece.path.open("rb") as file:
            start = _line_end(file, piece.start, piece.size)
            file.seek(start)
            text = file.read(_line_end(file, piece.end, piece.size, back_to=start) - start).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return text.removeprefix("\ufeff")


def _line_end(file: BinaryIO, offset: int, size: int, back_to: int | None = None) -> int:
    """Move an offset to the next end of a line, or else between two characters; leave the file at `back_to`."""
    if 0 < offset < size:
        file.seek(offset - 1)
        window = file.read(LINE_BYTES)
        end_of_line = window.find(b"\n")
        if end_of_line >= 0:
            offset += end_of_line
        else:
            # Bytes 10xxxxxx go on with a character of UTF-8 that began before.
            offset += next((i for i, byte in enumerate(window[1:5]) if byte & 0xC0 != 0x80), 0)
    if back_to is not None:
        file.seek(back_to)
    return min(offset, size)


def pieces_of(files: Sequence[tuple[str, Path]], piece_bytes: int) -> list[TextRange]:
    """Cut (name, path) into pieces of at least `piece_bytes` bytes."""
    pieces = []
    for name, path in files:
        try:
            size = path.stat().st_size
        except OSError:
            continue
        count = max(1, size // piece_bytes)
        ends = [*(piece_bytes * number for number in range(1, count)), size]
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            pieces.append(TextRange(path, f"{name}#{number}" if number else name, start, end, size))
    return pieces


def stdlib_files() -> list[tuple[str, Path]]:
    """Return the modules of the running Python's standard library, sorted by path; raise `UserError` if none is
    there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [(name, path) for name, path in _below(root, _NOT_SOURCE) if name.endswith(".py") and not path.is_symlink()]
    # The build's own configuration is a list of this machine's paths, and no source text.
    files = [(name, path) for name, path in files if not name.startswith("_sysconfigdata")]
    if not files:
        raise config_error(
            "This Python has no source text of its standard library.",
            why=f"there are no .py files below {root}",
            hint="--data with a text file of yours",
        )
    return files


def find_files(path: str, suffixes: tuple[str, ...] = ("",)) -> list[tuple[str, Path]]:
    """Return the files that a path, directory or glob means, sorted, by name below its root; raise `UserError` if none.

    `suffixes` apply to what a directory holds; hidden files are left out there.
    """
    given = os.path.expanduser(path)
    if os.path.isfile(given):
        return [(os.path.basename(given), Path(given))]
    if os.path.isdir(given):
        if any(os.path.isfile(os.path.join(given, name)) for name in SAVED_TO_DISK):
            raise config_error(
                f"{path} holds a data set in the form of datasets' save_to_disk, which is none for reading.",
                why="its metadata would be read as text",
                hint="write it as rows, dataset.to_parquet('rows.parquet') or to_json, and name that file",
            )
        found = [(name, file) for name, file in _below(Path(given), frozenset()) if name.endswith(suffixes)]
    else:
        plain = given[: min((given.index(c) for c in "*?[" if c in given), default=len(given))]
        root = os.path.dirname(plain)
        matches = sorted(match for match in glob.iglob(given, recursive=True) if os.path.isfile(match))
        found = [(Path(os.path.relpath(match, root or ".")).as_posix(), Path(match)) for match in matches]
    if not found:
        raise config_error(
            f"There is no data at {path!r}.",
            why=f"it is no file, no directory with {' or '.join(suffixes)} files in it, and no glob that matches one"
            if suffixes != ("",)
            else "it is no file, no directory with files in it, and no glob that matches one",
            hint="an existing path; it is read relative to the directory in which the node was started",
        )
    return found


def _below(root: Path, pruned: frozenset[str]) -> list[tuple[str, Path]]:
    """List the files below a directory by relative path, sorted; hidden ones and `pruned` directories left out."""

    def walk() -> Iterator[tuple[str, Path]]:
        for directory, below, names in os.walk(root):
            below[:] = [name for name in below if name not in pruned and not name.startswith(".")]
            for name in names:
                path = Path(directory, name)
                if not name.startswith(".") and path.is_file():
                    yield path.relative_to(root).as_posix(), path

    found = []
    for item in walk():
        found.append(item)
        if len(found) > MOST_FILES:
            raise config_error(
                f"There are more than {MOST_FILES} files below {root}.",
                why="each peer keeps the list of its files in memory",
                hint="JSON Lines or parquet: many documents in one file",
            )
    return sorted(found)
