"""The device: one thread in which all of a node's tensor work runs, one job after the other.

One thread is what makes "weights never change under a running backward" a fact and not a hope: forward, backward, inner
step and outer step are jobs, and jobs do not overlap. A job that has begun is always awaited to its end, also by a
coroutine that is cancelled meanwhile; a job that has not begun is taken back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from noloco_node.errors import Exit, Trouble

T = TypeVar("T")


def choose_device(wish: str) -> torch.device:
    """Return the torch device for `auto`, `cpu`, `cuda` or `cuda:N`; raise `Trouble` if it is not there."""
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wish)
    except RuntimeError as error:
        raise Trouble(
            f"There is no device called {wish!r}.",
            why=str(error),
            attempt="--device auto, cpu or cuda",
            code=Exit.DEVICE,
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Trouble(
            f"The device {wish!r} is not there.",
            why=f"torch sees {torch.cuda.device_count()} CUDA devices",
            attempt="--device auto, or a torch build for your GPU",
            code=Exit.DEVICE,
        )
    if device.type not in ("cpu", "cuda"):
        raise Trouble(
            f"The device {wish!r} cannot train here.",
            why="only cpu and cuda are supported",
            attempt="--device cpu",
            code=Exit.DEVICE,
        )
    return device


def autocast_dtype(device: torch.device, precision: str) -> torch.dtype | None:
    """Return bfloat16 where `precision` is auto and the GPU computes in it natively, else None (float32)."""
    if precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return None


class Device:
    """One thread for tensor work; counts the seconds it is busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.busy_s = 0.0
        self.jobs = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"device-{device}")

    def clock(self) -> float:
        """Return the time by which jobs measure themselves, in seconds."""
        return time.perf_counter()

    async def run(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)` in the device's thread; when cancelled, first await the end of a job that has begun."""
        submitted = self._thread.submit(self._timed, job, args)
        result = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if not submitted.cancel():
                await _to_the_end(result)
            raise

    def _timed(self, job: Callable[..., T], args: tuple[object, ...]) -> T:
        begun = self.clock()
        try:
            return job(*args)
        finally:
            self.busy_s += self.clock() - begun
            self.jobs += 1

    def close(self) -> None:
        """Wait for the job in hand and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def statistics(self) -> dict[str, int | float]:
        """Return the seconds of work and the number of jobs so far."""
        return {"busy_s": self.busy_s, "jobs": self.jobs}

    def __repr__(self) -> str:
        return f"Device({self.device}, {self.jobs} jobs, busy {self.busy_s:.1f} s)"


async def _to_the_end(result: asyncio.Future[T]) -> None:
    """Await `result` whatever comes, and take note of its exception so that nobody warns of it."""
    while not result.done():
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            continue
    if not result.cancelled():
        result.exception()
