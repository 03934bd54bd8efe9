"""What takes a while to open, and may be begun before it is asked for: a source's text.

A data set is looked up, a tokenizer loaded; none of it is needed before the first microbatch. A newcomer that copies
the state of its stage has the time: so the text is opened beside the copy and not after it, and what is wrong with it
is said before the copy has been paid for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Closes(Protocol):
    """Something to be closed."""

    def close(self) -> None:
        """Let go of files and connections."""


T = TypeVar("T", bound=Closes)


def nothing_more(_: Closes) -> None:
    """Do no more than open it."""


class BackgroundOpen(Generic[T]):
    """One thing that `make` opens in a thread, once; closing this closes it, asked for or not.

    `ahead`: what else is done there where it is opened before anybody asks for it.
    """

    def __init__(self, make: Callable[[], T], ahead: Callable[[T], None] = nothing_more) -> None:
        self._make, self._ahead = make, ahead
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Begin to open it, if that was not done before."""
        self._begun(self._ahead)

    async def opened(self) -> T:
        """Return it once it is open; raise what opening it raised."""
        # Whoever waits may be cancelled, and the thread works on: it is closed when it is done.
        return await asyncio.shield(self._begun(nothing_more))

    def close(self) -> None:
        """Close it, now or as soon as it is open."""
        if self._task is not None and self._task.done():
            _closed(self._task)
        elif self._task is not None:
            self._task.add_done_callback(_closed)

    def _begun(self, more: Callable[[T], None]) -> asyncio.Task[T]:
        if self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(self._open, more), name="opening")
        return self._task

    def _open(self, more: Callable[[T], None]) -> T:
        opened = self._make()
        try:
            more(opened)
        except BaseException:
            opened.close()
            raise
        return opened


def _closed(task: asyncio.Task[T]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
