"""The device: jobs in turn, begun ones to their end, others taken back."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from limits import LAST_RESORT_S

from noloco_node.errors import Exit, UserError
from noloco_node.machine.device import Device, autocast_dtype, choose_device


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
