"""Few messages leave at a time, in the order in which they came, and nobody keeps a turn for good."""

from __future__ import annotations

import asyncio

from coroutine_tests import run_main
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.network.conversation_pool import FEWEST, LEAST_S, SendTurns
from noloco_node.sim.clock import run

NOT_FOR_GOOD = 1000.0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.9), st.booleans()), max_size=30), st.integers(1, 20))
def test_never_more_at_once_and_first_come_first_served(jobs: list[tuple[int, float, bool]], receivers: int) -> None:
    async def main() -> None:
        turns, under_way, order = SendTurns(receivers), set[int](), list[int]()

        async def send(number: int, seconds: float, breaks: bool) -> None:
            try:
                async with turns.turn():
                    under_way.add(number)
                    order.append(number)
                    assert len(under_way) <= turns.at_once <= max(FEWEST, receivers)
                    await asyncio.sleep(seconds)
                    under_way.remove(number)
                    if breaks:
                        raise ConnectionResetError
            except ConnectionResetError:
                pass

        async with asyncio.TaskGroup() as group:
            for number, (pause, seconds, breaks) in enumerate(jobs):
                await asyncio.sleep(pause / 10)
                group.create_task(send(number, seconds, breaks))
        assert order == list(range(len(jobs)))

    run(main())


@run_main(run)
async def test_slow_receivers_hold_up_nobody_for_long_and_who_gives_up_leaves_its_place() -> None:
    turns, loop = SendTurns(FEWEST), asyncio.get_running_loop()

    async def send(seconds: float) -> float:
        async with turns.turn():
            await asyncio.sleep(seconds)
        return loop.time()

    slow = [asyncio.create_task(send(NOT_FOR_GOOD)) for _ in range(FEWEST)]
    await asyncio.sleep(0)
    gives_up = asyncio.create_task(send(NOT_FOR_GOOD))
    await asyncio.sleep(LEAST_S / 2)
    gives_up.cancel()
    assert await send(0.1) <= LEAST_S + 0.2
    assert await send(0.1) <= LEAST_S + 0.4, "the others have had their turns"
    await asyncio.gather(*slow)
