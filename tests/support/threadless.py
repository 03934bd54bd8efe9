"""Code that hands work to a thread, for which virtual time would not wait."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def without_threads() -> Iterator[None]:
    """Do at once what `asyncio.to_thread` is asked for."""

    async def here(work: Callable[..., object], *args: Any, **options: Any) -> object:
        return work(*args, **options)

    with patch.object(asyncio, "to_thread", here):
        yield
