"""Taking the model home: the slow weights of every replica of every stage, from a living swarm.

Replicas of one stage differ a little, honestly; the merged model is their mean (it is better than any of them). A
replica that does not answer is left out and named; a stage of which nobody answers is an error, for half a model is
none.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gossip.catch_up import Wanted, catch_up
from gossip.exchange import Compute
from gossip.messages import Parts
from noloco_node.blueprint import Blueprint, blueprint
from noloco_node.console import say
from noloco_node.errors import Exit, Trouble
from noloco_node.libp2p.network import Libp2p
from noloco_node.presence import Presence
from noloco_node.recipe import Recipe
from noloco_node.roster import State
from noloco_node.swarm import visited
from noloco_node.topics import STATE, state_schema, topic

SLOWEST_BYTES_PER_S = 2**20


class Copy(NamedTuple):
    """One replica's slow weights by parameter name, and where it stood."""

    peer: str
    round: int
    inner_steps: int
    progress: float
    weights: dict[str, Tensor]


async def gather(network: Libp2p, recipe: Recipe, presence: Presence, plan: Blueprint) -> tuple[tuple[Copy, ...], ...]:
    """Fetch the slow weights of all replicas, stage by stage; raise `Trouble` where a stage has none."""
    stages = []
    for number, shapes in enumerate(plan.shapes):
        records = presence.roster.stage(number)
        peers = [record.peer for record in records if record.state in (State.TRAINING, State.FINISHED)]
        copies = []
        for place, peer in enumerate(sorted(peers), 1):
            say(f"stage {number}: fetching replica {place} of {len(peers)}")
            copy = await _fetch(network, peer, number, shapes)
            if copy is not None:
                copies.append(copy)
        if not copies:
            raise Trouble(
                f"Nobody gave the weights of stage {number}.",
                why=f"the roster of the run {recipe.digest[:12]} lists {len(peers)} replicas of it",
                attempt="noloco-node status shows who is there; try again when the stage has a replica",
                code=Exit.UNREACHABLE,
            )
        stages.append(tuple(copies))
    return tuple(stages)


async def _fetch(network: Libp2p, peer: str, number: int, shapes: dict[str, tuple[int, ...]]) -> Copy | None:
    like = tuple(torch.empty(shape, device="meta") for shape in shapes.values())
    schema = state_schema(tuple(shapes.values()))
    wanted = Wanted(
        parts=Parts.SLOW,
        like=like,
        optimiser_like=(),
        deadline_s=60.0 + sum(tensor.nbytes for tensor in like) / SLOWEST_BYTES_PER_S,
    )
    try:
        state = await catch_up(
            [peer], lambda donor: network.talk(donor, topic(STATE, number), schema), wanted, _in_a_thread()
        )
    except ConnectionError as error:
        say(f"left out: {error}")
        return None
    weights = dict(zip(shapes, state.slow, strict=True))
    return Copy(peer, state.round, state.inner_steps, state.progress, weights)


def _in_a_thread() -> Compute:
    return asyncio.to_thread


async def export_swarm(invite: str, out: Path) -> str:
    """Gather, merge and write one Hugging Face directory; return what was done, in words."""
    from noloco_node.export import check_target

    check_target(out)
    async with visited(invite) as (network, recipe, presence):
        plan = await asyncio.to_thread(blueprint, recipe.run)
        stages = await gather(network, recipe, presence, plan)
    return await asyncio.to_thread(write_merged, out, recipe, plan, stages)


def write_merged(out: Path, recipe: Recipe, plan: Blueprint, stages: tuple[tuple[Copy, ...], ...]) -> str:
    """Average the replicas of each stage and write the checkpoint."""
    from noloco_node.data import open_tokenizer
    from noloco_node.export import Notes, merge, write_checkpoint

    merged = [merge([copy.weights for copy in copies]) for copies in stages]
    notes = Notes(
        run_id=recipe.digest,
        rounds=tuple(max(copy.round for copy in copies) for copies in stages),
        replicas=tuple(len(copies) for copies in stages),
        untied=plan.prepared.tied,
        run_file=recipe.text,
    )
    write_checkpoint(out, plan.prepared.config, merged, open_tokenizer(recipe.run.data), notes)
    counts = ", ".join(f"stage {number}: {len(copies)}" for number, copies in enumerate(stages))
    told = f"Wrote {out}: the mean of the replicas ({counts}). Load it with AutoModelForCausalLM.from_pretrained."
    if plan.prepared.tied:
        told += "\nThe original ties the vocabulary head to the embedding; here they were trained apart: two tensors."
    return told
