"""Checkpoints: each is one safetensors file that is whole or not there, and one whole file is always there.

The files are numbered in the order in which they were written. A disk that is full or read-only costs the new one
alone: `save` raises `OSError`, and the node carries on (docs/design/node.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from noloco_node.storage import atomic_file
from noloco_node.units import Amount, Count, Fraction

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 3  # of the stage that is served, unless its owner says otherwise
_NAME = re.compile(r"\d{8,}-\d{10,}\.safetensors")
"""Numbers are written with zeros before them, for people; they are compared as numbers, however long."""

C = TypeVar("C", bound="Counters")


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a checkpoint."""

    run_id: str
    stage: Count
    round: Count
    inner_steps: Count
    progress: Fraction
    samples: Count
    optimiser_steps: Count
    meetings: Count = 0  # of the running momentum period
    last_met: Count | None = None
    """The round in which these weights last met another replica's, 0 if in none; None where it was not noted."""
    slow_steps: Count | None = None  # the inner steps that the slow weights hold; None where it is not known
    data_position: dict[str, Any] | None = None
    peer: str = ""  # the peer that has trained these weights


class EvaluatedCounters(Counters, frozen=True, kw_only=True):
    """The metadata of weights that were evaluated. `held_out_loss`: on held-out text, nats a token.

    `text`: the digest of that text; empty where it was not noted.
    """

    held_out_loss: Amount
    text: str = ""


class Checkpoint(NamedTuple):
    """One replica at rest: `tensors` by group, each a tuple in the stage's order.

    The groups are slow, momentum (absent if alpha = 0), gathered (absent between two momentum periods), fast and
    optimiser (absent if their device was lost); a snapshot for others has slow alone, evaluated weights are fast alone.
    What a lossy codec has rounded off is in the fast weights. The tensors may be the replica's own; they stay until
    `read` is called.
    """

    counters: Counters
    tensors: dict[str, tuple[Tensor, ...]]
    read: Callable[[], None] = lambda: None


def save(directory: Path, checkpoint: Checkpoint, keep: int = KEPT) -> Path:
    """Write `checkpoint` as a new file, then remove all but the last `keep`; raise `OSError` if the disk refuses."""
    return store(directory, checkpoint.counters, arrays_of(checkpoint.tensors), keep, checkpoint.read)


def store(
    directory: Path,
    counters: Counters,
    arrays: list[atomic_file.Array],
    keep: int,
    read: Callable[[], None] = lambda: None,
) -> Path:
    """Do as `save` does with tensors that are bytes already, without torch."""
    atomic_file.make_directory(directory)
    atomic_file.sweep(directory)
    earlier = files(directory)
    path = following(directory, f"{counters.inner_steps:010d}.safetensors")
    try:
        atomic_file.write_tensors(path, arrays, msgspec.json.encode(counters).decode(), read)
    except OSError as error:
        if earlier:
            beside = f"the {len(earlier)} kept before it {'are' if len(earlier) > 1 else 'is'} untouched"
            raise OSError(error.errno, f"{error.strerror or error}; {beside}", error.filename) from error
        raise
    for old in [*earlier, path][: -max(1, keep)]:
        old.unlink(missing_ok=True)
    return path


def arrays_of(tensors: Mapping[str, tuple[Tensor, ...]]) -> list[atomic_file.Array]:
    return [
        atomic_file.array(f"{group}.{number}", tensor)
        for group, members in tensors.items()
        for number, tensor in enumerate(members)
    ]


def load_latest(
    directory: Path, run_id: str, complain: Callable[[str], None] = lambda _: None, wanted: tuple[str, ...] = ()
) -> Checkpoint | None:
    """Return the newest whole checkpoint of this run, or None; `complain` of damaged ones.

    `wanted`: the groups of tensors to read, all by default.
    """
    for path, _ in of_run(directory, run_id, complain):
        found = load_whole(path, complain, *wanted)
        if found is not None:
            return found
    return None


def of_run(
    directory: Path, run_id: str, complain: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Path, Counters]]:
    """Yield the files of a run in a directory, the newest first; `complain` of unreadable ones."""
    for path in reversed(files(directory)):
        try:
            counters = counters_of(path)
        except (OSError, ValueError) as error:
            complain(_of_no_use(path, error))
            continue
        if counters.run_id == run_id:
            yield path, counters


def load_whole(path: Path, complain: Callable[[str], None], *wanted: str) -> Checkpoint | None:
    """Return a checkpoint, or its groups `wanted`, if its bytes are those that were written."""
    try:
        atomic_file.check_tensors(path)
        return load(path, *wanted)
    except (OSError, ValueError) as error:
        complain(_of_no_use(path, error))
        return None


def _of_no_use(path: Path, error: Exception) -> str:
    return f"the checkpoint {path} is of no use ({error}); trying the one before it"


def counters_of(path: Path) -> Counters:
    """Read the counters of a checkpoint; raise ValueError or `OSError`."""
    return _about(path, Counters)


def evaluated_among(paths: Iterable[Path]) -> dict[Path, EvaluatedCounters]:
    """Return the files of weights that were evaluated, with their counters; pass over what cannot be read."""
    found = {}
    for path in paths:
        with suppress(OSError, ValueError):
            found[path] = _about(path, EvaluatedCounters)
    return found


def _about(path: Path, kind: type[C]) -> C:
    told = atomic_file.about_of(path)
    if told is None:
        raise ValueError("it does not say what it is")
    return msgspec.json.decode(told, type=kind)


def load(path: Path, *wanted: str) -> Checkpoint:
    """Read a checkpoint, or its groups `wanted`; raise ValueError or `OSError`."""
    from safetensors import SafetensorError, safe_open

    counters = counters_of(path)
    groups: dict[str, dict[int, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dictionary)
                group, number = key.rsplit(".", 1)
                if not wanted or group in wanted:
                    groups.setdefault(group, {})[int(number)] = file.get_tensor(key)
        return Checkpoint(counters, {g: tuple(ts[i] for i in range(len(ts))) for g, ts in groups.items()})
    except (SafetensorError, KeyError) as error:
        raise ValueError(str(error)) from error


def files(directory: Path) -> list[Path]:
    """Return the checkpoints in the order in which they were written; other files there are their owner's."""
    return sorted((path for path in directory.glob("[0-9]*") if _NAME.fullmatch(path.name)), key=_serial)


def following(directory: Path, name: str) -> Path:
    """Return the path of the next file of a directory: `name` behind the number after the last."""
    return directory / f"{1 + max(map(_serial, files(directory)), default=0):08d}-{name}"


def _serial(path: Path) -> int:
    return int(path.name.partition("-")[0])
