"""All streams of this peer: answered, counted, and what happens when one is lost.

A stream that a peer opens gets a task of its own, which runs the topic's handler. A stream that breaks cancels that
task; a handler that fails ends its stream with an error and touches no other. One clock drives all heartbeats.

Memory. Each message is checked against its schema before memory is taken for it, but a stranger may open many streams
and send something good on each, faster than handlers take it, or never to its end. So `ReceiveBudget` bounds the bytes
that came on streams that we answer and that nobody has received, for each peer and in all. Beyond the bound we break
the stream that has held some the longest: nobody waits for room, so nobody can keep others waiting by holding it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import NoReturn

from noloco_node.libp2p.settings import Capacity, TimeoutSettings
from noloco_node.libp2p.stream import ByteCounts, FrameProtocol, Stream
from noloco_node.network.bans import crowd_of
from noloco_node.network.calls import stop_handler
from noloco_node.network.interface import Handler
from noloco_node.network.schema import Schema, Violation
from noloco_node.network.timeouts import MOST_PEERS, PeerLiveness
from noloco_node.tasks import loop_s

logger = logging.getLogger(__name__)

_MOST_OFFENDERS = 1024
_MOST_STREAMS = 4
"""Open streams, those that only linger included, to one conversation that may be answered: of all peers together and of
each, our own to it included, and from each public address prefix, as which all relays count.

Of these, and of the conversations, a prefix never has more than are left: a few prefixes cannot take them all.
"""


class LivenessTable:
    """The liveness of all peers with whom we converse, and of the last with whom we did."""

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._peers: dict[str, PeerLiveness] = {}

    def streams(self, peer: str) -> int:
        return self._peers[peer].streams if peer in self._peers else 0

    def begin(self, peer: str) -> PeerLiveness:
        """Return what is known of a peer with whom another stream begins.

        That is no sign of life: daemons open streams for programs that hang.
        """
        liveness = self._peers.pop(peer, None) or self._timeouts.liveness()
        if len(self._peers) >= MOST_PEERS:
            idle = next((other for other, each in self._peers.items() if not each.streams), None)
            if idle is not None:
                del self._peers[idle]
        self._peers[peer] = liveness
        liveness.streams += 1
        return liveness

    def end(self, peer: str) -> None:
        self._peers[peer].streams -= 1


class ReceiveBudget:
    """The bytes of all streams that we answer: so many in all, half of them of one peer; one stream may have more."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._streams: dict[Stream, int] = {}  # bytes by stream, in the order in which they began to hold some
        self._peers: Counter[str] = Counter()
        self.evicted = 0  # streams broken off for their bytes

    @property
    def held_bytes(self) -> int:
        return self._peers.total()

    def expect(self, message_bytes: int) -> None:
        """Have room for two peers who each have two messages of this size on a stream, whatever the bound was."""
        self._most_bytes = max(self._most_bytes, 4 * message_bytes)

    def hold(self, stream: Stream, size: int) -> None:
        """Note that a stream holds so many bytes from now on; streams may be broken off for them, this one as well."""
        peer, before = stream.peer, self._streams.get(stream, 0)
        if size:
            self._streams[stream] = size
        else:
            self._streams.pop(stream, None)
        self._peers[peer] += size - before
        if not self._peers[peer]:
            del self._peers[peer]
        if size > before:
            if self._is_greedy(peer):
                self._evict([each for each in self._streams if each.peer == peer], lambda: self._is_greedy(peer))
            if self._is_full():
                self._evict(list(self._streams), self._is_full)

    def _is_full(self) -> bool:
        return self.held_bytes > self._most_bytes

    def _is_greedy(self, peer: str) -> bool:
        return self._peers[peer] > self._most_bytes / 2

    def _evict(self, streams: list[Stream], too_many: Callable[[], bool]) -> None:
        """Break off streams, all but the youngest at most."""
        for stream in streams[:-1]:
            if not too_many():
                return
            self.evicted += 1
            size = self._streams.get(stream, 0)
            logger.info("Breaking a stream with %s off: %d bytes wait on it to be received", stream.peer, size)
            stream.evict()
            self.hold(stream, 0)


class Switchboard:
    """Keeps every open stream; `run` must be running while streams are answered."""

    def __init__(self, timeouts: TimeoutSettings, capacity: Capacity) -> None:
        self._timeouts, self._capacity = timeouts, capacity
        self._handlers = asyncio.TaskGroup()
        self._answers = False
        self._topics: dict[str, tuple[Schema, Handler]] = {}
        self._streams: dict[Stream, asyncio.Task[bool] | None] = {}
        self._liveness = LivenessTable(timeouts)
        self._receive_budget = ReceiveBudget(capacity.unread_bytes)
        self._traffic: dict[str, ByteCounts] = {}
        self._answering: Counter[str] = Counter()
        self._by_prefix: Counter[str] = Counter()
        self._open_by_prefix: Counter[str] = Counter()
        """The streams from each prefix that are open, answered or not."""
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
        is_crowded |= self._liveness.streams(peer) >= _MOST_STREAMS * self._capacity.per_peer
        prefix = crowd_of(origin)
        left = _MOST_STREAMS * self._capacity.conversations - len(self._streams)
        if is_crowded or self._open_by_prefix[prefix] >= min(_MOST_STREAMS * self._capacity.per_prefix, left):
            raise ConnectionResetError("too many streams linger here")
        schema, handler = self._topics[topic]
        protocol, traffic = self._protocol(peer, schema), self._topic_traffic(topic)
        stream = Stream(transport, protocol, traffic, self.lost, self._receive_budget.hold, origin)
        self._streams[stream] = None
        if prefix:
            self._open_by_prefix[prefix] += 1
        if self._answering.total() >= self._capacity.conversations:
            self._counts["conversations.busy"] += 1
            stream.fail(f"busy with {self._capacity.conversations} conversations")
        elif self._answering[peer] >= self._capacity.per_peer:
            self._counts["conversations.busy"] += 1
            stream.fail(f"busy with {self._capacity.per_peer} conversations of yours")
        elif prefix and self._by_prefix[prefix] >= min(
            self._capacity.per_prefix, self._capacity.conversations - self._answering.total()
        ):
            self._counts["conversations.busy"] += 1
            stream.fail(f"busy with {self._by_prefix[prefix]} conversations from {prefix}")
        else:
            self._counts["conversations.answered"] += 1
            self._answering[peer] += 1
            self._by_prefix[prefix] += 1
            task = self._handlers.create_task(stream.answer(handler), name=f"{topic} for {peer}")
            self._streams[stream] = task
            task.add_done_callback(lambda task: self._done(stream, peer, prefix, task))
        return stream

    def lost(self, stream: Stream, error: ConnectionError | None) -> None:
        """Forget a stream; its handler is cancelled unless the other side ended politely."""
        if stream not in self._streams:
            return
        task = self._streams.pop(stream)
        self._liveness.end(stream.peer)
        _count_down(self._open_by_prefix, crowd_of(stream.origin))
        if error is not None:
            self._counts[f"lost.{type(error).__name__}"] += 1
        is_listed = stream.peer in self._violations or len(self._violations) < _MOST_OFFENDERS
        if isinstance(error, Violation) and is_listed:
            self._violations[stream.peer] += 1
            if self._violations[stream.peer].bit_count() == 1:  # at each doubling, or anybody could fill the log
                logger.warning("%s violated the protocol: %s", stream.peer, error)
        if task is not None and stream.wants_handler:
            stop_handler(task.cancel, type(error))

    def close(self) -> None:
        self._answers = False
        for stream in list(self._streams):
            stream.break_off(ConnectionResetError("the network was closed"))

    def _protocol(self, peer: str, schema: Schema) -> FrameProtocol:
        now_s = loop_s()
        return FrameProtocol(peer, schema, self._liveness.begin(peer), self._timeouts, now_s)

    def _topic_traffic(self, topic: str) -> ByteCounts:
        return self._traffic.setdefault(topic, ByteCounts())

    def _done(self, stream: Stream, peer: str, prefix: str, task: asyncio.Task[bool]) -> None:
        # Here, and not in the task: one that is cancelled in time never runs.
        stream.discard()
        if not (task.cancelled() or task.result()):
            self._counts["conversations.failed"] += 1
        _count_down(self._answering, peer)
        _count_down(self._by_prefix, prefix)


def _count_down(counts: Counter[str], who: str) -> None:
    """Count one less; what has none is forgotten."""
    counts[who] -= 1
    if counts[who] <= 0:
        del counts[who]
