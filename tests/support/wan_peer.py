"""A peer in a namespace of its own, driven by lines on its standard input: it echoes whatever others send, and calls.

    {"bootstrap": [...], "listen": [...], "reach": "auto", "relays": 0, "identity": null}    first of all
    {"greet": PEER}   sends a number to a peer and takes it back; answers {"took_s": ..., "ways": [...]}
    {"again": PEER}   the same on a conversation that stays open from one to the next
    {"call": PEER}    the same with 16 MiB

The answer to the first line is {"peer": ..., "addresses": [...], "said": [...]}; errors are {"error": ...}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from handlers import echo

from noloco_node.errors import UserError
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import NetworkSettings, Reachability
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import MessageSpec, Schema, TensorSpec
from noloco_node.node.microbatches import ConversationPool

MIB = 2**18


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """As many as the topic says."""

    numbers: torch.Tensor


SIZES = {"greet": 1, "again": 1, "call": 16 * MIB}
"""Numbers of each request, which is also the topic."""
SCHEMAS = {
    topic: Schema({Numbers: MessageSpec("Numbers", {"numbers": TensorSpec((size,), "float32")})})
    for topic, size in SIZES.items()
}


async def call(talk: AbstractAsyncContextManager[Conversation], topic: str) -> float:
    """Send a topic's numbers to a peer and take them back; return the seconds that took."""
    numbers = torch.randn(SIZES[topic])
    begun = time.monotonic()
    async with talk as conversation:
        await conversation.send(Numbers(numbers=numbers))
        answer = await conversation.receive()
    assert torch.equal(answer.numbers, numbers)
    return time.monotonic() - begun


async def ways(network: Libp2pNetwork, peer: str) -> list[str]:
    session = await network._now()
    return [address.transport for address in await session.neighbours() if address.peer == peer]


def answer(words: dict[str, Any]) -> None:
    print(json.dumps(words), flush=True)


async def main() -> None:
    loop = asyncio.get_running_loop()

    async def ask() -> dict[str, Any]:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        return dict(json.loads(line)) if line else {}

    wanted = await ask()
    said: list[str] = []
    settings = NetworkSettings(
        run="wan",
        identity=Path(wanted["identity"]) if wanted.get("identity") else None,
        listen=tuple(wanted.get("listen", ["/ip4/0.0.0.0/tcp/0"])),
        bootstrap=tuple(wanted.get("bootstrap", [])),
        reach=Reachability(wanted.get("reach", "auto")),
    )
    async with AsyncExitStack() as stack:
        try:
            network = await stack.enter_async_context(Libp2pNetwork.open(settings, said.append))
        except UserError as trouble:
            answer({"error": str(trouble)})
            return
        keys = [Path(f"{wanted['identity']}-{number}") for number in range(1, wanted.get("relays", 0) + 1)]
        await stack.enter_async_context(network.relaying(keys))
        for topic, schema in SCHEMAS.items():
            await network.serve(topic, schema, echo)
        pool = await stack.enter_async_context(aclosing(ConversationPool(network, "again", SCHEMAS["again"])))
        answer({"peer": network.peer_id, "addresses": await network.addresses(), "said": said})
        while request := await ask():
            ((topic, other),) = request.items()
            try:
                talk = pool.talk(other) if topic == "again" else network.talk(other, topic, SCHEMAS[topic])
                took_s = await call(talk, topic)
                answer({"took_s": took_s, "ways": await ways(network, other)})
            except ConnectionError as error:
                answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    asyncio.run(main())
