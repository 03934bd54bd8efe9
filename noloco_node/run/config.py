"""The fields of a run file: types, bounds and defaults. All peers of a run hold the same ones.

`gossip.settings` declares the section `outer`, `pipeline.inner_step` the section `inner`, `pipeline.adapters.settings`
the section `adapter`. What several packages ask of a field is a property or method here. `noloco_node.run.runfile`
reads and validates a run file, and computes its digest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from enum import StrEnum
from math import prod
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gossip.settings import OuterConfig
from noloco_node.errors import config_error
from noloco_node.run.fields import short
from noloco_node.storage.weight_store import WeightFile
from noloco_node.units import format_bytes
from pipeline.adapters.settings import NO_ADAPTER, AdapterConfig
from pipeline.admission_window import MOST_IN_FLIGHT
from pipeline.inner_step import InnerConfig

MOST_SLOWDOWN = 1000.0
MOST_MICROBATCHES = 4096  # of a window
TRAVELLING = "files"  # the tokenizer of a run whose files travel through the swarm
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""All that may travel of a tokenizer, and how its model writes text: tables and settings, never a program."""
LARGEST_TOKENIZER_BYTES = 64 * 2**20  # all of its files together


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model to train.

    Exactly one of: `architecture` (a transformers model type, with `sizes` for its config; it starts from random
    weights, or from those of `weights`), `hub` with `commit` (a model of the hub to continue from),
    `foreign_parameters` (a foreign module, which each peer's own program builds, whole or in stages; it starts from
    `weights`).
    """

    architecture: str | None = None
    sizes: dict[str, Any] = {}
    """Fields of the architecture's config in transformers, under the names that it uses there; "null" unsets one."""
    weights: tuple[WeightFile, ...] = ()
    """Files of a checkpoint to continue from (`file`, `size_bytes`, `digest`), as `init --from` lists them. They travel
    through the swarm: a peer that has them is given `--weights DIR` at `bootstrap` or `join`."""
    frozen_files: tuple[WeightFile, ...] = ()
    """Files of the same checkpoint in the form of `adapter.base`, as `init --lora` writes them: nodes fetch these
    instead, and `--weights DIR` at `bootstrap` and `join` is their directory."""
    hub: str | None = None
    """A model of the hub to continue from, owner/name."""
    commit: str | None = None
    """The commit of the hub model, 40 hexadecimal digits."""
    foreign_parameters: dict[str, tuple[int, ...]] = {}
    """The trained parameters of a foreign module, each with its shape, as `noloco_node.init` writes them."""
    foreign_frozen: dict[str, str] = {}
    """What a foreign module has and does not train, each with digests of its values, which are equal on all peers; of
    very many parameters the first. One with an empty text is not compared."""
    foreign_width: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """Of a foreign module in stages: numbers a token that each stage but the last hands on."""
    foreign_vocabulary: Annotated[int, Meta(ge=0, le=2**24)] = 0
    """Of a foreign module in stages: logits a token of the last one; 0: each peer holds the whole module."""
    dropout: Annotated[float, Meta(ge=0.0, le=0.95)] = 0.0

    @property
    def fetched(self) -> tuple[WeightFile, ...]:
        """The files that nodes fetch before they begin; none where the run starts from its seed, or from the hub."""
        return self.frozen_files or self.weights

    @property
    def is_foreign(self) -> bool:
        """Whether peers train a module of their own programs (docs/python.md)."""
        return bool(self.foreign_parameters)

    @property
    def is_in_stages(self) -> bool:
        """Whether that module is a list of stages, which nodes train as those of a model of the run's own."""
        return self.foreign_vocabulary > 0


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is cut and how microbatches flow."""

    stages: Annotated[int, Meta(ge=1, le=256)] = 2
    boundaries: tuple[int, ...] | None = None
    """Number of the first layer of every stage but the first; None cuts by estimated work."""
    replicas: Annotated[int, Meta(ge=1, le=65_536)] = 2
    """Planned replicas of a stage; with `inner.steps` it fixes the token budget of the run. More or fewer may come."""
    sequence_length: Annotated[int, Meta(ge=1, le=2**20)] = 1024
    microbatch_size: Annotated[int, Meta(ge=1, le=4096)] = 8
    microbatches_per_step: Annotated[int, Meta(ge=1, le=MOST_MICROBATCHES)] = 8
    windows_in_flight: Literal[1, 2] = 1
    """2: forward passes of the next window begin before the step, and their gradients are one step stale. For deep
    pipelines and long lines; not at the last stage, which never waits."""
    codec: Literal["float32", "bfloat16", "int8", "int6-int4", "int5-int3"] = "bfloat16"
    """Number format of activations and their gradients between stages; of two names the second is the gradients'."""
    subspace: int | None = None
    """Numbers a token that travel between stages in place of the model's whole width: layers below the last stage then
    write into so many channels alone. Fewer bytes, and a model that learns less from the same tokens; it exports like
    any other. Only for a run from random weights."""
    budget_s: Annotated[float, Meta(ge=1.0, le=86_400.0)] = 300.0
    """Longest time that a microbatch may travel."""
    check_share: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.02
    """Of all compute, what goes into spot checks: microbatches that two replicas of a stage get, to compare what they
    return; 0: none. Only where the next stage has three replicas or more."""

    @property
    def ids_shape(self) -> tuple[int, int]:
        """Sequences of a microbatch, and tokens of each."""
        return self.microbatch_size, self.sequence_length

    @property
    def targets_shape(self) -> tuple[int, int]:
        """A microbatch's targets: with each sequence's first token before them where all stages need the ids."""
        return self.microbatch_size, self.sequence_length + (self.subspace is not None)

    @property
    def microbatch_tokens(self) -> int:
        return self.microbatch_size * self.sequence_length

    @property
    def all_stages(self) -> range:
        return range(self.stages)

    @property
    def peers(self) -> int:
        """Planned peers of all stages."""
        return self.stages * self.replicas

    def is_last(self, stage: int) -> bool:
        """Say whether a stage computes the loss."""
        return stage == self.stages - 1

    @property
    def most_in_flight(self) -> int:
        """Microbatches that a replica has under way at once."""
        return min(MOST_IN_FLIGHT, self.microbatches_per_step * self.windows_in_flight)

    def in_flight(self, stage: int) -> int:
        """Return how many microbatches of a replica wait for their gradient at once; the last stage has its own."""
        return 1 if self.is_last(stage) else self.most_in_flight


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where text or rows come from, and what is read there. `source`: stdlib, text, json, parquet, or hub."""

    source: Literal["stdlib", "text", "json", "parquet", "hub"] = "stdlib"
    path: str | None = None
    """A file, a directory or a glob for text, json and parquet; owner/name for hub."""
    commit: str | None = None
    subset: str | None = None
    split: str = "train"
    field: str = "text"
    form: Literal["text", "prompt", "messages"] = "text"
    """text: each token of a document is learnt; prompt: of each row a completion, after its prompt; messages: of each
    row, a conversation, what the assistant says."""
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    messages_field: str = "messages"

    @property
    def learns_answers(self) -> bool:
        """Whether the answers in rows are learnt, and no other token."""
        return self.form != "text"

    @property
    def row_fields(self) -> tuple[str, ...]:
        """The fields of a row that are read."""
        of_form = {"text": (self.field,), "prompt": (self.prompt_field, self.completion_field)}
        return of_form.get(self.form, (self.messages_field,))

    @property
    def place_name(self) -> str:
        names = {"stdlib": "Python's standard library", "hub": f"{self.path} of the hub"}
        return names.get(self.source, f"{self.path}")


class MixedSource(SourceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of a mixture. `weight`: its part of the sequences, beside the other weights."""

    weight: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0


class DataConfig(SourceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text or rows of a run: one source, or a mixture of several."""

    mixture: tuple[MixedSource, ...] = ()
    chat_template: Literal["", "chatml"] = ""
    """How messages become a text: "" is the tokenizer's own template; "chatml" a built-in one."""
    packed: bool = True
    """Whether rows share a sequence, of which none sees another, where the answers in rows are learnt."""
    tokenizer: str = "byt5"
    """byt5 (bytes, needs no files); files (those of `tokenizer_files`); with `tokenizer_commit` owner/name of the hub,
    without it a local directory."""
    tokenizer_commit: str | None = None
    tokenizer_files: tuple[WeightFile, ...] = ()
    """Files of a checkpoint's own tokenizer (`file`, `size_bytes`, `digest`), as `init --from` lists them. They travel
    through the swarm like its weights."""
    validation_percent: Annotated[float, Meta(ge=0.0, le=50.0)] = 2.0
    evaluate_every_rounds: Annotated[int, Meta(ge=0, le=10**6)] = 0
    """Rounds from one evaluation on held-out text to the next while the run goes on, each by one peer; 0: none."""
    shuffle: bool = True

    @property
    def sources(self) -> tuple[DataConfig, ...]:
        """Each source as a section of its own; without a mixture this one."""
        names = SourceConfig.__struct_fields__
        each = ({name: getattr(source, name) for name in names} for source in self.mixture)
        return tuple(msgspec.structs.replace(self, mixture=(), **fields) for fields in each) or (self,)

    @property
    def is_public(self) -> bool:
        """Whether the text is the same for everybody, and no file of a machine."""
        return all(each.source in ("stdlib", "hub") for each in self.mixture or (self,))

    @property
    def has_rows(self) -> bool:
        """Whether the run learns the answers in rows, and no other token."""
        return any(each.learns_answers for each in self.mixture or (self,))

    @property
    def packs(self) -> bool:
        """Whether several rows may share a sequence."""
        return self.has_rows and self.packed

    @property
    def text_name(self) -> str:
        return " and ".join(each.place_name for each in self.mixture or (self,))

    @property
    def has_byte_tokenizer(self) -> bool:
        return self.tokenizer == "byt5"

    @property
    def has_travelling_tokenizer(self) -> bool:
        """Whether the tokenizer's files come from the swarm."""
        return self.tokenizer == TRAVELLING

    @property
    def tokenizer_directory(self) -> str | None:
        """The local directory of the tokenizer; None where it comes from elsewhere."""
        elsewhere = self.has_byte_tokenizer or self.has_travelling_tokenizer or self.tokenizer_commit is not None
        return None if elsewhere else self.tokenizer

    def with_source(self, source: str) -> DataConfig:
        """Return this section with another source of text, the tokenizer unchanged.

        `source` is a path (json or parquet by its suffix, else text), or `stdlib`, or says its kind: `text:PATH`,
        `json:PATH`, `parquet:PATH`, `hub:OWNER/NAME@COMMIT`. Rows are read at this section's field, or at the one that
        follows a #. Of a mixture, as many sources joined by + take the places of its own, in their order; one source
        takes the place of all. Raises `UserError` (Exit.CONFIG), also for a source without rows where the run learns
        answers.
        """
        if self.mixture:
            return self._with_mixture(source.split("+"))
        whole, _, field = source.rpartition("#")
        if whole and field and "/" not in field and _kind_and_place(whole)[0] in ("json", "parquet", "hub"):
            return self.with_source(whole)._reading(field, source)
        if source == "stdlib" and not self.has_rows:
            return msgspec.structs.replace(self, source=source, path=None, commit=None, subset=None, split="train")
        kind, rest = _kind_and_place(source)
        if self.has_rows and kind not in ("json", "parquet", "hub"):
            raise config_error(
                f"The data source {source!r} has no rows.",
                f'this run learns the answers in rows: data.form = "{self.form}"',
                "rows as JSON Lines, parquet or a data set of the hub; json:PATH says so where no suffix does",
            )
        path, _, commit = rest.partition("@") if kind == "hub" else (rest, "", "")
        if not path or (kind == "hub" and not commit):
            raise config_error(
                f"The data source {source!r} is not understood.",
                "a file, directory or glob is missing" if kind != "hub" else "a hub data set is named with its commit",
                "for example books/*.txt, json:rows.jsonl, hub:owner/name@commit, or stdlib",
            )
        if kind == "hub" and not re.fullmatch("[0-9a-f]{40}", commit):
            raise config_error(
                f"The data source {source!r} names no commit.",
                "a branch or a tag moves, and a node that comes back would read another text",
                "the 40 hexadecimal digits of a commit, from the repository's history on the hub",
            )
        same = kind == "hub" and path == self.path
        return msgspec.structs.replace(
            self,
            source=kind,
            path=path,
            commit=commit or None,
            subset=self.subset if same else None,
            split=self.split if same else "train",
        )

    def _with_mixture(self, named: list[str]) -> DataConfig:
        if len(named) == 1:
            return self.sources[0].with_source(named[0])
        if len(named) != len(self.mixture):
            raise config_error(
                f"The data source {'+'.join(named)!r} names {len(named)} sources.",
                f"the mixture of this run has {len(self.mixture)}: {self.text_name}",
                "one source for each of them, in their order, joined by +; or a single one in place of all",
            )
        places = [own.with_source(name) for own, name in zip(self.sources, named, strict=True)]
        names = SourceConfig.__struct_fields__
        mixture = (
            msgspec.structs.replace(mixed, **{name: getattr(place, name) for name in names})
            for mixed, place in zip(self.mixture, places, strict=True)
        )
        return msgspec.structs.replace(self, mixture=tuple(mixture))

    def _reading(self, field: str, source: str) -> DataConfig:
        """Return this section with the field that follows a # in `source`; raise `UserError` where rows have two."""
        if self.form == "prompt":
            raise config_error(
                f"The data source {source!r} names one field.",
                'this run reads two of each row: data.form = "prompt"',
                f"the source without #, and rows with the fields {' and '.join(self.row_fields)}",
            )
        fields = {"messages_field": field} if self.form == "messages" else {"field": field}
        return msgspec.structs.replace(self, **fields)


def _kind_and_place(source: str) -> tuple[str, str]:
    """Return which kind of source a person means, as it is said or by the suffix, and the rest of what was typed."""
    kind, colon, rest = source.partition(":")
    if colon and kind in ("text", "json", "parquet", "hub"):
        return kind, rest
    plain = re.sub(r"\.(gz|bz2|xz|zst)$", "", source.lower())
    if plain.endswith((".json", ".jsonl", ".ndjson")):
        return "json", source
    return "parquet" if plain.endswith(".parquet") else "text", source


class AdmissionRule(StrEnum):
    """By which peers are let into a run that has an owner."""

    OPEN = "open"
    INVITED = "invited"
    LISTED = "listed"


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The peers that may take part. Without an owner every holder of an invite may, and nobody can be shut out."""

    owner: str | None = None
    """The public half of the owner's key, 64 hexadecimal digits."""
    rule: AdmissionRule = AdmissionRule.OPEN
    """open: every holder of an invite gets a ticket from a bootstrap peer; invited: each invite is for one identity;
    listed: tickets are for peer ids that the owner names."""

    @property
    def owner_key(self) -> bytes | None:
        """The public half of the owner's key; None in a run without an owner."""
        return None if self.owner is None else bytes.fromhex(self.owner)


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that all peers of a run must agree on."""

    name: str = "run"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    precision: Literal["auto", "float32"] = "auto"
    """auto: bfloat16 autocast on a GPU that has it, float16 on an older one, float32 on a CPU."""
    model: ModelConfig
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    adapter: AdapterConfig = NO_ADAPTER
    admission: AdmissionConfig = AdmissionConfig()

    @property
    def keeps_best(self) -> bool:
        """Whether a peer keeps the weights of its best evaluation: in a pipeline no peer has those of a whole chain."""
        return self.data.evaluate_every_rounds > 0 and self.pipeline.stages == 1

    @property
    def samples_per_step(self) -> int:
        """Sequences in one inner step of one replica."""
        return self.pipeline.microbatch_size * self.pipeline.microbatches_per_step

    @property
    def batch(self) -> int:
        """Sequences in one inner step of all planned replicas of a stage."""
        return self.samples_per_step * self.pipeline.replicas

    @property
    def budget_samples(self) -> int:
        """Sequences of the whole run: progress 1."""
        return self.inner.steps * self.batch

    def tokens(self, samples: int) -> int:
        """Return the tokens of so many sequences."""
        return samples * self.pipeline.sequence_length

    @property
    def pinned(self) -> dict[str, str]:
        """The commits that pin the model and the tokenizer of the hub that the run names, by field."""
        model, data = self.model, self.data
        named = {
            "model.hub": None if model.hub is None else f"{model.hub}@{model.commit}",
            "data.tokenizer": None if data.tokenizer_commit is None else f"{data.tokenizer}@{data.tokenizer_commit}",
        }
        return {field: name for field, name in named.items() if name is not None}

    def local_paths(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that name files of this machine, but for the text, each with its path."""
        data = self.data
        if data.tokenizer_directory is not None:
            yield "data.tokenizer", data.tokenizer_directory
        on_hub = (
            ("model.hub", self.model.hub),
            *(("data.path", each.path) for each in data.sources if each.source == "hub"),
            ("data.tokenizer", None if data.tokenizer_commit is None else data.tokenizer),
        )
        for field, name in on_hub:
            if name is not None and os.path.exists(name):  # of any length, which those of Path are not
                yield field, name

    def summary(self, own_source: str | None = None) -> list[str]:
        """Say in a few lines what the run is, before anything is fetched for it.

        `own_source`: text that the owner of this machine names instead of the run's.
        """
        model, cut, data = self.model, self.pipeline, self.data
        size = format_bytes(sum(each.size_bytes for each in model.fetched))
        begin = f"from a checkpoint of {size}" if model.weights else "from its first step"
        here = "none is named here; a source names its own with --data"
        text = (data.text_name if data.is_public else here) if own_source is None else f"your own, {own_source}"
        tokenizer = "the checkpoint's own" if data.has_travelling_tokenizer else data.tokenizer
        where = "" if data.tokenizer_commit is None else " of the hub"
        named = f"{model.architecture}, {begin}" if model.architecture else f"from {model.hub} of the hub"
        adapters = (
            []
            if not self.adapter.is_trained
            else [f"trained: adapters of rank {self.adapter.rank} over the frozen model in {self.adapter.base}"]
        )
        planned = (
            f"run {short(self.name)!r}: {cut.stages} stage{'s' * (cut.stages > 1)}, "
            f"{cut.replicas} replica{'s' * (cut.replicas > 1)} planned of each, "
            f"{self.tokens(self.budget_samples):,} tokens to train on"
        )
        if model.is_foreign:
            numbers = sum(prod(shape) for shape in model.foreign_parameters.values())
            return [planned, f"model: a module of your own program, {numbers:,} trained numbers, {begin}"]
        return [
            planned,
            "model: " + short(named),
            *adapters,
            f"text: {short(text)}; tokenizer: {short(tokenizer)}{where}",
        ]
