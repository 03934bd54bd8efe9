"""The network over libp2p: conversations on raw streams, records in hivemind's DHT, one daemon, one event loop.

One `JoinedDaemon` is one daemon's life. When it dies, what was under way breaks at once, and another one begins: the
same identity, the same ports, the topics served again, the swarm joined again by the peers that are left. Calls that
begin meanwhile wait for it. Topics and streams outlive it (`PeerContext`). Before the first one a `preflight` may find
out how it must be started: to be reached through relays, say, or at an address that only others see.

The daemon is told of no bootstrap peers; we connect it to each ourselves. Its own way ends in one message for a closed
port, an unknown host and a wrong peer id; asked about one address, it says exactly which it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import reachability, relays
from noloco_node.libp2p.addresses import (
    RELAYS_KEY,
    KnownPeers,
    PeerAddress,
    beyond_this_machine,
    bootstrap_address,
    check_announce,
    check_listen,
    checked_relays,
    parse_peer_address,
    place_text,
    port_of,
    relays_of,
    with_ports_chosen,
)
from noloco_node.libp2p.control import Control, PeerContext, StreamDialer
from noloco_node.libp2p.daemon import MOST_DEATHS, DaemonConfig, arguments, private_directory, restart_pause_s
from noloco_node.libp2p.dht_records import DhtRecords
from noloco_node.libp2p.hivemind_compat import (
    DaemonClient,
    daemon_trouble,
    load_hivemind,
)
from noloco_node.libp2p.reachability import PreflightGoal, preflight, preflight_goal
from noloco_node.libp2p.record_holders import PeerId
from noloco_node.libp2p.relays import Grant, granted
from noloco_node.libp2p.settings import NetworkSettings, Reachability, RunSecret, ensure_identity
from noloco_node.libp2p.stream import Stream
from noloco_node.libp2p.switchboard import Switchboard
from noloco_node.network.bans import crowd_of
from noloco_node.network.interface import Handler
from noloco_node.network.schema import Schema
from noloco_node.network.swarm_clock import CLOCK, LEAST_TOLD
from noloco_node.tasks import background

logger = logging.getLogger(__name__)

T = TypeVar("T")
_ATTEMPTS = 3
REJOIN_S = 15.0  # between two looks at who is connected
MISSED, ANSWER_S = 3, 15.0  # our daemon hangs if it leaves so many questions in a row without an answer for so long
_GREETED = 4  # at one look
_TIME_EVERY = 4  # looks: then one more peer is asked for its time of day, or sooner several where that is in doubt
_RELAY_S = 10.0  # a relay has so long to give us a place
_LOOK_S = 0.2
_MOST_CIRCUITS = 2
_CIRCUIT = "/p2p-circuit"


class Libp2pNetwork:
    """Implements `interface.PeerNetwork`; made by `Libp2pNetwork.open`."""

    def __init__(self, context: PeerContext, tell: Callable[[str], None]) -> None:
        self._settings, self._context, self._tell = context.settings, context, tell
        settings = context.settings
        self._switchboard = context.switchboard
        self._doors = [bootstrap_address(text) for text in settings.bootstrap]
        self._peer_id, self._dialable = "", True
        self._joined: JoinedDaemon | None = None
        self._own_relays = tuple[str, ...]()
        self._present = asyncio.Event()
        self._service: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS + 1)
        self._died = self._rejoined = self._unpublished = 0  # daemons, peers, and records that the DHT did not take

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: NetworkSettings, tell: Callable[[str], None] = logger.warning, met: KnownPeers | None = None
    ) -> AsyncIterator[Libp2pNetwork]:
        """Join the network for as long as the context; `UserError`, with what to try, when that cannot be.

        `tell` is called with a sentence when something happens that a person should know. `met` takes note of the peers
        that we meet, for the network that follows this one.
        """
        check_listen(settings.listen)
        check_announce(settings.announce)
        parts = load_hivemind()
        switchboard = Switchboard(settings.timeouts, settings.capacity)
        with private_directory() as directory:
            secret = RunSecret(settings.run)
            context = PeerContext(parts, directory, settings, secret, switchboard, met or KnownPeers())
            network = cls(context, tell)
            try:
                await network._begin(settings.identity or directory / "identity.key")
                yield network
            finally:
                await network._close()

    # What interface.PeerNetwork promises.

    @property
    def peer_id(self) -> str:
        return self._peer_id

    @property
    def dialable(self) -> bool:
        """Whether others can dial us, by what the peers that we joined by found out."""
        return self._dialable

    @asynccontextmanager
    async def talk(self, peer: str, topic: str, schema: Schema) -> AsyncIterator[Stream]:
        joined = await self._now()
        try:
            stream = await joined.dialer.dial(peer, topic, schema)
        except ConnectionResetError:
            if not await joined.daemon.is_dead():
                raise
            # Nothing was said yet: the next daemon can say it.
            stream = await (await self._now()).dialer.dial(peer, topic, schema)
        try:
            yield stream
        except BaseException:
            stream.break_off(ConnectionResetError("this side left the conversation"))
            raise
        stream.leave()

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        """Answer conversations about `topic`; see `interface.PeerNetwork.serve`. UserError (Exit.DAEMON) if in vain."""
        self._switchboard.serve(topic, schema, handler)
        try:
            joined = await self._now()
            try:
                await joined.dialer.offer(topic)
            except ConnectionResetError:
                if not await joined.daemon.is_dead():
                    raise
                # The next daemon offers all topics.
        except ConnectionError as error:
            # Nobody could ask us about it, and we would not know.
            raise daemon_trouble(str(error)) from None

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        stored = False
        with contextlib.suppress(ConnectionResetError):
            stored = await (await self._now()).records.publish(key, subkey, value, lifetime_s)
        self._unpublished += not stored
        return stored

    async def read(self, key: str) -> Mapping[str, bytes]:
        return await (await self._now()).records.read(key)

    async def read_all(self, keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
        async def read(key: str) -> Mapping[str, bytes] | None:
            with contextlib.suppress(ConnectionError):
                return await self.read(key)
            return None

        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(read(key)) for key in keys]
        return [task.result() for task in reading]

    # What the shell needs besides.

    async def wait_daemon(self) -> NoReturn:
        """Wait until daemons die again and again, or our own service ends; raise `UserError`: to be awaited always."""
        assert self._service is not None
        await asyncio.wait({self._service})
        if not self._service.cancelled():
            self._service.result()
        raise daemon_trouble("it was stopped")

    async def addresses(self) -> tuple[str, ...]:
        return await (await self._now()).addresses()

    @asynccontextmanager
    async def relaying(self, identities: Sequence[Path]) -> AsyncIterator[tuple[str, ...]]:
        """Run a relay for each identity, at the ports after our own, and tell the swarm of them; see `relays`."""
        chosen = relays.relay_configs(self._settings, identities)
        pool = relays.RelayPool(self._context, self._tell, self._granted)
        key = self._context.secret.key(RELAYS_KEY)
        async with relays.relaying(pool, chosen) as places:
            self._own_relays = places
            told = relays.tell(places, lambda raw, lifetime_s: self.publish(key, self.peer_id, raw, lifetime_s))
            try:
                async with background(told):
                    yield places
            finally:
                self._own_relays = ()

    def statistics(self) -> dict[str, int | float]:
        rejoined = self._rejoined + (0 if self._joined is None else self._joined.rejoined)
        own = {"publish.failed": self._unpublished, "rejoined": rejoined, "daemon.died": self._died}
        return self._switchboard.statistics() | own

    # One daemon after another.

    async def _begin(self, identity: Path) -> None:
        settings = self._settings
        goal = preflight_goal(settings, identity_is_old=ensure_identity(identity))
        config = DaemonConfig(
            identity=identity,
            listen=with_ports_chosen(settings.listen),
            announce=settings.announce,
            lends_line=settings.lends_line,
        )
        if any(goal):
            config = await preflight(self._context, config, goal, self._doors, self._tell)
        self._service = asyncio.get_running_loop().create_task(self._serve(config), name="network")
        await self._wait_until_joined(self._service, None)
        if self._service.done():
            self._service.result()

    async def _serve(self, config: DaemonConfig) -> None:
        """Answer streams and keep a daemon at work, until either fails."""
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(self._switchboard.run(started), name="switchboard")}
        try:
            await started.wait()
            self._switchboard.serve(
                reachability.TOPIC, reachability.SCHEMA, reachability.DialBackService(self._relays).answer
            )
            tasks.add(loop.create_task(self._keep(config), name="daemons"))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _keep(self, config: DaemonConfig) -> NoReturn:
        """Run one daemon after another; `UserError` when the first does not begin, or daemons die again and again."""
        loop, settings, attempts, look_s = asyncio.get_running_loop(), self._settings, 1, reachability.LOOK_S
        while True:
            try:
                why = await self._live(config, look_s)
                if why is None:
                    before, doors = config, self._context.known_peers.beside(self._doors)
                    goal = PreflightGoal(identity=False, reach=True)  # our own name may still be in others' tables
                    config = await preflight(self._context, config, goal, doors, self._tell)
                    look_s = reachability.LOOK_S if config != before else min(2 * look_s, reachability.MOST_LOOK_S)
                    continue
            except UserError as trouble:
                if not self._peer_id:
                    # A port that we chose may have been taken since.
                    if trouble.code is not Exit.PORT_TAKEN or attempts == _ATTEMPTS:
                        raise
                    attempts += 1
                    config = msgspec.structs.replace(config, listen=with_ports_chosen(settings.listen))
                    continue
                why = f"{trouble.what} {trouble.why}"
            self._died += 1
            self._deaths.append(loop.time())
            wait_s = restart_pause_s(self._deaths, loop.time())
            if wait_s is None:
                raise UserError(
                    "The libp2p daemon died, again and again.",
                    why=f"its last words: {why}",
                    hint="look for a lack of memory in the system's log, and start the node again",
                    code=Exit.DAEMON,
                )
            self._tell(f"our libp2p daemon died ({why}); starting it again")
            await asyncio.sleep(wait_s)

    async def _live(self, config: DaemonConfig, look_s: float) -> str | None:
        """Run one daemon until it dies, and return its last words; until others reach us otherwise, and return None.

        `look_s`: between two times at which others are asked that.
        """
        again = bool(self._peer_id)
        met = self._context.known_peers
        doors = met.beside(self._doors) if again else self._doors
        async with JoinedDaemon.open(self._context, config, doors, alone=again) as joined:
            try:
                for topic in self._switchboard.topics:
                    await joined.dialer.offer(topic)
                placed = again or await joined.is_placed()
            except ConnectionError as error:
                raise daemon_trouble(str(error)) from None
            self._peer_id, self._dialable = joined.peer_id, config.dialable
            if not placed:
                self._tell("no relay has given us a place yet: others may not reach us for some minutes")
            if again:
                self._tell(f"back in the swarm, {joined.records.neighbours} neighbours in the DHT")
            loop = asyncio.get_running_loop()
            tasks: set[asyncio.Task[None]] = {loop.create_task(joined.stay_joined(self._doors, met))}
            if self._settings.reach is Reachability.AUTO and preflight_goal(self._settings, identity_is_old=True).reach:
                places = partial(joined.control.places, self._settings.timeouts.dht_s)
                looking = reachability.until_elsewhere(joined.dialer, config, joined.neighbours, places, look_s)
                tasks.add(loop.create_task(looking))
            self._joined = joined
            self._present.set()
            try:
                ends: set[asyncio.Future[Any]] = {joined.daemon.died, *tasks}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
                return joined.daemon.died.result() if joined.daemon.died.done() else None
            finally:
                for task in tasks:
                    task.cancel()
                self._present.clear()
                self._joined = None
                self._rejoined += joined.rejoined

    async def _now(self) -> JoinedDaemon:
        """Return the daemon at work; where one has just died, wait for the next. ConnectionResetError if in vain."""
        if self._joined is not None and self._joined.daemon.died.done():
            self._joined = None
            self._present.clear()
        if self._joined is None and self._service is not None and not self._service.done():
            await self._wait_until_joined(self._service, self._settings.timeouts.return_s)
        if self._joined is None:
            raise ConnectionResetError("our own libp2p daemon is gone")
        return self._joined

    async def _wait_until_joined(self, service: asyncio.Task[None], wait_s: float | None) -> None:
        present = asyncio.get_running_loop().create_task(self._present.wait())
        ends: set[asyncio.Future[Any]] = {present, service}
        try:
            await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            present.cancel()

    async def _granted(self, doors: Sequence[PeerAddress]) -> Grant:
        joined = await self._now()
        reach_s = self._settings.timeouts.reach_s
        await joined.control.knock(doors, reach_s)
        return await granted(joined.control, doors[0].peer, reach_s)

    async def _relays(self) -> tuple[str, ...]:
        """Return our relays, then others that the swarm tells of, as far as we can find out now."""
        found = self._own_relays  # which no number of records hides
        with contextlib.suppress(ConnectionError):
            found += relays_of(await self.read(self._context.secret.key(RELAYS_KEY)))
        return checked_relays(found)

    async def _close(self) -> None:
        self._switchboard.close()
        if self._service is not None:
            self._service.cancel()
            await asyncio.wait({self._service}, timeout=self._settings.timeouts.linger_s)


class JoinedDaemon:
    """A daemon at work: asked, connected with others, a node of the DHT; made by `JoinedDaemon.open`."""

    def __init__(self, context: PeerContext, config: DaemonConfig, control: Control, client: DaemonClient) -> None:
        self.daemon, self.peer_id = control.daemon, client.peer_id.to_base58()
        self.rejoined = 0
        self.control, self._parts, self._config, self._client = control, context.parts, config, client
        self._context, self._timeouts = context, context.settings.timeouts
        self.dialer = StreamDialer(control, context, self.peer_id)
        self.records = DhtRecords(control, config.identity, context.secret, context.settings)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, context: PeerContext, config: DaemonConfig, doors: Sequence[PeerAddress], *, alone: bool
    ) -> AsyncIterator[JoinedDaemon]:
        """Join by whichever of `doors` open, for as long as the context; `alone`: also if none does.

        Raises `UserError`, with what to try, when that cannot be.
        """
        chosen = arguments(config, context.settings.reach)
        async with context.start(chosen) as (control, client):
            joined = cls(context, config, control, client)
            try:
                await joined._join(doors, alone)
                yield joined
            finally:
                joined.dialer.close()
                await joined.records.close()

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs under which others may reach us, each ending in /p2p/ID; those of this machine only
        if there are no others. Behind a router, two through relays come first.
        """
        found = await self._places()
        circuits = [place for place in found if _CIRCUIT in place]
        circuits = circuits or [f"{relay}{_CIRCUIT}" for relay in self._config.relays]
        direct = [place for place in found if _CIRCUIT not in place]
        chosen = (*circuits[:_MOST_CIRCUITS], *(beyond_this_machine(direct) or direct))
        return tuple(f"{place}/p2p/{self.peer_id}" for place in chosen)

    async def is_placed(self) -> bool:
        """Wait a while for a relay's place; say whether others can reach us by now as they should."""
        try:
            async with asyncio.timeout(_RELAY_S):
                # The daemon sets no event when a relay has taken us in.
                while self._config.relays and not any(_CIRCUIT in place for place in await self._places()):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            return False
        return True

    async def neighbours(self) -> list[PeerAddress]:
        """Return whom we are connected with, and where; our relays take no part in the swarm and do not count."""
        pb = self._parts.messages
        answer = await self.control.ask(pb.Request(type=pb.Request.LIST_PEERS), ANSWER_S)
        ours = {parse_peer_address(text).peer for text in self._config.relays}
        found = [
            (place, self._parts.peer_text(entry.id)) for entry in answer.peers for place in map(place_text, entry.addrs)
        ]
        known = [(place.removesuffix(f"/p2p/{peer}"), peer) for place, peer in found if place and peer not in ours]
        return [PeerAddress(place, peer) for place, peer in known if self._context.is_of_run(peer)]

    async def stay_joined(self, doors: Sequence[PeerAddress], met: KnownPeers) -> NoReturn:
        """Note whom we are connected with in `met`, and stay in touch with them and with the rest of the swarm.

        Where that is nobody, as after a night in sleep mode, knock at `doors` and at whom we met. A connection may
        outlast a minute without a line, after which the DHT has forgotten peers: greet some of those. A line that was
        down between two parts of the swarm leaves each part complete for itself, and nobody lacks anything: so knock
        at one that is away, too, each time at another one.

        A daemon that hangs is ended: nothing else tells it from a swarm in which nobody is left.
        """
        look, missed, door_peers = 0, 0, {door.peer for door in doors}
        while True:
            look += 1
            is_doubted = CLOCK.is_doubted()
            with contextlib.suppress(ConnectionError, UserError):
                try:
                    present = await self.neighbours()
                except ConnectionAbortedError:
                    # One alone may be of the time in which this process stood still.
                    missed += 1
                    if missed >= MISSED:
                        self.daemon.end(f"it hung: it gave no answer for {MISSED * ANSWER_S:g} s")
                    continue
                missed = 0
                met.note(present)
                if present:
                    strangers = [each for each in present if not self.records.is_neighbour(self._id_of(each))]
                    await self._greet(_some(strangers, look, _GREETED))
                    if is_doubted or look % _TIME_EVERY == 1:
                        # Of all: a peer that keeps out of our routing table, as strangers do, has no more voices.
                        turn, most = (look, LEAST_TOLD) if is_doubted or look == 1 else (look // _TIME_EVERY, 1)
                        for voice, each in _some(voices(present, door_peers), turn, most):
                            is_door = each.peer in door_peers
                            with contextlib.suppress(ConnectionError):
                                await self.records.ask_time(self._id_of(each), voice, is_door=is_door)
                    here = {self.peer_id, *(each.peer for each in present)}
                    away = [each for each in met.beside(doors) if each.peer not in here]
                    await self._greet(await self.control.knock(_some(away, look, 1), self._timeouts.reach_s))
                else:
                    answering = await self.control.knock(met.beside(doors), self._timeouts.reach_s)
                    self.rejoined += len(answering)
                    await self._greet(answering)
            await asyncio.sleep(REJOIN_S)

    async def _greet(self, peers: Sequence[PeerAddress]) -> None:
        for each in peers:
            with contextlib.suppress(ConnectionError):
                await self.records.greet(self._id_of(each))

    def _id_of(self, address: PeerAddress) -> PeerId:
        peer_id: PeerId = self._parts.PeerID.from_base58(address.peer)
        return peer_id

    # Inside.

    async def _places(self) -> list[str]:
        return await self.control.places(self._timeouts.dht_s)

    async def _join(self, doors: Sequence[PeerAddress], alone: bool) -> None:
        reached: list[PeerAddress] = []
        try:
            await self._check_places()
            await self.dialer.listen()
            try:
                level = logging.DEBUG if alone else logging.WARNING
                reached = await self.control.knock(doors, self._timeouts.reach_s, level)
            except UserError:
                if not alone:
                    raise
            is_answered = await self.records.join(self._parts, self._client, reached, self._timeouts.start_s)
        except OSError as error:  # of our sockets' directory, too
            raise daemon_trouble(str(error)) from None
        if doors and not is_answered and not alone:
            raise UserError(
                "Nobody who answers takes part in this run.",
                why=f"at {' and '.join(str(address) for address in reached)} is another run, or another version",
                hint="ask whoever sent the invite for a fresh one, and for the version of this program that they use",
                code=Exit.OTHER_RUN,
            )

    async def _check_places(self) -> None:
        """Raise `UserError` unless the daemon listens: on a taken port it starts without a word."""
        found = await self._places()
        ports = {port_of(place) for place in found}
        deaf = [] if self._config.announce else [text for text in self._config.listen if port_of(text) not in ports]
        if deaf or not found:
            raise UserError(
                f"The libp2p daemon does not listen on {' and '.join(deaf) or 'any address'}.",
                why="another program took the port in that moment, or this machine has no such address",
                hint="start again, or choose another port with --listen",
                code=Exit.PORT_TAKEN,
            )


def voices(peers: Sequence[PeerAddress], doors: Collection[str]) -> list[tuple[str, PeerAddress]]:
    """Return one peer of each public address prefix, and of those that come through relays, by that: names are free.

    `doors`, and those that show no public address, as of one household, stand for themselves.
    """
    crowds = {each: crowd_of(each.transport) for each in peers if each.peer not in doors}
    return sorted({crowds.get(each) or each.peer: each for each in peers}.items())


def _some(peers: Sequence[T], look: int, most: int) -> Sequence[T]:
    """Return at most so many peers, others at each look."""
    at = look * most % len(peers) if peers else 0
    return [*peers[at:], *peers[:at]][:most]
