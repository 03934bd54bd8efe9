"""What `noloco-node join` does once its options are checked: it lives on this machine as a node, session by session.

`HostMachine` is this machine as a node sees it: device, text, disk, clocks and line.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, closing
from datetime import datetime
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import structs

from gossip.exchange.messages import ReplicaState
from noloco_node.admission.ticket import MEMBER
from noloco_node.cli.options import JoinOptions, default_home, page_place
from noloco_node.data.blocks import BackgroundOpen, TextSource
from noloco_node.data.encoding import with_tokenizer_in
from noloco_node.doctor.machine_checks import require_disk
from noloco_node.journal import events
from noloco_node.journal.reader import read
from noloco_node.journal.writer import Journal
from noloco_node.libp2p.addresses import KnownPeers
from noloco_node.libp2p.settings import EVERYWHERE, Capacity, NetworkSettings, Reachability
from noloco_node.limits.budget import TrafficLedger
from noloco_node.machine import memory
from noloco_node.machine.device import Device, EnergyMeter, choose_device, energy_meter
from noloco_node.machine.interface import Reporter
from noloco_node.machine.signals import Departure, departure
from noloco_node.network.interface import PeerNetwork
from noloco_node.node.node import Node
from noloco_node.node.node_context import NodeOptions
from noloco_node.node.sessions import Sessions, live_in_sessions
from noloco_node.observe.peer_history import PeerHistory, ledger_of
from noloco_node.observe.swarm_view import short
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S, bandwidth_seconds, microbatch_bytes, slowest_bytes_per_s
from noloco_node.planning.checkpoint_map import RunWeights
from noloco_node.planning.model_layout import ModelLayout, check_download, make_stage, model_layout
from noloco_node.planning.plan import device_needs, graphs_that_fit
from noloco_node.run.config import RunConfig
from noloco_node.run.protocols import GOSSIP
from noloco_node.run.runfile import check_text
from noloco_node.storage.checkpoint import Checkpoint, save
from noloco_node.storage.checkpoint_store import CheckpointStore, SnapshotDirectory
from noloco_node.storage.home import Home, RunPaths
from noloco_node.storage.transfer_files import PartialDownloadFile, StateFile
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import RunAccess, connected
from noloco_node.swarm.invite import KeptInvite, met_before, not_ours
from noloco_node.swarm.roster import checked_name
from noloco_node.swarm.run_distribution import HISTORY_SCHEMA, HISTORY_TOPIC, RunFileText, RunHistory, fetch, reached
from noloco_node.tasks import background, supervised
from noloco_node.terminal import Bar, say, sign, warn
from noloco_node.units import format_bytes
from noloco_node.web.places import metrics_place
from noloco_node.web.served_views import ServedViews, views_served
from pipeline.stage import Stage


async def take_part(invite: invites.Invite, options: JoinOptions) -> None:
    """Join the swarm of an invite, and stay until the run ends or we are asked to leave."""
    memory.share_arenas()
    torch_device = choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    directory = options.home or default_home("node")
    with Home.open(directory) as home, Journal(home.journal) as journal, closing(Bar()) as bar:
        paths = home.enter(invite.digest)
        _say_other_runs(paths)
        access = RunAccess(invite, MEMBER, home.path)
        settings, known_peers = _network_settings(access, options, home), KnownPeers()
        met = met_before(invite, home)
        known_peers.note(met)
        ledger = TrafficLedger(home.traffic, datetime.now, say)
        sessions = Sessions(options.allowance, ledger, datetime.now, say)
        metrics_at = metrics_place(options.metrics, is_open=options.metrics_open)
        page_at = page_place(options.web, is_open=options.web_open, home=home)
        given = await asyncio.to_thread(ledger_of, read(home.journal))
        own = PeerHistory(checked_name(options.name), 0, ledger=given)
        async with (
            departure(say) as leaving,
            views_served(metrics_at, page_at, invite.digest, own) as views,
        ):
            recorder = Recorder(journal, views, torch_device, energy_meter(torch_device))
            recorder.record_energy()  # by it readers of the journal know that this total begins anew
            record = recorder.record
            reporter = Reporter(record=record, say=say, draw=bar.draw, warn=warn)
            participant = _Participant(access, options, home, paths, torch_device, reporter, leaving, views, sessions)
            participant.met = [each.peer for each in met]
            await live_in_sessions(
                sessions, leaving, lambda: connected(settings, known_peers), participant.take_part, say
            )


class Recorder(NamedTuple):
    """Writes events to the journal, adds what only this process knows, and shows them."""

    journal: Journal
    views: ServedViews
    torch_device: torch.device
    meter: EnergyMeter | None

    def record(self, event: events.Event) -> None:
        """Take an event."""
        if isinstance(event, events.Started):
            event = structs.replace(event, device=str(self.torch_device), pid=os.getpid())
        self.journal.write(event)
        self.views.take(event)
        if isinstance(event, events.Traffic):
            self.record_energy()

    def record_energy(self) -> None:
        """Record what the device has taken since this process began, where it tells."""
        if self.meter is not None:
            self.record(events.Energy(joules=self.meter.joules()))


class _Participant:
    """This peer in all of its sessions: a node for each."""

    def __init__(
        self,
        access: RunAccess,
        options: JoinOptions,
        home: Home,
        paths: RunPaths,
        torch_device: torch.device,
        reporter: Reporter,
        leaving: Departure,
        views: ServedViews,
        sessions: Sessions,
    ) -> None:
        self._access, self._options, self._torch_device = access, options, torch_device
        self._home, self._paths = home, paths
        self._reporter, self._leaving, self._views, self._shifts = reporter, leaving, views, sessions
        self._run: tuple[RunFileText, ModelLayout, FirstCheckpoint] | None = None
        self.met: list[str] = []
        """Peers that this home met before, to be asked for the run file too."""

    async def take_part(self, network: PeerNetwork, leave: asyncio.Event) -> None:
        """Live as a node until the session is over, or the run."""
        sign(short(network.peer_id))
        say(f"we are {network.peer_id}")
        network = await self._access.enter(network)
        # In the first session alone: in a later one no peer of the invite may be there to ask.
        self._run = self._run or await self._fetch_run(network)
        recipe, layout, checkpoint = self._run
        self._shifts.share_with_rounds(GOSSIP, recipe.run.outer.line_share)
        history = RunHistory(self._paths.run_history, recipe.digest, say)
        host = HostMachine(self._options, self._paths, self._torch_device, recipe, layout, checkpoint, network.peer_id)
        with closing(host):
            known = await self._reached(network, history)
            options = self._node_options(known, self._asked(network))
            node = Node(recipe, layout, network, host, options, self._reporter)
            self._leaving.polite = True
            kept = KeptInvite(self._home.invite, self._access.invite, await network.addresses(), say)
            say(f"an invite of our own, kept in {self._home.invite}: {invites.without_secret(kept.keep())}")
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(background(self._access.renew(say)))
                noting = supervised("noting how far the run is", partial(history.follow, node.membership), warn)
                keeping = supervised("keeping the invite", partial(kept.follow, node.membership), warn)
                await stack.enter_async_context(background(noting))
                await stack.enter_async_context(background(keeping))
                following = self._views.follow(node.membership, network, recipe)
                await stack.enter_async_context(background(following))
                await node.live(leave)

    async def _reached(self, network: PeerNetwork, history: RunHistory) -> float:
        """Return how far the run had come, as far as we or the peers of the invite know; from now on, tell others."""
        await network.serve(HISTORY_TOPIC, HISTORY_SCHEMA, history.serve)
        return max(history.progress, await reached(network, self._asked(network)))

    def _node_options(self, reached: float, bootstrap_peers: list[str]) -> NodeOptions:
        options = self._options
        return NodeOptions(
            stage=options.stage,
            moves=options.stage is None and not options.stay,
            linger_s=options.linger,
            refresh_s=options.refresh,
            keep_snapshots=options.keep_snapshots,
            slowest_bytes_per_s=slowest_bytes_per_s(options.allowance, SLOWEST_BYTES_PER_S),
            bootstrap_peers=tuple(bootstrap_peers),
            reached=reached,
            begin_anew=options.begin_anew,
            name=checked_name(options.name),
            given=partial(self._views.own.ledger.given, self._access.invite.digest),
        )

    def _asked(self, network: PeerNetwork) -> list[str]:
        """Return the peers of the invite, without ourselves: it may be our own."""
        return list(dict.fromkeys(each.peer for each in self._access.invite.addresses if each.peer != network.peer_id))

    async def _fetch_run(self, network: PeerNetwork) -> tuple[RunFileText, ModelLayout, FirstCheckpoint]:
        options = self._options
        asked = dict.fromkeys((*self._asked(network), *self.met))
        recipe = await fetch(network, list(asked), self._access.invite.digest, options.local or ())
        self._access.pin(recipe.run)
        for line in recipe.run.summary(options.data):
            say(line)
        if options.stage in (None, 0):
            check_text(recipe.run, options.data)
        await asyncio.to_thread(check_download, recipe.run.model, options.most_disk_bytes)
        for place in (self._paths, self._home):
            place.keep_run_file(recipe.text)
        layout = await asyncio.to_thread(model_layout, recipe.run)
        sizes = {stage: 4 * sum(map(prod, shapes.values())) for stage, shapes in enumerate(layout.shapes)}
        wished = {stage: size for stage, size in sizes.items() if stage == self._options.stage}
        if (full := require_disk(self._paths, wished or sizes, self._options.keep)) is not None:
            warn(full)
        return recipe, layout, await asyncio.to_thread(first_checkpoint, options, self._paths, recipe.run, layout)


def _say_other_runs(paths: RunPaths) -> None:
    """Say what a home keeps of other runs, if anything: no node removes that."""
    others = paths.other_runs()
    if others.number:
        size, place = format_bytes(others.size_bytes), paths.path.parent
        say(f"this home keeps {size} of other runs ({others.number}) below {place}; you may remove a directory there")


def _network_settings(access: RunAccess, options: JoinOptions, home: Home) -> NetworkSettings:
    addresses = access.invite.addresses
    others = not_ours(addresses, home)
    return NetworkSettings(
        run=access.invite.digest,
        identity=home.identity,
        listen=tuple(options.listen or EVERYWHERE),
        announce=tuple(options.announce or ()),
        reach=Reachability.RELAYED if options.relayed else Reachability.AUTO,
        bootstrap=tuple(map(str, others or addresses)),  # a peer does not begin a swarm by its own invite
        accepts=access.accepts,
        lends_line=not options.allowance.is_limited,
        capacity=Capacity.within(memory.machine_free_bytes()),
    )


class HostMachine:
    """What this machine gives to one node of a run; implements `noloco_node.machine.interface.Host`. To be closed."""

    def __init__(
        self,
        options: JoinOptions,
        home: RunPaths,
        torch_device: torch.device,
        recipe: RunFileText,
        layout: ModelLayout,
        checkpoint: FirstCheckpoint,
        peer: str,
    ) -> None:
        self._options, self._home, self._torch_device = options, home, torch_device
        self._recipe, self._layout = recipe, layout
        needs = device_needs(recipe.run, layout, torch_device)
        self.needs_bytes, self.graph_bytes, self.beside_bytes = map(list, needs)
        self.former = CheckpointStore(home.checkpoint, home.snapshots, recipe.digest, peer, say)
        self.snapshots = SnapshotDirectory(home.snapshots, recipe.digest) if options.keep_snapshots else None
        self.first_weights, self.tokenizer = checkpoint
        data = with_tokenizer_in(recipe.run.data, home.tokenizer)
        run = structs.replace(recipe.run, data=data)
        self._text = BackgroundOpen(partial(TextSource, run, options.data, peer, layout.vocabulary))
        self.device = Device(torch_device, options.slowdown)

    def close(self) -> None:
        """Close the text and end the device's threads."""
        # The text first: a thread that waits for it ends with it, and so does not keep us.
        try:
            self._text.close()
        finally:
            self.device.close()

    def build(self, stage: int) -> Stage:
        # What a stage that we leave has had is ours still, as far as the driver knows.
        memory.give_back(self._torch_device)
        run = self._recipe.run
        needs, graph, most = self.needs_bytes[stage], self.graph_bytes[stage], run.pipeline.in_flight(stage)
        graphs = graphs_that_fit(self.free_bytes(), needs, graph, most)
        return make_stage(run, self._layout, stage, self._torch_device, graphs)

    def free_bytes(self, given_back: int = 0) -> int | None:
        memory.trim()
        free = memory.free_bytes(self._torch_device)
        known = (None if free is None else free + given_back, self._options.most_memory_bytes)
        return min((each for each in known if each is not None), default=None)

    def free_beside_bytes(self) -> int | None:
        return memory.machine_free_bytes()

    def prepare_text(self, stage: int) -> None:
        if stage == 0:
            self._text.begin()

    async def open_text(self) -> TextSource:
        return await self._text.opened()

    async def last_stage(self) -> int | None:
        return await self.former.served()

    async def load(self, stage: int) -> Checkpoint | None:
        return await self.former.load(stage)

    async def save(self, checkpoint: Checkpoint) -> str:
        loop = asyncio.get_running_loop()

        def read() -> None:
            loop.call_soon_threadsafe(checkpoint.read)

        return await asyncio.to_thread(_save, self._home.checkpoint, checkpoint._replace(read=read), self._options.keep)

    async def hold(self, state: ReplicaState) -> StateFile:
        return await self.device.beside(StateFile, self._home.path, state)

    def partial_download(self, stage: int, weight_bytes: int) -> PartialDownloadFile:
        return PartialDownloadFile(self._home.partial_download, self._recipe.digest, stage, weight_bytes, say)

    def unix_time(self) -> float:
        return time.time()

    def asleep_s(self) -> float:
        return asleep_s()

    def line_s(self, stage: int) -> float:
        return bandwidth_seconds(microbatch_bytes(self._recipe.run, self._layout, stage), self._options.allowance)


class FirstCheckpoint(NamedTuple):
    """What a run starts from, as it lies here or is to come; None where its seed says it, or nothing travels."""

    weights: RunWeights | None
    tokenizer: WeightStore | None


def first_checkpoint(options: JoinOptions, home: RunPaths, run: RunConfig, layout: ModelLayout) -> FirstCheckpoint:
    """Return what a run starts from.

    Raises `UserError` where the owner named a directory with other files; reads all of them, which takes a while.
    """
    weights = tokenizer = None
    if run.data.tokenizer_files:
        tokenizer = WeightStore.filling(home.tokenizer, run.data.tokenizer_files, options.most_disk_bytes)
    if options.weights is not None:
        weights = WeightStore.whole(options.weights, run.model.weights)
        if tokenizer is not None:
            WeightStore.whole(options.weights, tokenizer.files).copy_to(tokenizer)
    elif run.model.weights:
        weights = WeightStore.filling(home.weights, run.model.weights, options.most_disk_bytes)
    return FirstCheckpoint(None if weights is None else RunWeights(layout.prepared, layout.shapes, weights), tokenizer)


def _save(directory: Path, checkpoint: Checkpoint, keep: int) -> str:
    path = str(save(directory, checkpoint, keep))
    memory.trim()  # about as often as anything large is made and dropped
    return path


def asleep_s() -> float:
    """Return for how long this machine has slept since it was started; 0 where the system does not tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return 0.0
    return max(0.0, time.clock_gettime(clock) - time.clock_gettime(time.CLOCK_MONOTONIC))
