"""A virtual event loop: time jumps to the next timer, and a hang is an exception.

When nothing is ready and no timer is set, `Deadlock` names the tasks that wait, and where. Nothing that runs here may
touch sockets or threads. A run is the same to the bit in any process: asyncio keeps tasks in sets, whose order follows
the hashes of their members, so tasks here are numbered and hash to their number.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

MANY_TIMERS = 200
SELDOM = (1_000_000, 50, 100)
"""Thresholds of the garbage collector's generations: a thousand peers cost it a third of the time by default. A peer's
whole session is some 1,500 objects, and hardly anything else is ever garbage, while each look goes through all that
was made since the last one."""


class Deadlock(RuntimeError):
    """Every task waits and no timer is set."""


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


def waiting(tasks: Iterable[asyncio.Task[Any] | None]) -> list[str]:
    return sorted(f"{task.get_name()}: {waits_at(task)}" for task in tasks if task is not None)


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


def _numbered(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
    return _NumberedTask(coro, loop=loop, **options)  # which options there are depends on Python's version


class _Entry:
    """A callback that is due, or will be: all that tasks and timeouts ask of asyncio's `Handle` and `TimerHandle`."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "loop", "when_s")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, when_s: float
    ) -> None:
        self.callback, self.args, self.when_s = callback, args, when_s
        self.context = copy_context() if context is None else context
        self.is_cancelled = False
        self.loop: VirtualLoop | None = None
        """The loop in whose heap of timers it is."""

    def cancel(self) -> None:
        """Forget the callback, and what it holds, at once; its place in the loop's queue stays for a while."""
        self.is_cancelled, self.callback, self.args = True, _nothing, ()
        if self.loop is not None:
            self.loop._idle_timers += 1
            self.loop = None

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_s


def _nothing() -> None:
    """Take the place of a callback that was cancelled."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio loop whose `time()` starts at 0 and moves only when every task waits.

    Nothing is polled, timers are compared as tuples, and two of the same moment come in the order in which they were
    set. `_run_once`, `_ready`, `_stopping` and `_write_to_self` are private names of `BaseEventLoop`, which other loops
    build on too.
    """

    _ready: deque[_Entry]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers: list[tuple[float, int, _Entry]] = []
        self._idle_timers = 0
        """Timers that were cancelled and still lie in the heap."""
        self._numbers = itertools.count()
        self.set_task_factory(_numbered)  # type: ignore[arg-type] # typeshed knows no context there

    @property
    def timer_count(self) -> int:
        return len(self._timers)

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Let the clock alone move on, as on a machine that was asleep."""
        self._now_s += seconds

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        entry = _Entry(callback, args, context, self._now_s)
        self._ready.append(entry)
        return entry

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        entry = _Entry(callback, args, context, when)
        entry.loop = self
        heapq.heappush(self._timers, (when, next(self._numbers), entry))
        return entry

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Run what is ready now; where nothing is, go to the next moment for which something is set."""
        ready, timers = self._ready, self._timers
        if 2 * self._idle_timers > len(timers) + MANY_TIMERS:
            # Deadlines lie far ahead and are rarely met: without this they would fill the memory.
            timers[:] = [timer for timer in timers if not timer[2].is_cancelled]
            heapq.heapify(timers)
            self._idle_timers = 0
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
            self._idle_timers -= 1
        if not ready and not self._stopping:
            if not timers or timers[0][0] == math.inf:
                places = "\n  ".join(waiting(asyncio.all_tasks(self)))
                raise Deadlock(f"no timer is set and these tasks wait:\n  {places}")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            entry = heapq.heappop(timers)[2]
            self._idle_timers -= entry.is_cancelled
            entry.loop = None
            ready.append(entry)
        # What these make ready has its turn after them, as in asyncio's own loop.
        for _ in range(len(ready)):
            entry = ready.popleft()
            try:
                entry.context.run(entry.callback, *entry.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # as asyncio does with what a callback raises
                self.call_exception_handler({"message": f"exception in {entry.callback}", "exception": error})

    def _write_to_self(self) -> None:
        """Wake the loop up from its sleep, which it never takes: part of `call_soon_threadsafe`."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time; raise `Deadlock` if it can never end.

    Cyclic garbage is rare in a simulation and its objects are many, so that they are looked through less often.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*thresholds)
