"""A device in virtual time: one job after the other, each at a price in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class VirtualDevice:
    """Runs jobs in the event loop itself; `seconds` says what a job costs. A job that has begun is always finished."""

    def __init__(self, seconds: Callable[[Callable[..., object]], float]) -> None:
        self.busy_s = 0.0
        self.jobs = 0
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._begun_s = self._ended_s = 0.0

    def clock(self) -> float:
        """Return the virtual time as the job in hand sees it: at its beginning when asked first, then at its end."""
        self._begun_s, now_s = self._ended_s, self._begun_s
        return now_s

    async def run(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)` in its turn."""
        async with self._turn:
            begun = asyncio.create_task(self._work(job, args))
            try:
                return await asyncio.shield(begun)
            except asyncio.CancelledError:
                while not begun.done():
                    try:
                        await asyncio.wait([begun])
                    except asyncio.CancelledError:
                        continue
                raise

    async def _work(self, job: Callable[..., T], args: tuple[object, ...]) -> T:
        cost_s = self._seconds(job)
        self._begun_s = asyncio.get_running_loop().time()
        await asyncio.sleep(cost_s)
        self._ended_s = asyncio.get_running_loop().time()
        self.busy_s += cost_s
        self.jobs += 1
        return job(*args)

    def statistics(self) -> dict[str, int | float]:
        """Return the virtual seconds of work and the number of jobs so far."""
        return {"busy_s": self.busy_s, "jobs": self.jobs}

    def __repr__(self) -> str:
        return f"VirtualDevice({self.jobs} jobs, busy {self.busy_s:.1f} s)"
