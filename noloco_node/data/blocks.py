"""From text to blocks of token ids.

Documents are tokenised, each followed by the tokenizer's end token, and joined; the joined tokens are cut into blocks
of `sequence_length + 1` that overlap by one, so that every token but the first is predicted exactly once and the
targets are the inputs shifted by one. Special tokens written out in a text are ordinary text here: nobody ends a
document by typing its end token.

A position is the place of the document in which the next block begins and the number of its tokens already used. It
is small, JSON holds it, and a fresh object that is given it goes on with the same blocks. Documents come in an order
of (seed, peer): see `documents` (files) and `rows` (data sets).

Everything here blocks, on a disk or a network: call it from a thread.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noloco_node.data.dataset_documents import SUFFIXES, RowDocuments, load_rows
from noloco_node.data.file_documents import (
    Documents,
    FileDocuments,
    Order,
    Part,
    Place,
    find_files,
    pieces_of,
    stdlib_files,
)
from noloco_node.errors import Exit, Trouble
from noloco_node.run.config import DataConfig
from noloco_node.run.runfile import with_source

SMALLEST_PIECE_BYTES = 64 * 1024
BYT5_VOCABULARY = 384
_BYT5_END, _BYT5_OFFSET = 1, 3


def check_source(source: str) -> None:
    """Raise `Trouble` where the source that a person named is not understood, or no file here; no hub is asked."""
    data = with_source(DataConfig(), source)
    if data.path is not None and data.source != "hub":
        find_files(data.path, SUFFIXES.get(data.source, ("",)))


class Encoder(NamedTuple):
    """What the blocks need of a tokenizer. `encode`: text to int32 ids; `end`: the end token; `name`: which it is."""

    encode: Callable[[str], Tensor]
    end: int
    name: str


class Blocks:
    """Blocks of token ids without end, or, for validation, until the documents are used up."""

    def __init__(self, documents: Documents, encoder: Encoder, sequence_length: int, owner: str) -> None:
        """Cut `documents` into blocks. `owner`: whose order it is (a position is of no use to another)."""
        self._documents, self._encoder, self._length = documents, encoder, sequence_length
        self._pending: deque[tuple[Place, Tensor]] = deque()
        self._offset = self._available = self._blocks = 0
        described = f"{documents.fingerprint}|{encoder.name}|{owner}"
        self._source = hashlib.sha256(described.encode()).hexdigest()[:32]

    def next_batch(self, batch_size: int) -> Tensor:
        """Return the next blocks, int64 [batch, sequence_length + 1].

        Validation ends with a smaller batch, and then with empty ones. Raises `Trouble` (Exit.CONFIG) where the source
        proves unreadable or has less than one block.
        """
        batch = torch.empty(batch_size, self._length + 1, dtype=torch.int64)
        for row in range(batch_size):
            if not self._gather():
                if self._blocks == 0 and self._offset == 0:
                    raise Trouble(
                        "The data source has too little text for validation.",
                        why=f"its held-out documents have {self._available} tokens, a block has {self._length + 1}",
                        attempt="a larger data.validation_percent, or more text",
                        code=Exit.CONFIG,
                    )
                return batch[:row].clone()
            self._take(batch[row])
        return batch

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield batches until there are no more blocks (never, in training)."""
        while len(batch := self.next_batch(batch_size)):
            yield batch

    def position(self) -> dict[str, Any]:
        """Return where the next block begins."""
        place = self._pending[0][0] if self._pending else self._documents.place
        return {"source": self._source, "place": place, "offset": self._offset}

    def restore(self, position: dict[str, Any]) -> bool:
        """Go on from a position; return False, and begin anew, where it is of another source, tokenizer, seed or peer.

        A source whose files have changed is another one. Raises ValueError for what never was a position.
        """
        if position.get("source") != self._source:
            return False
        try:
            offset = position["offset"]
            self._documents.seek(position["place"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{position} is no position") from error
        self._pending.clear()
        self._available, self._offset = 0, 0
        if offset and not (isinstance(offset, int) and self._draw() and 0 < offset < self._available):
            raise ValueError(f"{position} is no position here")
        self._offset, self._available = offset, self._available - offset
        return True

    def close(self) -> None:
        """Let go of files and connections; a batch that another thread waits for ends soon, with an error."""
        self._documents.close()

    def statistics(self) -> dict[str, int | float]:
        """Return blocks and tokens so far, and the source's own counts."""
        return {"blocks": self._blocks, "tokens": self._blocks * self._length, **self._documents.statistics()}

    def __repr__(self) -> str:
        return f"Blocks({self._blocks} of {self._length} + 1 tokens so far, from {self._documents!r})"

    def _gather(self) -> bool:
        """Have the tokens of one block at hand; say whether there are any."""
        while self._available <= self._length:
            if not self._draw():
                return False
        return True

    def _draw(self) -> bool:
        """Tokenise one more document; say whether there was one."""
        document = self._documents.next()
        if document is None:
            return False
        place, text = document
        ids = self._encoder.encode(text)
        tokens = torch.cat([ids, torch.tensor([self._encoder.end], dtype=ids.dtype)])
        self._pending.append((place, tokens))
        self._available += len(tokens)
        return True

    def _take(self, block: Tensor) -> None:
        """Fill one block, and move on by all of its tokens but the last."""
        filled, start = 0, self._offset
        for _, tokens in self._pending:
            part = tokens[start : start + len(block) - filled]
            block[filled : filled + len(part)] = part
            filled, start = filled + len(part), 0
            if filled == len(block):
                break
        self._offset += self._length
        self._available -= self._length
        while self._offset >= len(self._pending[0][1]):
            self._offset -= len(self._pending.popleft()[1])
        self._blocks += 1


def open_blocks(data: DataConfig, sequence_length: int, seed: int, peer: str, part: Part = "train") -> Blocks:
    """Open the text of a run as blocks of `sequence_length + 1` tokens.

    `train`: without end, in an order of (seed, peer). `validation`: one pass over what is held out, the same for all.
    Raises `Trouble` (Exit.CONFIG) where a path, a field, a data set or the tokenizer is not there.
    """
    encoder = open_encoder(data)
    order = Order(part, seed, peer, data.shuffle)
    owner = part if part == "validation" else f"{part}|{seed}|{peer}|{data.shuffle}"
    if part == "validation" and data.validation_percent == 0:
        raise Trouble(
            "This run holds no text out for validation.",
            why="data.validation_percent is 0",
            attempt="text of your own to evaluate on",
            code=Exit.CONFIG,
        )
    return Blocks(_documents(data, order, sequence_length), encoder, sequence_length, owner)


def _documents(data: DataConfig, order: Order, sequence_length: int) -> Documents:
    if data.source == "stdlib":
        # A few of its files are as long as hundreds of others together.
        return FileDocuments(pieces_of(stdlib_files(), SMALLEST_PIECE_BYTES), order, data.validation_percent)
    if data.source == "text":
        # A piece holds several blocks, so that few of them are of two texts.
        pieces = pieces_of(find_files(data.path or ""), max(SMALLEST_PIECE_BYTES, 16 * sequence_length))
        return FileDocuments(pieces, order, data.validation_percent)
    return RowDocuments(data, order, lambda: load_rows(data))


def open_encoder(data: DataConfig) -> Encoder:
    """Return the run's tokenizer as the blocks use it; for byt5 without loading transformers."""
    if data.tokenizer == "byt5":
        return Encoder(encode_bytes, _BYT5_END, "byt5")
    tokenizer = open_tokenizer(data)
    if tokenizer.eos_token_id is None:
        raise Trouble(
            f"The tokenizer {data.tokenizer} has no end token.",
            why="documents are joined with it, so that the model learns where one ends",
            attempt="a tokenizer with eos_token in its tokenizer_config.json",
            code=Exit.CONFIG,
        )

    def encode(text: str) -> Tensor:
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return torch.tensor(encoded["input_ids"], dtype=torch.int32)

    return Encoder(encode, tokenizer.eos_token_id, f"{data.tokenizer}@{data.tokenizer_commit}")


def encode_bytes(text: str) -> Tensor:
    """Return the ids of ByT5 for a text, int32: its bytes in UTF-8, counted from 3."""
    if not text:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(bytearray(text.encode(errors="replace")), dtype=torch.uint8).to(torch.int32) + _BYT5_OFFSET


def open_tokenizer(data: DataConfig) -> Any:
    """Load the run's tokenizer as transformers has it; raise `Trouble` (Exit.CONFIG) where it cannot be."""
    if data.tokenizer == "byt5":
        from transformers import ByT5Tokenizer

        return ByT5Tokenizer()
    from transformers import AutoTokenizer

    directory = Path(data.tokenizer).expanduser()
    if data.tokenizer_commit is None and not directory.is_dir():
        raise Trouble(
            f"data.tokenizer: there is no directory {data.tokenizer!r}.",
            why="without data.tokenizer_commit it is a local directory",
            attempt='"byt5", an existing directory, or owner/name with tokenizer_commit',
            code=Exit.CONFIG,
        )
    try:
        if data.tokenizer_commit is None:
            return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return AutoTokenizer.from_pretrained(data.tokenizer, revision=data.tokenizer_commit)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise Trouble(
            f"The tokenizer {data.tokenizer} cannot be loaded.",
            why=" ".join(str(error).split())[:500],
            attempt="check data.tokenizer and its commit, and the network",
            code=Exit.CONFIG,
        ) from error


def vocab_size(data: DataConfig) -> int:
    """Return how many ids the run's tokenizer may produce, its special tokens included."""
    return BYT5_VOCABULARY if data.tokenizer == "byt5" else len(open_tokenizer(data))


def check_vocabulary(data: DataConfig, model_vocabulary: int) -> None:
    """Raise `Trouble` (Exit.CONFIG) where the model's vocabulary is smaller than the tokenizer's."""
    needed = vocab_size(data)
    if model_vocabulary < needed:
        raise Trouble(
            f"The model's vocabulary of {model_vocabulary} is smaller than the tokenizer's.",
            why=f"{data.tokenizer} has {needed} tokens, and one beyond the vocabulary has no embedding",
            attempt=f"vocab_size = {needed} or more in [model.sizes], or another data.tokenizer",
            code=Exit.CONFIG,
        )
