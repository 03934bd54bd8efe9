"""Snapshots of other stages, in a directory."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path

from noloco_node.storage.atomic_file import make_directory
from noloco_node.storage.checkpoint import Checkpoint, load_latest, save
from noloco_node.units import format_bytes

KEPT = 2
"""Snapshots of a stage on the disk."""
ROOM = 4
"""Times its own size that a snapshot must find free: the checkpoints of this node come first."""


class SnapshotDirectory:
    """Snapshots in a directory, one below it for each stage; implements `machine.interface.SnapshotStore`."""

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory, self._run_id = directory, run_id

    async def keep(self, checkpoint: Checkpoint) -> None:
        """Write a snapshot and drop all but the last few; raise `OSError` where the disk has not room to spare."""
        await asyncio.to_thread(self._keep, checkpoint)

    def _keep(self, checkpoint: Checkpoint) -> None:
        directory = self._directory / str(checkpoint.counters.stage)
        make_directory(directory)
        needed = ROOM * sum(tensor.nbytes for tensors in checkpoint.tensors.values() for tensor in tensors)
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{format_bytes(free)} are free, {format_bytes(needed)} should be")
        save(directory, checkpoint, KEPT)

    async def newest(self, stage: int) -> Checkpoint | None:
        """Return the slow weights of the last whole snapshot of a stage, or None."""
        # A checkpoint of ours may lie there from a stage that we served, with momenta that nobody asks a snapshot for.
        return await asyncio.to_thread(load_latest, self._directory / str(stage), self._run_id, wanted=("slow",))
