"""From a model's logits to text: which token is drawn, and how tokens are spelled."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from noloco_node.data.encoding import open_tokenizer
from noloco_node.data.row_encoder import RowEncoder
from noloco_node.run.config import DataConfig

_BYTE_OFFSET, _BYTES = 3, 256
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 8  # tokens after which what is no character yet will never be one


class Sampling(NamedTuple):
    """How to draw. `temperature`: 0 takes the most probable token. `top_k`: 0 draws from all tokens."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.max()) / sampling.temperature  # no overflow, however cold
    if 0 < sampling.top_k < len(scaled):
        best = scaled.topk(sampling.top_k)
        return int(best.indices[torch.multinomial(best.values.softmax(0), 1, generator=generator)])
    return int(torch.multinomial(scaled.softmax(0), 1, generator=generator))


class Spelling:
    """Tokens to characters, as soon as they are whole. `before`: tokens of the text that they go on."""

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode, self._tokens = decode, list[int]()
        self._context = [*before[-LONGEST_CHARACTER:]]
        """The last tokens shown: some tokenizers write a space between two tokens only where both are there."""

    def add(self, token: int) -> str:
        """Take one more token and return the characters that it completes."""
        self._tokens.append(token)
        text = self._new()
        if text.endswith(_UNFINISHED) and len(self._tokens) < LONGEST_CHARACTER:
            return ""
        self._context, self._tokens = [*self._context, *self._tokens][-LONGEST_CHARACTER:], []
        return text

    def _new(self) -> str:
        return self._decode(self._context + self._tokens)[len(self._decode(self._context)) :]

    def rest(self) -> str:
        text, self._tokens = self._new(), []
        return text


class ByteSpelling:
    """Tokens of ByT5 to characters: a byte is a token, counted from 3; other tokens are no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        byte = token - _BYTE_OFFSET
        return self._decoder.decode(bytes([byte])) if 0 <= byte < _BYTES else ""

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


def open_spelling(data: DataConfig) -> Callable[[Sequence[int]], Spelling | ByteSpelling]:
    """Return what begins to spell what follows some tokens of the run's tokenizer, which is opened once."""
    if data.has_byte_tokenizer:
        return lambda _: ByteSpelling()
    tokenizer = open_tokenizer(data)
    return lambda before: Spelling(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)), before)


class Prompts:
    """Texts to go on from, as a model reads them. `tokens`: of each, by its text.

    In a run of messages each text is what a user says, and the model answers (`answers`). `ends`: the tokens that end a
    text. `mark`: the text that does, or empty.
    """

    def __init__(self, data: DataConfig, texts: Sequence[str]) -> None:
        """Open the run's tokenizer, which may take seconds."""
        messages = next((each for each in data.sources if each.form == "messages"), None)
        encoder = RowEncoder(data if messages is None else messages)
        self.answers = messages is not None
        self.tokens = {text: encoder.prompt(text) for text in texts}
        self.ends, self.mark = encoder.closing()
        self._spelling = open_spelling(data)

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Say whether these tokens, drawn so far, hold the text that ends what a model has to say."""
        spelling = self._spelling(())
        return self.mark != "" and self.mark in "".join([*map(spelling.add, tokens), spelling.rest()])

    def spelled(self, prompt: str, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of tokens that a model draws after a prompt, in pieces of whole characters, as they come."""
        spelling = self._spelling(() if self.answers else self.tokens[prompt])
        pieces = chain(map(spelling.add, tokens), (rest() for rest in (spelling.rest,)))
        return _until(self.mark, filter(None, pieces))


def _until(mark: str, pieces: Iterable[str]) -> Iterator[str]:
    """Yield a text up to a mark, and nothing that may be the beginning of the mark."""
    held = ""
    for piece in pieces:
        shown, found, _ = (held + piece).partition(mark) if mark else (piece, "", "")
        begun = 0 if found else next((size for size in range(len(mark) - 1, 0, -1) if shown.endswith(mark[:size])), 0)
        shown, held = shown[: len(shown) - begun], shown[len(shown) - begun :]
        if shown:
            yield shown
        if found:
            return
    if held:
        yield held
