"""A node's own checkpoints: when a replica saves itself, and where checkpoints of each stage lie.

New checkpoints would push out those of a stage that the peer left, perhaps its last weights. So a node moves these to
where stage snapshots lie. The peer goes on from there if it comes back, and serves them to a peer that revives the
stage. Writing takes a bounded share of the time, beside the passes (docs/design/node.md).
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from noloco_node.errors import one_line, reason_of
from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import Checkpoint, Counters, files, following, load_latest, load_whole, of_run, save
from noloco_node.tasks import loop_s
from noloco_node.units import format_bytes

KEPT = 2  # files of a stage that is served no more
KEPT_SNAPSHOTS = 2  # of each stage
SNAPSHOT_ROOM = 4  # a snapshot must find so many times its size free: the checkpoints of this node come first
P = ParamSpec("P")
R = TypeVar("R")
SHARE = 0.05  # of the time at most is spent on writing
SAY_EVERY_S = 300.0  # between two lines on checkpoints that were written as usual


def in_thread(work: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return `work` as a coroutine function that runs in a thread."""

    @wraps(work)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(work, *args, **kwargs)

    return run


class CheckpointStore:
    """The checkpoints and snapshots of one node and run; implements `machine.interface.CheckpointArchive`.

    `present`: the directory of the stage that is served. `former`: holds a directory for each other stage, with
    checkpoints of a stage that the peer left, and with snapshots of other peers' weights.
    """

    def __init__(self, present: Path, former: Path, run_id: str, peer: str, complain: Callable[[str], None]) -> None:
        self._present, self._former = present, former
        self._run_id, self._peer, self._complain = run_id, peer, complain

    @in_thread
    def served(self) -> int | None:
        """Return the stage of the last checkpoint; None without one."""
        return next((counters.stage for _, counters in self._of_run(self._present)), None)

    @in_thread
    def load(self, stage: int) -> Checkpoint | None:
        """Return our last whole checkpoint of a stage, or None."""
        for directory in (self._present, self._former / str(stage)):
            for path, counters in of_run(directory, self._run_id, self._complain):
                # Another peer's weights come without momenta.
                if counters.stage == stage and (directory == self._present or counters.peer == self._peer):
                    found = load_whole(path, self._complain)
                    if found is not None:
                        return found
        return None

    @in_thread
    def slow(self, stage: int) -> Checkpoint | None:
        """Return the newest slow weights of a former stage, ours or a snapshot; None if no whole ones are there."""
        return load_latest(self._former / str(stage), self._run_id, self._complain, ("slow",))

    @in_thread
    def stages(self) -> tuple[int, ...]:
        numbers = [int(path.name) for path in self._former.glob("[0-9]*") if path.name.isdecimal()]
        return tuple(sorted(stage for stage in numbers if any(self._of_run(self._former / str(stage)))))

    @in_thread
    def set_aside(self, own: int) -> None:
        """Move checkpoints of other stages than `own` to where its new checkpoints do not push them out."""
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

    @in_thread
    def require_room(self, size_bytes: int) -> None:
        """Raise `OSError` if the disk has no room to spare for a snapshot of so many bytes."""
        atomic_file.make_directory(self._former)
        free, needed = shutil.disk_usage(self._former).free, SNAPSHOT_ROOM * size_bytes
        if free < needed:
            raise OSError(errno.ENOSPC, f"{format_bytes(free)} are free, {format_bytes(needed)} should be")

    async def keep(self, snapshot: Checkpoint) -> None:
        """Write a snapshot and remove all but the last few; raise `OSError` if the disk has no room to spare."""
        await self.require_room(sum(each.nbytes for tensors in snapshot.tensors.values() for each in tensors))
        await asyncio.to_thread(save, self._former / str(snapshot.counters.stage), snapshot, KEPT_SNAPSHOTS)

    def _of_run(self, directory: Path) -> Iterator[tuple[Path, Counters]]:
        return of_run(directory, self._run_id)


class LastCheckpoint(NamedTuple):
    """The last attempt: its stage and round (None before the first), when it ended (loop seconds), its duration."""

    place: tuple[int, int] | None
    ended_s: float
    took_s: float


class DiskTrouble(NamedTuple):
    """Why the disk takes no checkpoint, and for how many seconds it has taken none."""

    why: str
    seconds: float


def checkpoint_due(now_s: float, place: tuple[int, int], last: LastCheckpoint, every_s: float) -> bool:
    """Say whether to save now: a round ended since, or `every_s` went by, and the share of time allows it.

    `place`: our stage, and the round that we finished last.
    """
    since_s, is_news = now_s - last.ended_s, place[1] > 0 and place != last.place
    return since_s >= last.took_s * (1.0 - SHARE) / SHARE and (is_news or since_s >= every_s)


class CheckpointWriter:
    """Writes the checkpoints of one replica; the caller awaits `run` as long as the replica trains."""

    def __init__(
        self,
        save: Callable[[Checkpoint], Awaitable[str]],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        every_s: float,
        note: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        """`note`: is told why the disk refuses when that begins, and when it is over (True)."""
        self._save, self._say, self._warn, self._every_s, self._note = save, say, warn, every_s, note
        self._waiting: Checkpoint | None = None
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._last = LastCheckpoint(None, loop_s(), 0.0)
        self._saved_s = self._said_s = loop_s()
        self._said_once = False
        self._kept: tuple[Counters | None, str] = None, ""  # of the last checkpoint that the disk took, where it lies
        self._trouble: str | None = None

    @property
    def trouble(self) -> DiskTrouble | None:
        """Return why the disk takes no checkpoint; None while it takes them."""
        return None if self._trouble is None else DiskTrouble(self._trouble[:80], loop_s() - self._saved_s)

    def due(self, stage: int, round: int) -> bool:
        """Say whether a checkpoint of a stage is due after so many rounds; never while one is being written."""
        is_free = self._waiting is None and not self._turn.locked()
        return is_free and checkpoint_due(loop_s(), (stage, round), self._last, self._every_s)

    def holds(self, stage: int, round: int) -> bool:
        """Say whether the disk has a checkpoint of a stage with `round` rounds finished; of none it needs none."""
        return self._trouble is None and (not round or self._last.place == (stage, round))

    def begin(self, checkpoint: Checkpoint) -> None:
        self._waiting = checkpoint
        self._wake.set()

    async def run(self) -> None:
        """Write the checkpoints given to `begin`, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            checkpoint, self._waiting = self._waiting, None
            if checkpoint is not None:
                await self._write(checkpoint, last=False)
            del checkpoint  # until the next one its weights would stay, which the replica may have left for a copy

    async def finish(self, checkpoint: Checkpoint) -> bool:
        """Write the last checkpoint, after the one that is being written; say whether the disk took it.

        The replica may not have trained since the one before: a checkpoint with the same counters is not written twice.
        """
        if self._waiting is not None:
            self._waiting.read()
            self._waiting = None
        return await self._write(checkpoint, last=True)

    async def _write(self, checkpoint: Checkpoint, *, last: bool) -> bool:
        async with self._turn:
            began_s, cause = loop_s(), None
            is_there = last and self._trouble is None and self._kept[0] == checkpoint.counters
            try:
                where = self._kept[1] if is_there else await self._save(checkpoint)
                self._kept = checkpoint.counters, where
            except (OSError, MemoryError, RuntimeError) as error:
                # A lost device may fail here first. Its next job reports it, and the node saves what main memory holds.
                cause = one_line(reason_of(error) or type(error).__name__)
            checkpoint.read()  # where this is cancelled, a thread may still read
            self._last = LastCheckpoint(
                (checkpoint.counters.stage, checkpoint.counters.round), loop_s(), loop_s() - began_s
            )
        if cause is not None:
            if last or self._trouble is None:
                self._warn(f"could not save: {cause}; free some space, earlier checkpoints are kept")
            if self._trouble is None:
                self._note(f"could not save: {cause}", False)
            self._trouble = cause
            return False
        again, self._trouble, self._saved_s = self._trouble is not None, None, loop_s()
        if again:
            self._note("checkpoints are saved again", True)
        if last or again or not self._said_once or loop_s() - self._said_s >= SAY_EVERY_S:
            self._said_once, self._said_s = True, loop_s()
            self._say(f"saved {where}" + (", after all" if again else ""))
        return True
