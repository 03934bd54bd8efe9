"""An export fetches from a swarm: slow weights of replicas, snapshots of a dead stage, and the tokenizer.

If no replica of a stage gives its weights, the export asks all peers at work for a snapshot, and believes the same ones
as a newcomer that revives a stage (`node.join`). docs/design/export.md says why.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import Random, SystemRandom

from gossip.rule.outer_step import ROUND_BOUND
from gossip.transfer.download import DonorBusy, Objection, no_objection
from noloco_node.data.encoding import with_tokenizer_in
from noloco_node.errors import Exit, UserError, config_error
from noloco_node.export.replica_files import ReplicaFile, Shapes
from noloco_node.network.interface import PeerNetwork
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S
from noloco_node.run.config import DataConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import STATE
from noloco_node.state_sync.download import SNAPSHOT, WeightsOf, ask_manifests, copying_s
from noloco_node.state_sync.snapshot_keeper import snapshot_of
from noloco_node.state_sync.starting_state import AGAIN_S, asked_of, asks_again, donors, reached, verify_snapshot
from noloco_node.state_sync.weight_exchange import TOKENIZER_TOPIC, WeightDownload
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.home import RUN_ID_SHOWN, HomePaths
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm import invite as invites
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.terminal import say

BUSY_S = 900.0  # an export waits so long for a stage whose replicas all serve others: two newcomers may take as long
BUSY_BESIDE_S = 120.0  # for a busy replica of a stage that others have given
MOST_GIVEN = 64  # replicas of a stage: more add little to the mean, take room on the disk, and may be strangers
MOST_ASKED = 1024  # strangers may come and go for ever

Look = Callable[[], Awaitable[Roster]]  # reads the roster again
COMPARED = 3  # snapshots that are fetched of a stage


async def fetched(
    network: PeerNetwork, run_id: str, look: Look, number: int, shapes: Shapes, here: Collection[str] = ()
) -> AsyncIterator[Checkpoint]:
    """Yield one replica of a stage after the other, in an order that nobody can foresee, `MOST_GIVEN` at most.

    `here`: peers whose weights are here already; they count among those that have given.
    """
    rng = SystemRandom()
    loop, subject = asyncio.get_running_loop(), WeightsOf(number, tuple(shapes.values()), STATE)
    begun_s, given = loop.time(), len(here)
    again_s: dict[str, float] = {}
    """Of each replica that was asked: when to ask it again, infinity for never."""
    lost_s, most_s = 0.0, copying_s(subject.weight_bytes, SLOWEST_BYTES_PER_S)  # on those that give nothing
    while given < MOST_GIVEN and len(again_s) < MOST_ASKED:
        listed = [record.peer for record in at_work(await look(), number) if record.peer not in here]
        peer = next_to_ask(listed, again_s, rng)
        if peer is None:
            return
        if peer in again_s:
            await asyncio.sleep(again_s[peer] - loop.time())
        else:
            say(f"stage {number}: fetching from {peer}; {given} of {len(here) + len(listed)} replicas are here")
        before_s, again_s[peer], asked_s = again_s.get(peer), math.inf, loop.time()
        try:
            # Half of what is left: however many are slow, a quick one may still come.
            async with asyncio.timeout((most_s - lost_s) / 2 if given else None):
                copy = await fetch_of(network, peer, subject, run_id)
        except DonorBusy as busy:
            left_s = begun_s + (BUSY_BESIDE_S if given else BUSY_S) - loop.time()
            if left_s > 0.0:
                again_s[peer] = loop.time() + busy.retry_after_s
                if before_s is None:
                    say(f"{peer} serves others just now; asking it again for {left_s / 60:.0f} minutes at most")
            else:
                say(f"left out: {busy}")
        except (ConnectionError, TimeoutError) as error:
            lost_s += loop.time() - asked_s if given else 0.0
            say(f"left out: {str(error) or f'{peer} is too slow beside {given} replicas that have come'}")
        else:
            given += 1
            yield copy
            begun_s = loop.time()


def next_to_ask(listed: Collection[str], again_s: Mapping[str, float], rng: Random) -> str | None:
    """Return any replica that was not asked yet, else the busy one that is free first; None if none is left.

    The first ones are drawn: by an order of their ids, somebody with many ids would be asked before all others.
    """
    if fresh := sorted(peer for peer in listed if peer not in again_s):
        return rng.choice(fresh)
    left = [peer for peer in listed if again_s[peer] < math.inf]
    return min(left, key=again_s.__getitem__, default=None)


def at_work(roster: Roster, number: int) -> list[PeerRecord]:
    """Return the replicas of a stage that may give weights: newcomers have none."""
    return [record for record in roster.stage(number) if record.state in (PeerState.TRAINING, PeerState.FINISHED)]


async def fetch_of(
    network: PeerNetwork, peer: str, subject: WeightsOf, run_id: str, objection: Objection = no_objection
) -> Checkpoint:
    """Fetch a peer's slow weights; raise DonorBusy if not now, else a `ConnectionError`."""
    # As long as a newcomer has for five times as much: a line at home may be slow.
    deadline_s = copying_s(subject.weight_bytes, SLOWEST_BYTES_PER_S)
    state = await subject.fetch(network, [peer], deadline_s, asyncio.to_thread, objection)
    return snapshot_of(state, peer, subject.number, run_id)


async def fetch_snapshots(
    network: PeerNetwork,
    recipe: RunFileText,
    look: Look,
    number: int,
    shapes: Shapes,
    own: int | None,
    kept: Sequence[ReplicaFile],
    keep: Callable[[Checkpoint], ReplicaFile],
) -> list[ReplicaFile] | UserError:
    """Fetch the newest stage snapshots that are believed; the `peer` of each is its keeper.

    Returns an error if there is none, for a caller without other weights. `own`: the newest round of weights that are
    here, or None; only clearly newer snapshots count. `kept`: snapshots that an interrupted export has left; they are
    not fetched again, and stand beside what comes. `keep`: writes a snapshot to the disk.
    """
    came: list[ReplicaFile] = []
    here = {each.peer: each for each in kept if own is None or each.counters.round > own + ROUND_BOUND}
    subject, refused, offered = WeightsOf(number, tuple(shapes.values()), SNAPSHOT), set[str](), set[str]()
    attempt = 0
    while True:
        roster = await look()
        rng = Random(f"{recipe.run.seed}|exporting|{network.peer_id}|{number}|{attempt}")
        asked = asked_of(roster, network.peer_id, rng)
        if attempt == 0:
            say(f"stage {number}: no replica gives its weights; asking {len(asked)} peers for a snapshot of it")
        replies = await ask_manifests(network, [peer for peer in asked if peer not in refused], subject)
        offers, run, busy = replies.offers, reached(roster), replies.busy
        offered |= replies.manifests.keys()
        for peer in donors(own, offers, run):
            if len(came) == COMPARED:
                break
            if peer in here and here[peer].counters.round == replies.manifests[peer].round:
                came.append(here.pop(peer))
                continue
            say(f"stage {number}: fetching the snapshot of round {replies.manifests[peer].round} that {peer} keeps")
            try:
                copy = await fetch_of(network, peer, subject, recipe.digest, verify_snapshot(offers, run))
                came.append(await asyncio.to_thread(keep, copy))
                here.pop(peer, None)
            except DonorBusy as error:
                busy += 1
                say(f"not now: {error}")
            except ConnectionError as error:
                refused.add(peer)
                say(f"left out: {error}")
        if came or not asks_again(busy > 0, own is not None or bool(here), attempt):
            if came or here:
                return [*came, *here.values()]
            tries = f"of {len(asked)} peers that were asked for a snapshot {len(offered)} offered one, {busy} were busy"
            return _lost(recipe, roster, number, tries, any_came=bool(offered or busy))
        if busy and attempt == 0:
            say(f"stage {number}: {busy} peers are busy; asking all again for some minutes")
        await asyncio.sleep(AGAIN_S)
        attempt += 1


def _lost(recipe: RunFileText, roster: Roster, number: int, tries: str, *, any_came: bool) -> UserError:
    """Return the error of a stage that no peer serves or keeps."""
    replicas = len(roster.stage(number))
    serves = f"Nobody gave the weights of stage {number}" if replicas else f"Nobody serves stage {number}"
    keeps = "no snapshot of it could be fetched and believed" if any_came else "nobody keeps a snapshot of it"
    return UserError(
        f"{serves}, and {keeps}.",
        why=f"the roster of the run {recipe.digest[:12]} lists {replicas} replicas of it; {tries} to the end",
        hint="add homes of peers that served it, or kept snapshots of it, with --from-home DIR; or try again when "
        "`noloco-node status` shows a replica of the stage. What has come is kept",
        code=Exit.UNREACHABLE,
    )


def reading_with_tokenizer(homes: Sequence[Path], recipe: RunFileText) -> DataConfig:
    """Return the run's data with the tokenizer that a home keeps; raise `UserError` (CONFIG) if none has it."""
    data = recipe.run.data
    if not data.has_travelling_tokenizer:
        return data
    for place in (place for home in homes for place in HomePaths(home).places_of(recipe.digest)):
        store = WeightStore.filling(place.tokenizer, data.tokenizer_files)
        if not store.missing(store.all_pieces()):
            return with_tokenizer_in(data, store.directory)
    raise config_error(
        "None of these homes holds the run's tokenizer.",
        why="a node fetches it when it has claimed a stage, and these were not so far, or files are damaged",
        hint="one more home of the run with --from-home, or an invite",
    )


async def fetched_tokenizer(
    network: PeerNetwork, recipe: RunFileText, look: Look, invite: str, directory: Path
) -> DataConfig:
    """Return the run's data with its tokenizer, fetched into one of a directory; raise `UserError` if no peer has it.

    `look`: reads the roster; the peers of the invite are asked as well.
    """
    data = recipe.run.data
    if not data.has_travelling_tokenizer:
        return data
    roster = [record.peer for records in (await look()).stages for record in records]
    peers = list(dict.fromkeys((*roster, *invites.parse(invite).peers)))
    own = directory / recipe.digest[:RUN_ID_SHOWN]  # beside what the export of another run may have left
    store = WeightStore.filling(own, data.tokenizer_files)
    if not await WeightDownload(network, store, asyncio.to_thread, topic=TOKENIZER_TOPIC).everything(peers):
        raise UserError(
            "Nobody who was reached has the run's tokenizer.",
            why=f"{len(peers)} peers were asked for the files that the run file lists",
            hint="try again when the nodes of the run are there",
            code=Exit.UNREACHABLE,
        )
    return with_tokenizer_in(data, own)
