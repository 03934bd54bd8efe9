"""`noloco-node join`: this machine's home, network, device and text, and a node that lives on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from noloco_node import invite as invites
from noloco_node.blueprint import blueprint, make_stage
from noloco_node.checkpoint import Checkpoint, load_latest, save
from noloco_node.config import NodeConfig, RunConfig
from noloco_node.console import say
from noloco_node.data import check_vocabulary, open_blocks
from noloco_node.departure import departure
from noloco_node.device import Device, choose_device
from noloco_node.home import Home
from noloco_node.journal import Journal
from noloco_node.libp2p.network import Settings
from noloco_node.machine import Machine, Voice
from noloco_node.mixing import mixed
from noloco_node.node import Node, Wishes
from noloco_node.recipe import fetch
from noloco_node.runfile import with_source
from noloco_node.swarm import connected, prefix


async def join(invite: str, config: NodeConfig) -> None:
    """Join the swarm of an invite and stay until the run ends or we are asked to leave."""
    parsed = invites.parse(invite)
    torch_device = choose_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with Home.open(Path(config.home)) as home, Journal(home.journal) as journal:
        settings = Settings(
            prefix=prefix(parsed.digest),
            identity=home.identity,
            announce=config.announce,
            bootstrap=tuple(map(str, parsed.addresses)),
        )
        if config.listen:
            settings = msgspec.structs.replace(settings, listen=config.listen)
        async with departure(say) as leaving, connected(settings) as network:
            say(f"we are {network.peer_id}")
            recipe = await fetch(network, [address.peer for address in parsed.addresses], parsed.digest)
            home.keep_run_file(recipe.text)
            plan = await asyncio.to_thread(blueprint, recipe.run)
            # Closed before the device: a thread that waits for text ends with it, and so does not keep us.
            with closing(Device(torch_device, config.slowdown)) as device, ExitStack() as texts:

                async def open_text() -> _Text:
                    text = await asyncio.to_thread(_Text, recipe.run, config, network.peer_id, plan.vocabulary)
                    return texts.enter_context(closing(text))

                machine = Machine(
                    device=device,
                    build=lambda number: make_stage(recipe.run, plan, number, torch_device),
                    open_text=open_text,
                    load=lambda: asyncio.to_thread(load_latest, home.checkpoint, recipe.digest),
                    save=lambda checkpoint: asyncio.to_thread(_saved, home.checkpoint, checkpoint),
                    unix_time=time.time,
                )
                wishes = Wishes(stage=config.stage, linger_s=config.linger_s, refresh_s=config.refresh_s)
                node = Node(recipe, plan, network, machine, wishes, Voice(record=journal.write, say=say))
                leaving.polite = True
                await node.live(leaving.asked)


def _saved(directory: Path, checkpoint: Checkpoint) -> str:
    return str(save(directory, checkpoint))


class _Text:
    """The training text of this peer, read in a thread. To open it may take a while as well."""

    def __init__(self, run: RunConfig, config: NodeConfig, peer: str, vocabulary: int) -> None:
        data = run.data if config.data is None else with_source(run.data, config.data)
        check_vocabulary(data, vocabulary)
        length = run.pipeline.sequence_length
        blocks = open_blocks(data, length, run.seed, peer)
        self._blocks = mixed(blocks, length, run.seed, peer) if data.shuffle else blocks
        self._batch = run.pipeline.microbatch_size
        self._turn = asyncio.Lock()

    async def draw(self) -> Tensor:
        async with self._turn:
            return await asyncio.to_thread(self._blocks.next_batch, self._batch)

    def position(self) -> dict[str, Any]:
        return self._blocks.position()

    async def restore(self, position: Mapping[str, Any]) -> bool:
        async with self._turn:
            return await asyncio.to_thread(self._blocks.restore, dict(position))

    def close(self) -> None:
        self._blocks.close()
