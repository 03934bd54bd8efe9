"""The training text of a peer, opened and read in threads: disks and networks never hold the event loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from noloco_node.data.blocks import run_blocks
from noloco_node.run.config import RunConfig

R = TypeVar("R")


class TextSource:
    """The training text of a peer, read in a thread. `own_source`: another text than the run's."""

    def __init__(self, run: RunConfig, own_source: str | None, peer: str, vocabulary: int) -> None:
        self._blocks, self._batch = run_blocks(run, own_source, peer, vocabulary), run.pipeline.microbatch_size
        self._turn = asyncio.Lock()
        # A thread of its own: the C library keeps for each thread what it once needed, and a chunk needs ten megabytes.
        # And a read whose reader has gone is over before the next one begins.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._position = self._blocks.position()
        """After the last draw: what the thread reads at this moment is not drawn yet."""
        self._ahead: tuple[Tensor, dict[str, Any]] | None = None

    def read_ahead(self) -> None:
        """Read the first batch, for which a whole chunk is read."""
        self._ahead = self._read()

    async def draw(self) -> Tensor:
        async with self._turn:
            if self._ahead is not None:
                (batch, self._position), self._ahead = self._ahead, None
            else:
                batch, self._position = await self._in_thread(self._read)
            return batch

    def position(self) -> dict[str, Any]:
        return self._position

    async def restore(self, position: Mapping[str, Any]) -> bool:
        async with self._turn:
            restored = await self._in_thread(partial(self._blocks.restore, dict(position)))
            if restored:
                self._position, self._ahead = dict(position), None
            return restored

    def news(self) -> list[str]:
        return self._blocks.news()

    def close(self) -> None:
        self._blocks.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self) -> tuple[Tensor, dict[str, Any]]:
        batch = self._blocks.next_batch(self._batch)
        return batch, self._blocks.position()

    def _in_thread(self, work: Callable[[], R]) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)


class BackgroundOpen:
    """A text that `make` opens once, in a thread. `close` also closes a text that nobody asked for."""

    def __init__(self, make: Callable[[], TextSource]) -> None:
        self._make = make
        self._task: asyncio.Task[TextSource] | None = None

    def begin(self) -> None:
        """Begin to open the text and to read ahead."""
        self._begun(read_ahead=True)

    async def opened(self) -> TextSource:
        # The waiting task may be cancelled, and the thread works on: its text is closed when it is open.
        return await asyncio.shield(self._begun(read_ahead=False))

    def close(self) -> None:
        """Close the text, now or as soon as it is open."""
        if self._task is not None and self._task.done():
            _closed(self._task)
        elif self._task is not None:
            self._task.add_done_callback(_closed)

    def _begun(self, *, read_ahead: bool) -> asyncio.Task[TextSource]:
        if self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(self._open, read_ahead), name="opening")
        return self._task

    def _open(self, read_ahead: bool) -> TextSource:
        text = self._make()
        try:
            if read_ahead:
                text.read_ahead()
        except BaseException:
            text.close()
            raise
        return text


def _closed(task: asyncio.Task[TextSource]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
