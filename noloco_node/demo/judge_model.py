"""What came of the swarm: gather, merge, export, evaluate and sample, in a process of its own.

    python -m noloco_node.demo.judge_model INVITE DIRECTORY        prints a `ModelScores` as one line of JSON

Everything is measured on the same held-out text: the exported checkpoint as plain transformers loads it, every route
through single replicas, the weights that the run started from, and the tokens' own frequencies. All of it goes through
one model object, so that nothing but the weights differs.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from noloco_node.data.blocks import open_blocks
from noloco_node.demo.summary import ModelScores
from noloco_node.errors import COMPLAINT, UserError
from noloco_node.export.exporter import write_merged
from noloco_node.export.replica_fetch import FetchedReplica, gather
from noloco_node.inference.evaluation import BATCH, open_model, unigram_entropy, validation_loss
from noloco_node.inference.generation import generate_sample
from noloco_node.planning.model_layout import ModelLayout, build_stage, model_layout
from noloco_node.run.config import RunConfig
from noloco_node.swarm.connection import visited
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.terminal import say

BATCHES = 64
MOST_ROUTES = 16
PROMPT = "import os\n\n\ndef "


async def fetch(invite: str) -> tuple[RunFileText, ModelLayout, tuple[tuple[FetchedReplica, ...], ...]]:
    """Return the run and the weights of every replica that answers."""
    async with visited(invite) as (network, recipe, membership):
        plan = await asyncio.to_thread(model_layout, recipe.run)
        return recipe, plan, await gather(network, recipe, membership, plan)


def judge(
    directory: Path, recipe: RunFileText, plan: ModelLayout, stages: Sequence[Sequence[FetchedReplica]]
) -> ModelScores:
    """Evaluate the checkpoint in `directory`, and the replicas that it was merged from."""
    run = recipe.run
    blocks = open_blocks(run.data, run.pipeline.sequence_length, run.seed, "", "validation")
    try:
        text = list(itertools.islice(blocks.batches(BATCH), BATCHES))
    finally:
        blocks.close()
    model = open_model(directory)

    def loss() -> float:
        return validation_loss(lambda ids: model(ids).logits, text).mean

    merged = loss()
    losses = {}
    for route in routes(stages):
        model.load_state_dict({name: tensor for copy in route for name, tensor in copy.weights.items()})
        losses["/".join(copy.peer for copy in route)] = loss()
    model.load_state_dict(_initial_weights(run, plan))
    untrained = loss()
    return ModelScores(
        merged=merged,
        routes=losses,
        untrained=untrained,
        unigram=unigram_entropy(text),
        tokens=sum(batch[:, 1:].numel() for batch in text),
        parameters=sum(weight.numel() for weight in model.parameters()),
        prompt=PROMPT,
        sample=generate_sample(directory, PROMPT, run.pipeline.sequence_length - len(PROMPT), run.seed),
    )


def routes(stages: Sequence[Sequence[FetchedReplica]]) -> list[tuple[FetchedReplica, ...]]:
    """Return all routes through single replicas, or, where they are many, some in which each replica occurs."""
    count = 1
    for copies in stages:
        count *= len(copies)
    if count <= MOST_ROUTES:
        return list(itertools.product(*stages))
    number = max(MOST_ROUTES, max(map(len, stages)))
    return [tuple(copies[place % len(copies)] for copies in stages) for place in range(number)]


def _initial_weights(run: RunConfig, plan: ModelLayout) -> dict[str, Tensor]:
    device = torch.device("cpu")
    parts = (build_stage(run, plan, number, device) for number in range(len(plan.cuts)))
    return {name: weight.detach() for part in parts for name, weight in part.named_parameters()}


def main(invite: str, directory: Path) -> None:
    """Print the verdict on the swarm of `invite`, and leave its merged model in `directory`."""
    recipe, plan, stages = asyncio.run(fetch(invite))
    say(write_merged(directory, recipe, plan, stages))
    print(msgspec.json.encode(judge(directory, recipe, plan, stages)).decode(), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except* UserError as troubles:
        first: BaseException = troubles
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        print(f"{COMPLAINT}{first}", file=sys.stderr)
        sys.exit(first.code if isinstance(first, UserError) else 1)
