"""How fast messages pass the production's libp2p stream: two switchboards over a pair of sockets, no daemon between.

    python -m benchmarks.pipeline_efficiency.stream_throughput [--repeats 5]

Both ends live in one process and one event loop, so a figure is the cost of sending *and* receiving. To compare two
commits, run it in a checkout of each, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import uvloop

from noloco_node.libp2p.control import StreamOpening
from noloco_node.libp2p.settings import Capacity, TimeoutSettings
from noloco_node.libp2p.switchboard import Switchboard
from noloco_node.network.schema import MessageSpec, Schema, TensorSpec

LARGE_VALUES = 16 << 20
"""float32: 64 MiB a message."""


@dataclass(frozen=True, kw_only=True)
class Small:
    number: int


@dataclass(frozen=True, kw_only=True)
class Large:
    values: torch.Tensor


SCHEMA = Schema(
    {Small: MessageSpec("Small"), Large: MessageSpec("Large", {"values": TensorSpec((LARGE_VALUES,), "float32")})}
)


async def seconds_of(message: Small | Large, count: int) -> float:
    """Return the processor's seconds for `count` messages from one end of a stream to the other."""
    near, far = (Switchboard(TimeoutSettings(), Capacity()) for _ in range(2))
    arrived, begun, streams = asyncio.Semaphore(0), asyncio.Event(), asyncio.Queue[Any]()

    async def take(conversation: Any) -> None:
        while True:
            await conversation.receive()
            arrived.release()

    def call(transport: Any, _: Any) -> None:
        streams.put_nowait(near.call(transport, "far", "messages", SCHEMA))

    far.serve("messages", SCHEMA, take)
    boards = [asyncio.create_task(board.run(begun)) for board in (near, far)]
    await begun.wait()
    ends = socket.socketpair()
    for end in ends:
        end.sendall(b"\0")  # what the daemon says first: the stream is open
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: StreamOpening(call), sock=ends[0])

    def take_call(transport: Any, _: Any) -> None:
        far.answer(transport, "near", "messages")

    answer = StreamOpening(take_call)
    await loop.create_unix_connection(lambda: answer, sock=ends[1])
    stream = await streams.get()
    began = time.process_time()
    for _ in range(count):
        await stream.send(message)
    for _ in range(count):
        await arrived.acquire()
    seconds = time.process_time() - began
    for task in boards:
        task.cancel()
    near.close()
    far.close()
    return seconds


def main() -> None:
    """Print medians and ranges, by event loop and size of a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    large = Large(values=torch.ones(LARGE_VALUES))
    for name, run in (("asyncio", asyncio.run), ("uvloop", uvloop.run)):
        for what, message, count, unit in (
            ("64 MiB", large, 6, "GB/s"),
            ("a few bytes", Small(number=7), 30_000, "thousand/s"),
        ):
            size = 4 * LARGE_VALUES / 1e9 if message is large else 1e-3
            rates = sorted(size * count / run(seconds_of(message, count)) for _ in range(repeats))
            print(f"{name:<8} {what:<12} {statistics.median(rates):7.2f} ({rates[0]:.2f} to {rates[-1]:.2f}) {unit}")


if __name__ == "__main__":
    main()
