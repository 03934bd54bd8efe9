"""Tasks that run beside a body."""

from __future__ import annotations

import asyncio
import inspect

from noloco_node.tasks import background


async def test_what_a_body_ends_before_it_has_begun_is_closed() -> None:
    beside = asyncio.sleep(1.0)
    async with background(beside):
        pass
    assert inspect.getcoroutinestate(beside) == inspect.CORO_CLOSED
