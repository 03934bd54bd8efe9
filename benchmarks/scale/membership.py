"""What membership costs each peer: kB a second and share of a core, with real daemons and production membership.

    python -m benchmarks.scale.membership [--daemons 24] [--refresh 10] [--stages 2] [--seconds 120] [--json]

All peers are in one process, each with its own daemon. The command runs in a network namespace of its own, so that its
loopback device carries nothing else; the device counts every byte once, TCP and IP headers included. So the bytes are
exact, and a peer sends as many as it receives, on the mean. `missing` counts, at the end of each reading, living peers
of the stages read that the reader did not believe to be there; the mean of all readings. Needs `unshare` and `ip`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
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
LOOK_S = 5.0


def sent_bytes() -> int:
    """Return the bytes that the loopback device of this network namespace has carried."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def cpu_s() -> float:
    """Return the processor seconds of this process and of all daemons."""
    daemons = psutil.Process().children(recursive=True)
    spent = sum(times.user + times.system for times in (each.cpu_times() for each in daemons))
    return float(spent) + time.process_time()


def note_work(members: list[Membership], stages: int, samples: int) -> None:
    """Have every source say how far it is, and every replica of the last stage give receipts for all of them."""
    sources = [member.me for number, member in enumerate(members) if number % stages == 0]
    for number, member in enumerate(members):
        stage = number % stages
        record = PeerRecord(peer=member.me, stage=stage, state=PeerState.TRAINING, inner_steps=samples)
        member.update(record)
        if stage == 0:
            member.note_samples(samples)
        if stage == stages - 1:
            member.issued = member.issued or IssuedReceipts(number)
            for source in sources:
                member.issued.add(source, 1)


def missing_of(members: list[Membership], stages: int) -> int:
    """Return how many peers are missing in the stages that each peer reads, added up."""
    wanted = [
        {member.me for number, member in enumerate(members) if number % stages == stage} for stage in range(stages)
    ]
    return sum(
        len(wanted[stage] - {record.peer for record in member.roster.stages[stage]})
        for member in members
        for stage in member.watched
    )


async def measure(daemons: int, stages: int, refresh_s: float, warm_s: float, seconds: float) -> dict[str, float]:
    """Return what a swarm costs each of its peers, and what it did not know."""
    async with AsyncExitStack() as peers:
        home = Path(peers.enter_context(TemporaryDirectory()))
        members: list[Membership] = []
        doors: tuple[str, ...] = ()
        for number in range(daemons):
            settings = NetworkSettings(run="membership", identity=home / str(number), listen=LISTEN, bootstrap=doors)
            network = await peers.enter_async_context(Libp2pNetwork.open(settings, lambda _: None))
            doors = doors or tuple(await network.addresses())
            member = Membership(network, "membership", stages, refresh_s=refresh_s)
            stage = number % stages
            await member.claim(PeerRecord(peer=network.peer_id, stage=stage, state=PeerState.TRAINING))
            member.focus(range(stage, min(stage + 2, stages)))
            members.append(member)
        for member in members:
            await peers.enter_async_context(background(member.run()))
        missing: list[int] = []

        async def look(until_s: float) -> None:
            while time.monotonic() < until_s:
                note_work(members, stages, len(missing))
                await asyncio.sleep(LOOK_S)
                missing.append(missing_of(members, stages))

        await look(time.monotonic() + warm_s)
        missing.clear()
        begun_s, bytes_before, cpu_before_s = time.monotonic(), sent_bytes(), cpu_s()
        await look(begun_s + seconds)
        passed_s = time.monotonic() - begun_s
        return {
            "daemons": daemons,
            "stages": stages,
            "refresh_s": refresh_s,
            "kb_per_s": (sent_bytes() - bytes_before) / 1000 / passed_s / daemons,
            "cpu_share": (cpu_s() - cpu_before_s) / passed_s / daemons,
            "missing": fmean(missing) / daemons,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--daemons", type=int, default=24, metavar="N")
    parser.add_argument("--stages", type=int, default=2, metavar="N")
    parser.add_argument("--refresh", type=float, default=10.0, metavar="S", help="seconds between two publications")
    parser.add_argument("--warm", type=float, default=60.0, metavar="S", help="seconds before the measurement")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="seconds that are measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        run = [sys.executable, "-m", "benchmarks.scale.membership", *sys.argv[1:], INSIDE]
        own = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        return subprocess.run([*own, *run], check=False).returncode
    found = asyncio.run(measure(options.daemons, options.stages, options.refresh, options.warm, options.seconds))
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"{options.daemons} daemons, {options.stages} stages, refresh {options.refresh:g} s:"
            f" {found['kb_per_s']:.2f} kB/s a peer each way, {found['cpu_share']:.2%} of a core,"
            f" {found['missing']:.2f} peers missing in what a peer reads"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
