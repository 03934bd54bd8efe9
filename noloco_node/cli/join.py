"""`noloco-node join`: this machine's home, network and device, and a node that lives on them shift by shift."""

from __future__ import annotations

import asyncio
from contextlib import closing
from datetime import datetime
from pathlib import Path

import msgspec
import torch

from noloco_node.cli.host_machine import HostMachine
from noloco_node.cli.node_config import NodeConfig
from noloco_node.data.blocks import check_source
from noloco_node.journal.writer import Journal
from noloco_node.libp2p.endpoint.known_peers import KnownPeers
from noloco_node.libp2p.endpoint.settings import Capacity, NetworkSettings, Reachability
from noloco_node.limits.traffic_ledger import TrafficLedger
from noloco_node.machine.device import choose_device
from noloco_node.machine.interface import Reporter
from noloco_node.machine.memory import machine_free_bytes, share_arenas
from noloco_node.machine.signals import Departure, departure
from noloco_node.network.interface import PeerNetwork
from noloco_node.node.node import Node
from noloco_node.node.node_context import NodeOptions
from noloco_node.node.shift_loop import shift_by_shift
from noloco_node.node.shifts import Shifts
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S, slowest_bytes_per_s
from noloco_node.planning.model_layout import ModelLayout, check_download, model_layout
from noloco_node.run.permissions import check_text, summary
from noloco_node.storage.home import Home
from noloco_node.swarm import invite as invites
from noloco_node.swarm.connection import connected
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
        settings, known_peers = _network_settings(parsed, config, home), KnownPeers()
        ledger = TrafficLedger(home.path / "traffic.json", datetime.now, say)
        shifts = Shifts(config.allowance, ledger, datetime.now, say)
        reporter = Reporter(record=journal.write, say=say, draw=bar.draw)
        async with departure(say) as leaving:
            participant = _Participant(parsed, config, home, torch_device, reporter, leaving)
            await shift_by_shift(shifts, leaving, lambda: connected(settings, known_peers), participant.take_part, say)


class _Participant:
    """This peer in all of its shifts: a node for each."""

    def __init__(
        self,
        invite: invites.Invite,
        config: NodeConfig,
        home: Home,
        torch_device: torch.device,
        reporter: Reporter,
        leaving: Departure,
    ) -> None:
        self._invite, self._config, self._home, self._torch_device = invite, config, home, torch_device
        self._reporter, self._leaving = reporter, leaving
        self._run: tuple[RunFileText, ModelLayout] | None = None

    async def take_part(self, network: PeerNetwork, leave: asyncio.Event) -> None:
        """Live as a node until the shift is over, or the run."""
        say(f"we are {network.peer_id}")
        # In the first shift alone: in a later one nobody of the invite may be there to ask.
        self._run = self._run or await self._fetch_run(network)
        recipe, layout = self._run
        host = HostMachine(self._config, self._home, self._torch_device, recipe, layout, network.peer_id)
        with closing(host):
            node = Node(recipe, layout, network, host, _node_options(self._config), self._reporter)
            self._leaving.polite = True
            await node.live(leave)

    async def _fetch_run(self, network: PeerNetwork) -> tuple[RunFileText, ModelLayout]:
        peers, config = [address.peer for address in self._invite.addresses], self._config
        recipe = await fetch(network, peers, self._invite.digest, config.local)
        for line in summary(recipe.run):
            say(line)
        if config.stage in (None, 0):
            check_text(recipe.run, config.data)
        await asyncio.to_thread(check_download, recipe.run.model, config.most_disk_bytes)
        self._home.keep_run_file(recipe.text)
        return recipe, await asyncio.to_thread(model_layout, recipe.run)


def _network_settings(invite: invites.Invite, config: NodeConfig, home: Home) -> NetworkSettings:
    settings = NetworkSettings(
        run=invite.digest,
        identity=home.identity,
        announce=config.announce,
        reach=Reachability.RELAYED if config.relayed else Reachability.AUTO,
        bootstrap=tuple(map(str, invite.addresses)),
        lends_line=not config.allowance.is_limited,
        capacity=Capacity.within(machine_free_bytes()),
    )
    return msgspec.structs.replace(settings, listen=config.listen) if config.listen else settings


def _node_options(config: NodeConfig) -> NodeOptions:
    return NodeOptions(
        stage=config.stage,
        moves=config.stage is None and not config.stay,
        linger_s=config.linger_s,
        refresh_s=config.refresh_s,
        keep_snapshots=config.keep_snapshots,
        slowest_bytes_per_s=slowest_bytes_per_s(config.allowance, SLOWEST_BYTES_PER_S),
    )
