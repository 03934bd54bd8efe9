"""The training text of a peer, read in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from noloco_node.data.blocks import open_blocks
from noloco_node.data.encoding import check_vocabulary
from noloco_node.data.shuffled_blocks import shuffled
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import with_source

R = TypeVar("R")


class TextSource:
    """The training text of this peer, read in a thread. To open it may take a while as well.

    `own_source`: another one than the run's, as `with_source` reads it; None takes the run's.
    """

    def __init__(self, run: RunConfig, own_source: str | None, peer: str, vocabulary: int) -> None:
        data = run.data if own_source is None else with_source(run.data, own_source)
        check_vocabulary(data, vocabulary)
        length = run.pipeline.sequence_length
        blocks = open_blocks(data, length, run.seed, peer)
        self._blocks = shuffled(blocks, length, run.seed, peer) if data.shuffle else blocks
        self._batch = run.pipeline.microbatch_size
        self._turn = asyncio.Lock()
        # A thread of its own: the C library keeps for each thread what it once needed, and a chunk needs ten megabytes.
        # And a read whose reader has gone is over before the next one begins.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._position = self._blocks.position()
        """After the last draw: what the thread reads at this moment is not drawn yet."""
        self._ahead: tuple[Tensor, dict[str, Any]] | None = None

    def read_ahead(self) -> None:
        """Have the first batch at hand: a whole chunk is read for it."""
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
