"""A coroutine of the engine in an event loop and a thread of its own, for programs that know nothing of asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from noloco_node.errors import UserError, usage_error, user_error_of
from noloco_node.terminal import hand_to

T = TypeVar("T")
_SWITCHES = {"begin_anew", "relayed"}  # options of a peer that take no value on a command line


class LoopThread(Generic[T]):
    """Runs one coroutine to its end. `ended` is called in the thread once it is over."""

    def __init__(
        self, main: Callable[[], Coroutine[Any, Any, T]], name: str, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._main, self._ended = main, ended
        self._over = threading.Event()
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled, self._process = False, os.getpid()
        # A daemon: a program that ends otherwise would wait for it before anything has asked it to leave.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def is_ours(self) -> bool:
        """Whether this process began the thread: a fork has a copy of everything but the thread."""
        return self._process == os.getpid()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most for so long; return whether it is over."""
        self.check_process()
        return self._over.wait(timeout_s)

    def result(self) -> T:
        """Wait for the end; return what the coroutine returned, or raise what ended it, a `UserError` if that is it."""
        self.wait()
        if self._error is not None:
            trouble = user_error_of(self._error)
            raise (trouble and in_python(trouble)) or self._error
        return self._values[0]

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function in the loop, soon; not at all once the loop is over."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function, *args)

    def cancel(self) -> None:
        """Cancel the coroutine, which then cleans up."""
        self._cancelled = True
        if self._task is not None:
            self.call(self._task.cancel)

    def check_process(self) -> None:
        """Raise `UserError` in a process that was forked from ours."""
        if not self.is_ours:
            raise usage_error(
                "This process was forked from the one that takes part in the run.",
                why="a fork has a copy of the weights, and no copy of the threads that talk to the swarm",
                hint="use the optimiser in the process that made it; begin other processes before, or with the start"
                " method spawn",
            )

    def _run(self) -> None:
        hand_to(logging.getLogger("noloco_node"))
        try:
            self._values.append(asyncio.run(self._whole()))
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()
            self._ended()

    async def _whole(self) -> T:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if self._cancelled:
            raise asyncio.CancelledError
        return await self._main()


def in_python(error: UserError) -> UserError:
    """Return an error whose hint names arguments of Python, and no options of a command."""
    hint = re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda found: _argument(found[1].replace("-", "_")), error.hint)
    return UserError(error.what, why=error.why, hint=hint, code=error.code) if hint != error.hint else error


def _argument(name: str) -> str:
    return f"{name}=True" if name in _SWITCHES else f"{name}="


def finished(main: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
    """Run a coroutine to its end; an interrupt cancels it first."""
    thread = LoopThread(main, name)
    try:
        return thread.result()
    except BaseException:
        thread.cancel()
        thread.wait()
        raise
