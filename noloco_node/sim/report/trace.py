"""events.jsonl: every journal event of every peer and every fault of a simulation, one JSON object a line.

A line is a journal's (`noloco_node.journal.events`), with `at` in virtual seconds and the peer under `node`. Written
aside and renamed at the end, so that a simulation that was interrupted leaves nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.world import World


class EventTrace:
    """Watches a world (`world.Watcher`) and writes what it hears; a context, which the file does not outlive half."""

    def __init__(self, path: Path) -> None:
        self._path, self._aside = path, path.with_name(f".{path.name}.part")
        self._encoder = msgspec.json.Encoder()
        self._world: World | None = None
        try:
            self._file = self._aside.open("wb")
        except OSError as error:
            raise _refused(path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
            if kind is None:
                os.replace(self._aside, self._path)
        except OSError as refusal:
            raise _refused(self._path, refusal) from refusal
        finally:
            self._aside.unlink(missing_ok=True)

    def watch(self, world: World) -> Self:
        """Write what happens in this world."""
        self._world = world
        return self

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        """Write an event."""
        self._write({"node": peer.name, **events.fields_of(event)})

    def struck(self, fault: Fault) -> None:
        """Write a fault."""
        self._write({"event": "fault", **msgspec.to_builtins(fault)})

    def look(self) -> None:
        """Nothing is written for a look."""

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._world is not None, "watch() comes first"
        try:
            self._file.write(self._encoder.encode({**fields, "at": self._world.now_s}) + b"\n")
        except OSError as error:
            raise _refused(self._path, error) from error


def _refused(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path}",
        why=error.strerror or str(error),
        hint="free some space, or give another directory with --out",
        code=Exit.STORAGE,
    )
