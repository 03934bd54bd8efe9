"""The network over libp2p: conversations on raw streams, records in hivemind's DHT, one daemon, one event loop.

This is the only module that knows hivemind. It uses three parts of it: the daemon program p2pd with its protobuf
messages, `P2P` (which the DHT speaks through), and `DHTNode`. It uses neither `hivemind.DHT` (a forked process) nor its
averager.

hivemind is loaded without torch. `import hivemind` would load torch and scipy, seconds and hundreds of megabytes that a
bootstrap peer or `status` has no use for; the parts named above need neither. So its package and two subpackages are
entered in `sys.modules` as shells, which know where their modules lie but do not run their `__init__`. If somebody has
imported hivemind already, nothing is replaced.

Conversations do not pass through hivemind: a stream is opened by one protobuf request on the daemon's control socket,
and that socket then *is* the stream (measured: 2 to 4 times the throughput of hivemind's own streams). The protocol's
name contains the version of the wire format and the run's id, so that a peer of another run does not even get a stream.

The daemon is told of no bootstrap peers; we connect it to each ourselves. Its own way ends in one message for a closed
port, an unknown host and a wrong peer id; asked about one address, it says exactly which it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
from multiaddr import Multiaddr

from noloco_node.errors import Exit, Trouble
from noloco_node.libp2p.addresses import PeerAddress, beyond_this_machine, check_announce, check_listen
from noloco_node.libp2p.control import Control, delimited
from noloco_node.libp2p.daemon import Daemon, start_daemon
from noloco_node.libp2p.identity import ensure_identity
from noloco_node.libp2p.reach import bootstrap_address, plain_cause, unreachable
from noloco_node.libp2p.records import Records, overlook_orphans
from noloco_node.libp2p.stream import Patience, Stream
from noloco_node.libp2p.switchboard import Capacity, Switchboard
from noloco_node.port import Handler
from noloco_node.wire import Schema

logger = logging.getLogger(__name__)

_REJOIN_S = 15.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer's network needs to know. Addresses are multiaddrs."""

    prefix: str
    """Begins every protocol name: wire version and run id. Peers with another prefix cannot converse with us."""
    identity: Path | None = None
    """The key file, created when absent; None for a new identity each time."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    """Where others can reach us, when the daemon cannot find that out itself."""
    bootstrap: tuple[str, ...] = ()
    """Peers to join by, each ending in /p2p/ID; none to begin a new network."""
    patience: Patience = Patience()
    capacity: Capacity = Capacity()


class Libp2p:
    """Implements `port.Network`; made by `Libp2p.open`."""

    def __init__(self, settings: Settings, daemon: Daemon, hivemind: _Hivemind) -> None:
        self._settings, self._daemon, self._hivemind = settings, daemon, hivemind
        self._control = Control(daemon, hivemind.messages)
        self._switchboard = Switchboard(settings.patience, settings.capacity)
        self._p2p: Any = None
        self._records = Records(self._control, settings.patience.dht_s)
        self._server: asyncio.Server | None = None
        self._service: asyncio.Task[None] | None = None
        self._unopened = self._rejoined = 0

    def __repr__(self) -> str:
        return f"Libp2p({self.peer_id}, {self._switchboard!r})"

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[Libp2p]:
        """Join the network for as long as the context; Trouble, with what to try, when that cannot be."""
        check_listen(settings.listen)
        check_announce(settings.announce)
        bootstrap = [bootstrap_address(text) for text in settings.bootstrap]
        if settings.identity is not None:
            ensure_identity(settings.identity)
        hivemind = _load_hivemind()
        overlook_orphans(asyncio.get_running_loop())
        patience = settings.patience
        async with start_daemon(hivemind.binary, _arguments(settings), patience.start_s) as daemon:
            network = cls(settings, daemon, hivemind)
            try:
                await network._start(bootstrap)
                yield network
            finally:
                await network._close()

    # What port.Network promises.

    @property
    def peer_id(self) -> str:
        """Our own peer id in base 58."""
        return "" if self._p2p is None else str(self._p2p.peer_id.to_base58())

    @asynccontextmanager
    async def talk(self, peer: str, topic: str, schema: Schema) -> AsyncIterator[Stream]:
        """Open a conversation; see `port.Network.talk`."""
        stream = await self._dial(peer, topic, schema)
        try:
            yield stream
        except BaseException:
            stream.break_off(ConnectionResetError("this side left the conversation"))
            raise
        stream.leave()

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        """Answer conversations about `topic`; see `port.Network.serve`."""
        pb = self._hivemind.messages
        self._switchboard.serve(topic, schema, handler)
        # hivemind's Multiaddr, for it encodes the path of a Unix socket as the daemon reads it.
        place = self._hivemind.Multiaddr(f"/unix{self._daemon.stream_path}").to_bytes()
        wanted = pb.StreamHandlerRequest(addr=place, proto=[self._settings.prefix + topic], balanced=False)
        await self._control.ask(
            pb.Request(type=pb.Request.STREAM_HANDLER, streamHandler=wanted), self._settings.patience.dht_s
        )

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """Store a record; see `port.Network.publish`."""
        return await self._records.publish(key, subkey, value, lifetime_s)

    async def read(self, key: str) -> Mapping[str, bytes]:
        """Return the live records under `key`; ConnectionAbortedError when the DHT does not answer in time."""
        return await self._records.read(key)

    # What the shell needs besides.

    async def wait_daemon(self) -> NoReturn:
        """Wait until the daemon, or our own service, is no more, and raise Trouble: to be awaited all the time."""
        assert self._service is not None
        ends: set[asyncio.Future[Any]] = {self._daemon.died, self._service}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self._service.done() and not self._service.cancelled():
            self._service.result()
        raise Trouble(
            "The libp2p daemon died.",
            why=f"its last words: {self._daemon.died.result()}" if self._daemon.died.done() else "it was stopped",
            attempt="start the node again; if it happens again, look for a lack of memory in the system's log",
            code=Exit.DAEMON,
        )

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs under which others may reach us, each ending in /p2p/ID; those of this machine only
        if there are no others.
        """
        pb = self._hivemind.messages
        answer = await self._control.ask(pb.Request(type=pb.Request.IDENTIFY), self._settings.patience.dht_s)
        places = [str(Multiaddr(place)) for place in answer.identify.addrs]
        return tuple(f"{place}/p2p/{self.peer_id}" for place in beyond_this_machine(places) or places)

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start: conversations, bytes by topic, violations, failures of our own."""
        own = {"conversations.unopened": self._unopened, "rejoined": self._rejoined}
        return self._switchboard.statistics() | self._records.statistics() | own

    # Starting and stopping.

    async def _start(self, bootstrap: Sequence[PeerAddress]) -> None:
        patience = self._settings.patience
        try:
            connect = self._hivemind.P2P.replicate(self._hivemind.Multiaddr(f"/unix{self._daemon.control_path}"))
            self._p2p = await self._control.bounded(connect, patience.start_s)
            if not await self.addresses():
                raise _daemon_trouble("it listens on none of the addresses asked for")
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: Stream(patience, self._welcome, self._switchboard.lost), self._daemon.stream_path
            )
            reached = await self._reach(bootstrap)
            await self._records.join(self._hivemind.DHTNode, self._p2p, reached, patience.start_s)
        except ConnectionError as error:
            raise _daemon_trouble(str(error)) from None
        if bootstrap and not self._records.neighbours:
            raise unreachable({str(address): "it answers, but takes no part in our DHT" for address in reached})
        started = asyncio.Event()
        self._service = asyncio.get_running_loop().create_task(self._serve_streams(started), name="network")
        await started.wait()

    async def _reach(self, bootstrap: Sequence[PeerAddress]) -> list[PeerAddress]:
        """Connect to the bootstrap peers and return those that answered; Trouble when there are some and none did."""
        causes = await asyncio.gather(*(self._connect(address) for address in bootstrap))
        failed = {str(address): cause for address, cause in zip(bootstrap, causes, strict=True) if cause is not None}
        if failed and len(failed) == len(bootstrap):
            raise unreachable(failed)
        for address, cause in failed.items():
            logger.warning("Bootstrap peer %s cannot be reached: %s", address, cause)
        return [address for address, cause in zip(bootstrap, causes, strict=True) if cause is None]

    async def _connect(self, address: PeerAddress) -> str | None:
        """Connect the daemon to one address; return None, or the cause of the failure."""
        pb = self._hivemind.messages
        wanted = pb.ConnectRequest(peer=self._peer_bytes(address.peer), addrs=[Multiaddr(address.transport).to_bytes()])
        reach_s = self._settings.patience.reach_s
        try:
            await self._control.ask(pb.Request(type=pb.Request.CONNECT, connect=wanted), reach_s)
        except ConnectionAbortedError:
            return f"no answer within {reach_s:g} s (is a firewall in between?)"
        except ConnectionRefusedError as error:
            return plain_cause(str(error), address)
        return None

    async def _serve_streams(self, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._switchboard.run(started), name="switchboard")
            group.create_task(self._stay_joined(), name="rejoin")

    async def _stay_joined(self) -> None:
        """Look for the bootstrap peers again whenever nobody is connected, as after a night in sleep mode."""
        pb = self._hivemind.messages
        bootstrap = [bootstrap_address(text) for text in self._settings.bootstrap]
        while bootstrap:
            await asyncio.sleep(_REJOIN_S)
            with contextlib.suppress(ConnectionError, Trouble):
                if (await self._control.ask(pb.Request(type=pb.Request.LIST_PEERS), _REJOIN_S)).peers:
                    continue
                for address in await self._reach(bootstrap):
                    self._rejoined += 1
                    await self._records.greet(self._hivemind.PeerID.from_base58(address.peer))

    async def _close(self) -> None:
        """Let go of everything but the daemon itself, which its own context ends; what need not wait comes first."""
        if self._server is not None:
            self._server.close()
        self._switchboard.close()
        try:
            if self._service is not None:
                self._service.cancel()
                await asyncio.wait({self._service}, timeout=self._settings.patience.linger_s)
            await self._records.close()
        finally:
            if self._p2p is not None:
                await self._p2p.shutdown()

    # Conversations.

    async def _dial(self, peer: str, topic: str, schema: Schema) -> Stream:
        """Open a stream; ConnectionRefusedError when that cannot be, ConnectionResetError without a daemon."""
        pb, loop, patience = self._hivemind.messages, asyncio.get_running_loop(), self._settings.patience
        opened: asyncio.Future[None] = loop.create_future()

        def introduce(stream: Stream, raw: bytes) -> None:
            answer = pb.Response.FromString(raw)
            if answer.type == pb.Response.ERROR:
                stream.break_off(_refused(peer, topic, answer.error.msg))
            else:
                self._switchboard.call(stream, peer, topic, schema)
                opened.set_result(None)

        def lost(stream: Stream, error: ConnectionError | None) -> None:
            if not opened.done():
                opened.set_exception(error or ConnectionResetError("the stream broke"))
            self._switchboard.lost(stream, error)

        stream = Stream(patience, introduce, lost)
        wanted = pb.StreamOpenRequest(peer=self._peer_bytes(peer), proto=[self._settings.prefix + topic])
        try:
            async with asyncio.timeout(patience.open_s):
                connecting = loop.create_unix_connection(lambda: stream, self._daemon.control_path)
                await self._control.reach(connecting)
                stream.write_raw(delimited(pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=wanted)))
                await opened
        except TimeoutError:
            raise ConnectionRefusedError(f"{peer} did not accept a stream within {patience.open_s:g} s") from None
        finally:
            if not opened.done():
                opened.cancel()
            if opened.cancelled() or opened.exception() is not None:
                stream.break_off(ConnectionResetError("the stream was not opened"))
                self._unopened += 1
        return stream

    def _welcome(self, stream: Stream, raw: bytes) -> None:
        """Pass on a stream that a peer has opened."""
        arrival = self._hivemind.messages.StreamInfo.FromString(raw)
        peer = str(self._hivemind.PeerID(arrival.peer).to_base58())
        self._switchboard.answer(stream, peer, str(arrival.proto).removeprefix(self._settings.prefix))

    def _peer_bytes(self, peer: str) -> bytes:
        try:
            return bytes(self._hivemind.PeerID.from_base58(peer).to_bytes())
        except ValueError:
            raise ConnectionRefusedError(f"{peer!r} is no peer id") from None


class _Hivemind(NamedTuple):
    """The parts of hivemind in use."""

    P2P: Any
    PeerID: Any
    Multiaddr: Any
    DHTNode: Any
    messages: Any
    binary: str


@functools.cache
def _load_hivemind() -> _Hivemind:
    """Import the parts in use, quietly, and without torch (see the module's docstring)."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        raise _daemon_trouble("the package hivemind is not installed")
    root = os.path.dirname(spec.origin)
    if "hivemind" not in sys.modules:
        utils = {
            "MSGPackSerializer": "serializer",
            "SerializerBase": "serializer",
            "get_logger": "logging",
            "DHTExpiration": "timed_storage",
            "get_dht_time": "timed_storage",
        }
        _enter_shell("hivemind", root, {})
        _enter_shell("hivemind.utils", f"{root}/utils", {name: f"hivemind.utils.{m}" for name, m in utils.items()})
        _enter_shell("hivemind.dht", f"{root}/dht", {})
    from hivemind.dht.node import DHTNode
    from hivemind.p2p.p2p_daemon import P2P
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
    from hivemind.proto import p2pd_pb2
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr as OwnMultiaddr

    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process
    return _Hivemind(P2P, PeerID, OwnMultiaddr, DHTNode, p2pd_pb2, f"{root}/hivemind_cli/p2pd")


def _enter_shell(name: str, path: str, names: Mapping[str, str]) -> None:
    """Enter a package in `sys.modules` whose modules can be imported and whose `__init__` is not run."""
    shell = types.ModuleType(name)
    shell.__path__ = [path]
    shell.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def find(attribute: str) -> Any:
        if attribute in names:
            return getattr(importlib.import_module(names[attribute]), attribute)
        raise AttributeError(attribute)

    shell.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[name] = shell


def _arguments(settings: Settings) -> list[str]:
    """Return what p2pd is started with: a full member of libp2p's DHT, where peers find each other's addresses."""
    arguments = [
        f"-hostAddrs={','.join(settings.listen)}",
        "-dhtServer=1",
        "-tls=1",
        "-autonat=1",
        "-connManager=1",
        "-relay=1",
        f"-natPortMap={int(bool(beyond_this_machine(settings.listen)))}",
        "-idleTimeout=30s",
    ]
    if settings.announce:
        arguments.append(f"-announceAddrs={','.join(settings.announce)}")
    if settings.identity is not None:
        arguments.append(f"-id={settings.identity}")
    return arguments


def _refused(peer: str, topic: str, words: str) -> ConnectionRefusedError:
    if "protocols not supported" in words:
        return ConnectionRefusedError(f"{peer} does not speak of {topic!r} in this run or version")
    return ConnectionRefusedError(f"{peer} cannot be reached: {' '.join(words.split())}")


def _daemon_trouble(why: str) -> Trouble:
    return Trouble(
        "The libp2p daemon did not work.",
        why=why,
        attempt="start again; if it happens again, reinstall hivemind, whose package holds the daemon",
        code=Exit.DAEMON,
    )
