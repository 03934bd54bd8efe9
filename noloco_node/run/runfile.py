"""The run file: read, decoded, validated, named by its digest, and checked for what it may do on this machine.

The digest of a run is its id. It is taken over the fields that differ from their defaults: comments, order and
spelled-out defaults do not matter. So a later version may add a field; one that changes a default, or what a default
does, has to count `WIRE_VERSION` up. The digest also covers the version of the wire format, the files of a local
tokenizer directory and the commits of what lies on the hub, but not the text: peers may train on different text.

A peer gets the run file from others, and what it reads goes to others. So it reads local text only where its owner
names it (`--data`), and a tokenizer directory only where its owner allows it (`--local`). Libraries that fetch from the
hub prefer a local directory of the same name, so such a name counts as a path as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from noloco_node.errors import config_error, os_errors_as
from noloco_node.network.wire import WIRE_VERSION
from noloco_node.run.config import RunConfig
from noloco_node.run.fields import converted, fields_of, is_section, refuse, short, toml_table
from noloco_node.run.validation import problems
from noloco_node.storage.home import typed

RUN_TEXT_BYTES = 256 * 1024  # longest run file, in bytes; peers serve each other its text


def load_run(path: str | Path) -> RunConfig:
    """Read, decode and validate the run file at `path`; raise `UserError` (Exit.CONFIG) where it is wrong."""
    return decode_run(read_run_text(path), str(path))


def read_run_text(path: str | Path) -> str:
    """Return the text of a run file, the form in which peers serve it; raise `UserError` if it cannot be read."""
    hint = "check the path; `noloco-node init` writes a run file"
    with os_errors_as(config_error, f"The run file {path} cannot be read.", hint), open(path, "rb") as file:
        raw = file.read(RUN_TEXT_BYTES + 1)
    try:
        return raw.decode("utf-8-sig") if len(raw) <= RUN_TEXT_BYTES else _too_long(str(path))
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


def canonical(run: RunConfig, contents: Mapping[str, str]) -> bytes:
    """Return the one spelling of a run that its digest is taken over: JSON, keys sorted, fields at defaults left out.

    `contents`: hashes of what the run names and does not hold, from `content_hashes`.
    """
    everything = {"wire": WIRE_VERSION, "run": _off_default(run), "contents": dict(contents)}
    return json.dumps(everything, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _off_default(section: Any) -> dict[str, Any]:
    """Return a section's fields that differ from their defaults, and those that have none; sections in it likewise."""
    return {
        field.name: _plain(value)
        for field in fields_of(type(section))
        if (value := getattr(section, field.name)) != field.default
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return _off_default(value) if is_section(type(value)) else msgspec.to_builtins(value)


def run_digest(run: RunConfig, contents: Mapping[str, str]) -> str:
    return hashlib.sha256(canonical(run, contents)).hexdigest()


def content_hashes(run: RunConfig) -> dict[str, str]:
    """Return what pins the content of the model and the tokenizer that the run names, by field.

    A tokenizer's local directory is read whole; what lies on the hub is pinned by its commit. Raises
    `UserError` if a directory is not there.
    """
    directory = run.data.tokenizer_directory
    return run.pinned | ({} if directory is None else {"data.tokenizer": _hash_of_directory(directory)})


def _hash_of_directory(directory: str) -> str:
    """Hash names and bytes of all files below `directory`, hidden ones left out (caches of downloaders differ)."""
    root = typed(directory)
    total = hashlib.sha256()
    with os_errors_as(config_error, f"data.tokenizer: {directory} cannot be read.", "check its permissions"):
        paths = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
        for name in sorted(name for name in paths if not any(part.startswith(".") for part in name.split("/"))):
            with paths[name].open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(json.dumps([name, digest]).encode() + b"\n")
    if not paths:
        raise config_error(
            f"data.tokenizer: there is no directory {directory!r} with files in it.",
            "every peer of the run needs the same files there, and their content is part of the run's id",
            "copy the directory to this machine, or name a hub repository with its commit",
        )
    return total.hexdigest()


def check_paths(run: RunConfig, allowed: Sequence[str]) -> None:
    """Raise `UserError` (Exit.CONFIG) if a run names a path of this machine that is not among those allowed."""
    places = {typed(each).absolute() for each in allowed}
    for field, path in run.local_paths():
        if typed(path).absolute() not in places:
            raise config_error(
                f"The run file names a directory of this machine: {field} = {short(repr(path))}.",
                "others sent that file, and may not choose what is read here",
                "if these files are meant to be read for this run, allow that directory with --local",
            )


def check_text(run: RunConfig, own_source: str | None) -> None:
    """Raise `UserError` (Exit.CONFIG) if a run would train on files of this machine that its owner has not named."""
    if own_source is None and not run.data.is_public:
        raise config_error(
            f"The run file trains on files of this machine: data.path = {short(repr(run.data.text_name))}.",
            "others sent that file, and what is read here goes to other peers as text to predict",
            "name the text yourself with --data, or take a later stage with --stage, which reads none",
        )
