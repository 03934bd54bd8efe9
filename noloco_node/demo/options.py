"""What is asked of a demo: how large a swarm, for how long, even or not; and what no machine can serve.

An uneven swarm has one slow replica, the last of the last stage. There the routes decide what it gets, so that it shows
whether the others send it no more than it can take; a source would simply draw less.
"""

from __future__ import annotations

import string
from pathlib import Path

import msgspec

from noloco_node import __version__
from noloco_node.errors import Exit, UserError

MOST_PEERS = 64
PEER_BYTES = 2**29
"""Memory of a peer and its daemon, about."""
MANY, FEW = 3, 2
"""Replicas of a stage: three show that those who do not meet drift apart, and what a merged model gains."""
SLOWDOWN = 4.0
"""Of the slow replica of a heterogeneous demo."""


class DemoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asks for. `minutes`: of training; start and evaluation come on top.

    `slowdown`: how many times slower the last replica of the last stage acts. `steps`: inner steps of each source,
    instead of what fits into `minutes`. `evaluated`: whether the model is evaluated and exported in the end. `outage`:
    whether the first replica of the last stage is killed on the way, and started again.
    """

    stages: int = 2
    replicas: int = 2
    minutes: float = 2.0
    home: Path = Path("noloco-demo")
    seed: int = 0
    slowdown: float = 1.0
    steps: int | None = None
    evaluated: bool = True
    outage: bool = False

    @property
    def peers(self) -> int:
        """How many peers train."""
        return self.stages * self.replicas

    @property
    def slow_peer(self) -> str | None:
        """The name of the replica that is slowed down, if one is."""
        return f"{self.stages - 1}{letters(self.replicas - 1)}" if self.slowdown > 1 else None

    @property
    def bytes(self) -> int:
        """The memory of all peers and the bootstrap peer, about."""
        return (self.peers + 1) * PEER_BYTES

    @property
    def killed_peer(self) -> str | None:
        """The name of the peer that is killed, if one is: nobody would be left of a stage of one."""
        return f"{self.stages - 1}{letters(0)}" if self.outage and self.replicas > 1 else None


def fitting_replicas(stages: int, memory_bytes: int) -> int:
    """Return how many replicas of each stage a machine with so much free memory shows best."""
    return MANY if DemoConfig(stages=stages, replicas=MANY).bytes <= memory_bytes else FEW


def check(demo: DemoConfig) -> None:
    """Raise `UserError` (Exit.USAGE) where a demo cannot be had."""
    if demo.peers > MOST_PEERS:
        raise UserError(
            f"{demo.stages} stages of {demo.replicas} replicas are too many for one machine",
            why=f"each peer is two processes and about half a gibibyte; the demo starts at most {MOST_PEERS} peers",
            hint="fewer stages or replicas",
            code=Exit.USAGE,
        )
    if demo.slow_peer is not None and demo.replicas < 2:
        raise UserError(
            "a heterogeneous demo needs two replicas in each stage",
            why="one is slowed down, and the others of its stage make up for it",
            hint="--replicas 2 or more",
            code=Exit.USAGE,
        )


def mark(demo: DemoConfig, started_at: float) -> bytes:
    """Return the content of demo.json: which demo this is, and since when (unix seconds)."""
    content = {"version": __version__, "started_at": started_at, **msgspec.structs.asdict(demo)}
    return msgspec.json.encode(content, enc_hook=str) + b"\n"


def letters(number: int) -> str:
    """Return a, b, ... z, aa, ab, ..."""
    rest, last = divmod(number, 26)
    return (letters(rest - 1) if rest else "") + string.ascii_lowercase[last]
