"""The device: jobs in turn, begun ones to their end, others taken back."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from limits import LAST_RESORT_S

from noloco_node.errors import Exit, UserError
from noloco_node.machine.device import Device, WallClock, autocast_dtype, choose_device, is_loss
from noloco_node.machine.interface import DeviceLost


def test_a_job_that_has_begun_is_awaited_and_one_that_has_not_is_taken_back() -> None:
    async def main() -> list[str]:
        device, done = Device(torch.device("cpu")), []  # type: ignore[var-annotated]
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
        return done

    assert asyncio.run(main()) == ["long", "after"]


def test_arithmetic_beside_the_device_does_not_wait_for_the_jobs_before_it() -> None:
    async def main() -> None:
        device, release = Device(torch.device("cpu")), threading.Event()
        jobs = [asyncio.create_task(device.run(release.wait, LAST_RESORT_S)) for _ in range(3)]
        # It ends while the first job still waits for what comes after it.
        assert await device.beside(sum, [1, 2]) == 3
        assert not any(job.done() for job in jobs)
        release.set()
        assert await asyncio.gather(*jobs) == [True] * 3
        device.close()

    asyncio.run(main())


DEAD = torch.AcceleratorError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("fails_in", ["the job", "the wait for its end"])
def test_a_device_that_has_failed_for_good_is_asked_nothing_any_more(fails_in: str) -> None:
    asked: list[str] = []

    def fail() -> None:
        asked.append("job")
        if fails_in == "the job":
            raise DEAD

    def finish(_: torch.device) -> None:
        if asked and fails_in != "the job":
            asked.append("finish")
            raise DEAD

    async def main() -> None:
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

    asyncio.run(main())


def test_a_shortage_of_memory_and_a_bug_are_no_loss_of_the_device() -> None:
    lost = [DEAD, RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError("HIP error: x")]
    others = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ]
    assert [is_loss(error) for error in [*lost, *others]] == [True] * 3 + [False] * 4


def test_a_job_s_error_reaches_its_caller() -> None:
    async def main() -> None:
        device = Device(torch.device("cpu"))
        with pytest.raises(ZeroDivisionError):
            await device.run(lambda: 1 // 0)
        assert await device.run(sum, [1, 2]) == 3
        device.close()

    asyncio.run(main())


@pytest.mark.parametrize("wish", ["gpu", "cuda:99", "meta", ""])
def test_a_device_that_is_not_there_is_named(wish: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_device(wish)
    assert caught.value.code is Exit.DEVICE


def test_a_cpu_computes_in_float32() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert autocast_dtype(torch.device("cpu"), "auto") is None


@pytest.mark.parametrize(
    ("capability", "hip", "native"),
    [
        ((7, 0), None, False),
        ((7, 5), None, False),
        ((8, 0), None, True),
        ((12, 0), None, True),
        ((9, 0), "6.4", False),
        ((9, 4), "6.4", True),
        ((10, 3), "6.4", False),
        ((11, 0), "6.4", True),
    ],
)
def test_bfloat16_where_our_gpu_computes_in_it_and_not_where_it_is_emulated(
    capability: tuple[int, int], hip: str | None, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", {ours: capability}.__getitem__)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert autocast_dtype(ours, "auto") == (torch.bfloat16 if native else None)
    assert autocast_dtype(ours, "float32") is None


def test_a_job_lasts_until_the_device_has_done_its_work() -> None:
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

    async def main() -> tuple[float, float]:
        measured_s = await device.run(gpu.backward)
        await device.run(gpu.step)
        return measured_s, device.busy_s

    gpu = Asynchronous()
    wall = WallClock(clock=lambda: gpu.now_s, core=lambda: gpu.now_s, finish=gpu.finish)
    device = Device(torch.device("cpu"), wall=wall)
    try:
        assert asyncio.run(main()) == pytest.approx((0.501, 0.751))
    finally:
        device.close()
