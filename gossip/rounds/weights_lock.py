"""Locks on a replica's weights: any number of readers use them without a copy, or one step moves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class ReadWriteLock:
    """Lets any number of readers use weights without a copy, or one step move them.

    All have their turn in the order in which they came, so readers cannot keep a step waiting for ever.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._readers = 0
        self._unread = asyncio.Event()
        self._unread.set()

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Wait until nobody reads, and keep readers out."""
        async with self._turn:
            await self._unread.wait()
            yield

    async def read(self) -> Callable[[], None]:
        """Keep the weights as they are until the returned function is called; a second call does nothing."""
        async with self._turn:
            self._readers += 1
            self._unread.clear()
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._readers -= 1
                if not self._readers:
                    self._unread.set()

        return release


class WeightsLock:
    """The locks of a replica's weights. `fast`: with the inner optimiser; inner steps and corrections move them.
    `slow`: with the outer momentum; outer steps move them, which inner steps do not wait for.

    Checkpoints and copies for newcomers read both from the replica's own memory; passes go on meanwhile, steps wait.
    """

    def __init__(self) -> None:
        self.fast, self.slow = ReadWriteLock(), ReadWriteLock()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        release = await self.read()
        try:
            yield
        finally:
            release()

    async def read(self) -> Callable[[], None]:
        """Keep all weights as they are until the returned function is called; a second call does nothing."""
        # The slow ones first: whoever waits for an outer step must not keep the inner steps waiting.
        release_slow = await self.slow.read()
        try:
            release_fast = await self.fast.read()
        except BaseException:
            release_slow()
            raise

        def release() -> None:
            release_fast()
            release_slow()

        return release


async def to_the_end(work: Awaitable[None]) -> None:
    """Await `work` to its end even when cancelled: no weights are left half moved."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as late:
            cancelled = late
    task.result()
    if cancelled is not None:
        raise cancelled
