"""A network in memory and in virtual time: whole messages, lines of any quality, and the same losses as the real one.

A `SimNetwork` is what the peers of a simulation share: a `Medium`, a DHT and the peers. `network.network(peer)` is one
peer's `PeerNetwork`. Messages pass unserialised: treat their tensors as read-only. What happens to a peer:

- `kill(peer)`: its streams break at the others one latency later, new ones are refused, its records expire by
  themselves. Afterwards `network(peer)` makes a new one, as after a restart;
- `silence(peer)`: nothing leaves or reaches it. Its partners give it up after `SILENCE_S`; `resume(peer)` delivers what
  was held back to those that did not;
- `partition(groups)`: the same between peers of different groups, and each group has a DHT of its own; `heal()`;
- `corrupt(peer, how)`: its next messages arrive wrong (see `Corruption`).

Beats are not simulated: a peer that computes for long is never given up. There is no flow control, for production never
has more than two messages of a conversation under way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from noloco_node.network.interface import Handler, UnknownTopic
from noloco_node.network.schema import Schema
from noloco_node.sim.network.conversation import StreamEnd, StreamHost
from noloco_node.sim.network.link_model import OPEN_S, Access, NetworkConditions
from noloco_node.sim.network.medium import Medium, message_bytes


class SimPeerNetwork(StreamHost):
    """One peer's view of a `SimNetwork`; implements `interface.PeerNetwork`."""

    def __init__(self, peer: str, medium: Medium, peers: Mapping[str, SimPeerNetwork]) -> None:
        super().__init__(peer, medium.line(peer))
        self._medium, self._peers = medium, peers
        self._alive = True
        self._served: dict[str, tuple[Schema, Handler]] = {}

    @property
    def dialable(self) -> bool:
        return not self._medium.dials_only(self.peer_id)

    async def addresses(self) -> tuple[str, ...]:
        """Return no address: in a simulation the id of a peer is enough to reach it."""
        return ()

    def talk(self, peer: str, topic: str, schema: Schema) -> AbstractAsyncContextManager[StreamEnd]:
        """Open a conversation; ConnectionRefusedError when the peer is gone, silent, only dials, or does not serve
        `topic`, and when the dial is lost.
        """
        return _Talk(self, peer, topic, schema)

    async def serve(self, topic: str, schema: Schema, handler: Handler) -> None:
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
        return {f"bytes.{topic}": counts.sent_bytes for topic, counts in self._byte_counts.items()}

    def kill(self) -> None:
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
            raise UnknownTopic(f"{peer} does not serve {topic}: another run or version")
        return other, served

    def answer(self, caller: StreamEnd, handler: Handler, schema: Schema) -> None:
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
    """The context of a conversation. Many are open at a time, and a generator for each would take a kilobyte."""

    __slots__ = ("_end", "_network", "_peer", "_schema", "_topic")

    def __init__(self, network: SimPeerNetwork, peer: str, topic: str, schema: Schema) -> None:
        self._network, self._peer, self._topic, self._schema = network, peer, topic, schema

    async def __aenter__(self) -> StreamEnd:
        self._end = await self._network.dial(self._peer, self._topic, self._schema)
        return self._end

    async def __aexit__(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        if kind is None:
            self._end.end()
        else:
            self._end.abort("this end was left")


_DEFAULTS = NetworkConditions()


class SimNetwork(Medium):
    """The world that the peers of one simulation share; see `Medium` for the parameters."""

    def __init__(
        self,
        conditions: NetworkConditions = _DEFAULTS,
        *,
        seed: int = 0,
        size_bytes: Callable[[Any, str], int] = message_bytes,
    ) -> None:
        super().__init__(conditions, seed, size_bytes)
        self._peers: dict[str, SimPeerNetwork] = {}
        self._bytes_of_killed: Counter[str] = Counter()

    def statistics(self) -> dict[str, int | float]:
        """Return counts of conversations, messages, records, losses and bytes by topic since the beginning."""
        counts = self._bytes_of_killed + Counter()
        for network in self._peers.values():
            counts.update(network.sent_bytes())
        counts.update({f"messages.{name}": count for name, count in self.message_counts.items()})
        sizes = {"held": len(self.held_outboxes), "failures": len(self.failures)}
        return {**self.counts, **counts, **self.dht.statistics(), **sizes}

    def network(self, peer: str, access: Access | None = None) -> SimPeerNetwork:
        """Return the network of a new peer, or of one that starts again after it was killed.

        Without `access` its line is what it was, at first unlimited.
        """
        if peer in self._peers:
            raise ValueError(f"there is a peer {peer} already")
        network = self._peers[peer] = SimPeerNetwork(peer, self, self._peers)
        if access is not None:
            self.set_access(peer, access)
        return network

    def peer(self, name: str) -> SimPeerNetwork | None:
        return self._peers.get(name)

    def open_calls(self, peer: str) -> int:
        """Return how many conversations a peer has open, its own and others'; 0 for one that is not there."""
        network = self._peers.get(peer)
        return 0 if network is None else len(network.ends)

    def kill(self, peer: str) -> None:
        """Let a peer vanish so that others notice at once."""
        network = self._peers.pop(peer)
        self._bytes_of_killed.update(network.sent_bytes())
        network.kill()

    def silence(self, peer: str) -> None:
        """Cut a peer off so that others notice only by its silence, and it theirs."""
        self._silent.add(peer)
        self._apply_cuts()

    def resume(self, peer: str) -> None:
        """Reconnect a silenced peer: what was held back arrives now."""
        self._silent.discard(peer)
        self._apply_cuts()

    def partition(self, groups: Sequence[Collection[str]]) -> None:
        """Let nothing pass between peers of different groups; peers that no group names are one more group.

        Each group's readers of the DHT find what was published before and what is published in their own group. Takes
        the place of a partition that lasts: what was published in it is known to all from now on.
        """
        sides: dict[str, int] = {}
        for number, group in enumerate(groups):
            for peer in group:
                if sides.setdefault(peer, number) != number:
                    raise ValueError(f"{peer} is in two groups")
        self._divide(sides)

    def heal(self) -> None:
        """End the partition: what was held back arrives now, and all records are known to all."""
        self._divide(None)

    def _divide(self, sides: dict[str, int] | None) -> None:
        self._sides = sides
        self.dht.unite()
        self._apply_cuts()

    def _apply_cuts(self) -> None:
        """Tell all conversations whether they are cut now, and deliver what no longer is."""
        self._update_state()
        for network in self._peers.values():
            for end in network.ends:
                end.note_cut(self.is_cut(end.me, end.peer))
        for release in list(self.held_outboxes):
            release()
