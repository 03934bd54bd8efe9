"""A network, or a conversation, around another one: it changes some of what that does, and leaves the rest as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from noloco_node.network.interface import Conversation, Handler, PeerNetwork
from noloco_node.network.schema import Schema


class NetworkWrapper:
    """Implements `interface.PeerNetwork` by that of `network`, method by method."""

    def __init__(self, network: PeerNetwork) -> None:
        self._network = network

    @property
    def peer_id(self) -> str:
        """Our own peer id."""
        return self._network.peer_id

    @property
    def dialable(self) -> bool:
        """Whether others can dial us."""
        return self._network.dialable

    async def addresses(self) -> tuple[str, ...]:
        """See `interface.PeerNetwork.addresses`."""
        return await self._network.addresses()

    def talk(self, peer: str, topic: str, schema: Schema) -> AbstractAsyncContextManager[Conversation]:
        """See `interface.PeerNetwork.talk`."""
        return self._network.talk(peer, topic, schema)

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        """See `interface.PeerNetwork.serve`."""
        await self._network.serve(topic, schema, handler)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """See `interface.PeerNetwork.publish`."""
        return await self._network.publish(key, subkey, value, lifetime_s)

    async def read_all(self, keys: Sequence[str]) -> Sequence[Mapping[str, bytes] | None]:
        """See `interface.PeerNetwork.read_all`."""
        return await self._network.read_all(keys)

    def statistics(self) -> dict[str, int | float]:
        """See `interface.PeerNetwork.statistics`."""
        return self._network.statistics()


class ConversationWrapper:
    """Implements `interface.Conversation` by `conversation`, method by method."""

    __slots__ = ("_conversation",)

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    @property
    def peer(self) -> str:
        """The other's peer id."""
        return self._conversation.peer

    @property
    def origin(self) -> str:
        """See `interface.Conversation.origin`."""
        return self._conversation.origin

    @property
    def is_quiet(self) -> bool:
        """See `interface.Conversation.is_quiet`."""
        return self._conversation.is_quiet

    async def send(self, message: Any) -> None:
        """See `interface.Conversation.send`."""
        await self._conversation.send(message)

    async def receive(self) -> Any:
        """See `interface.Conversation.receive`."""
        return await self._conversation.receive()
