"""Weights stand still while somebody reads them, and nobody waits for ever."""

import asyncio
import random

import pytest

from gossip.rounds.outer_optimiser import WeightsLock
from noloco_node.sim.clock import run


@pytest.mark.parametrize("seed", range(20))
def test_nothing_moves_while_somebody_reads_and_all_have_their_turn(seed: int) -> None:
    """Readers come one after the other without a gap, and some are cancelled while they wait or read."""
    rng = random.Random(seed)

    async def main() -> None:
        lock, readers, moved = WeightsLock(), 0, 0

        async def read(first_s: float, for_s: float) -> None:
            nonlocal readers
            await asyncio.sleep(first_s)
            async with lock.reading():
                then, readers = moved, readers + 1
                try:
                    await asyncio.sleep(for_s)
                    assert moved == then
                finally:
                    readers -= 1

        async def move() -> None:
            nonlocal moved
            for _ in range(10):
                await asyncio.sleep(rng.random())
                async with asyncio.timeout(30), lock.moving():
                    assert not readers
                    before = moved
                    await asyncio.sleep(rng.random())
                    assert not readers
                    assert moved == before
                    moved += 1

        reading = [asyncio.create_task(read(place / 4, 1.0 + rng.random())) for place in range(80)]
        movers = [asyncio.create_task(move()) for _ in range(2)]
        for task in rng.sample(reading, 20):
            await asyncio.sleep(rng.random() / 2)
            task.cancel()
        await asyncio.gather(*movers)
        await asyncio.gather(*reading, return_exceptions=True)
        assert moved == 20
        assert all(task.cancelled() or task.exception() is None for task in reading)

    run(main())


def test_who_has_read_says_so_once() -> None:
    async def main() -> None:
        lock = WeightsLock()
        first, second = await lock.read(), await lock.read()
        moving = asyncio.create_task(lock.moving().__aenter__())
        first()
        first()
        await asyncio.sleep(1)
        assert not moving.done()
        second()
        await moving

    run(main())
