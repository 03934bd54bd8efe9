"""A run's real text in virtual time: the blocks that a real peer of this name would train on, in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from noloco_node.data.blocks import open_blocks, shuffled
from noloco_node.data.encoding import check_vocabulary
from noloco_node.run.config import RunConfig


class BlockText:
    """A `noloco_node.machine.interface.Text` that reads where it stands: virtual time does not pass meanwhile."""

    def __init__(self, run: RunConfig, peer: str, vocabulary: int) -> None:
        check_vocabulary(run.data, vocabulary)
        length = run.pipeline.sequence_length
        blocks = open_blocks(run.data, length, run.seed, peer)
        self._blocks = shuffled(blocks, length, run.seed, peer) if run.data.shuffle else blocks
        self._batch = run.pipeline.microbatch_size

    async def draw(self) -> Tensor:
        """Return the next microbatch, int64 [batch, sequence + 1]."""
        return self._blocks.next_batch(self._batch)

    def position(self) -> dict[str, Any]:
        """Return where the next draw begins."""
        return self._blocks.position()

    async def restore(self, position: Mapping[str, Any]) -> bool:
        """Go back to a position; False where it is of another text."""
        return self._blocks.restore(dict(position))

    def news(self) -> list[str]:
        """Return what was left out of the text since the last call."""
        return self._blocks.news()
