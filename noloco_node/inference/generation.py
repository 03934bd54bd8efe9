"""Going on from a prompt with an exported model, token by token.

The next token is drawn from the `top_k` most probable, at a temperature; temperature 0 takes the most probable. Once
the model's positions are used up, it reads the later half of the text again.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noloco_node.data.encoding import open_encoder, open_tokenizer
from noloco_node.errors import config_error, usage_error
from noloco_node.export.sources import known_run
from noloco_node.inference.evaluation import open_model, reading_of
from pipeline.model_config import longest_sequence

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


def continuation(model: Any, prompt: list[int], sampling: Sampling, end: int | None) -> Iterator[int]:
    """Yield the tokens that a transformers model goes on with, until `end` or as many as asked for."""
    positions = longest_sequence(model.config) or len(prompt) + sampling.tokens + 1
    if not prompt:
        raise ValueError("there is no token to go on from")
    generator = torch.Generator().manual_seed(sampling.seed)
    text, unread, memory = prompt[-positions:], prompt[-positions:], None
    for _ in range(sampling.tokens):
        with torch.inference_mode():
            output = model(torch.tensor([unread]), past_key_values=memory, use_cache=True)
        logits = output.logits[0, -1]
        if logits.isnan().any():
            raise config_error(
                "The model computes what is no number.",
                why="its weights are not finite, or too large",
                hint="noloco-node evaluate says what it is worth; export again, or from other homes",
            )
        token = draw(logits, sampling, generator)
        if token == end:
            return
        yield token
        text, unread, memory = [*text, token], [token], output.past_key_values
        if len(text) > positions:
            text = text[-max(1, positions // 2) :]
            unread, memory = text, None


class Spelling:
    """Tokens to characters, as soon as they are whole."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self._tokens = decode, list[int]()
        self._context: list[int] = []
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


def generate(directory: Path, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Return what an exported checkpoint adds to `prompt`, in pieces of whole characters, as they come.

    Raises `UserError` at once if there is no such checkpoint, or no token to go on from.
    """
    data = reading_of(directory, known_run(directory))
    encoder = open_encoder(data)
    given = encoder.encode(prompt).tolist()
    if not given:
        raise usage_error(
            "There is nothing to go on from.",
            why="the prompt has no token",
            hint='a prompt with a word in it, such as --prompt "import "',
        )
    spelling: Spelling | ByteSpelling
    if data.has_byte_tokenizer:
        spelling = ByteSpelling()
    else:
        tokenizer = open_tokenizer(data)
        spelling = Spelling(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))
    given = [*encoder.begin, *given]
    return _pieces(continuation(open_model(directory), given, sampling, encoder.end), spelling)


def _pieces(tokens: Iterator[int], spelling: Spelling | ByteSpelling) -> Iterator[str]:
    for token in tokens:
        if piece := spelling.add(token):
            yield piece
    if piece := spelling.rest():
        yield piece
