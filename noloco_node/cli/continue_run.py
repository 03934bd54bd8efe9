"""`noloco-node init --from DIR`: a run that goes on from a finished model, for a fine-tune by a swarm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from noloco_node.errors import config_error
from noloco_node.export.provenance import NOTES, run_of
from noloco_node.run.presets import numbers_of, written

_MODEL = """\
[model]
# A Hugging Face directory to go on from. Every peer needs the same files at this path: their content is part of the
# run's id. Or the same checkpoint on the hub: hub = "owner/name" with commit = 40 hexadecimal digits.
path = {path}
# Share of activations zeroed in training; 0 is best as long as no text is seen twice.
dropout = 0.0
"""


def continuing_text(directory: Path, preset: str) -> str:
    """Return the text of a run that goes on from the checkpoint in `directory`; raise `UserError` where there is none.

    Cut and sequences are those of the run that the checkpoint came from, if it says so, else the preset's as far as the
    model has the layers and positions for it; the learning rate is a tenth of the preset's, for it no longer has far to
    go. A checkpoint whose tokenizer is not ByT5's is read with its own.
    """
    directory = directory.expanduser().absolute()
    given, config = numbers_of(preset), _config_of(directory)
    layers = _count(config, "num_hidden_layers", "n_layer") or given.layers
    positions = _count(config, "max_position_embeddings", "n_positions") or given.sequence_length
    stages, length, tokenizer = min(given.stages, layers), min(given.sequence_length, positions), str(directory)
    if (directory / NOTES).exists():
        before = run_of(directory)
        stages, length = before.pipeline.stages, before.pipeline.sequence_length
        tokenizer = "byt5" if before.data.tokenizer == "byt5" else tokenizer
    numbers = msgspec.structs.replace(
        given,
        about="going on from a finished model",
        stages=stages,
        microbatches=max(given.microbatches, 2 * stages),
        sequence_length=length,
        learning_rate=f"{float(given.learning_rate) / 10:g}",
    )
    model = _MODEL.format(path=json.dumps(str(directory)))
    return written(numbers, "continued", 0, model=model, tokenizer=json.dumps(tokenizer))


def _count(config: dict[str, Any], *names: str) -> int | None:
    """Return the first of these numbers that a config has; None where it has none, or something else there."""
    return next((found for name in names if isinstance(found := config.get(name), int) and found > 0), None)


def _config_of(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / "config.json").read_bytes())
        if isinstance(found, dict):
            return found
        why = "config.json is no table"
    except (OSError, ValueError) as error:
        why = str(error)
    raise config_error(
        f"{directory} holds no model to go on from.",
        why=why,
        hint="a Hugging Face directory, such as noloco-node export writes",
    )
