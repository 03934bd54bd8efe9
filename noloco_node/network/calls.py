"""Calls of other peers: conversations that stay open between them, turns to send, and how long to wait for an answer.

**Pool.** Only a first call pays the round trip that opens a stream. A call has a conversation to itself, and answers
belong to questions by their order. So nothing has to be correlated, and a call that is cancelled or lost breaks one
stream, on which nobody else was speaking.

**Turns.** Messages that share a line all arrive late, and together: of sixteen that leave at once the first is there
when the last is. One after another, the next stage begins with the first while the others leave. One at a time would be
too few: a receiver's line may be busy, and a long line carries less than it could while one message waits for its last
bytes. A receiver that is slow keeps a turn for `PATIENCE` times what a message usually takes, and then the next one
leaves beside it, so a slow receiver, or three, hold up nobody for long.

**Timeouts.** One fixed number is wrong both ways: twenty seconds for a dial let one silent peer hold up all who have a
microbatch for it; two seconds would cut off every slow line. So each wait is bounded by what was observed, as TCP
bounds its retransmissions (RFC 6298): a smoothed mean of the times, and four times their smoothed deviation, or as much
again as the mean if that is more. For a peer that was never reached, the first contacts with others count. Each wait in
vain makes the next one for that peer half as long again, up to a bound; an answer ends that. (With doubling, a silent
peer would cost more at each trial than the time for which it is left alone.) The bounds are wide, because an event loop
that was busy for a second must accuse nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from noloco_node.network.interface import Conversation, NetworkHook, PeerNetwork
from noloco_node.network.schema import Schema
from noloco_node.tasks import loop_s

IDLE_S = 60.0
"""A conversation that was not used for so long is ended: its beats cost more than opening another."""
MOST_IDLE = 128
"""With all peers; the one that has been idle for longest is ended first."""


FEWEST, MOST = 3, 8
"""Messages at a time. With too few for its receivers a line is idle while theirs are busy, with too many all are late.
In simulations of narrow lines two replicas a stage wanted three and eight replicas nine; with three, these carried an
eighth less, and with sixty-four, a thirtieth (docs/results.md)."""
PATIENCE = 4.0
LEAST_S = 1.0
"""Of a turn: what a message usually takes is not yet known, or next to nothing."""
SMOOTHING = 0.1
MEAN_WEIGHT, DEVIATION_WEIGHT, DEVIATIONS = 1 / 8, 1 / 4, 4.0
MOST_PEERS = 1024
"""Of which times are remembered; beyond them the one that was heard of longest ago is forgotten."""
GROWTH = 1.5
MOST_GROWTHS = 12


class ConversationPool:
    """Conversations about one topic with any peers; the peer that answers must take one call after another on each."""

    def __init__(self, network: PeerNetwork, topic: str, schema: Schema) -> None:
        self._network, self._topic, self._schema = network, topic, schema
        self._idle: dict[Conversation, tuple[AsyncExitStack, float]] = {}
        """What ends each, and since when it has been idle (loop seconds); the one used last comes last."""
        self._closed = False

    @asynccontextmanager
    async def talk(self, peer: str) -> AsyncIterator[Conversation]:
        """Lend a conversation with a peer for one call; the errors are those of `PeerNetwork.talk`.

        Leaving the context by an exception breaks the stream and cancels what the callee still does. Leaving it in the
        ordinary way, which is for who has received the answer, hands the conversation to the next call.
        """
        conversation, ending = await self._take(peer)
        async with ending:
            if conversation is None:
                conversation = await ending.enter_async_context(self._network.talk(peer, self._topic, self._schema))
            yield conversation
            if not self._closed:
                self._idle[conversation] = (ending.pop_all(), loop_s())
        if len(self._idle) > MOST_IDLE:
            await self._end(next(iter(self._idle)))

    async def aclose(self) -> None:
        self._closed = True
        for conversation in list(self._idle):
            await self._end(conversation)

    async def _take(self, peer: str) -> tuple[Conversation | None, AsyncExitStack]:
        """Return the conversation with a peer that was used last, and what ends it; end those idle for too long."""
        oldest_s = loop_s() - IDLE_S
        for conversation, (_, since_s) in list(self._idle.items()):
            if since_s > oldest_s:
                break
            await self._end(conversation)
        while mine := next((each for each in reversed(self._idle) if each.peer == peer), None):
            if mine.is_quiet:
                return mine, self._idle.pop(mine)[0]
            await self._end(mine)
        return None, AsyncExitStack()

    async def _end(self, conversation: Conversation) -> None:
        """End a conversation, unless another call took it meanwhile."""
        kept = self._idle.pop(conversation, None)
        if kept is not None:
            await kept[0].aclose()


class SendTurns:
    """The turns of one node that sends to so many receivers."""

    def __init__(self, receivers: int) -> None:
        self.at_once = min(MOST, max(FEWEST, receivers))
        self._next = asyncio.Lock()
        self._left = asyncio.Event()
        self._since_s: dict[object, float] = {}
        """Since when each turn has been held, the oldest first."""
        self._usual_s = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._next:
            while len(self._since_s) >= self.at_once:
                await self._wait()
            mine, begun_s = object(), loop_s()
            self._since_s[mine] = begun_s
        try:
            yield
            self._usual_s += SMOOTHING * (loop_s() - begun_s - self._usual_s)
        finally:
            self._since_s.pop(mine, None)
            self._left.set()

    async def _wait(self) -> None:
        """Wait until a message has left, or the oldest has had its turn."""
        oldest, begun_s = next(iter(self._since_s.items()))
        self._left.clear()
        try:
            async with asyncio.timeout_at(begun_s + max(LEAST_S, PATIENCE * self._usual_s)):
                await self._left.wait()
        except TimeoutError:
            self._since_s.pop(oldest, None)


class RttEstimate(NamedTuple):
    """What a wait usually takes: smoothed mean and mean deviation, in seconds."""

    mean_s: float
    deviation_s: float


class TimeoutBounds(NamedTuple):
    """Of a deadline, in seconds: the shortest, the longest, and the one where nothing was observed."""

    least_s: float
    most_s: float
    unknown_s: float


DIALS = TimeoutBounds(least_s=2.0, most_s=60.0, unknown_s=10.0)
ANSWERS = TimeoutBounds(least_s=4.0, most_s=120.0, unknown_s=12.0)
"""Of a proposal, its dial included."""


def observed(before: RttEstimate | None, took_s: float) -> RttEstimate:
    """Return the estimate with one more observation."""
    if before is None:
        return RttEstimate(took_s, took_s / 2)
    deviation_s = before.deviation_s + DEVIATION_WEIGHT * (abs(took_s - before.mean_s) - before.deviation_s)
    return RttEstimate(before.mean_s + MEAN_WEIGHT * (took_s - before.mean_s), deviation_s)


def deadline_s(known: RttEstimate | None, timeouts: int, bounds: TimeoutBounds) -> float:
    """Return how long to wait after `timeouts` waits in a row that came to nothing."""
    usual_s = bounds.unknown_s
    if known is not None:
        # Times that were equal for long have no deviation left, and are no promise.
        usual_s = known.mean_s + max(DEVIATIONS * known.deviation_s, known.mean_s)
    return float(min(bounds.most_s, max(bounds.least_s, usual_s) * GROWTH ** min(timeouts, MOST_GROWTHS)))


class _Known(NamedTuple):
    """Of one peer: what was observed, how often in a row nothing was, and when that was last (loop seconds)."""

    estimate: RttEstimate | None = None
    timeouts: int = 0
    failed_s: float = float("-inf")


class AdaptiveTimeout:
    """What one kind of wait took, peer by peer."""

    def __init__(self, bounds: TimeoutBounds) -> None:
        self._bounds = bounds
        self._peers: dict[str, _Known] = {}
        self._first: RttEstimate | None = None
        """Of first contacts, with anybody."""

    def deadline_s(self, peer: str) -> float:
        """Return how long to wait for a peer."""
        known = self._peers.get(peer, _Known())
        return deadline_s(known.estimate or self._first, known.timeouts, self._bounds)

    def took(self, peer: str, seconds: float) -> None:
        before = self._peers.get(peer, _Known()).estimate
        if before is None:
            self._first = observed(self._first, seconds)
        self._remember(peer, _Known(observed(before, seconds)))

    def record_timeout(self, peer: str, begun_s: float, now_s: float) -> None:
        """Note a wait that ended at its deadline; of several that were under way together only the first counts."""
        known = self._peers.get(peer, _Known())
        if begun_s >= known.failed_s:
            self._remember(peer, known._replace(timeouts=known.timeouts + 1, failed_s=now_s))

    def _remember(self, peer: str, known: _Known) -> None:
        self._peers.pop(peer, None)
        self._peers[peer] = known
        if len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]


class DialTimeouts(NetworkHook):
    """Gives dials up that take much longer than usual."""

    def __init__(self) -> None:
        self._timing = AdaptiveTimeout(DIALS)
        self._given_up = 0

    @asynccontextmanager
    async def calling(self, peer: str) -> AsyncIterator[None]:
        """Open a conversation within what is usual for the peer, and learn from what it took."""
        begun_s, limit_s = loop_s(), self._timing.deadline_s(peer)
        try:
            async with asyncio.timeout(limit_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            self._timing.record_timeout(peer, begun_s, loop_s())
            self._given_up += 1
            raise ConnectionRefusedError(f"{peer} did not take a call within {limit_s:.1f} s") from None
        self._timing.took(peer, loop_s() - begun_s)

    def statistics(self) -> dict[str, int | float]:
        return {"dials.given_up": self._given_up}
