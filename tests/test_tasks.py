"""Tasks that run beside a body."""

import asyncio
import inspect

import pytest

from noloco_node.tasks import AGAIN_S, background, supervised


async def test_what_a_body_ends_before_it_has_begun_is_closed() -> None:
    beside = asyncio.sleep(1.0)
    async with background(beside):
        pass
    assert inspect.getcoroutinestate(beside) == inspect.CORO_CLOSED


@pytest.mark.parametrize("depth", range(3))
async def test_the_cause_of_a_failure_is_told_however_deep_in_groups_of_tasks(depth: int) -> None:
    async def look(depth: int) -> None:
        if not depth:
            raise ValueError("no such row")
        async with background(asyncio.sleep(1.0)):
            await look(depth - 1)

    told: list[str] = []
    async with background(supervised("looking", lambda: look(depth), told.append)):
        await asyncio.sleep(3 * AGAIN_S)
    (line,) = told
    assert line.startswith("looking failed (ValueError: no such row)")
