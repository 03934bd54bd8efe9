"""The options of a demo, their limits, and the directory that a demo fills.

    noloco-demo/
        demo.json               which demo this was; marks the directory as a demo's
        run.toml                the run file, its step budget frozen
        bootstrap/ 0a/ 0b/ ...  the homes of the peers: journal, identity, output
        model/                  the merged model, a Hugging Face directory
        loss.png summary.txt summary.json

A demo never writes over files: beside an earlier demo it takes the next free number (`noloco-demo-2`).

The slow replica of a heterogeneous swarm is the last of the last stage. Routes decide what it gets, so the demo shows
that the others send it no more than it can take; a slow source would only draw less.
"""

from __future__ import annotations

import string
from pathlib import Path

import msgspec

from noloco_node import __version__
from noloco_node.errors import Exit, UserError
from noloco_node.storage.atomic_file import write_whole
from noloco_node.storage.home import Home

MOST_PEERS = 64
PEER_BYTES = 2**29
"""Memory of a peer and its daemon, about."""
MANY, FEW = 3, 2
"""Replicas of a stage; only of three can one see that two drift apart while they meet others."""
SLOWDOWN = 4.0
"""Of the slow replica of a heterogeneous demo."""
MARK = "demo.json"
NUMBERS = 1000


class DemoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a demo. `minutes`: of training, without start and evaluation. `steps`: inner steps of each source,
    instead of `minutes`.

    `slowdown`: how many times slower the last replica of the last stage acts. `evaluated`: export and evaluate the
    model at the end. `outage`: kill the first replica of the last stage on the way, and start it again.
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
        return self.stages * self.replicas

    @property
    def slow_peer(self) -> str | None:
        return peer_name(self.stages - 1, self.replicas - 1) if self.slowdown > 1 else None

    @property
    def bytes(self) -> int:
        """About the memory of all peers and the bootstrap peer."""
        return (self.peers + 1) * PEER_BYTES

    @property
    def killed_peer(self) -> str | None:
        """The name of the peer to kill, if any: never the only replica of a stage."""
        return peer_name(self.stages - 1, 0) if self.outage and self.replicas > 1 else None


def fitting_replicas(stages: int, memory_bytes: int) -> int:
    """Return how many replicas of each stage a machine with so much free memory shows best."""
    return MANY if DemoConfig(stages=stages, replicas=MANY).bytes <= memory_bytes else FEW


def check(demo: DemoConfig) -> None:
    """Raise `UserError` (Exit.USAGE) for a demo that no machine can run."""
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
    """Return the content of demo.json: the options, and the start in unix seconds."""
    content = {"version": __version__, "started_at": started_at, **msgspec.structs.asdict(demo)}
    return msgspec.json.encode(content, enc_hook=str) + b"\n"


def peer_name(stage: int, replica: int) -> str:
    """Return 0a, 0b, ... 0z, 0aa, 0ab, ..."""
    letters = ""
    while replica >= 0:
        replica, last = divmod(replica, 26)
        letters, replica = string.ascii_lowercase[last] + letters, replica - 1
    return f"{stage}{letters}"


def claim_output_dir(wanted: Path, mark: bytes) -> Home:
    """Lock `wanted`, or its next free number where an earlier demo lies there, and write `mark` into it.

    Raises `UserError` where it holds other files, or cannot be written.
    """
    wanted = wanted.expanduser().absolute()
    if (names := _names(wanted)) and MARK not in names:
        raise UserError(
            f"{wanted} is not empty, and not a demo's",
            why=f"it holds {', '.join(sorted(names)[:5])}",
            hint="give another directory with --home",
            code=Exit.USAGE,
        )
    for number in range(1, NUMBERS):
        candidate = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if _names(candidate):
            continue
        try:
            home = Home.open(candidate)
        except UserError as trouble:
            if trouble.code is Exit.HOME_IN_USE:  # another demo, a moment ahead of us
                continue
            raise
        write_whole(home.path / MARK, mark)
        return home
    raise UserError(
        f"{NUMBERS} demos lie beside {wanted}",
        why="each keeps its directory",
        hint="remove some of them, or give another directory with --home",
        code=Exit.USAGE,
    )


def _names(path: Path) -> set[str]:
    """Return the files of a directory without the lock, which a demo that died at once leaves."""
    try:
        return {entry.name for entry in path.iterdir()} - {"lock"}
    except (FileNotFoundError, NotADirectoryError):
        return set()
