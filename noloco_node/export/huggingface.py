"""The Hugging Face directory that an export writes.

Parameters keep their transformers names in every stage, so joining stages is a union of dictionaries. The library
writes the files into a directory beside the target that is renamed at the end: the target is a complete checkpoint or
not there. `noloco.json` beside the weights says where they come from, the run file included; README.md says it to
people (`noloco_node.export.model_card`).
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from noloco_node.errors import one_line, reason_of, storage_error
from noloco_node.export.model_card import CARD, CURVE, Library, held_out_curve, model_card
from noloco_node.export.sources import ADAPTER_CONFIG, NOTES, Provenance, check_target
from noloco_node.run.config import DataConfig, ModelConfig
from noloco_node.storage.atomic_file import flush, locked_aside
from noloco_node.tasks import check_wanted
from noloco_node.terminal import say
from pipeline.partition import skeleton

PARAMETERS = "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # PEFT's name of the file


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
        _save_tokenizer(tokenizer, aside)
        _write_notes(aside, notes, Library.TRANSFORMERS)
        del whole
        _compare(aside, stages)


def write_parameters(directory: Path, parameters: Mapping[str, Tensor], notes: Provenance) -> None:
    """Write the parameters of a foreign module by name, and the notes, in place of `directory` or not at all.

    Raises `UserError` if the target is not empty or the disk refuses.
    """
    with _written_aside(directory) as aside:
        _write_tensors(aside / PARAMETERS, parameters)
        _write_notes(aside, notes, Library.TORCH)


def write_adapter(
    directory: Path, settings: Mapping[str, object], weights: Mapping[str, Tensor], tokenizer: Any, notes: Provenance
) -> None:
    """Write one directory of PEFT from the adapters of all stages, as `write_checkpoint` does.

    `settings`: what its adapter_config.json says.
    """
    with _written_aside(directory) as aside:
        (aside / ADAPTER_CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n")
        _write_tensors(
            aside / ADAPTER_WEIGHTS, {f"base_model.model.{name}": weight for name, weight in weights.items()}
        )
        _save_tokenizer(tokenizer, aside)
        _write_notes(aside, notes, Library.PEFT)


def _save_tokenizer(tokenizer: Any, aside: Path) -> None:
    try:
        tokenizer.save_pretrained(aside)
    except OSError:
        raise
    except Exception as error:  # the library of fast tokenizers has no other for a disk that refuses
        raise OSError(f"its tokenizer: {error}") from error


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file of tensors; raise `OSError` unless it is read back as they are."""
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})
    found = load_file(path)
    if found.keys() != tensors.keys() or not all(torch.equal(found[name], each) for name, each in tensors.items()):
        raise OSError(f"{path.name} was read back from the disk as something else")


def _write_notes(aside: Path, notes: Provenance, library: Library) -> None:
    (aside / NOTES).write_bytes(msgspec.json.format(msgspec.json.encode(notes), indent=2) + b"\n")
    (aside / CARD).write_text(model_card(notes, library), encoding="utf-8")
    if (curve := held_out_curve(notes.evaluations)) is not None:
        (aside / CURVE).write_bytes(curve)


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
    given = {name: weight.shape for name, weight in weights.items()}
    if wrong := sorted({name for name, _ in expected.items() ^ given.items()}):
        raise ValueError(f"the stages together are not the whole model: look at {', '.join(wrong)}")
    whole.load_state_dict(weights, strict=False, assign=True)
    return whole


@contextmanager
def _written_aside(directory: Path) -> Iterator[Path]:
    """Yield an empty directory beside `directory` that takes its place, flushed, once all has gone well."""
    directory = Path(os.path.realpath(directory))  # a link cannot be replaced
    check_target(directory)
    try:
        with locked_aside(directory) as aside:
            check_target(directory)
            check_wanted()
            yield aside
            _follow_umask(aside)
            for path in sorted(aside.rglob("*")):
                check_wanted()
                flush(path)
            flush(aside)
            check_wanted()
            os.rename(aside, directory)
        flush(directory.absolute().parent)
    except (OSError, SafetensorError) as error:
        hint = "free some space, or choose another directory"
        raise storage_error(f"The checkpoint cannot be written to {directory}.", reason_of(error), hint) from error


def _follow_umask(directory: Path) -> None:
    """Let users that may read a new directory read its files too: the library makes some for their owner alone."""
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
    except Exception as error:  # a stranger may have written the file, and the library raises all kinds of errors
        say(f"the model's own generation_config.json is left out: {one_line(error, 200)}")
        return None
    return found
