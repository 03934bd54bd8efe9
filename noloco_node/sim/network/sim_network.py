"""A network in memory and in virtual time: whole messages, lines of any quality, and the same losses as the real one.

A `SimNetwork` is what the peers of a simulation share: a `Medium`, a DHT and the peers. `network.network(peer)` is one
peer's `PeerNetwork`. Messages pass unserialised (both ends then share their tensors: treat them as read-only), in order
within a conversation. How long that takes and what can go wrong is in `conditions` and each peer's `Access` (see
`link_model`, `bandwidth`, `outbox`). What happens to a peer is said here:

- `kill(peer)`: its streams break at the others one latency later, new ones are refused, its records expire by
  themselves. Afterwards `network(peer)` makes a new one, as after a restart;
- `silence(peer)`: nothing leaves or reaches it, as with a host that lost its power or a process that is stopped.
  Whoever talks with it gives it up after `SILENCE_S`; `resume(peer)` delivers what was held back to those that did not;
- `partition(groups)`: the same between peers of different groups, and each group has a DHT of its own; `heal()`;
- `corrupt(peer, how)`: its next messages arrive wrong (see `corruption`).

Only these accuse anybody: the beats of a real network are not simulated, but it is as if they were sent, so who thinks
for long is never given up for it. Nor is there flow control: production asks and answers, and never has more than two
messages of a conversation under way.

Conversations end as `PeerNetwork.talk` says: an orderly end lets the other's handler finish, a break cancels it.

To the bit: nothing here depends on hashes or addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from noloco_node.sim.network.link_model import Access, NetworkConditions
from noloco_node.sim.network.medium import Medium, message_bytes
from noloco_node.sim.network.peer_network import SimPeerNetwork

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
        """Return the network of a peer that is alive."""
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
        for outbox in list(self.held_outboxes):
            outbox.release()
