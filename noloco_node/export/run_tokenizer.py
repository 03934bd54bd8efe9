"""The tokenizer of a run whose files travel: from the homes of its nodes, or from its swarm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from noloco_node.data.encoding import with_tokenizer_in
from noloco_node.errors import Exit, UserError, config_error
from noloco_node.export.replica_fetch import Look
from noloco_node.network.interface import PeerNetwork
from noloco_node.run.config import TRAVELLING, DataConfig
from noloco_node.state_sync.weight_exchange import TOKENIZER_TOPIC, WeightDownload
from noloco_node.storage.home import tokenizer_places
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm import invite as invites
from noloco_node.swarm.run_distribution import RunFileText


def reading_with_tokenizer(homes: Sequence[Path], recipe: RunFileText) -> DataConfig:
    """Return how a run reads text, with the tokenizer that a home keeps; `UserError` (CONFIG) where none has it."""
    data = recipe.run.data
    if data.tokenizer != TRAVELLING:
        return data
    for place in (place for home in homes for place in tokenizer_places(home, recipe.digest)):
        store = WeightStore.filling(place, data.tokenizer_files)
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
    """Return how a run reads text, its tokenizer fetched into a directory; `UserError` where nobody has it.

    `look`: reads the roster; those of the invite are asked as well.
    """
    data = recipe.run.data
    if data.tokenizer != TRAVELLING:
        return data
    roster = [record.peer for records in (await look()).stages for record in records]
    peers = list(dict.fromkeys((*roster, *invites.parse(invite).peers)))
    store = WeightStore.filling(directory, data.tokenizer_files)
    if not await WeightDownload(network, store, asyncio.to_thread, topic=TOKENIZER_TOPIC).everything(peers):
        raise UserError(
            "Nobody who was reached has the run's tokenizer.",
            why=f"{len(peers)} peers were asked for the files that the run file lists",
            hint="try again when the nodes of the run are there",
            code=Exit.UNREACHABLE,
        )
    return with_tokenizer_in(data, directory)
