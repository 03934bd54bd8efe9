"""Peers of another commit and of this tree train one model together, and homes go from one to the other and back.

    python -m benchmarks.robustness.versions v0.4.1  # a tag or a commit; some minutes on two cores

Two stages of two replicas, one of each version, as processes over real libp2p daemons; the other version has the
bootstrap peer, then this one has. Since a stage has one replica of each, every meeting of a round is between the
versions. Once each replica has had `ROUNDS` of them, and microbatches have come back to the replicas of the first stage
from both of the next, the replicas end politely, one after the other, and go on with their homes as the other version;
and then back as the first. Exit code 1 where a replica does not come so far, or does not end with exit code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from benchmarks.robustness.process_swarm import READY_S, Peer, Shape, Swarm, run, say
from gossip.interface import OuterStepTaken
from noloco_node.journal.events import Event, Hops, Started
from noloco_node.journal.reader import read
from noloco_node.run.presets import demo_run_text

ROOT = Path(__file__).parents[2]
ROUNDS = 5
STEPS = 100_000
"""More than the benchmark sees."""
SIZE = Shape(stages=2, replicas=2)


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Have another commit's tree, with its compiled part, in a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=False)


class MixedSwarm(Swarm):
    """A swarm whose replicas run one tree or the other by turns. `trees`: the bootstrap peer's first."""

    def __init__(self, home: Path, run_text: str, trees: tuple[Path, Path]) -> None:
        super().__init__(home, SIZE, run_text)
        self._trees, self._first = trees, {peer.name: n % SIZE.replicas for n, peer in enumerate(self.peers)}
        _run_from(trees[0])

    def start(self, peer: Peer) -> None:
        """Begin a session with the version that is not the last one's."""
        _run_from(self._trees[(self._first[peer.name] + len(peer.sessions)) % 2])
        super().start(peer)

    async def change(self, peer: Peer) -> None:
        """End a replica politely, and let it go on as the other version."""
        peer.child.signal(signal.SIGTERM)
        async with asyncio.timeout(READY_S):
            if await peer.child.ended() != 0:
                raise peer.child.trouble("it did not end politely")
        self.start(peer)
        await self.until(lambda: self.is_mixed(peer), "rounds and microbatches of both versions", READY_S)

    def is_mixed(self, peer: Peer) -> bool:
        """Say whether the present session has met the other version, and had replies of both."""
        events = _session(peer)
        if not events or len(_starts(peer)) < len(peer.sessions):
            return False
        met = sum(isinstance(each, OuterStepTaken) and each.partner is not None for each in events)
        hops = next((each.counts for each in events if isinstance(each, Hops)), {})
        return met >= ROUNDS and (peer.stage > 0 or sum(map(bool, hops.values())) >= SIZE.replicas)


def _run_from(tree: Path) -> None:
    """Let child processes import this tree and no other, whatever directory they start in."""
    os.environ.update(PYTHONPATH=str(tree), PYTHONSAFEPATH="1")


def _starts(peer: Peer) -> list[Started]:
    return [each for each in read(peer.home / "journal.jsonl") if isinstance(each, Started)]


def _session(peer: Peer) -> list[Event]:
    """Return the events of the last session, the latest first."""
    events = list(read(peer.home / "journal.jsonl"))
    return list(takewhile(lambda event: not isinstance(event, Started), reversed(events)))


async def trained(home: Path, trees: tuple[Path, Path], seed: int) -> None:
    """Run one swarm through all of it; raise `UserError` where it does not come so far."""
    text = demo_run_text(stages=SIZE.stages, replicas=SIZE.replicas, steps=STEPS, seed=seed)
    async with MixedSwarm(home, text, trees) as swarm:
        await swarm.until(lambda: all(map(swarm.is_mixed, swarm.peers)), "rounds of both versions", READY_S)
        say("both versions train together")
        for back in ("the other version", "the first version again"):
            for peer in swarm.peers:
                await swarm.change(peer)
                say(f"{peer.name} went on as {back}")


async def main() -> int:
    """Return 0 if both swarms came through."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with checked_out(asked.commit) as other, tempfile.TemporaryDirectory() as directory:
        for name, trees in (("other", (other, ROOT)), ("this", (ROOT, other))):
            say(f"bootstrap peer: {name} version")
            await trained(Path(directory) / name, trees, asked.seed)
    print(f"{asked.commit} and this tree train together, and homes go from one to the other and back")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
