"""What an unfinished export has so far, kept beside its target so that the next try goes on from it.

A finished stage is one file, `stage-N.safetensors`. Each replica that came has its own, in the form of a checkpoint of
slow weights.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from noloco_node.export.replica_fetch import FetchedReplica
from noloco_node.export.replica_files import MergedReplicas, ReplicaFile, ReplicaReader, Shapes
from noloco_node.state_sync.replica_mean import LeftOut, ReplicaSummary
from noloco_node.storage import atomic_file
from noloco_node.storage.checkpoint import Counters, arrays_of, counters_of
from noloco_node.terminal import say


class StagePart(msgspec.Struct, frozen=True, kw_only=True):
    """What the file of a finished stage says of it; all but `run_id` and `stage` as in `MergedReplicas`."""

    run_id: str
    stage: int
    taken: tuple[ReplicaSummary, ...]
    left_out: tuple[LeftOut, ...]
    kept_by: str | None = None


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

    def finished(self, stage: int, rounds: Sequence[int]) -> MergedReplicas | None:
        """Return a finished stage that may be kept, its replicas being in `rounds` now.

        None where it is not there, or not as it was written.
        """
        path, shapes = self._of_stage(stage), self._shapes[stage]
        try:
            part = msgspec.json.decode(atomic_file.about_of(path) or "", type=StagePart)
            atomic_file.check_tensors(path)
            weights = load_file(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, SafetensorError) as error:
            say(f"{path} is skipped: {error}")
            return None
        fits = {name: tuple(weight.shape) for name, weight in weights.items()} == dict(shapes)
        if part.run_id != self._run_id or part.stage != stage or not fits:
            return None
        found = MergedReplicas({name: weights[name] for name in shapes}, part.taken, part.left_out, part.kept_by)
        return found if is_kept(found, rounds, self._rounds_behind) else None

    def finish(self, stage: int, found: MergedReplicas) -> None:
        """Write a finished stage; the replicas that it is the mean of stay, to be judged by their loss."""
        weights, taken, left_out, kept_by = found
        part = StagePart(run_id=self._run_id, stage=stage, taken=taken, left_out=left_out, kept_by=kept_by)
        arrays = arrays_of({"slow": tuple(weights.values())})
        named = [array._replace(name=name) for name, array in zip(weights, arrays, strict=True)]
        atomic_file.write_tensors(self._of_stage(stage), named, msgspec.json.encode(part).decode())

    def replicas(self, stage: int, rounds: Sequence[int]) -> list[ReplicaFile]:
        """Return the replicas of a stage that came before an interruption: the files that are whole and fit.

        Those that their stage, whose replicas are in `rounds` now, has left behind since are not among them.
        """
        found = []
        for path in self._of_replicas(stage):
            try:
                counters = counters_of(path)
                each = ReplicaFile(path, counters.peer, counters)
                own = (counters.run_id, counters.stage, self.of_replica(stage, counters.peer))
                if own != (self._run_id, stage, path) or passed(counters.round, rounds, self._rounds_behind):
                    continue
                atomic_file.check_tensors(path)
                with ReplicaReader([each], self._shapes[stage]):
                    found.append(each)
            except (OSError, ValueError) as error:
                say(f"{path} is skipped: {error}")
        return found

    def keep_replica(self, stage: int, copy: FetchedReplica) -> ReplicaFile:
        """Keep a replica until the export is complete."""
        return self._write(self.of_replica(stage, copy.peer), stage, copy)

    def keep_snapshot(self, stage: int, copy: FetchedReplica) -> ReplicaFile:
        """Keep a snapshot likewise, as its keeper's own weights would be."""
        return self._write(self.of_replica(stage, copy.peer, "snapshot-"), stage, copy)

    def snapshots(self, stage: int) -> list[ReplicaFile]:
        """Return the snapshots of a stage that came, the files that are whole."""
        found = []
        for path in sorted(self.path.glob(f"stage-{stage}-snapshot-*.safetensors")):
            with suppress(OSError, ValueError):
                atomic_file.check_tensors(path)
                counters = counters_of(path)
                found.append(ReplicaFile(path, counters.peer, counters))
        return found

    def of_replica(self, stage: int, peer: str, kind: str = "") -> Path:
        """Return where the weights of one replica lie, or those that a peer keeps."""
        return self.path / f"stage-{stage}-{kind}{hashlib.sha256(peer.encode()).hexdigest()[:16]}.safetensors"

    def _of_stage(self, stage: int) -> Path:
        return self.path / f"stage-{stage}.safetensors"

    def _of_replicas(self, stage: int) -> list[Path]:
        return sorted(self.path.glob(f"stage-{stage}-*.safetensors"))

    def _write(self, path: Path, stage: int, copy: FetchedReplica) -> ReplicaFile:
        counters = Counters(
            run_id=self._run_id,
            stage=stage,
            round=copy.round,
            inner_steps=copy.inner_steps,
            progress=copy.progress,
            samples=0,
            optimiser_steps=0,
            peer=copy.peer,
        )
        arrays = arrays_of({"slow": tuple(copy.weights.values())})
        atomic_file.write_tensors(path, arrays, msgspec.json.encode(counters).decode())
        return ReplicaFile(path, copy.peer, counters)


def parts_beside(out: Path) -> Path:
    """Return where the finished stages of an interrupted export lie."""
    return out.absolute().parent / f".{out.name}.parts"


def is_kept(part: MergedReplicas, rounds: Sequence[int], rounds_behind: int) -> bool:
    """Say whether a finished part of a stage whose replicas are in `rounds` now goes into the checkpoint.

    One from a snapshot does not once the stage lives again.
    """
    if part.kept_by is not None and rounds:
        return False
    return not passed(max(each.round for each in part.taken), rounds, rounds_behind)


def passed(round: int, rounds: Sequence[int], rounds_behind: int) -> bool:
    """Say whether a stage whose replicas are in `rounds` now has left weights of `round` too far behind to be kept."""
    return bool(rounds) and round < median_low(rounds) - rounds_behind
