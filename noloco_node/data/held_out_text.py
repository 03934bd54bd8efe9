"""Text that a run holds out from training: a sample of it, and the loss of a model on that sample.

Of more sequences than wanted, every k-th is kept, with k doubling: they lie evenly over all that was read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from noloco_node.data.blocks import BlockSource, open_blocks
from noloco_node.run.config import DataConfig, RunConfig
from pipeline.activation_codec import as_targets, ids_of, learnt
from pipeline.messages import UNLEARNT

BATCH = 8  # sequences evaluated at a time
MOST_READ = 8  # times as many sequences are read as are wanted
READ_TOKENS = 2**19  # at least, where there are so many: few short sequences shall come from many documents too
FEW_DOCUMENTS = 5
EVALUATED_TOKENS = 2**16  # at most, in an evaluation beside the training
FORWARD_PASSES = 3  # take as long as a forward pass and its backward pass
Model = Callable[[Tensor], Tensor]


class HeldOutText(NamedTuple):
    """Sequences of marked tokens [at most `BATCH`, s + 1], the document in which each begins, and the number read.

    `complete`: whether the whole text was read.
    """

    batches: list[Tensor]
    documents: list[str]
    read: int
    complete: bool

    @property
    def share(self) -> float:
        return len(self.documents) / max(1, self.read)

    @property
    def digest(self) -> str:
        """Of its tokens, and of which of them are learnt."""
        found = hashlib.sha256()
        for batch in self.batches:
            found.update(batch.numpy().tobytes())
        return found.hexdigest()

    def described(self) -> str:
        if self.complete and self.share == 1.0:
            return "all of the text"
        share = f"{self.share:.1%}" if self.share < 0.095 else f"{self.share:.0%}"
        return f"{share} of the text" if self.complete else f"{share} of the text that was read; there is more"


def validation_text(data: DataConfig, sequence_length: int, seed: int, batches: int | None) -> HeldOutText:
    """Return a sample of at most so many batches of the text that a run holds out; None takes all."""
    with closing(open_blocks(data, sequence_length, seed, "", "validation")) as blocks:
        return _sample(blocks, sequence_length, None if batches is None else batches * BATCH)


def _sample(blocks: BlockSource, sequence_length: int, wanted: int | None) -> HeldOutText:
    """Return at most so many sequences of all that is read, evenly; None takes all."""
    kept: list[tuple[Tensor, str]] = []
    every, read, complete = 1, 0, False
    most = None if wanted is None else max(MOST_READ * wanted, READ_TOKENS // sequence_length)
    while most is None or read < most:
        block = blocks.next_batch(1)
        if complete := not len(block):
            break
        if read % every == 0:
            kept.append((block[0].to(torch.int32), blocks.document))
            if wanted is not None and len(kept) == 2 * wanted:
                kept, every = kept[::2], 2 * every
        read += 1
    if wanted is not None and len(kept) > wanted:
        kept = [kept[number * len(kept) // wanted] for number in range(wanted)]
    rows = [kept[at : at + BATCH] for at in range(0, len(kept), BATCH)]
    return HeldOutText(
        [torch.stack([block for block, _ in row]).long() for row in rows], [name for _, name in kept], read, complete
    )


def evaluated_sequences(run: RunConfig) -> int:
    """Return how many sequences an evaluation beside the training takes at most.

    A forward pass takes a third of what training takes, so that an evaluation takes about as long as an inner step, or
    less.
    """
    most = min(EVALUATED_TOKENS, FORWARD_PASSES * run.tokens(run.samples_per_step))
    return max(1, most // run.pipeline.sequence_length)


class EvaluationText:
    """The sample of held-out text on which a node evaluates beside its training: the same for equal sources.

    `own_source`: another text than the run's.
    """

    def __init__(self, run: RunConfig, own_source: str | None) -> None:
        self._data = run.data if own_source is None else run.data.with_source(own_source)
        self._length, self._seed = run.pipeline.sequence_length, run.seed
        self._sequences = evaluated_sequences(run)
        self._blocks: BlockSource | None = None
        self._closed = False

    def read(self) -> HeldOutText:
        """Read the sample, which takes seconds, or minutes over a network; raise `UserError` if there is no text."""
        with closing(open_blocks(self._data, self._length, self._seed, "", "validation")) as self._blocks:
            if self._closed:
                raise ConnectionAbortedError("the text was closed while it was opened")
            return _sample(self._blocks, self._length, self._sequences)

    def close(self) -> None:
        """Let a read in another thread end soon."""
        self._closed = True
        if self._blocks is not None:
            self._blocks.close()


class Loss(NamedTuple):
    """`mean`: nats a token, over so many `tokens` of so many `documents`.

    `margin`: half the 95 % confidence interval over other documents of this kind; None for fewer than `FEW_DOCUMENTS`.
    """

    mean: float
    tokens: int
    documents: int = 0
    margin: float | None = None

    @property
    def perplexity(self) -> float:
        """Return the exponential of the mean; infinite if it does not fit a float."""
        return math.exp(self.mean) if self.mean < 709.0 else math.inf


def _losses(model: Model, batch: Tensor) -> Tensor:
    """Return the loss of each token, 0 where it is only given."""
    logits, targets = model(ids_of(batch[:, :-1])), as_targets(batch[:, 1:]).flatten()
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.to(logits.device), ignore_index=UNLEARNT, reduction="none"
    )


class LossSums:
    """Losses on a sample of a text, summed by document. `documents`: of the sample's sequences, in order."""

    def __init__(self, documents: Sequence[str]) -> None:
        self._names = iter(documents)
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, tokens: Tensor, losses: Tensor) -> None:
        """Add the next marked tokens [b, s + 1] with the loss of each but the first, 0 where it is only given."""
        for row, of_row in zip(tokens, losses.view(len(tokens), -1), strict=True):
            name = next(self._names)
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + of_row.sum(dtype=torch.float64).item(), count + learnt(row[1:]))

    def loss(self) -> Loss:
        """Return the mean over all tokens that are learnt, with its margin; raise ValueError where there is none."""
        sums = list(self._sums.values())
        tokens = sum(count for _, count in sums)
        if not tokens:
            raise ValueError("there is no token to evaluate on")
        mean = sum(total for total, _ in sums) / tokens
        return Loss(mean, tokens, len(sums), _margin(sums, mean, tokens))


@torch.no_grad()
def text_loss(model: Model, text: HeldOutText) -> Loss:
    """Return the mean cross-entropy on the tokens of a sample of a text that are learnt, with its margin."""
    sums = LossSums(text.documents)
    for batch in text.batches:
        sums.add(batch, _losses(model, batch))
    return sums.loss()


def _margin(sums: Sequence[tuple[float, int]], mean: float, tokens: int) -> float | None:
    """Return half of the 95 % interval of a ratio of sums over documents; documents are drawn, not tokens."""
    count = len(sums)
    if count < FEW_DOCUMENTS or not math.isfinite(mean):
        return None
    squares = sum((total - mean * of_it) ** 2 for total, of_it in sums)
    deviation = math.sqrt(count / (count - 1) * squares) / tokens
    # Student's quantile from the normal one (Cornish and Fisher), 0.05 too small at 4 degrees of freedom.
    z, free = 1.959964, count - 1
    quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return quantile * deviation
