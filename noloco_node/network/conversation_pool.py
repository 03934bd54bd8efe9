"""Conversations that stay open between calls, and the turns in which large messages leave on them.

**Pool.** Only a first call pays the round trip that opens a stream. A call has a conversation to itself, and answers
belong to questions by their order. So nothing has to be correlated, and a call that is cancelled or lost breaks one
stream, on which nobody else was speaking.

**Turns.** Messages that share a line all arrive late, and together: of sixteen that leave at once the first is there
when the last is. One after another, the next stage begins with the first while the others leave. One at a time would be
too few: a receiver's line may be busy, and a long line carries less than it could while one message waits for its last
bytes. A receiver that is slow keeps a turn for `PATIENCE` times what a message usually takes, and then the next one
leaves beside it, so a slow receiver, or three, hold up nobody for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from noloco_node.network.interface import Conversation, PeerNetwork
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
