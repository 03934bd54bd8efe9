"""A search for the nodes of the DHT nearest to a place, among nodes that may lie about others. No I/O, no clock.

The search asks the nearest nodes that it has heard of, and hears of further ones from their answers, until the nearest
have answered. Where a node is follows from its peer, so nobody can tell a lie about that. Only a node that answers
counts. A node that names several others which are silent is not believed any more, so it cannot hide those that are
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Generic, TypeVar

Peer = TypeVar("Peer")

AT_ONCE, MOST_ASKED = 4, 48  # nodes that a search asks at the same time, and in all
MOST_NAMED = 32  # nodes of one answer that are looked at
MOST_WRONG = 3  # a node is believed until so many of those that it named, and as many as have answered, are silent


class NodeSearch(Generic[Peer]):
    """One search. `distance`: of a peer's node from the place. `most`: how many nodes it is for.

    `table`: the peers of our routing table. `me`: our own peer, which counts and is not asked.
    """

    def __init__(self, distance: Callable[[Peer], int], most: int, table: Iterable[Peer], me: Peer) -> None:
        self._distance, self._most = distance, most
        self._tellers: dict[Peer, set[Peer | None]] = {peer: {None} for peer in table}
        """The peer that named each peer; None: our routing table did."""
        self._asked, self._answered = {me}, {me}
        self._right, self._wrong = Counter[Peer | None](), Counter[Peer | None]()
        """How many of the nodes that each node named have answered, and how many are silent."""

    def nearest(self) -> list[Peer]:
        """Return the nearest of the nodes that have answered, the nearest first."""
        return sorted(self._answered, key=self._distance)[: self._most]

    def next_batch(self) -> list[Peer]:
        """Return the nodes to ask next; none where the nearest have answered."""
        nearest = self.nearest()
        within = self._distance(nearest[-1]) if len(nearest) == self._most else None
        ahead = [
            peer
            for peer, tellers in self._tellers.items()
            if peer not in self._asked
            and (within is None or self._distance(peer) < within)
            and any(map(self._is_believed, tellers))
        ]
        batch = sorted(ahead, key=self._distance)[: min(AT_ONCE, MOST_ASKED - len(self._asked))]
        self._asked.update(batch)
        return batch

    def note(self, peer: Peer, named: Iterable[Peer] | None) -> None:
        """Note the peers that a node has named by its answer; None where it did not answer."""
        for teller in self._tellers[peer]:
            (self._wrong if named is None else self._right)[teller] += 1
        if named is None:
            return
        self._answered.add(peer)
        for other in islice(named, MOST_NAMED):
            self._tellers.setdefault(other, set()).add(peer)

    def _is_believed(self, teller: Peer | None) -> bool:
        return teller is None or self._wrong[teller] < max(MOST_WRONG, self._right[teller])
