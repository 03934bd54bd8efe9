"""What a change of the rounds' arithmetic costs in loss: asynchronous gossip of two versions of this repository.

    python -m research.codec.versions before.jsonl                      # at the commit before the change
    python -m research.codec.versions after.jsonl --beside before.jsonl  # at the commit after it

The laboratory's asynchronous gossip at its small scale (int4, eight very unequal replicas, plain means), once a text
and seed. The loss is that of the mean model on all held-out text, nats a byte. What a file holds already is not run
again. Differences are those of runs of the same text and seed: as a timing may change with a bit, two runs part as two
seeds do, and the interval says how much of a difference that leaves open. Under two minutes a run on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import get_args

import torch
from msgspec.structs import replace
from torch import Tensor

from noloco_node.data.blocks import open_blocks
from noloco_node.data.held_out_text import HeldOutText, text_loss
from noloco_node.sim import clock
from research.laboratory.experiments.cell import Cell, Corpus
from research.laboratory.experiments.rivals import RATES, heads
from research.laboratory.experiments.task import dimensions, source
from research.laboratory.methods.gossip import gossip
from research.laboratory.methods.replicas import Swarm

STUDENT = {
    1: 12.71,
    2: 4.30,
    3: 3.18,
    4: 2.78,
    5: 2.57,
    6: 2.45,
    7: 2.36,
    8: 2.31,
    9: 2.26,
    11: 2.20,
    14: 2.14,
    19: 2.09,
}
"""The 97.5 % quantile by degrees of freedom."""


def loss_of_run(cell: Cell) -> float:
    """Run a cell to its end; return the loss of its mean model on all held-out text."""
    swarm = Swarm(cell, lambda share: None)
    clock.run(gossip(swarm))
    stages = swarm.replicas[0].stages
    for stage, weights in zip(stages, swarm.mean(), strict=True):
        stage.set_weights(weights)

    def model(ids: Tensor) -> Tensor:
        hidden = ids
        for stage in stages:
            hidden = stage.infer(hidden)
        return hidden

    blocks = open_blocks(source(cell.text), dimensions(cell).sequence_length, 0, "", "validation")
    try:
        batches = list(blocks.batches(32))
    finally:
        blocks.close()
    rows = sum(map(len, batches))
    return text_loss(model, HeldOutText(batches, [""] * rows, rows, True)).mean


def interval(differences: Sequence[float]) -> str:
    """Return a mean of differences and half of its 95 % interval, by Student's distribution."""
    free = len(differences) - 1
    if free < 1:
        return f"{mean(differences):+.4f}"
    quantile = next(value for least, value in reversed(STUDENT.items()) if least <= free)
    return f"{mean(differences):+.4f} ± {quantile * stdev(differences) / sqrt(free + 1):.4f}"


def main() -> None:
    """Run what is missing, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="Losses of this version, a JSON line a run.")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="Those of another version, to compare with.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N", help="Run these seeds.")
    parser.add_argument("--steps", type=int, metavar="N", help="Take so many inner steps instead of the cell's own.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    head = replace(heads()["gossip"][0], learning_rate=RATES[0])
    head = replace(head, steps=asked.steps or head.steps)
    found = _read(asked.file)
    for seed in asked.seeds:
        for text in get_args(Corpus):
            if (text, seed) not in found:
                began_s = time.perf_counter()
                loss = loss_of_run(replace(head, text=text, seed=seed))
                found[text, seed] = loss
                with asked.file.open("a") as file:
                    print(json.dumps({"text": text, "seed": seed, "loss": loss}), file=file)
                print(f"{text} {seed}: {loss:.4f} ({time.perf_counter() - began_s:.0f} s)", flush=True)
    if asked.beside is not None:
        before = _read(asked.beside)
        for text in (*get_args(Corpus), None):
            keys = [key for key in found if key in before and text in (key[0], None)]
            if keys:
                name = "both texts" if text is None else text
                losses = [mean(file[key] for key in keys) for file in (before, found)]
                change = interval([found[key] - before[key] for key in keys])
                print(f"{name}: {losses[0]:.4f} -> {losses[1]:.4f}, {change} nats a byte ({len(keys)} pairs)")


def _read(file: Path) -> dict[tuple[str, int], float]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {(run["text"], run["seed"]): run["loss"] for run in map(json.loads, lines)}


if __name__ == "__main__":
    main()
