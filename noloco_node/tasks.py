"""Tasks: two at once, of which one ends the other, and the clock by which they wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def loop_s() -> float:
    """Return the time by which everything here waits: the event loop's, real or virtual, in seconds."""
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def background(background: Awaitable[None]) -> AsyncIterator[None]:
    """Run something beside the body, end it with the body, and let its failure end the body."""

    async def beside() -> None:
        await background

    async with asyncio.TaskGroup() as group:
        task = group.create_task(beside())
        try:
            yield
        finally:
            task.cancel()


async def until_event(leave: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns, or None once `leave` is set before it is done."""
    asked, task = asyncio.create_task(leave.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait({asked, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (asked, task):
            each.cancel()
        await asyncio.wait({asked, task})
