"""Slow weights of single replicas on a disk, read one tensor at a time, and what an unfinished export has fetched.

All files have the form of `noloco_node.storage.checkpoint`: the checkpoints of a home, its stage snapshots, and
replicas that an export has fetched. An export keeps these beside its target, so that the next try goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from noloco_node.errors import Exit, UserError, reason_of
from noloco_node.run.runfile import read_run_text
from noloco_node.state_sync import replica_mean
from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import (
    Checkpoint,
    Counters,
    arrays_of,
    counters_of,
    evaluated_among,
    files,
    load,
    of_run,
)
from noloco_node.storage.home import HomePaths, RunPaths
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.terminal import say
from pipeline.hardware.split_weights import values_of

LOOKS = 3  # at a directory of which all files that were listed have been rotated away
SNAPSHOT = "snapshot-"  # in the name of the file of a snapshot

Shapes = Mapping[str, tuple[int, ...]]


class HeldFile:
    """A file that stays readable as long as this lives, also once a running node has rotated it away."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        self.path = Path(f"/dev/fd/{descriptor}")


class ReplicaFile(NamedTuple):
    """One replica's file. `peer`: or the directory's name, if it is not noted. `held`: if it may be rotated away.

    `is_snapshot`: fetched from a peer that keeps it for a dead stage; `peer` is that keeper.
    """

    path: Path
    peer: str
    counters: Counters
    held: HeldFile | None = None
    is_snapshot: bool = False

    @property
    def readable(self) -> Path:
        return self.path if self.held is None else self.held.path


def in_home(home: Path, run_id: str, complain: Callable[[str], None] = say) -> list[ReplicaFile]:
    """Return the newest whole file of each stage and peer that a home holds of a run; `complain` of others."""
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
                # An error of the system names the descriptor by which the file was read.
                complain(f"{path} is skipped: {error.strerror if isinstance(error, OSError) else error}")
    return list(found.values())


def under_other_ids(home: Path, digest: str) -> Iterator[str]:
    """Say which directories of a home hold weights of a run under other ids alone, and what to do with them.

    Another version of this program may give the same run file another id.
    """
    for directory in (home, *sorted(HomePaths(home).run(digest).path.parent.glob("*"))):
        paths = RunPaths(directory)
        if files(paths.checkpoint) and not any(of_run(paths.checkpoint, digest)):
            with suppress(UserError):  # a run file that this version refuses is of no run that it can take part in
                if RunFileText(read_run_text(paths.run_file), str(paths.run_file), ()).digest == digest:
                    yield (
                        f"{directory} holds weights of this run under another id, which another version of "
                        "noloco-node gave it. This version cannot use them: export them with that version, and go on "
                        "from the export in a new run (noloco-node init --from DIR)"
                    )


def _held(directory: Path, complain: Callable[[str], None]) -> list[tuple[Path, HeldFile]]:
    """Return the files of a directory, the newest first, including those that a running node writes meanwhile."""
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


class ReplicaReader(AbstractContextManager["ReplicaReader"]):
    """The slow weights of one stage's replicas, read tensor by tensor."""

    def __init__(self, filed: Sequence[ReplicaFile], shapes: Shapes) -> None:
        """Open `filed`; raise ValueError if a file does not hold tensors of these shapes."""
        self._names, self.filed, self._files = list(shapes), tuple(filed), []
        with ExitStack() as opening:
            for each in filed:
                try:
                    file = opening.enter_context(safe_open(each.readable, framework="pt"))
                    found = [tuple(file.get_slice(f"slow.{number}").get_shape()) for number in range(len(shapes))]
                except SafetensorError as error:
                    raise ValueError(f"{each.path} cannot be read: {error}") from error
                if found != [tuple(shape) for shape in shapes.values()]:
                    raise ValueError(f"{each.path} is not of this run: its tensors have other shapes")
                self._files.append(file)
            self._open = opening.pop_all()

    def standing(self, place: int) -> replica_mean.ReplicaSummary:
        each = self.filed[place]
        return _summary(each.peer, each.counters, (self._tensor(place, number) for number in range(len(self._names))))

    def weights(self, place: int) -> dict[str, Tensor]:
        return {name: self._tensor(place, number) for number, name in enumerate(self._names)}

    def _tensor(self, place: int, number: int) -> Tensor:
        found: Tensor = self._files[place].get_tensor(f"slow.{number}")
        return found

    def alike(self, places: Sequence[int]) -> tuple[list[int], dict[int, float]]:
        """Return which of these replicas are alike, and the cosines of the others."""
        if len(places) < replica_mean.LEAST_REPLICAS:
            return list(places), {}
        everyone = range(len(self.filed))
        tensors = ([self._tensor(place, number) for place in everyone] for number in range(len(self._names)))
        return replica_mean.drop_strangers(replica_mean.products_of(tensors), places)

    def mean(self, places: Sequence[int]) -> dict[str, Tensor]:
        """Return the mean of some replicas by name; memory holds it and one tensor of each."""
        return {
            name: replica_mean.mean_of([self._tensor(place, number) for place in places])
            for number, name in enumerate(self._names)
        }

    def mean_with(self, mean: Mapping[str, Tensor], of: int, place: int) -> dict[str, Tensor]:
        """Return the mean of `of` replicas with one more; memory holds both means and one tensor."""
        return {
            name: torch.lerp(mean[name].float(), self._tensor(place, number).float(), 1.0 / (of + 1))
            for number, name in enumerate(self._names)
        }

    def __exit__(self, *_: object) -> None:
        self._files = []
        self._open.close()


def _summary(peer: str, counters: Counters, weights: Iterator[Tensor]) -> replica_mean.ReplicaSummary:
    return replica_mean.ReplicaSummary(
        peer=peer,
        round=counters.round,
        inner_steps=counters.inner_steps,
        progress=counters.progress,
        norm=replica_mean.norm_of(weights),
    )


class MergedReplicas(NamedTuple):
    """One stage: the mean of its replicas by name, the replicas in it, and those left out.

    `kept_by`: the keeper of a snapshot in the mean, or None.
    """

    weights: dict[str, Tensor]
    taken: tuple[replica_mean.ReplicaSummary, ...]
    left_out: tuple[replica_mean.LeftOut, ...]
    kept_by: str | None = None


def keeper_of(filed: Iterable[ReplicaFile]) -> str | None:
    """Return the keeper of the snapshot among these files, or None."""
    return next((each.peer for each in filed if each.is_snapshot), None)


def merged(stage: int, filed: Sequence[ReplicaFile], shapes: Shapes, rounds_behind: int) -> MergedReplicas:
    """Merge the replicas of a stage in these files; raise `UserError` if none is of use."""
    try:
        with ReplicaReader(filed, shapes) as opened:
            standings = [opened.standing(place) for place in range(len(filed))]
            kept, left_out = replica_mean.drop_outliers(standings, rounds_behind)
            kept, strangers = opened.alike(kept)
            left_out += [
                replica_mean.LeftOut(peer=filed[place].peer, why=f"not like the others: cosine {cosine:.2f}")
                for place, cosine in strangers.items()
            ]
            if kept:
                taken, keeper = tuple(standings[place] for place in kept), keeper_of(filed[place] for place in kept)
                return MergedReplicas(opened.mean(kept), taken, tuple(left_out), keeper)
            why = "; ".join(f"{each.peer}: {each.why}" for each in left_out) or "no file holds any of its weights"
    except (OSError, ValueError) as error:
        why = reason_of(error)
    raise UserError(
        f"There are no usable weights of stage {stage}.",
        why=why,
        hint="more homes that took part in the run, or a living swarm (an invite)",
        code=Exit.UNREACHABLE,
    )


def best_evaluated(homes: Sequence[Path], run_id: str, shapes: Shapes) -> tuple[MergedReplicas, float]:
    """Return the weights that had the least loss on held-out text when their peer evaluated them, and that loss.

    Raises `UserError` if no home has any of a run of these `shapes`.
    """
    places = (place.best for home in homes for place in HomePaths(home).places_of(run_id))
    held = {each.path: (path, each) for place in places for path, each in _held(place, say)}
    found = evaluated_among(held)
    if len({each.text for each in found.values()}) > 1:
        say("these homes hold evaluations on several texts, whose losses do not compare")
    why = "none of these homes has evaluated its weights"
    order = sorted(found, key=lambda path: found[path].held_out_loss)
    for number, readable in enumerate(order):
        (path, _), counters = held[readable], found[readable]
        try:
            atomic_file.check_tensors(readable)
            weights = tuple(values_of(load(readable, "fast").tensors["fast"]))
            if counters.run_id != run_id or [tuple(each.shape) for each in weights] != list(shapes.values()):
                raise ValueError(f"{path} is not of this run")
        except (OSError, ValueError, KeyError) as error:
            why = f"{path} cannot be read: {error}"
            say(f"{path} is skipped: {error}")
            continue
        taken, loss = _summary(counters.peer, counters, iter(weights)), counters.held_out_loss
        left_out = [
            replica_mean.LeftOut(
                peer=each.peer, why=f"loss {each.held_out_loss:.4f} at its best, the least is {loss:.4f}"
            )
            for each in (found[worse] for worse in order[number + 1 :])
        ]
        return MergedReplicas(dict(zip(shapes, weights, strict=True)), (taken,), tuple(left_out)), loss
    raise UserError(
        "There are no weights of an evaluation.",
        why=why,
        hint="the homes of nodes that have evaluated; without --best the newest weights are exported",
        code=Exit.UNREACHABLE,
    )


class PartsDirectory:
    """What the export of one run has fetched. `shapes`: of each stage. `rounds_behind`: that weights may be."""

    def __init__(self, path: Path, run_id: str, shapes: Sequence[Shapes], rounds_behind: int) -> None:
        self.path = path
        self._run_id, self._shapes, self._rounds_behind = run_id, shapes, rounds_behind

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def replicas(self, stage: int, rounds: Sequence[int], *, are_snapshots: bool = False) -> list[ReplicaFile]:
        """Return the whole files of a stage whose replicas are in `rounds` now, without those left far behind."""
        found = []
        for path in sorted(self.path.glob(f"stage-{stage}-*.safetensors")):
            try:
                counters = counters_of(path)
                each = ReplicaFile(path, counters.peer, counters, is_snapshot=are_snapshots)
                place = self.of_replica(stage, counters.peer, is_snapshot=are_snapshots)
                if (counters.run_id, counters.stage, place) != (self._run_id, stage, path):
                    continue
                if passed(counters.round, rounds, self._rounds_behind):
                    continue
                atomic_file.check_tensors(path)
                with ReplicaReader([each], self._shapes[stage]):
                    found.append(each)
            except (OSError, ValueError) as error:
                say(f"{path} is skipped: {reason_of(error)}")
        return found

    def keep(self, copy: Checkpoint, *, is_snapshot: bool = False) -> ReplicaFile:
        """Keep a replica, or a snapshot under its keeper's name, until the export is complete."""
        counters = copy.counters
        path = self.of_replica(counters.stage, counters.peer, is_snapshot=is_snapshot)
        atomic_file.write_tensors(path, arrays_of(copy.tensors), msgspec.json.encode(counters).decode())
        return ReplicaFile(path, counters.peer, counters, is_snapshot=is_snapshot)

    def of_replica(self, stage: int, peer: str, *, is_snapshot: bool = False) -> Path:
        """Return the path of a replica, or of a snapshot that a peer keeps."""
        kind = SNAPSHOT if is_snapshot else ""
        return self.path / f"stage-{stage}-{kind}{hashlib.sha256(peer.encode()).hexdigest()[:16]}.safetensors"


def parts_beside(out: Path) -> Path:
    place = Path(os.path.realpath(out))
    return place.parent / f".{place.name}.parts"


def passed(round: int, rounds: Sequence[int], rounds_behind: int) -> bool:
    """Say whether a stage whose replicas are in `rounds` now has left weights of `round` too far behind."""
    return bool(rounds) and round < median_low(rounds) - rounds_behind
