"""Text to measure a model on: a sample spread over all that is held out, and what share of it that is.

A text is read once, in an order that mixes its documents, as sequences of a run's length. Where there are more than
wanted, every k-th is kept, k doubling as the text goes on: so those that are kept lie evenly over all that was read,
whatever its length, and in bounded memory. Reading ends at `MOST_READ` times as many as wanted, and not before
`READ_TOKENS`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from noloco_node.data.blocks import open_blocks
from noloco_node.run.config import DataConfig

BATCH = 8
"""Sequences evaluated at a time."""
MOST_READ = 8
"""Times as many sequences are read as are wanted."""
READ_TOKENS = 2**19
"""At least, where there are so many: few short sequences shall come from many documents too."""


class HeldOutText(NamedTuple):
    """Sequences [at most `BATCH`, s + 1], the document in which each begins, and how many were read.

    `complete`: no more was there to read.
    """

    batches: list[Tensor]
    documents: list[str]
    read: int
    complete: bool

    @property
    def share(self) -> float:
        """Of what was read, the share that is here."""
        return len(self.documents) / max(1, self.read)

    def described(self) -> str:
        """Say how much of the text this is."""
        if self.complete and self.share == 1.0:
            return "all of the text"
        share = f"{self.share:.1%}" if self.share < 0.095 else f"{self.share:.0%}"
        return f"{share} of the text" if self.complete else f"{share} of the text that was read; there is more"


def validation_text(data: DataConfig, sequence_length: int, seed: int, batches: int | None) -> HeldOutText:
    """Return a sample of at most so many batches of the text that a run holds out; None takes all of it."""
    wanted = None if batches is None else batches * BATCH
    kept: list[tuple[Tensor, str]] = []
    every, read, complete = 1, 0, False
    most = None if wanted is None else max(MOST_READ * wanted, READ_TOKENS // sequence_length)
    blocks = open_blocks(data, sequence_length, seed, "", "validation")
    try:
        while most is None or read < most:
            block = blocks.next_batch(1)
            if complete := not len(block):
                break
            if read % every == 0:
                kept.append((block[0].to(torch.int32), blocks.document))
                if wanted is not None and len(kept) == 2 * wanted:
                    kept, every = kept[::2], 2 * every
            read += 1
    finally:
        blocks.close()
    if wanted is not None and len(kept) > wanted:
        kept = [kept[number * len(kept) // wanted] for number in range(wanted)]
    rows = [kept[at : at + BATCH] for at in range(0, len(kept), BATCH)]
    return HeldOutText(
        [torch.stack([block for block, _ in row]).long() for row in rows], [name for _, name in kept], read, complete
    )
