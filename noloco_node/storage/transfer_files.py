"""A replica's state for newcomers, in a file without a name: it takes no memory, and is gone with the process."""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from gossip.exchange.messages import ReplicaState, Section
from gossip.exchange.swap import norm
from gossip.transfer.chunks import Span, held_sections, tensors_of
from noloco_node.storage.atomic_file import Array, bytes_of, require_room


class StateFile:
    """Implements `gossip.transfer.chunks.HeldCopy`. The state's tensors are read while this is made, no later.

    Raises `OSError` where the disk refuses.
    """

    def __init__(self, directory: Path, state: ReplicaState) -> None:
        self.counters = replace(state, slow=(), momentum=(), optimiser=(), gathered=())
        self.sections = held_sections(state)
        self._norm = norm(state.slow)
        self._starts = [0, *accumulate(4 * tensor.numel() for tensor in state.slow)]
        directory.mkdir(parents=True, exist_ok=True)
        require_room(directory, len(self.sections) * self._starts[-1], directory)
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (it lives as long as this)
        weakref.finalize(self, self._file.close)
        for section in self.sections:
            for tensor in tensors_of(state, section):
                self._file.writelines(Array("", "F32", tuple(tensor.shape), bytes_of(tensor)).chunks())
        self._file.flush()

    def norm(self) -> float:
        """Return the norm of the slow weights."""
        return self._norm

    def read(self, section: Section, span: Span) -> Tensor:
        """Return a piece; raise `OSError` where it cannot be read."""
        before = self.sections.index(section) * self._starts[-1]
        data = bytearray()
        for part in span.parts:
            at, size = before + self._starts[part.tensor] + part.start, part.stop - part.start
            data += self._bytes(at, size)
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

    def _bytes(self, at: int, size: int) -> bytes:
        found = os.pread(self._file.fileno(), size, at)
        while len(found) < size:
            more = os.pread(self._file.fileno(), size - len(found), at + len(found))
            if not more:
                raise OSError(f"a copy of our state ends {size - len(found)} bytes early")
            found += more
        return found
