"""What a run file that others sent may do on this machine: name no path of it but those that its owner allows.

What is read on a machine goes to others: text becomes the targets that the next stage receives. So local text is read
where the owner of the machine names it (`--data`), and a directory with a tokenizer where the owner has allowed that
directory (`--local`). What lies on the hub may be fetched; the libraries that do it prefer a directory of
that name below the current one, which is therefore a path as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from noloco_node.errors import config_error
from noloco_node.run.config import TRAVELLING, DataConfig, RunConfig
from noloco_node.run.fields import short
from noloco_node.units import format_bytes


def local_paths(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the fields that name files of this machine, but for the text, each with its path."""
    model, data = run.model, run.data
    if data.tokenizer not in ("byt5", TRAVELLING) and data.tokenizer_commit is None:
        yield "data.tokenizer", data.tokenizer
    on_hub = [("model.hub", model.hub), ("data.path", data.path if data.source == "hub" else None)]
    on_hub.append(("data.tokenizer", data.tokenizer if data.tokenizer_commit is not None else None))
    for field, name in on_hub:
        if name is not None and Path(name).exists():
            yield field, name


def check_paths(run: RunConfig, allowed: Sequence[str]) -> None:
    """Raise `UserError` (Exit.CONFIG) if a run names a path of this machine that is not among those allowed."""
    places = {Path(each).expanduser().absolute() for each in allowed}
    for field, path in local_paths(run):
        if Path(path).expanduser().absolute() not in places:
            raise config_error(
                f"The run file names a directory of this machine: {field} = {short(repr(path))}.",
                "others sent that file, and may not choose what is read here",
                "if these files are meant to be read for this run, allow that directory with --local",
            )


def is_public(data: DataConfig) -> bool:
    """Whether the text is the same for everybody, and no file of a machine."""
    return data.source in ("stdlib", "hub")


def check_text(run: RunConfig, own_source: str | None) -> None:
    """Raise `UserError` (Exit.CONFIG) if a run would train on files of this machine that its owner has not named."""
    if own_source is None and not is_public(run.data):
        raise config_error(
            f"The run file trains on files of this machine: data.path = {short(repr(run.data.path))}.",
            "others sent that file, and what is read here goes to other peers as text to predict",
            "name the text yourself with --data, or take a later stage with --stage, which reads none",
        )


def text_of(data: DataConfig) -> str:
    """Name the text of a run."""
    return {"stdlib": "Python's standard library", "hub": f"{data.path} of the hub"}.get(data.source, f"{data.path}")


def summary(run: RunConfig, own_source: str | None = None) -> list[str]:
    """Say in a few lines what a run is, before anything is fetched for it. `own_source`: as in `check_text`."""
    model, cut, data = run.model, run.pipeline, run.data
    size = format_bytes(sum(each.size_bytes for each in model.weights))
    begin = f"from a checkpoint of {size}" if model.weights else "from its first step"
    tokens = run.budget_samples * cut.sequence_length
    here = "none is named here; a source names its own with --data"
    text = (text_of(data) if is_public(data) else here) if own_source is None else f"your own, {own_source}"
    tokenizer = "the checkpoint's own" if data.tokenizer == TRAVELLING else data.tokenizer
    where = "" if data.tokenizer_commit is None else " of the hub"
    return [
        f"run {short(run.name)!r}: {cut.stages} stages, {cut.replicas} replicas planned of each, "
        f"{tokens:,} tokens to train on",
        "model: " + short(f"{model.architecture}, {begin}" if model.architecture else f"from {model.hub} of the hub"),
        f"text: {short(text)}; tokenizer: {short(tokenizer)}{where}",
    ]
