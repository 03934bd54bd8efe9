"""`noloco-node join`: this machine's home, network, device and text, and a node that lives on them."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
import torch

from noloco_node.cli.node_config import NodeConfig
from noloco_node.data.background_open import BackgroundOpen
from noloco_node.data.blocks import check_source
from noloco_node.data.text_source import TextSource
from noloco_node.journal.writer import Journal
from noloco_node.libp2p.endpoint.known_peers import KnownPeers
from noloco_node.libp2p.endpoint.settings import Capacity, NetworkSettings, Reachability
from noloco_node.limits.traffic_ledger import TrafficLedger
from noloco_node.machine.clocks import asleep_s
from noloco_node.machine.device import Device, choose_device
from noloco_node.machine.interface import Host, Reporter
from noloco_node.machine.memory import free_bytes, machine_free_bytes, share_arenas, trim
from noloco_node.machine.signals import departure
from noloco_node.network.interface import PeerNetwork
from noloco_node.node.node import Node
from noloco_node.node.node_context import NodeOptions
from noloco_node.node.shift_loop import shift_by_shift
from noloco_node.node.shifts import Shifts
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S, bandwidth_seconds, microbatch_bytes, slowest_bytes_per_s
from noloco_node.planning.memory_needs import in_flight_bytes, needs_bytes
from noloco_node.planning.model_layout import ModelLayout, make_stage, model_layout
from noloco_node.storage.checkpoint import Checkpoint, save
from noloco_node.storage.checkpoint_store import CheckpointStore
from noloco_node.storage.home import Home
from noloco_node.storage.partial_download import PartialDownloadFile
from noloco_node.storage.snapshot_store import SnapshotDirectory
from noloco_node.swarm import invite as invites
from noloco_node.swarm.connection import connected, prefix
from noloco_node.swarm.run_distribution import RunFileText, fetch
from noloco_node.terminal import Bar, say


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
        settings = NetworkSettings(
            prefix=prefix(parsed.digest),
            identity=home.identity,
            announce=config.announce,
            reach=Reachability.RELAYED if config.relayed else Reachability.AUTO,
            bootstrap=tuple(map(str, parsed.addresses)),
            lends_line=not config.allowance.is_limited,
            capacity=Capacity.within(machine_free_bytes()),
        )
        if config.listen:
            settings = msgspec.structs.replace(settings, listen=config.listen)

        met = KnownPeers()
        brought: tuple[RunFileText, ModelLayout] | None = None

        async def bring(network: PeerNetwork) -> tuple[RunFileText, ModelLayout]:
            recipe = await fetch(network, [address.peer for address in parsed.addresses], parsed.digest)
            home.keep_run_file(recipe.text)
            return recipe, await asyncio.to_thread(model_layout, recipe.run)

        async def take_part(network: PeerNetwork, leave: asyncio.Event) -> None:
            nonlocal brought
            say(f"we are {network.peer_id}")
            # In the first shift alone: in a later one nobody of the invite may be there to ask.
            recipe, plan = brought = brought or await bring(network)
            own = CheckpointStore(home.checkpoint, home.snapshots, recipe.digest, network.peer_id, say)
            # Closed before the device: a thread that waits for text ends with it, and so does not keep us.
            source = partial(TextSource, recipe.run, config, network.peer_id, plan.vocabulary)
            text = BackgroundOpen(source, TextSource.read_ahead)
            with closing(Device(torch_device, config.slowdown)) as device, closing(text):
                host = Host(
                    device=device,
                    build=lambda number: make_stage(recipe.run, plan, number, torch_device),
                    open_text=text.opened,
                    copies=lambda number: text.begin() if number == 0 else None,
                    load=own.load,
                    served=own.served,
                    former=own,
                    snapshots=SnapshotDirectory(home.snapshots, recipe.digest) if config.keep_snapshots else None,
                    save=lambda checkpoint: asyncio.to_thread(_saved, home.checkpoint, checkpoint, config.keep),
                    unix_time=time.time,
                    asleep_s=asleep_s,
                    keep=lambda number, size: PartialDownloadFile(
                        home.path / "catch-up", recipe.digest, number, size, say
                    ),
                    line_s=lambda number: bandwidth_seconds(
                        microbatch_bytes(recipe.run, plan, number), config.allowance
                    ),
                    needs_bytes=list(needs_bytes(recipe.run, plan, torch_device)),
                    in_flight_bytes=list(in_flight_bytes(recipe.run, plan)),
                    free_bytes=lambda: free_bytes(torch_device),
                )
                wishes = NodeOptions(
                    stage=config.stage,
                    moves=config.stage is None and not config.stay,
                    linger_s=config.linger_s,
                    refresh_s=config.refresh_s,
                    keep_snapshots=config.keep_snapshots,
                    slowest_bytes_per_s=slowest_bytes_per_s(config.allowance, SLOWEST_BYTES_PER_S),
                )
                node = Node(recipe, plan, network, host, wishes, Reporter(record=journal.write, say=say, draw=bar.draw))
                leaving.polite = True
                await node.live(leave)

        shifts = Shifts(
            config.allowance, TrafficLedger(home.path / "traffic.json", datetime.now, say), datetime.now, say
        )
        async with departure(say) as leaving:
            await shift_by_shift(shifts, leaving, lambda: connected(settings, met), take_part, say)


def _saved(directory: Path, checkpoint: Checkpoint, keep: int) -> str:
    path = str(save(directory, checkpoint, keep))
    trim()  # about as often as anything large is made and dropped
    return path
