"""The network over libp2p: conversations on raw streams, records in hivemind's DHT, one daemon, one event loop.

One `Session` is one daemon's life. When it dies, what was under way breaks at once, and another session begins: the
same identity, the same ports, the topics served again, the swarm joined again by the peers that are left. Calls that
begin meanwhile wait for it. Before the first one a `preflight` may find out how it must be started: to be reached
through relays, say, or at an address that only others see.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import reachability, relays
from noloco_node.libp2p.addresses import (
    RELAYS_KEY,
    KnownPeers,
    PeerAddress,
    bootstrap_address,
    check_announce,
    check_listen,
    relays_of,
    with_ports_chosen,
)
from noloco_node.libp2p.control import Grant
from noloco_node.libp2p.daemon import MOST_DEATHS, DaemonConfig, private_directory, restart_pause_s
from noloco_node.libp2p.hivemind_compat import daemon_trouble, ignore_orphaned_waits, load_hivemind
from noloco_node.libp2p.reachability import preflight, preflight_goal
from noloco_node.libp2p.session import Session
from noloco_node.libp2p.settings import NetworkSettings, RunSecret, ensure_identity
from noloco_node.libp2p.stream import Stream
from noloco_node.libp2p.switchboard import PeerContext, Switchboard
from noloco_node.network.interface import Handler
from noloco_node.network.schema import Schema
from noloco_node.terminal import say

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


class Libp2pNetwork:
    """Implements `interface.PeerNetwork`; made by `Libp2pNetwork.open`."""

    def __init__(self, context: PeerContext, tell: Callable[[str], None]) -> None:
        self._settings, self._context, self._tell = context.settings, context, tell
        settings = context.settings
        self._switchboard = context.switchboard
        self._doors = [bootstrap_address(text) for text in settings.bootstrap]
        self._peer_id, self._dialable = "", True
        self._session: Session | None = None
        self._present = asyncio.Event()
        self._service: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS + 1)
        self._died = self._rejoined = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: NetworkSettings,
        tell: Callable[[str], None] = logger.warning,
        met: KnownPeers | None = None,
    ) -> AsyncIterator[Libp2pNetwork]:
        """Join the network for as long as the context; `UserError`, with what to try, when that cannot be.

        `tell` is called with a sentence when something happens that a person should know. Whom we meet is noted in
        `met`, and so may be known to the network that follows this one.
        """
        check_listen(settings.listen)
        check_announce(settings.announce)
        parts = load_hivemind()
        ignore_orphaned_waits(asyncio.get_running_loop())
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
        session = await self._now()
        try:
            stream = await session.dialer.dial(peer, topic, schema)
        except ConnectionResetError:
            if not await session.daemon.is_dead():
                raise
            # Nothing was said yet: the next session can say it.
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
            session = await self._now()
            try:
                await session.dialer.offer(topic)
            except ConnectionResetError:
                if not await session.daemon.is_dead():
                    raise
                # The next session offers all topics.
        except ConnectionError as error:
            # Nobody could ask us about it, and we would not know.
            raise daemon_trouble(str(error)) from None

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        try:
            session = await self._now()
        except ConnectionResetError:
            return False
        return await session.records.publish(key, subkey, value, lifetime_s)

    async def read(self, key: str) -> Mapping[str, bytes]:
        return await (await self._now()).records.read(key)

    async def read_all(self, keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
        async def read(key: str) -> Mapping[str, bytes] | None:
            with suppress(ConnectionError):
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
        """Return the multiaddrs under which others may reach us, each ending in /p2p/ID; those of this machine only
        if there are no others.
        """
        return await (await self._now()).addresses()

    @asynccontextmanager
    async def relaying(self, identities: Sequence[Path]) -> AsyncIterator[tuple[str, ...]]:
        """Run a relay for each identity, at the ports after our own, and tell the swarm of them; see `relays`."""
        chosen = relays.relay_configs(self._settings, identities)
        pool = relays.RelayPool(self._context, self._tell, self._granted)
        async with relays.relaying(pool, chosen) as places, asyncio.TaskGroup() as group:
            key = self._context.secret.key(RELAYS_KEY)
            telling = group.create_task(
                relays.tell(places, lambda raw, lifetime_s: self.publish(key, self.peer_id, raw, lifetime_s))
            )
            try:
                yield places
            finally:
                telling.cancel()

    def statistics(self) -> dict[str, int | float]:
        session = self._session
        records = {} if session is None else {"publish.failed": session.records.unpublished}
        rejoined = self._rejoined + (0 if session is None else session.rejoined)
        own = {"rejoined": rejoined, "daemon.died": self._died}
        return self._switchboard.statistics() | records | own

    # One session after another.

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
            config = await preflight(self._context, config, goal, self._tell)
        self._dialable = config.dialable
        self._service = asyncio.get_running_loop().create_task(self._serve(config), name="network")
        await self._wait_for_session(self._service, None)
        if self._service.done():
            self._service.result()

    async def _serve(self, config: DaemonConfig) -> None:
        """Answer streams and keep a session, until either fails."""
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(self._switchboard.run(started), name="switchboard")}
        try:
            await started.wait()
            self._switchboard.serve(
                reachability.TOPIC, reachability.SCHEMA, reachability.DialBackService(self._relays).answer
            )
            tasks.add(loop.create_task(self._keep(config), name="sessions"))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _keep(self, config: DaemonConfig) -> NoReturn:
        """Run one session after another; `UserError` when the first does not begin, or daemons die again and again."""
        loop, settings, attempts = asyncio.get_running_loop(), self._settings, 1
        while True:
            try:
                why = await self._live(config)
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

    async def _live(self, config: DaemonConfig) -> str:
        """Run one session until its daemon dies, and return the daemon's last words."""
        again = bool(self._peer_id)
        met = self._context.known_peers
        doors = met.beside(self._doors) if again else self._doors
        async with Session.open(self._context, config, doors, alone=again) as session:
            try:
                for topic in self._switchboard.topics:
                    await session.dialer.offer(topic)
                placed = again or await session.is_placed()
            except ConnectionError as error:
                raise daemon_trouble(str(error)) from None
            self._peer_id = session.peer_id
            if not placed:
                self._tell("no relay has given us a place yet: others may not reach us for some minutes")
            if again:
                self._tell(f"back in the swarm, {session.records.neighbours} neighbours in the DHT")
            staying = asyncio.get_running_loop().create_task(session.stay_joined(self._doors, met))
            self._session = session
            self._present.set()
            try:
                ends: set[asyncio.Future[Any]] = {session.daemon.died, staying}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if staying.done():
                    staying.result()
                return session.daemon.died.result()
            finally:
                staying.cancel()
                self._present.clear()
                self._session = None
                self._rejoined += session.rejoined

    async def _now(self) -> Session:
        """Return the session, waiting for the next where a daemon has just died; ConnectionResetError if in vain."""
        if self._session is not None and self._session.daemon.died.done():
            self._session = None
            self._present.clear()
        if self._session is None and self._service is not None and not self._service.done():
            await self._wait_for_session(self._service, self._settings.timeouts.return_s)
        if self._session is None:
            raise ConnectionResetError("our own libp2p daemon is gone")
        return self._session

    async def _wait_for_session(self, service: asyncio.Task[None], wait_s: float | None) -> None:
        present = asyncio.get_running_loop().create_task(self._present.wait())
        ends: set[asyncio.Future[Any]] = {present, service}
        try:
            await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            present.cancel()

    async def _granted(self, doors: Sequence[PeerAddress]) -> Grant:
        return await (await self._now()).granted(doors)

    async def _relays(self) -> tuple[str, ...]:
        """Return the relays that the swarm tells of, as far as we can find out now."""
        try:
            return relays_of(await self.read(self._context.secret.key(RELAYS_KEY)))
        except ConnectionError:
            return ()

    async def _close(self) -> None:
        self._switchboard.close()
        if self._service is not None:
            self._service.cancel()
            await asyncio.wait({self._service}, timeout=self._settings.timeouts.linger_s)


@asynccontextmanager
async def connected(settings: NetworkSettings, met: KnownPeers | None = None) -> AsyncIterator[Libp2pNetwork]:
    """Open the network by the bootstrap peers or, where none of them opens, by the peers that we met before.

    `met`: the peers that earlier networks of this peer met; this one adds those that it meets. The context ends with
    `UserError` should our libp2p daemon die again and again.
    """
    async with AsyncExitStack() as stack:
        try:
            network = await stack.enter_async_context(Libp2pNetwork.open(settings, say, met))
        except UserError as trouble:
            doors = tuple(dict.fromkeys((*settings.bootstrap, *(() if met is None else met.doors()))))
            if trouble.code is not Exit.UNREACHABLE or doors == settings.bootstrap:
                raise
            wider = msgspec.structs.replace(settings, bootstrap=doors)
            network = await stack.enter_async_context(Libp2pNetwork.open(wider, say, met))
            say("no bootstrap peer opened; back by way of peers that we met before")
        group = await stack.enter_async_context(asyncio.TaskGroup())
        watch = group.create_task(network.wait_daemon(), name="daemon watch")
        try:
            yield network
        finally:
            watch.cancel()
