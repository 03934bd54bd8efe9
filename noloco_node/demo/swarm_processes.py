"""The processes of a whole swarm on this machine: which commands they are, what they answer, how much they can do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from noloco_node.demo.child_processes import Child, Children, tied_command
from noloco_node.demo.summary import ModelScores
from noloco_node.run.config import RunConfig

READY_S = 180.0
"""Longest wait for a calibration or the bootstrap peer; a cold disk may take a minute to load torch."""
LINGER_S = 1800.0
"""Peers serve their weights until they are stopped; the bound is for a parent that cannot."""
ANYWHERE = "/ip4/127.0.0.1/tcp/0"
EFFICIENCY = 0.7
"""Share of the cores' time that a swarm spends on arithmetic, as measured on two cores."""


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def affordable_steps(
    train_s: float, seconds_per_microbatch: Sequence[float], run: RunConfig, slowdown: float = 1.0
) -> int:
    """Return how many inner steps each source can take in `train_s` seconds; at least 20, so that there is a curve.

    `seconds_per_microbatch`: of each core that the swarm can keep busy, measured at the same time. `slowdown`: of one
    replica; all stages then run at the speed of its stage, and cannot keep more cores busy than that needs.
    """
    microbatches_per_s = sum(EFFICIENCY / seconds for seconds in seconds_per_microbatch)
    wanted = run.pipeline.stages * (run.pipeline.replicas - 1 + 1 / slowdown)
    per_step = run.pipeline.microbatches_per_step * run.pipeline.replicas
    return max(20, int(train_s * microbatches_per_s * min(1.0, wanted / len(seconds_per_microbatch)) / per_step))


async def calibrations(children: Children, run_file: Path, peers: int, logs: Path) -> list[float]:
    """Return the seconds of a microbatch, of each core that so many peers keep busy, all measured at the same time."""
    started = [
        children.start(
            f"calibration {number}", tied_command("noloco_node.demo.calibrate", str(run_file)), logs / str(number)
        )
        for number in range(min(cores(), peers))
    ]
    return [float((await child.line("seconds_per_microbatch", READY_S)).split()[1]) for child in started]


async def bootstrap(children: Children, run_file: Path, home: Path) -> str:
    """Start a bootstrap peer; return its invite."""
    command = ("bootstrap", "--run", str(run_file), "--listen", ANYWHERE, "--home", str(home))
    peer = children.start("bootstrap peer", tied_command("noloco_node", *command), home)
    return await peer.line("noloco1:", READY_S)


def join(children: Children, invite: str, stage: int, home: Path, logs: Path, slowdown: float = 1.0) -> Child:
    """Start a peer that is called as its home is."""
    options = ("--stage", str(stage), "--home", str(home), "--listen", ANYWHERE, "--slowdown", f"{slowdown:g}")
    limits = ("--device", "cpu", "--threads", "1", "--linger", f"{LINGER_S:g}", "--refresh", "2")
    return children.start(f"peer {home.name}", tied_command("noloco_node", "join", invite, *options, *limits), logs)


async def evaluation(children: Children, invite: str, model: Path, logs: Path) -> ModelScores:
    """Gather, merge, export to `model`, evaluate and sample, in a child of its own."""
    command = tied_command("noloco_node.demo.evaluate_swarm", invite, str(model))
    child = children.start("evaluation", command, logs)
    return msgspec.json.decode(await child.line("{", LINGER_S), type=ModelScores)
