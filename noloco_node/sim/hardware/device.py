"""A device in virtual time: one job after the other, each at the price that it names while it runs.

A job is computed at once, in the event loop; its result is handed over when its price has passed. What a job costs is
said from within, by `charge`: `stage.PricedStage` does so for a forward and a backward pass, a step and a copy of the
weights. Seconds are those of a device of speed 1; `slowness` makes it a slower one, and one that stutters stops every
now and then for a moment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Stutter(NamedTuple):
    """Of all jobs the share `share` take `pause_s` longer."""

    share: float = 0.0
    pause_s: float = 0.0


class _Job:
    """`waiter` is replaced when its task is cancelled while the job is under way."""

    __slots__ = ("args", "begun", "ended", "function", "waiter")

    def __init__(self, function: Callable[..., Any], args: tuple[object, ...], waiter: asyncio.Future[Any]) -> None:
        self.function, self.args, self.waiter = function, args, waiter
        self.begun = self.ended = False


class VirtualDevice:
    """Runs jobs in their turn. A job that has begun is always finished, also when its caller is cancelled."""

    def __init__(self, job_s: float = 0.0, *, seed: str = "") -> None:
        """`job_s`: what every job costs, whatever it says itself."""
        self.busy_s = 0.0
        self.jobs = 0
        self.slowness, self.stutter = 1.0, Stutter()
        self._job_s, self._rng = job_s, Random(f"{seed}|stutter")
        self._queue: deque[_Job] = deque()
        self._busy = False
        self._charged_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._busy

    def charge(self, seconds: float) -> None:
        """Say from within a job what it costs."""
        self._charged_s += seconds * self.slowness

    def clock(self) -> float:
        """Return the virtual time as the job in hand sees it."""
        return asyncio.get_running_loop().time() + self._charged_s

    async def run(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)` in its turn."""
        loop = asyncio.get_running_loop()
        entry = _Job(job, args, loop.create_future())
        self._queue.append(entry)
        if not self._busy:
            self._begin()
        try:
            result: T = await entry.waiter
        except asyncio.CancelledError:
            if not entry.begun:
                self._queue.remove(entry)
                raise
            await self._see_through(entry)
            raise
        return result

    async def beside(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)` beside what the device does; it costs what every job costs."""
        result = job(*args)
        await asyncio.sleep(self._job_s * self.slowness)
        return result

    async def _see_through(self, entry: _Job) -> None:
        """Wait for a job whose caller was cancelled."""
        while not entry.ended:
            entry.waiter = asyncio.get_running_loop().create_future()
            try:
                await entry.waiter
            except asyncio.CancelledError:
                continue
            except Exception:  # the caller is gone: what the job raised is nobody's any more
                return

    def _begin(self) -> None:
        entry = self._queue.popleft()
        self._busy = entry.begun = True
        self._charged_s = self._job_s * self.slowness
        failure, result = None, None
        try:
            result = entry.function(*entry.args)
        except Exception as error:  # handed to whoever waits for the job
            failure = error
        cost_s, self._charged_s = self._charged_s, 0.0
        if self.stutter.share and self._rng.random() < self.stutter.share:
            cost_s += self.stutter.pause_s
        self.busy_s += cost_s
        self.jobs += 1
        asyncio.get_running_loop().call_later(cost_s, self._end, entry, result, failure)

    def _end(self, entry: _Job, result: Any, failure: Exception | None) -> None:
        entry.ended, self._busy = True, False
        if entry.waiter.cancelled():
            # Its task wakes up to a cancellation that came in this very moment: the job is done all the same.
            pass
        elif failure is None:
            entry.waiter.set_result(result)
        else:
            entry.waiter.set_exception(failure)
        if self._queue:
            self._begin()
