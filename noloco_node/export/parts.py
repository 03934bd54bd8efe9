"""Stages of an unfinished export, kept beside its target so that the next try goes on from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import msgspec

from noloco_node.export.replica_fetch import FetchedReplica
from noloco_node.export.replica_files import MergedReplicas, ReplicaFile, ReplicaReader, Shapes
from noloco_node.state_sync.replica_mean import LeftOut, ReplicaSummary
from noloco_node.storage import tensor_file
from noloco_node.storage.checkpoint import Checkpoint, Counters, arrays_of, counters_of


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
                continue
            tensor_file.check(path)
            with ReplicaReader([each], shapes):
                found.append(each)
        except (OSError, ValueError):
            continue
    return found


def _file(path: Path, run_id: str, stage: int, copy: FetchedReplica) -> ReplicaFile:
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


def _write_part(parts: Path, run_id: str, stage: int, found: FoundStage) -> None:
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
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = parts / f"stage-{stage}.safetensors"
    try:
        part = msgspec.json.decode(tensor_file.about(path) or "", type=StagePart)
        tensor_file.check(path)
        weights = load_file(path)
    except (OSError, ValueError, SafetensorError):
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
