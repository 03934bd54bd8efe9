"""The device: jobs in turn, begun ones to their end, others taken back."""

import asyncio
import ctypes
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from user_errors import user_error

from noloco_node.errors import Exit, UserError
from noloco_node.machine import device, memory
from noloco_node.machine.device import (
    Device,
    EnergyMeter,
    WallClock,
    autocast_dtype,
    choose_device,
    energy_meter,
    is_loss,
)
from noloco_node.machine.interface import DeviceLost

pytestmark = pytest.mark.real_time


async def test_a_job_that_has_begun_is_awaited_and_one_that_has_not_is_taken_back() -> None:
    device, done = Device(torch.device("cpu")), list[str]()
    loop, begun, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def long() -> None:
        loop.call_soon_threadsafe(begun.set)
        release.wait(LAST_RESORT_S)
        done.append("long")

    first = asyncio.create_task(device.run(long))
    second = asyncio.create_task(device.run(done.append, "never"))
    await begun.wait()
    first.cancel()
    second.cancel()
    await asyncio.wait([second])
    first.cancel()  # more than once changes nothing
    assert not first.done()
    release.set()
    await asyncio.wait([first])
    assert first.cancelled()
    assert second.cancelled()
    await device.run(done.append, "after")
    device.close()
    assert done == ["long", "after"]


async def test_arithmetic_beside_the_device_does_not_wait_for_the_jobs_before_it() -> None:
    device, release = Device(torch.device("cpu")), threading.Event()
    jobs = [asyncio.create_task(device.run(release.wait, LAST_RESORT_S)) for _ in range(3)]
    # It ends while the first job still waits for what comes after it.
    assert await device.beside(sum, [1, 2]) == 3
    assert not any(job.done() for job in jobs)
    release.set()
    assert await asyncio.gather(*jobs) == [True] * 3
    device.close()


DEAD = torch.AcceleratorError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("fails_in", ["the job", "the wait for its end"])
async def test_a_device_that_has_failed_for_good_is_asked_nothing_any_more(fails_in: str) -> None:
    asked: list[str] = []

    def fail() -> None:
        asked.append("job")
        if fails_in == "the job":
            raise DEAD

    def finish(_: torch.device) -> None:
        if asked and fails_in != "the job":
            asked.append("finish")
            raise DEAD

    device = Device(torch.device("cpu"), wall=WallClock(finish=finish))
    with pytest.raises(DeviceLost, match="failed while it computed") as lost:
        await device.run(fail)
    assert lost.value.code is Exit.DEVICE_LOST
    assert "unspecified launch failure" in lost.value.why
    before = list(asked)
    with pytest.raises(DeviceLost):
        await device.run(fail)
    assert asked == before
    assert await device.beside(sum, [1, 2]) == 3, "main memory is as it was"
    device.close()


def test_a_shortage_of_memory_and_a_bug_are_no_loss_of_the_device() -> None:
    lost = [DEAD, RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError("HIP error: x")]
    others = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ]
    assert [is_loss(error) for error in [*lost, *others]] == [True] * 3 + [False] * 4


async def test_a_job_s_error_reaches_its_caller() -> None:
    device = Device(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 // 0)
    assert await device.run(sum, [1, 2]) == 3
    device.close()


@pytest.mark.parametrize("wish", ["gpu", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_named(wish: str) -> None:
    with user_error(Exit.DEVICE):
        choose_device(wish)


def test_a_cpu_computes_in_float32() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert autocast_dtype(torch.device("cpu"), "auto") is None


@pytest.mark.parametrize(
    ("capability", "hip", "half"),
    [
        ((6, 1), None, None),
        ((7, 0), None, torch.float16),
        ((7, 5), None, torch.float16),
        ((8, 0), None, torch.bfloat16),
        ((12, 0), None, torch.bfloat16),
        ((9, 0), "6.4", torch.float16),
        ((9, 4), "6.4", torch.bfloat16),
        ((10, 3), "6.4", torch.float16),
        ((11, 0), "6.4", torch.bfloat16),
    ],
)
def test_bfloat16_where_our_gpu_computes_in_it_and_float16_where_it_is_emulated(
    capability: tuple[int, int], hip: str | None, half: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", {ours: capability}.__getitem__)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert autocast_dtype(ours, "auto") == half
    assert autocast_dtype(ours, "float32") is None


async def test_a_job_lasts_until_the_device_has_done_its_work() -> None:
    """A GPU goes on after a job that fetches nothing from it: its time counts, within the job and for the device."""

    class Asynchronous:
        now_s = pending_s = 0.0

        def finish(self, _: torch.device) -> None:
            self.now_s, self.pending_s = self.now_s + self.pending_s, 0.0

        def backward(self) -> float:
            begun_s = device.clock()
            self.now_s, self.pending_s = self.now_s + 0.001, 0.5
            return device.clock() - begun_s

        def step(self) -> None:
            self.pending_s = 0.25

    gpu = Asynchronous()
    wall = WallClock(clock=lambda: gpu.now_s, core=lambda: gpu.now_s, finish=gpu.finish)
    device = Device(torch.device("cpu"), wall=wall)
    assert await device.run(gpu.backward) == pytest.approx(0.501)
    await device.run(gpu.step)
    assert device.busy_s == pytest.approx(0.751)
    device.close()


CPU = torch.device("cpu")


def zone(powercap: Path, zone: str, name: str, microjoules: int) -> Path:
    path = powercap / zone
    path.mkdir(parents=True, exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text("10000000\n")
    return path / "energy_uj"


def test_a_counter_that_begins_anew_goes_on() -> None:
    read = iter([9.0, 9.5, 1.0, 3.0]).__next__
    meter = EnergyMeter([(read, 10.0)])
    assert [meter.joules() for _ in range(3)] == [0.5, 2.0, 4.0]


def test_a_counter_that_never_begins_anew_takes_nothing_back() -> None:
    meter = EnergyMeter([(iter([9.0, 8.0, 8.5]).__next__, 0.0)])
    assert [meter.joules() for _ in range(2)] == [0.0, 0.5]


def test_packages_are_added_up_and_neither_their_parts_nor_the_platform_around_them(tmp_path: Path) -> None:
    first, second = (zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 1_000_000) for number in range(2))
    core = zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    platform = zone(tmp_path, "intel-rapl:2", "psys", 1_000_000)
    nameless = zone(tmp_path, "intel-rapl:3", "", 1_000_000)
    (nameless.parent / "name").unlink()
    meter = energy_meter(CPU, tmp_path)
    assert meter is not None
    first.write_text("3000000")
    second.write_text("500000")  # it has begun anew
    for counted_elsewhere in (core, platform, nameless):
        counted_elsewhere.write_text("9000000")
    assert meter.joules() == pytest.approx(2.0 + 9.5)
    first.unlink()
    assert meter.joules() == pytest.approx(11.5)


def test_nothing_is_said_where_nothing_counts(tmp_path: Path) -> None:
    assert energy_meter(CPU, tmp_path / "none") is None
    zone(tmp_path, "intel-rapl:0", "package-0", 1).write_text("no number")
    assert energy_meter(CPU, tmp_path) is None


class _Nvml:
    def __init__(self, wrong: str) -> None:
        self._wrong, self.uuids = wrong, list[bytes]()

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.uuids.append(uuid)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, millijoules: Any) -> int:
        millijoules._obj.value += 1500
        return 3 if self._wrong == "energy" else 0


@pytest.mark.parametrize("wrong", ["", "energy", "library"])
def test_a_gpu_is_asked_through_its_driver(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _Nvml(wrong)

    def load(_: str) -> _Nvml:
        if wrong == "library":
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return nvml

    monkeypatch.setattr(ctypes, "CDLL", load)
    properties = type("Properties", (), {"uuid": "0b1c"})
    monkeypatch.setattr(device.torch.cuda, "get_device_properties", lambda _: properties)
    meter = energy_meter(torch.device("cuda:1"))
    if wrong:
        assert meter is None
        return
    assert meter is not None
    assert nvml.uuids == [b"GPU-0b1c"]
    assert [meter.joules() for _ in range(2)] == [1.5, 3.0]


LOST, GPU_IS_LOST = -1, 15  # instead of free memory, and what NVIDIA's driver says then


class _Gpus:
    """CUDA devices with so much free memory. `asked`: those on which torch was asked, which makes a context."""

    def __init__(self, patch: pytest.MonkeyPatch, free: list[int], *, nvml: bool) -> None:
        self.asked: list[int] = []
        self._free, self._found = free, 0
        patch.setattr(device.torch.cuda, "device_count", lambda: len(free))
        patch.setattr(device.torch.cuda, "mem_get_info", self._of_torch)
        patch.setattr(
            device.torch.cuda, "get_device_properties", lambda gpu: type("Properties", (), {"uuid": gpu.index})
        )
        patch.setattr(ctypes, "CDLL", (lambda _: self) if nvml else self._refuse)

    def _of_torch(self, gpu: torch.device) -> tuple[int, int]:
        assert gpu.index is not None
        self.asked.append(gpu.index)
        if self._free[gpu.index] == LOST:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return self._free[gpu.index], 2**40

    def _refuse(self, _: str) -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 1 + int(uuid.decode().removeprefix("GPU-"))
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        free = self._free[handle.value - 1]
        memory._obj.free = max(0, free)
        return GPU_IS_LOST if free == LOST else 0


@pytest.mark.parametrize("nvml", [True, False], ids=["NVIDIA's driver", "torch alone"])
@pytest.mark.parametrize(("free", "chosen"), [([LOST, 7], 1), ([3, LOST, LOST], 0)])
def test_auto_leaves_out_a_gpu_that_has_failed(
    free: list[int], chosen: int, nvml: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Gpus(monkeypatch, free, nvml=nvml)
    assert choose_device("auto") == torch.device("cuda", chosen)


@pytest.mark.parametrize("nvml", [True, False], ids=["NVIDIA's driver", "torch alone"])
@pytest.mark.parametrize(("free", "chosen"), [([5, 9, 7], 1), ([8, 8], 0), ([3], 0)])
def test_auto_is_the_emptiest_gpu(free: list[int], chosen: int, nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = _Gpus(monkeypatch, free, nvml=nvml)
    assert choose_device("auto") == torch.device("cuda", chosen)
    assert gpus.asked == ([] if nvml or len(free) == 1 else [*range(len(free))])
    assert choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(UserError, match="is not there"):
        choose_device("mps")


def test_an_apple_processor_computes_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("mps") == torch.device("mps")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="is not there"):
        choose_device("cuda")


@given(st.integers(0, 2**50), st.lists(st.none() | st.integers(0, 2**50), min_size=1, max_size=4))
def test_the_tightest_of_the_limits_around_a_process_counts(there: int, limits: list[int | None]) -> None:
    """A service, or a job on a cluster, has its limit below that of the machine or of a container."""
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        root, names = Path(place), [f"group {depth}" for depth in range(1, len(limits))]
        groups = [root.joinpath("cgroup", *names[:depth]) for depth in range(len(limits))]
        for group, limit in zip(groups, limits, strict=True):
            group.mkdir()
            (group / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
            (group / "memory.current").write_text("0\n")
        (root / "self").write_text(f"4:memory:/of another time\n0::/{'/'.join(names)}\n")
        patch.setattr(memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": there}))
        patch.setattr(memory, "CGROUPS", groups[0])
        patch.setattr(memory, "OWN_CGROUP", root / "self")
        assert memory.machine_free_bytes() == min([there, *(each for each in limits if each is not None)])


@pytest.mark.parametrize(("swappable", "free"), [(100, 17), (9, 11)])
def test_an_apple_processor_has_one_memory(swappable: int, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps counts as free, beside the driver's bound or main memory, whichever is less."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": swappable}))
    monkeypatch.setattr(memory, "within_limit", lambda _: None)
    for name, value in (("recommended_max", 20), ("driver_allocated", 5), ("current_allocated", 3)):
        monkeypatch.setattr(torch.mps, f"{name}_memory", lambda value=value: value)
    assert memory.free_bytes(torch.device("mps")) == free
    assert memory.free_bytes(torch.device("cpu")) == swappable
