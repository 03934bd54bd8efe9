"""What we ask of the libp2p daemon: one protobuf request a connection to its control socket, one answer in that form.

Each message has its length before it, as a varint: `Preamble` collects one where bytes come as they like. The daemon
must never keep us waiting: each answer has a deadline, and the daemon's death ends the wait.

**Streams.** `StreamDialer` opens a stream by one request, and the connection then *is* the stream (measured: 2 to 4
times the throughput of hivemind's own streams). Streams of others arrive as connections to a socket of ours, with the
daemon's word on who they are and where they come from. `StreamOpening` waits for the daemon's first message, then the
switchboard makes a `Stream` of the connection. The protocol's name contains the version of the wire format and what
follows from the run's id, so that a peer of another run does not even get a stream. The first bytes that the caller
sends prove that it knows the run; without them nothing is answered.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

from multiaddr import Multiaddr

from noloco_node.admission.ticket import Right
from noloco_node.libp2p.addresses import KnownPeers, PeerAddress, place_text, plain_cause, unreachable
from noloco_node.libp2p.daemon import Daemon, start_daemon
from noloco_node.libp2p.hivemind_compat import DaemonClient, HivemindParts, daemon_trouble, disconnect
from noloco_node.libp2p.settings import PROOF_BYTES, NetworkSettings, RunSecret
from noloco_node.libp2p.stream import Stream
from noloco_node.libp2p.switchboard import Switchboard
from noloco_node.network.interface import UnknownTopic
from noloco_node.network.schema import Schema, Violation

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MOMENT_S = 2.0  # once one peer has answered, the others have so long
_LATE = "it did not answer while others did"
_ANSWER_BYTES = 1 << 20
_PREAMBLE_BYTES = 64 * 1024
_PROOF_S = 20.0  # the proof, which callers send at once, has so long to come
_MOST_UNPROVEN = 256


def delimited(message: Any) -> bytes:
    content: bytes = message.SerializeToString()
    length, prefix = len(content), bytearray()
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*prefix, length]) + content


async def read_delimited(reader: asyncio.StreamReader) -> bytes:
    """Read one message with its length before it; a ConnectionError when the daemon stops in the middle."""
    preamble, is_whole = Preamble(_ANSWER_BYTES), False
    try:
        while not is_whole:
            wanted = preamble.wants()
            wanted[:] = await reader.readexactly(len(wanted))
            is_whole = preamble.got(len(wanted))
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the daemon did not finish its answer") from None
    return bytes(preamble.content)


class Preamble:
    """Collects the daemon's first message on a stream: a length as a varint, then so many bytes.

    Behind it the other peer's own first `proof_bytes`, if any.
    """

    def __init__(self, most_bytes: int = _PREAMBLE_BYTES, proof_bytes: int = 0) -> None:
        self._most_bytes, self.proof = most_bytes, bytearray(proof_bytes)
        self._length = self._shift = 0
        self._counting, self._proving = True, False
        self.content = bytearray(1)
        self._view = memoryview(self.content)

    def wants(self) -> memoryview:
        return self._view

    def got(self, count: int) -> bool:
        """Note so many bytes; say whether all is complete."""
        self._view = self._view[count:]
        if self._view:
            return False
        if not self._counting:
            return self._is_proven()
        byte = self.content[0]
        self._length |= (byte & 0x7F) << self._shift
        self._shift += 7
        self._counting = byte >= 0x80
        if self._length > self._most_bytes or (self._counting and self._shift > 28):
            raise Violation(f"the daemon announces a message of {self._length} bytes")
        self.content = bytearray(1 if self._counting else self._length)
        self._view = memoryview(self.content)
        return not self._counting and self._length == 0 and self._is_proven()

    def _is_proven(self) -> bool:
        """Say whether the proof is there as well, or make room for it."""
        if self._proving or not self.proof:
            return True
        self._proving, self._view = True, memoryview(self.proof)
        return False


class Control:
    """Asks a daemon."""

    def __init__(self, parts: HivemindParts, daemon: Daemon) -> None:
        self.parts, self.daemon = parts, daemon

    @classmethod
    @asynccontextmanager
    async def start(
        cls, parts: HivemindParts, arguments: Sequence[str], directory: Path, start_s: float, processors: int = 0
    ) -> AsyncIterator[tuple[Self, DaemonClient]]:
        """Run a daemon for as long as the context, with hivemind's P2P on it, without which it would end.

        `processors`: as in `start_daemon`.

        Raises `UserError` (Exit.DAEMON) when it does not start or does not answer.
        """
        async with start_daemon(parts.binary, arguments, directory, start_s, processors) as daemon:
            control = cls(parts, daemon)
            try:
                client = await control.bounded(parts.connect(daemon.control_path), start_s)
            except (OSError, EOFError) as error:  # it may die at any word
                raise daemon_trouble(str(error)) from None
            try:
                yield control, client
            finally:
                await disconnect(client)

    async def ask(self, request: Any, wait_s: float) -> Any:
        """Make one request.

        Raises ConnectionRefusedError with the daemon's words when it says no, ConnectionAbortedError when it does not
        answer in time, ConnectionResetError when it is gone.
        """
        async with self.connected(wait_s) as (reader, writer):
            writer.write(delimited(request))
            await writer.drain()
            answer = self.parts.messages.Response.FromString(await read_delimited(reader))
        if answer.type == answer.ERROR:
            raise ConnectionRefusedError(answer.error.msg)
        return answer

    async def places(self, wait_s: float) -> list[str]:
        """Return the addresses that the daemon knows of itself, without its peer id."""
        request = self.parts.messages.Request
        answer = await self.ask(request(type=request.IDENTIFY), wait_s)
        return [place for place in map(place_text, answer.identify.addrs) if place]

    async def connect(self, address: PeerAddress, wait_s: float) -> str | None:
        """Connect the daemon to one address; return None, or in plain words the cause of the failure."""
        pb, peer = self.parts.messages, self.parts.peer_bytes(address.peer)
        wanted = pb.ConnectRequest(peer=peer, addrs=[Multiaddr(address.transport).to_bytes()])
        try:
            await self.ask(pb.Request(type=pb.Request.CONNECT, connect=wanted), wait_s)
        except ConnectionAbortedError:
            return f"no answer within {wait_s:g} s (is a firewall in between?)"
        except ConnectionRefusedError as error:
            return plain_cause(str(error), address)
        return None

    async def connect_all(self, doors: Sequence[PeerAddress], wait_s: float) -> dict[PeerAddress, str | None]:
        """Connect to addresses at once; return for each None or the cause of its failure.

        Once one has answered, the others have a moment left: the dead do not hold us up.
        """
        knocks = {asyncio.ensure_future(self.connect(address, wait_s)): address for address in doors}
        pending = set(knocks)
        try:
            while pending:
                answered = any(task.done() and task.result() is None for task in knocks)
                done, pending = await asyncio.wait(
                    pending, timeout=_MOMENT_S if answered else None, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
            return {address: task.result() if task.done() else _LATE for task, address in knocks.items()}
        finally:
            for task in knocks:
                task.cancel()
            # Where our daemon died all have failed alike, and one of them is raised.
            await asyncio.gather(*knocks, return_exceptions=True)

    async def knock(self, doors: Sequence[PeerAddress], wait_s: float, level: int = logging.DEBUG) -> list[PeerAddress]:
        """Connect to peers and return those that answered; `UserError` when there are some and none did.

        The failures of peers that answer nowhere are logged; an invite also names earlier addresses of others.
        """
        causes = await self.connect_all(doors, wait_s)
        reached = [address for address, cause in causes.items() if cause is None]
        failed = {address: cause for address, cause in causes.items() if cause is not None}
        if failed and not reached:
            raise unreachable({str(address): cause for address, cause in failed.items()})
        peers = {address.peer for address in reached}
        for address, cause in failed.items():
            if address.peer not in peers:
                logger.log(level, "Of the ways into the swarm %s cannot be reached: %s", address, cause)
        return reached

    @asynccontextmanager
    async def connected(self, wait_s: float) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Hold a connection for one exchange; ConnectionAbortedError where that takes longer than `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                reader, writer = await self.reach(asyncio.open_unix_connection(self.daemon.control_path))
                try:
                    yield reader, writer
                finally:
                    writer.close()
        except TimeoutError:
            raise ConnectionAbortedError(f"no answer within {wait_s:g} s") from None

    async def reach(self, connecting: Coroutine[Any, Any, T]) -> T:
        """Connect to the daemon; ConnectionResetError when it is gone: our loss is no fault of the peer we want."""
        try:
            return await connecting
        except OSError as error:
            raise ConnectionResetError(f"our own libp2p daemon cannot be reached: {error.strerror}") from None

    async def bounded(self, call: Coroutine[Any, Any, T], wait_s: float) -> T:
        """Await a call that may hang for ever: no longer than `wait_s` seconds, nor than the daemon lives."""
        task = asyncio.get_running_loop().create_task(call)
        ends: set[asyncio.Future[Any]] = {task, self.daemon.died}
        try:
            await asyncio.wait(ends, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self.daemon.died.done():
                raise ConnectionResetError(f"our own libp2p daemon died: {self.daemon.died.result()}")
            raise ConnectionAbortedError(f"no answer within {wait_s:g} s")
        finally:
            task.cancel()


class StreamOpening(asyncio.BufferedProtocol):
    """A connection to the daemon until the daemon's first message has come.

    `introduce` is called once with that message, and makes a `Stream` of the connection or raises a ConnectionError;
    `lost` is called with the error when there will be no stream. `proof_bytes`: of the other peer, behind that message.
    """

    def __init__(
        self,
        introduce: Callable[[asyncio.Transport, Preamble], None],
        lost: Callable[[ConnectionError], None] = lambda _: None,
        proof_bytes: int = 0,
    ) -> None:
        self._introduce, self._lost = introduce, lost
        self._preamble = Preamble(proof_bytes=proof_bytes)
        self._transport: asyncio.Transport | None = None
        self._is_over = False

    def break_off(self, error: ConnectionError) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()
        self._lost(error)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._preamble.wants()

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_over or self._transport is None:
            return
        try:
            if self._preamble.got(nbytes):
                self._introduce(self._transport, self._preamble)
                self._is_over = True
        except ConnectionError as error:
            self.break_off(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.break_off(ConnectionResetError("the stream with the daemon broke"))


class PeerContext(NamedTuple):
    """What outlives a daemon of this peer: hivemind's parts, a directory for sockets, settings and the run's secret,
    streams and topics, and whom it has met."""

    parts: HivemindParts
    directory: Path
    settings: NetworkSettings
    secret: RunSecret
    switchboard: Switchboard
    known_peers: KnownPeers

    def is_of_run(self, peer: str) -> bool:
        """Say whether to meet a peer again: in a run with an owner a member, or a peer that we are told to join by.

        Others may be strangers, and a peer that we greet is a neighbour in the DHT, which is given records to keep.
        """
        admission, told = self.settings.admission, self.settings.bootstrap
        return admission is None or Right.TRAIN in admission.rights(peer) or any(each.endswith(peer) for each in told)

    def start(
        self, arguments: Sequence[str], processors: int = 0
    ) -> AbstractAsyncContextManager[tuple[Control, DaemonClient]]:
        """Run a daemon of ours; see `Control.start`."""
        return Control.start(self.parts, arguments, self.directory, self.settings.timeouts.start_s, processors)


class StreamDialer:
    """Opens and accepts streams as long as one daemon lives, under the peer id `me`."""

    def __init__(self, control: Control, context: PeerContext, me: str) -> None:
        self._control, self._context, self._me = control, context, me
        self._parts, self._daemon, self._secret = control.parts, control.daemon, context.secret
        self._timeouts = context.settings.timeouts
        self._unproven: dict[StreamOpening, asyncio.TimerHandle] = {}
        """Streams of others until they have proved that they know the run, each with its deadline."""
        self._server: asyncio.Server | None = None
        self._offered: set[str] = set()

    async def listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(self._opening, self._daemon.stream_path)

    def _opening(self) -> StreamOpening:
        """Return a stream that a peer opens, which is over where no proof comes in time."""

        def over(_: ConnectionError | None = None) -> None:
            if timer := self._unproven.pop(opening, None):
                timer.cancel()

        def introduce(transport: asyncio.Transport, preamble: Preamble) -> None:
            over()
            self._answer(transport, preamble)

        opening = StreamOpening(introduce, over, PROOF_BYTES)
        late = ConnectionResetError("it did not prove in time that it knows the run")
        timer = asyncio.get_running_loop().call_later(_PROOF_S, opening.break_off, late)
        self._unproven[opening] = timer
        if len(self._unproven) > _MOST_UNPROVEN:
            next(iter(self._unproven)).break_off(late)
        return opening

    async def offer(self, topic: str) -> None:
        """Tell the daemon that we answer streams about `topic`; once, for it refuses to be told again."""
        if topic in self._offered:
            return
        pb = self._parts.messages
        # hivemind's Multiaddr, for it encodes the path of a Unix socket as the daemon reads it.
        place = self._parts.Multiaddr(f"/unix{self._daemon.stream_path}").to_bytes()
        wanted = pb.StreamHandlerRequest(addr=place, proto=[self._secret.prefix + topic], balanced=False)
        request = pb.Request(type=pb.Request.STREAM_HANDLER, streamHandler=wanted)
        await self._control.ask(request, self._timeouts.dht_s)
        self._offered.add(topic)

    async def dial(self, peer: str, topic: str, schema: Schema) -> Stream:
        """Open a stream; ConnectionRefusedError when that cannot be, ConnectionResetError without a daemon."""
        pb, loop, timeouts = self._parts.messages, asyncio.get_running_loop(), self._timeouts
        opened: asyncio.Future[Stream] = loop.create_future()
        connection: StreamOpening | Stream

        def introduce(transport: asyncio.Transport, preamble: Preamble) -> None:
            nonlocal connection
            answer = pb.Response.FromString(bytes(preamble.content))
            if answer.type == pb.Response.ERROR:
                raise _refused(peer, topic, answer.error.msg)
            transport.write(self._secret.proof(self._me, peer, topic))
            connection = self._context.switchboard.call(transport, peer, topic, schema)
            if not opened.done():
                opened.set_result(connection)

        def lost(error: ConnectionError) -> None:
            if not opened.done():
                opened.set_exception(error)

        connection = opening = StreamOpening(introduce, lost)
        is_open = False
        wanted = pb.StreamOpenRequest(peer=self._parts.peer_bytes(peer), proto=[self._secret.prefix + topic])
        try:
            async with asyncio.timeout(timeouts.open_s):
                connecting = loop.create_unix_connection(lambda: opening, self._daemon.control_path)
                transport, _ = await self._control.reach(connecting)
                transport.write(delimited(pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=wanted)))
                stream = await opened
            is_open = True
        except TimeoutError:
            raise ConnectionRefusedError(f"{peer} did not accept a stream within {timeouts.open_s:g} s") from None
        finally:
            opened.cancel()
            if not opened.cancelled():
                opened.exception()  # asked for, or asyncio would complain that nobody did
            if not is_open:
                # Also where it opened in the very moment in which we were cancelled.
                connection.break_off(ConnectionResetError("the stream was not opened"))
                self._context.switchboard.unopened()
        return stream

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _answer(self, transport: asyncio.Transport, preamble: Preamble) -> None:
        arrival = self._parts.messages.StreamInfo.FromString(bytes(preamble.content))
        origin, peer = place_text(arrival.addr), self._parts.peer_text(arrival.peer)
        topic = str(arrival.proto).removeprefix(self._secret.prefix)
        if not hmac.compare_digest(preamble.proof, self._secret.proof(peer, self._me, topic)):
            raise ConnectionRefusedError(f"{peer} does not know the run")
        if origin and self._context.is_of_run(peer):
            self._context.known_peers.note([PeerAddress(origin, peer)])
        self._context.switchboard.answer(transport, peer, topic, origin)


def _refused(peer: str, topic: str, words: str) -> ConnectionRefusedError:
    if "protocols not supported" in words:
        return UnknownTopic(f"{peer} does not speak of {topic!r} in this run or version")
    return ConnectionRefusedError(f"{peer} cannot be reached: {' '.join(words.split())}")
