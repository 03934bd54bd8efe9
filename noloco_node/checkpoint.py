"""Checkpoints: one whole file or none.

A checkpoint is one safetensors file, written aside, flushed to the disk and renamed, so that a machine that loses
power at any instant finds a whole one. The last few are kept. A disk that is full or read-only costs the new
checkpoint and never an earlier one: `save` says so with an `OSError`, and the node carries on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

KEPT = 2


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of the replica besides its tensors."""

    run_id: str
    stage: int
    round: int
    inner_steps: int
    progress: float
    samples: int
    optimiser_steps: int
    meetings: int = 0
    """Of the running momentum period."""
    last_met: int | None = None
    """The round in which these weights last met anybody's, 0 if in none; None where it was not noted."""
    data_position: dict[str, Any] | None = None


class Checkpoint(NamedTuple):
    """One replica at rest: `tensors` by group, each a tuple in the stage's order.

    The groups are slow, momentum, gathered, fast and optimiser; gathered is absent between two momentum periods. What a
    lossy codec owes (`gossip.codec.Feedback`) is not kept: a restart loses one rounding.
    """

    counters: Counters
    tensors: dict[str, tuple[Tensor, ...]]


def save(directory: Path, checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` as a new file and drop all but the last `KEPT`; raise `OSError` when the disk refuses."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{checkpoint.counters.inner_steps:010d}.safetensors"
    aside = directory / f".{name}.aside"
    for left in directory.glob(".*.aside"):  # of a process that was killed while it saved
        left.unlink()
    flat = {f"{group}.{i}": t.contiguous() for group, ts in checkpoint.tensors.items() for i, t in enumerate(ts)}
    try:
        save_file(flat, aside, metadata={"counters": msgspec.json.encode(checkpoint.counters).decode()})
        _flush(aside)
        os.replace(aside, directory / name)
        _flush(directory)
    except SafetensorError as error:  # the library reports a full disk in its own type
        raise OSError(str(error)) from error
    finally:
        aside.unlink(missing_ok=True)
    for old in _files(directory)[:-KEPT]:
        old.unlink(missing_ok=True)
    return directory / name


def load_latest(directory: Path, run_id: str) -> Checkpoint | None:
    """Return the newest readable checkpoint of this run, or None."""
    for path in reversed(_files(directory)):
        try:
            checkpoint = _load(path)
        except (SafetensorError, OSError, msgspec.MsgspecError, KeyError):
            continue
        if checkpoint.counters.run_id == run_id:
            return checkpoint
    return None


def _load(path: Path) -> Checkpoint:
    with safe_open(path, framework="pt") as file:
        counters = msgspec.json.decode(file.metadata()["counters"], type=Counters)
        groups: dict[str, dict[int, Tensor]] = {}
        for key in file.keys():  # noqa: SIM118 (not a dictionary)
            group, number = key.rsplit(".", 1)
            groups.setdefault(group, {})[int(number)] = file.get_tensor(key)
    return Checkpoint(counters, {g: tuple(ts[i] for i in range(len(ts))) for g, ts in groups.items()})


def _files(directory: Path) -> list[Path]:
    """Return the checkpoints, the one written last at the end: another run or stage may have fewer inner steps."""
    return sorted(directory.glob("[0-9]*.safetensors"), key=lambda path: (path.stat().st_mtime_ns, path.name))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
