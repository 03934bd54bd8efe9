"""Reading a replica's weights where they lie, without a copy: whoever moves them waits meanwhile.

A checkpoint and a copy for newcomers are as large as the replica, and are written from its own memory. Passes go on
beside them, for these leave weights, moments and momenta as they are; inner and outer steps wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class WeightsLock:
    """Any number may read at once; whoever moves weights is alone.

    All have their turn in the order in which they came, so readers one after the other do not keep a step waiting.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._readers = 0
        self._unread = asyncio.Event()
        self._unread.set()

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Wait until nobody reads, and keep others from it."""
        async with self._turn:
            await self._unread.wait()
            yield

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Keep the weights as they are."""
        release = await self.read()
        try:
            yield
        finally:
            release()

    async def read(self) -> Callable[[], None]:
        """Keep the weights as they are until what is returned has been called; to call it again does nothing."""
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
