"""How many relays grant less than they were told to, on one processor and on all.

    python -m benchmarks.robustness.relay_grants --relays 30 --processors 1
    python -m benchmarks.robustness.relay_grants --relays 30 --processors 0

Each relay is started once, as a bootstrap peer starts its own, asked by a neighbour what it grants, and stopped. How
many fall short is a matter of timing: p2pd sets its relay service up twice, and the last one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path

from noloco_node.libp2p.addresses import PeerAddress
from noloco_node.libp2p.control import Control
from noloco_node.libp2p.daemon import DaemonConfig, arguments, relay_arguments
from noloco_node.libp2p.hivemind_compat import load_hivemind
from noloco_node.libp2p.relays import RELAY_PROCESSORS, Grant, granted
from noloco_node.libp2p.settings import Reachability, ensure_identity

WAIT_S = 30.0


async def main(count: int, processors: int) -> None:
    """Start relays one after the other and print what they grant."""
    parts, found, seconds = load_hivemind(), Counter[Grant](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)

        def posture(which: str) -> DaemonConfig:
            ensure_identity(here / which)
            return DaemonConfig(identity=here / which, listen=("/ip4/127.0.0.1/tcp/0",))

        asking = Control.start(parts, arguments(posture("asks"), Reachability.OPEN), here, WAIT_S)
        async with asking as (ours, _):
            for number in range(count):
                words = relay_arguments(posture(f"relay-{number}"))
                starting = Control.start(parts, words, here, WAIT_S, processors)
                async with starting as (relay, client):
                    peer, begun_s = str(client.peer_id.to_base58()), time.monotonic()
                    await ours.connect(PeerAddress((await relay.places(WAIT_S))[0], peer), WAIT_S)
                    found[await granted(ours, peer, WAIT_S)] += 1
                    seconds.append(time.monotonic() - begun_s)
    for grant, times in found.most_common():
        print(f"{times} of {count}: {grant.data_bytes / 2**10:,.0f} KiB each way, {grant.duration_s:,} s a circuit")
    print(f"to connect and ask: {min(seconds):.3f} to {max(seconds):.3f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Say how many of p2pd's relays grant less than they were told to.")
    parser.add_argument("--relays", type=int, default=30)
    parser.add_argument("--processors", type=int, default=RELAY_PROCESSORS, help="that a relay may use; 0: all")
    chosen = parser.parse_args()
    asyncio.run(main(chosen.relays, chosen.processors))
