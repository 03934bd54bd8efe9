"""The run file of a run that goes on from a Hugging Face directory (`init --from DIR`); torch is not loaded for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from noloco_node.errors import UserError, config_error, one_line
from noloco_node.export.sources import NOTES, is_adapter, run_of
from noloco_node.run.config import TOKENIZER_FILES, TRAVELLING, DataConfig, RunConfig, SourceConfig
from noloco_node.run.fields import toml
from noloco_node.run.presets import Preset, numbers_of, with_fields, written
from noloco_node.storage.home import typed
from noloco_node.storage.weight_store import LARGEST_FILE_BYTES, described
from noloco_node.terminal import say
from pipeline.adapters.settings import NO_ADAPTER, AdapterConfig

_MODEL = """\
[model]
# The model of a checkpoint, and its files. The owner of the checkpoint gives --weights DIR to noloco-node bootstrap,
# or to join, and the other nodes fetch the part of their stage. Where frozen_files are listed, nodes fetch these, and
# DIR is the directory that holds them.
architecture = {architecture}
# Share of activations zeroed in training; 0 is best as long as no text is seen twice.
dropout = 0.0

[model.sizes]
{sizes}

{weights}
"""
OWN_TEXT = "your-text/"  # stands in a run file for a text that each source names
_SEQUENCES = 128
"""Of an inner step of all peers at most, unless many stages need longer windows: the text that a finished model goes on
with is short beside that of a preset."""
_NO_SIZE = {"architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version", "use_cache"}
"""Fields of a config that do not shape the model, or that the run decides."""


def continuing_text(directory: Path, preset: str, adapter: AdapterConfig = NO_ADAPTER) -> str:
    """Return the text of a run that goes on from the checkpoint in `directory`; raise `UserError` if it has none.

    Cut and sequences are those of the checkpoint's own run, else the preset's as far as the model has layers and
    positions; the batch is small, and the learning rate a tenth of the preset's. A checkpoint whose tokenizer is not
    ByT5's is read with its own. The files are read whole, for their digests. A run of adapters has the preset's
    learning rate, and one stage: their rounds take few bytes, and between stages each token would take many.
    """
    directory = typed(directory).absolute()
    given, config, files = numbers_of(preset), _config_of(directory), weight_files(directory)
    from pipeline.model_config import longest_sequence  # which loads torch

    positions = longest_sequence(config) or given["sequence_length"]
    stages, length = max(1, min(given["stages"], config.num_hidden_layers)), min(given["sequence_length"], positions)
    own_tokenizer: list[Path] = []
    before = run_of(directory) if (directory / NOTES).exists() else None
    if before is not None:
        stages, length = before.pipeline.stages, before.pipeline.sequence_length
    if before is None or not before.data.has_byte_tokenizer:
        own_tokenizer = _tokenizer_files(directory, config.vocab_size)
    numbers = _numbers(given, 1 if adapter.is_trained else stages, length, slower=1 if adapter.is_trained else 10)
    try:
        sizes = "\n".join(f"{name} = {toml(value)}" for name, value in sizes_of(config).items())
    except TypeError as error:
        raise _no_model(directory, f"its config.json cannot be written into a run file: {error}") from error
    model = _MODEL.format(
        architecture=toml(config.model_type),
        sizes=sizes,
        weights="\n\n".join(sections("model.weights", files)),
    )
    text = written(
        numbers,
        "continued",
        0,
        model=model,
        tokenizer=TRAVELLING if own_tokenizer else "byt5",
        data_sections="\n\n".join((*_mixture(before), *sections("data.tokenizer_files", own_tokenizer))),
        data=_data_of(before),
    )
    if adapter.is_trained:
        fields = {name: toml(each) for name, each in asdict(adapter).items()}
        text = with_fields(text, {"adapter": fields})
    if before is None:
        say(f'text: set [data] in the run file: it trains on "{OWN_TEXT}", which each source names with --data')
    else:
        say(f"text: as the run of this model had it: {before.data.text_name}")
    _check(text, files)
    return text


def _numbers(given: Preset, stages: int, length: int, *, slower: float) -> Preset:
    """Return a preset's numbers for another cut, shorter sequences and a small batch, learning so many times slower."""
    window = min(given["microbatches_per_step"], _SEQUENCES // (given["replicas"] * given["microbatch_size"]))
    return given | {
        "about": "going on from a finished model",
        "stages": stages,
        "microbatches_per_step": max(2 * stages, window),
        "sequence_length": length,
        "learning_rate": f"{float(given['learning_rate']) / slower:g}",
    }


def _data_of(before: RunConfig | None) -> dict[str, object]:
    """Return the text of the new run: that of the model's own run, held out and evaluated on as there, else the
    owner's to name."""
    if before is None:
        return {"source": "text", "path": OWN_TEXT}
    own = ("validation_percent", "evaluate_every_rounds", "chat_template", "packed", "shuffle")
    fields = (*SourceConfig.__struct_fields__, *own)
    return {name: value for name in fields if (value := getattr(before.data, name)) is not None}


def _mixture(before: RunConfig | None) -> Iterator[str]:
    """Yield a section of each source of the mixture on which the model's own run trained."""
    for source in before.data.mixture if before is not None else ():
        given = msgspec.structs.asdict(source).items()
        yield "\n".join(("[[data.mixture]]", *(f"{name} = {toml(each)}" for name, each in given if each is not None)))


def sizes_of(config: Any) -> dict[str, Any]:
    """Return the fields of a config that shape its model, for a run file."""
    from pipeline.model_config import UNSET, dropout_fields

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return UNSET if value is None else value

    default = type(config)()
    known = {*vars(default), "head_dim"} - _NO_SIZE - set(dropout_fields(default))
    return {name: plain(value) for name, value in config.to_diff_dict().items() if name in known and name[0] != "_"}


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint; raise `UserError` (CONFIG) if there are none."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            if (odd := next((each for each in names if Path(each).name != each), None)) is not None:
                raise ValueError(f"{odd} is no file beside it")  # files travel without directories
            found = [directory / name for name in names]
        else:
            whole = directory / "model.safetensors"
            found = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    except (KeyError, TypeError, AttributeError) as error:
        raise _no_model(directory, f"{index.name} has no table weight_map of tensors and their files") from error
    except (OSError, RecursionError, ValueError) as error:
        raise _no_model(directory, f"{index.name} cannot be read: {error}") from error
    if not found:
        raise _no_model(directory, "it has no safetensors file")
    if (lost := next((each for each in found if not each.is_file()), None)) is not None:
        raise _no_model(directory, f"{lost.name} is not there, or is no file")
    if (empty := next((each for each in found if not each.stat().st_size), None)) is not None:
        raise _no_model(directory, f"{empty.name} is empty")
    return found


def _tokenizer_files(directory: Path, vocabulary: int) -> list[Path]:
    """Return the files of a checkpoint's tokenizer; raise `UserError` (CONFIG) if they do not make one that fits."""
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if {each.name for each in files} <= {"config.json", "generation_config.json"}:
        raise _no_model(directory, "it has no tokenizer: no tokenizer.json, nor another file of one")
    from noloco_node.data.encoding import check_vocabulary, open_encoder

    with TemporaryDirectory() as place:
        for each in files:
            shutil.copy(each, place)
        data = DataConfig(tokenizer=place)
        try:
            open_encoder(data)
            check_vocabulary(data, vocabulary)
        except UserError as error:
            why = error.why.replace(place, str(directory))
            raise _no_model(directory, f"its tokenizer cannot be used: {why}") from error
    return files


def sections(name: str, paths: Iterable[Path]) -> Iterator[str]:
    """Yield the section of a run file for each of these files, which are read whole for their digests."""
    for path in paths:
        try:
            file = described(path)
        except OSError as error:
            raise _no_model(path.parent, str(error)) from error
        if file.size_bytes > LARGEST_FILE_BYTES:
            why = f"{path.name} is larger than {LARGEST_FILE_BYTES // 2**30} GiB"
            raise config_error(f"{path.parent} cannot travel.", why, "save it in shards of 5 GB, as transformers does")
        lines = (f"{field} = {toml(value)}" for field, value in msgspec.structs.asdict(file).items())
        yield "\n".join((f"[[{name}]]", *lines))


def _check(text: str, files: list[Path]) -> None:
    """Raise `UserError` where the files do not hold the model that the run file describes."""
    from noloco_node.planning.checkpoint_map import check_files
    from noloco_node.planning.model_layout import model_layout
    from noloco_node.run.runfile import decode_run

    layout = model_layout(decode_run(text, "the new run file"))
    if left_out := check_files(layout.prepared, layout.checkpoint, files):
        more = f" and {len(left_out) - 2} more" if len(left_out) > 2 else ""
        names = f"{', '.join(left_out[:2])}{more}"
        say(f"warning: the model that config.json describes has no place for {names}: left out")
    for note in layout.notes:
        say(note)


def _config_of(directory: Path) -> Any:
    if is_adapter(directory):
        raise config_error(
            f"{directory} holds an adapter, and no model to go on from.",
            why="a run starts from the weights of a whole model",
            hint="noloco-node export --merge writes one; so does merge_and_unload of PEFT",
        )
    if not (directory / "config.json").is_file():
        raise _no_model(directory, "it has no config.json")
    from noloco_node.planning.model_layout import published_config

    try:
        config = published_config(directory, local_files_only=True)
    except Exception as error:  # what a wrong file makes transformers raise has no common type
        first, *more = str(error).splitlines() or [""]
        why = one_line(f"{first} {more[0]}" if more and first.endswith(":") else first or error)
        raise _no_model(directory, f"its config.json is none that transformers knows: {why}") from error
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise _no_model(directory, f"a {config.model_type} model has no list of layers")
    if getattr(config, "quantization_config", None) is not None:
        raise _no_model(directory, "its weights are quantised")
    return config


def _no_model(directory: Path, why: str) -> UserError:
    return config_error(
        f"{directory} holds no model to go on from.",
        why=why,
        hint="a Hugging Face directory with safetensors files, such as noloco-node export writes",
    )
