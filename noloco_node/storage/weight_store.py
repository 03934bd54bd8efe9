"""The files that a run starts from, weights and tokenizer: whole in their owner's directory, or filling piece by piece.

A list of digests is believed if its own digest is the run file's, and a piece if its digest is in the list. A disk is
not believed: a piece is hashed when it is read. A file that is still filling has its full size from the first piece on.
Nothing here needs torch: a bootstrap peer serves these files.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from noloco_node.errors import UserError, config_error, os_errors_as, reason_of, storage_error
from noloco_node.storage.atomic_file import require_room, tensor_ranges, write, write_all
from noloco_node.storage.home import typed
from noloco_node.units import format_bytes

PIECE_BYTES = 2**19  # of a file in one message; its last piece may be shorter
LARGEST_FILE_BYTES = 15 * 2**30  # of which the digests of all pieces fit into one message
MOST_HELD_BYTES = LARGEST_FILE_BYTES // PIECE_BYTES // 8  # of what a peer says of one file
MOST_HEADER_BYTES = 2**23  # 60,000 tensors: strangers list files, and one of 100 MiB takes 2.5 GB of memory to decode
DIGEST_BYTES = 32
LOOKED_AT_ONCE = 128  # pieces of an earlier process in one job: others wait meanwhile
_HERE, _ABSENT = b"10"


class WeightFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file that a run starts from. `digest`: SHA-256 over the SHA-256 of its pieces."""

    file: str
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_FILE_BYTES)]
    digest: str

    @property
    def pieces(self) -> int:
        return -(-self.size_bytes // PIECE_BYTES)


class FilePieceKey(NamedTuple):
    """The numbers of a file and of one of its pieces."""

    file: int
    number: int


class WeightStore:
    """Some or all pieces of these files, in `directory`. Everything here waits for a disk: call it in a thread."""

    def __init__(self, directory: Path, files: Sequence[WeightFile], most_bytes: int | None = None) -> None:
        self.directory, self.files, self._most_bytes = directory, tuple(files), most_bytes
        self._digests: dict[int, bytes] = {}
        self._right: dict[int, bytearray] = {}
        """Which pieces of a file are here and right, a digit for each, as far as its digests are known."""
        self._looked = [0] * len(self.files)  # the pieces of each file that `look` has seen

    @classmethod
    def filling(cls, directory: Path, files: Sequence[WeightFile], most_bytes: int | None = None) -> WeightStore:
        """Return a store that takes pieces, with those that an earlier process left.

        `most_bytes`: that its owner allows to fetch; None: as much as is free.
        """
        store = cls(directory, files, most_bytes)
        for number in range(len(files)):
            try:
                store._learn(number, store._list_of(number).read_bytes())
            except (OSError, ValueError):
                continue  # it is asked for anew
        return store

    @classmethod
    def whole(cls, directory: Path, files: Sequence[WeightFile]) -> WeightStore:
        """Return the store of a directory with all the files; raise `UserError` (CONFIG) if one is missing."""
        directory = typed(directory)
        store = cls(directory, files)
        if not files:
            why = "the run file lists none: the run starts from its seed, or from the hub"
            raise _not_these(directory, why, "leave --weights out")
        for number, file in enumerate(files):
            try:
                content = piece_digests(directory / file.file)
            except OSError as error:
                raise _not_these(directory, f"{file.file} cannot be read: {reason_of(error)}") from error
            try:
                store._learn(number, content)
            except ValueError:
                raise _not_these(directory, f"{file.file} is another file than the run file lists") from None
            store._right[number][:] = b"1" * files[number].pieces
            store._looked[number] = files[number].pieces
        return store

    def digests(self, file: int) -> bytes | None:
        """Return the digests of a file's pieces, joined; None if they are not known."""
        return self._digests.get(file)

    def learn(self, file: int, digests: bytes) -> None:
        """Keep the digests of a file's pieces; raise ValueError if they are not those of the run file."""
        self._learn(file, digests)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(self._list_of(file), digests)

    def read(self, key: FilePieceKey) -> bytes | None:
        """Return a piece, if it is here and right."""
        if key.file not in self._digests or not 0 <= key.number < self.files[key.file].pieces:
            return None
        start, data = key.number * PIECE_BYTES, b""
        try:
            with (self.directory / self.files[key.file].file).open("rb") as file:
                size = min(PIECE_BYTES, self.files[key.file].size_bytes - start)
                if self._expected(key) == _of_zeros(size) or not _is_hole(file.fileno(), start, size):
                    file.seek(start)
                    data = file.read(PIECE_BYTES)
        except OSError:
            return None
        is_right = bool(data) and hashlib.sha256(data).digest() == self._expected(key)
        self._right[key.file][key.number] = _HERE if is_right else _ABSENT
        return data if is_right else None

    def look(self, file: int) -> bool:
        """Look at some more of what an earlier process left of a file; say whether all of it has been looked at."""
        if file not in self._digests:
            return True  # nothing of it is known to be right
        first, pieces = self._looked[file], self.files[file].pieces
        self._looked[file] = end = min(first + LOOKED_AT_ONCE, pieces)
        self.missing([FilePieceKey(file, number) for number in range(first, end)])
        return end == pieces

    def others_held(self, lacking: FilePieceKey) -> bytes:
        """Return which other pieces of a file are here, a bit for each (see `is_held`); nothing if none is known."""
        digits = bytearray(self._right.get(lacking.file, b""))
        if lacking.number < len(digits):
            digits[lacking.number] = _ABSENT
        found = int(digits[::-1] or b"0", 2)
        return found.to_bytes(-(-len(digits) // 8), "little") if found else b""

    def write(self, key: FilePieceKey, data: bytes) -> None:
        """Take a piece; raise ValueError if its digest is wrong, `OSError` if the disk refuses."""
        if hashlib.sha256(data).digest() != self._expected(key):
            raise ValueError(f"piece {key.number} of {self.files[key.file].file} is not what its digest says")
        path = self.directory / self.files[key.file].file
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.truncate(descriptor, self.files[key.file].size_bytes)
            write_all(descriptor, data, key.number * PIECE_BYTES)
        finally:
            os.close(descriptor)
        self._right[key.file][key.number] = _HERE

    def missing(self, keys: Sequence[FilePieceKey]) -> list[FilePieceKey]:
        return [key for key in keys if not self._is_right(key) and self.read(key) is None]

    def _is_right(self, key: FilePieceKey) -> bool:
        return key.file in self._right and self._right[key.file][key.number] == _HERE

    def check_room(self, pieces: int) -> None:
        """Raise `OSError` if so many more pieces have no room on the disk, or are not allowed."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        needed_bytes = pieces * PIECE_BYTES
        if self._most_bytes is not None and needed_bytes > self._most_bytes:
            needed, most = format_bytes(needed_bytes), format_bytes(self._most_bytes)
            raise OSError(errno.ENOSPC, f"{needed} are needed, and --max-disk allows {most}")
        require_room(self.directory, needed_bytes)

    def all_pieces(self) -> list[FilePieceKey]:
        return [FilePieceKey(file, number) for file, each in enumerate(self.files) for number in range(each.pieces)]

    def copy_to(self, other: WeightStore) -> None:
        """Copy all pieces into another store of the same files; raise `UserError` if the disk refuses."""
        with disk_errors(other.directory):
            for number in range(len(self.files)):
                other.learn(number, self._digests[number])
            for key in other.missing(self.all_pieces()):
                other.write(key, self.read(key) or b"")

    def first_pieces(self) -> list[FilePieceKey]:
        """Return the first piece of each file, in which its header begins."""
        return [FilePieceKey(file, 0) for file in range(len(self.files))]

    def header_pieces(self) -> list[FilePieceKey]:
        """Return the pieces of the headers; the first pieces are here."""
        found = []
        for number, file in enumerate(self.files):
            with (self.directory / file.file).open("rb") as opened:
                length = min(int.from_bytes(opened.read(8), "little"), MOST_HEADER_BYTES)
            found += self._covering(number, 0, min(8 + length, file.size_bytes))
        return found

    def tensors(self) -> dict[str, int]:
        """Return the names of all tensors with their file's number; the headers are here."""
        return {name: number for number, name, _ in self._ranges()}

    def pieces_of(self, names: Iterable[str]) -> list[FilePieceKey]:
        """Return the pieces that hold these tensors, and the headers."""
        wanted = set(names)
        found = dict.fromkeys(self.header_pieces())
        for number, name, (start, stop) in self._ranges():
            if name in wanted:
                found |= dict.fromkeys(self._covering(number, start, stop))
        return list(found)

    def _ranges(self) -> Iterator[tuple[int, str, tuple[int, int]]]:
        for number, file in enumerate(self.files):
            for name, place in tensor_ranges(self.directory / file.file, MOST_HEADER_BYTES).items():
                yield number, name, place

    def _covering(self, file: int, start: int, stop: int) -> list[FilePieceKey]:
        return [FilePieceKey(file, number) for number in range(start // PIECE_BYTES, -(-stop // PIECE_BYTES))]

    def _learn(self, file: int, digests: bytes) -> None:
        described = self.files[file]
        if len(digests) != DIGEST_BYTES * described.pieces or hashlib.sha256(digests).hexdigest() != described.digest:
            raise ValueError(f"these are not the digests of {described.file}")
        self._digests[file] = digests
        self._right.setdefault(file, bytearray(b"0" * described.pieces))

    def _expected(self, key: FilePieceKey) -> bytes:
        return self._digests[key.file][DIGEST_BYTES * key.number : DIGEST_BYTES * (key.number + 1)]

    def _list_of(self, file: int) -> Path:
        return self.directory / f"{self.files[file].file}.digests"


def is_held(held: bytes, number: int) -> bool:
    """Say whether a piece is among those that `WeightStore.others_held` returned."""
    return number // 8 < len(held) and bool(held[number // 8] >> number % 8 & 1)


def _is_hole(descriptor: int, start: int, size: int) -> bool:
    """Say whether nothing was ever written there: to hash gigabytes of zeros would take minutes."""
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA) >= start + size
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from there to the end; of other errors we learn nothing


@lru_cache(64)
def _of_zeros(size: int) -> bytes:
    return hashlib.sha256(bytes(size)).digest()


def piece_digests(path: Path) -> bytes:
    found = []
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            found.append(hashlib.sha256(data).digest())
    return b"".join(found)


def described(path: Path) -> WeightFile:
    """Return a run file's entry for a file."""
    digest = hashlib.sha256(piece_digests(path)).hexdigest()
    return WeightFile(file=path.name, size_bytes=path.stat().st_size, digest=digest)


def _not_these(
    directory: Path,
    why: str,
    hint: str = "the directory in which `noloco-node init` found or wrote that file, or a copy of it",
) -> UserError:
    return config_error(f"The files in {directory} are not those that the run starts from.", why, hint)


def disk_errors(directory: Path) -> AbstractContextManager[None]:
    """Raise an `OSError` of the body as a `UserError` (STORAGE) that names the directory."""
    what = f"The files that the run starts from cannot be kept in {directory}."
    hint = "free some space, allow more with --max-disk, or give another directory with --home"
    return os_errors_as(storage_error, what, hint)
