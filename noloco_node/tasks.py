"""Helpers for tasks that run beside each other, and the clock of all waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

GIVEN_UP: ContextVar[threading.Event | None] = ContextVar("GIVEN_UP", default=None)
"""Set once nobody waits any more for what `in_thread` does."""
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


async def in_thread(work: Callable[[], T]) -> T:
    """Do the work in a thread and return its result.

    A cancellation ends the work at its next `check_wanted`, and waits for that. After the last `check_wanted` it comes
    too late: the work is finished and its result returned, so nobody takes what was written for unwritten.
    """
    given_up = threading.Event()
    before = GIVEN_UP.set(given_up)
    try:
        task = asyncio.create_task(asyncio.to_thread(work))
    finally:
        GIVEN_UP.reset(before)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        given_up.set()
        await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            raise
        return task.result()


def check_wanted() -> None:
    """Raise `CancelledError` in a thread whose work has been given up."""
    given_up = GIVEN_UP.get()
    if given_up is not None and given_up.is_set():
        raise asyncio.CancelledError
