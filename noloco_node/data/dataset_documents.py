"""Documents out of the rows of a data set: JSON Lines, parquet, or a repository of the Hugging Face hub.

`datasets` streams the hub, `local_rows` reads files of this machine. A data set is a list of shards (files, or row
groups of local parquet files), which a training epoch visits in an order of (seed, peer, epoch). Each shard is read in
chunks, which are permuted in memory. Unlike the library's shuffle buffer, this order resumes exactly: a place is the
shard, the state where the chunk begins, and the rows taken from it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from noloco_node.data.file_documents import Document, Place, ReadingOrder, UnreadText, find_files, row_side_of, side_of
from noloco_node.data.local_rows import LocalRows
from noloco_node.data.row_forms import BadRow, GoodRow, data_error, row_of
from noloco_node.errors import Exit, UserError, config_error, is_full_disk, one_line
from noloco_node.run.config import DataConfig
from noloco_node.storage.atomic_file import size_of
from noloco_node.terminal import say

T = TypeVar("T")
_WRONG_DATA = (ValueError, KeyError, TypeError, RuntimeError)
_AWAY = (Exit.UNREACHABLE, "check the network")

ANOTHER_FIELD = "another data.field in the run file, or --data SOURCE#FIELD"
END_BYTES = 4096  # of a file's beginning and end, by which it is known again
CHUNK_ROWS = 8192
CHUNK_CHARACTERS = 8 * 1024 * 1024
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)  # before the tries after the first; then the source is given up
SUFFIXES = {
    "json": tuple(
        f".{kind}{packed}" for kind in ("jsonl", "json", "ndjson") for packed in ("", ".gz", ".bz2", ".zst", ".xz")
    ),
    "parquet": (".parquet",),
}


class _Chunk(NamedTuple):
    """Consecutive rows: the stretches of text and the name of each; the stream's state after them, None at its end."""

    rows: list[tuple[tuple[str, ...], str]]
    state: Any


class RowDocuments:
    def __init__(
        self, data: DataConfig, order: ReadingOrder, load: Callable[[], Any], unread: UnreadText | None = None
    ) -> None:
        """Open the stream that `load` returns (see `load_rows`); raise `UserError` if that fails."""
        self._data, self._order = data, order
        self.unread, self._first_pass = UnreadText() if unread is None else unread, True
        self.rows_seen = self._texts_seen = 0
        self._closed, self._reading = threading.Event(), threading.Lock()
        self._rows_left: Iterator[Any] | None = None
        self._shard: Any = None
        self.retries = 0
        # Once: the hub's library itself tries for half a minute, and the person who starts a node waits for it.
        self._stream: Any = self._persist(lambda: _narrow(load(), data.row_fields), ())
        self._shards: int = self._stream.num_shards
        self._epoch = self._turn = self._number = self._index = self._in_epoch = 0
        self._state: Any = None
        self._chunk: _Chunk | None = None
        self._chunk_order: Any = ()
        self._permutation = order.permutation(self._shards, 0)
        for broken in getattr(self._stream, "unreadable", ()):
            self.unread.note(*broken)
        # Files are known by their content: the path to them may be typed in many ways.
        path = data.path if data.source == "hub" else None
        read = (data.form, *data.row_fields) if data.has_rows else (data.field,)
        where = (data.source, path, data.commit, data.subset, data.split, *read)
        self.fingerprint = hashlib.sha256(repr((*where, self._shards, _files_of(data))).encode()).hexdigest()

    @property
    def place(self) -> Place:
        return {
            "epoch": self._epoch,
            "turn": self._turn,
            "chunk": self._number,
            "state": self._state,
            "index": self._index,
        }

    def seek(self, place: Place) -> None:
        epoch, turn, number, index = (place[name] for name in ("epoch", "turn", "chunk", "index"))
        if not all(isinstance(n, int) and n >= 0 for n in (epoch, turn, number, index)) or turn > self._shards:
            raise ValueError(f"{place} is no place here")
        self._let_go()
        self._chunk = None
        self._epoch, self._turn, self._number, self._index, self._state = epoch, turn, number, index, place["state"]
        self._in_epoch = 0
        self._permutation = self._order.permutation(self._shards, epoch)

    def next(self) -> Document | None:
        with self._reading:
            try:
                return self._next()
            finally:
                if self._closed.is_set():
                    self._let_go()

    def _next(self) -> Document | None:
        empty_epochs = 0
        while True:
            if self._turn == self._shards:
                self.unread.end_pass()
                if self._order.part == "validation":
                    return None
                # The first epoch seen may be the rest of one, after a resumption: two without text are proof.
                empty_epochs += self._in_epoch == 0
                if empty_epochs > 1:
                    raise self._no_text()
                self._first_pass = False
                self.seek({"epoch": self._epoch + 1, "turn": 0, "chunk": 0, "state": None, "index": 0})
            if self._chunk is None:
                self._chunk = self._persist(self._read_chunk)
                count, self._chunk_order = len(self._chunk.rows), range(len(self._chunk.rows))
                if self._order.shuffle and count:
                    purpose = self._epoch, self._permutation[self._turn], self._number
                    self._chunk_order = self._order.permutation(count, *purpose)
            if self._index < len(self._chunk.rows):
                place = self.place
                texts, name = self._chunk.rows[self._chunk_order[self._index]]
                self._index += 1
                self._in_epoch += 1
                return Document(place, texts, name)
            self._state, self._chunk, self._index = self._chunk.state, None, 0
            if self._state is None:
                self._let_go()
                self._turn, self._number = self._turn + 1, 0
            else:
                self._number += 1

    def _read_chunk(self) -> _Chunk:
        """Read rows of this part from `state` on, until they are many or the shard ends."""
        if self._rows_left is None:
            self._shard = self._stream.shard(num_shards=self._shards, index=self._permutation[self._turn])
            if self._state is not None:
                self._shard.load_state_dict(self._state)
            self._rows_left = iter(self._shard)
        read: list[tuple[tuple[str, ...], str]] = []
        bad: list[BadRow] = []
        side = row_side_of if self._data.has_rows else side_of
        characters = 0
        chunk = None
        for rows, row in enumerate(self._rows_left, 1):
            self.rows_seen += 1
            text, name = self._read(row, bad)
            if stretches := side(text, self._order.part, self._data.validation_percent):
                read.append((stretches, name))
            characters += len(text)
            self._texts_seen += bool(text)
            if rows >= CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
                chunk = _Chunk(read, self._shard.state_dict())
                break
        if self._first_pass:  # a chunk that had to be read again is counted once
            for each in bad:
                self.unread.note(*each)
        # A pass over files ends, and says the same then; over a data set of the hub it may take weeks.
        if self._data.source == "hub" and not self._texts_seen and self.rows_seen >= CHUNK_ROWS:
            raise self._no_text()
        return chunk or _Chunk(read, None)

    def _no_text(self) -> UserError:
        none = f"none of its rows ({self.rows_seen}) has any" if self.rows_seen else "it has no rows"
        held_out = "all of its text is held out for validation"
        why = "; ".join(self.unread.summary()) or (held_out if self._texts_seen else none)
        if self._data.has_rows:
            what = f'The data source has no rows that fit data.form = "{self._data.form}".'
            return data_error(what, why, "`noloco-node data` shows how rows are read")
        return config_error(
            f"The data source has no rows with text in the field {self._data.field!r}.",
            why,
            f"another data.source or data.path; {ANOTHER_FIELD}"
            if self.rows_seen
            else "another data.path, with a row in it",
        )

    def _read(self, row: Any, bad: list[BadRow]) -> tuple[str, str]:
        """Return the text of a row, and where it is; "" and a note in `bad` if it cannot be used."""
        if isinstance(row, dict):
            missing = [name for name in self._data.row_fields if name not in row]
            if missing:
                hint = "the names of the fields under [data] in the run file" if self._data.has_rows else ANOTHER_FIELD
                raise config_error(f"The data has no field {missing[0]!r}.", f"its fields are {', '.join(row)}", hint)
            row = row_of(self._data, row, row, f"row {self.rows_seen}")
        if isinstance(row, GoodRow):
            return row
        bad.append(row)
        return "", row.where

    def _persist(self, attempt: Callable[[], T], pauses_s: Sequence[float] | None = None) -> T:
        from datasets.exceptions import DatasetsError

        for pause_s in (*(PAUSES_S if pauses_s is None else pauses_s), None):
            try:
                return attempt()
            except UserError:
                raise
            except (FileNotFoundError, PermissionError, DatasetsError, *_WRONG_DATA) as e:
                raise self._unreadable(e, Exit.CONFIG, "check [data] in the run file against the data set") from e
            except Exception as e:  # the libraries behind a stream raise errors of several others
                if not _is_passing(e):
                    raise
                self._let_go()
                self.retries += 1
                if pause_s is None:
                    code, remedy = (Exit.STORAGE, "free some space") if is_full_disk(e) else _AWAY
                    raise self._unreadable(e, code, f"{remedy}; the node goes on from here when started again") from e
                say(f"the data source does not answer ({type(e).__name__}); trying again in {pause_s:.0f} s")
                if self._closed.wait(pause_s):
                    raise ConnectionAbortedError("the data source was closed") from e
        raise AssertionError("the last try returns or raises")

    def _unreadable(self, error: BaseException, code: Exit, hint: str) -> UserError:
        why = one_line(f"{type(error).__name__}: {error}")
        what = f"The data source {self._data.source} {self._data.path} cannot be read."
        return UserError(what, why=why, hint=hint, code=code)

    def _let_go(self) -> None:
        rows, self._rows_left, self._shard = self._rows_left, None, None
        close = getattr(rows, "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        self._closed.set()
        # A thread that reads at this moment lets go itself.
        if self._reading.acquire(blocking=False):
            self._let_go()
            self._reading.release()


def _is_passing(error: Exception) -> bool:
    """Whether a later try may find what this one did not: not after a bug, nor where memory has ended.

    The libraries behind a stream have classes of their own for a network; a bug raises one of Python's.
    """
    if isinstance(error, MemoryError):  # pyarrow and numpy have their own of it
        return False
    return isinstance(error, (OSError, EOFError)) or type(error).__module__ != "builtins"


def _local_files(data: DataConfig) -> list[tuple[str, Path]]:
    if data.source == "hub":
        return []
    return [(name, path) for name, path in find_files(data.path or "", SUFFIXES[data.source]) if size_of(path)]


def _files_of(data: DataConfig) -> list[tuple[str, int, str]]:
    """Return name, size, and a digest of both ends of each local file: a copied file is the same source."""
    described = []
    for _, path in _local_files(data):
        try:
            file = path.open("rb")
        except OSError:
            continue
        with file:
            size, ends = path.stat().st_size, hashlib.sha256(file.read(END_BYTES))
            file.seek(max(0, size - END_BYTES))
            ends.update(file.read(END_BYTES))
        described.append((path.name, size, ends.hexdigest()))
    return described


def _narrow(stream: Any, fields: Sequence[str]) -> Any:
    """Keep only the columns that are read, if the stream knows its columns: images need not be decoded."""
    columns = stream.column_names
    return stream.select_columns(list(fields)) if columns is not None and {*fields} <= {*columns} else stream


def load_rows(data: DataConfig) -> Any:
    """Open a data set as a stream: a `datasets.IterableDataset` or `LocalRows`."""
    if data.source == "hub":
        import datasets

        # Else the library reports each opening to a server.
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        return datasets.load_dataset(
            data.path, name=data.subset, revision=data.commit, split=data.split, streaming=True
        )
    files = _local_files(data)
    if not files:
        raise config_error(f"There is no data at {data.path!r}.", "all its files are empty", "another data.path")
    return LocalRows(files, data)


def check_source(source: str) -> None:
    """Raise `UserError` if the source that a person named is not understood, or has no file here; ask no hub.

    Several sources for a mixture are joined by +, which a single one may have in its path.
    """
    try:
        data = DataConfig().with_source(source)
        if data.path is not None and data.source != "hub":
            find_files(data.path, SUFFIXES.get(data.source, ("",)))
    except UserError:
        if "+" not in source:
            raise
        for each in source.split("+"):
            check_source(each)
