"""A search for the nodes of the DHT nearest to a place, among nodes that may lie about others. No I/O, no clock.

The search asks the nearest nodes that it has heard of, and hears of further ones from their answers, until the nearest
have answered. A node counts if it answers, at the place that it claims itself. A node that names several others which
are silent, or elsewhere, is not believed any more, so it cannot hide those that are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Generic, TypeVar

Peer = TypeVar("Peer")
Node = TypeVar("Node")

AT_ONCE, MOST_ASKED = 4, 48
"""Nodes that a search asks at the same time, and in all."""
MOST_NAMED = 32
"""Nodes of one answer that are looked at."""
MOST_WRONG = 3
"""A node is believed until so many of those that it named, and as many as are right, are silent or elsewhere."""


class NodeSearch(Generic[Peer, Node]):
    """One search. `most`: how many nodes it is for. `table`: the peers that our routing table knows, by node.

    `distance`: of a node from the place. `me`: our own peer, which is not asked.
    """

    def __init__(self, distance: Callable[[Node], int], most: int, table: Mapping[Node, Peer], me: Peer) -> None:
        self.answered: dict[Peer, Node] = {}
        """Where each node is that answered."""
        self._distance, self._most = distance, most
        self._told: dict[Peer, dict[Peer | None, Node]] = {peer: {None: place} for place, peer in table.items()}
        """Where each node is, by who said so; None: our routing table."""
        self._asked = {me}
        self._right, self._wrong = Counter[Peer | None](), Counter[Peer | None]()
        """How many of the nodes that each node named are where it said, and how many are silent or elsewhere."""

    def nearest(self) -> list[Peer]:
        return sorted(self.answered, key=lambda peer: self._distance(self.answered[peer]))[: self._most]

    def next_batch(self) -> list[Peer]:
        """Return the nodes to ask next; none where the nearest have answered."""
        nearest = self.nearest()
        within = self._distance(self.answered[nearest[-1]]) if len(nearest) == self._most else None
        ahead = {}
        for peer, told in self._told.items():
            believed = [self._distance(place) for teller, place in told.items() if self._is_believed(teller)]
            if believed and peer not in self._asked:
                ahead[peer] = min(believed)
        order = sorted((peer for peer in ahead if within is None or ahead[peer] < within), key=lambda peer: ahead[peer])
        batch = order[: min(AT_ONCE, MOST_ASKED - len(self._asked))]
        self._asked.update(batch)
        return batch

    def note(self, peer: Peer, named: Mapping[Node, Peer] | None, place: Node | None) -> None:
        """Note the nodes that a node has named by its answer; None where it did not answer.

        `place`: where it says that it is; None is unknown.
        """
        for teller, told in self._told[peer].items():
            (self._wrong if named is None or place not in (None, told) else self._right)[teller] += 1
        if named is None:
            return
        self.answered[peer] = min(self._told[peer].values(), key=self._distance) if place is None else place
        for each, other in islice(named.items(), MOST_NAMED):
            self._told.setdefault(other, {})[peer] = each

    def _is_believed(self, teller: Peer | None) -> bool:
        return teller is None or self._wrong[teller] < max(MOST_WRONG, self._right[teller])
