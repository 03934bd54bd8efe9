"""What all cells train: a Llama of 0.4 million parameters on the source text of Python's standard library, as bytes.

A cell of the small scale trains one of 0.09 million on shorter sequences, a tenth of the work; one of the tiny scale
trains 0.03 million. Adapters are trained over a frozen one of 0.14 million. The text may also be the Python sources of
torch: there wherever this runs, disjoint from the library, and no choice was made on it. Under conditions, and for
adapters, it may be the prose of Python's reference, as pydoc keeps it.

Everything is the production's: the text and its held-out part, the model, its cut into stages, the inner optimiser and
its schedule over the progress of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from pathlib import Path
from pydoc_data import topics
from typing import ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from gossip.settings import Format, OuterConfig
from noloco_node.data.blocks import SMALLEST_PIECE_BYTES, Blocks, MixedBlocks, open_blocks, shuffled
from noloco_node.data.encoding import open_encoder
from noloco_node.data.file_documents import FileDocuments, ReadingOrder, TextRange, pieces_of, stdlib_files
from noloco_node.data.held_out_text import HeldOutText, text_loss
from noloco_node.planning.model_layout import ModelLayout, make_stage
from noloco_node.run.config import DataConfig, ModelConfig, PipelineConfig, RunConfig
from pipeline.adapters.settings import NO_ADAPTER, AdapterConfig
from pipeline.inner_step import InnerConfig
from pipeline.stage import Stage
from research.laboratory.experiments.cell import Cell, Corpus, Prose, Scale

WIDTH, LAYERS = 96, 3
SEQUENCE_LENGTH = 96
SEQUENCES_PER_STEP = 8
WARMUP_SHARE = 0.05
VALIDATION_BATCHES = 4
"""Of 32 sequences each."""
PARTS = 32
"""Of all held-out text, which follow on each other: they say how far a loss is uncertain by the text."""
CPU = torch.device("cpu")


class Dimensions(NamedTuple):
    """What a scale decides. `sequence_length` in bytes of text."""

    width: int
    layers: int
    intermediate: int
    heads: int
    sequence_length: int
    sequences_per_step: int


SMALL = Dimensions(width=48, layers=2, intermediate=128, heads=2, sequence_length=64, sequences_per_step=4)
TINY = SMALL._replace(width=32, layers=1, intermediate=64)
ADAPTED = SMALL._replace(width=64, intermediate=160)
HELD_OUT_PERCENT = {("library", "tiny"): 0.6, ("library", "adapted"): 0.6, ("torch", "adapted"): 0.15}
"""Of a text, where all of it is scored at the end of a run."""


def dimensions(cell: Cell) -> Dimensions:
    """Return the sizes of a cell's model."""
    full = Dimensions(WIDTH, LAYERS, 256, 4, SEQUENCE_LENGTH, SEQUENCES_PER_STEP)
    return {"full": full, "small": SMALL, "tiny": TINY, "adapted": ADAPTED}[cell.scale]


def source(text: Corpus | Prose, scale: Scale = "full") -> DataConfig:
    """Return where a text comes from, with its held-out part."""
    percent = HELD_OUT_PERCENT.get((text, scale), 2.0)
    if text == "library":
        return DataConfig(validation_percent=percent)
    if text == "prose":
        return DataConfig(source="text", path=topics.__file__, validation_percent=8.0)
    modules = Path(torch.__file__).parent / "**" / "*.py"
    return DataConfig(source="text", path=str(modules), validation_percent=percent)


def run_of(cell: Cell) -> RunConfig:
    """Return the run file of a cell."""
    stages, size = 1 if cell.routing is None else 2, dimensions(cell)
    sizes = {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.intermediate,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "initializer_range": 0.1,
        "vocab_size": 384,
        "max_position_embeddings": size.sequence_length,
        "tie_word_embeddings": False,
    }
    return RunConfig(
        seed=cell.seed,
        model=ModelConfig(architecture="llama", sizes=sizes),
        pipeline=PipelineConfig(
            stages=stages,
            replicas=cell.replicas,
            sequence_length=size.sequence_length,
            microbatch_size=cell.batch * size.sequences_per_step // stages,
            microbatches_per_step=stages,
            codec="float32",
        ),
        data=source(cell.text, cell.scale),
        inner=InnerConfig(
            steps=cell.steps,
            learning_rate=cell.learning_rate,
            warmup_steps=round(WARMUP_SHARE * cell.steps),
            beta1=0.8 if cell.optimiser == "adamw_08" else 0.9,
            beta2=0.99,
        ),
        outer=_outer(cell),
        adapter=_adapter(cell),
    )


def _adapter(cell: Cell) -> AdapterConfig:
    if cell.adapters is None:
        return NO_ADAPTER
    rank, frozen = cell.adapters.rank, cell.adapters.trained == "b"
    return AdapterConfig(rank=rank, alpha=2.0 * rank, freeze_a=frozen, base="float32")


def _outer(cell: Cell) -> OuterConfig:
    """Return the section `outer` that the rounds of the production read; other methods do not look at it."""
    rule, shortest = cell.rule, min(cell.inner_steps, cell.late_inner_steps or cell.inner_steps)
    return OuterConfig(
        inner_steps_per_round=cell.inner_steps,
        late_inner_steps_per_round=cell.late_inner_steps,
        dynamic_steps=cell.dynamic,
        weigh_by_steps=cell.weighed,
        alpha=rule.alpha,
        beta=rule.beta,
        gamma=rule.gamma,
        momentum_period=rule.period,
        momentum_spread=rule.spread,
        # Some methods have codecs that the production has not; they read the cell.
        codec=Format(cell.codec) if cell.codec in list(Format) else Format.FLOAT32,
        overlap_steps=max(1, min(8, shortest)),
    )


class PublishedAdamW(InnerConfig):
    """AdamW as published, without Nesterov's momentum, as in the records."""

    nesterov: ClassVar[bool] = False


def as_published(run: RunConfig) -> RunConfig:
    """Return the run with steps of AdamW as published, and not as in production."""
    return msgspec.structs.replace(run, inner=PublishedAdamW(**asdict(run.inner)))


def open_stages(run: RunConfig, plan: ModelLayout, *, nesterov: bool = False) -> list[Stage]:
    """Return a fresh set of all stages, with the weights of the run's seed.

    Without `nesterov` they step as `as_published`.
    """
    run = run if nesterov else as_published(run)
    return [make_stage(run, plan, number, CPU) for number in range(run.pipeline.stages)]


class Text:
    """The training text of one replica: the blocks that a peer of this name would draw.

    `shards`: parts of the library's text, of which this is one, where each is drawn from alone. They are cut in the
    order of file names, into as many bytes each: packages stay together, so that parts are unlike.
    """

    def __init__(self, run: RunConfig, number: int, shards: int = 1) -> None:
        peer = f"replica {number}"
        length = run.pipeline.sequence_length
        if shards > 1:
            documents = FileDocuments(shard(number, shards), ReadingOrder("train", run.seed, peer, True), 2.0)
            blocks: Blocks | MixedBlocks = Blocks(documents, open_encoder(run.data), length, f"shard {number}")
        else:
            blocks = open_blocks(run.data, length, run.seed, peer)
        self._blocks = shuffled(blocks, length, run.seed, peer)
        self._batch = run.pipeline.microbatch_size
        self.drawn = 0
        """Microbatches."""

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next microbatch, int64 [batch, sequence]."""
        block = self._blocks.next_batch(self._batch)
        self.drawn += 1
        return block[:, :-1], block[:, 1:]


class SharedText(Text):
    """The training text of one replica, drawn once for all runs of a process that have the same."""

    def __init__(self, run: RunConfig, number: int) -> None:
        self._text, self._batches = _opened(run, number)
        self.drawn = 0
        """Microbatches."""

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next microbatch, int64 [batch, sequence]."""
        if self.drawn == len(self._batches):
            self._batches.append(self._text.draw())
        self.drawn += 1
        return self._batches[self.drawn - 1]


_OPEN: dict[tuple[bytes, int], tuple[Text, list[tuple[Tensor, Tensor]]]] = {}


def _opened(run: RunConfig, number: int) -> tuple[Text, list[tuple[Tensor, Tensor]]]:
    """Return the text of a replica and what was drawn of it, of the latest seed alone."""
    key = msgspec.json.encode((run.data, run.seed, run.pipeline.microbatch_size, run.pipeline.sequence_length))
    if any(other != key for other, _ in _OPEN):
        _OPEN.clear()
    if (key, number) not in _OPEN:
        _OPEN[key, number] = (Text(run, number), [])
    return _OPEN[key, number]


def shard(number: int, shards: int) -> list[TextRange]:
    """Return the pieces of one of so many parts of the library's text, alike in bytes."""
    pieces = pieces_of(stdlib_files(), SMALLEST_PIECE_BYTES)
    size, before, found = sum(piece.end - piece.start for piece in pieces), 0, []
    for piece in pieces:
        if before * shards // size == number:
            found.append(piece)
        before += piece.end - piece.start
    return found


@lru_cache(maxsize=1)
def validation_text(text: Corpus | Prose, sequence_length: int) -> tuple[Tensor, ...]:
    """Return held-out batches, the same for every cell of a text, int64 [32, sequence + 1]."""
    every = list(islice(_held_out(source(text), sequence_length), 24))
    return tuple(every[:: len(every) // VALIDATION_BATCHES][:VALIDATION_BATCHES])


@lru_cache(maxsize=1)
def whole_text(text: Corpus | Prose, scale: Scale, sequence_length: int) -> tuple[Tensor, ...]:
    """Return all of the held-out text in `PARTS` parts, int64 [rows, sequence + 1]."""
    rows = torch.cat(list(_held_out(source(text, scale), sequence_length)))
    return torch.tensor_split(rows, PARTS)


def _held_out(data: DataConfig, sequence_length: int) -> Iterator[Tensor]:
    with closing(open_blocks(data, sequence_length, 0, "", "validation")) as blocks:
        yield from blocks.batches(32)


def loss_of(cell: Cell, stages: Sequence[Stage]) -> float:
    """Return the loss of a cell's whole model on a sample of its held-out text, nats a token."""
    return _loss(stages, validation_text(cell.text, dimensions(cell).sequence_length))


def losses_of(cell: Cell, stages: Sequence[Stage]) -> tuple[float, ...]:
    """Return the losses of a cell's whole model on the parts of all of its held-out text."""
    return tuple(_loss(stages, [part]) for part in whole_text(cell.text, cell.scale, dimensions(cell).sequence_length))


def _loss(stages: Sequence[Stage], batches: Sequence[Tensor]) -> float:
    def model(ids: Tensor) -> Tensor:
        hidden = ids
        for stage in stages:
            hidden = stage.infer(hidden)
        return hidden

    rows = sum(map(len, batches))
    return text_loss(model, HeldOutText(list(batches), [""] * rows, rows, True)).mean
