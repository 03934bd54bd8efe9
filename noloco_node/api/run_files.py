"""`init`: a run from Python values."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from gossip.settings import OuterConfig
from noloco_node.api.foreign_stage import listed_frozen, trained_parameters
from noloco_node.api.program_stages import stage_parameters, tokens, tried
from noloco_node.data.encoding import check_vocabulary
from noloco_node.errors import config_error, os_errors_as, storage_error
from noloco_node.run.fields import toml
from noloco_node.run.presets import check_free, check_named, write_text
from noloco_node.run.runfile import decode_run
from noloco_node.run.validation import WEIGHT_FILE
from noloco_node.storage import atomic_file
from noloco_node.storage.home import typed
from noloco_node.storage.weight_store import described

_HINT = "another path, or overwrite=True"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def init(
    path: str | PathLike[str],
    model: nn.Module | Sequence[nn.Module] | Mapping[str, object],
    *,
    steps: int,
    batch: int = 1,
    sequence_length: int | None = None,
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
    (the same name, .safetensors), and the run begins with them. Or a list of modules, or a ModuleList, the stages of a
    pipeline (docs/python.md). Or the section [model] of a model that the nodes build themselves. `steps`: inner steps
    of each of so many planned `replicas`, each over `batch` sequences of `sequence_length` tokens, of a pipeline over a
    window of them: together the budget of the run. Without `sequence_length` a module counts samples, and nodes that
    read text take the length of a run file. `every`: inner steps between two rounds. `codec`: the form in which weights
    travel: int4, int8, bfloat16 or float32. `sections`: other fields of the run file, by section
    (docs/reference.md). Raises `noloco_node.errors.UserError` that names the field at fault.
    """
    steps, every = _whole("steps", steps), _whole("every", every)
    path = typed(path)
    check_named(path)
    if isinstance(model, nn.ModuleList):  # it computes nothing by itself
        model = list(model)
    parameters = _trained(model)
    table: dict[str, Any] = {
        "name": name,
        "seed": _whole("seed", seed),
        "model": dict(model) if isinstance(model, Mapping) else _foreign(model, parameters),
        "pipeline": {
            "replicas": _whole("replicas", replicas),
            "microbatch_size": _whole("batch", batch),
        },
        "inner": {"steps": steps, "warmup_steps": steps // 20},
        "outer": {
            "inner_steps_per_round": every,
            "overlap_steps": max(1, min(OuterConfig().overlap_steps, every - 1)),
            "codec": codec,
        },
    }
    if isinstance(model, nn.Module):
        table["pipeline"] |= {"stages": 1, "microbatches_per_step": 1, "sequence_length": 1}
    elif not isinstance(model, Mapping):
        table["pipeline"]["stages"] = len(model)
    if sequence_length is not None:
        table["pipeline"]["sequence_length"] = _whole("sequence_length", sequence_length)
    table |= _merged(table, sections)
    _write(path, table, parameters, overwrite=overwrite)
    return path


def _write(path: Path, table: dict[str, Any], parameters: Mapping[str, nn.Parameter], *, overwrite: bool) -> None:
    """Write a run file, and beside it the weights that the run begins with; nothing where a field is wrong."""
    weights = path.with_suffix(".safetensors")
    if parameters:
        _check_weights_name(path, weights)
        # Before a file of weights is written, all the rest is known to be right: this entry stands for it.
        table["model"]["weights"] = [{"file": weights.name, "size_bytes": 1, "digest": 64 * "0"}]
    run = decode_run(_text(table), str(path))
    if run.model.is_in_stages and run.data.has_byte_tokenizer:  # others are opened by nodes
        check_vocabulary(run.data, run.model.foreign_vocabulary)
    if not overwrite:
        for each in [path, weights] if parameters else [path]:
            check_free(each, _HINT)
    if parameters:
        _write_weights(weights, parameters)
        table["model"]["weights"] = [msgspec.structs.asdict(described(weights))]
        decode_run(_text(table), str(path))
    write_text(path, _text(table), overwrite=True)


def _merged(table: Mapping[str, Any], sections: Mapping[str, Mapping[str, object]]) -> dict[str, Any]:
    """Return those sections of a run file that have other fields too, with these; `UserError` for what is none."""
    example = 'sections={"inner": {"clip_norm": 1.0}}'
    if not isinstance(sections, Mapping):
        raise config_error(f"sections is {sections!r}.", "it is a dictionary of the sections of a run file", example)
    merged = {}
    for section, values in sections.items():
        before = table.get(section, {})
        if not (isinstance(before, Mapping) and isinstance(values, Mapping)):
            why = "a section of a run file is a dictionary of fields"
            raise config_error(f"sections has {values!r} for {section}.", why, example)
        merged[section] = {**before, **values}
    return merged


def _check_weights_name(path: Path, weights: Path) -> None:
    """Raise `UserError` if the file of weights beside a run file would be the run file, or may not travel."""
    if weights == path or not WEIGHT_FILE.fullmatch(weights.name):
        raise config_error(
            f"The run file {path} has no name that fits its own weights.",
            f"they are written beside it as {weights.name}, and travel under this name",
            "ASCII letters, digits, . _ and -, and another ending than .safetensors, such as run.toml",
        )


def _whole(field: str, value: object) -> int:
    """Return a whole number of whatever library; raise `UserError` (CONFIG) for anything else."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise config_error(f"{field} is {value!r}.", "init takes a whole number there", f"{field}=100") from error


def _text(table: Mapping[str, Any]) -> str:
    plain = [_line("", key, value) for key, value in table.items() if not isinstance(value, Mapping)]
    for section, values in table.items():
        if isinstance(values, Mapping):
            plain += ["", f"[{_key(section)}]", *(_line(f"{section}.", key, value) for key, value in values.items())]
    return "\n".join(plain) + "\n"


def _line(section: str, key: object, value: object) -> str:
    try:
        return f"{_key(key)} = {toml(value)}"
    except (TypeError, ValueError, RecursionError) as error:  # also of too many digits, and of a list in itself
        hint = "numbers, texts, lists and dictionaries of Python; float(x) makes one of another library's number"
        raise config_error(f"{section}{key} cannot be written into a run file.", str(error), hint) from error


def _key(name: object) -> str:
    """Return a key of TOML: any text may be one in quotes, so that the complaint about it names the field."""
    return name if isinstance(name, str) and _BARE_KEY.fullmatch(name) else toml(str(name))


def _trained(model: nn.Module | Sequence[nn.Module] | Mapping[str, object]) -> dict[str, nn.Parameter]:
    """Return what a run trains of modules, by name; nothing where nodes build its model."""
    if isinstance(model, Mapping):
        return {}
    if isinstance(model, nn.Module):
        return trained_parameters(model)
    if isinstance(model, str) or not isinstance(model, Sequence):
        raise config_error(
            f"The model is of the type {type(model).__name__}.",
            "a run trains a module, or stages, or a model that the nodes build themselves",
            'a module, a list of modules, or the fields of [model]: {"architecture": "llama", "sizes": {...}}',
        )
    if not model or (wrong := [type(each).__name__ for each in model if not isinstance(each, nn.Module)]):
        raise config_error(
            f"The list of stages holds {wrong[0] if model else 'no module'}.",
            "each stage of a pipeline is a module",
            "a list of modules; or one module, which each peer holds as a whole",
        )
    if len({id(each) for module in model for each in module.parameters()}) < sum(
        len(list(module.parameters())) for module in model
    ):
        raise config_error(
            "Two stages share a parameter.",
            "stages are on different machines, and each has its own",
            "a parameter of its own in each stage, such as a head that is not tied to the embedding",
        )
    return {
        name: each for number, module in enumerate(model) for name, each in stage_parameters(number, module).items()
    }


def _handed_on(stages: Sequence[nn.Module]) -> dict[str, int]:
    """Return the fields of a run file that say what stages make of a token, as they are tried in turn."""
    logits, widths = _through(stages, 0)
    *between, vocabulary = widths
    if len(set(between)) > 1:
        raise config_error(
            "The stages hand on different widths.",
            f"of a token they return {', '.join(map(str, between))} numbers",
            "one width between all stages",
        )
    again, otherwise = (_through(stages, last)[0] for last in (0, 1))
    near = 1e-5 * logits.norm()
    if torch.dist(again, logits) <= near < torch.dist(otherwise[:, :-1], logits[:, :-1]):  # and it is not by chance
        raise config_error(
            "The stages look at the tokens that they have to predict.",
            "the logits of a token change with the token after it, which is the one that they are to predict",
            "a causal mask, such as is_causal=True of scaled_dot_product_attention",
        )
    return {"foreign_width": between[0] if between else 0, "foreign_vocabulary": vocabulary}


def _through(stages: Sequence[nn.Module], last: int) -> tuple[Tensor, list[int]]:
    """Return the logits of a text that ends with this id, and what each stage returns of a token."""
    hidden, widths = tokens(last), list[int]()
    for number, module in enumerate(stages):
        hidden = tried(number, module, hidden)
        if hidden.isnan().any():
            why = "of the run's first weights it makes NaN, and nothing could be learnt from that"
            raise config_error(f"Stage {number} computes what is no number.", why, "look at what it divides by")
        widths.append(hidden.shape[-1])
    return hidden, widths


def _foreign(model: nn.Module | Sequence[nn.Module], parameters: Mapping[str, nn.Parameter]) -> dict[str, object]:
    """Return the fields of a run file that tell a module, or a list of stages, from others."""
    stages = {"": model} if isinstance(model, nn.Module) else {f"{stage}.": each for stage, each in enumerate(model)}
    fields: dict[str, object] = {"foreign_parameters": {name: list(each.shape) for name, each in parameters.items()}}
    if frozen := listed_frozen(stages):
        fields["foreign_frozen"] = frozen
    if not isinstance(model, nn.Module):
        fields |= _handed_on(model)
    return fields


def _write_weights(path: Path, parameters: Mapping[str, nn.Parameter]) -> None:
    values = {name: each.detach().to("cpu", torch.float32).contiguous() for name, each in parameters.items()}
    if wrong := next((name for name, each in values.items() if not each.isfinite().all()), None):
        raise config_error(
            f"The parameter {wrong} holds what is no finite number.",
            "the run begins with these weights, and nothing could be learnt from them",
            "make the module anew, or load a checkpoint of before it diverged",
        )
    what = f"The weights cannot be written to {path}."
    with os_errors_as(storage_error, what, "free some space, or a directory that exists and is yours"):
        atomic_file.write_tensors(path, [atomic_file.array(name, each) for name, each in values.items()], "")
