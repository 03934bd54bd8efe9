"""What tests of a stage that died share."""

import asyncio

from memory_swarms import Peer

from noloco_node.export import replica_fetch
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm.roster import Roster


async def killed(hub: SimNetwork, peers: list[Peer]) -> None:
    for peer in peers:
        hub.kill(peer.name)
        peer.task.cancel()
    await asyncio.wait([peer.task for peer in peers])


def forgotten(watcher: Peer, stage: int) -> bool:
    return not watcher.node.roster.stage(stage)


def seen(roster: Roster) -> replica_fetch.Look:
    async def look() -> Roster:
        return roster

    return look
