"""The run file: read, decoded, validated, and named by its digest.

`RunConfig` is decoded from `run.toml` once and validated field by field; every error names the line or the field at
fault. The digest of a run is its id: keys and protocol names follow from it, so that two runs cannot meet.

The digest is taken over the fields of the *decoded* run that differ from their defaults: comments, order and
spelled-out defaults do not matter, and every other value does. So a field that a later version adds with its default
changes the id of no run that does not use it. A version that changes a default, or what a default does, has to count
`WIRE_VERSION` up: tests hold the defaults. To it come the version of the wire format, and the content of what the file
only names: a local tokenizer directory enters by a hash of its files, what lies on the hub by its commit; files that
travel stand in the run. Not pinned is the text of `data`: peers may well train on different text, and a local file
differs between machines without harm.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from noloco_node.errors import config_error
from noloco_node.network.wire import WIRE_VERSION
from noloco_node.run.config import TRAVELLING, DataConfig, RunConfig
from noloco_node.run.fields import Problem, fields_of, is_section, misfit, out_of_bounds, short, unknown_field
from noloco_node.run.validation import problems

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
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib raises the second for brackets nested without end
        raise config_error(
            f"{origin} is not valid TOML.", str(error), "correct that line; see https://toml.io"
        ) from error
    try:
        run = msgspec.convert(table, RunConfig)
        if (complaint := unknown_field(table, RunConfig)) is not None:
            raise msgspec.ValidationError(complaint)
    except msgspec.ValidationError as error:
        _refuse(out_of_bounds(table, RunConfig), origin)
        raise misfit(str(error), RunConfig, origin) from error
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
    _refuse(problems(run), origin)


def _refuse(problems: Iterable[Problem], origin: str) -> None:
    """Raise the `UserError` about the first of these problems, if there is one."""
    found = list(dict.fromkeys(problems))
    if not found:
        return
    first = found[0]
    others = [field for field in dict.fromkeys(problem.field for problem in found) if field != first.field]
    also = f" (wrong too: {', '.join(others)})" if others else ""
    missing = first.value == repr(None)
    wrong = f"{short(first.field)} is missing" if missing else f"{short(first.field)} = {short(first.value)} is refused"
    what = f"{origin}: {wrong}{short(also)}."
    raise config_error(what, first.why, first.hint)


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
