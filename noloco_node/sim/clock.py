"""A virtual event loop: time jumps to the next timer, and a hang is an exception.

The loop is asyncio's own, over a selector that never waits: where a real one would sleep until the next timer, this
one moves the clock there. When nothing is ready and no timer is set, no event can ever come: `Deadlock` names the
tasks that wait. Nothing that runs here may touch sockets or threads."""

from __future__ import annotations

import asyncio
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
            waiting = sorted(f"{task.get_name()}: {_where(task)}" for task in asyncio.all_tasks(self.loop))
            raise Deadlock("no timer is set and these tasks wait:\n  " + "\n  ".join(waiting))
        self.now_s += max(0.0, timeout)
        return []

    loop: asyncio.AbstractEventLoop | None = None


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return "no frame"
    return f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno} in {frames[-1].f_code.co_name}"


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose `time()` starts at 0 and moves only when every task waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.loop = self
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time; raise `Deadlock` if it can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
