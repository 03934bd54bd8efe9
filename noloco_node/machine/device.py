"""The device: one thread runs all of a node's tensor work, one job after the other; and a meter of its energy.

Forward, backward, inner step and outer step are jobs of one thread, so weights never change under a running backward
pass. A caller waits for the end of a job that has begun, even if the caller is cancelled; a job that has not begun is
taken back.

Two clocks measure a job. Replicas measure the cost of a microbatch by the wall clock, with the time that other
processes take: routes and rounds follow that cost. `busy_s` counts the device's own work alone; on a CPU that is the
time for which the thread had a core. Otherwise a crowded machine would look busier the longer its replicas wait.

The arithmetic of the outer step works on copies in main memory. It runs in a second thread, also on a CPU: behind the
passes of a window in the device's queue, fewer rounds would fit (`ours_charged` and `ours_beside` in
research/laboratory.md). It does not count as device work.

For trials of uneven swarms a device may act as a slower one: its thread sleeps after each job, and its clock runs
faster during a job, so the replica measures what a slower device would have measured.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from noloco_node.errors import Exit, UserError, usage_error
from noloco_node.machine.interface import DeviceLost, Runner, TrainingFailed, check_device_name
from noloco_node.run.config import MOST_SLOWDOWN
from pipeline.hardware.device_type import DEVICE_TYPES, is_shortage

T = TypeVar("T")
NVML = "libnvidia-ml.so.1"
POWERCAP = Path("/sys/class/powercap")


def finish_work(device: torch.device) -> None:
    """Wait until a GPU has done its work: a job that fetches no number from it returns earlier."""
    DEVICE_TYPES[device.type].finish(device)


class WallClock(NamedTuple):
    """Clocks of the device's thread, in seconds. `core`: the time for which the thread had a core.

    `finish`: waits until the device has done its work.
    """

    clock: Callable[[], float] = time.perf_counter
    core: Callable[[], float] = time.thread_time
    sleep: Callable[[float], None] = time.sleep
    finish: Callable[[torch.device], None] = finish_work


WALL = WallClock()


def is_loss(error: RuntimeError) -> bool:
    """Say whether a GPU has failed for good; all of its errors are for good but a shortage of memory."""
    said = str(error)
    of_device = isinstance(error, torch.AcceleratorError) or "CUDA error" in said or "HIP error" in said
    return of_device and not is_shortage(error)


def choose_device(wish: str) -> torch.device:
    """Return the torch device that a name means; `UserError` if it is not there.

    `auto` is the GPU with the most free memory, of several with as much the first; without a GPU it is the CPU.
    """
    check_device_name(wish)
    gpus = all_gpus()
    if wish == "auto":
        return max(gpus, key=_driver_free_bytes) if len(gpus) > 1 else gpus[0] if gpus else torch.device("cpu")
    device = torch.device(wish)
    there = [gpu for gpu in gpus if gpu.type == device.type]
    if device.type != "cpu" and (device.index or 0) >= len(there):
        raise UserError(
            f"The device {wish!r} is not there.",
            why=f"torch {torch.__version__} sees {len(there)} {device.type.upper()} devices",
            hint="--device auto, or a torch build for your GPU",
            code=Exit.DEVICE,
        )
    return device


def all_gpus() -> list[torch.device]:
    """Return the GPUs that torch can use here."""
    if torch.backends.mps.is_available():
        return [torch.device("mps")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _driver_free_bytes(gpu: torch.device) -> int:
    """Return the free memory of a CUDA device; 0 where it has failed, or has none left for a context.

    NVIDIA's driver is asked first: torch asks for a context on the device, which keeps its memory to the end.
    """
    try:
        with suppress(OSError, AttributeError):
            return _nvidia_free_bytes(str(torch.cuda.get_device_properties(gpu).uuid))
        return torch.cuda.mem_get_info(gpu)[0]
    except RuntimeError:
        return 0


def autocast_dtype(device: torch.device, precision: str) -> torch.dtype | None:
    """Return the format in which matrices are multiplied: None is float32, which a CPU has always.

    Where `precision` is auto, a GPU that computes in bfloat16 natively has it, and an older one float16.

    Float32 is float32: products are never shortened to TF32, since a run that asks for it asks for its precision.
    """
    return DEVICE_TYPES[device.type].half(device) if precision == "auto" else None


class Device:
    """One thread for tensor work; counts the seconds it works. `slowdown`: each job takes so many times longer.

    `thread`: another thread than one of its own, one job after the other.
    """

    def __init__(
        self,
        device: torch.device,
        slowdown: float = 1.0,
        wall: WallClock = WALL,
        thread: concurrent.futures.Executor | None = None,
    ) -> None:
        if not 1.0 <= slowdown <= MOST_SLOWDOWN:
            raise usage_error(
                f"A device cannot be slowed down {slowdown:g} times.",
                why="a slowdown lets time pass after each job; it can neither take time back nor stand still",
                hint=f"--slowdown from 1 to {MOST_SLOWDOWN:g}",
            )
        self.device = device
        self._slowdown, self._wall = slowdown, wall
        self._worked = wall.core if device.type == "cpu" else wall.clock
        self._begun_s: float | None = None
        self.busy_s = 0.0
        self._lost: DeviceLost | None = None
        self._thread = thread or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"device-{device}")
        self._beside = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"beside-{device}")

    def clock(self) -> float:
        """Return the time by which a job measures itself, in seconds."""
        self._wall.finish(self.device)
        now_s, begun_s = self._wall.clock(), self._begun_s
        return now_s if begun_s is None else begun_s + self._slowdown * (now_s - begun_s)

    async def run(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)` in the device's thread; when cancelled, first await the end of a job that has begun."""
        return await _in_its_turn(self._thread.submit(self._timed, job, args))

    async def beside(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)`, arithmetic on the CPU that touches no weights, beside what the device does."""
        return await _in_its_turn(self._beside.submit(job, *args))

    def _timed(self, job: Callable[..., T], args: tuple[object, ...]) -> T:
        if self._lost is not None:
            raise self._lost
        try:
            return self._measured(job, args)
        except RuntimeError as error:
            if not is_loss(error):
                raise
            self._lost = DeviceLost(str(self.device), str(error))
        raise self._lost  # out here the frames of the failure are gone, and the tensors in them

    def _measured(self, job: Callable[..., T], args: tuple[object, ...]) -> T:
        self._begun_s, before_s = self._wall.clock(), self._worked()
        try:
            return job(*args)
        finally:
            ended_s = self.clock()
            worked_s, self._begun_s = self._slowdown * (self._worked() - before_s), None
            if self._slowdown > 1.0:
                self._wall.sleep(max(0.0, ended_s - self._wall.clock()))
            self.busy_s += worked_s

    def close(self) -> None:
        """Wait for the jobs in hand and end the threads."""
        for thread in (self._thread, self._beside):
            thread.shutdown(wait=True, cancel_futures=True)


class WatchedDevice:
    """Runs jobs, and notes when the device, or the program whose stage it computes, fails for good.

    The job that fails may belong to a peer's conversation, which ends by it; the node has to end as well. Conversations
    that outlive a move to another stage refer to this object, and not to the replica.
    """

    def __init__(self, device: Runner) -> None:
        self._device = device
        self.failed: asyncio.Future[TrainingFailed] = asyncio.get_running_loop().create_future()

    async def run(self, job: Callable[..., T], *args: object) -> T:
        try:
            return await self._device.run(job, *args)
        except TrainingFailed as failure:
            if not self.failed.done():
                self.failed.set_result(failure)
            raise


async def _in_its_turn(submitted: concurrent.futures.Future[T]) -> T:
    """Await a job; when cancelled, take it back if it has not begun, and else await its end first."""
    result = asyncio.wrap_future(submitted)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        if not submitted.cancel():
            while not result.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([result])
            if not result.cancelled():
                result.exception()  # so that asyncio does not warn of it
        raise


class EnergyMeter:
    """Energy since this was made. `counters`: each reads joules, and begins anew at so many (0: never)."""

    def __init__(self, counters: list[tuple[Callable[[], float], float]]) -> None:
        self._counters = [(read, most, [read()]) for read, most in counters]
        self._joules = 0.0

    def joules(self) -> float:
        """Return the energy so far; a counter that cannot be read now is added later."""
        for read, most, last in self._counters:
            with suppress(OSError, ValueError):
                now = read()
                grown = now - last[0] if now >= last[0] else now - last[0] + most
                self._joules += max(0.0, grown)
                last[0] = now
        return self._joules


def energy_meter(device: torch.device, powercap: Path = POWERCAP) -> EnergyMeter | None:
    """Return the meter of a device; None if it has no counter that we may read."""
    with suppress(OSError, ValueError, AttributeError):
        if device.type == "cuda":
            return EnergyMeter([(_nvidia_joules(str(torch.cuda.get_device_properties(device).uuid)), 0.0)])
        packages = [path for path in sorted(powercap.glob("intel-rapl:*")) if _is_package(path)]
        if packages:
            return EnergyMeter([_package(path) for path in packages])
    return None


def _is_package(zone: Path) -> bool:
    """Say whether a zone is a whole processor; its cores and a laptop's platform (`psys`) are zones too."""
    try:
        return (zone / "name").read_text().startswith("package")
    except (OSError, ValueError):
        return False


def _package(path: Path) -> tuple[Callable[[], float], float]:
    return (lambda: _microjoules(path / "energy_uj"), _microjoules(path / "max_energy_range_uj"))


def _microjoules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def _nvidia(uuid: str) -> Callable[[str, object], None]:
    """Return what calls a function of NVIDIA's driver with a GPU and a place for the answer; `OSError` if it fails."""
    nvml = ctypes.CDLL(NVML)

    def ask(function: str, *arguments: object) -> None:
        code = getattr(nvml, function)(*arguments)
        if code != 0:
            raise OSError(code, f"{function} has failed")

    handle = ctypes.c_void_p()
    ask("nvmlInit_v2")
    ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(handle))
    return lambda function, answer: ask(function, handle, answer)


def _nvidia_joules(uuid: str) -> Callable[[], float]:
    """Return a reader of a GPU's counter; raise `OSError` without a driver that has one."""
    ask, millijoules = _nvidia(uuid), ctypes.c_ulonglong()

    def read() -> float:
        ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.byref(millijoules))
        return millijoules.value / 1e3

    return read


class _NvidiaMemory(ctypes.Structure):
    """`nvmlMemory_t` of the driver's library, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _nvidia_free_bytes(uuid: str) -> int:
    memory = _NvidiaMemory()
    _nvidia(uuid)("nvmlDeviceGetMemoryInfo", ctypes.byref(memory))
    return int(memory.free)
