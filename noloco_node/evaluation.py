"""What a model is worth: its loss on text that no peer trained on, beside what the mere frequency of tokens would give.

Evaluation is local: nothing here talks to a swarm. A model is any callable from ids [b, s] to logits [b, s, vocab], so
that a checkpoint in plain transformers and a route through single replicas are measured by the same code. Losses are
mean nats a token over all tokens of all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from noloco_node.config import DataConfig, RunConfig
from noloco_node.data import open_blocks, open_tokenizer
from noloco_node.errors import Exit, Trouble
from noloco_node.export import NOTES, quiet_unless_watched, read_notes
from noloco_node.runfile import decode_run, with_source

BATCH = 8
"""Sequences evaluated at a time."""

Model = Callable[[Tensor], Tensor]


class Loss(NamedTuple):
    """`mean`: nats a token. `tokens`: how many it is a mean over."""

    mean: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean; infinite where it does not fit a float."""
        return math.exp(self.mean) if self.mean < 709.0 else math.inf


@torch.no_grad()
def validation_loss(model: Model, batches: Iterable[Tensor]) -> Loss:
    """Return the mean cross-entropy of predicting every token but the first in batches of int64 [b, s + 1]."""
    total, tokens = 0.0, 0
    for batch in batches:
        logits, targets = model(batch[:, :-1]), batch[:, 1:].flatten()
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.to(logits.device), reduction="none")
        total += losses.sum(dtype=torch.float64).item()
        tokens += targets.numel()
    if tokens == 0:
        raise ValueError("there is no token to evaluate on")
    return Loss(total / tokens, tokens)


def unigram_entropy(batches: Iterable[Tensor]) -> float:
    """Return the entropy of the predicted tokens' own distribution, nats a token.

    No model that ignores the context can have a smaller loss on these tokens.
    """
    counts = torch.zeros(0, dtype=torch.int64)
    for batch in batches:
        more = torch.bincount(batch[:, 1:].flatten(), minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    if not counts.any():
        raise ValueError("there is no token to evaluate on")
    shares = counts[counts > 0].double() / counts.sum()
    return -(shares * shares.log()).sum().item()


def open_model(directory: Path) -> Any:
    """Load a checkpoint in plain transformers, for evaluation; raise `Trouble` if there is none."""
    from transformers import AutoModelForCausalLM

    quiet_unless_watched()
    try:
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise Trouble(
            f"{directory} holds no model that transformers can load.",
            why=str(error),
            attempt="give a directory that `noloco-node export` or the demo wrote",
            code=Exit.CONFIG,
        ) from error


@torch.no_grad()
def generate_sample(directory: Path, prompt: str, tokens: int, seed: int = 0) -> str:
    """Let an exported checkpoint go on from `prompt` for at most `tokens` tokens; return what it adds."""
    model, tokenizer = open_model(directory), open_tokenizer(_own_tokenizer(_run_of(directory).data, directory))
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.8,
            top_k=40,
        )
    text: str = tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True)
    return text


def evaluate_directory(directory: Path, *, data: str | None, batches: int, as_json: bool) -> str:
    """Evaluate an exported checkpoint; return a sentence or one JSON object.

    `data`: a source of text, used whole; None for the text that its run held out. `batches`: the most of them.
    """
    run = _run_of(directory)
    source = (
        run.data if data is None else msgspec.structs.replace(with_source(run.data, data), validation_percent=100.0)
    )
    blocks = open_blocks(_own_tokenizer(source, directory), run.pipeline.sequence_length, run.seed, "", "validation")
    try:
        text = list(islice(blocks.batches(BATCH), batches))
    finally:
        blocks.close()
    model = open_model(directory)
    loss, entropy = validation_loss(lambda ids: model(ids).logits, text), unigram_entropy(text)
    if as_json:
        numbers = {"loss": loss.mean, "perplexity": loss.perplexity, "tokens": loss.tokens, "unigram_entropy": entropy}
        return msgspec.json.encode(numbers).decode()
    return (
        f"loss {loss.mean:.4f} nats a token, perplexity {loss.perplexity:.3f}, over {loss.tokens} tokens "
        f"(their frequencies alone: {entropy:.4f} nats, perplexity {math.exp(entropy):.3f})"
    )


def _run_of(directory: Path) -> RunConfig:
    return decode_run(read_notes(directory).run_file, str(directory / NOTES))


def _own_tokenizer(data: DataConfig, directory: Path) -> DataConfig:
    """Take the tokenizer from the checkpoint: the run's own may be a directory of another machine."""
    if data.tokenizer == "byt5":
        return data
    return msgspec.structs.replace(data, tokenizer=str(directory), tokenizer_commit=None)
