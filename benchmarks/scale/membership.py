"""What membership costs each peer: kB a second and share of a core, with real daemons and production membership.

    python -m benchmarks.scale.membership [--daemons 24] [--refresh 10] [--stages 2] [--replace 0] [--json]

All peers are in one process, each with its own daemon. The command runs in a network namespace of its own, so that its
loopback device carries nothing else; the device counts every byte once, TCP and IP headers included. So the bytes are
exact, and on the mean a peer sends as many as it receives. `missing` counts the living peers that a peer does not
believe to be in the stages that it reads, `gone` the dead that it does; both are means over the peers and over looks
every 5 s. With `--replace N`, N daemons are killed every 45 s, and as many newcomers join; the looks begin 15 s after
that, and what the ended daemons spent is not known. Needs `unshare` and `ip`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory

import psutil

from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import NetworkSettings
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.receipts import IssuedReceipts
from noloco_node.swarm.roster import PeerRecord
from noloco_node.tasks import background

INSIDE = "--inside"
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
LOOK_S, REPLACE_S, SETTLE_S = 5.0, 45.0, 15.0


@dataclass
class Peer:
    """One peer of the swarm. `ending`: ends it."""

    stage: int
    membership: Membership
    ending: AsyncExitStack


@dataclass
class Swarm:
    """The living peers; `looks` are the missing and the gone of each look, per peer."""

    stages: int
    refresh_s: float
    home: Path
    peers: list[Peer] = field(default_factory=list)
    looks: list[tuple[float, float]] = field(default_factory=list)
    _doors: tuple[str, ...] = ()
    _joined: int = 0

    async def join(self) -> None:
        ending, stage = AsyncExitStack(), self._joined % self.stages
        settings = NetworkSettings(
            run="membership", identity=self.home / str(self._joined), listen=LISTEN, bootstrap=self._doors
        )
        network = await ending.enter_async_context(Libp2pNetwork.open(settings, lambda _: None))
        self._doors = self._doors or tuple(await network.addresses())
        membership = Membership(network, "membership", self.stages, refresh_s=self.refresh_s)
        await membership.claim(PeerRecord(peer=network.peer_id, stage=stage, state=PeerState.TRAINING))
        membership.focus(range(stage, min(stage + 2, self.stages)))
        await ending.enter_async_context(background(membership.run()))
        self.peers.append(Peer(stage, membership, ending))
        self._joined += 1

    async def kill(self, peer: Peer) -> None:
        """End a peer without a word to the others."""
        self.peers.remove(peer)
        with suppress(Exception):
            await peer.ending.aclose()

    def work(self, samples: int) -> None:
        """Have every source say how far it is, and every replica of the last stage give receipts for all of them."""
        for peer in self.peers:
            me = peer.membership.me
            done = samples if peer.stage == 0 else 0
            record = PeerRecord(peer=me, stage=peer.stage, state=PeerState.TRAINING, inner_steps=samples, samples=done)
            peer.membership.update(record)
            if peer.stage == self.stages - 1:
                issued = peer.membership.issued = peer.membership.issued or IssuedReceipts(1)
                for source in self.peers:
                    if source.stage == 0:
                        issued.add(source.membership.me, 1)

    def look(self) -> None:
        there = [{peer.membership.me for peer in self.peers if peer.stage == stage} for stage in range(self.stages)]
        missing = gone = 0
        for peer in self.peers:
            for stage in peer.membership.watched:
                believed = {record.peer for record in peer.membership.roster.stages[stage]}
                missing += len(there[stage] - believed)
                gone += len(believed - there[stage])
        self.looks.append((missing / len(self.peers), gone / len(self.peers)))


def sent_bytes() -> int:
    """Return the bytes that the loopback device of this network namespace has carried."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def cpu_s() -> float:
    """Return the processor seconds of this process and of all daemons."""
    daemons = psutil.Process().children(recursive=True)
    spent = sum(times.user + times.system for times in (each.cpu_times() for each in daemons))
    return float(spent) + time.process_time()


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return what a swarm costs each of its peers, and what it did not know."""
    async with AsyncExitStack() as ending:
        home, rng = Path(ending.enter_context(TemporaryDirectory())), Random(1)
        swarm = Swarm(options.stages, options.refresh, home)
        for _ in range(options.daemons):
            await swarm.join()
        ending.push_async_callback(close, swarm)
        until_s = time.monotonic() + options.warm
        while time.monotonic() < until_s:
            swarm.work(len(swarm.looks))
            await asyncio.sleep(LOOK_S)
        begun_s, bytes_before, cpu_before_s = time.monotonic(), sent_bytes(), cpu_s()
        replaced_s = begun_s if options.replace else float("-inf")
        while time.monotonic() < begun_s + options.seconds:
            if options.replace and time.monotonic() > replaced_s + REPLACE_S:
                for victim in rng.sample(swarm.peers[1:], options.replace):
                    await swarm.kill(victim)
                    await swarm.join()
                replaced_s = time.monotonic()
            swarm.work(len(swarm.looks))
            await asyncio.sleep(LOOK_S)
            if time.monotonic() > replaced_s + SETTLE_S:
                swarm.look()
        passed_s = time.monotonic() - begun_s
        missing, gone = map(fmean, zip(*swarm.looks, strict=True))
        found = {
            "daemons": options.daemons,
            "stages": options.stages,
            "refresh_s": options.refresh,
            "replaced": options.replace,
            "kb_per_s": (sent_bytes() - bytes_before) / 1000 / passed_s / options.daemons,
            "missing": missing,
            "gone": gone,
        }
        return (
            found if options.replace else found | {"cpu_share": (cpu_s() - cpu_before_s) / passed_s / options.daemons}
        )


async def close(swarm: Swarm) -> None:
    for peer in list(swarm.peers):
        await swarm.kill(peer)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--daemons", type=int, default=24, metavar="N")
    parser.add_argument("--stages", type=int, default=2, metavar="N")
    parser.add_argument("--refresh", type=float, default=10.0, metavar="S", help="seconds between two publications")
    parser.add_argument("--warm", type=float, default=60.0, metavar="S", help="seconds before the measurement")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="seconds that are measured")
    parser.add_argument("--replace", type=int, default=0, metavar="N", help="peers to replace every 45 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        run = [sys.executable, "-m", "benchmarks.scale.membership", *sys.argv[1:], INSIDE]
        own = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        return subprocess.run([*own, *run], check=False).returncode
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:12} {value:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
