"""The two files of a state on its way: a donor's frozen copy, and the pieces that a newcomer has.

The donor's file has no name: it is gone with the process. The newcomer's file is appended to: each record is its
length, a header in MessagePack and, for a piece, its bytes. It is neither flushed nor believed: a torn record ends the
file, and the reader passes over a piece that does not have its hash. If the disk refuses, noting ends, and the copy
goes on in memory.
"""

from __future__ import annotations

import os
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gossip.exchange.codec import norm
from gossip.exchange.messages import Manifest, ReplicaState, Section
from gossip.transfer.assembly import Key
from gossip.transfer.chunks import DIGEST_BYTES, MOST_PIECE_BYTES, Span, held_sections, listed, present, raw, tensors_of
from noloco_node.errors import reason_of
from noloco_node.storage.atomic_file import bytes_of, require_room, write_all

_PREFIX = struct.Struct(">I")
_HEADER_BYTES = 2**26
SECTIONS = len(Section)


class StateFile:
    """Implements `gossip.transfer.chunks.HeldCopy`; reads the state now. Raises `OSError` if the disk refuses."""

    def __init__(self, directory: Path, state: ReplicaState) -> None:
        self.counters = replace(state, slow=(), momentum=(), optimiser=(), gathered=())
        self.sections = held_sections(state)
        self._norm = norm(state.slow)
        self._starts: dict[Section, list[int]] = {}
        """Where each tensor begins in the file, and where a section ends."""
        end = 0
        for section in self.sections:
            sizes = (bytes_of(tensor).size_bytes for tensor in tensors_of(state, section))
            self._starts[section] = list(accumulate(sizes, initial=end))
            end = self._starts[section][-1]
        directory.mkdir(parents=True, exist_ok=True)
        require_room(directory, end, directory)
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (it lives as long as this)
        weakref.finalize(self, self._file.close)
        for section in self.sections:
            for tensor in tensors_of(state, section):
                self._file.writelines(bytes_of(tensor).read())
        self._file.flush()

    def norm(self) -> float:
        return self._norm

    def read(self, section: Section, span: Span) -> Tensor:
        data = bytearray()
        for part in span.parts:
            at, size = self._starts[section][part.tensor] + part.start, part.stop - part.start
            data += self._bytes(at, size)
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def _bytes(self, at: int, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = os.pread(self._file.fileno(), size - len(found), at + len(found))
            if not more:
                raise OSError(f"a copy of our state ends {size - len(found)} bytes early")
            found += more
        return found


class _Follow(msgspec.Struct, frozen=True, kw_only=True, tag="follow"):
    """A manifest whose pieces come next: its fields, hashes by section, and the units of earlier donors."""

    snapshot: str
    round: int
    inner_steps: int
    progress: float
    optimiser_steps: int
    meetings: int
    last_met: int
    norm: float
    hashes: dict[Section, bytes]
    settled: tuple[int, ...]


_COUNTERS = tuple(name for name in _Follow.__struct_fields__ if name not in ("hashes", "settled"))


class _Nobody(msgspec.Struct, frozen=True, tag="nobody"):
    """No manifest is followed any more."""


class _Noted(msgspec.Struct, frozen=True, kw_only=True, tag="piece"):
    """A piece, whose `size` bytes follow."""

    section: Section
    number: int
    digest: bytes
    size: int


_Record = _Follow | _Nobody | _Noted
_DECODER: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(_Record)


class PartialDownloadFile:
    """Implements `gossip.transfer.assembly.ChunkStore` in one file."""

    def __init__(
        self, directory: Path, run_id: str, stage: int, section_bytes: int, complain: Callable[[str], None]
    ) -> None:
        """`section_bytes`: of the stage's weights. `complain`: told once, when the disk refuses."""
        self.path = directory / f"{run_id[:32]}-{stage}.pieces"
        self._complain = complain
        self._most_bytes = 2 * SECTIONS * section_bytes + _HEADER_BYTES
        self._file = -1
        self._whole_bytes = 0
        self._refused = self._scanned = False

    def last(self) -> tuple[Manifest | None, frozenset[int]]:
        found: _Follow | None = None
        for record, _ in self._records():
            if not isinstance(record, _Noted):
                found = record if isinstance(record, _Follow) else None
        if found is None:
            return None, frozenset()
        try:
            return _manifest(found), frozenset(found.settled)
        except ValueError:
            return None, frozenset()

    def pieces(self) -> Iterator[tuple[Key, bytes, Tensor]]:
        for record, data in self._records():
            if isinstance(record, _Noted):
                yield Key(record.section, record.number), record.digest, data

    def follow(self, manifest: Manifest | None, settled: frozenset[int]) -> None:
        if manifest is None:
            self._append(_Nobody(), None)
            return
        told = {name: getattr(manifest, name) for name in _COUNTERS}
        hashes = {section: bytes(raw(digests).numpy()) for section, digests in present(manifest).items()}
        self._append(_Follow(**told, hashes=hashes, settled=tuple(sorted(settled))), None)

    def put(self, key: Key, digest: bytes, data: Tensor) -> None:
        self._append(_Noted(section=key.section, number=key.number, digest=digest, size=data.nbytes), data)

    def rest(self) -> None:
        """Close the file; the next piece opens it again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def discard(self) -> None:
        self.rest()
        self._refused = True
        for path in (*self._others(), self.path):
            with suppress(OSError):  # a disk that refuses: a later copy finds pieces that fit nothing
                path.unlink(missing_ok=True)

    def _records(self) -> Iterator[tuple[_Record, Tensor]]:
        """Yield the whole records of the file; a torn one ends it."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._whole_bytes = 0
        try:
            with self.path.open("rb") as file:
                while len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
                    (size,) = _PREFIX.unpack(prefix)
                    header = file.read(size) if size <= _HEADER_BYTES else b""
                    record, data = _DECODER.decode(header), nothing
                    if isinstance(record, _Noted) and record.size:
                        content = bytearray(file.read(record.size) if 0 < record.size <= MOST_PIECE_BYTES else b"")
                        if len(content) != record.size:
                            return
                        data = torch.frombuffer(content, dtype=torch.uint8)
                    self._whole_bytes = file.tell()
                    yield record, data
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return
        finally:
            self._scanned = True

    def _append(self, record: _Record, data: Tensor | None) -> None:
        header = msgspec.msgpack.encode(record)
        content: Any = data.numpy() if data is not None else b""
        body = memoryview(content)
        frame_bytes = _PREFIX.size + len(header) + len(body)
        if self._refused or self._whole_bytes + frame_bytes > self._most_bytes:
            return
        try:
            if self._file < 0:
                self._open()
            require_room(self.path.parent, frame_bytes)
            for part in (memoryview(_PREFIX.pack(len(header)) + header), body):
                write_all(self._file, part)
            self._whole_bytes += frame_bytes
        except OSError as error:
            self._refused = True
            self.rest()
            self._complain(
                f"pieces of the copy cannot be kept on the disk ({reason_of(error)}): killed, we would begin again"
            )

    def _open(self) -> None:
        """Open the file for appending behind the last whole record."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._others():
            path.unlink(missing_ok=True)
        if not self._scanned:
            for _ in self._records():
                pass
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(self._file, self._whole_bytes)
        os.lseek(self._file, 0, os.SEEK_END)

    def _others(self) -> list[Path]:
        return [path for path in self.path.parent.glob("*.pieces") if path != self.path]


def _manifest(found: _Follow) -> Manifest:
    """Return a noted manifest; raise ValueError if its hashes are no rows of digests."""
    if any(len(content) % DIGEST_BYTES or not content for content in found.hashes.values()):
        raise ValueError("torn hashes")
    told: dict[str, Any] = {name: getattr(found, name) for name in _COUNTERS}
    told |= {str(section): listed([content]) for section, content in found.hashes.items()}
    return Manifest(**told)
