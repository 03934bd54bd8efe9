"""`noloco-node bootstrap`: a lasting address at which newcomers find the run file and the swarm.

A bootstrap peer also lends relays to peers behind routers, and never loads torch. Peers that know each other do not
depend on it. A new bootstrap peer takes the place of a lost one by any invite that still works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from noloco_node.cli import options as shared
from noloco_node.libp2p.addresses import KnownPeers, check_announce, check_listen, parse_peer_address
from noloco_node.libp2p.settings import EVERYWHERE, Capacity, NetworkSettings, Reachability
from noloco_node.machine.memory import machine_free_bytes, share_arenas
from noloco_node.machine.signals import departure, run
from noloco_node.machine.system import allow_files
from noloco_node.network.bans import BanHook
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.swarm_clock import CLOCK, CLOCK_DOUBT_S
from noloco_node.node.health import wrong_clock
from noloco_node.observe.peer_history import PeerHistory
from noloco_node.observe.swarm_view import short
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import read_run_text
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.weight_exchange import WeightServer
from noloco_node.storage.home import Home
from noloco_node.storage.weight_store import WeightStore
from noloco_node.swarm import invite as invites
from noloco_node.swarm import speed_test
from noloco_node.swarm.access import connected
from noloco_node.swarm.admissions import HostedAdmissions
from noloco_node.swarm.invite import KeptInvite, from_where, met_before
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Roster
from noloco_node.swarm.run_distribution import HISTORY_SCHEMA, HISTORY_TOPIC, SCHEMA, TOPIC, RunFileText, RunHistory
from noloco_node.tasks import background, loop_s, supervised
from noloco_node.terminal import say, sign, warn
from noloco_node.units import format_duration
from noloco_node.web.places import metrics_place
from noloco_node.web.served_views import views_served

LINE_EVERY_S = 60.0


@dataclass(frozen=True)
class BootstrapOptions:
    """The options of `bootstrap`."""

    run: Annotated[Path, typer.Option(help="The run file to serve.")] = Path("run.toml")
    listen: shared.ListenOption = None
    announce: shared.AnnounceOption = None
    home: shared.HomeOption = None
    invite: Annotated[
        str | None,
        typer.Option(
            help="Invite of a swarm that is already there, to take a lost bootstrap peer's place; or the home of a "
            "node of it.",
            callback=shared.invite_text,
        ),
    ] = None
    weights: shared.WeightsOption = None
    relays: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=16,
            help="Relays for peers behind routers, at the ports after the peer's own; 0 for none. What they carry uses "
            "this machine's line, and libp2p's relays can be held to no rate.",
        ),
    ] = 4
    metrics: shared.MetricsOption = None
    metrics_open: shared.MetricsOpenOption = False
    web: shared.WebOption = None
    web_open: shared.WebOpenOption = False


def bootstrap(options: BootstrapOptions) -> None:
    """Host a bootstrap peer: newcomers find the swarm and its run file here. Prints the invite to pass on."""
    run(host(options))


async def host(options: BootstrapOptions) -> None:
    """Serve the run file until asked to leave; print the invite on the standard output."""
    share_arenas()
    allow_files()
    check_listen(options.listen or ())  # before a checkpoint is read whole
    check_announce(options.announce or ())
    recipe = RunFileText(read_run_text(options.run), str(options.run))
    stores = await asyncio.to_thread(_checkpoint_stores, options.weights, recipe.run)
    hint = "give the run file of that swarm; its peers keep a copy as run.toml in their homes"
    known = None if options.invite is None else shared.invite_of_run(options.invite, recipe.digest, options.run, hint)
    metrics_at = metrics_place(options.metrics, is_open=options.metrics_open)
    with Home.open(options.home or shared.default_home("bootstrap")) as home:
        page_at = shared.page_place(options.web, is_open=options.web_open, home=home)
        admissions = HostedAdmissions(recipe, options.run, home.identity, known)
        settings = NetworkSettings(
            run=recipe.digest,
            identity=home.identity,
            listen=tuple(options.listen or EVERYWHERE),
            announce=tuple(options.announce or ()),
            bootstrap=() if known is None else tuple(map(str, known.addresses)),
            admission=admissions.state,
            reach=Reachability.OPEN,
            lends_line=options.relays > 0,
            capacity=Capacity.within(machine_free_bytes()),
        )
        # A running swarm dials a bootstrap peer again only now and then: one that comes back dials the swarm.
        met = met_before(invites.Invite(digest=recipe.digest, addresses=()), home)
        keys = [home.relay_key(number) for number in range(1, options.relays + 1)]
        async with (
            departure(say) as leaving,
            views_served(metrics_at, page_at, recipe.digest, PeerHistory("", 0)) as views,
            connected(settings, KnownPeers(met)) as libp2p_network,
            AsyncExitStack() as stack,
        ):
            sign(short(libp2p_network.peer_id))
            network = await admissions.admitted(libp2p_network)
            history = RunHistory(home.enter(recipe.digest).run_history, say)
            await _serve(network, recipe, history, stores)
            relays = await stack.enter_async_context(libp2p_network.relaying(keys))
            addresses = await network.addresses()
            invite = invites.format(recipe.digest, addresses, admissions.credential)
            print(invite, flush=True)
            kept = KeptInvite(home, invites.parse(invite), addresses, say)
            kept.keep()
            say(f"bootstrap peer of the run {recipe.run.name!r} ({recipe.digest[:12]}), home {home.path}")
            say(admissions.rule)
            say(admissions.advice(invite, from_where(addresses)))
            for line in _needs(recipe.run, options.weights, relays):
                say(line)
            membership = recipe.membership(network)
            async with background(
                membership.run(),
                admissions.watch(),
                supervised("noting how far the run is", lambda: history.follow(membership), warn),
                supervised("keeping the invite", lambda: kept.follow(membership, network.addresses), warn),
                supervised("the line about the swarm", lambda: tell_of(membership), warn),
                views.follow(membership, network, recipe),
            ):
                leaving.polite = True
                await leaving.asked.wait()


async def _serve(
    network: PeerNetwork, recipe: RunFileText, history: RunHistory, stores: Mapping[str, WeightStore]
) -> None:
    """Answer newcomers: the run file, how far the run is, the speed of their line, files of the run's checkpoint."""
    network = HookedNetwork(network, BanHook())  # as every node does
    await network.serve(TOPIC, SCHEMA, recipe.serve)
    await network.serve(speed_test.TOPIC, speed_test.SCHEMA, speed_test.SpeedTestService().answer)
    for topic, store in stores.items():
        await network.serve(topic, weight_exchange.SCHEMA, WeightServer(store, asyncio.to_thread).serve)
    await network.serve(HISTORY_TOPIC, HISTORY_SCHEMA, history.serve)


def _needs(run: RunConfig, weights: Path | None, relays: Sequence[str]) -> Iterator[str]:
    """Yield what the run needs that its run file does not hold: text, weights, ports of relays."""
    if not run.data.is_public:
        yield f"each machine trains on text that its owner names: join --data PATH ({run.data.text_name})"
    if run.model.weights and weights is not None:
        yield f"the run starts from the checkpoint in {weights}, which newcomers fetch from here"
    elif run.model.weights:
        yield (
            "the run starts from a checkpoint, and it is not served here: until a peer gives --weights DIR, those who "
            "begin the run wait for it"
        )
    if relays:
        places = ", ".join(dict.fromkeys(parse_peer_address(place).transport for place in relays))
        yield f"relays for peers behind routers listen too, and must be as open: {places}"


def _checkpoint_stores(directory: Path | None, run: RunConfig) -> dict[str, WeightStore]:
    """Return the files of the checkpoint in a directory by their topic, after reading all of them.

    Raises `UserError` if the run does not start from them.
    """
    if directory is None:
        return {}
    stores = {weight_exchange.TOPIC: WeightStore.whole(directory, run.model.fetched)}
    if run.data.tokenizer_files:
        stores[weight_exchange.TOKENIZER_TOPIC] = WeightStore.whole(directory, run.data.tokenizer_files)
    return stores


async def tell_of(membership: Membership) -> None:
    """Say how many replicas each stage has, whenever that changes and every minute.

    Warns once when our clock is wrong, and says once when it is right again.
    """
    shown, shown_at, clock_is_wrong, is_disputed = "", 0.0, False, False
    while True:
        await membership.changed()
        line = census(membership.roster)
        if line != shown or loop_s() - shown_at > LINE_EVERY_S:
            say(line)
            shown, shown_at = line, loop_s()
        disputed_s = CLOCK.disputed_s()
        if disputed_s and not is_disputed:
            wrong = f"{format_duration(abs(disputed_s))} {'ahead of' if disputed_s > 0.0 else 'behind'}"
            warn(
                f"this machine's clock is {wrong} that of each peer that told the time, and they are too few to go by: "
                "while it is wrong, the replicas above are not all that there are"
            )
        is_disputed = bool(disputed_s)
        skew_s = CLOCK.ahead_s()
        if clock_is_wrong != (abs(skew_s) >= CLOCK_DOUBT_S):
            clock_is_wrong = not clock_is_wrong
            condition = wrong_clock(skew_s)
            if clock_is_wrong:
                warn(condition.text)
            else:
                say(condition.over)


def census(roster: Roster) -> str:
    text, lone = f"replicas by stage: {roster.census()}", " and ".join(map(str, roster.unserved))
    return text + (f"; nobody serves stage {lone}" if lone else "")
