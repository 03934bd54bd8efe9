"""Conversations as the product has them: with hooks, from a pool, in turn.

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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from noloco_node.network.interface import (
    NO_HOOK,
    Conversation,
    ConversationHook,
    Handler,
    NetworkHook,
    Pace,
    PeerNetwork,
    Records,
)
from noloco_node.network.schema import Schema, Violation
from noloco_node.tasks import loop_s

T = TypeVar("T")

VIOLATION_GRACE_S = 1.0
"""A handler whose caller violated the protocol has so long to learn of it and to end by itself."""
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
"""A turn lasts at least so long: what a message usually takes may be unknown, or next to nothing."""
SMOOTHING = 0.1


class HookedNetwork:
    """A network with hooks; those that come first act first on what leaves, and last on what comes.

    A hooked network around a hooked network is one network with the hooks of both.
    """

    _network: PeerNetwork
    _hooks: tuple[NetworkHook, ...]

    def __init__(self, network: PeerNetwork, *hooks: NetworkHook) -> None:
        self._network, self._hooks = network, hooks
        if type(network) is HookedNetwork:
            self._network, self._hooks = network._network, (*hooks, *network._hooks)

    @property
    def peer_id(self) -> str:
        return self._network.peer_id

    @property
    def dialable(self) -> bool:
        return self._network.dialable

    async def addresses(self) -> tuple[str, ...]:
        return await self._network.addresses()

    @asynccontextmanager
    async def talk(self, peer: str, topic: str, schema: Schema) -> AsyncIterator[Conversation]:
        async with AsyncExitStack() as talking:
            async with AsyncExitStack() as calling:
                for hook in self._hooks:
                    await calling.enter_async_context(hook.calling(peer))
                conversation = await talking.enter_async_context(self._network.talk(peer, topic, schema))
            try:
                yield HookedConversation(conversation, [hook.opened(conversation, topic) for hook in self._hooks])
            except ConnectionError:
                for hook in self._hooks:
                    hook.lost(peer)
                raise

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        for hook in self._hooks:
            await hook.before_serve()

        async def answer(conversation: Conversation) -> None:
            with ExitStack() as answering:
                hooks = [answering.enter_context(hook.answering(conversation, topic)) for hook in self._hooks]
                await handler(HookedConversation(conversation, hooks))

        await self._network.serve(topic, schema, answer)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        for hook in self._hooks:
            value = hook.stamped(value)
        return await self._network.publish(key, subkey, value, lifetime_s)

    async def read_all(self, keys: Sequence[str]) -> Sequence[Records]:
        read = self._network.read_all
        for hook in reversed(self._hooks):
            read = partial(hook.read, read)
        return await read(keys)

    def statistics(self) -> dict[str, int | float]:
        counts = self._network.statistics()
        for hook in self._hooks:
            counts |= hook.statistics()
        return counts


class HookedConversation:
    """A conversation with the hooks of its network."""

    __slots__ = ("_conversation", "_hooks")

    def __init__(self, conversation: Conversation, hooks: Sequence[ConversationHook] = ()) -> None:
        self._conversation, self._hooks = conversation, [hook for hook in hooks if hook is not NO_HOOK]

    @property
    def peer(self) -> str:
        return self._conversation.peer

    @property
    def origin(self) -> str:
        return self._conversation.origin

    @property
    def is_quiet(self) -> bool:
        return self._conversation.is_quiet and not any(hook.objects() for hook in self._hooks)

    def limit(self, up: Pace | None, down: Pace | None) -> None:
        self._conversation.limit(up, down)

    async def send(self, message: Any) -> None:
        for hook in self._hooks:
            await hook.before_send()
        try:
            await self._conversation.send(message)
        except Violation:
            self._note_violation()
            raise

    async def receive(self) -> Any:
        try:
            message = await self._conversation.receive()
        except Violation:
            self._note_violation()
            raise
        for hook in reversed(self._hooks):
            await hook.after_receive()
        return message

    def _note_violation(self) -> None:
        for hook in self._hooks:
            hook.violated()


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


async def ask(
    network: PeerNetwork, peer: str, topic: str, schema: Schema, question: Any, expected: type[T], patience_s: float
) -> T:
    """Return a peer's answer to one question; raise a `ConnectionError` where none comes, or another than expected."""
    try:
        async with asyncio.timeout(patience_s), network.talk(peer, topic, schema) as conversation:
            await conversation.send(question)
            answer = await conversation.receive()
            if not isinstance(answer, expected):
                raise ConnectionAbortedError(f"expected a {expected.__name__}, got {type(answer).__name__}")
            return answer
    except TimeoutError as silence:
        raise ConnectionAbortedError(f"no answer within {patience_s:g} s") from silence


@asynccontextmanager
async def patient(conversation: Conversation, patience_s: float) -> AsyncIterator[None]:
    """Answer in the body; raise ConnectionAbortedError where the caller takes longer than `patience_s` seconds."""
    try:
        async with asyncio.timeout(patience_s):
            yield
    except TimeoutError as silence:
        raise ConnectionAbortedError(f"{conversation.peer} took longer than {patience_s:g} s") from silence


def stop_handler(cancel: Callable[[], object], why: type) -> None:
    """Cancel a handler whose stream broke; after a violation a moment later, so that it learns what came."""
    if issubclass(why, Violation):
        asyncio.get_running_loop().call_later(VIOLATION_GRACE_S, cancel)
    else:
        cancel()
