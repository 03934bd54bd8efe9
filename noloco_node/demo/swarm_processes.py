"""The processes of a whole swarm on this machine: which commands they are, and what they answer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from noloco_node.demo.calibrate import cores
from noloco_node.demo.child_processes import Child, Children, tied_command
from noloco_node.demo.summary import ModelScores

READY_S = 180.0
"""Longest wait for a calibration or the bootstrap peer; a cold disk may take a minute to load torch."""
LINGER_S = 1800.0
"""Peers serve their weights until they are stopped; the bound is for a parent that cannot."""
ANYWHERE = "/ip4/127.0.0.1/tcp/0"


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
