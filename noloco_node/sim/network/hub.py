"""A network in memory and in virtual time: whole messages, lines of any quality, and the same losses as the real one.

A `SimNetwork` is the world. `hub.network(peer)` is one peer's `port.Network`. Messages pass unserialised (both ends
then share their tensors: treat them as read-only), in order within a conversation. How long that takes and what can go
wrong is in `hub.weather` and each peer's `Access` (see `lines`, `transfer`, `way`). What happens to a peer is said to
the hub:

- `kill(peer)`: its streams break at the others one latency later, new ones are refused, its records expire by
  themselves. Afterwards `network(peer)` makes a new one, as after a restart;
- `silence(peer)`: nothing leaves or reaches it, as with a host that lost its power or a process that is stopped.
  Whoever talks with it gives it up after `silence_s`; `resume(peer)` delivers what was held back to those that did not;
- `partition(groups)`: the same between peers of different groups, and each group has a DHT of its own; `heal()`;
- `tamper(peer, how)`: its next messages arrive wrong (see `tamper`).

Only these accuse anybody: the beats of a real network are not simulated, but it is as if they were sent, so who thinks
for long is never given up for it. Nor is there flow control: production asks and answers, and never has more than two
messages of a conversation under way.

Conversations end as `port.Network.talk` says: an orderly end lets the other's handler finish, a break cancels it.

To the bit: every draw comes from a generator of its purpose, in the order of events, and nothing here depends on hashes
or addresses.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

from noloco_node.sim.network.bandwidth import AccessLine, Link, LinkUse, Transfer
from noloco_node.sim.network.corruption import Corruption, tensors_of
from noloco_node.sim.network.dht import SimDht
from noloco_node.sim.network.link_model import Access, NetworkConditions
from noloco_node.sim.network.outbox import Outbox
from noloco_node.sim.network.peer_network import SimPeerNetwork

__all__ = ["CALM", "HEAD_BYTES", "Corruption", "LinkUse", "SimNetwork", "SimPeerNetwork", "message_bytes"]

CALM = NetworkConditions()
HEAD_BYTES = 100
"""About what a message takes on the line beside its tensors."""
_ELSEWHERE = -1
"""The side of the peers that no group of a partition names."""


def message_bytes(message: object, topic: str) -> int:
    """Return the bytes of a message's tensors as they are in memory, and of a header."""
    return HEAD_BYTES + sum(tensor.nbytes for tensor in tensors_of(message))


class _Held(NamedTuple):
    """A delivery that waits for two peers to be heard again, and since when."""

    since_s: float
    sender: str
    receiver: str
    arrive: Callable[[], object]
    size_bytes: int


class SimNetwork:
    """The world that the peers of one simulation share.

    `size_bytes(message, topic)` says what a message takes on the line.
    """

    def __init__(
        self, weather: NetworkConditions = CALM, *, seed: int = 0, size_bytes: Callable[[Any, str], int] = message_bytes
    ) -> None:
        self.failures: list[tuple[str, Exception]] = []
        """What handlers raised beside a `ConnectionError`, with the peer whose handler it was: bugs, as a rule."""
        self.size_bytes = size_bytes
        self.counts: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self.records = SimDht()
        self.fates, self.spoils = Random(f"{seed}|network|fate"), Random(f"{seed}|network|tamper")
        self.lags, self._latencies = Random(f"{seed}|network|lag"), Random(f"{seed}|network|latency")
        self.holding: dict[Outbox, None] = {}
        self._networks: dict[str, SimPeerNetwork] = {}
        self._lines: dict[str, AccessLine] = {}
        self._accesses: dict[str, Access] = {}
        self._limited: dict[str, None] = {}
        self._silent: dict[str, None] = {}
        self._sides: dict[str, int] | None = None
        self._held: deque[_Held] = deque()
        self._tamperings: dict[str, deque[Corruption]] = {}
        self._bygone_bytes: Counter[str] = Counter()
        self.cut = False
        self.weather = weather

    def __repr__(self) -> str:
        return f"Hub({len(self._networks)} peers, {self._weather.latency.mean_s} s)"

    def statistics(self) -> dict[str, int | float]:
        """Return counts of conversations, messages, records, losses and bytes by topic since the beginning."""
        counts = self._bygone_bytes + Counter()
        for network in self._networks.values():
            counts.update(network.sent_bytes())
        counts.update({f"messages.{name}": count for name, count in self.messages.items()})
        sizes = {"held": self.held, "failures": len(self.failures)}
        return {**self.counts, **counts, **self.records.statistics(), **sizes}

    @property
    def held(self) -> int:
        """How many messages and streams are held back just now."""
        return len(self._held) + len(self.holding)

    # The lines.

    @property
    def weather(self) -> NetworkConditions:
        """What all lines have in common; another may be set at any moment."""
        return self._weather

    @weather.setter
    def weather(self, weather: NetworkConditions) -> None:
        self._weather = weather
        self.draw_latency = weather.latency.sampler(self._latencies)
        self._latency_s = weather.latency.mean_s
        self._look_around()

    def set_access(self, peer: str, access: Access) -> None:
        """Give a peer another line; transfers under way take the new rates at once."""
        now_s = asyncio.get_running_loop().time()
        line = self.line(peer)
        self._accesses[peer] = access
        line.up.change(access.up_bytes_per_s, now_s)
        line.down.change(access.down_bytes_per_s, now_s)
        if min(line.up.rate, line.down.rate) < math.inf:
            self._limited[peer] = None
        else:
            self._limited.pop(peer, None)
        self._look_around()

    def dials_only(self, peer: str) -> bool:
        """Say whether nobody can open a stream to a peer."""
        access = self._accesses.get(peer)
        return access is not None and access.dials_only

    def line(self, peer: str) -> AccessLine:
        """Return a peer's line; it outlives the peer's restarts."""
        line = self._lines.get(peer)
        if line is None:
            now_s = asyncio.get_running_loop().time()
            line = self._lines[peer] = AccessLine(Link(math.inf, now_s), Link(math.inf, now_s))
        return line

    def link_use(self, peer: str) -> tuple[LinkUse, LinkUse]:
        """Return the use of a peer's uplink and of its downlink since it came."""
        now_s = asyncio.get_running_loop().time()
        line = self.line(peer)
        return line.up.use(now_s), line.down.use(now_s)

    def carry(self, sender: str, receiver: str, arrive: Callable[[], object], size_bytes: int = 0) -> None:
        """Call `arrive` when something of `size_bytes` that leaves `sender` now has reached `receiver`.

        Takes a transfer where a line has a bandwidth, a latency, and perhaps `late_s`. Nothing is lost or doubled, and
        one delivery may overtake another. While nothing passes between the two it is held back, for `silence_s` at
        most; then it is dropped.
        """
        if self.easy:
            asyncio.get_running_loop().call_later(self._latency_s, arrive)
            return
        if self.cut and self.is_cut(sender, receiver):
            now_s = asyncio.get_running_loop().time()
            self._held.append(_Held(now_s, sender, receiver, arrive, size_bytes))
            self._drop_stale(now_s)
            return
        if size_bytes and self._limited:
            up, down = self.line(sender).up, self.line(receiver).down
            if min(up.rate, down.rate) < math.inf:
                Transfer(up, down, size_bytes, partial(self._launch, arrive))
                return
        self._launch(arrive)

    def _launch(self, arrive: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_later(self._delay_s("messages"), arrive)

    def _delay_s(self, what: str) -> float:
        """Draw how long one of `what` is on its way, its size aside."""
        weather = self._weather
        if weather.late and self.fates.random() < weather.late:
            self.counts[f"{what}.late"] += 1
            return self.draw_latency() + weather.late_s
        return self.draw_latency()

    def round_trip_s(self) -> float:
        """Draw the time of a dial, or of a question to the DHT, and its answer."""
        return 2 * self._latency_s if self.easy else self._delay_s("dials") + self.draw_latency()

    # The peers, and what happens to them.

    def network(self, peer: str, access: Access | None = None) -> SimPeerNetwork:
        """Return the network of a new peer, or of one that starts again after it was killed.

        Without `access` its line is what it was, at first unlimited.
        """
        if peer in self._networks:
            raise ValueError(f"there is a peer {peer} already")
        network = self._networks[peer] = SimPeerNetwork(self, peer)
        if access is not None:
            self.set_access(peer, access)
        return network

    def open_calls(self, peer: str) -> int:
        """Return how many conversations a peer has open, its own and others'; 0 for one that is not there."""
        network = self._networks.get(peer)
        return 0 if network is None else len(network.ends)

    def kill(self, peer: str) -> None:
        """Let a peer vanish so that others notice at once."""
        network = self._networks.pop(peer)
        self._bygone_bytes.update(network.sent_bytes())
        network.die()

    def silence(self, peer: str) -> None:
        """Cut a peer off so that others notice only by its silence, and it theirs."""
        self._silent[peer] = None
        self._redraw()

    def resume(self, peer: str) -> None:
        """Reconnect a silenced peer: what was held back arrives now."""
        self._silent.pop(peer, None)
        self._redraw()

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
        self._sides = sides
        self.records.unite()
        self._redraw()

    def heal(self) -> None:
        """End the partition: what was held back arrives now, and all records are known to all."""
        self._sides = None
        self.records.unite()
        self._redraw()

    def tamper(self, peer: str, how: Corruption, count: int = 1) -> None:
        """Let the next `count` messages with tensors that a peer sends arrive wrong."""
        self._tamperings.setdefault(peer, deque()).extend([how] * count)
        self._look_around()

    def next_tampering(self, peer: str, message: Any) -> Corruption | None:
        """Take what is to be wrong with this message that a peer sends, if anything."""
        waiting = self._tamperings.get(peer)
        if waiting is None or not any(tensor.numel() for tensor in tensors_of(message)):
            return None
        how = waiting.popleft()
        if not waiting:
            del self._tamperings[peer]
            self._look_around()
        return how

    def is_cut(self, one: str, other: str) -> bool:
        """Say whether nothing passes between two peers."""
        return one in self._silent or other in self._silent or self.side(one) != self.side(other)

    def side(self, peer: str) -> int | None:
        """Return on which side of the partition a peer is; None when there is no partition."""
        return None if self._sides is None else self._sides.get(peer, _ELSEWHERE)

    def note_break(self, kind: type[ConnectionError]) -> None:
        """Count one end of a conversation that broke."""
        given_up = kind is ConnectionAbortedError
        self.counts["conversations.given_up" if given_up else "conversations.broken"] += 1
        self.counts[f"lost.{kind.__name__}"] += 1

    def peer(self, name: str) -> SimPeerNetwork | None:
        """Return the network of a peer that is alive."""
        return self._networks.get(name)

    def _look_around(self) -> None:
        """Note what need not be asked of every message."""
        weather = self._weather
        self.free = not (self.cut or self._limited or self._tamperings)
        """Whether nothing keeps any message from being put in flight at once."""
        self.easy = self.free and weather.latency.is_constant and not weather.late
        """Whether besides everything takes the same time."""
        self.strange = 1 - (1 - weather.loss) * (1 - weather.late) * (1 - weather.duplicate)
        """Share of messages that are lost, late or doubled."""

    def _redraw(self) -> None:
        """Tell all conversations whether they are cut now, and deliver what no longer is."""
        self.cut = bool(self._silent) or self._sides is not None
        self._look_around()
        for network in self._networks.values():
            for end in network.ends:
                end.note_cut(self.cut and self.is_cut(end.me, end.peer))
        for way in list(self.holding):
            way.release()
        self._drop_stale(asyncio.get_running_loop().time())
        held, self._held = self._held, deque()
        for since_s, sender, receiver, arrive, size_bytes in held:
            if self.is_cut(sender, receiver):
                self._held.append(_Held(since_s, sender, receiver, arrive, size_bytes))
            else:
                self.carry(sender, receiver, arrive, size_bytes)

    def _drop_stale(self, now_s: float) -> None:
        """Forget what was held back for longer than anybody is patient."""
        while self._held and now_s - self._held[0].since_s > self._weather.silence_s:
            self._held.popleft()
