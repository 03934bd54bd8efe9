"""`noloco-node export`: the model of a run as one ordinary checkpoint, from a living swarm, from homes, or from both.

From a swarm, one replica after the other is fetched and written to the disk, so that memory holds one at a time. An
export that is started again finds them there. Of a replica that is found twice the newer weights count.
docs/design/export.md says which replicas make a stage, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import structs
from torch import Tensor

from noloco_node.data.encoding import open_tokenizer
from noloco_node.errors import UserError, reason_of, storage_error, usage_error
from noloco_node.export import adapter_files, replica_fetch
from noloco_node.export.held_out_loss import judged_by_loss
from noloco_node.export.huggingface import PARAMETERS, own_generation, write_adapter, write_checkpoint, write_parameters
from noloco_node.export.replica_files import (
    MergedReplicas,
    PartsDirectory,
    ReplicaFile,
    best_evaluated,
    in_home,
    merged,
    newest,
    parts_beside,
    passed,
    under_other_ids,
)
from noloco_node.export.sources import Provenance, check_export, evaluations_of, noted, recipe_of, told_of
from noloco_node.machine.interface import Dimensions
from noloco_node.network.interface import PeerNetwork
from noloco_node.planning.foreign_layout import ForeignLayout, foreign_layout
from noloco_node.planning.model_layout import ModelLayout, model_layout
from noloco_node.run.config import DataConfig, RunConfig
from noloco_node.run.peer_state import Evaluation
from noloco_node.state_sync.replica_mean import LeftOut, ReplicaSummary
from noloco_node.storage.atomic_file import held
from noloco_node.swarm.access import Visitor, visited
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import check_wanted, in_thread
from noloco_node.terminal import say


async def export(
    out: Path,
    invite: str | None = None,
    homes: Sequence[Path] = (),
    visitor: Visitor = Visitor(),  # noqa: B008 - it is frozen
    wanted: adapter_files.AdapterExport = adapter_files.AdapterExport(),  # noqa: B008 - it is frozen
    *,
    best: bool = False,
) -> str:
    """Gather, merge, write and verify one Hugging Face directory; return what was done, in words.

    `invite`: of a living swarm; `homes`: of nodes of the run; at least one of them. `best`: in place of the newest
    weights those of the best evaluation that these homes have kept.
    """
    check_export(out, invite, homes, best=best)
    if best:
        return await in_thread(partial(_best_of_homes, out, homes, wanted))
    if invite is None:
        return await in_thread(partial(_from_homes, out, homes, wanted))
    return await _from_swarm(out, invite, homes, visitor, wanted)


async def _from_swarm(
    out: Path, invite: str, homes: Sequence[Path], visitor: Visitor, wanted: adapter_files.AdapterExport
) -> str:
    with ExitStack() as holding:
        async with visited(invite, visitor) as (network, recipe, membership):
            holding.enter_context(held(parts_beside(out), out))
            base = await asyncio.to_thread(_base_of, recipe, homes, wanted)
            layout = await asyncio.to_thread(_layout_of, recipe.run)
            filed = await asyncio.to_thread(of_homes, homes, recipe)
            parts = parts_of(out, recipe, layout)
            kept = parts.path / "tokenizer"
            data = await replica_fetch.fetched_tokenizer(network, recipe, membership.peek, invite, kept)
            swarm = SwarmExport(
                network=network, recipe=recipe, look=membership.peek, layout=layout, parts=parts, filed=filed
            )
            found = await swarm.stages()
            roster = await membership.peek()
        records = [record for number in range(len(found)) for record in roster.stage(number)]
        evaluations = evaluations_of(homes, recipe.digest, [each.evaluation for each in records if each.evaluation])
        writer = _Writer(out, recipe, layout, data, wanted, base, evaluations)
        kept_by = enumerate(stage.kept_by for stage in found)
        snapshots = [parts.replicas(n, (), are_snapshots=True) if by else [] for n, by in kept_by]
        lying = [newest([*filed, *parts.replicas(n, ()), *snapshots[n]], n) for n in range(len(found))]
        done = await in_thread(partial(writer.write_best, found, lying))
        parts.remove()
        return done


def _layout_of(run: RunConfig) -> ModelLayout | ForeignLayout:
    return foreign_layout(run) if run.model.is_foreign else model_layout(run)


def of_homes(homes: Sequence[Path], recipe: RunFileText) -> list[ReplicaFile]:
    """Return all weights of a run in these homes; say where some lie that only another version can use."""
    for home in homes:
        for line in under_other_ids(home, recipe.digest):
            say(line)
    return [filed for home in homes for filed in in_home(home, recipe.digest)]


def merge_files(filed: Sequence[ReplicaFile], recipe: RunFileText, layout: Dimensions) -> list[MergedReplicas]:
    """Return every stage, merged from these files; raise `UserError` if a stage is missing."""
    rounds_behind, stages = recipe.run.outer.staleness_at_most, list[MergedReplicas]()
    for number, shapes in enumerate(layout.shapes):
        check_wanted()
        stages.append(merged(number, newest(filed, number), shapes, rounds_behind))
    return stages


def _base_of(recipe: RunFileText, homes: Sequence[Path], wanted: adapter_files.AdapterExport) -> list[Path]:
    """Return the files of the model that a run adapts, as far as they are here; raise `UserError` if they must be."""
    base = adapter_files.base_files(recipe, homes, wanted.base)
    adapter_files.check_wanted(recipe.run, wanted, base)
    return base


def _from_homes(out: Path, homes: Sequence[Path], wanted: adapter_files.AdapterExport) -> str:
    recipe = recipe_of(homes)
    writer = _writer_of(out, recipe, homes, wanted)
    filed = of_homes(homes, recipe)
    stages = merge_files(filed, recipe, writer.layout)
    return writer.write_best(stages, [newest(filed, number) for number in range(len(stages))])


def _writer_of(out: Path, recipe: RunFileText, homes: Sequence[Path], wanted: adapter_files.AdapterExport) -> _Writer:
    base, layout = _base_of(recipe, homes, wanted), _layout_of(recipe.run)
    data, evaluations = replica_fetch.reading_with_tokenizer(homes, recipe), evaluations_of(homes, recipe.digest)
    return _Writer(out, recipe, layout, data, wanted, base, evaluations)


def _best_of_homes(out: Path, homes: Sequence[Path], wanted: adapter_files.AdapterExport) -> str:
    recipe = recipe_of(homes)
    newest = "without --best the newest weights are exported"
    if not recipe.run.data.evaluate_every_rounds:
        raise usage_error(
            "This run has no evaluations.",
            why="data.evaluate_every_rounds is 0 in its run file, so no node knows which of its weights were the best",
            hint=newest,
        )
    if recipe.run.pipeline.stages > 1:
        raise usage_error(
            "No weights of an evaluation are kept in a run of several stages.",
            why="its evaluations go through replicas of all stages, and no node has the weights of them all",
            hint=newest,
        )
    writer = _writer_of(out, recipe, homes, wanted)
    stage, loss = best_evaluated(homes, recipe.digest, writer.layout.shapes[0])
    done = writer.write([stage])
    (taken,) = stage.taken
    return f"{done}\nThese are the weights of {taken.peer} alone; their loss on held-out text was {loss:.4f}."


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmExport:
    """Gathers the stages of a run from a living swarm.

    `look`: reads the roster again. `filed`: the weights in homes. `parts`: keeps what has come, whatever happens.
    """

    network: PeerNetwork
    recipe: RunFileText
    look: replica_fetch.Look
    layout: Dimensions
    parts: PartsDirectory
    filed: Sequence[ReplicaFile] = ()

    async def stages(self) -> list[MergedReplicas]:
        """Return every stage, from replicas, homes and snapshots; raise `UserError` if one has none."""
        try:
            self.parts.path.mkdir(parents=True, exist_ok=True)
            return [await self._gather(number) for number in range(len(self.layout.shapes))]
        except ConnectionError:
            raise
        except OSError as error:
            hint = "free some space there, or export to another disk; what has come is kept"
            what = f"The stages cannot be laid down in {self.parts.path}."
            raise storage_error(what, reason_of(error), hint) from error

    async def _gather(self, number: int) -> MergedReplicas:
        """Return the mean of a stage's replicas; if none lives, also of a snapshot that is clearly newer."""
        lying, came = await self._fetch_replicas(number)
        candidates = newest([*self.filed, *lying, *came], number)
        living = {record.peer for record in replica_fetch.at_work(await self.look(), number)}
        if came or any(each.peer in living for each in lying):
            return await self._merged(number, candidates)
        own = max((each.counters.round for each in candidates), default=None)
        kept = await self._left_by_interrupted(number, (), are_snapshots=True)
        shapes, keep = self.layout.shapes[number], partial(self.parts.keep, is_snapshot=True)
        found = await replica_fetch.fetch_snapshots(
            self.network, self.recipe, self.look, number, shapes, own, kept, keep
        )
        if not isinstance(found, UserError):
            return await self._with_snapshot(number, candidates, max(found, key=lambda each: each.counters.round))
        if not candidates:
            raise found
        return await self._merged(number, candidates)

    async def _with_snapshot(
        self, number: int, candidates: Sequence[ReplicaFile], snapshot: ReplicaFile
    ) -> MergedReplicas:
        """Return the mean of a snapshot and the candidates that it has not left far behind."""
        rounds_behind, round = self.recipe.run.outer.staleness_at_most, snapshot.counters.round
        older = [each for each in candidates if passed(each.counters.round, [round], rounds_behind)]
        members = newest([*(each for each in candidates if each not in older), snapshot], number)
        found = await self._merged(number, members)
        why = f"the snapshot that {snapshot.peer} keeps is of round {round}"
        left_out = [LeftOut(peer=each.peer, why=f"round {each.counters.round}, {why}") for each in older]
        return found._replace(left_out=(*found.left_out, *left_out))

    async def _fetch_replicas(self, number: int) -> tuple[list[ReplicaFile], list[ReplicaFile]]:
        """Return the replicas that an interrupted export has left of a stage, and those fetched now."""
        rounds = [record.round for record in replica_fetch.at_work(await self.look(), number)]
        lying = await self._left_by_interrupted(number, rounds)
        here, shapes = [each.peer for each in lying], self.layout.shapes[number]
        came = [
            await asyncio.to_thread(self.parts.keep, copy)
            async for copy in replica_fetch.fetched(self.network, self.recipe.digest, self.look, number, shapes, here)
        ]
        return lying, came

    async def _left_by_interrupted(
        self, number: int, rounds: Sequence[int], *, are_snapshots: bool = False
    ) -> list[ReplicaFile]:
        found = await asyncio.to_thread(self.parts.replicas, number, rounds, are_snapshots=are_snapshots)
        if found:
            what = ("snapshot" if are_snapshots else "replica") + ("s are" if len(found) > 1 else " is")
            say(f"stage {number}: {len(found)} {what} here from an export that was interrupted")
        return found

    async def _merged(self, number: int, filed: Sequence[ReplicaFile]) -> MergedReplicas:
        rounds_behind = self.recipe.run.outer.staleness_at_most
        return await asyncio.to_thread(merged, number, filed, self.layout.shapes[number], rounds_behind)


def parts_of(out: Path, recipe: RunFileText, layout: Dimensions) -> PartsDirectory:
    return PartsDirectory(parts_beside(out), recipe.digest, layout.shapes, recipe.run.outer.staleness_at_most)


class _Writer(NamedTuple):
    """Writes the merged stages of a run to `out`.

    `data`: the run's, its tokenizer here. `base`: the files of the model that a run adapts. `evaluations`: of the run.
    """

    out: Path
    recipe: RunFileText
    layout: ModelLayout | ForeignLayout
    data: DataConfig
    wanted: adapter_files.AdapterExport
    base: Sequence[Path]
    evaluations: tuple[Evaluation, ...]

    def write_best(self, found: Sequence[MergedReplicas], lying: Sequence[Sequence[ReplicaFile]]) -> str:
        """Write the stages with the least loss on held-out text; of a foreign module nobody else can know the loss."""
        if not isinstance(self.layout, ForeignLayout):
            run = structs.replace(self.recipe.run, data=self.data)
            found = judged_by_loss(run, self.layout, found, lying, self.base)
        return self.write(found)

    def write(self, stages: Sequence[MergedReplicas]) -> str:
        """Write the checkpoint of all stages, or what a run trained of it; return what was done, in words."""
        layout = self.layout
        if isinstance(layout, ForeignLayout):
            notes = self._provenance(stages, untied=False)
            write_parameters(self.out, {name: each for stage in stages for name, each in stage.weights.items()}, notes)
            load = f"module.load_state_dict(safetensors.torch.load_file('{PARAMETERS}'), strict=False)"
            return "\n".join(self._told(stages, notes, f"{load} puts them into the module."))
        notes = self._provenance(stages, untied=layout.prepared.tied and (layout.adapter is None or self.wanted.merge))
        frozen = adapter_files.are_frozen(self.recipe.run.model, self.base)
        tokenizer, loads = open_tokenizer(self.data), "AutoModelForCausalLM.from_pretrained"
        weights: list[dict[str, Tensor]] = [stage.weights for stage in stages]
        if layout.adapter is not None and not self.wanted.merge:
            adapter = adapter_files.peft_adapter(self.recipe.run, layout, None if frozen else self.wanted.base, weights)
            write_adapter(self.out, *adapter, tokenizer, notes)
            loads = "PeftModel.from_pretrained, over the model that the run started from"
        else:
            if layout.adapter is None:
                weights = [layout.ordinary(number, each) for number, each in enumerate(weights)]
            else:
                form = layout.adapter.base if frozen else "float32"
                weights = [adapter_files.merged_weights(layout, self.base, form, weights)]
            generation = own_generation(self.recipe.run.model, self.data)
            write_checkpoint(self.out, layout.prepared.config, weights, tokenizer, notes, generation)
        lines = self._told(stages, notes, f"Load it with {loads}.")
        if layout.adapter is not None and self.wanted.merge and frozen:
            lines.append(
                f"The adapters were added to the model in {layout.adapter.base}, as it was trained; to add them to the"
                " weights of the checkpoint, export with --weights DIR, the directory that init --from was given."
            )
        if layout.prepared.tied and layout.adapter is None:
            lines.append(
                "The original ties the vocabulary head to the embedding; here they were trained apart: two tensors."
            )
        return "\n".join(lines)

    def _provenance(self, stages: Sequence[MergedReplicas], *, untied: bool) -> Provenance:
        kept_by = {number: stage.kept_by for number, stage in enumerate(stages) if stage.kept_by is not None}
        return Provenance(
            run_id=self.recipe.digest,
            rounds=tuple(max(each.round for each in stage.taken) for stage in stages),
            replicas=tuple(len(stage.taken) for stage in stages),
            untied=untied,
            run_file=self.recipe.text,
            taken=tuple(stage.taken for stage in stages),
            left_out=tuple(stage.left_out for stage in stages),
            snapshots=noted([stage.taken for stage in stages], kept_by),
            evaluations=self.evaluations,
        )

    def _told(self, stages: Sequence[MergedReplicas], notes: Provenance, how: str) -> list[str]:
        """Return what was written, in sentences. `how`: to load it."""
        counts = "; ".join(
            f"stage {number}: {len(stage.taken)}, {rounds_of(stage.taken)}" for number, stage in enumerate(stages)
        )
        whose = "the mean of the replicas" if any(len(stage.taken) > 1 for stage in stages) else "one replica a stage"
        lines = [f"Wrote {self.out}: {whose} ({counts}), loaded again and compared.", how]
        lines += map(told_of, notes.snapshots)
        for number, stage in enumerate(stages):
            lines += [f"Left out of stage {number}: {each.peer} ({each.why})." for each in stage.left_out]
        return lines


def rounds_of(taken: Sequence[ReplicaSummary]) -> str:
    rounds = sorted({each.round for each in taken})
    return f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
