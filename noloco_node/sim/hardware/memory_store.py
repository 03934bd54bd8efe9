"""What a simulated peer's disk keeps of stages that it served before: the last checkpoint of each, in memory."""

from __future__ import annotations

from collections.abc import Callable

from noloco_node.storage.checkpoint import Checkpoint


class MemoryStore:
    """Implements `machine.interface.ArchivedStages`. `present`: returns the last checkpoint that the peer has saved."""

    def __init__(self, present: Callable[[], Checkpoint | None]) -> None:
        self._present = present
        self._aside: dict[int, Checkpoint] = {}

    async def served(self) -> int | None:
        """Return the stage of the last checkpoint; None without one."""
        present = self._present()
        return None if present is None else present.counters.stage

    async def load(self, stage: int) -> Checkpoint | None:
        """Return a copy of the last checkpoint of a stage, or None: a replica writes into what it goes on from."""
        present = self._present()
        found = present if present is not None and present.counters.stage == stage else self._aside.get(stage)
        if found is None:
            return None
        groups = found.tensors.items()
        return Checkpoint(found.counters, {group: tuple([each.clone() for each in kept]) for group, kept in groups})

    async def set_aside(self, own: int) -> None:
        """Keep the last checkpoint if it is of another stage than `own`."""
        present = self._present()
        if present is not None and present.counters.stage != own:
            self._aside[present.counters.stage] = present

    async def stages(self) -> tuple[int, ...]:
        """Return the stages of which something lies aside."""
        return tuple(sorted(self._aside))

    async def slow(self, stage: int) -> Checkpoint | None:
        """Return the slow weights of a stage that lie aside, or None."""
        kept = self._aside.get(stage)
        return None if kept is None else Checkpoint(kept.counters, {"slow": kept.tensors["slow"]})
