"""The loss of a model on text that no peer trained on, beside the entropy of the tokens' own frequencies.

Losses are mean nats a token over all tokens of all batches. The loss of a replica, which holds one stage, is that of
the merged model with the replica in its stage's place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from noloco_node.data.held_out_text import HeldOutText, Loss, text_loss, validation_text
from noloco_node.errors import UserError
from noloco_node.export.adapter_files import base_files, without_base
from noloco_node.export.exporter import merge_files, of_homes
from noloco_node.export.held_out_loss import WholeModel, logits_of
from noloco_node.export.replica_fetch import reading_with_tokenizer
from noloco_node.export.replica_files import ReplicaReader, newest
from noloco_node.export.sources import ModelSource, check_models, recipe_of, run_of
from noloco_node.inference.open_model import check_known, no_model, open_model
from noloco_node.planning.model_layout import model_layout
from noloco_node.run.config import DataConfig
from noloco_node.terminal import say, warn
from pipeline.activation_codec import ids_of
from pipeline.model_config import longest_sequence

LONGEST_SEQUENCE = 1024  # tokens, where nothing but the model's positions says how long a sequence should be
FEW_DOCUMENTS = 10  # with fewer the figure says little of other text, and that is said
BATCHES = 64


class Measure(NamedTuple):
    """The loss of one model. `entropy`: of the tokens' frequencies, nats a token. `text`: that it was read on."""

    model: str
    loss: Loss
    entropy: float
    text: HeldOutText

    def numbers(self) -> dict[str, str | float | None]:
        return {
            "model": self.model,
            "loss": self.loss.mean,
            "margin": self.loss.margin,
            "perplexity": self.loss.perplexity,
            "tokens": self.loss.tokens,
            "documents": self.loss.documents,
            "share": self.text.share,
            "complete": self.text.complete,
            "unigram_entropy": self.entropy,
        }

    def sentence(self, *, named: bool) -> str:
        loss = self.loss
        margin = "" if loss.margin is None else f" ± {loss.margin:.4f}"
        many = f"{loss.documents} document{'s' * (loss.documents != 1)}"
        return (
            (f"{self.model}: " if named else "")
            + f"loss {loss.mean:.4f}{margin} nats a token, perplexity {loss.perplexity:.3f}, over {loss.tokens} tokens "
            f"of {many}, {self.text.described()} "
            f"(their frequencies alone: {self.entropy:.4f} nats, perplexity {math.exp(self.entropy):.3f})"
        )


def unigram_entropy(batches: Iterable[Tensor]) -> float:
    """Return the entropy of the predicted tokens' own distribution, nats a token.

    No model that ignores the context can have a smaller loss on these tokens.
    """
    counts = torch.zeros(0, dtype=torch.int64)
    for batch in batches:
        predicted = batch[:, 1:]
        more = torch.bincount(predicted[predicted >= 0], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    if not counts.any():
        raise ValueError("there is no token to evaluate on")
    shares = counts[counts > 0].double() / counts.sum()
    return -(shares * shares.log()).sum().item()


def evaluate(
    directories: Sequence[Path] = (),
    homes: Sequence[Path] = (),
    *,
    data: str | None = None,
    batches: int | None = BATCHES,
    as_json: bool = False,
    weights: Path | None = None,
) -> str:
    """Evaluate exported checkpoints, or homes: the merged model and every replica in its place in it.

    `data`: another source of text, used whole; None for the text that the run held out. `batches`: the most of them,
    spread over the text; None takes all. Returns a sentence a model, or with `as_json` one object: the numbers
    of one model, or of several a list under `models`. `weights`: the model that adapters among them are for.
    """
    sources = check_models(directories, homes, weights)
    measured = list(_of_homes(homes, data, batches, weights) if homes else _of_models(sources, data, batches))
    if as_json:
        rows = [measure.numbers() for measure in measured]
        only = rows[0] if len(rows) == 1 else {"models": rows}
        if len(rows) == 1:
            only.pop("model")
        return msgspec.json.encode(only).decode()
    return "\n".join(measure.sentence(named=len(measured) > 1) for measure in measured)


def _of_models(models: Sequence[ModelSource], source: str | None, batches: int | None) -> Iterator[Measure]:
    for each in models:
        reading = _reading(each, source)
        model = open_model(each)
        text = _text(*reading, batches, named=source is not None)
        check_known(model, max(int(ids_of(batch).max()) for batch in text.batches))
        say(f"evaluating {each.named} on {_sequences(text)}")
        yield Measure(str(each.named), text_loss(logits_of(model), text), unigram_entropy(text.batches), text)


def _text(data: DataConfig, sequence_length: int, seed: int, batches: int | None, *, named: bool) -> HeldOutText:
    """Return the text to evaluate on. `named`: by the person who asks; else it is the held-out text of the run."""
    try:
        text = validation_text(data, sequence_length, seed, batches)
    except UserError as error:
        if named or data.is_public:
            raise
        hint = f"{error.hint}; or --data with the place of that text on this machine"
        raise UserError(error.what, why=error.why, hint=hint, code=error.code) from error
    documents = len(set(text.documents))
    if documents < FEW_DOCUMENTS:
        more = "more of it" if named else "a larger data.validation_percent, or --data with other text,"
        warn(
            f"the text comes from {documents} document{'s' * (documents != 1)} only, which says little of other text: "
            f"{more} says more"
        )
    return text


def _of_homes(
    homes: Sequence[Path], source: str | None, batches: int | None, weights: Path | None
) -> Iterator[Measure]:
    """Measure the merged model, and then each replica in its place."""
    recipe = recipe_of(homes)
    run, layout = recipe.run, model_layout(recipe.run)
    data = reading_with_tokenizer(homes, recipe)
    data = data if source is None else _whole(data.with_source(source))
    text = _text(data, run.pipeline.sequence_length, run.seed, batches, named=source is not None)
    say(f"merging what lies in {len(homes)} home{'s' * (len(homes) > 1)}")
    entropy, filed = unigram_entropy(text.batches), of_homes(homes, recipe)
    stages = merge_files(filed, recipe, layout)
    base = base_files(recipe, homes, weights)
    if layout.adapter is not None and not base:
        raise without_base("evaluate")
    model = WholeModel(layout, stages, text, base)
    replicas = [newest(filed, number) for number in range(len(stages))]
    number = sum(map(len, replicas))
    say(f"evaluating the merged model and {number} replica{'' if number == 1 else 's'}, each on {_sequences(text)}")
    yield Measure("merged", model.loss(), entropy, text)
    for number, shapes in enumerate(layout.shapes):
        with ReplicaReader(replicas[number], shapes) as opened:
            for place, each in enumerate(opened.filed):
                model.put(number, opened.weights(place))
                name = f"stage {number}, {each.peer}, round {each.counters.round}"
                yield Measure(name, model.loss(), entropy, text)
        model.put(number, stages[number].weights)


def _sequences(text: HeldOutText) -> str:
    return f"{len(text.documents)} sequences, {text.described()}"


def _reading(model: ModelSource, source: str | None) -> tuple[DataConfig, int, int]:
    """Return a checkpoint's text, the length of its sequences, and the seed of their order.

    A checkpoint from no swarm is read with its own tokenizer, on a text that must be named.
    """
    run = run_of(model.named) if source is None else model.run
    data = reading_of(model)
    data = data if source is None else _whole(data.with_source(source))
    if run is not None:
        return data, run.pipeline.sequence_length, run.seed
    try:
        config = msgspec.json.decode((model.directory / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, RecursionError, ValueError) as error:
        raise no_model(model.directory, f"its config.json cannot be read: {error}") from error
    return data, min(longest_sequence(config) or LONGEST_SEQUENCE, LONGEST_SEQUENCE), 0


def _whole(data: DataConfig) -> DataConfig:
    return msgspec.structs.replace(data, validation_percent=100.0)


def reading_of(model: ModelSource) -> DataConfig:
    """Return how a model reads text: with its run's tokenizer, or without a run with its own.

    The run's may be a directory of another machine, but the checkpoint, or the adapter, has a copy.
    """
    own = str(model.named if (model.named / "tokenizer_config.json").exists() else model.directory)
    if model.run is None:
        return DataConfig(tokenizer=own)
    if model.run.data.has_byte_tokenizer:
        return model.run.data
    return msgspec.structs.replace(model.run.data, tokenizer=own, tokenizer_commit=None)
