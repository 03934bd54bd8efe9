"""What came of the swarm: fetch, merge, export, evaluate and sample, in a process of its own.

    python -m noloco_node.demo.evaluate_swarm INVITE DIRECTORY        prints a `ModelScores` as one line of JSON

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
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from noloco_node.demo.summary import ModelScores
from noloco_node.errors import COMPLAINT, UserError, user_error_of
from noloco_node.export.exporter import SwarmExport, merge_files, parts_of, write
from noloco_node.export.held_out_loss import logits_of, text_loss, validation_text
from noloco_node.export.replica_files import ReplicaFile, ReplicaReader
from noloco_node.inference.evaluation import open_model, unigram_entropy
from noloco_node.inference.generation import Sampling, generate
from noloco_node.planning.model_layout import ModelLayout, build_stage, model_layout
from noloco_node.run.config import RunConfig
from noloco_node.swarm.access import Visitor, visited
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.terminal import say

BATCHES = 64
MOST_ROUTES = 16
PROMPT = "import os\n\n\ndef "

T = TypeVar("T")


async def fetch(invite: str, directory: Path) -> tuple[RunFileText, ModelLayout, list[list[ReplicaFile]]]:
    """Return the run, and of each stage the files of every replica that answers, laid beside `directory`."""
    async with visited(invite, Visitor()) as (network, recipe, membership):
        layout = await asyncio.to_thread(model_layout, recipe.run)
        parts = parts_of(directory, recipe, layout)
        export = SwarmExport(network=network, recipe=recipe, look=membership.peek, layout=layout, parts=parts)
        return recipe, layout, await export.replicas()


def scores_of(
    directory: Path, recipe: RunFileText, layout: ModelLayout, stages: Sequence[Sequence[ReplicaFile]]
) -> ModelScores:
    """Evaluate the checkpoint in `directory`, and the replicas that it was merged from."""
    run = recipe.run
    text = validation_text(run.data, run.pipeline.sequence_length, run.seed, BATCHES)
    model = open_model(directory)

    def loss() -> float:
        return text_loss(logits_of(model), text).mean

    merged = loss()
    losses = {}
    for route in routes(stages):
        model.load_state_dict(_weights_of(route, layout))
        losses["/".join(each.peer for each in route)] = loss()
    model.load_state_dict(_initial_weights(run, layout))
    untrained = loss()
    sampling = Sampling(tokens=run.pipeline.sequence_length - len(PROMPT), seed=run.seed)
    return ModelScores(
        merged=merged,
        routes=losses,
        untrained=untrained,
        unigram=unigram_entropy(text.batches),
        tokens=sum(batch[:, 1:].numel() for batch in text.batches),
        parameters=sum(weight.numel() for weight in model.parameters()),
        prompt=PROMPT,
        sample="".join(generate(directory, PROMPT, sampling)),
    )


def routes(stages: Sequence[Sequence[T]]) -> list[tuple[T, ...]]:
    """Return all routes through single replicas, or, where they are many, some in which each replica occurs."""
    count = 1
    for replicas in stages:
        count *= len(replicas)
    if count <= MOST_ROUTES:
        return list(itertools.product(*stages))
    number = max(MOST_ROUTES, max(map(len, stages)))
    return [tuple(replicas[place % len(replicas)] for replicas in stages) for place in range(number)]


def _weights_of(route: Sequence[ReplicaFile], layout: ModelLayout) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for replica, shapes in zip(route, layout.shapes, strict=True):
        with ReplicaReader([replica], shapes) as reader:
            weights |= reader.weights(0)
    return weights


def _initial_weights(run: RunConfig, layout: ModelLayout) -> dict[str, Tensor]:
    device = torch.device("cpu")
    parts = (build_stage(run, layout, number, device) for number in range(len(layout.cuts)))
    return {name: weight.detach() for part in parts for name, weight in part.named_parameters()}


def main(invite: str, directory: Path) -> None:
    """Print the scores of the swarm of `invite`, and leave its merged model in `directory`."""
    recipe, layout, stages = asyncio.run(fetch(invite, directory))
    try:
        merged = merge_files(list(itertools.chain(*stages)), recipe, layout)
        say(write(directory, recipe, layout, merged, recipe.run.data))
        print(msgspec.json.encode(scores_of(directory, recipe, layout, stages)).decode(), flush=True)
    finally:
        parts_of(directory, recipe, layout).remove()


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except (UserError, BaseExceptionGroup) as error:
        trouble = user_error_of(error)
        if trouble is None:
            raise
        print(f"{COMPLAINT}{trouble}", file=sys.stderr)
        sys.exit(trouble.code)
