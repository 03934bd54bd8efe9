"""Slow weights of single replicas on a disk, whoever put them there, one tensor in memory at a time.

A replica's weights lie in three kinds of files, all in the form of `noloco_node.storage.checkpoint`: the checkpoints of
a node's own home (below `checkpoint`), the snapshots that a home keeps of other peers (below `snapshots/STAGE`), and
what an export from a living swarm has fetched so far. Each says which run, stage, peer and round it is of.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from noloco_node.errors import Exit, UserError, reason_of
from noloco_node.state_sync.replica_mean import (
    LEAST_REPLICAS,
    LeftOut,
    ReplicaSummary,
    drop_outliers,
    drop_strangers,
    mean_of,
    norm_of,
    products_of,
)
from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import Counters, counters_of, files
from noloco_node.storage.home import HomePaths
from noloco_node.terminal import say

LOOKS = 3
"""At a directory of which all files that were listed have been rotated away."""

Shapes = Mapping[str, tuple[int, ...]]


class HeldFile:
    """A file that can be read as long as this lives, also once a running node has rotated it away."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        self.path = Path(f"/dev/fd/{descriptor}")


class ReplicaFile(NamedTuple):
    """One replica's file. `peer`: whose it is; the directory's name where that is not noted. `held`: where it may be
    rotated away meanwhile.
    """

    path: Path
    peer: str
    counters: Counters
    held: HeldFile | None = None

    @property
    def readable(self) -> Path:
        """Where to read it."""
        return self.path if self.held is None else self.held.path


def in_home(home: Path, run_id: str, complain: Callable[[str], None] = say) -> list[ReplicaFile]:
    """Return what a home holds of a run: of each stage and peer the newest file that is whole; `complain` of others."""
    found: dict[tuple[int, str], ReplicaFile] = {}
    places = HomePaths(home).places_of(run_id)
    for directory in (each for paths in places for each in (paths.checkpoint, *sorted(paths.snapshots.glob("[0-9]*")))):
        for path, held in _held(directory, complain):
            try:
                counters = counters_of(held.path)
                peer = counters.peer or home.resolve().name
                known = found.get((counters.stage, peer))
                if counters.run_id != run_id:
                    complain(f"{path} is skipped: it is of the run {counters.run_id[:12]}, not of {run_id[:12]}")
                elif not known or known.counters.round < counters.round:
                    atomic_file.check_tensors(held.path)
                    found[counters.stage, peer] = ReplicaFile(path, peer, counters, held)
            except (OSError, ValueError) as error:
                # What is read has a number for a name.
                complain(f"{path} is skipped: {str(error).replace(held.path.name, path.name)}")
    return list(found.values())


def _held(directory: Path, complain: Callable[[str], None]) -> list[tuple[Path, HeldFile]]:
    """Return the files of a directory, the newest first, those that a running node writes meanwhile included."""
    for _ in range(LOOKS):
        held, listed = [], files(directory)
        for path in reversed(listed):
            try:
                held.append((path, HeldFile(path)))
            except FileNotFoundError:
                continue
            except OSError as error:
                complain(f"{path} is skipped: {reason_of(error)}")
        if held or not listed:
            break
    return held


def newest(filed: Sequence[ReplicaFile], stage: int) -> list[ReplicaFile]:
    """Return the files of one stage, the newest of each peer, sorted by peer."""
    found: dict[str, ReplicaFile] = {}
    for each in sorted(filed, key=lambda each: each.counters.round):
        if each.counters.stage == stage:
            found[each.peer] = each
    return [found[peer] for peer in sorted(found)]


class ReplicaReader:
    """The slow weights of one stage's replicas, read tensor by tensor. A context."""

    def __init__(self, filed: Sequence[ReplicaFile], shapes: Shapes) -> None:
        """Open `filed`; raise ValueError where a file does not hold tensors of these shapes."""
        self._names, self._open = list(shapes), ExitStack()
        self.filed, self._files = tuple(filed), []
        try:
            for each in filed:
                file = self._open.enter_context(safe_open(each.readable, framework="pt"))
                for number, shape in enumerate(shapes.values()):
                    if tuple(file.get_slice(f"slow.{number}").get_shape()) != tuple(shape):
                        raise ValueError(f"{each.path} is not of this run: tensor {number} has another shape")
                self._files.append(file)
        except SafetensorError as error:
            self._open.close()
            raise ValueError(f"{each.path} cannot be read: {error}") from error

    def standing(self, place: int) -> ReplicaSummary:
        """Return where a replica stood, and the norm of its weights."""
        counters, file = self.filed[place].counters, self._files[place]
        return ReplicaSummary(
            peer=self.filed[place].peer,
            round=counters.round,
            inner_steps=counters.inner_steps,
            progress=counters.progress,
            norm=norm_of(lambda number: file.get_tensor(f"slow.{number}"), len(self._names)),
        )

    def weights(self, place: int) -> dict[str, Tensor]:
        """Return one replica's slow weights by name."""
        return {name: self._files[place].get_tensor(f"slow.{number}") for number, name in enumerate(self._names)}

    def alike(self, places: Sequence[int]) -> tuple[list[int], dict[int, float]]:
        """Return which of these replicas have as much in common as replicas of a stage do, and who has not."""
        if len(places) < LEAST_REPLICAS:
            return list(places), {}
        tensors = ([file.get_tensor(f"slow.{number}") for file in self._files] for number in range(len(self._names)))
        return drop_strangers(products_of(tensors), places)

    def mean(self, places: Sequence[int]) -> dict[str, Tensor]:
        """Return the mean of some replicas by name: in memory are it and one tensor of each."""
        return {
            name: mean_of([self._files[place].get_tensor(f"slow.{number}") for place in places])
            for number, name in enumerate(self._names)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files = []
        self._open.close()


class MergedReplicas(NamedTuple):
    """One stage: the mean of its replicas by name, who is in it, and who is not.

    `kept_by`: who keeps the snapshot that is in the mean; None if none is.
    """

    weights: dict[str, Tensor]
    taken: tuple[ReplicaSummary, ...]
    left_out: tuple[LeftOut, ...]
    kept_by: str | None = None


def merged(stage: int, filed: Sequence[ReplicaFile], shapes: Shapes, rounds_behind: int) -> MergedReplicas:
    """Merge the replicas of a stage that lie in these files; raise `UserError` where none is of use."""
    try:
        with ReplicaReader(filed, shapes) as opened:
            standings = [opened.standing(place) for place in range(len(filed))]
            kept, left_out = drop_outliers(standings, rounds_behind)
            kept, strangers = opened.alike(kept)
            left_out += [
                LeftOut(peer=filed[place].peer, why=f"not like the others: cosine {cosine:.2f}")
                for place, cosine in strangers.items()
            ]
            if kept:
                return MergedReplicas(opened.mean(kept), tuple(standings[place] for place in kept), tuple(left_out))
            why = "; ".join(f"{each.peer}: {each.why}" for each in left_out) or "no file holds any of its weights"
    except (OSError, ValueError) as error:
        why = str(error)
    raise UserError(
        f"There are no usable weights of stage {stage}.",
        why=why,
        hint="more homes that took part in the run, or a living swarm (an invite)",
        code=Exit.UNREACHABLE,
    )
