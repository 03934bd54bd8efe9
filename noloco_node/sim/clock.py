"""A virtual event loop: time jumps to the next timer, and a hang is an exception.

The loop is asyncio's own, over a selector that never waits: where a real one would sleep until the next timer, this
one moves the clock there. When nothing is ready and no timer is set, no event can ever come: `Deadlock` names the
tasks that wait, and where. Nothing that runs here may touch sockets or threads.

A run is the same to the bit every time, in any process. asyncio keeps tasks in sets (a task group cancels its tasks in
the set's order), and a set's order follows the hashes of its members, by default their addresses; so tasks here are
numbered, and hash to their number.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is set."""


class _JumpingSelector(selectors.BaseSelector):
    """Registers what asyncio asks it to, reports nothing, and moves the clock instead of waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[number] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            waiting = sorted(f"{task.get_name()}: {waits_at(task)}" for task in asyncio.all_tasks(self.loop))
            raise Deadlock("no timer is set and these tasks wait:\n  " + "\n  ".join(waiting))
        self.now_s += max(0.0, timeout)
        return []

    loop: asyncio.AbstractEventLoop | None = None


def waits_at(task: asyncio.Task[Any]) -> str:
    """Return the file, line and function that a task waits in, the innermost that has a Python frame."""
    place = "not started"
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    return place


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every process."""

    _numbers = itertools.count()

    def __new__(cls, *_args: Any, **_options: Any) -> _NumberedTask:  # the hash is needed before __init__ ends
        task: _NumberedTask = super().__new__(cls)
        task.number = next(cls._numbers)
        return task

    number: int

    def __hash__(self) -> int:
        return self.number


def _numbered(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T], context: Any = None) -> asyncio.Task[T]:
    return _NumberedTask(coro, loop=loop, context=context)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose `time()` starts at 0 and moves only when every task waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.loop = self
        self._clock_resolution = 1e-9
        self.set_task_factory(_numbered)  # type: ignore[arg-type] # typeshed knows no context there

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time; raise `Deadlock` if it can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
