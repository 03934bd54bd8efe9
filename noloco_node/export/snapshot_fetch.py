"""A stage that has died, taken home: from a snapshot of it that some peer of the swarm still has.

Where no replica of a stage gives its weights, an export asks everybody at work for a snapshot of it, as a newcomer does
who revives the stage (`noloco_node.node.joining.revival`), and believes the same ones: those who volunteer keep some
(`noloco_node.state_sync.snapshot_keeper`), and whoever served the stage before serves its last checkpoint
(`noloco_node.state_sync.snapshot_server`). The newest are fetched, their norms compared with what was offered; whoever
does not give one is not asked again, unless it was busy. Which of them is taken, their loss decides once all stages are
there (`noloco_node.export.held_out_loss`). One snapshot is one replica's weights, of a round in which the other stages
were long ago: so it is noted beside the model, and said, whence these weights are and how far behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random

from gossip.transfer.download import DonorBusy
from noloco_node.errors import Exit, UserError
from noloco_node.export.replica_fetch import FetchedReplica, Look, fetch_of
from noloco_node.export.replica_files import ReplicaFile
from noloco_node.network.interface import PeerNetwork
from noloco_node.state_sync.manifests import SNAPSHOT, WeightsOf, ask_manifests, standings
from noloco_node.state_sync.snapshot_choice import AGAIN_S, asked_of, asks_again, donors, reached, verify_snapshot
from noloco_node.swarm.roster import Roster
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.terminal import say

COMPARED = 3
"""Snapshots that are fetched of a stage."""


async def fetch_snapshots(
    network: PeerNetwork,
    recipe: RunFileText,
    look: Look,
    number: int,
    shapes: Mapping[str, tuple[int, ...]],
    own: int | None,
    keep: Callable[[FetchedReplica], ReplicaFile],
) -> list[ReplicaFile] | UserError:
    """Fetch the newest snapshots of a stage that are to be believed; the `peer` of each is who keeps it.

    Returns why none came where that is so: whoever has nothing else raises it. `keep`: lays one on the disk.
    `own`: the newest round that is here already, None where nothing is; only what is clearly newer is fetched then.
    """
    came: list[ReplicaFile] = []
    subject, refused, offered = WeightsOf(number, tuple(shapes.values()), SNAPSHOT), set[str](), set[str]()
    attempt = 0
    while True:
        roster = await look()
        rng = Random(f"{recipe.run.seed}|exporting|{network.peer_id}|{number}|{attempt}")
        asked = asked_of(roster, network.peer_id, rng)
        if attempt == 0:
            say(f"stage {number}: no replica gives its weights; asking {len(asked)} peers for a snapshot of it")
        replies = await ask_manifests(network, [peer for peer in asked if peer not in refused], subject)
        offers, run, busy = standings(replies.manifests), reached(roster), replies.busy
        offered |= replies.manifests.keys()
        for peer in donors(own, offers, run):
            if len(came) == COMPARED:
                break
            say(f"stage {number}: fetching the snapshot of round {replies.manifests[peer].round} that {peer} keeps")
            try:
                copy = await fetch_of(network, peer, subject, shapes, verify_snapshot(offers, run))
                came.append(await asyncio.to_thread(keep, copy))
            except DonorBusy as error:
                busy += 1
                say(f"not now: {error}")
            except ConnectionError as error:
                refused.add(peer)
                say(f"left out: {error}")
        if came:
            return came
        if not asks_again(busy > 0, own is not None, attempt):
            tries = f"of {len(asked)} peers that were asked for a snapshot {len(offered)} offered one, {busy} were busy"
            return _lost(recipe, roster, number, tries, any_came=bool(offered or busy))
        if busy and attempt == 0:
            say(f"stage {number}: {busy} peers are busy; asking all again for some minutes")
        await asyncio.sleep(AGAIN_S)
        attempt += 1


def _lost(recipe: RunFileText, roster: Roster, number: int, tries: str, *, any_came: bool) -> UserError:
    """Return the message that a stage is nowhere: nobody serves it, and nobody gives a snapshot of it."""
    replicas = len(roster.stage(number))
    serves = f"Nobody gave the weights of stage {number}" if replicas else f"Nobody serves stage {number}"
    keeps = "no snapshot of it could be fetched and believed" if any_came else "nobody keeps a snapshot of it"
    return UserError(
        f"{serves}, and {keeps}.",
        why=f"the roster of the run {recipe.digest[:12]} lists {replicas} replicas of it; {tries} to the end",
        hint="add homes of peers that served it, or kept snapshots of it, with --from-home DIR; or try again when "
        "`noloco-node status` shows a replica of the stage. Finished stages are kept",
        code=Exit.UNREACHABLE,
    )
