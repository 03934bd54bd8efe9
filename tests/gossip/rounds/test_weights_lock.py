"""Weights stand still while somebody reads them, and nobody waits for ever."""

import asyncio
import random

import pytest

from gossip.rounds.weights_lock import ReadWriteLock, WeightsLock, to_the_end


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_moves_while_somebody_reads_and_all_have_their_turn(seed: int) -> None:
    """Readers come one after the other without a gap, and some are cancelled while they wait or read."""
    rng = random.Random(seed)

    lock, readers, moved = WeightsLock(), 0, {"fast": 0, "slow": 0}

    async def read(first_s: float, for_s: float) -> None:
        nonlocal readers
        await asyncio.sleep(first_s)
        async with lock.reading():
            then, readers = dict(moved), readers + 1
            try:
                await asyncio.sleep(for_s)
                assert moved == then
            finally:
                readers -= 1

    async def move(which: str, part: ReadWriteLock) -> None:
        for _ in range(10):
            await asyncio.sleep(rng.random())
            async with asyncio.timeout(30), part.moving():
                assert not readers
                before = moved[which]
                await asyncio.sleep(rng.random())
                assert not readers
                assert moved[which] == before
                moved[which] += 1

    reading = [asyncio.create_task(read(place / 4, 1.0 + rng.random())) for place in range(80)]
    movers = [asyncio.create_task(move(*each)) for each in (("fast", lock.fast), ("slow", lock.slow)) for _ in range(2)]
    for task in rng.sample(reading, 20):
        await asyncio.sleep(rng.random() / 2)
        task.cancel()
    await asyncio.gather(*movers)
    await asyncio.gather(*reading, return_exceptions=True)
    assert moved == {"fast": 20, "slow": 20}
    assert all(task.cancelled() or task.exception() is None for task in reading)


async def test_an_outer_step_keeps_no_inner_step_waiting_nor_does_whoever_waits_for_it() -> None:
    lock = WeightsLock()
    async with lock.slow.moving():
        reader = asyncio.create_task(lock.read())
        await asyncio.sleep(1)
        async with asyncio.timeout(1), lock.fast.moving():
            assert not reader.done()
    (await reader)()


@pytest.mark.parametrize("part", ["fast", "slow"])
async def test_who_has_read_says_so_once(part: str) -> None:
    lock = WeightsLock()
    first, second = await lock.read(), await lock.read()
    moving = asyncio.create_task(getattr(lock, part).moving().__aenter__())
    first()
    first()
    await asyncio.sleep(1)
    assert not moving.done()
    second()
    await moving


async def test_what_is_awaited_to_its_end_ends_before_the_cancellation_is_raised() -> None:
    done: list[str] = []

    async def work() -> None:
        await asyncio.sleep(1.0)
        done.append("work")

    task = asyncio.create_task(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0.1)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["work"]
