"""Run files to start from: a commented text (`template.toml`), filled in for four sizes (`presets.toml`) and a demo.

`125m`, `1b` and `7b` have the sizes, batches, learning rates and outer steps of the NoLoCo paper (arXiv 2506.10911).
All presets read the standard library of Python as bytes, for that needs no network. The text is written by
hand: a run file is the first page of the manual.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

import msgspec

from noloco_node.errors import os_errors_as, storage_error, usage_error
from noloco_node.run.fields import toml
from noloco_node.storage import atomic_file

Preset: TypeAlias = dict[str, Any]  # the values of a preset (`presets.toml`), by field


def _packaged(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


_PRESETS = msgspec.toml.decode(_packaged("presets.toml"), type=dict[str, Preset])
PRESETS = tuple(_PRESETS)
_MACHINES = re.compile(r"(?m)^#     noloco-node check FILE (.*)$")
"""As a run file's comment names those that it is meant for."""
_NO_OWNER, _OPEN = '# owner = "64 hexadecimal digits"', 'rule = "open"'
"""As the template has them."""


def run_text(preset: str) -> str:
    """Return the text of a run file, every field of it explained by a comment; raise `UserError` for another preset."""
    return written(numbers_of(preset), preset, 0)


def with_owner(text: str, owner: str, rule: str) -> str:
    """Return such a text with the public half of an owner's key, and the rule by which peers are let in."""
    begin, section, end = text.partition("[admission]\n")
    section += end.replace(_NO_OWNER, f'owner = "{owner}"').replace(_OPEN, f'rule = "{rule}"')
    return begin + section


def with_values(text: str, values: Mapping[str, Mapping[str, object]], machines: str) -> str:
    """Return a run file's text with other values, by section and field, meant for other machines (see the presets)."""
    return _MACHINES.sub(f"#     noloco-node check FILE {machines}", with_fields(text, values), count=1)


def with_fields(text: str, values: Mapping[str, Mapping[str, object]]) -> str:
    """Return a run file's text with other values, by section and field."""
    for section, fields in values.items():
        begin, heading, end = text.partition(f"\n[{section}]\n")
        for name, value in fields.items():
            line = f"{name} = {value}".replace("\\", r"\\")  # or re would read a group in \1
            end, found = re.subn(rf"(?m)^{name} = .*$", line, end, count=1)
            if not found:
                raise ValueError(f"the text has no {section}.{name}")
        text = begin + heading + end
    return text


def machines_of(text: str) -> str | None:
    """Return the machines that a run file is meant for, as options of `noloco-node check`; None where it says none."""
    found = _MACHINES.search(text)
    return None if found is None else found[1]


def numbers_of(preset: str) -> Preset:
    if preset not in _PRESETS:
        raise usage_error(
            f"There is no preset {preset!r}.", "a preset is the size of a model", f"one of {', '.join(PRESETS)}"
        )
    return _PRESETS[preset]


def check_named(path: Path) -> None:
    """Raise `UserError` if a directory is where a run file is to be written."""
    if os.path.isdir(path):  # unlike Path.is_dir, this takes a path of any length
        raise usage_error(f"{path} is a directory.", why="a run is one file", hint=f"{path / 'run.toml'}, for example")


def check_free(path: Path, hint: str = "another path, or --force") -> None:
    """Raise `UserError` if a file is where one of a run is to be written."""
    if os.path.exists(path):
        raise usage_error(
            f"{path} is there already.", "it may be all that is left of a run, so it is not overwritten unasked", hint
        )


def write_text(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a run file's text to `path`; raise `UserError` if a file is in the way."""
    if not overwrite:
        check_free(path)
    hint = "free some space, or a path in a directory that exists and is yours"
    with os_errors_as(storage_error, f"{path} cannot be written.", hint):
        # A file that a link names is written anew, and the link stays.
        atomic_file.write(Path(os.path.realpath(path)), text.encode(), public=True)


def demo_run_text(*, stages: int, replicas: int, steps: int, seed: int) -> str:
    """Return the run file of a demo: the tiny model over so many stages and replicas, for so many inner steps.

    The model grows a layer for each stage beyond four. In a short demo the rounds are closer together.
    """
    tiny = _PRESETS["tiny"]
    per_round = max(2, min(tiny["inner_steps_per_round"], steps // 10))
    numbers = tiny | {
        "about": "a demo",
        "num_hidden_layers": max(tiny["num_hidden_layers"], stages),
        "stages": stages,
        "replicas": replicas,
        "microbatches_per_step": max(tiny["microbatches_per_step"], 2 * stages),
        "steps": steps,
        "warmup_steps": min(20, steps // 10),
        "inner_steps_per_round": per_round,
        "late_inner_steps_per_round": 4 * per_round,
        "overlap_steps": per_round - 1,
    }
    return written(numbers, "demo", seed)


def written(
    numbers: Preset,
    name: str,
    seed: int,
    *,
    model: str | None = None,
    tokenizer: str = "byt5",
    data_sections: str = "",
    data: Mapping[str, object] | None = None,
) -> str:
    """Return the text of a run file. `model`: another section [model]; `data_sections`: sections in [data].

    `data`: other fields of [data] than the template's.
    """
    text = _packaged("template.toml")
    if model is not None:
        begin, end = text.index("[model]\n"), text.index("[pipeline]\n")
        text = f"{text[:begin]}$model\n{text[end:]}"
    for field, value in (data or {}).items():
        # Where the template has only an example of a field, the example gives way.
        line = f"{field} = {toml(value)}".replace("$", "$$")
        found = re.search(rf"^(# )?{field} = .*$", text, flags=re.M)
        assert found is not None
        text = text[: found.start()] + line + text[found.end() :]
    if data_sections:
        sections = data_sections.replace("$", "$$")
        text = text.replace("[inner]\n", f"{sections}\n\n[inner]\n")
    return Template(text).substitute(numbers, name=name, seed=seed, model=model, tokenizer=tokenizer)
