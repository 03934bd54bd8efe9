"""events.jsonl: every journal event of every peer and every fault of a simulation, one JSON object a line.

A line is a journal's (`noloco_node.journal.events`), with `at` in virtual seconds and the peer under `node`. Written
aside and renamed at the end, so that a simulation that was interrupted leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.report.text import fault_words
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.world import Watcher, World
from noloco_node.storage import atomic_file


@contextmanager
def trace_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which is at `path` once the block has ended well; raise `UserError` where it cannot be."""
    try:
        with atomic_file.replacing(path) as aside:
            with aside.open("wb") as file:
                yield file
            atomic_file.flush(aside)
    except OSError as error:
        raise UserError(
            f"cannot write {path}",
            why=error.strerror or str(error),
            hint="free some space, or give another directory with --out",
            code=Exit.STORAGE,
        ) from error


class EventTrace(Watcher):
    """Writes what happens in a world."""

    def __init__(self, world: World, file: BinaryIO) -> None:
        self._world, self._file, self._encoder = world, file, msgspec.json.Encoder()

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        """Write an event."""
        self._write({"node": peer.name, **events.fields_of(event)})

    def struck(self, fault: Fault) -> None:
        """Write a fault."""
        self._write({"event": "fault", "text": fault_words(fault), **msgspec.to_builtins(fault)})

    def _write(self, fields: dict[str, Any]) -> None:
        self._file.write(self._encoder.encode({**fields, "at": self._world.now_s}) + b"\n")
