"""One peer's view of the network in memory: dialling, answering, publishing and reading as `port.Network` promises."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from noloco_node.network.interface import Handler
from noloco_node.network.wire import Schema
from noloco_node.sim.network.conversation import StreamByteCounts, StreamEnd

if TYPE_CHECKING:
    from noloco_node.sim.network.hub import SimNetwork


class SimPeerNetwork:
    """One peer's view of a `SimNetwork`; implements `port.Network`."""

    def __init__(self, hub: SimNetwork, peer: str) -> None:
        self.hub, self._peer, self._alive = hub, peer, True
        self.line = hub.line(peer)
        self.ends: dict[StreamEnd, None] = {}
        """The conversations that are open."""
        self.lingering: dict[StreamEnd, None] = {}
        """Conversations that were left while something of theirs waited for the line."""
        self.answering: dict[StreamEnd, asyncio.Task[None]] = {}
        self._topics: dict[str, tuple[Schema, Handler]] = {}
        self._traffic: dict[str, StreamByteCounts] = {}
        self._violations: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"MemoryNetwork({self._peer}, {len(self.ends)} conversations)"

    @property
    def peer_id(self) -> str:
        return self._peer

    @property
    def dialable(self) -> bool:
        """Whether this peer's line lets others in."""
        return not self.hub.dials_only(self._peer)

    async def addresses(self) -> tuple[str, ...]:
        """Return no address: whoever knows a peer's id can reach it here."""
        return ()

    def talk(self, peer: str, topic: str, schema: Schema) -> _Talk:
        """Open a conversation; ConnectionRefusedError when the peer is gone, silent, only dials, or does not serve
        `topic`, and when the dial is lost.
        """
        return _Talk(self, peer, topic, schema)

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
        """Answer conversations about `topic`, one task each."""
        self._topics[topic] = (schema, handler)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """Store a record; False when this peer is cut off, the stored one lives longer, or the name is another's."""
        hub, loop = self.hub, asyncio.get_running_loop()
        expires_s = loop.time() + lifetime_s
        await asyncio.sleep(hub.round_trip_s())
        if not self._alive or hub.is_cut(self._peer, self._peer):
            return False
        now_s = loop.time()
        place = (key, subkey)
        side = hub.side(self._peer)
        # It expires by the moment of its publication, so that one that was long on its way replaces no later one.
        if not hub.records.publish(place, (value, expires_s - now_s), now_s, side=side, author=self._peer):
            return False
        hub.records.forget(place, now_s - hub.weather.roster_lag_s, now_s)
        return True

    async def read_all(self, keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
        """Return the live records under each key, which must not be changed; none when this peer is cut off.

        They are asked for at once, and the slowest answer is waited for.
        """
        hub = self.hub
        await asyncio.sleep(max([hub.round_trip_s() for _ in keys], default=0.0))
        if not self._alive or hub.is_cut(self._peer, self._peer):
            return [{}] * len(keys)
        now_s, side, lag_s = asyncio.get_running_loop().time(), hub.side(self._peer), hub.weather.roster_lag_s
        lags = [lag_s * hub.lags.random() if lag_s else 0.0 for _ in keys]
        return [hub.records.read(key, now_s, lag_s=lag, side=side) for key, lag in zip(keys, lags, strict=True)]

    def statistics(self) -> dict[str, int | float]:
        """Return the bytes sent and received by topic, open conversations, and violations by who sent them."""
        found: dict[str, int | float] = {"conversations.open": len(self.ends)}
        for traffic in self._traffic.values():
            found[traffic.sent_name] = traffic.sent_bytes
            found[traffic.received_name] = traffic.received_bytes
        return found | {f"violations.{peer}": count for peer, count in self._violations.items()}

    # What conversations and the hub need.

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes sent about each topic as `bytes.TOPIC`."""
        return {f"bytes.{topic}": traffic.sent_bytes for topic, traffic in self._traffic.items()}

    def traffic(self, topic: str) -> StreamByteCounts:
        """Return the count of bytes about one topic."""
        traffic = self._traffic.get(topic)
        if traffic is None:
            traffic = self._traffic[topic] = StreamByteCounts(topic)
        return traffic

    def note_violation(self, peer: str) -> None:
        """Count a message that no peer may send against its sender."""
        self._violations[peer] += 1

    def die(self) -> None:
        """Break everything; see `SimNetwork.kill`."""
        self._alive = False
        for end in [*self.ends, *self.lingering]:
            end.die()
        for task in list(self.answering.values()):
            task.cancel()

    async def dial(self, peer: str, topic: str, schema: Schema) -> StreamEnd:
        """Open a conversation and start the other's handler; see `talk` for the errors."""
        hub, loop = self.hub, asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            if not (hub.cut and self._alive and hub.is_cut(self._peer, peer)):
                await asyncio.sleep(hub.round_trip_s())
            if hub.cut and self._alive and hub.is_cut(self._peer, peer):
                open_s = hub.weather.open_s
                await asyncio.sleep(max(0.0, begun_s + open_s - loop.time()))
                raise ConnectionRefusedError(f"{peer} did not answer within {open_s} s")
            other, (theirs_schema, handler) = self._accepts(peer, topic)
        except ConnectionRefusedError:
            hub.counts["conversations.refused"] += 1
            raise
        mine, theirs = StreamEnd(self, peer, topic, schema), StreamEnd(other, self._peer, topic, theirs_schema)
        mine.join(theirs)
        theirs.join(mine)
        other._answer(theirs, handler)
        hub.counts["conversations.opened"] += 1
        return mine

    def _accepts(self, peer: str, topic: str) -> tuple[SimPeerNetwork, tuple[Schema, Handler]]:
        """Return whom a dial has reached, and what it serves; ConnectionRefusedError when it has not."""
        hub = self.hub
        other = hub.peer(peer)
        if not self._alive or other is None or hub.dials_only(peer):
            raise ConnectionRefusedError(f"{peer} cannot be reached")
        if hub.weather.loss and hub.fates.random() < hub.weather.loss:
            hub.counts["dials.lost"] += 1
            raise ConnectionRefusedError(f"{peer} cannot be reached: the dial was lost")
        served = other._topics.get(topic)
        if served is None:
            raise ConnectionRefusedError(f"{peer} does not serve {topic}: another run or version")
        return other, served

    def _answer(self, end: StreamEnd, handler: Handler) -> None:
        name = f"{self._peer} answers {end.peer} about {end.topic}"
        task = asyncio.get_running_loop().create_task(self._handle(end, handler), name=name)
        self.answering[end] = task
        end.begin(task)

    async def _handle(self, end: StreamEnd, handler: Handler) -> None:
        end.note_started()
        try:
            await handler(end)
        except ConnectionError as error:
            end.fail(str(error))
        except asyncio.CancelledError:
            end.break_off("the handler was cancelled")
            raise
        except Exception as error:  # the border: a bug of a handler must not end the simulation unseen
            self.hub.failures.append((self._peer, error))
            end.fail(f"{type(error).__name__}: {error}")
        else:
            end.leave()
        finally:
            end.note_finished()
            self.answering.pop(end, None)


class _Talk:
    """The context of one conversation; see `port.Network.talk`."""

    __slots__ = ("_end", "_network", "_peer", "_schema", "_topic")

    def __init__(self, network: SimPeerNetwork, peer: str, topic: str, schema: Schema) -> None:
        self._network, self._peer, self._topic, self._schema = network, peer, topic, schema

    async def __aenter__(self) -> StreamEnd:
        self._end = await self._network.dial(self._peer, self._topic, self._schema)
        return self._end

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end.leave()
        else:
            self._end.break_off("this end was left")
