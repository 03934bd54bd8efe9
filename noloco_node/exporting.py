"""`noloco-node export`: the model of a run as one ordinary checkpoint, wherever its weights are.

They come from a living swarm (an invite), from the homes of nodes that took part (their checkpoints, and the snapshots
that they keep of others), or from both; of a replica that is found twice the newer weights count. Each stage is the
mean of its replicas but for outliers and stragglers (`merging`).

From a swarm one replica after the other is fetched and laid on the disk, so that memory holds one at a time; when a
stage is complete its mean is written beside the target, and its replicas are removed. Whoever interrupts an export
finds the finished stages there when it starts again, and fetches the others, and those that have moved on far since.
Who is there is looked up anew before each stage and each replica. Before the checkpoint takes its place it is loaded as
anybody would load it, and compared bit for bit.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import msgspec

from noloco_node import wholefile
from noloco_node.blueprint import Blueprint, blueprint
from noloco_node.checkpoint import Checkpoint, Counters, arrays_of
from noloco_node.console import say
from noloco_node.copies import Filed, Merged, Shapes, in_home, merged, newest
from noloco_node.errors import Exit, Trouble
from noloco_node.gather import Copy, Look, fetched, nobody
from noloco_node.merging import LeftOut, Standing
from noloco_node.port import Network
from noloco_node.recipe import Recipe
from noloco_node.runfile import read_run_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What to export, and where to. `invite`: of a living swarm; `homes`: of nodes of the run; at least one of them."""

    out: Path
    invite: str | None = None
    homes: tuple[Path, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A finished stage of an export that is not complete yet."""

    run_id: str
    stage: int
    taken: tuple[Standing, ...]
    left_out: tuple[LeftOut, ...]


async def export(order: Order) -> str:
    """Gather, merge, write and verify one Hugging Face directory; return what was done, in words."""
    from noloco_node.export import check_target

    check_target(order.out)
    if order.invite is None:
        if not order.homes:
            raise Trouble(
                "There is nothing to export from.",
                why="neither an invite nor a home was given",
                attempt="noloco-node export INVITE --out DIR, or noloco-node export --from-home HOME --out DIR",
                code=Exit.USAGE,
            )
        return await asyncio.to_thread(_from_homes, order)
    from noloco_node.swarm import visited

    parts = parts_beside(order.out)
    async with visited(order.invite) as (network, recipe, presence):
        plan = await asyncio.to_thread(blueprint, recipe.run)
        filed = await asyncio.to_thread(of_homes, order.homes, recipe)
        stages = await from_swarm(network, recipe, presence.peek, plan, (parts, filed))
    told = await asyncio.to_thread(write, order.out, recipe, plan, stages)
    shutil.rmtree(parts, ignore_errors=True)
    return told


def parts_beside(out: Path) -> Path:
    """Return where the finished stages of an interrupted export lie."""
    return out.absolute().parent / f".{out.name}.parts"


def recipe_of(homes: Sequence[Path]) -> Recipe:
    """Return the run that these homes took part in; raise `Trouble` where they name none, or several."""
    for home in homes:
        if not (home / "run.toml").is_file():
            raise Trouble(
                f"{home} is not the home of a node.",
                why="it holds no run.toml, which a node keeps there when it joins",
                attempt="the directory that `noloco-node join --home` was given, ~/.noloco/node by default",
                code=Exit.CONFIG,
            )
    recipes = {home: Recipe(read_run_text(home / "run.toml"), str(home / "run.toml")) for home in homes}
    first = recipes[homes[0]]
    for home, recipe in recipes.items():
        if recipe.digest != first.digest:
            raise Trouble(
                f"{home} is the home of another run.",
                why=f"it took part in {recipe.digest[:12]}, {homes[0]} in {first.digest[:12]}",
                attempt="homes of one run only",
                code=Exit.OTHER_RUN,
            )
    return first


def of_homes(homes: Sequence[Path], recipe: Recipe) -> list[Filed]:
    """Return all weights of a run that lie in these homes."""
    return [filed for home in homes for filed in in_home(home, recipe.digest)]


def merged_homes(homes: Sequence[Path], recipe: Recipe, plan: Blueprint) -> list[Merged]:
    """Return every stage, merged from what lies in these homes; raise `Trouble` where a stage is missing."""
    filed, rounds_behind = of_homes(homes, recipe), recipe.run.outer.staleness_at_most
    return [merged(number, newest(filed, number), shapes, rounds_behind) for number, shapes in enumerate(plan.shapes)]


def _from_homes(order: Order) -> str:
    recipe = recipe_of(order.homes)
    plan = blueprint(recipe.run)
    return write(order.out, recipe, plan, merged_homes(order.homes, recipe, plan))


async def from_swarm(
    network: Network, recipe: Recipe, look: Look, plan: Blueprint, disk: tuple[Path, Sequence[Filed]]
) -> list[Merged]:
    """Return every stage, from finished parts, living replicas and homes; `disk`: where parts lie, and what homes hold.

    What is complete stays on the disk, whatever happens; raises `Trouble` where a stage has nothing.
    """
    parts, filed = disk
    stages = []
    try:
        parts.mkdir(parents=True, exist_ok=True)
        for number, shapes in enumerate(plan.shapes):
            roster = await look()
            found = await asyncio.to_thread(read_part, parts, recipe.digest, number, shapes)
            behind = recipe.run.outer.staleness_at_most
            if found is not None and not outdated(found, [record.round for record in roster.stage(number)], behind):
                say(f"stage {number}: kept from an export that was interrupted, {rounds_of(found.taken)}")
            else:
                fetched_files = await _lay_down(network, recipe, look, (number, shapes), parts)
                candidates = newest([*filed, *fetched_files], number)
                if not candidates:
                    raise nobody(recipe, await look(), number)
                found = await asyncio.to_thread(merged, number, candidates, shapes, behind)
                await asyncio.to_thread(_write_part, parts, recipe.digest, number, found)
                for each in fetched_files:
                    each.path.unlink(missing_ok=True)
            stages.append(found)
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        raise Trouble(
            f"The stages cannot be laid down in {parts}.",
            why=str(error),
            attempt="free some space there, or export to another disk; finished stages are kept",
            code=Exit.STORAGE,
        ) from error
    return stages


async def _lay_down(
    network: Network, recipe: Recipe, look: Look, stage: tuple[int, Shapes], parts: Path
) -> list[Filed]:
    """Fetch the replicas of a stage one at a time, each into a file of its own."""
    number, shapes = stage
    return [
        await asyncio.to_thread(_file, parts, recipe.digest, number, copy)
        async for copy in fetched(network, look, number, shapes)
    ]


def _file(parts: Path, run_id: str, stage: int, copy: Copy) -> Filed:
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
    path = parts / f"stage-{stage}-{hashlib.sha256(copy.peer.encode()).hexdigest()[:16]}.safetensors"
    arrays = arrays_of(Checkpoint(counters, {"slow": tuple(copy.weights.values())}))
    wholefile.write(path, arrays, msgspec.json.encode(counters).decode())
    return Filed(path, copy.peer, counters)


def _write_part(parts: Path, run_id: str, stage: int, found: Merged) -> None:
    part = Part(run_id=run_id, stage=stage, taken=found.taken, left_out=found.left_out)
    arrays = [
        array._replace(name=name)
        for name, array in zip(
            found.weights, arrays_of(Checkpoint(_NOBODY, {"slow": tuple(found.weights.values())})), strict=True
        )
    ]
    wholefile.write(parts / f"stage-{stage}.safetensors", arrays, msgspec.json.encode(part).decode())


_NOBODY = Counters(run_id="", stage=0, round=0, inner_steps=0, progress=0.0, samples=0, optimiser_steps=0)


def read_part(parts: Path, run_id: str, stage: int, shapes: Shapes) -> Merged | None:
    """Return a finished stage of an interrupted export; None where it is not there, or not as it was written."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = parts / f"stage-{stage}.safetensors"
    try:
        part = msgspec.json.decode(wholefile.about(path) or "", type=Part)
        wholefile.check(path)
        weights = load_file(path)
    except (OSError, ValueError, SafetensorError):
        return None
    fits = {name: tuple(weight.shape) for name, weight in weights.items()} == dict(shapes)
    if part.run_id != run_id or part.stage != stage or not fits:
        return None
    return Merged({name: weights[name] for name in shapes}, part.taken, part.left_out)


def outdated(part: Merged, rounds: Sequence[int], rounds_behind: int) -> bool:
    """Say whether a stage whose replicas are in `rounds` now has left a finished part too far behind to be kept."""
    return bool(rounds) and max(each.round for each in part.taken) < median_low(rounds) - rounds_behind


def write(out: Path, recipe: Recipe, plan: Blueprint, stages: Sequence[Merged]) -> str:
    """Write the checkpoint of merged stages; return what was done, in words."""
    from noloco_node.data import open_tokenizer
    from noloco_node.export import Notes, write_checkpoint

    notes = Notes(
        run_id=recipe.digest,
        rounds=tuple(max(each.round for each in stage.taken) for stage in stages),
        replicas=tuple(len(stage.taken) for stage in stages),
        untied=plan.prepared.tied,
        run_file=recipe.text,
        taken=tuple(stage.taken for stage in stages),
        left_out=tuple(stage.left_out for stage in stages),
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
    for number, stage in enumerate(stages):
        told += [f"Left out of stage {number}: {each.peer} ({each.why})." for each in stage.left_out]
    if plan.prepared.tied:
        told.append(
            "The original ties the vocabulary head to the embedding; here they were trained apart: two tensors."
        )
    return "\n".join(told)


def rounds_of(taken: Sequence[Standing]) -> str:
    """Say which rounds the weights of a stage are of."""
    rounds = sorted({each.round for each in taken})
    return f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
