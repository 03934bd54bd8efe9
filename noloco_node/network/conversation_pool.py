"""Conversations that stay open between calls, so that only a first call pays the round trip that opens a stream.

A call has a conversation to itself, and answers belong to questions by their order. So nothing has to be correlated,
and a call that is cancelled or lost breaks one stream, on which nobody else was speaking.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.schema import Schema
from noloco_node.tasks import loop_s

IDLE_S = 60.0
"""A conversation that was not used for so long is ended: its beats cost more than opening another."""
MOST_IDLE = 128
"""With all peers; the one that has been idle for longest is ended first."""


class ConversationPool:
    """Conversations about one topic with any peers; whoever answers must take one call after another on each."""

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
        """End all conversations, and keep none any more."""
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
