"""The run file: read, decoded, validated, named by its digest, and checked for what it may do on this machine.

The digest of a run is its id: keys and protocol names follow from it, so that two runs cannot meet. It is taken over
the fields of the decoded run that differ from their defaults: comments, order and spelled-out defaults do not matter,
and every other value does. So a later version may add a field, and where the field has its default the id stays. A
version that changes a default, or what a default does, has to count `WIRE_VERSION` up: tests hold the defaults. The
digest also covers the version of the wire format, a hash of the files of a local tokenizer directory, and the commit
of what lies on the hub. It does not cover the text of `data`: peers may train on different text.

Other peers serve the run file, and what a peer reads goes to others: text becomes the targets that the next stage
receives. So a peer reads local text only where its owner names it (`--data`), and a tokenizer directory only where its
owner allows that directory (`--local`). Libraries that fetch from the hub prefer a directory of the same name below
the current one, so such a name counts as a path as well.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from noloco_node.errors import config_error
from noloco_node.network.wire import WIRE_VERSION
from noloco_node.run.config import TRAVELLING, DataConfig, RunConfig
from noloco_node.run.fields import converted, fields_of, is_section, refuse, short, toml_table
from noloco_node.run.validation import problems
from noloco_node.units import format_bytes

RUN_TEXT_BYTES = 256 * 1024
"""Longest run file, in bytes; peers serve each other its text."""


def load_run(path: str | Path) -> RunConfig:
    """Read, decode and validate the run file at `path`; raise `UserError` (Exit.CONFIG) if anything is wrong with
    it."""
    return decode_run(read_run_text(path), str(path))


def read_run_text(path: str | Path) -> str:
    """Return the text of a run file, the form in which peers serve it; raise `UserError` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            raw = file.read(RUN_TEXT_BYTES + 1)
        return raw.decode("utf-8-sig") if len(raw) <= RUN_TEXT_BYTES else _too_long(str(path))
    except OSError as error:
        raise config_error(
            f"The run file {path} cannot be read.",
            error.strerror or str(error),
            "check the path; `noloco-node init` writes a run file",
        ) from error
    except UnicodeDecodeError as error:
        raise config_error(f"The run file {path} is not text.", str(error), "save it as UTF-8") from error


def decode_run(text: str, origin: str) -> RunConfig:
    """Decode and validate the text of a run file.

    `origin` says in messages where it came from. Raises `UserError` (Exit.CONFIG) that names the line or the field at
    fault, what is wrong with it and what would be right. Safe for text that a stranger sent.
    """
    if len(text.encode(errors="replace")) > RUN_TEXT_BYTES:
        _too_long(origin)
    run = converted(toml_table(text, origin), RunConfig, origin)
    validate(run, origin)
    return run


def _too_long(origin: str) -> NoReturn:
    raise config_error(
        f"{origin} is too long for a run file.",
        f"it has more than {RUN_TEXT_BYTES // 1024} KiB",
        "shorten its comments: peers send it to each other",
    )


def validate(run: RunConfig, origin: str = "the run") -> None:
    """Check every rule that a type cannot state; raise `UserError` (Exit.CONFIG) about the first that is broken."""
    refuse(problems(run), origin)


def with_source(data: DataConfig, source: str) -> DataConfig:
    """Return `data` reading from another source, the tokenizer unchanged.

    `source` is a path (json or parquet by its suffix, else text), or `stdlib`, or says its kind: `text:PATH`,
    `json:PATH`, `parquet:PATH`, `hub:OWNER/NAME@COMMIT`. Rows are read at the field that `data` names, or at the one
    that follows a #. Raises `UserError` (Exit.CONFIG).
    """
    whole, _, field = source.rpartition("#")
    if whole and field and "/" not in field and with_source(data, whole).source in ("json", "parquet", "hub"):
        return msgspec.structs.replace(with_source(data, whole), field=field)
    kind, colon, rest = source.partition(":")
    if source == "stdlib":
        return msgspec.structs.replace(data, source=kind, path=None, commit=None, subset=None, split="train")
    if not colon or kind not in ("text", "json", "parquet", "hub"):
        kind, rest = _kind_by_suffix(source), source
    path, _, commit = rest.partition("@") if kind == "hub" else (rest, "", "")
    if not path or (kind == "hub" and not commit):
        raise config_error(
            f"The data source {source!r} is not understood.",
            "a file, directory or glob is missing" if kind != "hub" else "a hub data set is named with its commit",
            "for example books/*.txt, json:rows.jsonl, hub:owner/name@commit, or stdlib",
        )
    if kind == "hub" and not re.fullmatch("[0-9a-f]{40}", commit):
        raise config_error(
            f"The data source {source!r} names no commit.",
            "a branch or a tag moves, and a node that comes back would read another text",
            "the 40 hexadecimal digits of a commit, from the repository's history on the hub",
        )
    same = kind == "hub" and path == data.path
    return msgspec.structs.replace(
        data,
        source=kind,
        path=path,
        commit=commit or None,
        subset=data.subset if same else None,
        split=data.split if same else "train",
    )


def _kind_by_suffix(path: str) -> str:
    plain = re.sub(r"\.(gz|bz2|xz|zst)$", "", path)
    if plain.endswith((".json", ".jsonl", ".ndjson")):
        return "json"
    return "parquet" if plain.endswith(".parquet") else "text"


def canonical(run: RunConfig, contents: Mapping[str, str]) -> bytes:
    """Return the one spelling of a run that its digest is taken over: JSON, keys sorted, fields at defaults left out.

    `contents`: hashes of what the run names and does not hold, from `content_hashes`.
    """
    everything = {"wire": WIRE_VERSION, "run": _off_default(run), "contents": dict(contents)}
    return json.dumps(everything, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _off_default(section: Any) -> dict[str, Any]:
    """Return a section's fields that differ from their defaults, and those that have none; sections in it likewise."""
    return {
        field.name: _off_default(value) if is_section(type(value)) else msgspec.to_builtins(value)
        for field in fields_of(type(section))
        if (value := getattr(section, field.name)) != field.default
    }


def run_digest(run: RunConfig, contents: Mapping[str, str]) -> str:
    """Return the run's id: 64 hexadecimal digits, the SHA-256 of its canonical form."""
    return hashlib.sha256(canonical(run, contents)).hexdigest()


def content_hashes(run: RunConfig) -> dict[str, str]:
    """Return what pins the content of the model and the tokenizer that the run names, by field.

    A tokenizer's local directory is read whole; what lies on the hub is pinned by its commit. Raises
    `UserError` if a directory is not there.
    """
    hashes = {}
    if run.model.hub is not None:
        hashes["model.hub"] = f"{run.model.hub}@{run.model.commit}"
    if run.data.tokenizer_commit is not None:
        hashes["data.tokenizer"] = f"{run.data.tokenizer}@{run.data.tokenizer_commit}"
    elif run.data.tokenizer not in ("byt5", TRAVELLING):
        hashes["data.tokenizer"] = _hash_of_directory(run.data.tokenizer, "data.tokenizer")
    return hashes


def _hash_of_directory(directory: str, field: str) -> str:
    """Hash names and bytes of all files below `directory`, hidden ones left out (caches of downloaders differ)."""
    root = Path(directory).expanduser()
    total = hashlib.sha256()
    try:
        paths = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
        for name in sorted(name for name in paths if not any(part.startswith(".") for part in name.split("/"))):
            with paths[name].open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(json.dumps([name, digest]).encode() + b"\n")
    except OSError as error:
        raise config_error(f"{field}: {directory} cannot be read.", str(error), "check its permissions") from error
    if not paths:
        raise config_error(
            f"{field}: there is no directory {directory!r} with files in it.",
            "every peer of the run needs the same files there, and their content is part of the run's id",
            "copy the directory to this machine, or name a hub repository with its commit",
        )
    return total.hexdigest()


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
