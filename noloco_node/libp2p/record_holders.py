"""The nodes of the DHT near one place: how they are found, and which of them to ask. No I/O, no clock.

A record is stored with the `WRITTEN` nodes nearest to its key, so each of them holds all records of the key. A reading
therefore asks one of them, another each time, and asks more nodes only where the answer calls for it: it
lacks records that must still be there, or most of them are no newer than before.

Hostile nodes may place themselves beside a key, take all records, and return none, or return to each peer its own
alone. So a node is doubted that took our record and answers without it, or without most of what others have. A doubted
node comes last from then on, and the next nearest takes its place. All peers that publish under the key find that out.
So that honest nodes have the records, the first publication and every twelfth go to all `SEARCHED` nodes. The first
reading asks all nodes that a record is stored with, and as many of the others, the farthest of them: all of the others
have the same records, and a liar would place itself near. Every twelfth reading asks one of the others besides.

Nodes come and go. Every few minutes one of these nodes, another each time, is asked to name its neighbours. One of them
that is nearer to the key than a node that records are stored with is a candidate, as any is while fewer than `SEARCHED`
are known: it is asked beside the next reading, and takes its place once it answers. This costs a tenth of a search,
which is needed every two hours then, or after five minutes where a third of the nodes have gone: else liars that stay
would be the last ones known. A node that named several others which are silent is not believed until the next search
(`NodeSearch` has the same rule).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from noloco_node.libp2p.short_answers import Version

Peer = TypeVar("Peer")

AT_ONCE, MOST_ASKED = 4, 48  # nodes that a search asks at the same time, and in all
MOST_NAMED = 32  # nodes of one answer that are looked at
MOST_WRONG = 3  # a node is believed until so many of those that it named, and as many as have answered, are silent

WRITTEN, SEARCHED = 3, 12
"""Nodes that a record is stored with, with which readings take turns, and nodes that a search finds."""
MORE_EVERY = 12
"""One of so many publications, or readings, goes to more nodes. Records in the DHT outlive the time between two."""
SEARCH_S, SEARCH_AGAIN_S = 300.0, 5.0  # a search is good for so long; after one, the next waits at least so long
HEARD_PAUSES, LONGEST_SEARCH_S = 1.5, 7200.0
"""A search is good for so long while nodes name their neighbours, within `SEARCH_S` or so many pauses between uses."""
DOUBTED_S, SILENT_S = 600.0, 30.0
"""For so long a node comes last that lost what it took, and nobody asks one that did not answer."""
WITNESSED = 12
"""Before so many first publications, and then before one of `MORE_EVERY`, a node is asked what it has of us."""
STALE_S, STALE_PERIODS = 15.0, 1.5
"""A record that has not changed for so long, or for so many times of its last two versions' distance, may have a newer
version elsewhere.
"""
MARGIN_S = 60.0  # a record that expires within this time may be gone by another node's clock


class PeerId(Protocol):
    """hivemind's PeerID."""

    def to_base58(self) -> str: ...
    def to_bytes(self) -> bytes: ...


class NodeSearch(Generic[Peer]):
    """A search for the nodes of the DHT nearest to a place, among nodes that may lie about others.

    It asks the nearest nodes that it has heard of, and hears of further ones from their answers, until the nearest have
    answered. Where a node is follows from its peer, so nobody can tell a lie about that. Only a node that answers
    counts. A node that names several others which are silent is not believed any more, so it cannot hide those that
    are there.

    `distance`: of a peer's node from the place. `most`: how many nodes it is for. `table`: the peers of our routing
    table. `me`: our own peer, which counts and is not asked.
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


class _Known(NamedTuple):
    """The newest version that we know, when we first saw it (loop seconds), and how long after the one before it."""

    version: Version
    since_s: float
    period_s: float = 0.0


class Holders:
    """What we know of one place: the nodes near it, and the records that were there.

    `distance`: of a peer's node from the place.
    """

    def __init__(self, distance: Callable[[PeerId], int]) -> None:
        self._distance = distance
        self.known: dict[str, _Known] = {}  # the records that the last reading found, by subkey
        self._nearest: tuple[PeerId, ...] = ()
        """Nodes that have answered, the nearest first."""
        self._candidates: dict[PeerId, PeerId] = {}
        """Nodes that have not answered yet, each with the one that named it."""
        self._right, self._wrong = Counter[PeerId](), Counter[PeerId]()
        """How many candidates of each node have answered, and how many were silent, since the last search."""
        self._doubted_until_s: dict[PeerId, float] = {}
        self._took: dict[PeerId, float] = {}
        """The expiry of the version of our own record that each node has taken last."""
        self._searched_s = self._heard_s = float("-inf")
        """When we searched the nodes last, and when one last named its neighbours (loop seconds)."""
        self._neighbours = 0
        self._used_s, self._pause_s = 0.0, 0.0
        """When we last read or wrote here (loop seconds), and how long after the time before."""
        self._in_doubt = False  # whether a node lacked what must be there since the last search
        self._readings = self._writings = self._hearings = 0

    # Which nodes there are.

    def is_search_due(self, now_s: float, neighbours: int) -> bool:
        """Say whether the nodes near the place are to be searched anew. `neighbours`: in our routing table."""
        age_s, unheard_s = now_s - self._searched_s, now_s - max(self._searched_s, self._heard_s)
        changed = 8 * abs(neighbours - self._neighbours) > self._neighbours
        good = sum(not self._is_doubted(peer, now_s) for peer in self._nearest)
        # We count as one: a search finds us, too.
        too_few = good < min(WRITTEN, neighbours + 1)
        return (
            age_s > (SEARCH_S if self._in_doubt else LONGEST_SEARCH_S)
            or unheard_s > max(SEARCH_S, HEARD_PAUSES * self._pause_s)
            or (age_s > SEARCH_AGAIN_S and (changed or too_few))
        )

    def note_search(self, nearest: Sequence[PeerId], now_s: float, neighbours: int) -> None:
        self._nearest, self._searched_s, self._neighbours = tuple(nearest), now_s, neighbours
        self._in_doubt = False
        self._candidates.clear()
        self._right.clear()
        self._wrong.clear()
        self._took = {peer: expiry for peer, expiry in self._took.items() if peer in nearest}
        self._doubted_until_s = {peer: end_s for peer, end_s in self._doubted_until_s.items() if end_s > now_s}

    def is_hearing_due(self, now_s: float) -> bool:
        """Say whether a node is to be asked for its neighbours, lest a search be due at the next use."""
        return now_s - max(self._searched_s, self._heard_s) > SEARCH_S - self._pause_s and bool(self._nearest)

    def next_teller(self, now_s: float) -> PeerId:
        """Return the node to ask for its neighbours, another each time: liars would place themselves near."""
        self._hearings += 1
        return _turned(self.order(now_s), self._hearings)[0]

    def note_named(self, teller: PeerId, named: Sequence[PeerId], now_s: float) -> None:
        """Note the peers that a node names as near. Those that are nearer than where we write are to be asked.

        While fewer than `SEARCHED` are known, farther ones are, too.
        """
        if self._wrong[teller] >= max(MOST_WRONG, self._right[teller]):
            return
        self._heard_s = now_s
        written = self.order(now_s)[:WRITTEN]
        within = self._distance(written[-1]) if len(self._nearest) >= SEARCHED else math.inf
        for peer in named[:MOST_NAMED]:
            if peer not in self._nearest and not self._is_doubted(peer, now_s) and self._distance(peer) < within:
                self._candidates.setdefault(peer, teller)
        nearest = sorted(self._candidates, key=self._distance)[:WRITTEN]
        self._candidates = {peer: self._candidates[peer] for peer in nearest}

    def note_answer(self, peer: PeerId) -> None:
        """Note that a node answers: a candidate takes its place."""
        teller = self._candidates.pop(peer, None)
        if teller is not None:
            self._right[teller] += 1
            self._nearest = tuple(sorted((*self._nearest, peer), key=self._distance)[:SEARCHED])

    def note_silence(self, peer: PeerId, now_s: float) -> None:
        """Note that a node does not answer. It is left out for a while; who lives is named again."""
        teller = self._candidates.pop(peer, None)
        if teller is not None:
            self._wrong[teller] += 1
        self._nearest = tuple(other for other in self._nearest if other != peer)
        self._in_doubt |= 3 * len(self._nearest) <= 2 * SEARCHED
        self._doubt(peer, now_s, SILENT_S)

    def _use(self, now_s: float) -> None:
        self._used_s, self._pause_s = now_s, now_s - self._used_s if self._used_s else 0.0

    def order(self, now_s: float) -> list[PeerId]:
        """Return the nodes, the nearest first; those in doubt come last."""
        return sorted(self._nearest, key=lambda peer: self._is_doubted(peer, now_s))

    def _doubt(self, peer: PeerId, now_s: float, for_s: float) -> None:
        self._doubted_until_s[peer] = max(now_s + for_s, self._doubted_until_s.get(peer, 0.0))

    def _is_doubted(self, peer: PeerId, now_s: float) -> bool:
        return self._doubted_until_s.get(peer, 0.0) > now_s

    # Writing.

    def next_writing(self, now_s: float) -> tuple[list[PeerId], int]:
        """Return the nodes that the next publication asks, in this order, and how many of them have to answer."""
        turn = self._writings
        self._use(now_s)
        self._writings += 1
        # A candidate is nearer than one of those that would be stored with.
        order = sorted([*self._nearest, *self._candidates], key=self._distance)
        order.sort(key=lambda peer: self._is_doubted(peer, now_s))
        return order, SEARCHED if turn % MORE_EVERY == 0 else WRITTEN

    def next_witness(self, now_s: float) -> PeerId | None:
        """Return a node that took our last version, to be asked before the next publication; None: not this time."""
        took = [peer for peer in self.order(now_s)[:WRITTEN] if peer in self._took]
        is_due = self._writings <= WITNESSED or self._writings % MORE_EVERY == 0
        return _turned(took, self._writings)[0] if took and is_due else None

    def note_written(self, peer: PeerId, expiry: float) -> None:
        self._took[peer] = expiry

    def is_candidate(self, peer: PeerId) -> bool:
        return peer in self._candidates

    def written(self, peer: PeerId) -> float:
        """Return the expiry of the version of our own record that a node has taken last; 0 where it has none."""
        return self._took.get(peer, 0.0)

    # Reading.

    def next_reading(self, now_s: float) -> list[list[PeerId]]:
        """Return the nodes that the next reading asks: a group, and each further one until the answers suffice."""
        order, turn = self.order(now_s), self._readings
        self._use(now_s)
        self._readings += 1
        written, others = order[:WRITTEN], order[WRITTEN:]
        if turn == 0:
            return [[*written, *self._candidates, *others[::-1][:WRITTEN]], others[::-1][WRITTEN:]]
        often, number = divmod(turn, MORE_EVERY)
        if number:
            written = _turned(written, turn)
            return [[*written[:1], *self._candidates], written[1:], others]
        # The farthest comes first: a liar would place itself near.
        others = _turned(others[::-1], often - 1)
        return [[*written, *self._candidates, *others[:1]], others[1:]]

    def versions(self, unix_s: float) -> dict[str, Version]:
        """Return the versions that the last reading found and that may still be there, by subkey."""
        return {subkey: each.version for subkey, each in self.known.items() if each.version.expiry > unix_s}

    def forget_expired(self, unix_s: float) -> None:
        """Let go of the records that have expired."""
        self.known = {subkey: each for subkey, each in self.known.items() if each.version.expiry > unix_s}

    def lacks(self, found: Mapping[str, Version], unix_s: float) -> bool:
        """Say whether records are missing that must still be there."""
        return any(subkey not in found for subkey in self._living(unix_s))

    def suspect(self) -> None:
        """Note that the nodes together lack what must be there: nodes that are nearer may have it."""
        self._in_doubt = True

    def is_stale(self, found: Mapping[str, Version], now_s: float, unix_s: float) -> bool:
        """Say whether most of the records should have a newer version by now, and have none."""
        living = self._living(unix_s)
        stale = [
            subkey
            for subkey, known in living.items()
            if now_s - known.since_s > max(STALE_S, STALE_PERIODS * known.period_s)
            and (subkey not in found or found[subkey].expiry <= known.version.expiry)
        ]
        return 2 * len(stale) > len(living)

    def judge(
        self,
        answers: Mapping[PeerId, Mapping[str, Version]],
        me: str,
        wrote: Mapping[PeerId, float],
        now_s: float,
        unix_s: float,
    ) -> None:
        """Doubt nodes that lost our record, or most of what others have. `wrote`: `written` when they were asked.

        A node that was a candidate then has no entry there, for it may have come just now.
        """
        everything = {subkey for answer in answers.values() for subkey in answer} & self.known.keys()
        written = [peer for peer in self.order(now_s)[:WRITTEN] if peer in answers and peer in wrote]
        for peer in written:
            answer = answers[peer]
            lost = me not in answer or answer[me].expiry < wrote[peer]
            if (lost and wrote[peer] > unix_s + MARGIN_S) or 2 * len(everything & answer.keys()) < len(everything):
                self._in_doubt = True
                self._doubt(peer, now_s, DOUBTED_S)

    def note_found(self, found: Mapping[str, Version], now_s: float) -> None:
        """Remember what a reading has found."""
        before, self.known = self.known, {}
        for subkey, version in found.items():
            known = before.get(subkey)
            if known is None:
                self.known[subkey] = _Known(version, now_s)
            elif version.expiry > known.version.expiry:
                self.known[subkey] = _Known(version, now_s, now_s - known.since_s)
            else:
                self.known[subkey] = known

    def _living(self, unix_s: float) -> dict[str, _Known]:
        return {subkey: known for subkey, known in self.known.items() if known.version.expiry > unix_s + MARGIN_S}


def _turned(peers: list[PeerId], by: int) -> list[PeerId]:
    """Return the peers in the same order, another one first."""
    at = by % len(peers) if peers else 0
    return peers[at:] + peers[:at]
