"""Runs of the laboratory that are a formula: what its tables and its worker processes are tested with.

Each worker process imports this module, and nothing here imports torch.
"""

import math
import os
import time
from random import Random

from research.laboratory.experiments.cell import Cell, Point, Result
from research.laboratory.running.runner import Tell

LEVELS = {
    "parallel": 1.5,
    "independent": 2.2,
    "central": 1.8,
    "pairs": 1.9,
    "server": 2.0,
    "gossip": 1.65,
    "shards": 1.8,
}


def outcome(cell: Cell, merged: float | None = None) -> Result:
    """A result by formula: the method decides, rate and seed matter little, best between 5e-3 and 1e-2."""
    noise = Random(cell.key).gauss(0.0, 0.002)
    loss = LEVELS[cell.method] + 0.05 * abs(math.log(cell.learning_rate / 6e-3)) + noise if merged is None else merged
    curve = tuple(
        Point(
            share=part / 8,
            virtual_s=part * cell.steps / 8,
            merged=loss + (1 - part / 8),
            single=loss + (1 - part / 8),
            spread=1.0 - part / 10,
            learning_rate=cell.learning_rate * (1.0 - part / 9),
        )
        for part in range(1, 9)
    )
    return Result(
        cell=cell,
        merged=loss,
        single=loss + 0.01,
        spread=0.001,
        virtual_s=float(cell.steps),
        busy=0.97,
        fast_busy=0.98,
        bytes_per_step=1000.0,
        rounds=8.0,
        steps_taken=(cell.steps,) * cell.replicas,
        curve=curve,
        wall_s=0.1,
    )


def toy(cell: Cell, tell: Tell) -> Result:
    """What worker processes do here: 13 steps raise, 17 end the process, 19 wait for ever, others are a formula."""
    tell(0.5)
    if cell.steps == 13:
        raise ValueError("thirteen is refused")
    if cell.steps == 17:
        os._exit(3)
    while cell.steps == 19:
        tell(0.5)
        time.sleep(0.01)
    return outcome(cell)
