"""From text to blocks of token ids, in the order in which a peer trains on them.

Documents are tokenised and joined, each between the tokens with which its tokenizer begins and ends a text, and cut
into blocks of `sequence_length + 1` that overlap by one, so that every token but the first is predicted once. Training
reads a chunk of blocks and mixes them, because a window of blocks of one document would be about one thing. A chunk
ends early once it holds a whole pass over the text: to fill it, a peer would read a short text thousands of times.

Rows of which the answers are learnt (`noloco_node.data.row_encoder`) are put into sequences, as many as fit, in the
order in which they are read, and the sequence is filled up; or each row into one of its own. The block's last token is
the first of the next row, which is only given. A row that is longer than a sequence is left out.

A position is small, JSON holds it, and a fresh object goes on from it with the same blocks. `Blocks` waits for disks
and networks: `text_source` reads it in a thread.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noloco_node.data.dataset_documents import CHUNK_ROWS, RowDocuments, load_rows
from noloco_node.data.encoding import Encoder, check_vocabulary, open_encoder
from noloco_node.data.file_documents import (
    Documents,
    FileDocuments,
    Part,
    Place,
    ReadingOrder,
    find_files,
    pieces_of,
    stdlib_files,
)
from noloco_node.data.row_encoder import RowEncoder, UnfitRowError
from noloco_node.data.row_forms import data_error
from noloco_node.errors import Exit, UserError, config_error
from noloco_node.run.config import DataConfig, RunConfig
from noloco_node.terminal import warn

SMALLEST_PIECE_BYTES = 64 * 1024  # of a long file that is cut into several documents
CHUNK_TOKENS = 2**21  # in a chunk: a hundred source files as bytes, or eight megabytes of prose; 8 MB of memory, or 16
MOST_UNFIT = 8 * CHUNK_ROWS  # rows of the hub are enough to say that none fits: a whole pass may take weeks
CHUNK_PARTS = 64  # a chunk that holds a whole pass over the text ends between two of them


class _Drawn(NamedTuple):
    """The tokens of a document, or of rows that share a sequence; `place` and `name` are the first's."""

    place: Place
    tokens: Tensor
    name: str


class TooLittleTextError(UserError):
    """A source holds out less text than one block has."""


class BlockSource(ABC):
    """What deals out blocks of token ids, and goes on from a position. `document`: in which the last block began."""

    document = ""

    @abstractmethod
    def next_batch(self, batch_size: int) -> Tensor:
        """Return the next blocks, marked tokens, int64 [batch, sequence_length + 1].

        Validation ends with a smaller batch, then empty ones. Raises `UserError` (CONFIG) if the source is unreadable
        or has less than one block, (DATA) if none of its rows can be used.
        """

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Return where the next block comes from."""

    @abstractmethod
    def restore(self, position: dict[str, Any]) -> bool:
        """Go on from a position; return False, and begin anew, if it is of another source, tokenizer, seed or peer.

        A source whose files have changed is another one. Raises ValueError for what never was a position.
        """

    @abstractmethod
    def news(self) -> list[str]:
        """Return what cannot be read, each kind when it is new."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections; a read in another thread ends soon, with an error."""

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield batches until no block is left (never, in training)."""
        while len(batch := self.next_batch(batch_size)):
            yield batch


class Blocks(BlockSource):
    """Blocks of token ids: without end for training, until the documents are used up for validation."""

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder | RowEncoder,
        sequence_length: int,
        owner: str,
        *,
        packed: bool = False,
        held_out: bool = True,
        most_unfit: float = math.inf,
    ) -> None:
        """Cut `documents` into blocks. `owner`: whose order it is (a position is of no use to another).

        `packed`: whether rows share sequences. `held_out`: whether validation reads a part of the text, not all of it.
        `most_unfit`: rows that are left out before any fits; after them the source is given up.
        """
        self._most_unfit = most_unfit
        self._documents, self._encoder, self._length = documents, encoder, sequence_length
        self._packed, self._held_out = packed, held_out
        self._pending: deque[_Drawn] = deque()
        self._carried: _Drawn | None = None  # a row that did not fit into the last sequence
        self._offset = self._available = self._blocks = 0
        self._first_epoch: int | None = None  # of the documents that we have drawn
        described = f"{documents.fingerprint}|{encoder.name}|{owner}"
        self._source = hashlib.sha256(described.encode()).hexdigest()[:32]

    def next_batch(self, batch_size: int) -> Tensor:
        taken, missing = list[Tensor](), batch_size
        while missing and self._gather():
            taken.append(self._take(missing))
            missing -= len(taken[-1])
        if missing and self._blocks == 0 and self._offset == 0:
            subject = "what is held out" if self._held_out else "all of it"
            few = f"{subject} has {self._available} tokens, a block has {self._length + 1}"
            if isinstance(self._encoder, RowEncoder):
                few = "none of the rows that fit is held out" if self._held_out else "it has no row that fits"
            raise TooLittleTextError(
                "The data source has too little text for validation.",
                why="; ".join((few, *self._documents.unread.summary())),
                hint="a larger data.validation_percent, or more text" if self._held_out else "more text",
                code=Exit.CONFIG,
            )
        return torch.cat(taken) if taken else torch.empty(0, self._length + 1, dtype=torch.int64)

    def position(self) -> dict[str, Any]:
        return {"source": self._source, "place": self._place(), "offset": self._offset}

    def epoch(self) -> int:
        """Return how many passes over the text have ended before the next block."""
        return int(self._place()["epoch"])

    def _place(self) -> Place:
        following = self._pending[0] if self._pending else self._carried
        return self._documents.place if following is None else following.place

    def restore(self, position: dict[str, Any]) -> bool:
        if position.get("source") != self._source:
            return False
        before, pending = self._documents.place, (self._offset, self._available, self._pending, self._carried)
        try:
            offset = position["offset"]
            self._documents.seek(position["place"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{position} is no position") from error
        if not isinstance(offset, int) or offset < 0:
            raise ValueError(f"{position} is no position")
        self._offset, self._available, self._pending, self._carried = 0, 0, deque(), None
        if offset and not (self._draw() and offset < self._available):
            self._documents.seek(before)
            self._offset, self._available, self._pending, self._carried = pending
            return False
        self._offset, self._available = offset, self._available - offset
        return True

    def news(self) -> list[str]:
        return self._documents.unread.news()

    def close(self) -> None:
        self._documents.close()

    def _gather(self) -> bool:
        while self._available <= self._length:
            if not self._draw() and not self._follow_last_row():
                return False
        return True

    def _draw(self) -> bool:
        """Tokenise one more document, or rows for one more sequence; say whether there was one."""
        drawn, self._carried = self._next() if self._carried is None else self._carried, None
        if drawn is None:
            return False
        if isinstance(self._encoder, RowEncoder):
            drawn = drawn._replace(tokens=self._sequence(drawn.tokens, self._encoder))
        self._pending.append(drawn)
        self._available += len(drawn.tokens)
        return True

    def _sequence(self, tokens: Tensor, encoder: RowEncoder) -> Tensor:
        """Return a sequence that begins with this row, with the rows that follow as far as they fit."""
        rows, room = [tokens], self._length - len(tokens)
        while self._packed and room and (following := self._next()) is not None:
            if len(following.tokens) > room:
                self._carried = following
                break
            rows.append(following.tokens)
            room -= len(following.tokens)
        return torch.cat([*rows, encoder.filling(room)])

    def _next(self) -> _Drawn | None:
        """Tokenise the next document that can be used; None at the end."""
        left_out = set[int]()
        while (document := self._documents.next()) is not None:
            epoch = document.place.get("epoch", 0)
            if self._first_epoch is None:
                self._first_epoch = epoch
            try:
                tokens = torch.cat([self._encoder.document(text) for text in document.texts])
                if isinstance(self._encoder, RowEncoder) and len(tokens) > self._length:
                    kind, detail = f"is longer than a sequence of {self._length:,} tokens", f"{len(tokens):,} tokens"
                    raise UnfitRowError(kind, detail)
            except UnfitRowError as unfit:
                if epoch == self._first_epoch:  # a row that is read again is counted once
                    self._documents.unread.note(*unfit.noted(document.name))
                left_out.add(epoch)
                self._most_unfit -= 1
                # The first epoch may be the rest of one: a whole one and another without a row are proof.
                if len(left_out) > 2 or self._most_unfit <= 0:
                    raise data_error(
                        f"No row of the data fits a sequence of {self._length:,} tokens.",
                        "; ".join(self._documents.unread.summary()),
                        "a larger pipeline.sequence_length; `noloco-node data` shows how rows are read",
                    ) from unfit
                continue
            self._most_unfit = math.inf
            return _Drawn(document.place, tokens, document.name)
        return None

    def _follow_last_row(self) -> bool:
        """Put a token behind the last row of all, as another row would; say whether it had none."""
        if not isinstance(self._encoder, RowEncoder) or self._available != self._length:
            return False
        self._pending.append(_Drawn(self._documents.place, self._encoder.filling(1), ""))
        self._available += 1
        return True

    def _take(self, most: int) -> Tensor:
        """Cut blocks out of the tokens that are there, and move on by all of each block's tokens but the last."""
        count = min(most, (self._available - 1) // self._length)
        parts, start, missing = list[Tensor](), self._offset, count * self._length + 1
        for each in self._pending:  # a document may be much longer than the blocks
            parts.append(each.tokens[start : start + missing])
            start, missing = 0, missing - len(parts[-1])
        blocks = torch.cat(parts).unfold(0, self._length + 1, self._length).to(torch.int64)
        self._move_on((count - 1) * self._length)
        self.document = self._pending[0].name
        self._move_on(self._length)
        self._blocks += count
        return blocks

    def _move_on(self, tokens: int) -> None:
        self._offset += tokens
        self._available -= tokens
        while self._offset >= len(self._pending[0].tokens):
            self._offset -= len(self._pending.popleft().tokens)


class MixedBlocks(BlockSource):
    """Blocks of several sources, of each as many as its share; of what is held out, until all sources are used up.

    The next block comes from the source that is furthest behind its share, so every window has nearly its shares. A
    source of which less than one block is held out has no part in an evaluation, unless that is so of all of them.
    """

    def __init__(self, sources: Sequence[Blocks], weights: Sequence[float]) -> None:
        self._sources, self._weights = sources, weights
        self._dealt = [0] * len(sources)
        self._ended = [False] * len(sources)

    def next_batch(self, batch_size: int) -> Tensor:
        rows: list[Tensor] = []
        while len(rows) < batch_size and not all(self._ended):
            number = min(
                (number for number, ended in enumerate(self._ended) if not ended),
                key=lambda number: (self._dealt[number] + 1) / self._weights[number],
            )
            try:
                row = self._sources[number].next_batch(1)
            except TooLittleTextError as error:
                if len(self._sources) - sum(self._ended) == 1 and not any(self._dealt):
                    raise
                row = torch.empty(0)
                warn(f"source {number + 1} of the mixture is left out of the evaluation: {error.why}")
            self._ended[number] = not len(row)
            if len(row):
                rows.append(row[0])
                self._dealt[number] += 1
                # Each source has names of its own.
                self.document = f"{self._sources[number].document} of source {number + 1}"
        return torch.stack(rows) if rows else torch.empty(0, 0, dtype=torch.int64)

    def position(self) -> dict[str, Any]:
        return {"dealt": [*self._dealt], "sources": [each.position() for each in self._sources]}

    def epoch(self) -> int:
        """Return how many passes over every source have ended before the next block."""
        return min(each.epoch() for each in self._sources)

    def restore(self, position: dict[str, Any]) -> bool:
        dealt, places = position.get("dealt"), position.get("sources")
        if not isinstance(dealt, list) or not isinstance(places, list):
            return False  # of a run with one source
        if len(dealt) != len(self._dealt) or len(places) != len(self._dealt):
            return False
        if not all(isinstance(count, int) and count >= 0 for count in dealt):
            raise ValueError(f"{position} is no position")
        before = [each.position() for each in self._sources]
        for source, place in zip(self._sources, places, strict=True):
            if not source.restore(place):
                for changed, earlier in zip(self._sources, before, strict=True):
                    changed.restore(earlier)
                return False
        self._dealt = [*dealt]
        return True

    def news(self) -> list[str]:
        return [line for each in self._sources for line in each.news()]

    def close(self) -> None:
        for each in self._sources:
            each.close()


def open_blocks(
    data: DataConfig, sequence_length: int, seed: int, peer: str, part: Part = "train"
) -> Blocks | MixedBlocks:
    """Open the text of a run as blocks of `sequence_length + 1` tokens; of a mixture each source by its weight.

    `train`: without end, in an order of (seed, peer). `validation`: one pass over held-out text, the same for all.
    Raises `UserError` (CONFIG) if a path, a field, a data set or the tokenizer is not there, (DATA) if the tokenizer
    lacks a template.
    """
    if data.mixture:
        with ExitStack() as unless_all_open:
            opened = []
            for source in data.sources:
                opened.append(_open_source(source, sequence_length, seed, peer, part))
                unless_all_open.callback(opened[-1].close)
            unless_all_open.pop_all()
        return MixedBlocks(opened, [each.weight for each in data.mixture])
    return _open_source(data, sequence_length, seed, peer, part)


def _open_source(data: DataConfig, sequence_length: int, seed: int, peer: str, part: Part) -> Blocks:
    encoder = RowEncoder(data) if data.has_rows else open_encoder(data)
    order = ReadingOrder(part, seed, peer, data.shuffle)
    owner = part if part == "validation" else f"{part}|{seed}|{peer}|{data.shuffle}"
    # A model from elsewhere evaluates one row at a time.
    packed = data.packs and part == "train"
    if part == "validation" and data.validation_percent == 0:
        raise config_error(
            "This run holds no text out for validation.",
            why="data.validation_percent is 0",
            hint="text of your own to evaluate on",
        )
    return Blocks(
        _documents(data, order, sequence_length),
        encoder,
        sequence_length,
        owner,
        packed=packed,
        held_out=data.validation_percent < 100,
        most_unfit=MOST_UNFIT if data.source == "hub" else math.inf,
    )


def _documents(data: DataConfig, order: ReadingOrder, sequence_length: int) -> Documents:
    if data.source == "stdlib":
        # A few of its files are as long as hundreds of others together.
        return FileDocuments(pieces_of(stdlib_files(), SMALLEST_PIECE_BYTES), order, data.validation_percent)
    if data.source == "text":
        # A piece holds several blocks, so that few of them are of two texts.
        pieces = pieces_of(find_files(data.path or ""), max(SMALLEST_PIECE_BYTES, 16 * sequence_length))
        return FileDocuments(pieces, order, data.validation_percent)
    return RowDocuments(data, order, lambda: load_rows(data))


class ShuffledBlocks(BlockSource):
    """Blocks without end, in a mixed order: by chunks, of which each is read while the one before it is dealt out."""

    def __init__(self, blocks: Blocks | MixedBlocks, chunk_blocks: int, rng: Callable[[int], Random]) -> None:
        """Deal out `blocks` by chunks of at most `chunk_blocks`; `rng`: the generator of each chunk's order."""
        self._blocks, self._chunk_blocks, self._rng = blocks, chunk_blocks, rng
        self._chunk = torch.empty(0, 0, dtype=torch.int32)
        self._order: list[int] = []
        self._began = self._next_begins = blocks.position()
        self._number, self._dealt = -1, 0
        self._read: list[Tensor] = []  # what is there of the next chunk
        self._missing, self._epoch = chunk_blocks, blocks.epoch()

    def next_batch(self, batch_size: int) -> Tensor:
        # Twice as fast as it is dealt out: after a restart nothing of the next chunk is there.
        self._read_on(2 * batch_size)
        rows = []
        for _ in range(batch_size):
            if self._dealt == len(self._order):
                self._deal(self._number + 1)
            rows.append(self._chunk[self._order[self._dealt]])
            self._dealt += 1
        return torch.stack(rows).to(torch.int64)

    def position(self) -> dict[str, Any]:
        return {"chunk": self._began, "number": self._number, "dealt": self._dealt}

    def restore(self, position: dict[str, Any]) -> bool:
        try:
            number, dealt, began = position["number"], position["dealt"], position["chunk"]
            possible = number >= -1 and 0 <= dealt <= (self._chunk_blocks if number >= 0 else 0)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{position} is no position") from error
        if not possible:
            raise ValueError(f"{position} is no position here")
        if not self._blocks.restore(began):
            return False
        self._began = self._next_begins = began
        self._number, self._order, self._dealt = number, [], 0
        self._read, self._missing, self._epoch = [], self._chunk_blocks, self._blocks.epoch()
        if number >= 0:
            self._deal(number)
            self._dealt = min(dealt, len(self._order))  # earlier versions filled each chunk
        return True

    def news(self) -> list[str]:
        return self._blocks.news()

    def close(self) -> None:
        self._blocks.close()

    def _read_on(self, most: int) -> None:
        part = max(1, self._chunk_blocks // CHUNK_PARTS)
        while most and self._missing:
            of_part = (self._chunk_blocks - self._missing) % part
            count = min(most, part - of_part, self._missing)
            self._read.append(self._blocks.next_batch(count).to(torch.int32))
            self._missing, most = self._missing - count, most - count
            # Only at the end of a part: how many blocks a call reads must not decide where a chunk ends.
            if of_part + count == part and self._blocks.epoch() > self._epoch + 1:
                self._missing = 0

    def _deal(self, number: int) -> None:
        """Take the next chunk, whatever of it is missing read first."""
        self._read_on(self._missing)
        self._chunk, self._read, self._missing = torch.cat(self._read), [], self._chunk_blocks
        self._epoch = self._blocks.epoch()
        self._began, self._next_begins = self._next_begins, self._blocks.position()
        self._order = list(range(len(self._chunk)))
        self._rng(number).shuffle(self._order)
        self._number, self._dealt = number, 0


def shuffled(blocks: Blocks | MixedBlocks, sequence_length: int, seed: int, peer: str) -> ShuffledBlocks:
    chunk_blocks = max(1, CHUNK_TOKENS // sequence_length)
    return ShuffledBlocks(blocks, chunk_blocks, lambda number: Random(f"{seed}|mixing|{peer}|{number}"))


def run_blocks(run: RunConfig, own_source: str | None, peer: str, vocabulary: int) -> BlockSource:
    """Return the training blocks of one peer as its run mixes them. `own_source`: another text than the run's."""
    data = run.data if own_source is None else run.data.with_source(own_source)
    check_vocabulary(data, vocabulary)
    length = run.pipeline.sequence_length
    blocks = open_blocks(data, length, run.seed, peer)
    return shuffled(blocks, length, run.seed, peer) if data.shuffle else blocks
