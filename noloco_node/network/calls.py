"""Conversations as the product has them: with the hooks of a network, and of one question and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from noloco_node.network.interface import Conversation, Handler, NetworkHook, Pace, PeerNetwork, Records
from noloco_node.network.schema import Schema, Violation

T = TypeVar("T")

VIOLATION_GRACE_S = 1.0  # a handler whose caller violated the protocol has so long to learn of it and to end by itself


class HookedNetwork:
    """A network with hooks; a hooked network around a hooked network is one network with the hooks of both.

    Each hook gets a conversation as the hook before it has returned it. Records that leave pass the hooks in their
    order, records that come in the opposite one.
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
        talk = self._network.talk(peer, topic, schema)
        dial = talk.__aenter__
        for hook in reversed(self._hooks):
            dial = partial(hook.calling, peer, dial)
        conversation = await dial()
        try:
            for hook in self._hooks:
                conversation = hook.opened(conversation, topic)
            yield conversation
        except BaseException as error:
            if isinstance(error, ConnectionError):
                for hook in self._hooks:
                    hook.lost(peer, error)
            if not await talk.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await talk.__aexit__(None, None, None)

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        for hook in self._hooks:
            await hook.before_serve()

        async def answer(conversation: Conversation) -> None:
            with ExitStack() as answering:
                for hook in self._hooks:
                    conversation = answering.enter_context(hook.answering(conversation, topic))
                try:
                    await handler(conversation)
                except asyncio.CancelledError:
                    if (violation := conversation.violation) is not None:
                        raise violation from None  # for the hooks: the handler was stopped before it learnt of it
                    raise

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
    """A conversation to which a hook adds something: a hook derives its own from this one, which adds nothing."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    @property
    def peer(self) -> str:
        return self._conversation.peer

    @property
    def origin(self) -> str:
        return self._conversation.origin

    @property
    def is_quiet(self) -> bool:
        return self._conversation.is_quiet

    @property
    def violation(self) -> Violation | None:
        return self._conversation.violation

    def limit(self, up: Pace | None, down: Pace | None) -> None:
        self._conversation.limit(up, down)

    async def send(self, message: Any) -> None:
        await self._conversation.send(message)

    async def receive(self) -> Any:
        return await self._conversation.receive()


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
