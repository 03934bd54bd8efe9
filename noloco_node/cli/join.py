"""`noloco-node join`: this machine takes part as a node, session by session.

The command checks what was typed before it loads torch, so that a refusal comes at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias

from msgspec import structs

from noloco_node.admission.ticket import MEMBER
from noloco_node.cli.join_devices import divided, join_each, named_devices
from noloco_node.cli.options import (
    JoinOptions,
    KeptInviteArgument,
    check_values,
    default_home,
    directory_there,
    page_place,
)
from noloco_node.data.dataset_documents import check_source
from noloco_node.doctor.machine_checks import require_disk
from noloco_node.errors import UserError
from noloco_node.journal import events
from noloco_node.journal.reader import read
from noloco_node.journal.writer import Journal
from noloco_node.libp2p.addresses import KnownPeers, PeerAddress, check_announce, check_listen
from noloco_node.libp2p.settings import EVERYWHERE, Capacity, NetworkSettings, Reachability
from noloco_node.machine import memory
from noloco_node.machine.interface import Reporter, check_device_name
from noloco_node.machine.signals import Departure, departure, run
from noloco_node.machine.system import allow_files
from noloco_node.network.interface import PeerNetwork
from noloco_node.node.sessions import Sessions, live_in_sessions
from noloco_node.observe.curves import LiveCurves
from noloco_node.observe.peer_history import PeerHistory, ledger_of
from noloco_node.observe.swarm_view import short
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S, slowest_bytes_per_s
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import check_text
from noloco_node.storage.home import Home
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

if TYPE_CHECKING:
    import torch

    from noloco_node.cli.host_machine import Machine, MachineRequest
    from noloco_node.machine.device import EnergyMeter

    PrepareMachine: TypeAlias = Callable[[MachineRequest], Machine]


HOME_LOOK_S = 1.0  # between two looks whether the home is there: a checkpoint makes the directories that it needs
HOME_LOOKS = 5  # so many in a row miss the home before the node ends: a network disk may lack it for a moment


def join(options: JoinOptions, invite: KeptInviteArgument = None) -> None:
    """Join a swarm: take a stage and train with the others to the end. Ctrl-C once leaves politely, twice at once."""
    check_options(options)  # before torch is loaded: a refusal is to come at once
    names = named_devices(options)
    if len(names) > 1:
        sys.exit(run(join_each(invite, divided(options, names, memory.machine_free_bytes()))))
    if names:
        options = replace(options, device=names[0], devices=None)
    parsed = invites.parse(invites.found(invite, options.home or default_home("node")))
    Home.open(options.home or default_home("node")).close()  # one in use is refused at once, too
    memory.expand_segments()
    say("loading torch (a few seconds)")
    gc.disable()  # none of what is imported is garbage, and to look for some takes a sixth of a node's start
    try:
        import noloco_node.cli.host_machine
        import noloco_node.node.node  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
    run(take_part(parsed, options))


def check_options(options: JoinOptions) -> None:
    """Raise `UserError` for options of a node that cannot be used, whoever gives them: a person or a program."""
    check_values(options)
    _ = options.allowance, options.most_memory_bytes, options.most_ram_bytes, options.most_disk_bytes
    _ = metrics_place(options.metrics, is_open=options.metrics_open)
    _ = page_place(options.web, is_open=options.web_open), checked_name(options.name), options.prompts, options.curves
    check_device_name(options.device)
    check_listen(options.listen or ())
    check_announce(options.announce or ())
    if options.data is not None:
        check_source(options.data)
    directory_there(options.weights)


async def take_part(
    invite: invites.Invite,
    options: JoinOptions,
    departs: Callable[[], AbstractAsyncContextManager[Departure]] | None = None,
    prepare: PrepareMachine | None = None,
    observe: Callable[[events.Event], None] = lambda _: None,
) -> None:
    """Join the swarm of an invite, and stay until the run ends or we are asked to leave.

    `departs`: tells when to leave; signals do by default. `prepare`: works out what this machine gives to a node of the
    run that was found; a stage of the run's own model by default. `observe`: takes the events of the journal too.
    """
    import torch

    from noloco_node.cli.host_machine import machine_for
    from noloco_node.export.replica_files import under_other_ids
    from noloco_node.machine.device import choose_device, energy_meter

    memory.share_arenas()
    allow_files()
    torch_device = choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    directory = options.home or default_home("node")
    with (
        Home.open(directory) as home,
        Journal(home.journal, tell=warn) as journal,
        Journal(home.evaluations, tell=warn) as evaluations,
        closing(LiveCurves(options.curves, checked_name(options.name), home.curves, warn)) as curves,
        closing(Bar()) as bar,
    ):
        others = home.run(invite.digest).other_runs()
        if others:  # no node removes them
            size, place = format_bytes(sum(others)), home.run(invite.digest).path.parent
            kept = f"this home keeps {size} of other runs ({len(others)}) below {place}"
            say(f"{kept}; you may remove a directory there")
        for line in under_other_ids(home.path, invite.digest):
            warn(line)
        access = RunAccess(invite, MEMBER, home.path)
        met = met_before(invite, home)
        opened = partial(connected, _network_settings(access, options, home), KnownPeers(met))
        sessions = Sessions(options.allowance, home.traffic, datetime.now, say)
        metrics_at = metrics_place(options.metrics, is_open=options.metrics_open)
        page_at = page_place(options.web, is_open=options.web_open, home=home)
        given = await asyncio.to_thread(ledger_of, read(home.journal))
        own = PeerHistory(checked_name(options.name), 0, ledger=given)
        async with (
            (departs or partial(departure, say))() as leaving,
            views_served(metrics_at, page_at, invite.digest, own) as views,
            background(home_watched(home)),
        ):
            meter, observers = energy_meter(torch_device), (curves.take, observe)
            recorder = Recorder(journal, evaluations, views, torch_device, meter, observers)
            recorder.record_energy()  # by it readers of the journal know that this total begins anew
            reporter = Reporter(record=recorder.record, say=say, draw=bar.draw, warns=warn)
            participant = _Participant(
                access, options, home, torch_device, reporter, leaving, views, sessions, met, prepare or machine_for
            )
            await live_in_sessions(sessions, leaving, opened, participant.take_part)


async def home_watched(home: Home) -> NoReturn:
    """Raise `UserError` once several looks in a row miss the home."""
    missed = 0
    while True:
        try:
            await asyncio.to_thread(home.check)  # a disk that does not answer holds nothing else up
            missed = 0
        except UserError:
            missed += 1
            if missed >= HOME_LOOKS:
                raise
        await asyncio.sleep(HOME_LOOK_S)


class Recorder(NamedTuple):
    """Writes events to the journal and shows them, also to `observers`; adds to `Started` device and process id.

    `evaluations`: takes the evaluations alone, for programs that draw their curve.
    """

    journal: Journal
    evaluations: Journal
    views: ServedViews
    torch_device: torch.device
    meter: EnergyMeter | None
    observers: Sequence[Callable[[events.Event], None]] = ()

    def record(self, event: events.Event) -> None:
        if isinstance(event, events.Started):
            event = structs.replace(event, device=str(self.torch_device), pid=os.getpid())
        self.journal.write(event)
        if isinstance(event, events.Evaluated):
            self.evaluations.write(event)
        self.views.take(event)
        for observe in self.observers:
            observe(event)
        if isinstance(event, events.Traffic):
            self.record_energy()

    def record_energy(self) -> None:
        """Record the energy that the device has taken since this process began, if the device tells."""
        if self.meter is not None:
            self.record(events.Energy(joules=self.meter.joules()))


@dataclass
class _Participant:
    """This peer in all of its sessions, with a node for each.

    `met`: peers that this home met before. `prepare`: works out what this machine gives to a node of the run.
    """

    access: RunAccess
    options: JoinOptions
    home: Home
    torch_device: torch.device
    reporter: Reporter
    leaving: Departure
    views: ServedViews
    sessions: Sessions
    met: list[PeerAddress]
    prepare: PrepareMachine
    run: tuple[RunFileText, Machine] | None = None
    """What the first session fetched: in a later one no peer of the invite may be there to ask."""

    async def take_part(self, network: PeerNetwork, leave: asyncio.Event) -> None:
        """Live as a node until the session or the run is over."""
        from noloco_node.node.node import Node
        from noloco_node.node.node_context import NodeOptions
        from noloco_node.run.protocols import GOSSIP

        sign(short(network.peer_id))
        say(f"we are {network.peer_id}")
        network = await self.access.enter(network)
        self.run = self.run or await self._fetch_run(network)
        recipe, machine = self.run
        self.sessions.share_with_rounds(GOSSIP, recipe.run.outer.line_share)
        history = RunHistory(self.home.run(recipe.digest).run_history, say)
        with closing(machine.host(network.peer_id)) as host:
            await network.serve(HISTORY_TOPIC, HISTORY_SCHEMA, history.serve)
            asked, options = self._asked(network), self.options
            node_options = NodeOptions(
                stage=options.stage,
                moves=options.stage is None and not options.stay,
                linger_s=options.linger,
                refresh_s=options.refresh,
                keep_snapshots=options.keep_snapshots,
                slowest_bytes_per_s=slowest_bytes_per_s(options.allowance, SLOWEST_BYTES_PER_S),
                bootstrap_peers=tuple(asked),
                reached=max(history.progress, await reached(network, asked)),
                begin_anew=options.begin_anew,
                name=checked_name(options.name),
                given=partial(self.views.own.ledger.given, self.access.invite.digest),
            )
            node = Node(recipe, machine.dimensions, network, host, node_options, self.reporter)
            self.leaving.polite = True
            kept = KeptInvite(self.home, self.access.invite, await network.addresses(), say)
            say(f"an invite of our own, kept in {self.home.invite}: {invites.without_secret(kept.keep())}")
            beside = (
                supervised("renewing our ticket", partial(self.access.renew, say), warn),
                supervised("noting how far the run is", partial(history.follow, node.membership), warn),
                supervised("keeping the invite", partial(kept.follow, node.membership, network.addresses), warn),
                self.views.follow(node.membership, network, recipe),
            )
            async with background(*beside):
                await node.live(leave)

    def _asked(self, network: PeerNetwork) -> list[str]:
        """Return the peers of the invite without ourselves, since the invite may be our own."""
        return [each for each in self.access.invite.peers if each != network.peer_id]

    async def _fetch_run(self, network: PeerNetwork) -> tuple[RunFileText, Machine]:
        from noloco_node.cli.host_machine import MachineRequest
        from noloco_node.planning.model_layout import check_download

        options = self.options
        asked = dict.fromkeys((*self._asked(network), *(each.peer for each in self.met)))
        recipe = await fetch(network, list(asked), self.access.invite.digest, options.local or ())
        self.access.pin(recipe.run)
        for line in recipe.run.summary(options.data):
            say(line)
        if options.stage in (None, 0):
            check_text(recipe.run, options.data)
        for line in without_effect(options, recipe.run):
            warn(line)
        await asyncio.to_thread(check_download, recipe.run.model, options.most_disk_bytes)
        paths = self.home.enter(recipe.digest)
        for place in (paths, self.home):
            place.keep_run_file(recipe.text)
        request = MachineRequest(options, paths, self.torch_device, recipe)
        machine = await asyncio.to_thread(self.prepare, request)
        shapes_of = enumerate(machine.dimensions.shapes)
        sizes = {stage: 4 * sum(map(prod, shapes.values())) for stage, shapes in shapes_of}
        wished = {stage: size for stage, size in sizes.items() if stage == options.stage}
        full = require_disk(paths, wished or sizes, options.keep, keeps_best=recipe.run.keeps_best)
        if full is not None:
            warn(full)
        return recipe, machine


def without_effect(options: JoinOptions, run: RunConfig) -> Iterator[str]:
    """Yield a sentence for each option that was given and does nothing in this run."""
    if options.prompts and not run.data.evaluate_every_rounds:
        yield "--sample writes no text: this run has no evaluations (data.evaluate_every_rounds)"
    elif options.prompts and run.pipeline.stages > 1:
        yield "--sample writes no text: no peer of a run of several stages holds the whole model"
    if options.keep_snapshots and run.pipeline.stages == 1:
        yield "--keep-snapshots keeps nothing: this run has one stage, and any replica's checkpoint brings it back"


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
        admission=access.state,
        lends_line=not options.allowance.is_limited,
        capacity=Capacity.within(memory.machine_free_bytes()),
    )
