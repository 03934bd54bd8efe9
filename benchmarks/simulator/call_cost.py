"""What a call costs in the simulator's network: microseconds of processor time for each of its parts.

    python -m benchmarks.simulator.call_cost [--calls 20000] [--peers 64] [--repeats 5] [--json FILE]

Every figure is the median over the repeats. A conversation is a dial, one message each way and a polite end at both
ends, with the handler's task; all conversations of a repeat run at the same time, spread over pairs of peers and over
virtual time as in a swarm. What the production modules do around a call is not in these figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noloco_node.network.interface import Conversation
from noloco_node.network.schema import MessageSpec, Schema
from noloco_node.sim.clock import run
from noloco_node.sim.network.dht import SimDht
from noloco_node.sim.network.link_model import Access, Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork

MESSAGE_BYTES = 10_000
SPREAD_S = 1e-4
"""Virtual seconds from one call to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A question, and its answer."""

    number: int


SCHEMA = Schema({Ask: MessageSpec("Ask")})


def message_bytes(message: object, topic: str) -> int:
    """Return what every message takes on the line."""
    return MESSAGE_BYTES


async def timers(calls: int, peers: int) -> None:
    """Set and let fire `calls` timers of the event loop."""
    loop, done = asyncio.get_running_loop(), loop_future()
    left = [calls]

    def fire() -> None:
        left[0] -= 1
        if not left[0]:
            done.set_result(None)

    for number in range(calls):
        loop.call_later(0.02 + number * SPREAD_S, fire)
    await done


def loop_future() -> asyncio.Future[None]:
    """Return a future of the running loop."""
    return asyncio.get_running_loop().create_future()


def conversations(
    conditions: NetworkConditions, access: Access | None = None
) -> Callable[[int, int], Coroutine[Any, Any, None]]:
    """Return a job that holds `calls` conversations between `peers` peers."""

    async def answer(conversation: Conversation) -> None:
        await conversation.send(await conversation.receive())

    async def main(calls: int, peers: int) -> None:
        hub = SimNetwork(conditions, size_bytes=message_bytes)
        networks = [hub.network(f"peer-{number}", access) for number in range(peers)]
        for network in networks:
            await network.serve("ask", SCHEMA, answer)
        lost = [0]

        async def talk(first: int) -> None:
            await asyncio.sleep(first * SPREAD_S)
            for number in range(first, calls, peers):
                try:
                    async with networks[first].talk(f"peer-{(first + 1) % peers}", "ask", SCHEMA) as conversation:
                        await conversation.send(Ask(number=number))
                        await conversation.receive()
                except ConnectionError:
                    lost[0] += 1

        async with asyncio.TaskGroup() as group:
            for first in range(peers):
                group.create_task(talk(first))
        assert lost[0] <= calls * (4 * conditions.loss)

    return main


async def readings(calls: int, peers: int) -> None:
    """Publish and read in turn, as the 256 replicas of a stage do."""
    records = SimDht()
    for number in range(calls):
        now_s, place = number * 0.04, ("stage", f"peer-{number % 256}")
        records.publish(place, (b"record", 30.0), now_s, side=None)
        records.forget(place, now_s, now_s)
        found = records.read("stage", now_s, lag_s=0.0, side=None)
    assert len(found) == min(calls, 256)


CALM = NetworkConditions(latency=Latency(mean_s=0.02))
JOBS: dict[str, Callable[[int, int], Coroutine[Any, Any, None]]] = {
    "a timer of the event loop": timers,
    "a conversation": conversations(CALM),
    "a conversation, log-normal latency": conversations(
        NetworkConditions(latency=Latency(shape="lognormal", mean_s=0.02, std_s=0.02))
    ),
    "a conversation, 1 % loss": conversations(NetworkConditions(loss=0.01)),
    "a conversation, limited lines": conversations(CALM, Access(up_bytes_per_s=1e6, down_bytes_per_s=1e7)),
    "publish and read a record among 256": readings,
}


def measure(job: Callable[[int, int], Coroutine[Any, Any, None]], calls: int, peers: int) -> float:
    """Return microseconds of processor time for each call."""
    begun_s = time.process_time()
    run(job(calls, peers))
    return (time.process_time() - begun_s) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000, help="calls in each repeat")
    parser.add_argument("--peers", type=int, default=64, help="peers that converse")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, of which the median counts")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    if min(arguments.calls, arguments.repeats) < 1 or arguments.peers < 2:
        sys.exit("At least one call, one repeat and two peers are needed.")
    found: dict[str, list[float]] = {name: [] for name in JOBS}
    for _ in range(arguments.repeats):
        for name, job in JOBS.items():
            found[name].append(measure(job, arguments.calls, arguments.peers))
    print(f"{'microseconds a call':40} {'median':>8} {'least':>8} {'most':>8}")
    for name, values in found.items():
        print(f"{name:40} {statistics.median(values):8.2f} {min(values):8.2f} {max(values):8.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
