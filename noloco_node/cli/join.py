"""`noloco-node join`: this machine's home, network, device and text, and a node that lives on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from noloco_node.bar import Bar
from noloco_node.data.background_open import Opening
from noloco_node.data.blocks import check_source, check_vocabulary, open_blocks
from noloco_node.data.shuffled_blocks import mixed
from noloco_node.journal.events import Journal
from noloco_node.libp2p.endpoint.known_peers import Acquaintances
from noloco_node.libp2p.endpoint.settings import Capacity, Reach, Settings
from noloco_node.limits.traffic_ledger import Ledger
from noloco_node.machine.clocks import asleep_s
from noloco_node.machine.device import Device, choose_device
from noloco_node.machine.interface import Machine, Voice
from noloco_node.machine.memory import free_bytes, in_flight_bytes, machine_free_bytes, needs_bytes, share_arenas, trim
from noloco_node.machine.signals import departure
from noloco_node.network.interface import Network
from noloco_node.node.node import Node, Wishes
from noloco_node.node.replica_context import SLOWEST_BYTES_PER_S
from noloco_node.node.shift_loop import shift_by_shift
from noloco_node.node.shifts import Shifts
from noloco_node.planning.bandwidth import freight, line_s, slowest_bytes_per_s
from noloco_node.planning.model_layout import Blueprint, blueprint, make_stage
from noloco_node.run.config import NodeConfig, RunConfig
from noloco_node.run.runfile import with_source
from noloco_node.state_sync.snapshot_keeper import DirectoryStore
from noloco_node.storage.checkpoint import Checkpoint, save
from noloco_node.storage.checkpoint_store import OwnCheckpoints
from noloco_node.storage.home import Home
from noloco_node.storage.partial_download import Partial
from noloco_node.swarm import invite as invites
from noloco_node.swarm.connection import connected, prefix
from noloco_node.swarm.run_distribution import Recipe, fetch
from noloco_node.terminal import say

A = TypeVar("A")
R = TypeVar("R")


async def join(invite: str, config: NodeConfig) -> None:
    """Join the swarm of an invite and stay until the run ends or we are asked to leave."""
    parsed = invites.parse(invite)
    if config.data is not None:
        await asyncio.to_thread(check_source, config.data)
    share_arenas()
    torch_device = choose_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with Home.open(Path(config.home)) as home, Journal(home.journal) as journal, closing(Bar()) as bar:
        settings = Settings(
            prefix=prefix(parsed.digest),
            identity=home.identity,
            announce=config.announce,
            reach=Reach.RELAYED if config.relayed else Reach.AUTO,
            bootstrap=tuple(map(str, parsed.addresses)),
            lends_line=not config.allowance.is_limited,
            capacity=Capacity.within(machine_free_bytes()),
        )
        if config.listen:
            settings = msgspec.structs.replace(settings, listen=config.listen)

        met = Acquaintances()
        brought: tuple[Recipe, Blueprint] | None = None

        async def bring(network: Network) -> tuple[Recipe, Blueprint]:
            recipe = await fetch(network, [address.peer for address in parsed.addresses], parsed.digest)
            home.keep_run_file(recipe.text)
            return recipe, await asyncio.to_thread(blueprint, recipe.run)

        async def take_part(network: Network, leave: asyncio.Event) -> None:
            nonlocal brought
            say(f"we are {network.peer_id}")
            # In the first shift alone: in a later one nobody of the invite may be there to ask.
            recipe, plan = brought = brought or await bring(network)
            own = OwnCheckpoints(home.checkpoint, home.snapshots, recipe.digest, network.peer_id, say)
            # Closed before the device: a thread that waits for text ends with it, and so does not keep us.
            text = Opening(lambda: _Text(recipe.run, config, network.peer_id, plan.vocabulary), _Text.read_ahead)
            with closing(Device(torch_device, config.slowdown)) as device, closing(text):
                machine = Machine(
                    device=device,
                    build=lambda number: make_stage(recipe.run, plan, number, torch_device),
                    open_text=text.opened,
                    copies=lambda number: text.begin() if number == 0 else None,
                    load=own.load,
                    served=own.served,
                    former=own,
                    snapshots=DirectoryStore(home.snapshots, recipe.digest) if config.keep_snapshots else None,
                    save=lambda checkpoint: asyncio.to_thread(_saved, home.checkpoint, checkpoint, config.keep),
                    unix_time=time.time,
                    asleep_s=asleep_s,
                    keep=lambda number, size: Partial(home.path / "catch-up", recipe.digest, number, size, say),
                    line_s=lambda number: line_s(freight(recipe.run, plan, number), config.allowance),
                    needs_bytes=list(needs_bytes(recipe.run, plan, torch_device)),
                    in_flight_bytes=list(in_flight_bytes(recipe.run, plan)),
                    free_bytes=lambda: free_bytes(torch_device),
                )
                wishes = Wishes(
                    stage=config.stage,
                    moves=config.stage is None and not config.stay,
                    linger_s=config.linger_s,
                    refresh_s=config.refresh_s,
                    keep_snapshots=config.keep_snapshots,
                    slowest_bytes_per_s=slowest_bytes_per_s(config.allowance, SLOWEST_BYTES_PER_S),
                )
                node = Node(recipe, plan, network, machine, wishes, Voice(record=journal.write, say=say, draw=bar.draw))
                leaving.polite = True
                await node.live(leave)

        shifts = Shifts(config.allowance, Ledger(home.path / "traffic.json", datetime.now, say), datetime.now, say)
        async with departure(say) as leaving:
            await shift_by_shift(shifts, leaving, lambda: connected(settings, met), take_part, say)


def _saved(directory: Path, checkpoint: Checkpoint, keep: int) -> str:
    path = str(save(directory, checkpoint, keep))
    trim()  # about as often as anything large is made and dropped
    return path


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
        # A thread of its own: the C library keeps for each thread what it once needed, and a chunk needs ten megabytes.
        # And a read whose reader has gone is over before the next one begins.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._ahead: tuple[Tensor, dict[str, Any]] | None = None

    def read_ahead(self) -> None:
        """Have the first batch at hand: a whole chunk is read for it."""
        before = self._blocks.position()
        self._ahead = self._blocks.next_batch(self._batch), before

    async def draw(self) -> Tensor:
        async with self._turn:
            if self._ahead is not None:
                (first, _), self._ahead = self._ahead, None
                return first
            return await self._in_thread(self._blocks.next_batch, self._batch)

    def position(self) -> dict[str, Any]:
        return self._blocks.position() if self._ahead is None else self._ahead[1]

    async def restore(self, position: Mapping[str, Any]) -> bool:
        async with self._turn:
            restored = await self._in_thread(self._blocks.restore, dict(position))
            if restored:
                self._ahead = None
            return restored

    def close(self) -> None:
        self._blocks.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _in_thread(self, work: Callable[[A], R], argument: A) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work, argument)
