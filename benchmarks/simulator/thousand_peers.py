"""A thousand production nodes in one process: how long, how much memory, and the same to the bit twice.

    python -m benchmarks.simulator.thousand_peers  # 4 stages x 256, 20 rounds, 1 % loss, twice
    python -m benchmarks.simulator.thousand_peers --stages 10 --replicas 1000 --rounds 2 --once
    python -m benchmarks.simulator.thousand_peers --stages 2 --replicas 40 --rounds 2 --forward 1 --loss 0 --once
    python -m benchmarks.simulator.thousand_peers --stages 2 --replicas 64 --rounds 2 --forward 2 --shards 4 16 --once
    python -m benchmarks.simulator.thousand_peers --replicas 64 --where  # where a call's time goes

Every peer is a whole production node: routing, windows, gossip, presence. Replaced are event loop, network, device and
the model (quadratic models). Each run is a process of its own, with another PYTHONHASHSEED; the digest is the SHA-256
over slow weights, momenta, fast weights and counters of all peers. A call is one microbatch's conversation with one
replica of the next stage. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from gossip.interface import OuterStepTaken, RoundSkipped
from noloco_node.swarm.shards import LEAST_IN_SHARD, MOST_IN_SHARD

PARTS = {
    "pipeline": "/pipeline/",
    "gossip": "/gossip/",
    "simulated network": "/noloco_node/sim/network/",
    "virtual loop": "/noloco_node/sim/clock",
    "simulated device, quadratic model": "/noloco_node/sim/",
    "records, roster": "/noloco_node/swarm/",
    "node, replica, source": "/noloco_node/",
    "asyncio": "/asyncio/",
}


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Run the swarm in this process and return what it took."""
    import torch

    from noloco_node.journal import events
    from noloco_node.sim.peer import SimulatedPeer
    from noloco_node.sim.scenario.faults import Fault
    from noloco_node.sim.scenario.scenario import DevicesConfig, NetworkConfig, Scenario, SwarmConfig
    from noloco_node.sim.scenario.setup import build_setup
    from noloco_node.sim.world import World, simulate
    from noloco_node.swarm import shards, stage_division

    for module in (shards, stage_division):
        vars(module).update(zip(("LEAST_IN_SHARD", "MOST_IN_SHARD"), options.shards, strict=True))
    torch.set_num_threads(1)
    scenario = Scenario(
        name="a thousand peers",
        seed=options.seed,
        swarm=SwarmConfig(
            stages=options.stages,
            replicas=options.replicas,
            rounds=options.rounds,
            inner_steps_per_round=5,
            microbatches_per_step=4,
            overlap_steps=2,
            refresh_s=10.0,
        ),
        network=NetworkConfig(loss=options.loss),
        devices=DevicesConfig(forward_s=options.forward),
    )

    class Count:
        """Counts events, and says every ten seconds how far the run is."""

        def __init__(self, world: World) -> None:
            self.world, self.events = world, {"inner_steps": 0, "met": 0, "skipped": 0, "solo": 0}
            self.begun = self.said = time.monotonic()

        def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
            match event:
                case events.InnerStep():
                    self.events["inner_steps"] += 1
                case OuterStepTaken(partner=partner):
                    self.events["met" if partner else "solo"] += 1
                case RoundSkipped():
                    self.events["skipped"] += 1

        def struck(self, fault: Fault) -> None:
            raise AssertionError("there are no faults here")

        def look(self) -> None:
            now = time.monotonic()
            if now - self.said >= 10.0:
                self.said = now
                progress, spent = self.world.progress, now - self.begun
                left = f", about {spent / progress - spent:.0f} s to go" if progress > 0.02 else ""
                say(f"  {progress:.0%}, {self.world.now_s:.0f} virtual s in {spent:.0f} s{left}")

    counts: list[Count] = []

    def watch(world: World) -> Sequence[Any]:
        counts.append(Count(world))
        return counts

    def finish(world: World) -> dict[str, Any]:
        hub = world.network.statistics()
        calls = sum(int(value) for name, value in hub.items() if name in ("messages.Gradient", "messages.Refused"))
        return {
            "virtual_s": round(world.now_s, 1),
            "calls": calls,
            "proposals": hub.get("messages.Propose", 0),
            "messages_lost": hub.get("messages.lost", 0),
            "wrong": sum(len(session.wrong) for peer in world.peers.values() for session in peer.sessions),
            "failures": len(world.network.failures),
            "rounds_finished": sorted(
                {
                    p.session.node.replica.rounds.finished
                    for p in world.peers.values()
                    if p.session.node and p.session.node.replica
                }
            ),
            "digest": world.digest(),
        }

    setting = build_setup(scenario)
    begun, cpu = time.monotonic(), time.process_time()
    found = simulate(setting, watch, finish)
    return {
        "peers": len(setting.peers),
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "planned_steps": setting.run.budget_samples // setting.run.samples_per_step * options.stages,
        **counts[0].events,
        **found,
    }


def say(line: str) -> None:
    """Say how far it is, beside the figures."""
    print(line, file=sys.stderr, flush=True)


def where(options: argparse.Namespace) -> list[tuple[str, float]]:
    """Return the share of the time that each part of the code takes for itself."""
    import re

    profile = cProfile.Profile()
    profile.enable()
    simulated(options)
    profile.disable()
    shares: dict[str, float] = {}
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        part = next((name for name, pattern in PARTS.items() if re.search(pattern, file)), "torch, built-ins, library")
        shares[part] = shares.get(part, 0.0) + own
    total = sum(shares.values())
    return sorted(((part, own / total) for part, own in shares.items()), key=lambda pair: -pair[1])


def child(hash_seed: int) -> dict[str, Any]:
    """Run the swarm in a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--here"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Run it, print it; 1 if the two digests differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--forward", type=float, default=0.05, metavar="S", help="seconds of a forward pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--shards",
        type=int,
        nargs=2,
        default=(LEAST_IN_SHARD, MOST_IN_SHARD),
        metavar=("LEAST", "MOST"),
        help="records under one key of a stage that nobody knows whole",
    )
    parser.add_argument("--once", action="store_true", help="one process, no comparison")
    parser.add_argument("--where", action="store_true", help="profile instead, and print shares by part")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(simulated(options)))
        return 0
    if options.where:
        for part, share in where(options):
            print(f"{part:28s} {share:6.1%}")
        return 0
    runs = [child(hash_seed) for hash_seed in ([1] if options.once else [1, 2])]
    for run in runs:
        per_call = 1e6 * run["cpu_s"] / max(1, run["calls"])
        print(
            f"{run['peers']} peers: {run['seconds']} s ({run['cpu_s']} s of CPU), {run['peak_mib']} MiB at most, "
            f"{run['calls']:,} calls, {per_call:.0f} microseconds each with everything else"
        )
        rounds = f"rounds met {run['met']:,}, skipped {run['skipped']:,}, solo {run['solo']:,}"
        rounds += f"; proposals {run['proposals']:,}"
        steps = f"{run['inner_steps']:,} of {run['planned_steps']:,}"
        print(f"  {run['virtual_s']:,} virtual seconds, {steps} inner steps; {rounds}")
        print(f"  {run['messages_lost']:,} messages lost; digest {run['digest'][:16]}")
    same = len({run["digest"] for run in runs}) == 1
    if len(runs) > 1:
        print("The two digests are " + ("the same." if same else "DIFFERENT."))
    print(json.dumps(runs))
    return 0 if same and not any(run["wrong"] or run["failures"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
