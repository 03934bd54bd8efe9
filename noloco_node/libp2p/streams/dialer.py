"""Streams by way of one daemon: opened to peers, and accepted from them.

A stream is opened by one protobuf request on the daemon's control socket, and that socket then *is* the stream
(measured: 2 to 4 times the throughput of hivemind's own streams). Streams that others open arrive as connections to a
socket of ours, with the daemon's word on who they are and where they come from. The protocol's name contains the
version of the wire format and what follows from the run's id, so that a peer of another run does not even get a stream.
The first bytes that the caller sends prove that it knows the run (`run_secret`); without them nothing is answered.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import NamedTuple

from noloco_node.libp2p.daemon.control import Control, Preamble, delimited
from noloco_node.libp2p.daemon.process import Daemon
from noloco_node.libp2p.endpoint.addresses import KnownPeers, PeerAddress, place_text
from noloco_node.libp2p.endpoint.settings import PROOF_BYTES, RunSecret, TimeoutSettings
from noloco_node.libp2p.hivemind_compat import HivemindParts
from noloco_node.libp2p.streams.stream import Stream, StreamOpening
from noloco_node.libp2p.streams.switchboard import Switchboard
from noloco_node.network.schema import Schema

_PROOF_S = 20.0
"""For the proof to come, which callers send at once."""
_MOST_UNPROVEN = 256


class StreamContext(NamedTuple):
    """What outlives a daemon: streams and topics of this peer, whom it has met, the run's secret, how long to wait."""

    switchboard: Switchboard
    known_peers: KnownPeers
    secret: RunSecret
    timeouts: TimeoutSettings


class StreamDialer:
    """Opens and accepts streams as long as one daemon lives, under the peer id `me`."""

    def __init__(
        self, parts: HivemindParts, control: Control, daemon: Daemon, exchange: StreamContext, me: str
    ) -> None:
        self._parts, self._control, self._daemon, self._exchange, self._me = parts, control, daemon, exchange, me
        self._unproven: dict[StreamOpening, asyncio.TimerHandle] = {}
        """Streams of others until they have proved that they know the run, each with its deadline."""
        self._server: asyncio.Server | None = None
        self._offered: set[str] = set()

    async def listen(self) -> None:
        """Accept streams for the topics that the daemon is told of."""
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
        wanted = pb.StreamHandlerRequest(addr=place, proto=[self._exchange.secret.prefix + topic], balanced=False)
        request = pb.Request(type=pb.Request.STREAM_HANDLER, streamHandler=wanted)
        await self._control.ask(request, self._exchange.timeouts.dht_s)
        self._offered.add(topic)

    async def dial(self, peer: str, topic: str, schema: Schema) -> Stream:
        """Open a stream; ConnectionRefusedError when that cannot be, ConnectionResetError without a daemon."""
        pb, loop, timeouts = self._parts.messages, asyncio.get_running_loop(), self._exchange.timeouts
        opened: asyncio.Future[Stream] = loop.create_future()
        connection: StreamOpening | Stream

        def introduce(transport: asyncio.Transport, preamble: Preamble) -> None:
            nonlocal connection
            answer = pb.Response.FromString(bytes(preamble.content))
            if answer.type == pb.Response.ERROR:
                raise _refused(peer, topic, answer.error.msg)
            transport.write(self._exchange.secret.proof(self._me, peer, topic))
            connection = self._exchange.switchboard.call(transport, peer, topic, schema)
            if not opened.done():
                opened.set_result(connection)

        def lost(error: ConnectionError) -> None:
            if not opened.done():
                opened.set_exception(error)

        connection = opening = StreamOpening(introduce, lost)
        is_open = False
        wanted = pb.StreamOpenRequest(peer=self._parts.peer_bytes(peer), proto=[self._exchange.secret.prefix + topic])
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
                self._exchange.switchboard.unopened()
        return stream

    def close(self) -> None:
        """Accept no more streams."""
        if self._server is not None:
            self._server.close()

    def _answer(self, transport: asyncio.Transport, preamble: Preamble) -> None:
        """Pass on a stream that a peer has opened, who knows the run."""
        arrival = self._parts.messages.StreamInfo.FromString(bytes(preamble.content))
        origin, peer = place_text(arrival.addr), self._parts.peer_text(arrival.peer)
        secret = self._exchange.secret
        topic = str(arrival.proto).removeprefix(secret.prefix)
        if not hmac.compare_digest(preamble.proof, secret.proof(peer, self._me, topic)):
            raise ConnectionRefusedError(f"{peer} does not know the run")
        if origin:
            self._exchange.known_peers.note([PeerAddress(origin, peer)])
        self._exchange.switchboard.answer(transport, peer, topic, origin)


def _refused(peer: str, topic: str, words: str) -> ConnectionRefusedError:
    if "protocols not supported" in words:
        return ConnectionRefusedError(f"{peer} does not speak of {topic!r} in this run or version")
    return ConnectionRefusedError(f"{peer} cannot be reached: {' '.join(words.split())}")
