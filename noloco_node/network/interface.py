"""The network as the rest of the product sees it: conversations of typed messages, and records that expire.

`noloco_node.libp2p.network` implements it over libp2p, `noloco_node.sim.network` in memory and virtual time. A
`calls.HookedNetwork` adds concerns to either, one `NetworkHook` each: tickets, bans, limits of the line, timeouts.

Losses are the standard library's: `ConnectionRefusedError` when the peer cannot be reached, `ConnectionAbortedError`
when we give it up (silent for longer than its line explains, or a `schema.Violation`), `ConnectionResetError` when the
stream breaks or ends without its end mark.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from noloco_node.network.schema import Schema, Violation


class ConversationEnded(ConnectionResetError):
    """The other side ended politely, before it sent what was waited for."""


class UnknownTopic(ConnectionRefusedError):
    """The peer was reached, and serves no such topic: it has another run or version, or it has just begun."""


class Pace(NamedTuple):
    """How fast messages may pass in one direction.

    `admit` takes the size of a piece of a message, at most `piece_bytes`, and that of the whole message, and returns
    when the piece may pass. A network in memory takes messages whole.
    """

    piece_bytes: int
    admit: Callable[[int, int], Awaitable[None]]


class Conversation(Protocol):
    """One stream between two peers, both of whom may send and receive typed messages, in order."""

    @property
    def peer(self) -> str:
        """The other's peer id, authenticated by the transport."""

    @property
    def origin(self) -> str:
        """The multiaddr from which the other came to us; empty where we opened the conversation or none is known."""

    @property
    def is_quiet(self) -> bool:
        """Whether both ends are open, as far as is known here, and all that has come was received."""

    @property
    def violation(self) -> Violation | None:
        """What the other has sent that no peer may send, if that broke the conversation."""

    def limit(self, up: Pace | None, down: Pace | None) -> None:
        """Keep to these paces from now on; a message that came counts as not received until `down` has admitted it."""

    async def send(self, message: Any) -> None:
        """Send one message that the conversation's schema knows; return when it has been handed to the transport."""

    async def receive(self) -> Any:
        """Return the next message; beats are swallowed. Raises a `ConnectionError` as the module says."""


Handler = Callable[[Conversation], Awaitable[None]]


class PeerNetwork(Protocol):
    """What a peer needs of the world."""

    @property
    def peer_id(self) -> str:
        """Our own peer id in base 58."""

    @property
    def dialable(self) -> bool:
        """Whether others can dial us, directly or through a relay, as far as is known."""

    async def addresses(self) -> tuple[str, ...]:
        """Return the multiaddrs at which others can dial us, each ending in /p2p/ and our id."""

    def talk(self, peer: str, topic: str, schema: Schema) -> AbstractAsyncContextManager[Conversation]:
        """Open a conversation about `topic`.

        Leaving the context by an exception (a cancellation, say) breaks the stream and cancels what the callee still
        does. Leaving it in the ordinary way ends it politely: the callee's handler may finish, so that what was sent
        last is not lost, but it can exchange nothing more.
        """

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        """Answer conversations about `topic`: one task each, cancelled when the caller goes away."""

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """Store our record under (key, subkey) for `lifetime_s` seconds; say whether the DHT took it."""

    async def read_all(self, keys: Sequence[str]) -> Sequence[Mapping[str, bytes] | None]:
        """Return all live records under each key by subkey, empty where there is none; None where nobody answered."""

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start, among them `bytes.sent.TOPIC` and `bytes.received.TOPIC`."""


Records = Mapping[str, bytes] | None  # the records under one key, by subkey; None where nobody answered


class NetworkHook:
    """One concern of a `calls.HookedNetwork`; this one adds nothing."""

    async def calling(self, peer: str, dial: Callable[[], Awaitable[Conversation]]) -> Conversation:
        """Return the conversation that `dial` opens; ConnectionRefusedError where we must not open one.

        Raises nothing once it is open.
        """
        return await dial()

    def opened(self, conversation: Conversation, topic: str) -> Conversation:
        """Return a conversation that we have opened with what the hook adds to it."""
        return conversation

    def lost(self, peer: str, error: ConnectionError) -> None:
        """Note that a conversation that we opened has failed."""

    async def before_serve(self) -> None:
        """Prepare for conversations that others open."""

    def answering(self, conversation: Conversation, topic: str) -> AbstractContextManager[Conversation]:
        """Return a context to hold while a handler answers: it lends the conversation with what the hook adds to it.

        Raises ConnectionRefusedError where the handler must not answer.
        """
        return nullcontext(conversation)

    def stamped(self, value: bytes) -> bytes:
        """Return what we publish for a record's value."""
        return value

    async def read(
        self, read_all: Callable[[Sequence[str]], Awaitable[Sequence[Records]]], keys: Sequence[str]
    ) -> Sequence[Records]:
        """Return the records under these keys that count."""
        return await read_all(keys)

    def statistics(self) -> dict[str, int | float]:
        """Return the hook's counts."""
        return {}
