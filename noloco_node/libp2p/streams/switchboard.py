"""All conversations of this peer: who answers what, how many at once, and what happens when one is lost.

A stream that a peer opens gets a task of its own, which runs the topic's handler. A stream that breaks cancels that
task; a handler that fails ends its stream with an error and touches no other. One clock drives all heartbeats.

This module knows sockets and frames and nothing of libp2p.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import NoReturn

from noloco_node.libp2p.endpoint.settings import Capacity, TimeoutSettings
from noloco_node.libp2p.streams.frame_protocol import FrameProtocol, LivenessTable
from noloco_node.libp2p.streams.stream import ByteCounts, ReceiveBudget, Stream
from noloco_node.network.interface import VIOLATION_GRACE_S, Handler
from noloco_node.network.schema import Schema, Violation
from noloco_node.tasks import loop_s

logger = logging.getLogger(__name__)

_MOST_OFFENDERS = 1024
_MOST_STREAMS = 4
"""Open streams, our own and those that only linger included, to one conversation that may be answered: of all peers
together, and of each."""


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
        """What is served here."""
        return tuple(self._topics)

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start: conversations, losses by kind, bytes by topic, violations by peer."""
        counts: dict[str, int | float] = dict(self._counts)
        for topic, traffic in self._traffic.items():
            counts[f"bytes.sent.{topic}"] = traffic.sent_bytes
            counts[f"bytes.received.{topic}"] = traffic.received_bytes
        for peer, number in self._violations.items():
            counts[f"violations.{peer}"] = number
        counts |= {"unread.bytes": self._receive_budget.held_bytes, "unread.evicted": self._receive_budget.evicted}
        return counts | {"conversations.now": len(self._streams)}

    def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        """Answer streams about `topic` from now on."""
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
        """Make a stream of a connection that we opened."""
        self._counts["conversations.opened"] += 1
        stream = Stream(transport, self._protocol(peer, schema), self._topic_traffic(topic), self.lost)
        self._streams[stream] = None
        return stream

    def unopened(self) -> None:
        """Count a stream that we could not open."""
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
        """Break every stream and answer no more."""
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
