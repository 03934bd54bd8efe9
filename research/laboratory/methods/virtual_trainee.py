"""What ties a trainee of a benchmark to the production's rounds: a device that does one thing at a time.

The rounds want arithmetic done where heavy arithmetic belongs, and for their blocking form a time in which no inner
step is at work. In a benchmark that is one lock, which inner steps take too.

What rounds compute may take time: in the device's turn, so that inner steps wait for it and it for them; or beside the
inner steps, on the same core, so that both are half as fast meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Device:
    """One trainee's device.

    `compute_s`: what a thing that its rounds compute takes, alone on its core; no time by default. `beside`: computed
    beside the inner steps.
    """

    def __init__(self, compute_s: float = 0.0, *, beside: bool = False) -> None:
        self.at_work = asyncio.Lock()
        self._compute_s, self._beside = compute_s, beside
        self._thread = asyncio.Lock()
        self._owed_s = 0.0
        self._computed = 0

    def __repr__(self) -> str:
        return f"<Device: {self._computed} things computed for rounds>"

    def statistics(self) -> dict[str, int | float]:
        """Return how many things rounds had computed here, and the virtual seconds that they took."""
        return {"computed": self._computed, "compute_s": self._computed * self._compute_s}

    async def compute(self, function: Callable[..., T], /, *args: object) -> T:
        """Return what `function(*args)` returns, after the time that it takes."""
        self._computed += 1
        if self._compute_s and self._beside:
            async with self._thread:
                await asyncio.sleep(2 * self._compute_s)
            self._owed_s += self._compute_s
        elif self._compute_s:
            async with self.at_work:
                await asyncio.sleep(self._compute_s)
        return function(*args)

    async def settle(self) -> None:
        """Let the time pass that inner steps have lost to what was computed beside them."""
        owed_s, self._owed_s = self._owed_s, 0.0
        if owed_s:
            await asyncio.sleep(owed_s)

    @asynccontextmanager
    async def alone(self, retry_after_s: float) -> AsyncIterator[None]:
        """Wait for the end of the inner step in hand and begin no other."""
        async with self.at_work:
            yield
