"""A network in memory and in virtual time: whole messages, a constant latency, and the same losses as the real one.

A `Hub` is the world. `hub.network(peer)` is one peer's `port.Network`. Messages pass unserialised (both ends then share
their tensors: treat them as read-only), in order, after `latency_s`. What can go wrong with a peer is said to the hub:

- `kill(peer)`: its streams break at the others one latency later, new ones are refused, its records expire by
  themselves;
- `silence(peer)`: nothing leaves or reaches it, as with a host that lost its power or a process that is stopped.
  Whoever talks with it gives it up after `silence_s`; `resume(peer)` delivers what was held back to those that did not.

Conversations end as `port.Network.talk` says: an orderly end lets the other's handler finish, a break cancels it.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from random import Random
from typing import Any, NamedTuple

from noloco_node.port import Handler
from noloco_node.sim.lines import Weather
from noloco_node.wire import Schema


class _Record(NamedTuple):
    value: bytes
    expires_at: float


CALM = Weather()


class Hub:
    """The world that the peers of one simulation share."""

    def __init__(self, weather: Weather = CALM, *, seed: int = 0) -> None:
        self.weather = weather
        self._latencies = Random(f"{seed}|network|latency")
        self.failures: list[tuple[str, Exception]] = []
        """What handlers raised beside a `ConnectionError`, with the peer whose handler it was: bugs, as a rule."""
        self._networks: dict[str, MemoryNetwork] = {}
        self._silent: set[str] = set()
        self._held: list[tuple[str, str, Callable[[], object]]] = []
        self._records: dict[str, dict[str, _Record]] = {}
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"Hub({len(self._networks)} peers, {self.weather.latency.mean_s} s)"

    def statistics(self) -> dict[str, int | float]:
        """Return counts of conversations, messages, records and losses since the beginning."""
        return dict(self._counts)

    def network(self, peer: str) -> MemoryNetwork:
        """Return the network of a new peer."""
        if peer in self._networks:
            raise ValueError(f"there is a peer {peer} already")
        self._networks[peer] = MemoryNetwork(self, peer)
        return self._networks[peer]

    def kill(self, peer: str) -> None:
        """Let a peer vanish so that others notice at once."""
        self._networks.pop(peer)._die()

    def silence(self, peer: str) -> None:
        """Cut a peer off so that others notice only by its silence, and it theirs."""
        self._silent.add(peer)
        loop = asyncio.get_running_loop()
        for network in list(self._networks.values()):
            for end in list(network._ends):
                if peer in (end.me, end.peer):
                    loop.call_later(self.weather.silence_s, end._give_up_if_silent)

    def resume(self, peer: str) -> None:
        """Reconnect a silenced peer: what was held back arrives now."""
        self._silent.discard(peer)
        held, self._held = self._held, []
        for sender, receiver, arrive in held:
            self.carry(sender, receiver, arrive)

    def is_cut(self, one: str, other: str) -> bool:
        """Say whether nothing passes between two peers."""
        return one in self._silent or other in self._silent

    def carry(self, sender: str, receiver: str, arrive: Callable[[], object], size_bytes: int = 0) -> None:
        """Call `arrive` one latency later, or when both peers are heard again."""
        if self.is_cut(sender, receiver):
            self._held.append((sender, receiver, arrive))
        else:
            asyncio.get_running_loop().call_later(self.weather.latency.draw(self._latencies), arrive)


class MemoryNetwork:
    """One peer's view of a `Hub`; implements `port.Network`."""

    def __init__(self, hub: Hub, peer: str) -> None:
        self._hub, self._peer, self._alive = hub, peer, True
        self._topics: dict[str, Handler] = {}
        self._ends: set[_End] = set()
        self._bytes: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"MemoryNetwork({self._peer}, {len(self._ends)} conversations)"

    @property
    def peer_id(self) -> str:
        return self._peer

    async def addresses(self) -> tuple[str, ...]:
        """Return no address: whoever knows a peer's id can reach it here."""
        return ()

    @asynccontextmanager
    async def talk(self, peer: str, topic: str, schema: Schema) -> AsyncIterator[_End]:
        """Open a conversation; ConnectionRefusedError when the peer is gone, silent, or does not serve `topic`."""
        mine = await self._dial(peer, topic)
        polite = False
        try:
            yield mine
            polite = True
        finally:
            mine._leave(polite)

    async def _dial(self, peer: str, topic: str) -> _End:
        hub = self._hub
        if self._alive and hub.is_cut(self._peer, peer):
            await asyncio.sleep(hub.weather.open_s)
            raise ConnectionRefusedError(f"{peer} did not answer within {hub.weather.open_s} s")
        await asyncio.sleep(2 * hub.weather.latency.mean_s)
        other = hub._networks.get(peer)
        if not self._alive or other is None:
            raise ConnectionRefusedError(f"{peer} cannot be reached")
        if topic not in other._topics:
            raise ConnectionRefusedError(f"{peer} does not serve {topic}: another run or version")
        mine, theirs = _End(hub, self._peer, peer), _End(hub, peer, self._peer)
        mine._join(theirs, self._ends, functools.partial(self._count, other, topic))
        theirs._join(mine, other._ends, functools.partial(other._count, self, topic))
        other._answer(theirs, other._topics[topic])
        hub._counts[f"conversations.{topic}"] += 1
        return mine

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        """Answer conversations about `topic`, one task each."""
        self._topics[topic] = handler

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """Store a record; False when this peer is cut off or the stored one lives longer."""
        await asyncio.sleep(2 * self._hub.weather.latency.mean_s)
        if not self._alive or self._hub.is_cut(self._peer, self._peer):
            return False
        records = self._hub._records.setdefault(key, {})
        expires_at = asyncio.get_running_loop().time() + lifetime_s
        known = records.get(subkey)
        if known is not None and known.expires_at > expires_at:
            return False
        records[subkey] = _Record(value, expires_at)
        self._hub._counts["published"] += 1
        return True

    async def read(self, key: str) -> Mapping[str, bytes]:
        """Return the live records under `key`; none when this peer is cut off."""
        await asyncio.sleep(2 * self._hub.weather.latency.mean_s)
        if not self._alive or self._hub.is_cut(self._peer, self._peer):
            return {}
        now = asyncio.get_running_loop().time()
        records = self._hub._records.get(key, {})
        for subkey in [subkey for subkey, record in records.items() if record.expires_at <= now]:
            del records[subkey]
        return {subkey: record.value for subkey, record in records.items()}

    def statistics(self) -> dict[str, int | float]:
        """Return the bytes of tensors sent and received, by topic."""
        return dict(self._bytes)

    def _count(self, other: MemoryNetwork, topic: str, message: Any) -> None:
        size = _tensor_bytes(message)
        self._bytes[f"bytes.sent.{topic}"] += size
        other._bytes[f"bytes.received.{topic}"] += size

    def _answer(self, end: _End, handler: Handler) -> None:
        task = asyncio.get_running_loop().create_task(
            self._handle(end, handler), name=f"{self._peer} answers {end.peer}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        end._cancel = task.cancel

    async def _handle(self, end: _End, handler: Handler) -> None:
        sentence = None
        try:
            await handler(end)
        except ConnectionError as error:
            sentence = str(error)
        except Exception as error:  # the border: a bug of a handler must not end the simulation unseen
            self._hub.failures.append((self._peer, error))
            sentence = f"{type(error).__name__}: {error}"
        finally:
            end._cancel = None
        if sentence is None:
            end._leave(True)
        else:
            end._fail(sentence)

    def _die(self) -> None:
        self._alive = False
        for end in list(self._ends):
            end._leave(False)
            end._break(ConnectionResetError, "this peer was killed")
        for task in list(self._tasks):
            task.cancel()


class _End:
    """One end of a conversation; implements `port.Conversation`."""

    def __init__(self, hub: Hub, me: str, peer: str) -> None:
        self._hub, self.me, self._peer = hub, me, peer
        self._inbox: deque[Any] = deque()
        self._on_its_way: deque[Callable[[], None]] = deque()
        self._news = asyncio.Event()
        self._broken: tuple[type[ConnectionError], str] | None = None
        self._peer_ended = self._left = False
        self._cancel: Callable[[], bool] | None = None

    def __repr__(self) -> str:
        return f"_End({self.me} with {self._peer})"

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: Any) -> None:
        """Hand one message over; it arrives one latency later."""
        await asyncio.sleep(0)
        self._check()
        if self._peer_ended:
            raise ConnectionResetError(f"{self._peer} ended the conversation")
        self._hub._counts[f"messages.{type(message).__name__}"] += 1
        self._count(message)
        self._post(lambda: self._other._deliver(message))

    async def receive(self) -> Any:
        """Return the next message."""
        while not self._inbox:
            self._check()
            if self._peer_ended:
                raise ConnectionResetError(f"{self._peer} ended the conversation")
            self._news.clear()
            await self._news.wait()
        return self._inbox.popleft()

    def _join(self, other: _End, ends: set[_End], count: Callable[[Any], None]) -> None:
        self._other, self._ends, self._count = other, ends, count
        ends.add(self)

    def _check(self) -> None:
        if self._broken is not None:
            kind, text = self._broken
            raise kind(text)
        if self._left:
            raise ConnectionResetError(f"the conversation with {self._peer} is over")

    def _post(self, arrive: Callable[[], None]) -> None:
        """Queue one arrival; the queue keeps the order where two timers of the same instant would not."""
        self._on_its_way.append(arrive)
        self._hub.carry(self.me, self._peer, lambda: self._on_its_way.popleft()())

    def _deliver(self, message: Any) -> None:
        self._inbox.append(message)
        self._news.set()

    def _leave(self, polite: bool) -> None:
        """Stop using this end: say END, or break the stream."""
        if self._left or self._broken is not None:
            self._ends.discard(self)
            return
        self._left = True
        self._ends.discard(self)
        if polite:
            self._post(self._other._note_end)
        else:
            self._broken = (ConnectionResetError, "this end was left")
            self._post(lambda: self._other._break(ConnectionResetError, f"the stream with {self.me} broke"))

    def _fail(self, sentence: str) -> None:
        self._left = True
        self._ends.discard(self)
        self._post(lambda: self._other._break(ConnectionResetError, f"{self.me} ended with an error: {sentence}"))

    def _note_end(self) -> None:
        self._peer_ended = True
        self._news.set()

    def _break(self, kind: type[ConnectionError], text: str) -> None:
        if self._broken is None and not self._peer_ended:
            self._broken = (kind, text)
            self._hub._counts[f"lost.{kind.__name__}"] += 1
            self._news.set()
            if self._cancel is not None:
                self._cancel()
        self._ends.discard(self)

    def _give_up_if_silent(self) -> None:
        if self._hub.is_cut(self.me, self._peer) and self in self._ends:
            self._break(ConnectionAbortedError, f"{self._peer} was silent for {self._hub.weather.silence_s} s")


def _tensor_bytes(message: Any) -> int:
    """Return the bytes of all tensors in the fields of a message."""
    values = [getattr(message, field.name) for field in fields(message)]
    tensors = [tensor for value in values for tensor in (value if isinstance(value, tuple) else (value,))]
    return sum(getattr(tensor, "nbytes", 0) for tensor in tensors)
