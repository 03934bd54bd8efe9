"""`init`: a run from Python values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import nn

from gossip.settings import OuterConfig
from noloco_node.api.foreign_stage import trained_parameters
from noloco_node.errors import config_error, reason_of, storage_error
from noloco_node.run.fields import toml
from noloco_node.run.presets import check_free, write_text
from noloco_node.run.runfile import decode_run
from noloco_node.storage import atomic_file
from noloco_node.storage.weight_store import described

_HINT = "another path, or overwrite=True"


def init(
    path: str | PathLike[str],
    model: nn.Module | Mapping[str, object],
    *,
    steps: int,
    batch: int = 1,
    sequence_length: int = 1,
    replicas: int = 2,
    every: int = 10,
    codec: str = "int4",
    name: str = "run",
    seed: int = 0,
    sections: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
    overwrite: bool = False,
) -> Path:
    """Write a run file, the recipe that all peers of a run share; return its path.

    `model`: a module, of which the run trains what requires a gradient; its weights are written beside the run file
    (the same name, .safetensors), and the run begins with them. Or the section [model] of a model that the nodes build
    themselves. `steps`: inner steps of each of so many planned `replicas`, each over `batch` sequences of
    `sequence_length` tokens: together the budget of the run. `every`: inner steps between two rounds. `codec`: the form
    in which weights travel: int4, int8, bfloat16 or float32. `sections`: other fields of the run file, by section
    (docs/reference.md). Raises `noloco_node.errors.UserError` that names the field at fault.
    """
    steps, batch, sequence_length, replicas, every, seed = (
        _whole(field, value)
        for field, value in {
            "steps": steps,
            "batch": batch,
            "sequence_length": sequence_length,
            "replicas": replicas,
            "every": every,
            "seed": seed,
        }.items()
    )
    path = Path(path).expanduser()
    weights = path.with_suffix(".safetensors")
    table: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "model": dict(model) if isinstance(model, Mapping) else {"foreign_parameters": _shapes(model)},
        "pipeline": {"replicas": replicas, "microbatch_size": batch, "sequence_length": sequence_length},
        "inner": {"steps": steps, "warmup_steps": steps // 20},
        "outer": {
            "inner_steps_per_round": every,
            "overlap_steps": max(1, min(OuterConfig().overlap_steps, every - 1)),
            "codec": codec,
        },
    }
    if isinstance(model, nn.Module):
        table["pipeline"] |= {"stages": 1, "microbatches_per_step": 1}
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values}
    if isinstance(model, nn.Module):
        # Before a file of weights is written, all the rest is known to be right.
        stand_in = {"file": weights.name, "size_bytes": 1, "digest": 64 * "0"}
        decode_run(_text({**table, "model": {**table["model"], "weights": [stand_in]}}), str(path))
        if weights == path:
            raise config_error(
                f"The run file {path} would take the place of its own weights.",
                "they are written beside it, with the same name and the ending .safetensors",
                "a run file with another ending, such as run.toml",
            )
        if not overwrite:
            check_free(path, _HINT)
            check_free(weights, _HINT)
        _write_weights(weights, model)
        table["model"]["weights"] = [msgspec.structs.asdict(described(weights))]
    text = _text(table)
    decode_run(text, str(path))
    if not overwrite:
        check_free(path, _HINT)
    write_text(path, text, overwrite=True)
    return path


def _whole(field: str, value: object) -> int:
    """Return a whole number of whatever library; raise `UserError` (CONFIG) for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise config_error(f"{field} is {value!r}.", "init takes a whole number there", f"{field}=100") from error


def _text(table: Mapping[str, Any]) -> str:
    plain = [f"{key} = {toml(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    for section, values in table.items():
        if isinstance(values, Mapping):
            plain += ["", f"[{section}]", *(f"{key} = {toml(value)}" for key, value in values.items())]
    return "\n".join(plain) + "\n"


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(each.shape) for name, each in trained_parameters(module).items()}


def _write_weights(path: Path, module: nn.Module) -> None:
    parameters = trained_parameters(module)
    values = {name: each.detach().to("cpu", torch.float32).contiguous() for name, each in parameters.items()}
    try:
        atomic_file.write_tensors(path, [atomic_file.array(name, each) for name, each in values.items()], "")
    except OSError as error:
        hint = "free some space, or another directory"
        raise storage_error(f"The weights cannot be written to {path}.", reason_of(error), hint) from error
