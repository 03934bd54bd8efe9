"""Documents out of files, in an order of each peer's own that resumes anywhere, and the text held out for validation.

A document is a file, or one piece of a longer file, cut at the end of a line. A training epoch is a permutation of all
documents by (seed, peer, epoch); unshuffled it is their sorted order from a place by (seed, peer).

Validation holds out **parts** of a few kilobytes of whole lines, those whose own SHA-256 falls into the share asked
for (docs/design/data-and-models.md). A document shorter than a part is held out whole or not at all.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from noloco_node.errors import config_error, os_errors_as
from noloco_node.terminal import warn

_MOST_NEWS = 64
Part = Literal["train", "validation"]
LEAST_CHARACTERS, MOST_CHARACTERS = 2048, 8192  # of a part
_ENDS = 8  # beyond the least length one line in so many ends a part
Place = dict[str, Any]  # where a document stands in its source's order: small, and JSON can hold it
MOST_FILES = 1_000_000
SAVED_TO_DISK = ("state.json", "dataset_dict.json")  # `save_to_disk` of datasets writes one of these
LINE_BYTES = 16 * 1024  # how far a cut looks for the end of a line before it cuts between two characters
DAMAGED_SHARE = 0.01  # of a text's characters, at most, may be no UTF-8, or zero bytes
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"})


class UnreadText:
    """Files and rows left out or changed, counted by kind; warns at the first of a kind, the tenth, and so on."""

    def __init__(self, tell: Callable[[str], None] | None = warn) -> None:
        """`tell`: is told each warning, besides `news`."""
        self._tell = tell
        self.counts: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._first: dict[str, str] = {}
        self._news: deque[str] = deque(maxlen=_MOST_NEWS)

    def note(self, kind: str, where: str, count: int = 1) -> None:
        """Count the text at `where`. `kind`: the rest of the sentence, the same for all counted together."""
        before = self.counts.get(kind, 0)
        self.counts[kind] = before + count
        # The name of a file may be no text, which no journal could hold.
        self._first.setdefault(kind, where.encode(errors="backslashreplace").decode())
        if before == 0 or len(str(before)) < len(str(before + count)):
            self._say(kind)

    def end_pass(self) -> None:
        """Warn of all that was counted since the last warning: the whole source has been read once."""
        for kind, count in self.counts.items():
            if self._told.get(kind) != count:
                self._say(kind)

    def _say(self, kind: str) -> None:
        sentence, self._told[kind] = self._sentence(kind), self.counts[kind]
        self._news.append(sentence)
        if self._tell is not None:
            self._tell(sentence)

    def summary(self) -> list[str]:
        return [self._sentence(kind) for kind in self.counts]

    def news(self) -> list[str]:
        return [self._news.popleft() for _ in range(len(self._news))]

    def _sentence(self, kind: str) -> str:
        count = self.counts[kind]
        more = "" if count == 1 else f" (the first of {count} so far)"
        return f"text: {self._first[kind]} {kind}{more}"


def side_of(text: str, part: Part, percent: float) -> tuple[str, ...]:
    """Return the stretches of a document for training, or those held out."""
    held_out = part == "validation"
    if percent <= 0.0 or percent >= 100.0:
        return (text,) if text and held_out == (percent > 0.0) else ()
    stretches = groupby(parts_of(text), lambda each: is_held_out(each, percent))
    return tuple("".join(parts) for out, parts in stretches if out == held_out)


def row_side_of(text: str, part: Part, percent: float) -> tuple[str, ...]:
    """Return the text of a row, which is not divided, if it is on this side, else nothing."""
    held_out = part == "validation"
    if percent <= 0.0 or percent >= 100.0:
        return side_of(text, part, percent)
    return (text,) if text and held_out == is_held_out(text, percent) else ()


def is_held_out(part: str, percent: float) -> bool:
    """Say whether a part is held out. White space at its ends does not count: the last line may lack its end."""
    digest = hashlib.sha256(part.strip().encode(errors="replace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < percent / 100


def parts_of(text: str) -> Iterator[str]:
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


class Document(NamedTuple):
    """The text at one place. `texts`: its stretches in this part. `name`: of the file or row."""

    place: Place
    texts: tuple[str, ...]
    name: str


class Documents(Protocol):
    """A sequence of documents: without end for training, one pass for validation."""

    fingerprint: str  # equal for equal sources: a place means nothing in another
    unread: UnreadText

    @property
    def place(self) -> Place:
        """Return the place of the next document."""

    def seek(self, place: Place) -> None:
        """Go on with the document at `place`."""

    def next(self) -> Document | None:
        """Return the next document with text, None at the end. Waits for disk and network."""

    def close(self) -> None:
        """Let go of files and connections; a call that waits in another thread ends soon."""


class ReadingOrder(NamedTuple):
    """The order of one peer; for validation neither `peer` nor `seed` matters."""

    part: Part
    seed: int
    peer: str
    shuffle: bool

    def rng(self, *purpose: object) -> Random:
        return Random("|".join(map(str, (self.seed, "data", self.peer, *purpose))))

    def permutation(self, count: int, *purpose: object) -> Sequence[int]:
        """Return an order of `count` things; `purpose` tells permutations apart, the epoch first."""
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
    """Bytes `start` to `end` of a file, both moved to the end of a line when read. `name`: of file and piece."""

    path: Path
    name: str
    start: int
    end: int
    size: int


class FileDocuments:
    def __init__(self, pieces: Sequence[TextRange], order: ReadingOrder, validation_percent: float) -> None:
        """Take the pieces; raise `UserError` if there are none."""
        if not pieces:
            raise config_error("The data source has no files that can be read.", "none is there", "another data.path")
        self._pieces, self._order, self._percent = pieces, order, validation_percent
        self.unread = UnreadText()
        self._noted = set[int]()
        self._epoch, self._index = 0, 0
        self._permutation = order.permutation(len(self._pieces), 0)
        # By its files' own names: the directories above them depend on how the path was typed.
        listing = "\n".join(f"{os.path.basename(piece.name)}|{piece.start}|{piece.size}" for piece in self._pieces)
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

    def next(self) -> Document | None:
        empty = 0
        while True:
            if self._index == len(self._pieces):
                self.unread.end_pass()
                if self._order.part == "validation":
                    return None
                self.seek({"epoch": self._epoch + 1, "index": 0})
            place, number = self.place, self._permutation[self._index]
            texts = side_of(self._read(number), self._order.part, self._percent)
            self._index += 1
            if texts:
                return Document(place, texts, str(self._pieces[number].path))
            empty += 1
            if empty > 2 * len(self._pieces):
                raise config_error(
                    "The data source has no text.",
                    why="; ".join(self.unread.summary())
                    or f"all of its documents ({len(self._pieces)}) are empty, or held out for validation",
                    hint="another data.path (or --data), or a smaller data.validation_percent",
                )

    def _read(self, number: int) -> str:
        # What is wrong with a piece is counted once, and not again in each epoch.
        before = sum(self.unread.counts.values())
        text = _text_of(self._pieces[number], None if number in self._noted else self.unread)
        if sum(self.unread.counts.values()) != before:
            self._noted.add(number)
        return text

    def close(self) -> None:
        """Do nothing: no file stays open between two documents."""


def _text_of(piece: TextRange, unread: UnreadText | None = None) -> str:
    """Read a piece; return "" if it is gone or no text. `unread`: counts that, and replaced characters."""
    unread = UnreadText(tell=None) if unread is None else unread
    try:
        if not stat.S_ISREG(piece.path.stat().st_mode):  # a pipe in a file's place would wait for its writer for ever
            unread.note("is no file any more and is left out", piece.name)
            return ""
        with piece.path.open("rb") as file:
            start = _line_end(file, piece.start, piece.size)
            file.seek(start)
            raw = file.read(_line_end(file, piece.end, piece.size, back_to=start) - start)
    except OSError as error:
        unread.note("cannot be read and is left out", f"{piece.name} ({error.strerror})")
        return ""
    text = raw.decode("utf-8", errors="replace").removeprefix("\ufeff")
    damaged, zeros = text.count("\N{REPLACEMENT CHARACTER}"), text.count("\0")
    if damaged + zeros > DAMAGED_SHARE * len(text):
        unread.note("is not text in UTF-8 and is left out", piece.name)
        return ""
    if zeros:
        unread.note("has zero bytes, and they are trained on as they are", piece.name)
    if damaged:
        unread.note("has characters that are not UTF-8, and they are replaced", piece.name)
    return text


def _line_end(file: BinaryIO, offset: int, size: int, back_to: int | None = None) -> int:
    """Move an offset to the next end of a line, or between two characters; leave the file at `back_to`."""
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
    """Return the modules of the running Python's standard library, sorted by path; raise `UserError` if there are none.

    Minor versions of Python differ in a few per cent of it.
    """
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
    """Return the files of a path, directory or glob, sorted, by name below its root; raise `UserError` if none.

    In a directory, `suffixes` select files, and hidden files are left out.
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
        found = [(name, file) for name, file in _below(Path(given), frozenset()) if name.lower().endswith(suffixes)]
    else:
        plain = given[: min((given.index(c) for c in "*?[" if c in given), default=len(given))]
        root = os.path.dirname(plain)
        matches = sorted(match for match in glob.iglob(given, recursive=True) if os.path.isfile(match))
        found = [(Path(os.path.relpath(match, root or ".")).as_posix(), Path(match)) for match in matches]
    if not found:
        what = f"There is no data at {path!r}."
        # A glob is no directory; one that the system refuses to list only looks empty.
        with (
            os_errors_as(config_error, what, "a path that the user of this node may read, and its directories list"),
            suppress(FileNotFoundError, NotADirectoryError, ValueError),  # the last: a NUL
        ):
            for name in os.listdir(given):
                os.stat(os.path.join(given, name))
        plain_ones = [suffix for suffix in suffixes if suffix.count(".") == 1]  # packed ones would make a long list
        of_kind = f"{' or '.join(plain_ones)} " if plain_ones else ""
        within = "it is no file, no directory with {}files in it, and no glob that matches one"
        if os.path.isdir(given):
            within = "this directory has no {}files; hidden ones, and links to other directories, are passed over"
        raise config_error(
            what,
            why=within.format(of_kind),
            hint="an existing path; it is read relative to the directory in which the command was started",
        )
    return found


def _below(root: Path, pruned: frozenset[str]) -> list[tuple[str, Path]]:
    """List the files below a directory by relative path, sorted, without hidden ones and `pruned` directories."""

    found = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in pruned and not name.startswith(".")]
        paths = [Path(directory, name) for name in names if not name.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if os.path.isfile(path)]
        if len(found) > MOST_FILES:
            raise config_error(
                f"There are more than {MOST_FILES} files below {root}.",
                why="each peer keeps the list of its files in memory",
                hint="JSON Lines or parquet: many documents in one file",
            )
    return sorted(found)
