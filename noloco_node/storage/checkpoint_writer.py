"""When a replica saves itself, and what becomes of a disk that refuses.

Every finished round is saved, and without rounds every few minutes; but writing takes a bounded share of the time, so
that a large replica on a slow disk saves less often instead of doing nothing else. A checkpoint is begun between two
inner steps, where weights, momentum and optimiser belong together, and is written from the replica's own memory, beside
the passes of the next window; whatever would move them waits until all is read (`gossip.rounds.outer_optimiser`).

A disk that refuses is said once, with the cause; it is a state (`CheckpointWriter.trouble`) that the roster shows, and
it is over with the first checkpoint that is written again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from noloco_node.errors import reason_of
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.tasks import loop_s

SHARE = 0.05
"""Of the time, at most, is spent on writing."""
SAY_EVERY_S = 300.0
"""A checkpoint that was written like the one before it is worth a line this often."""


class LastCheckpoint(NamedTuple):
    """The last attempt: the round that it held, when it ended (loop seconds), and how long it took."""

    round: int
    ended_s: float
    took_s: float


class DiskTrouble(NamedTuple):
    """Why the disk takes none of our checkpoints, and for how many seconds it has taken none."""

    why: str
    seconds: float


def checkpoint_due(now_s: float, round: int, last: LastCheckpoint, every_s: float) -> bool:
    """Say whether to save now: a round has been finished since, or `every_s` went by, and the share allows it."""
    since_s = now_s - last.ended_s
    return since_s >= last.took_s * (1.0 - SHARE) / SHARE and (round != last.round or since_s >= every_s)


class CheckpointWriter:
    """Writes the checkpoints of one replica; `run` is to be awaited as long as it trains."""

    def __init__(
        self,
        save: Callable[[Checkpoint], Awaitable[str]],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        every_s: float,
        note: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        """`note`: told why the disk refuses when that begins, and when it is over (True)."""
        self._save, self._say, self._warn, self._every_s, self._note = save, say, warn, every_s, note
        self._waiting: Checkpoint | None = None
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._last = LastCheckpoint(0, loop_s(), 0.0)
        self._saved_s = self._said_s = loop_s()
        self._said_once = False
        self._trouble: str | None = None

    @property
    def trouble(self) -> DiskTrouble | None:
        """What keeps the disk from taking our checkpoints; None while it takes them."""
        return None if self._trouble is None else DiskTrouble(self._trouble[:80], loop_s() - self._saved_s)

    def due(self, round: int) -> bool:
        """Say whether a checkpoint is due, `round` rounds being finished; never while one is being written."""
        return (
            self._waiting is None
            and not self._turn.locked()
            and checkpoint_due(loop_s(), round, self._last, self._every_s)
        )

    def holds(self, round: int) -> bool:
        """Say whether the disk has a checkpoint with `round` rounds finished."""
        return self._trouble is None and self._last.round == round

    def begin(self, checkpoint: Checkpoint) -> None:
        """Have `run` write a checkpoint."""
        self._waiting = checkpoint
        self._wake.set()

    async def run(self) -> None:
        """Write what `begin` is given, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            checkpoint, self._waiting = self._waiting, None
            if checkpoint is not None:
                await self._write(checkpoint, last=False)

    async def finish(self, checkpoint: Checkpoint) -> bool:
        """Write the last checkpoint, after the one that is being written; say whether the disk took it."""
        if self._waiting is not None:
            self._waiting.read()
            self._waiting = None
        return await self._write(checkpoint, last=True)

    async def _write(self, checkpoint: Checkpoint, *, last: bool) -> bool:
        async with self._turn:
            began_s, cause = loop_s(), None
            try:
                where = await self._save(checkpoint)
            except OSError as error:
                cause = " ".join(reason_of(error).split())
            checkpoint.read()  # where this is cancelled, a thread may still read
            self._last = LastCheckpoint(checkpoint.counters.round, loop_s(), loop_s() - began_s)
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
