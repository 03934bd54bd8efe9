"""A node's own checkpoints: the last few of the stage that it serves, and the last of those that it served before.

A peer moves to another stage, or is started again and takes another one. Its new checkpoints would push out those of
the stage that it left, and with them perhaps the last weights of that stage. So they are set aside: renamed, not
copied, to where snapshots of other stages lie. From there the peer itself goes on if it comes back, momenta and all;
`noloco_node.state_sync.snapshot_server` gives the slow weights to whoever revives the stage; and an export from homes
finds them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import Checkpoint, Counters, files, following, load_whole, of_run

KEPT = 2
"""Files of a stage that is served no more."""


class CheckpointStore:
    """The checkpoints of one node and run; implements `machine.interface.ArchivedStages`.

    `present`: where those of the stage that is served are written. `former`: below it a directory for each other stage.
    """

    def __init__(self, present: Path, former: Path, run_id: str, peer: str, complain: Callable[[str], None]) -> None:
        self._present, self._former = present, former
        self._run_id, self._peer, self._complain = run_id, peer, complain

    async def served(self) -> int | None:
        """Return the stage of the last checkpoint; None without one."""
        return await asyncio.to_thread(self._served)

    async def load(self, stage: int) -> Checkpoint | None:
        """Return our last whole checkpoint of a stage, or None."""
        return await asyncio.to_thread(self._load, stage)

    async def set_aside(self, own: int) -> None:
        """Keep what is there of other stages than `own` from being pushed out by its checkpoints."""
        await asyncio.to_thread(self._set_aside, own)

    async def stages(self) -> tuple[int, ...]:
        """Return the stages of which something lies aside."""
        return await asyncio.to_thread(self._stages)

    async def slow(self, stage: int) -> Checkpoint | None:
        """Return the slow weights of a stage that lie aside, ours or a snapshot; None where no whole ones do."""
        return await asyncio.to_thread(self._slow, stage)

    def _served(self) -> int | None:
        return next((counters.stage for _, counters in self._of_run(self._present)), None)

    def _load(self, stage: int) -> Checkpoint | None:
        for directory in (self._present, self._former / str(stage)):
            for path, counters in self._of_run(directory):
                # Of another's weights there are no momenta.
                if counters.stage == stage and (directory == self._present or counters.peer == self._peer):
                    found = load_whole(path, self._complain)
                    if found is not None:
                        return found
        return None

    def _slow(self, stage: int) -> Checkpoint | None:
        paths = [path for path, counters in self._of_run(self._former / str(stage)) if counters.stage == stage]
        return next((found for path in paths if (found := load_whole(path, self._complain, "slow")) is not None), None)

    def _stages(self) -> tuple[int, ...]:
        numbers = [int(path.name) for path in self._former.glob("[0-9]*") if path.name.isdecimal()]
        return tuple(sorted(stage for stage in numbers if any(self._of_run(self._former / str(stage)))))

    def _set_aside(self, own: int) -> None:
        try:
            left = [(path, each.stage) for path, each in self._of_run(self._present) if each.stage != own]
            for path, stage in reversed(left):
                directory = self._former / str(stage)
                atomic_file.make_directory(directory)
                there = files(directory)
                os.replace(path, following(directory, path.name.split("-")[-1]))
                for changed in (directory, self._present):
                    atomic_file.flush(changed)
                for old in there[: 1 - KEPT]:
                    old.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            self._complain(f"checkpoints of a stage that we left could not be set aside: {error}")

    def _of_run(self, directory: Path) -> Iterator[tuple[Path, Counters]]:
        return of_run(directory, self._run_id)
