"""Rows of JSON Lines and Parquet files on this machine, of which few fields are read, whatever other fields a row has.

A row that has not what the run reads is a `BadRow`, which is counted and ends nothing. A shard is a JSON file (packed
or not, lines or one array), or a row group of a Parquet file. Memory holds a part of it. Its state is the number of
rows read, and for unpacked JSON Lines the place of the next.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from noloco_node.data.row_forms import BadRow, Row, row_of
from noloco_node.errors import config_error, one_line
from noloco_node.run.config import DataConfig

_BOM = b"\xef\xbb\xbf"
_NOT_UTF8 = "is not text in UTF-8 and is left out"
_BATCH_ROWS = 256
MOST_LINE_BYTES = 64 * 1024 * 1024  # a row is read whole into memory
READ_CHARACTERS = 2**20  # of an array at a time
_ROW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE, _BLANKS = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")


class LocalRows:
    """The rows of a list of files, in shards. `unreadable`: files that are no data at all."""

    column_names = None

    def __init__(self, files: Sequence[tuple[str, Path]], data: DataConfig) -> None:
        """List the shards; raise `UserError` if no file can be read."""
        self._data = data
        self.unreadable: list[BadRow] = []
        self._shards: list[tuple[str, Path, int]] = []
        for name, path in files:
            if data.source == "json":
                self._shards.append((name, path, -1))
            else:
                self._shards += [(name, path, group) for group in range(self._groups(name, path))]
        if not self._shards:
            why = "; ".join(f"{each.where} {each.kind}" for each in self.unreadable[:3])
            raise config_error(
                f"There is no data at {data.path!r}.",
                why or "its files have no rows",
                "another data.source or data.path",
            )

    def _groups(self, name: str, path: Path) -> int:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with path.open("rb") as opened, ParquetFile(opened) as file:  # the name may be no text that pyarrow takes
                return int(file.num_row_groups)
        except (pyarrow.ArrowException, OSError) as error:
            self.unreadable.append(BadRow("cannot be read and is left out", f"{name} ({one_line(error, 120)})"))
            return 0

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def shard(self, num_shards: int, index: int) -> JsonShard | ParquetShard:
        """Return one of the shards; `num_shards` is the number of all."""
        assert num_shards == len(self._shards)
        name, path, group = self._shards[index]
        return JsonShard(name, path, self._data) if group < 0 else ParquetShard(name, path, group, self._data)


class JsonShard:
    def __init__(self, name: str, path: Path, data: DataConfig) -> None:
        self._name, self._path, self._data = name, path, data
        self._rows = self._offset = 0

    def state_dict(self) -> dict[str, int]:
        return {"rows": self._rows, "offset": self._offset}

    def load_state_dict(self, state: Any) -> None:
        self._rows, self._offset = (_count(state, name) for name in ("rows", "offset"))

    def __iter__(self) -> Iterator[Row]:
        try:
            with _unpacked(self._path) as file:
                is_array = _holds_array(file)
            with _unpacked(self._path) as file:
                if file.peek(len(_BOM)).startswith(_BOM):
                    file.read(len(_BOM))
                yield from self._array(file) if is_array else self._lines(file)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:  # a packed file may be torn
            yield BadRow("cannot be read further, and its rest is left out", f"{self._name} ({one_line(error, 120)})")

    def _lines(self, file: io.BufferedReader) -> Iterator[Row]:
        plain = self._path.suffix.lower() not in _PACKED
        if plain and self._offset:
            file.seek(self._offset)
        else:
            for _ in range(self._rows):
                _line(file)
        while line := _line(file):
            self._rows += 1
            self._offset = file.tell() if plain else 0
            where = f"{self._name}:{self._rows}"
            if len(line) > MOST_LINE_BYTES:
                yield BadRow(f"is longer than {MOST_LINE_BYTES:,} bytes and is left out", where)
            elif line.strip():
                yield self._row(line, where)

    def _array(self, file: io.BufferedReader) -> Iterator[Row]:
        number = 0
        try:
            with io.TextIOWrapper(file, "utf-8", newline="") as text:
                for number, row in enumerate(_elements(text), 1):
                    if number > self._rows:
                        self._rows = number
                        yield self._row_in(row, f"{self._name}, row {number}")
        except UnicodeDecodeError:
            yield BadRow(f"{_NOT_UTF8} with all that follows", f"{self._name}, row {number + 1}")
        except (ValueError, RecursionError):
            kind = f"is no JSON, or longer than {MOST_LINE_BYTES:,} bytes, and is left out with all that follows"
            yield BadRow(kind, f"{self._name}, row {number + 1}")

    def _row(self, line: bytes, where: str) -> Row:
        try:
            row = _ROW.decode(line)
            fields = {name: msgspec.json.decode(row[name]) for name in self._data.row_fields if name in row}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            try:  # it may hold NaN, which is no JSON and often written all the same
                return self._row_in(json.loads(line), where)
            except UnicodeDecodeError:
                return BadRow(_NOT_UTF8, where)
            except (ValueError, RecursionError):
                return BadRow("is no JSON and is left out", where)
        return row_of(self._data, fields, row, where)

    def _row_in(self, row: Any, where: str) -> Row:
        if not isinstance(row, dict):
            return BadRow("is no JSON object and is left out", where)
        return row_of(self._data, row, row, where)


def _holds_array(file: io.BufferedReader) -> bool:
    """Whether the first character that is not blank opens an array, however many blanks are before it."""
    begin = b""
    while not begin and (piece := file.read(4096)):
        begin = piece.removeprefix(_BOM).lstrip()
    return begin.startswith(b"[")


def _past_blank_start(text: io.TextIOBase) -> str:
    """Read on, and return what comes behind blanks; "" at the end."""
    held = ""
    while not held and (more := text.read(READ_CHARACTERS)):
        held = more.lstrip()
    return held


def _elements(text: io.TextIOBase) -> Iterator[Any]:
    """Yield the elements of a JSON array as they are read; raise ValueError where it is none, or one is too long."""
    held = _past_blank_start(text).removeprefix("[").lstrip() or _past_blank_start(text)
    is_last = held.startswith("]")
    at = int(is_last)
    while not is_last:
        try:
            element, end = _element(held, at)
        except ValueError:  # it may go on behind what is held
            more = text.read(max(READ_CHARACTERS, len(held) - at)) if len(held) - at <= MOST_LINE_BYTES else ""
            if not more:
                raise
            held, at = held[at:] + more, 0
            continue
        yield element
        is_last, at = held[end] == "]", end + 1
    if (held[at:] + text.read(READ_CHARACTERS)).strip():
        raise ValueError("something follows the array")


def _element(text: str, at: int) -> tuple[Any, int]:
    """Return the element that begins at a place, and where the mark behind it is; raise ValueError if none is whole."""
    element, end = _VALUE.raw_decode(text, _past_blanks(text, at))
    end = _past_blanks(text, end)
    if text[end : end + 1] not in (",", "]"):  # a number may have more digits
        raise ValueError("no mark ends the element")
    return element, end


def _past_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _line(file: io.BufferedReader) -> bytes:
    """Read a line; of one that is too long return its beginning, which is too long as well."""
    line = rest = file.readline(MOST_LINE_BYTES + 1)
    while len(rest) > MOST_LINE_BYTES and not rest.endswith(b"\n"):
        rest = file.readline(MOST_LINE_BYTES + 1)
    return line


class ParquetShard:
    def __init__(self, name: str, path: Path, group: int, data: DataConfig) -> None:
        self._name, self._path, self._group, self._data = name, path, group, data
        self._rows = 0

    def state_dict(self) -> dict[str, int]:
        return {"rows": self._rows}

    def load_state_dict(self, state: Any) -> None:
        self._rows = _count(state, "rows")

    def __iter__(self) -> Iterator[Row]:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        where, done = f"{self._name}, row group {self._group}", 0
        try:
            with self._path.open("rb") as opened, ParquetFile(opened) as file:
                names = file.schema_arrow.names
                fields = [name for name in self._data.row_fields if name in names]
                if len(fields) < len(self._data.row_fields):
                    rows = file.metadata.row_group(self._group).num_rows
                    bad = row_of(self._data, dict.fromkeys(fields, ""), names, where)
                    assert isinstance(bad, BadRow)
                    yield bad._replace(rows=rows)
                    return
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[self._group], columns=fields):
                    done += len(batch)
                    if done <= self._rows:
                        continue
                    for row in _rows_of(batch.slice(len(batch) + self._rows - done)):
                        self._rows += 1
                        place = f"{where}, row {self._rows}"
                        bad = BadRow("cannot be read and is left out", place)
                        yield bad if row is None else row_of(self._data, row, names, place)
        except (pyarrow.ArrowException, OSError, IndexError) as error:  # the last: the file has fewer groups by now
            yield BadRow("cannot be read and is left out", f"{where} ({one_line(error, 120)})")


def _rows_of(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a table; None for one that Python cannot hold, such as a date beyond its last year."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        if len(batch) == 1:
            yield None
            return
        for number in range(len(batch)):
            yield from _rows_of(batch.slice(number, 1))
    else:
        yield from rows


def _count(state: Any, name: str) -> int:
    found = state[name]
    if not isinstance(found, int) or found < 0:
        raise ValueError(f"{state} is no place here")
    return found


def _zstd(path: Path) -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(path.open("rb"), "zstd"))


_PACKED: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}


def _unpacked(path: Path) -> io.BufferedReader:
    opened = _PACKED.get(path.suffix.lower())
    return path.open("rb") if opened is None else cast(io.BufferedReader, opened(path))
