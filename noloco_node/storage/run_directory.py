"""The directory of a run in a home, and what an earlier version kept of its runs elsewhere.

Up to version 0.1 all runs of a home shared `checkpoint`, `snapshots` and the like: three saves in one run removed the
last weights of another one. Each file says of which run it is, by its content or its name, so each is moved to the
directory of its run, not copied. A file that does not say so stays where it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import counters_of, files, following
from noloco_node.storage.home import HomePaths, RunPaths, unusable


def enter(home: HomePaths, run_id: str) -> RunPaths:
    """Return the directory of a run, made where it is missing; what an earlier version kept of any run is moved first.

    The home is ours alone. Raises `UserError` (STORAGE) where the disk refuses.
    """
    paths = home.run(run_id)
    try:
        atomic_file.make_directory(paths.path, mode=0o700)
        for old, new in _misplaced(home):
            if new.exists():
                continue
            atomic_file.make_directory(new.parent)
            os.replace(old, new)
            for directory in (new.parent, old.parent):
                atomic_file.flush(directory)
        for left in (
            *home.snapshots.glob("*"),
            home.checkpoint,
            home.snapshots,
            home.partial_download,
            home.weights,
            home.tokenizer,
        ):
            with suppress(OSError):  # it is not there, or holds something else still
                left.rmdir()
    except OSError as error:
        raise unusable(home.path, error) from error
    return paths


def _misplaced(home: HomePaths) -> Iterator[tuple[Path, Path]]:
    """Yield what an earlier version kept beside the home's own files, and where each belongs; one by one, for the place
    of a checkpoint follows from those that lie there already.
    """
    for directory in (home.checkpoint, *home.snapshots.glob("[0-9]*")):
        for path in files(directory):
            with suppress(OSError, ValueError):
                place = _place(home, counters_of(path).run_id).path / directory.relative_to(home.path)
                yield path, following(place, path.name.split("-")[-1])
    for path in (*home.partial_download.glob("*.pieces"), *home.weights.glob("*"), *home.tokenizer.glob("*")):
        run_id, _, stage = path.name.partition("-")
        with suppress(ValueError):
            yield path, _place(home, run_id).path / path.parent.name / (path.name if stage else "")
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = msgspec.json.decode(home.run_history.read_bytes())["run_id"]
        yield home.run_history, _place(home, noted).run_history
    with suppress(OSError, ValueError):
        held = home.ticket.read_bytes().partition(b"\n")[0].decode()
        yield home.ticket, _place(home, held).ticket


def _place(home: HomePaths, run_id: str) -> RunPaths:
    if not (run_id.isascii() and run_id.isalnum()):
        raise ValueError(f"{run_id!r} is the id of no run")
    return home.run(run_id)


def tokenizer_places(home: Path, run_id: str) -> tuple[Path, ...]:
    """Return where the tokenizer of a run may lie in a home, in one of an earlier version, or in a run's directory."""
    own = HomePaths(home).run(run_id)
    return own.tokenizer, home / "tokenizer" / own.path.name, RunPaths(home).tokenizer


class OtherRuns(NamedTuple):
    """How many other runs a home keeps files of, and what these take of the disk."""

    number: int
    size_bytes: int


def beside(paths: RunPaths) -> OtherRuns:
    """Return what a home keeps of other runs than the one of these paths."""
    others = [path for path in paths.path.parent.glob("*") if path != paths.path]
    sizes = [sum(path.stat().st_size for path in other.rglob("*") if path.is_file()) for other in others]
    return OtherRuns(sum(map(bool, sizes)), sum(sizes))
