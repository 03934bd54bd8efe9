"""What we say to the libp2p daemon on its control socket: one protobuf request a connection, one answer in that form.

Each message has its length before it, as a varint: `Preamble` collects one where bytes come as they like. The daemon
must never keep us waiting: each answer has a deadline, and the daemon's death ends the wait.

One question goes through the daemon to a relay: what it grants for each circuit. p2pd sets its relay service up twice,
with the limits that it was started with and with libp2p's own, and the later one counts: of relays started on a busy
machine, every fourth ended each circuit after 128 KiB or two minutes. It prints nothing about that. But a peer that
reserves a place at a relay is told (libp2p's circuit protocol, version 2), so a neighbour reserves one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from multiaddr import Multiaddr

from noloco_node.libp2p.addresses import PeerAddress, place_text, plain_cause
from noloco_node.libp2p.daemon import Daemon, start_daemon
from noloco_node.libp2p.hivemind_compat import DaemonClient, HivemindParts, daemon_trouble, disconnect
from noloco_node.network.schema import Violation

T = TypeVar("T")
_MOMENT_S = 2.0
"""For other peers to answer once one has."""
_LATE = "it did not answer while others did"
_ANSWER_BYTES = 1 << 20
_PREAMBLE_BYTES = 64 * 1024


HOP = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = b"\x02\x08\x00"
"""A message of two bytes: field 1, the kind, is 0."""
_LIMIT, _STATUS, _OK = 4, 5, 100
_DURATION, _DATA = 1, 2


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


class Grant(NamedTuple):
    """How long a circuit lasts (seconds), and how many bytes it carries each way; 0: without limit."""

    duration_s: int
    data_bytes: int

    def covers(self, wanted: Grant) -> bool:
        return all(given == 0 or 0 < least <= given for given, least in zip(self, wanted, strict=True))


class Control:
    """Asks a daemon."""

    def __init__(self, parts: HivemindParts, daemon: Daemon) -> None:
        self.parts, self.daemon = parts, daemon

    @classmethod
    @asynccontextmanager
    async def start(
        cls, parts: HivemindParts, arguments: Sequence[str], directory: Path, start_s: float
    ) -> AsyncIterator[tuple[Self, DaemonClient]]:
        """Run a daemon for as long as the context, with hivemind's P2P on it, without which it would end.

        Raises `UserError` (Exit.DAEMON) when it does not start or does not answer.
        """
        async with start_daemon(parts.binary, arguments, directory, start_s) as daemon:
            control = cls(parts, daemon)
            try:
                client = await control.bounded(parts.connect(daemon.control_path), start_s)
            except ConnectionError as error:
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
        async with self._connected(wait_s) as (reader, writer):
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

    async def granted(self, relay: str, wait_s: float) -> Grant:
        """Reserve a place at a relay that the daemon is connected with, and return what it grants.

        Raises ConnectionError where it does not answer, refuses, or is no relay.
        """
        pb = self.parts.messages
        wanted = pb.StreamOpenRequest(peer=self.parts.peer_bytes(relay), proto=[HOP])
        async with self._connected(wait_s) as (reader, writer):
            writer.write(delimited(pb.Request(type=pb.Request.STREAM_OPEN, streamOpen=wanted)))
            opened = pb.Response.FromString(await read_delimited(reader))
            if opened.type == opened.ERROR:
                raise ConnectionRefusedError(f"{relay} relays for nobody: {opened.error.msg}")
            writer.write(_RESERVE)
            return grant_of(await read_delimited(reader))

    @asynccontextmanager
    async def _connected(self, wait_s: float) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
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


def grant_of(raw: bytes) -> Grant:
    """Return the limits in an answer to a reservation; ConnectionRefusedError where it is none."""
    answer = _fields(raw)
    if answer.get(_STATUS) != _OK:
        raise ConnectionRefusedError(f"the relay gives no place (status {answer.get(_STATUS)})")
    limit = answer.get(_LIMIT, b"")
    found = _fields(limit) if isinstance(limit, bytes) else {}
    duration_s, data_bytes = (found.get(field, 0) for field in (_DURATION, _DATA))
    if not isinstance(duration_s, int) or not isinstance(data_bytes, int):
        raise ConnectionRefusedError("the relay's answer is malformed")
    return Grant(duration_s, data_bytes)


def _fields(raw: bytes) -> dict[int, Any]:
    try:
        message = Empty.FromString(raw)
    except DecodeError:
        raise ConnectionRefusedError("the relay's answer is malformed") from None
    return {field.field_number: field.data for field in UnknownFieldSet(message)}
