"""A state on its way: the file of a donor's frozen copy, and the directory of the pieces that a newcomer has.

The donor's file has no name: it is gone with the process. The newcomer has a file for each piece, with the piece's hash
before it, and one for the manifest. Pieces are neither flushed nor believed: the reader passes over a piece that does
not have its hash. If the disk refuses, noting ends, and the copy goes on in memory.
"""

from __future__ import annotations

import os
import shutil
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
        return _piece(data)

    def _bytes(self, at: int, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = os.pread(self._file.fileno(), size - len(found), at + len(found))
            if not more:
                raise OSError(f"a copy of our state ends {size - len(found)} bytes early")
            found += more
        return found


class _Followed(msgspec.Struct, frozen=True, kw_only=True):
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


_COUNTERS = tuple(name for name in _Followed.__struct_fields__ if name not in ("hashes", "settled"))
_MANIFEST = "manifest"


class PartialDownload:
    """Implements `gossip.transfer.assembly.ChunkStore` in one directory."""

    def __init__(self, directory: Path, run_id: str, stage: int, complain: Callable[[str], None]) -> None:
        """`directory`: has nothing but the pieces of one download. `complain`: told once, when the disk refuses."""
        self.path = directory / f"{run_id[:32]}-{stage}"
        self._complain = complain
        self._refused = self._made = False

    def last(self) -> tuple[Manifest | None, frozenset[int]]:
        try:
            found = msgspec.msgpack.decode((self.path / _MANIFEST).read_bytes(), type=_Followed)
            return _manifest(found), frozenset(found.settled)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None, frozenset()

    def pieces(self) -> Iterator[tuple[Key, bytes, Tensor]]:
        for path in sorted(self.path.glob("*-*")):
            section, _, number = path.name.partition("-")
            with suppress(OSError, ValueError):
                with path.open("rb") as file:
                    content = file.read(DIGEST_BYTES + MOST_PIECE_BYTES)
                yield Key(Section(section), int(number)), content[:DIGEST_BYTES], _piece(content[DIGEST_BYTES:])

    def follow(self, manifest: Manifest | None, settled: frozenset[int]) -> None:
        if manifest is None:
            self._note(_MANIFEST)
            return
        told = {name: getattr(manifest, name) for name in _COUNTERS}
        hashes = {section: bytes(raw(digests).numpy()) for section, digests in present(manifest).items()}
        found = _Followed(**told, hashes=hashes, settled=tuple(sorted(settled)))
        self._note(_MANIFEST, msgspec.msgpack.encode(found))

    def put(self, key: Key, digest: bytes, data: Tensor) -> None:
        content: Any = data.numpy()
        self._note(f"{key.section}-{key.number}", digest, memoryview(content))

    def discard(self) -> None:
        self._refused = True
        for path in self.path.parent.glob("*-*"):
            _remove(path)

    def _note(self, name: str, *parts: bytes | memoryview) -> None:
        """Write a file; complain of a disk that refuses, and write none from then on."""
        if self._refused:
            return
        try:
            if not self._made:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                for path in set(self.path.parent.glob("*-*")) - {self.path}:
                    _remove(path)
                self._made = True
            require_room(self.path, sum(map(len, parts)))
            with (self.path / name).open("wb", buffering=0) as file:
                for part in parts:
                    write_all(file.fileno(), part)
        except OSError as error:
            self._refused = True
            self._complain(
                f"pieces of the copy cannot be kept on the disk ({reason_of(error)}): killed, we would begin again"
            )


def _remove(path: Path) -> None:
    """Remove a file or a directory; a disk that refuses keeps it: a later copy finds pieces that fit nothing."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _piece(content: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _manifest(found: _Followed) -> Manifest:
    """Return a noted manifest; raise ValueError if its hashes are no rows of digests."""
    if any(len(content) % DIGEST_BYTES or not content for content in found.hashes.values()):
        raise ValueError("torn hashes")
    told: dict[str, Any] = {name: getattr(found, name) for name in _COUNTERS}
    told |= {str(section): listed([content]) for section, content in found.hashes.items()}
    return Manifest(**told)
