"""All conversations of this peer: opened and accepted by way of a daemon, answered, and what happens when one is lost.

A stream that a peer opens gets a task of its own, which runs the topic's handler. A stream that breaks cancels that
task; a handler that fails ends its stream with an error and touches no other. One clock drives all heartbeats.

`StreamDialer` opens a stream by one protobuf request on the daemon's control socket, and that socket then *is* the
stream (measured: 2 to 4 times the throughput of hivemind's own streams). Streams that others open arrive as connections
to a socket of ours, with the daemon's word on who they are and where they come from. The protocol's name contains the
version of the wire format and what follows from the run's id, so that a peer of another run does not even get a stream.
The first bytes that the caller sends prove that it knows the run; without them nothing is answered.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, NoReturn

from noloco_node.libp2p.addresses import KnownPeers, PeerAddress, place_text
from noloco_node.libp2p.control import Control, Preamble, delimited
from noloco_node.libp2p.frame_protocol import FrameProtocol, LivenessTable
from noloco_node.libp2p.hivemind_compat import DaemonClient, HivemindParts
from noloco_node.libp2p.settings import PROOF_BYTES, Capacity, NetworkSettings, RunSecret, TimeoutSettings
from noloco_node.libp2p.stream import ByteCounts, ReceiveBudget, Stream, StreamOpening
from noloco_node.network.interface import VIOLATION_GRACE_S, Handler
from noloco_node.network.schema import Schema, Violation
from noloco_node.tasks import loop_s

logger = logging.getLogger(__name__)

_MOST_OFFENDERS = 1024
_MOST_STREAMS = 4
"""Open streams, our own and those that only linger included, to one conversation that may be answered: of all peers
together, and of each."""


_PROOF_S = 20.0
"""For the proof to come, which callers send at once."""
_MOST_UNPROVEN = 256


class Switchboard:
    """Keeps every open stream; `run` must be running while streams are answered."""

    def __init__(self, timeouts: TimeoutSettings, capacity: Capacity) -> None:
        self._timeouts, self._capacity = timeouts, capacity
        self._handlers = asyncio.TaskGroup()
        self._answers = False
        self._topics: dict[str, tuple[Schema, Handler]] = {}
        self._streams: dict[Stream, asyncio.Task[None] | None] = {}
        self._liveness = LivenessTable(timeouts)
        self._receive_budget = ReceiveBudget(capacity.unread_bytes)
        self._traffic: dict[str, ByteCounts] = {}
        self._answering: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._violations: Counter[str] = Counter()

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self._topics)

    def statistics(self) -> dict[str, int | float]:
        counts: dict[str, int | float] = dict(self._counts)
        for topic, traffic in self._traffic.items():
            counts[f"bytes.sent.{topic}"] = traffic.sent_bytes
            counts[f"bytes.received.{topic}"] = traffic.received_bytes
        for peer, number in self._violations.items():
            counts[f"violations.{peer}"] = number
        counts |= {"unread.bytes": self._receive_budget.held_bytes, "unread.evicted": self._receive_budget.evicted}
        return counts | {"conversations.now": len(self._streams)}

    def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        self._receive_budget.expect(schema.body_bytes)
        self._topics[topic] = (schema, handler)

    async def run(self, started: asyncio.Event) -> NoReturn:
        """Keep all streams beating, and answer new ones, until cancelled; set `started` when that can begin."""
        loop = asyncio.get_running_loop()
        least_silence_s = min(self._timeouts.silence_s, self._timeouts.silences().least_s)
        period_s = min(self._timeouts.beat_s, least_silence_s) / 2
        async with self._handlers:
            self._answers = True
            started.set()
            try:
                while True:
                    begun = loop.time()
                    await asyncio.sleep(period_s)
                    now = loop.time()
                    we_listened = now - begun <= period_s + least_silence_s / 4
                    for stream in list(self._streams):
                        stream.tick(now, we_listened)
            finally:
                self._answers = False

    def call(self, transport: asyncio.Transport, peer: str, topic: str, schema: Schema) -> Stream:
        self._counts["conversations.opened"] += 1
        stream = Stream(transport, self._protocol(peer, schema), self._topic_traffic(topic), self.lost)
        self._streams[stream] = None
        return stream

    def unopened(self) -> None:
        self._counts["conversations.unopened"] += 1

    def answer(self, transport: asyncio.Transport, peer: str, topic: str, origin: str = "") -> Stream:
        """Make a stream of a connection that `peer` opened, and run the handler of its topic if there is room for one
        more; a ConnectionError where there will be no stream.
        """
        if not self._answers or topic not in self._topics:
            raise ConnectionResetError(f"nobody serves {topic} here")
        is_crowded = len(self._streams) >= _MOST_STREAMS * self._capacity.conversations
        if is_crowded or self._liveness.streams(peer) >= _MOST_STREAMS * self._capacity.per_peer:
            raise ConnectionResetError("too many streams linger here")
        schema, handler = self._topics[topic]
        protocol, traffic = self._protocol(peer, schema), self._topic_traffic(topic)
        stream = Stream(transport, protocol, traffic, self.lost, self._receive_budget, origin)
        self._streams[stream] = None
        if self._answering.total() >= self._capacity.conversations:
            self._counts["conversations.busy"] += 1
            stream.fail(f"busy with {self._capacity.conversations} conversations")
        elif self._answering[peer] >= self._capacity.per_peer:
            self._counts["conversations.busy"] += 1
            stream.fail(f"busy with {self._capacity.per_peer} conversations of yours")
        else:
            self._counts["conversations.answered"] += 1
            self._answering[peer] += 1
            task = self._handlers.create_task(self._run_handler(stream, handler), name=f"{topic} for {peer}")
            self._streams[stream] = task
            task.add_done_callback(lambda _: self._done(stream, peer))
        return stream

    def lost(self, stream: Stream, error: ConnectionError | None) -> None:
        """Forget a stream; its handler is cancelled unless the other side ended politely."""
        if stream not in self._streams:
            return
        task = self._streams.pop(stream)
        self._liveness.end(stream.peer)
        if error is not None:
            self._counts[f"lost.{type(error).__name__}"] += 1
        if isinstance(error, Violation):
            logger.warning("%s violated the protocol: %s", stream.peer, error)
            if stream.peer in self._violations or len(self._violations) < _MOST_OFFENDERS:
                self._violations[stream.peer] += 1
        if task is None or stream.peer_ended:
            return
        if isinstance(error, Violation):
            # A handler that waits for that very message is told what it was, a moment before it is cancelled.
            asyncio.get_running_loop().call_later(VIOLATION_GRACE_S, task.cancel)
        else:
            task.cancel()

    def close(self) -> None:
        self._answers = False
        for stream in list(self._streams):
            stream.break_off(ConnectionResetError("the network was closed"))

    def _protocol(self, peer: str, schema: Schema) -> FrameProtocol:
        now_s = loop_s()
        return FrameProtocol(peer, schema, self._liveness.begin(peer), self._timeouts, now_s)

    def _topic_traffic(self, topic: str) -> ByteCounts:
        return self._traffic.setdefault(topic, ByteCounts())

    async def _run_handler(self, stream: Stream, handler: Handler) -> None:
        try:
            await handler(stream)
        except ConnectionError as error:
            self._counts["conversations.failed"] += 1
            self._finish(stream)
            stream.fail(str(error))
        except Exception as error:  # a border: the fault of one handler must not take the others with it
            self._counts["conversations.failed"] += 1
            logger.exception("A conversation with %s failed", stream.peer)
            self._finish(stream)
            stream.fail(f"{type(error).__name__} in the handler")
        except asyncio.CancelledError:
            self._finish(stream)
            stream.break_off(ConnectionResetError("the handler was cancelled"))
            raise
        else:
            self._finish(stream)
            stream.leave()

    def _finish(self, stream: Stream) -> None:
        """Note that nobody is to be cancelled any more when this stream is lost."""
        if stream in self._streams:
            self._streams[stream] = None

    def _done(self, stream: Stream, peer: str) -> None:
        # Here, and not in the task: one that is cancelled in time never runs.
        stream.discard()
        self._answering[peer] -= 1
        if not self._answering[peer]:
            del self._answering[peer]


class PeerContext(NamedTuple):
    """What outlives a daemon of this peer: hivemind's parts, a directory for sockets, settings and the run's secret,
    streams and topics, and whom it has met."""

    parts: HivemindParts
    directory: Path
    settings: NetworkSettings
    secret: RunSecret
    switchboard: Switchboard
    known_peers: KnownPeers

    def start(self, arguments: Sequence[str]) -> AbstractAsyncContextManager[tuple[Control, DaemonClient]]:
        """Run a daemon of ours; see `Control.start`."""
        return Control.start(self.parts, arguments, self.directory, self.settings.timeouts.start_s)


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
        if origin:
            self._context.known_peers.note([PeerAddress(origin, peer)])
        self._context.switchboard.answer(transport, peer, topic, origin)


def _refused(peer: str, topic: str, words: str) -> ConnectionRefusedError:
    if "protocols not supported" in words:
        return ConnectionRefusedError(f"{peer} does not speak of {topic!r} in this run or version")
    return ConnectionRefusedError(f"{peer} cannot be reached: {' '.join(words.split())}")
