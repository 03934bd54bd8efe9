"""Hugging Face directories: the export of a swarm's model, and `init --from DIR`, a run that goes on from one.

Parameters keep their transformers names in every stage, so joining stages is a union of dictionaries. The library
writes the files into a directory beside the target that is renamed at the end: the target is a complete checkpoint or
not there. `noloco.json` beside the weights says where they come from, the run file included.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from noloco_node.errors import Exit, UserError, config_error
from noloco_node.export.sources import NOTES, Provenance, check_target, run_of
from noloco_node.run.config import TOKENIZER_FILES, TRAVELLING, DataConfig, ModelConfig, RunConfig
from noloco_node.run.presets import numbers_of, written
from noloco_node.run.runfile import text_of
from noloco_node.storage.atomic_file import flush
from noloco_node.storage.weight_store import LARGEST_FILE_BYTES, described
from noloco_node.terminal import say
from pipeline.partition import skeleton


def quiet_unless_watched() -> None:
    """Keep the library's progress bars out of output that is not a terminal."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def write_checkpoint(
    directory: Path,
    config: Any,
    stages: Sequence[Mapping[str, Tensor]],
    tokenizer: Any,
    notes: Provenance,
    generation: GenerationConfig | None = None,
) -> None:
    """Write one Hugging Face directory from the weights of all stages.

    `config`: the prepared transformers config of the run. `generation`: of the model that the run continued. The files
    are loaded again and compared before they take their place. Raises ValueError if the stages are not the whole model,
    `UserError` if the target is not empty or the disk refuses.
    """
    whole = joined(config, stages)
    whole.config.use_cache = True
    whole.config.bos_token_id, whole.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    whole.generation_config = generation or GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    quiet_unless_watched()
    with _written_aside(directory) as aside:
        whole.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        (aside / NOTES).write_bytes(msgspec.json.format(msgspec.json.encode(notes), indent=2) + b"\n")
        del whole
        _compare(aside, stages)


def _compare(directory: Path, stages: Sequence[Mapping[str, Tensor]]) -> None:
    """Load the files as anybody would; raise `OSError` unless they are bit for bit what was to be written."""
    loaded = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    )
    found = loaded.state_dict()
    for stage in stages:
        for name, weight in stage.items():
            if name not in found or not torch.equal(found[name], weight.float()):
                raise OSError(f"{name} was read back from the disk as something else")


def joined(config: Any, stages: Sequence[Mapping[str, Tensor]]) -> Any:
    """Return the whole model with the stages' tensors, not copies; raise ValueError if they are not all of it."""
    weights: dict[str, Tensor] = {}
    for stage in stages:
        if twice := sorted(weights.keys() & stage.keys()):
            raise ValueError(f"two stages hold {', '.join(twice)}")
        weights |= stage
    whole = skeleton(copy.deepcopy(config))
    expected = {name: weight.shape for name, weight in whole.named_parameters()}
    if wrong := sorted(name for name in expected.keys() | weights.keys() if not _fits(name, expected, weights)):
        raise ValueError(f"the stages together are not the whole model: look at {', '.join(wrong)}")
    whole.load_state_dict(weights, strict=False, assign=True)
    return whole


def _fits(name: str, expected: Mapping[str, torch.Size], weights: Mapping[str, Tensor]) -> bool:
    return name in weights and name in expected and weights[name].shape == expected[name]


@contextmanager
def _written_aside(directory: Path) -> Iterator[Path]:
    """Yield an empty directory beside `directory` that takes its place, flushed, once all has gone well.

    What a killed export has left there is removed; an export at work keeps it locked.
    """
    check_target(directory)
    aside = directory.absolute().parent / f".{directory.name}.aside"
    try:
        lock = _lock(aside, directory)
        try:
            check_target(directory)
            for left in aside.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield aside
            _follow_umask(aside)
            for path in sorted(aside.rglob("*")):
                flush(path)
            flush(aside)
            os.rename(aside, directory)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            os.close(lock)
        flush(directory.absolute().parent)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The checkpoint cannot be written to {directory}.",
            why=str(error),
            hint="free some space, or choose another directory",
            code=Exit.STORAGE,
        ) from error


def _follow_umask(directory: Path) -> None:
    """Let whoever may read a new directory read its files too: the library makes some for their owner alone."""
    readers = directory.stat().st_mode & 0o666
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(readers)


def own_generation(model: ModelConfig, data: DataConfig) -> GenerationConfig | None:
    """Return how the model that a run continues writes text, None if it does not say. `data`: its tokenizer is here."""
    commit = model.commit
    if model.hub is None and not (model.weights and data.tokenizer_files):
        return None
    source = data.tokenizer if model.hub is None else model.hub
    try:
        found = GenerationConfig.from_pretrained(source, revision=commit, local_files_only=commit is None)
        found.validate(strict=True)
    except FileNotFoundError:
        return None
    except Exception as error:  # anybody may have written the file, and the library raises whatever comes of it
        say(f"the model's own generation_config.json is left out: {' '.join(str(error).split())[:200]}")
        return None
    return found


def _lock(aside: Path, directory: Path) -> int:
    """Lock a directory and return the descriptor that holds it; raise `UserError` if another process does."""
    while True:
        aside.mkdir(parents=True, exist_ok=True)
        lock = os.open(aside, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(
                f"Another export is writing {directory}.",
                why=f"it holds {aside}",
                hint="wait for it, or choose another --out",
                code=Exit.USAGE,
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(aside)):
                return lock
        os.close(lock)  # of a directory that its owner has just removed or renamed


_MODEL = """\
[model]
# The model of a checkpoint, and its files. They are no path: whoever has the checkpoint gives --weights DIR to
# noloco-node bootstrap, or to join, and the others fetch from there what their stage needs.
architecture = {architecture}
# Share of activations zeroed in training; 0 is best as long as no text is seen twice.
dropout = 0.0

[model.sizes]
{sizes}

{weights}
"""
OWN_TEXT = "your-text/"
"""Stands in a run file for a text that is still to be named."""
_NO_SIZE = {"architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version", "use_cache"}
"""Of a config: what says nothing of the model's shape, or is the run's to say."""


def continuing_text(directory: Path, preset: str) -> str:
    """Return the text of a run that goes on from the checkpoint in `directory`; raise `UserError` if it has none.

    Cut and sequences are those of the checkpoint's own run, else the preset's as far as the model has layers and
    positions; the learning rate is a tenth of the preset's. A checkpoint whose tokenizer is not ByT5's is read with its
    own. The files are read whole, for their digests.
    """
    directory = directory.expanduser().absolute()
    given, config, files = numbers_of(preset), _config_of(directory), weight_files(directory)
    from pipeline.model_config import longest_sequence  # which loads torch

    positions = longest_sequence(config) or given.sequence_length
    stages, length = min(given.stages, config.num_hidden_layers), min(given.sequence_length, positions)
    own_tokenizer: list[Path] = []
    before = run_of(directory) if (directory / NOTES).exists() else None
    if before is not None:
        stages, length = before.pipeline.stages, before.pipeline.sequence_length
    if before is None or before.data.tokenizer != "byt5":
        own_tokenizer = _tokenizer_files(directory, config.vocab_size)
    numbers = msgspec.structs.replace(
        given,
        about="going on from a finished model",
        stages=stages,
        microbatches=max(given.microbatches, 2 * stages),
        sequence_length=length,
        learning_rate=f"{float(given.learning_rate) / 10:g}",
    )
    model = _MODEL.format(
        architecture=_toml(config.model_type),
        sizes="\n".join(f"{name} = {_toml(value)}" for name, value in sizes_of(config).items()),
        weights=_sections("model.weights", files),
    )
    text = written(
        numbers,
        "continued",
        0,
        model=model,
        tokenizer=TRAVELLING if own_tokenizer else "byt5",
        tokenizer_files=_sections("data.tokenizer_files", own_tokenizer),
        data=_data_of(before),
    )
    if before is None:
        say(f'text: set [data] in the run file: it trains on "{OWN_TEXT}", which each source names with --data')
    else:
        say(f"text: as the run of this model had it: {text_of(before.data)}")
    _check(text, files)
    return text


def _data_of(before: RunConfig | None) -> dict[str, str]:
    """Return the text of the new run: that of the model's own run, else the owner's to name."""
    if before is None:
        return {"source": "text", "path": OWN_TEXT}
    fields = ("source", "path", "commit", "subset", "split", "field")
    return {name: value for name in fields if (value := getattr(before.data, name)) is not None}


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
            return [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_model(directory, f"{index.name} cannot be read: {error}") from error
    whole = directory / "model.safetensors"
    found = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not found:
        raise _no_model(directory, "it has no safetensors file")
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


def _sections(name: str, paths: list[Path]) -> str:
    return "\n\n".join(_section(name, path) for path in paths)


def _section(name: str, path: Path) -> str:
    try:
        file = described(path)
    except OSError as error:
        raise _no_model(path.parent, str(error)) from error
    if file.size_bytes > LARGEST_FILE_BYTES:
        why = f"{path.name} is larger than {LARGEST_FILE_BYTES // 2**30} GiB"
        raise config_error(f"{path.parent} cannot travel.", why, "save it in shards of 5 GB, as transformers does")
    lines = (f"{field} = {_toml(value)}" for field, value in msgspec.structs.asdict(file).items())
    return "\n".join((f"[[{name}]]", *lines))


def _check(text: str, files: list[Path]) -> None:
    """Raise `UserError` where the files do not hold the model that the run file describes."""
    from noloco_node.planning.checkpoint_map import check_files
    from noloco_node.planning.model_layout import model_layout
    from noloco_node.run.runfile import decode_run

    layout = model_layout(decode_run(text, "the new run file"))
    check_files(layout.prepared, layout.shapes, files)
    for note in layout.notes:
        say(note)


def _toml(value: Any) -> str:
    """Return a value of JSON in TOML, in a line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _config_of(directory: Path) -> Any:
    if not (directory / "config.json").is_file():
        raise _no_model(directory, "it has no config.json")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = str(error).partition("\n")[0]
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
