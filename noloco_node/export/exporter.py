"""`noloco-node export`: the model of a run as one ordinary checkpoint, wherever its weights are.

They come from a living swarm (an invite), from the homes of nodes that took part (their checkpoints, and the snapshots
that they keep of others), or from both; of a replica that is found twice the newer weights count. Each stage is the
mean of its replicas but for outliers and stragglers (`merging`). One of which no replica gives its weights comes from a
snapshot that a peer of the swarm keeps (`keepers`), and that is said.

From a swarm one replica after the other is fetched and laid on the disk, so that memory holds one at a time; when a
stage is complete its mean is written beside the target, and its replicas are removed. Whoever interrupts an export
finds the finished stages there when it starts again, and of the one that was under way the replicas that had come;
fetched are the others, and what its stage has left far behind since. Who is there is looked up anew before each stage
and each replica. Before the checkpoint takes its place it is loaded as anybody would load it, and compared bit for bit.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_node.errors import Exit, UserError, reason_of
from noloco_node.export.parts import (
    FoundStage,
    _file,
    _write_part,
    is_kept,
    laid_down,
    parts_beside,
    passed,
    path_of,
    read_part,
)
from noloco_node.export.provenance import noted, told_of
from noloco_node.export.replica_fetch import FetchedReplica, Look, at_work, fetched
from noloco_node.export.replica_files import MergedReplicas, ReplicaFile, Shapes, in_home, merged, newest
from noloco_node.export.snapshot_fetch import SnapshotUnavailable, fetch_kept, lost
from noloco_node.network.interface import PeerNetwork
from noloco_node.planning.model_layout import ModelLayout, model_layout
from noloco_node.run.runfile import read_run_text
from noloco_node.state_sync.replica_mean import LeftOut, ReplicaSummary
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.terminal import say


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """What to export, and where to. `invite`: of a living swarm; `homes`: of nodes of the run; at least one of them."""

    out: Path
    invite: str | None = None
    homes: tuple[Path, ...] = ()


async def export(order: ExportRequest) -> str:
    """Gather, merge, write and verify one Hugging Face directory; return what was done, in words."""
    from noloco_node.export.huggingface import check_target

    check_target(order.out)
    if order.invite is None:
        if not order.homes:
            raise UserError(
                "There is nothing to export from.",
                why="neither an invite nor a home was given",
                attempt="noloco-node export INVITE --out DIR, or noloco-node export --from-home HOME --out DIR",
                code=Exit.USAGE,
            )
        return await asyncio.to_thread(_from_homes, order)
    from noloco_node.swarm.connection import visited

    parts = parts_beside(order.out)
    async with visited(order.invite) as (network, recipe, membership):
        plan = await asyncio.to_thread(model_layout, recipe.run)
        filed = await asyncio.to_thread(of_homes, order.homes, recipe)
        found = await from_swarm(network, recipe, membership.peek, plan, (parts, filed))
    kept_by = {number: each.kept_by for number, each in enumerate(found) if each.kept_by is not None}
    told = await asyncio.to_thread(write, order.out, recipe, plan, [each.stage for each in found], kept_by)
    shutil.rmtree(parts, ignore_errors=True)
    return told


def recipe_of(homes: Sequence[Path]) -> RunFileText:
    """Return the run that these homes took part in; raise `UserError` where they name none, or several."""
    for home in homes:
        if not (home / "run.toml").is_file():
            raise UserError(
                f"{home} is not the home of a node.",
                why="it holds no run.toml, which a node keeps there when it joins",
                attempt="the directory that `noloco-node join --home` was given, ~/.noloco/node by default",
                code=Exit.CONFIG,
            )
    recipes = {home: RunFileText(read_run_text(home / "run.toml"), str(home / "run.toml")) for home in homes}
    first = recipes[homes[0]]
    for home, recipe in recipes.items():
        if recipe.digest != first.digest:
            raise UserError(
                f"{home} is the home of another run.",
                why=f"it took part in {recipe.digest[:12]}, {homes[0]} in {first.digest[:12]}",
                attempt="homes of one run only",
                code=Exit.OTHER_RUN,
            )
    return first


def of_homes(homes: Sequence[Path], recipe: RunFileText) -> list[ReplicaFile]:
    """Return all weights of a run that lie in these homes."""
    return [filed for home in homes for filed in in_home(home, recipe.digest)]


def merged_homes(homes: Sequence[Path], recipe: RunFileText, plan: ModelLayout) -> list[MergedReplicas]:
    """Return every stage, merged from what lies in these homes; raise `UserError` where a stage is missing."""
    filed, rounds_behind = of_homes(homes, recipe), recipe.run.outer.staleness_at_most
    return [merged(number, newest(filed, number), shapes, rounds_behind) for number, shapes in enumerate(plan.shapes)]


def _from_homes(order: ExportRequest) -> str:
    recipe = recipe_of(order.homes)
    plan = model_layout(recipe.run)
    return write(order.out, recipe, plan, merged_homes(order.homes, recipe, plan))


async def from_swarm(
    network: PeerNetwork, recipe: RunFileText, look: Look, plan: ModelLayout, disk: tuple[Path, Sequence[ReplicaFile]]
) -> list[FoundStage]:
    """Return every stage, from finished parts, living replicas, homes and kept snapshots.

    `disk`: where parts lie, and what homes hold. What is complete stays on the disk, whatever happens; raises
    `UserError` where a stage has nothing.
    """
    parts, _ = disk
    stages = []
    try:
        parts.mkdir(parents=True, exist_ok=True)
        for number, shapes in enumerate(plan.shapes):
            rounds = [record.round for record in at_work(await look(), number)]
            found = await asyncio.to_thread(read_part, parts, recipe.digest, number, shapes)
            if found is not None and is_kept(found, rounds, recipe.run.outer.staleness_at_most):
                of_snapshot = "" if found.kept_by is None else f", from a snapshot that {found.kept_by} keeps"
                rounds_told = rounds_of(found.stage.taken)
                say(f"stage {number}: kept from an export that was interrupted, {rounds_told}{of_snapshot}")
            else:
                found = await _gathered(network, recipe, look, (number, shapes), disk)
                await asyncio.to_thread(_write_part, parts, recipe.digest, number, found)
                for path in parts.glob(f"stage-{number}-*.safetensors"):
                    path.unlink(missing_ok=True)
            stages.append(found)
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        raise UserError(
            f"The stages cannot be laid down in {parts}.",
            why=reason_of(error),
            attempt="free some space there, or export to another disk; finished stages are kept",
            code=Exit.STORAGE,
        ) from error
    return stages


async def _gathered(
    network: PeerNetwork,
    recipe: RunFileText,
    look: Look,
    stage: tuple[int, Shapes],
    disk: tuple[Path, Sequence[ReplicaFile]],
) -> FoundStage:
    """Return the mean of a stage's replicas; where none of them lives, of a snapshot too if one is clearly newer."""
    (number, shapes), (parts, filed) = stage, disk
    rounds_behind = recipe.run.outer.staleness_at_most
    lying, came = await _lay_down(network, recipe, look, stage, parts)
    candidates = newest([*filed, *lying, *came], number)
    living = {record.peer for record in at_work(await look(), number)}
    if came or any(each.peer in living for each in lying):
        return FoundStage(await asyncio.to_thread(merged, number, candidates, shapes, rounds_behind), None)
    own = max((each.counters.round for each in candidates), default=None)
    kept = await _snapshot(network, recipe, look, stage, (parts, own))
    if isinstance(kept, SnapshotUnavailable):
        if not candidates:
            raise lost(recipe, await look(), number, kept)
        return FoundStage(await asyncio.to_thread(merged, number, candidates, shapes, rounds_behind), None)
    round = kept.counters.round
    passed_by = [each for each in candidates if passed(each.counters.round, [round], rounds_behind)]
    rest = newest([*(each for each in candidates if each not in passed_by), kept], number)
    found = await asyncio.to_thread(merged, number, rest, shapes, rounds_behind)
    why = f"the snapshot that {kept.peer} keeps is of round {round}"
    older = [LeftOut(peer=each.peer, why=f"round {each.counters.round}, {why}") for each in passed_by]
    taken = any((each.peer, each.round) == (kept.peer, round) for each in found.taken)
    return FoundStage(found._replace(left_out=(*found.left_out, *older)), kept.peer if taken else None)


async def _snapshot(
    network: PeerNetwork, recipe: RunFileText, look: Look, stage: tuple[int, Shapes], here: tuple[Path, int | None]
) -> ReplicaFile | SnapshotUnavailable:
    """Lay a snapshot that is newer than the round which is `here` on the disk, as its keeper's own weights would be."""
    (number, _), (parts, own) = stage, here
    found = await fetch_kept(network, recipe, look, stage, own)
    if isinstance(found, SnapshotUnavailable):
        return found
    return await asyncio.to_thread(_file, parts / f"stage-{number}-snapshot.safetensors", recipe.digest, number, found)


async def _lay_down(
    network: PeerNetwork, recipe: RunFileText, look: Look, stage: tuple[int, Shapes], parts: Path
) -> tuple[list[ReplicaFile], list[ReplicaFile]]:
    """Return the replicas of a stage, a file each: those that an interrupted export has left, and those that came."""
    number, shapes = stage
    rounds = [record.round for record in at_work(await look(), number)]
    lying = [
        each
        for each in await asyncio.to_thread(laid_down, parts, recipe.digest, number, shapes)
        if not passed(each.counters.round, rounds, recipe.run.outer.staleness_at_most)
    ]
    if lying:
        count = f"{len(lying)} replica{'s are' if len(lying) > 1 else ' is'} here"
        say(f"stage {number}: {count} from an export that was interrupted")
    came = [
        await asyncio.to_thread(_file, path_of(parts, number, copy.peer), recipe.digest, number, copy)
        async for copy in fetched(network, look, number, shapes, [each.peer for each in lying])
    ]
    return lying, came


def write(
    out: Path,
    recipe: RunFileText,
    plan: ModelLayout,
    stages: Sequence[MergedReplicas],
    kept_by: Mapping[int, str] | None = None,
) -> str:
    """Write the checkpoint of merged stages; return what was done, in words.

    `kept_by`: of the stages that come from a snapshot, who keeps it.
    """
    from noloco_node.data.encoding import open_tokenizer
    from noloco_node.export.huggingface import write_checkpoint
    from noloco_node.export.provenance import Provenance

    snapshots = noted([stage.taken for stage in stages], kept_by or {})
    notes = Provenance(
        run_id=recipe.digest,
        rounds=tuple(max(each.round for each in stage.taken) for stage in stages),
        replicas=tuple(len(stage.taken) for stage in stages),
        untied=plan.prepared.tied,
        run_file=recipe.text,
        taken=tuple(stage.taken for stage in stages),
        left_out=tuple(stage.left_out for stage in stages),
        snapshots=snapshots,
    )
    tokenizer = open_tokenizer(recipe.run.data)
    write_checkpoint(out, plan.prepared.config, [stage.weights for stage in stages], tokenizer, notes)
    counts = "; ".join(
        f"stage {number}: {len(stage.taken)}, {rounds_of(stage.taken)}" for number, stage in enumerate(stages)
    )
    told = [
        f"Wrote {out}: the mean of the replicas ({counts}), loaded again and compared.",
        "Load it with AutoModelForCausalLM.from_pretrained.",
    ]
    told += map(told_of, snapshots)
    for number, stage in enumerate(stages):
        told += [f"Left out of stage {number}: {each.peer} ({each.why})." for each in stage.left_out]
    if plan.prepared.tied:
        told.append(
            "The original ties the vocabulary head to the embedding; here they were trained apart: two tensors."
        )
    return "\n".join(told)


def rounds_of(taken: Sequence[ReplicaSummary]) -> str:
    """Say which rounds the weights of a stage are of."""
    rounds = sorted({each.round for each in taken})
    return f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"


def write_merged(
    out: Path, recipe: RunFileText, plan: ModelLayout, stages: tuple[tuple[FetchedReplica, ...], ...]
) -> str:
    """Average replicas that are in memory, stage by stage, and write the checkpoint; return what was done."""
    from noloco_node.export.exporter import write
    from noloco_node.export.huggingface import merge
    from noloco_node.export.replica_files import MergedReplicas

    merged = [
        MergedReplicas(merge([copy.weights for copy in copies]), tuple(copy.standing for copy in copies), ())
        for copies in stages
    ]
    return write(out, recipe, plan, merged)
