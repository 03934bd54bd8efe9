"""A state on its way: the file of a donor's frozen copy, and the directory of the pieces that a newcomer has.

The donor's file has no name: it is gone with the process. The newcomer has a file for each piece and one for the
manifest, each behind its hash. They are neither flushed nor believed: the reader passes over what does not have its
hash. If the disk refuses, noting ends, and the copy goes on in memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gossip.exchange.codec import norm
from gossip.exchange.messages import Manifest, ReplicaState, Section
from gossip.transfer.assembly import Key
from gossip.transfer.chunks import DIGEST_BYTES, Span, held_sections, listed, raw, tensors_of
from noloco_node.errors import reason_of
from noloco_node.storage.atomic_file import bytes_of, require_room, write_all


class StateFile:
    """Implements `gossip.transfer.chunks.HeldCopy`; reads the state now. Raises `OSError` if the disk refuses."""

    def __init__(self, directory: Path, state: ReplicaState) -> None:
        self.counters = replace(state, slow=(), momentum=(), optimiser=(), gathered=())
        self.sections = held_sections(state)
        self._norm = norm(state.slow)
        self._starts: dict[Section, list[int]] = {}  # where each tensor begins in the file, and where a section ends
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


_MANIFEST = "manifest"


class PartialDownload:
    """Implements `gossip.transfer.assembly.ChunkStore` in one directory."""

    def __init__(self, directory: Path, stage: int, complain: Callable[[str], None]) -> None:
        """`directory`: has nothing but the pieces of one download. `complain`: told once, when the disk refuses."""
        self.path = directory / f"stage-{stage}"
        self._complain = complain
        self._refused = self._made = False

    def last(self) -> tuple[Manifest | None, frozenset[int]]:
        try:
            expected, content = _parts(self.path / _MANIFEST)
            if hashlib.sha256(content).digest() != expected:
                return None, frozenset()
            told, settled = msgspec.msgpack.decode(content)
            found: dict[str, Any] = {
                name: listed([value]) if isinstance(value, bytes) else value for name, value in told.items()
            }
            return Manifest(**found), frozenset(settled)
        except (OSError, TypeError, ValueError):  # of an earlier version, perhaps
            return None, frozenset()

    def pieces(self) -> Iterator[tuple[Key, bytes, Tensor]]:
        for path in sorted(self.path.glob("*-*")):
            section, _, number = path.name.partition("-")
            with suppress(OSError, ValueError):
                expected, content = _parts(path)
                yield Key(Section(section), int(number)), expected, _piece(content)

    def follow(self, manifest: Manifest | None, settled: frozenset[int]) -> None:
        if manifest is None:
            self._note(_MANIFEST)
            return
        told = {each.name: getattr(manifest, each.name) for each in fields(manifest)}
        content = msgspec.msgpack.encode((told, sorted(settled)), enc_hook=lambda digests: bytes(raw(digests).numpy()))
        self._note(_MANIFEST, hashlib.sha256(content).digest(), content)

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
            with (self.path / name).open("wb") as file:
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


def _parts(path: Path) -> tuple[bytes, bytes]:
    """Return the hash at the beginning of a file, and what follows."""
    content = path.read_bytes()
    return content[:DIGEST_BYTES], content[DIGEST_BYTES:]
