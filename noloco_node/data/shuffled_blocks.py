"""Training blocks in a mixed order: what stands together in a text does not stand together in a batch.

Documents come in a random order, but the blocks of one document come one after the other, and a whole window of them
is then about one thing: its gradient is noise to everything else. So blocks are read a chunk at a time, and each
chunk is dealt out in an order of (seed, peer, number of the chunk).

A position is the position at which the chunk began, its number, and how many of its blocks have been dealt; resuming
reads the chunk again. Nothing of a chunk is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from noloco_node.data.blocks import Blocks

CHUNK_TOKENS = 2**19
"""Tokens in a chunk: some thirty source files, or two megabytes of prose, and four megabytes of memory."""


class ShuffledBlocks:
    """Blocks without end, in a mixed order."""

    def __init__(self, blocks: Blocks, chunk_blocks: int, rng: Callable[[int], Random]) -> None:
        """Deal out `blocks` by chunks of `chunk_blocks`; `rng`: the generator of one chunk's order, by its number."""
        self._blocks, self._chunk_blocks, self._rng = blocks, chunk_blocks, rng
        self._chunk = torch.empty(0, 0, dtype=torch.int64)
        self._order: list[int] = []
        self._began: dict[str, Any] = blocks.position()
        self._number, self._dealt = -1, 0

    def next_batch(self, batch_size: int) -> Tensor:
        """Return the next blocks, int64 [batch, sequence_length + 1]."""
        rows = []
        for _ in range(batch_size):
            if self._dealt == len(self._order):
                self._began = self._blocks.position()
                self._deal(self._number + 1)
            rows.append(self._chunk[self._order[self._dealt]])
            self._dealt += 1
        return torch.stack(rows)

    def position(self) -> dict[str, Any]:
        """Return where the next block is."""
        return {"chunk": self._began, "number": self._number, "dealt": self._dealt}

    def restore(self, position: dict[str, Any]) -> bool:
        """Go on from a position; False, and begin anew, where it is of another source, tokenizer, seed or peer.

        Raises ValueError for what never was a position.
        """
        try:
            number, dealt, began = position["number"], position["dealt"], position["chunk"]
            possible = number >= -1 and 0 <= dealt <= (self._chunk_blocks if number >= 0 else 0)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{position} is no position") from error
        if not possible:
            raise ValueError(f"{position} is no position here")
        if not self._blocks.restore(began):
            return False
        self._began, self._number, self._order, self._dealt = began, number, [], 0
        if number >= 0:
            self._deal(number)
            self._dealt = dealt
        return True

    def news(self) -> list[str]:
        """Return what was left out of the text since the last call, in sentences."""
        return self._blocks.news()

    def close(self) -> None:
        """Let go of files and connections."""
        self._blocks.close()

    def _deal(self, number: int) -> None:
        self._chunk = self._blocks.next_batch(self._chunk_blocks)
        self._order = list(range(len(self._chunk)))
        self._rng(number).shuffle(self._order)
        self._number, self._dealt = number, 0


def shuffled(blocks: Blocks, sequence_length: int, seed: int, peer: str) -> ShuffledBlocks:
    """Return the training blocks of one peer in its own mixed order."""
    chunk_blocks = max(1, CHUNK_TOKENS // sequence_length)
    return ShuffledBlocks(blocks, chunk_blocks, lambda number: Random(f"{seed}|mixing|{peer}|{number}"))
