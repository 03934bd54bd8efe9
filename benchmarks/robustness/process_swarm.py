"""A swarm of real processes on this machine whose peers live more than once, for whoever watches or kills them.

A peer has one home and one journal through all its sessions. Its journal says what it does; who is struck by SIGKILL is
gone with its libp2p daemon and may be started again with the home that it had.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from noloco_node.demo import swarm_processes
from noloco_node.demo.child_processes import Child, Children
from noloco_node.demo.run import peer_name
from noloco_node.errors import UserError
from noloco_node.journal.events import Finished, InnerStep, Started
from noloco_node.journal.reader import Tail
from noloco_node.observe.peer_history import PeerHistory

READY_S = 1800.0
"""Guards against waiting for ever; nine processes at once take a minute to load torch on two cores."""
LOOK_S = 0.25


class Shape(NamedTuple):
    """How large the swarm is."""

    stages: int
    replicas: int
    seed: int = 0


class Peer:
    """One peer through all its sessions: one home and one journal, a process after the other."""

    def __init__(self, name: str, stage: int, home: Path) -> None:
        self.name, self.stage, self.home = name, stage, home
        self.history, self.tail = PeerHistory(name, stage), Tail(home / "journal.jsonl")
        self.sessions: list[Child] = []
        self.struck_at: list[float] = []
        """When it was killed (unix seconds)."""
        self.progress = 0.0
        """Share of the run, as far as it has heard."""
        self.steps, self.finished = 0, False
        """Of the present session."""
        self.back_at: float | None = None
        """When it is to come back (monotonic seconds); None while it is not away."""

    @property
    def child(self) -> Child:
        """The process of the present session, or of the last one."""
        return self.sessions[-1]

    @property
    def runs(self) -> bool:
        """Whether its process is there."""
        return self.child.exit_code is None

    def take_news(self) -> None:
        """Read what its journal has to say."""
        for event in self.tail.poll():
            self.history.take(event)
            match event:
                case Started():
                    self.steps, self.finished = 0, False
                case InnerStep():
                    self.steps += 1
                    self.progress = max(self.progress, event.progress)
                case Finished():
                    self.finished = True


class Swarm:
    """A bootstrap peer and the peers of one run as processes of this machine; a context that leaves none of them."""

    def __init__(self, home: Path, shape: Shape, run_text: str) -> None:
        self.children, self.invite, self._home = Children(), "", home
        self.peers = [
            Peer(name := peer_name(stage, replica), stage, home / name)
            for stage in range(shape.stages)
            for replica in range(shape.replicas)
        ]
        self._run_file = write(home / "run.toml", run_text)

    async def __aenter__(self) -> Self:
        try:
            self.invite = await swarm_processes.bootstrap(self.children, self._run_file, self._home / "bootstrap")
            for peer in self.peers:
                self.start(peer)
        except BaseException:
            await self.children.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.children.stop()
        for peer in self.peers:
            peer.tail.close()

    def start(self, peer: Peer) -> None:
        """Begin a session of a peer, the first or another one, with its home as it is."""
        logs = self._home / "output" / f"{peer.name}-{len(peer.sessions)}"
        peer.sessions.append(swarm_processes.join(self.children, self.invite, peer.stage, peer.home, logs))
        peer.steps, peer.finished, peer.back_at = 0, False, None

    def strike(self, peer: Peer) -> None:
        """Kill a peer's process, and what belongs to it."""
        peer.struck_at.append(time.time())
        peer.child.kill()

    def take_news(self) -> None:
        """Read all journals."""
        for peer in self.peers:
            peer.take_news()

    async def until(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        """Wait for a condition on the peers; raise `UserError` with a peer's last words when it does not come."""
        limit_s = time.monotonic() + within_s
        while True:
            self.take_news()
            if condition():
                return
            if time.monotonic() > limit_s:
                slowest = min(self.peers, key=lambda peer: peer.steps)
                raise slowest.child.trouble(f"{what}: not within {within_s:g} s")
            await asyncio.sleep(LOOK_S)


def say(line: str) -> None:
    """Say how far it is, beside the figures."""
    print(line, file=sys.stderr, flush=True)


def write(path: Path, text: str) -> Path:
    """Write a file and the directories above it; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def options(text: str, size: Shape, home: str) -> argparse.ArgumentParser:
    """Return the options that such a benchmark has anyway. `text`: what `--help` says; `size`, `home`: defaults."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=size.stages)
    parser.add_argument("--replicas", type=int, default=size.replicas)
    parser.add_argument("--seed", type=int, default=size.seed)
    parser.add_argument("--home", type=Path, default=Path(home))
    return parser


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a benchmark to its exit code; SIGTERM ends it as Ctrl-C does, and no process is left."""

    async def stoppable() -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
        return await main()

    try:
        return asyncio.run(stoppable())
    except UserError as trouble:
        print(trouble, file=sys.stderr)
        return int(trouble.code)
