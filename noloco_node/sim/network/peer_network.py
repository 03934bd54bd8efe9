"""One peer's view of the network in memory: dialling, answering, publishing and reading as `PeerNetwork` promises."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType

from noloco_node.network.interface import Handler
from noloco_node.network.schema import Schema
from noloco_node.sim.network.conversation import StreamEnd, StreamHost
from noloco_node.sim.network.link_model import OPEN_S
from noloco_node.sim.network.medium import Medium


class SimPeerNetwork(StreamHost):
    """One peer's view of a `SimNetwork`; implements `interface.PeerNetwork`."""

    def __init__(self, peer: str, medium: Medium, peers: Mapping[str, SimPeerNetwork]) -> None:
        super().__init__(peer, medium.line(peer))
        self._medium, self._peers = medium, peers
        self._alive = True
        self._served: dict[str, tuple[Schema, Handler]] = {}

    @property
    def dialable(self) -> bool:
        """Whether this peer's line lets others in."""
        return not self._medium.dials_only(self.peer_id)

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
        self._served[topic] = (schema, handler)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """Store a record; False when this peer is cut off, the stored one lives longer, or the name is another's."""
        medium, loop = self._medium, asyncio.get_running_loop()
        expires_s = loop.time() + lifetime_s
        await asyncio.sleep(medium.round_trip_s())
        if not self._alive or medium.is_cut(self.peer_id, self.peer_id):
            return False
        now_s = loop.time()
        place = (key, subkey)
        side = medium.side(self.peer_id)
        # It expires by the moment of its publication, so that one that was long on its way replaces no later one.
        if not medium.dht.publish(place, (value, expires_s - now_s), now_s, side=side, author=self.peer_id):
            return False
        medium.dht.forget(place, now_s - medium.conditions.roster_lag_s, now_s)
        return True

    async def read_all(self, keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
        """Return the live records under each key, which must not be changed; none when this peer is cut off.

        They are asked for at once, and the slowest answer is waited for.
        """
        medium = self._medium
        await asyncio.sleep(max([medium.round_trip_s() for _ in keys], default=0.0))
        if not self._alive or medium.is_cut(self.peer_id, self.peer_id):
            return [{}] * len(keys)
        now_s, side = asyncio.get_running_loop().time(), medium.side(self.peer_id)
        lag_s = medium.conditions.roster_lag_s
        lags = [lag_s * medium.lag_rng.random() if lag_s else 0.0 for _ in keys]
        return [medium.dht.read(key, now_s, lag_s=lag, side=side) for key, lag in zip(keys, lags, strict=True)]

    def statistics(self) -> dict[str, int | float]:
        """Return the bytes sent and received by topic, open conversations, and violations by who sent them."""
        found: dict[str, int | float] = {"conversations.open": len(self.ends)}
        for counts in self._byte_counts.values():
            found[counts.sent_name] = counts.sent_bytes
            found[counts.received_name] = counts.received_bytes
        return found | {f"violations.{peer}": count for peer, count in self.violations.items()}

    # What `SimNetwork` needs.

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes sent about each topic as `bytes.TOPIC`."""
        return {f"bytes.{topic}": counts.sent_bytes for topic, counts in self._byte_counts.items()}

    def kill(self) -> None:
        """Break everything; see `SimNetwork.kill`."""
        self._alive = False
        for end in [*self.ends, *self.lingering]:
            end.kill()
        for task in list(self.answering.values()):
            task.cancel()

    # How a conversation begins, and what answers it.

    async def dial(self, peer: str, topic: str, schema: Schema) -> StreamEnd:
        """Open a conversation and start the other's handler; see `talk` for the errors."""
        medium, loop = self._medium, asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            if not (medium.state.has_cuts and self._alive and medium.is_cut(self.peer_id, peer)):
                await asyncio.sleep(medium.round_trip_s())
            if medium.state.has_cuts and self._alive and medium.is_cut(self.peer_id, peer):
                await asyncio.sleep(max(0.0, begun_s + OPEN_S - loop.time()))
                raise ConnectionRefusedError(f"{peer} did not answer within {OPEN_S} s")
            other, (their_schema, handler) = self._accepts(peer, topic)
        except ConnectionRefusedError:
            medium.counts["conversations.refused"] += 1
            raise
        mine = StreamEnd(medium, self, peer, topic, schema)
        self.ends[mine] = None
        other.answer(mine, handler, their_schema)
        medium.counts["conversations.opened"] += 1
        return mine

    def _accepts(self, peer: str, topic: str) -> tuple[SimPeerNetwork, tuple[Schema, Handler]]:
        """Return whom a dial has reached, and what it serves; ConnectionRefusedError when it has not."""
        medium = self._medium
        other = self._peers.get(peer)
        if not self._alive or other is None or medium.dials_only(peer):
            raise ConnectionRefusedError(f"{peer} cannot be reached")
        if medium.conditions.loss and medium.fate_rng.random() < medium.conditions.loss:
            medium.counts["dials.lost"] += 1
            raise ConnectionRefusedError(f"{peer} cannot be reached: the dial was lost")
        served = other._served.get(topic)
        if served is None:
            raise ConnectionRefusedError(f"{peer} does not serve {topic}: another run or version")
        return other, served

    def answer(self, caller: StreamEnd, handler: Handler, schema: Schema) -> None:
        """Join a conversation that another peer has opened, and start its handler."""
        end = StreamEnd(self._medium, self, caller.me, caller.topic, schema)
        caller.join(end)
        end.join(caller)
        self.ends[end] = None
        name = f"{self.peer_id} answers {end.peer} about {end.topic}"
        self.answering[end] = asyncio.get_running_loop().create_task(self._handle(end, handler), name=name)

    async def _handle(self, end: StreamEnd, handler: Handler) -> None:
        try:
            await handler(end)
        except ConnectionError as error:
            end.fail(str(error))
        except asyncio.CancelledError:
            end.abort("the handler was cancelled")
            raise
        except Exception as error:  # the border: a bug of a handler must not end the simulation unseen
            self._medium.failures.append((self.peer_id, error))
            end.fail(f"{type(error).__name__}: {error}")
        else:
            end.end()
        finally:
            self.answering.pop(end, None)


class _Talk:
    """The context of one conversation; see `interface.PeerNetwork.talk`."""

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
            self._end.end()
        else:
            self._end.abort("this end was left")
