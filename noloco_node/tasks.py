"""Helpers for tasks that run beside each other, and the clock of all waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

AGAIN_S = 5.0  # after so long an observer that failed begins anew


def loop_s() -> float:
    """Return the event loop's time, real or virtual, in seconds; all waits use it."""
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def background(*beside: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these beside the body, end them with the body, and let a failure of theirs end the body."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in beside]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def supervised(what: str, look: Callable[[], Awaitable[None]], complain: Callable[[str], None]) -> None:
    """Run an observer, and run it again if it fails, so that it never ends the work beside it.

    It tells a failure once, until another one comes.
    """
    told = ""
    while True:
        try:
            await look()
            return
        except Exception as error:
            cause: Exception = error
            while isinstance(cause, ExceptionGroup):  # of a TaskGroup, whose own words name no cause
                cause = cause.exceptions[0]
            why = f"{type(cause).__name__}: {cause}"
            if why != told:
                told = why
                complain(f"{what} failed ({why}): beginning anew every {AGAIN_S:g} s, and the work goes on")
        await asyncio.sleep(AGAIN_S)


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
