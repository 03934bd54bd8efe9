"""Run files to start from: one commented text, filled in for four sizes and for the demo.

`tiny` trains on a laptop in minutes. `125m`, `1b` and `7b` have the sizes, learning rates and outer steps of the NoLoCo
paper (arXiv 2506.10911), in the Llama family; their batches are smaller than the paper's, so that a peer is one
accelerator. All of them read the standard library of Python as bytes, because that needs no network: whoever means it
puts a data set and a tokenizer of the hub in their place.

The text is written by hand and not generated from the structs: a run file is the first page of the manual.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from noloco_node.errors import Exit, UserError


class PresetNumbers(NamedTuple):
    """What differs from preset to preset."""

    about: str
    hidden: int
    layers: int
    feed_forward: int
    heads: int
    initial: str
    stages: int
    replicas: int
    sequence_length: int
    microbatch_size: int
    microbatches: int
    wire_dtype: str
    steps: int
    learning_rate: str
    warmup: int
    beta2: str
    per_round: int
    late_per_round: int
    overlap: int


_PRESETS: dict[str, PresetNumbers] = {
    "tiny": PresetNumbers(
        about="0.75 million parameters: for a laptop, a few minutes",
        hidden=128,
        layers=4,
        feed_forward=256,
        heads=4,
        initial="0.09",
        stages=2,
        replicas=2,
        sequence_length=128,
        microbatch_size=8,
        microbatches=4,
        wire_dtype="float32",
        steps=400,
        learning_rate="4e-3",
        warmup=20,
        beta2="0.95",
        per_round=4,
        late_per_round=16,
        overlap=3,
    ),
    "125m": PresetNumbers(
        about='113 million parameters beside the vocabulary: "small" in the paper',
        hidden=768,
        layers=12,
        feed_forward=3072,
        heads=12,
        initial="0.02",
        stages=2,
        replicas=8,
        sequence_length=1024,
        microbatch_size=2,
        microbatches=8,
        wire_dtype="bfloat16",
        steps=25_000,
        learning_rate="6e-4",
        warmup=1000,
        beta2="0.999",
        per_round=10,
        late_per_round=50,
        overlap=8,
    ),
    "1b": PresetNumbers(
        about='1.6 billion parameters beside the vocabulary: "medium" in the paper',
        hidden=2048,
        layers=24,
        feed_forward=8192,
        heads=32,
        initial="0.02",
        stages=4,
        replicas=16,
        sequence_length=1024,
        microbatch_size=1,
        microbatches=8,
        wire_dtype="bfloat16",
        steps=25_000,
        learning_rate="2e-4",
        warmup=1000,
        beta2="0.999",
        per_round=10,
        late_per_round=50,
        overlap=8,
    ),
    "7b": PresetNumbers(
        about='8.6 billion parameters beside the vocabulary: "large" in the paper',
        hidden=4096,
        layers=32,
        feed_forward=16_384,
        heads=32,
        initial="0.02",
        stages=4,
        replicas=16,
        sequence_length=1024,
        microbatch_size=1,
        microbatches=8,
        wire_dtype="bfloat16",
        steps=25_000,
        learning_rate="1.2e-4",
        warmup=1000,
        beta2="0.999",
        per_round=10,
        late_per_round=50,
        overlap=8,
    ),
}


PRESETS = tuple(_PRESETS)


def run_text(preset: str, *, name: str | None = None, seed: int = 0) -> str:
    """Return the text of a run file, every field of it explained by a comment; raise `UserError` for another preset."""
    return written(numbers_of(preset), name or preset, seed)


def numbers_of(preset: str) -> PresetNumbers:
    """Return what a preset is made of; raise `UserError` for another one."""
    if preset not in _PRESETS:
        raise UserError(
            f"There is no preset {preset!r}.",
            why="a preset is the size of a model",
            attempt=f"one of {', '.join(PRESETS)}",
            code=Exit.USAGE,
        )
    return _PRESETS[preset]


def write_run_file(path: Path, preset: str, *, overwrite: bool) -> None:
    """Write a preset's run file to `path`; raise `UserError` if there is no such preset or a file is in the way."""
    write_text(path, run_text(preset), overwrite=overwrite)


def write_text(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a run file's text to `path`; raise `UserError` if a file is in the way."""
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(
            f"{path} is there already.",
            why="a run file may be all that is left of a run, so it is not overwritten unasked",
            attempt="another path, or --force",
            code=Exit.USAGE,
        ) from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be written.",
            why=error.strerror or str(error),
            attempt="a path in a directory that exists and is yours",
            code=Exit.STORAGE,
        ) from error


def demo_run_text(*, stages: int, replicas: int, steps: int, seed: int) -> str:
    """Return the run file of a demo: the tiny model over so many stages and replicas, for so many inner steps.

    The model grows a layer for each stage beyond four. In a short demo the rounds are closer together.
    """
    per_round = max(2, min(_PRESETS["tiny"].per_round, steps // 10))
    numbers = _PRESETS["tiny"]._replace(
        about="a demo",
        layers=max(_PRESETS["tiny"].layers, stages),
        stages=stages,
        replicas=replicas,
        microbatches=max(_PRESETS["tiny"].microbatches, 2 * stages),
        steps=steps,
        warmup=min(20, steps // 10),
        per_round=per_round,
        late_per_round=4 * per_round,
        overlap=per_round - 1,
    )
    return written(numbers, "demo", seed)


def written(n: PresetNumbers, name: str, seed: int, *, model: str | None = None, tokenizer: str = '"byt5"') -> str:
    """Return the text of a run file. `model`: another section [model]; `tokenizer`: another one, quoted."""
    data = _DATA.replace('tokenizer = "byt5"', f"tokenizer = {tokenizer}", 1)
    parts = [_title(n, name, seed), _model(n) if model is None else model]
    return "\n".join([*parts, _pipeline(n), data, _inner(n), _outer(n)])


def _title(n: PresetNumbers, name: str, seed: int) -> str:
    return f'''\
# A run of noloco-node: {n.about}.
#
# All peers of a run hold the same file. Its content (comments apart) is hashed into the run's id: whoever changes a
# value starts another run. `noloco-node check FILE` says what it means: memory, traffic, token budget, efficiency.

# A label for people.
name = "{name}"
# Initial weights, partners and the order of the data follow from the seed.
seed = {seed}
# "auto": bfloat16 arithmetic on GPUs that have it, float32 on CPUs. "float32": float32 everywhere.
# The weights themselves are float32 always.
precision = "auto"
'''


def _model(n: PresetNumbers) -> str:
    return f"""\
[model]
# A decoder of transformers, by its model type ("llama", "gpt2", "qwen2", ...), trained from scratch. To continue from a
# finished model, remove `architecture` and [model.sizes] and give `path` (a local Hugging Face directory) or `hub`
# (owner/name) together with `commit` (40 hexadecimal digits).
architecture = "llama"
# Share of activations zeroed in training; 0 is best as long as no text is seen twice.
dropout = 0.0

[model.sizes]
# Fields of the architecture's config in transformers, under the names that it uses there.
hidden_size = {n.hidden}
num_hidden_layers = {n.layers}
# Width of the feed-forward part.
intermediate_size = {n.feed_forward}
num_attention_heads = {n.heads}
# Heads of keys and values; fewer than attention heads is grouped-query attention.
num_key_value_heads = {n.heads}
# Standard deviation of the initial weights. Narrow models want it large, about 1 / sqrt(hidden_size).
initializer_range = {n.initial}
# At least the tokenizer's: 384 for bytes.
vocab_size = 384
# At least the sequence length.
max_position_embeddings = {n.sequence_length}
# First and last stage hold separate copies of an input embedding and a head that are tied: they train apart anyway.
tie_word_embeddings = false
"""


def _pipeline(n: PresetNumbers) -> str:
    return f'''\
[pipeline]
# The layers are cut into this many stages; a peer holds one of them.
stages = {n.stages}
# Where to cut: the number of the first layer of every stage but the first, for example [2, 4] for three stages.
# Left out, stages get equal work, the vocabulary head included.
# boundaries = []
# Planned peers for each stage. More or fewer may come; with inner.steps it fixes how many tokens the run trains on.
replicas = {n.replicas}
# Tokens in a sequence.
sequence_length = {n.sequence_length}
# Sequences that travel together through the stages.
microbatch_size = {n.microbatch_size}
# Microbatches in one inner step of one peer (its window). At least twice the stages keeps everybody busy; a peer keeps
# the activations of a whole window in memory. (The paper trains on 0.5 to 2 million tokens a step, all peers together.)
microbatches_per_step = {n.microbatches}
# Windows a peer works on at a time. 1 is exact: no gradient ever meets weights other than those it was computed with.
windows_in_flight = 1
# Number format of activations and gradients on the way between stages: "float32", or "bfloat16" for half the traffic.
wire_dtype = "{n.wire_dtype}"
# Seconds that a microbatch may travel before everybody forgets it.
budget_s = 300.0
'''


_DATA = """\
[data]
# "stdlib": the source text of Python's own standard library, which needs no network. (It differs a little between
# minor versions of Python.) "text": whole documents; "json": JSON Lines; "parquet"; each with `path`. "hub": a data set
# on the Hugging Face hub with path = "owner/name", `commit`, and `subset` where it has any; streamed, not stored.
# A peer may choose another source for itself: noloco-node join --data SRC.
source = "stdlib"
# A file, a directory or a glob for text, json and parquet; owner/name for hub.
# path = "books/*.txt"
# The commit of the hub data set, 40 hexadecimal digits, and its subset (for c4, "en").
# commit = "0123456789abcdef0123456789abcdef01234567"
# subset = "en"
# The split of the hub data set.
split = "train"
# The column (parquet, hub) or key (json) that holds the text.
field = "text"
# "byt5": bytes, needs no files. Or a local directory with a tokenizer, or owner/name on the hub with tokenizer_commit.
# The model's vocab_size must not be smaller than the tokenizer's vocabulary.
tokenizer = "byt5"
# tokenizer_commit = "0123456789abcdef0123456789abcdef01234567"
# Held out from training and used by noloco-node evaluate, chosen by a hash of each document.
validation_percent = 2.0
# Each peer reads the documents in a random order of its own; false: in their order, from a place of its own.
shuffle = true
"""


def _inner(n: PresetNumbers) -> str:
    return f"""\
[inner]
# The optimiser inside a peer between two meetings: AdamW.
# Inner steps of a peer of the first stage, when as many peers come as planned.
steps = {n.steps}
# Highest learning rate; it warms up linearly, then falls along a cosine to final_fraction of it.
learning_rate = {n.learning_rate}
warmup_steps = {n.warmup}
final_fraction = 0.1
# Memory of the mean gradient and of its square, and the term that keeps the division finite.
beta1 = 0.9
beta2 = {n.beta2}
epsilon = 1e-8
# Pull of the weight matrices towards zero, per step and learning rate.
weight_decay = 0.0
# A stage's gradient is shortened to this length where it is longer.
clip_norm = 1.0
"""


def _outer(n: PresetNumbers) -> str:
    return f"""\
[outer]
# Gossip: after this many inner steps a peer meets one random peer of its own stage, and both move towards their mean.
inner_steps_per_round = {n.per_round}
# The same at the end of the run: from one to the other in equal proportions. Peers drift apart most while the learning
# rate is high, so rounds become rarer later, which saves traffic. Left out, it stays as it is.
late_inner_steps_per_round = {n.late_per_round}
# true: a slower peer takes fewer inner steps a round, in proportion to its speed (Asynchronous Local-SGD), so that all
# replicas of a stage reach their rounds together. Among equals it changes nothing.
dynamic_steps = true
# The outer step: momentum, length along the pair's mean progress, and pull of the pair together. 0, 1 and 1 is the
# plain mean of the two, chosen for frequent rounds by small trials, mostly on one seed (docs/results.md, "The
# laboratory"); the NoLoCo paper has 0.5, 0.7 and 0.7 with a round every 50 steps. Many peers stay together only for
# 0 < gamma < 2 (1 - alpha^2). gamma equal to beta halves the traffic: then only one copy of the weights travels.
alpha = 0.0
beta = 1.0
gamma = 1.0
# The momentum moves once in this many outer steps, for contributions of different age; 1 moves it in every step. The
# others of a period each apply a share of it, from 0 to 1 / momentum_period.
momentum_period = 1
momentum_spread = 0.0
# Number format of the weights that travel in a round: "float32", "bfloat16" (half the traffic), "int8" (a quarter), or
# "int4" (an eighth). What rounding leaves out is carried over to the next round.
codec = "int4"
# A peer that has met nobody for more rounds than this no longer counts in a mean: it takes its partner's weights.
staleness_at_most = 16
# false: training goes on until the partner is there, and during the exchange. true: the paper's form, stop first.
blocking = false
# A copy of the weights older than this many inner steps is taken anew while the partner is awaited.
overlap_steps = {n.overlap}
# Rounds in a row without any partner after which a peer takes an outer step alone.
deferrals_before_solo = 4
"""
