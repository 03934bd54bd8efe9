"""What an unfinished export has so far, kept beside its target so that the next try goes on from it.

A finished stage is one file, `stage-N.safetensors`. Of the stage that is under way each replica that came has its own.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from noloco_node.export.replica_fetch import FetchedReplica
from noloco_node.export.replica_files import MergedReplicas, ReplicaFile, ReplicaReader, Shapes
from noloco_node.state_sync.replica_mean import LeftOut, ReplicaSummary
from noloco_node.storage import tensor_file
from noloco_node.storage.checkpoint import Checkpoint, Counters, arrays_of, counters_of
from noloco_node.terminal import say


class StagePart(msgspec.Struct, frozen=True, kw_only=True):
    """A finished stage of an export that is not complete yet; `kept_by` as in `FoundStage`."""

    run_id: str
    stage: int
    taken: tuple[ReplicaSummary, ...]
    left_out: tuple[LeftOut, ...]
    kept_by: str | None = None


class FoundStage(NamedTuple):
    """A stage from a swarm, and who keeps the snapshot that it is from; None if it is from none."""

    stage: MergedReplicas
    kept_by: str | None


class PartsDirectory:
    """Where the parts of one run's export lie. `shapes`: of each stage. `rounds_behind`: that weights may be."""

    def __init__(self, path: Path, run_id: str, shapes: Sequence[Shapes], rounds_behind: int) -> None:
        self.path = path
        self._run_id, self._shapes, self._rounds_behind = run_id, shapes, rounds_behind

    def make(self) -> None:
        """Make the directory."""
        self.path.mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Remove everything: the export is complete."""
        shutil.rmtree(self.path, ignore_errors=True)

    def finished(self, stage: int, rounds: Sequence[int]) -> FoundStage | None:
        """Return a finished stage that may be kept, its replicas being in `rounds` now; None where there is none."""
        found = read_part(self.path, self._run_id, stage, self._shapes[stage])
        return found if found is not None and is_kept(found, rounds, self._rounds_behind) else None

    def finish(self, stage: int, found: FoundStage) -> None:
        """Write a finished stage, and remove the replicas that it is the mean of."""
        write_part(self.path, self._run_id, stage, found)
        for path in self.path.glob(f"stage-{stage}-*.safetensors"):
            path.unlink(missing_ok=True)

    def replicas(self, stage: int, rounds: Sequence[int]) -> list[ReplicaFile]:
        """Return the replicas of a stage that came before an interruption, and that it has not left behind since."""
        lying = laid_down(self.path, self._run_id, stage, self._shapes[stage])
        return [each for each in lying if not passed(each.counters.round, rounds, self._rounds_behind)]

    def keep_replica(self, stage: int, copy: FetchedReplica) -> ReplicaFile:
        """Keep a replica until its stage is complete."""
        return write_replica(path_of(self.path, stage, copy.peer), self._run_id, stage, copy)

    def keep_snapshot(self, stage: int, copy: FetchedReplica) -> ReplicaFile:
        """Keep a snapshot until its stage is complete, as its keeper's own weights would be."""
        return write_replica(self.path / f"stage-{stage}-snapshot.safetensors", self._run_id, stage, copy)


def parts_beside(out: Path) -> Path:
    """Return where the finished stages of an interrupted export lie."""
    return out.absolute().parent / f".{out.name}.parts"


def path_of(parts: Path, stage: int, peer: str) -> Path:
    """Return where the weights of one replica lie until its stage is complete."""
    return parts / f"stage-{stage}-{hashlib.sha256(peer.encode()).hexdigest()[:16]}.safetensors"


def laid_down(parts: Path, run_id: str, stage: int, shapes: Shapes) -> list[ReplicaFile]:
    """Return the replicas of a stage that an interrupted export has fetched: the files that are whole and fit."""
    found = []
    for path in sorted(parts.glob(f"stage-{stage}-*.safetensors")):
        try:
            counters = counters_of(path)
            each = ReplicaFile(path, counters.peer, counters)
            if (counters.run_id, counters.stage, path_of(parts, stage, counters.peer)) != (run_id, stage, path):
                say(f"{path} is skipped: it is of another run, stage or peer than its name says")
                continue
            tensor_file.check(path)
            with ReplicaReader([each], shapes):
                found.append(each)
        except (OSError, ValueError) as error:
            say(f"{path} is skipped: {error}")
    return found


def write_replica(path: Path, run_id: str, stage: int, copy: FetchedReplica) -> ReplicaFile:
    """Write what was fetched as a checkpoint of slow weights."""
    counters = Counters(
        run_id=run_id,
        stage=stage,
        round=copy.round,
        inner_steps=copy.inner_steps,
        progress=copy.progress,
        samples=0,
        optimiser_steps=0,
        peer=copy.peer,
    )
    arrays = arrays_of(Checkpoint(counters, {"slow": tuple(copy.weights.values())}))
    tensor_file.write(path, arrays, msgspec.json.encode(counters).decode())
    return ReplicaFile(path, copy.peer, counters)


def write_part(parts: Path, run_id: str, stage: int, found: FoundStage) -> None:
    """Write a finished stage."""
    weights, taken, left_out = found.stage
    part = StagePart(run_id=run_id, stage=stage, taken=taken, left_out=left_out, kept_by=found.kept_by)
    arrays = [
        array._replace(name=name)
        for name, array in zip(weights, arrays_of(Checkpoint(_NOBODY, {"slow": tuple(weights.values())})), strict=True)
    ]
    tensor_file.write(parts / f"stage-{stage}.safetensors", arrays, msgspec.json.encode(part).decode())


_NOBODY = Counters(run_id="", stage=0, round=0, inner_steps=0, progress=0.0, samples=0, optimiser_steps=0)


def read_part(parts: Path, run_id: str, stage: int, shapes: Shapes) -> FoundStage | None:
    """Return a finished stage of an interrupted export; None where it is not there, or not as it was written."""
    path = parts / f"stage-{stage}.safetensors"
    try:
        part = msgspec.json.decode(tensor_file.about(path) or "", type=StagePart)
        tensor_file.check(path)
        weights = load_file(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, SafetensorError) as error:
        say(f"{path} is skipped: {error}")
        return None
    fits = {name: tuple(weight.shape) for name, weight in weights.items()} == dict(shapes)
    if part.run_id != run_id or part.stage != stage or not fits:
        return None
    return FoundStage(MergedReplicas({name: weights[name] for name in shapes}, part.taken, part.left_out), part.kept_by)


def is_kept(part: FoundStage, rounds: Sequence[int], rounds_behind: int) -> bool:
    """Say whether a finished part of a stage whose replicas are in `rounds` now goes into the checkpoint.

    One from a snapshot does not once the stage lives again.
    """
    if part.kept_by is not None and rounds:
        return False
    return not passed(max(each.round for each in part.stage.taken), rounds, rounds_behind)


def passed(round: int, rounds: Sequence[int], rounds_behind: int) -> bool:
    """Say whether a stage whose replicas are in `rounds` now has left weights of `round` too far behind to be kept."""
    return bool(rounds) and round < median_low(rounds) - rounds_behind
