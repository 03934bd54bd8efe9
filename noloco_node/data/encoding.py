"""From text to tokens: the tokenizer of a run, or bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from noloco_node.errors import config_error, one_line
from noloco_node.run.config import TOKENIZER_FILES, DataConfig
from noloco_node.storage.home import typed

BYT5_VOCABULARY = 384
_BYT5_END, _BYT5_OFFSET = 1, 3
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The built-in chat template. Its marks may be ordinary text to a tokenizer."""


class Encoder(NamedTuple):
    """A tokenizer, as blocks use it. `encode`: text to int32 ids. `end`: the end token. `name`: identifies it.

    `begin`: the tokens with which the tokenizer begins a text, often none; a model trained with them expects them.
    """

    encode: Callable[[str], Tensor]
    end: int
    name: str
    begin: tuple[int, ...] = ()

    def document(self, text: str) -> Tensor:
        ids = self.encode(text)
        begin, end = (torch.tensor(tokens, dtype=ids.dtype) for tokens in (self.begin, (self.end,)))
        return torch.cat([begin, ids, end])


def open_encoder(data: DataConfig, tokenizer: Any = None) -> Encoder:
    """Return the run's tokenizer as blocks use it; for byt5 without loading transformers.

    `tokenizer`: as `open_tokenizer` returned it, where it is open already.
    """
    if data.has_byte_tokenizer:
        return Encoder(encode_bytes, _BYT5_END, "byt5")
    if tokenizer is None:
        tokenizer = open_tokenizer(data)
    if tokenizer.eos_token_id is None:
        raise config_error(
            f"The tokenizer {data.tokenizer} has no end token.",
            why="documents are joined with it, so that the model learns where one ends",
            hint="a tokenizer with eos_token in its tokenizer_config.json",
        )

    def encode(text: str) -> Tensor:
        encoded = tokenized(tokenizer, of_unicode(text), split_special_tokens=True)
        return torch.tensor(encoded["input_ids"], dtype=torch.int32)

    begin = _beginning(tokenizer)
    name = ",".join(each.digest for each in data.tokenizer_files) or _name_of(data)
    return Encoder(encode, tokenizer.eos_token_id, f"{name}|{begin}" if begin else name, begin)


def tokenized(tokenizer: Any, text: str, *, add_special_tokens: bool = False, **options: bool) -> Any:
    """Return what a tokenizer makes of a text; raise `UserError` (CONFIG) where it takes no such text."""
    try:
        return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False, **options)
    except Exception as error:
        if type(error) is not Exception:  # the library of fast tokenizers raises nothing more exact
            raise
        raise config_error(
            f"The tokenizer {tokenizer.name_or_path} takes no such text as the data has.",
            why=str(error),
            hint="a tokenizer with a token for what is not in its vocabulary, or with all bytes in it",
        ) from error


def _beginning(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before a text."""
    whole, plain = (tokenized(tokenizer, "a", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    before = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return tuple(whole[:before])


def _name_of(data: DataConfig) -> str:
    """Return the identity of a tokenizer; of a directory, whose path varies, a digest of its files."""
    if data.tokenizer_commit is not None:
        return f"{data.tokenizer}@{data.tokenizer_commit}"
    files = (typed(data.tokenizer) / name for name in TOKENIZER_FILES)
    return hashlib.sha256(
        b"".join(hashlib.sha256(each.read_bytes()).digest() for each in files if each.is_file())
    ).hexdigest()


def of_unicode(text: str) -> str:
    """Return a text with ? for half a surrogate pair, as JSON and a command line may hold: no tokenizer takes one."""
    return text.encode(errors="replace").decode()


def encode_bytes(text: str) -> Tensor:
    """Return the ids of ByT5 for a text, int32: its bytes in UTF-8, counted from 3."""
    if not text:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(bytearray(text.encode(errors="replace")), dtype=torch.uint8).to(torch.int32) + _BYT5_OFFSET


def with_tokenizer_in(data: DataConfig, directory: Path) -> DataConfig:
    """Return `data` with the tokenizer in a local directory to which its files have travelled."""
    return msgspec.structs.replace(data, tokenizer=str(directory)) if data.has_travelling_tokenizer else data


def open_tokenizer(data: DataConfig) -> Any:
    """Load the run's tokenizer with transformers, and its chat template; raise `UserError` (CONFIG) if that fails."""
    tokenizer = _loaded(data)
    if data.chat_template == "chatml":
        tokenizer.chat_template = CHATML
    return tokenizer


def _loaded(data: DataConfig) -> Any:
    if data.has_byte_tokenizer:
        from transformers import ByT5Tokenizer

        return ByT5Tokenizer()
    if data.has_travelling_tokenizer:
        raise config_error(
            "The tokenizer of this run is not here.",
            why="its files come from the swarm, when a node joins or a model is exported",
            hint="the model's own directory, or a home of a node of the run",
        )
    from transformers import AutoTokenizer

    directory = typed(data.tokenizer)
    if data.tokenizer_commit is None and not os.path.isdir(directory):
        raise config_error(
            f"data.tokenizer: there is no directory {data.tokenizer!r}.",
            why="without data.tokenizer_commit it is a local directory",
            hint='"byt5", an existing directory, or owner/name with tokenizer_commit',
        )
    name, place = data.tokenizer, dict[str, Any](revision=data.tokenizer_commit)
    hint = "check data.tokenizer and its commit, and the network"
    if data.tokenizer_commit is None:
        name, place = str(directory), dict[str, Any](local_files_only=True)
        hint = "a directory with all of the tokenizer's files, such as tokenizer.json and tokenizer_config.json"
    try:
        found = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **place)
        if found.get_vocab().keys() <= set(found.all_special_tokens):  # which the library makes up where no file is
            raise ValueError("its files hold no vocabulary, or are not there")
        return found
    except Exception as error:  # a stranger may have written its files, and the library raises all kinds of errors
        raise config_error(
            f"The tokenizer {data.tokenizer} cannot be loaded.",
            why=one_line(error),
            hint=hint,
        ) from error


def vocab_size(data: DataConfig) -> int:
    """Return how many ids reach up to the highest of the run's tokenizer, special tokens and gaps included."""
    return BYT5_VOCABULARY if data.has_byte_tokenizer else 1 + max(open_tokenizer(data).get_vocab().values())


def check_vocabulary(data: DataConfig, model_vocabulary: int) -> None:
    """Raise `UserError` (CONFIG) if the model's vocabulary is smaller than the tokenizer's."""
    needed = vocab_size(data)
    if model_vocabulary < needed:
        raise config_error(
            f"The model's vocabulary of {model_vocabulary} is smaller than the tokenizer's.",
            why=f"the ids of {data.tokenizer} go up to {needed - 1}, and one beyond the vocabulary has no embedding",
            hint=f"vocab_size = {needed} or more in [model.sizes], in a program's stages as many embeddings and "
            "logits; or another data.tokenizer",
        )
