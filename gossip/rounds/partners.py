"""The other replicas of our stage as the roster has them: their names, their rounds, and in which order we prefer them.

Asked at every offer, and computed anew only when the roster or the round is another one: an order of preference costs a
hash for each replica (`matching`), and a stage may have hundreds. Rosters come as tuples, so the same one is known by
its identity; one in which nobody came or went leaves names and order as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from gossip.interface import Candidate
from gossip.rounds.matching import preferences


class Others:
    """Our view of them; `partners` returns those of the last roster, ourselves left out."""

    def __init__(self, me: str, seed: int, partners: Callable[[], tuple[Candidate, ...]]) -> None:
        self._me, self._seed, self._partners = me, seed, partners
        self._candidates: tuple[Candidate, ...] = ()
        self._peers: tuple[str, ...] = ()
        self._rounds: tuple[int, ...] = ()
        self._speeds: tuple[float, ...] = ()
        self._order: tuple[str, ...] = ()
        self._order_of: tuple[tuple[str, ...], int] | None = None
        self._ordered = 0

    @property
    def peers(self) -> tuple[str, ...]:
        """Their names."""
        self._look()
        return self._peers

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds that they say they have finished."""
        self._look()
        return self._rounds

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speeds that they claim; 0 where none is known."""
        self._look()
        return self._speeds

    def order(self, round: int) -> tuple[str, ...]:
        """Return them in the order in which we would meet them in this round."""
        peers = self.peers
        if self._order_of != (peers, round):
            self._order = preferences(self._me, peers, self._seed, round)
            self._order_of = (peers, round)
            self._ordered += 1
        return self._order

    def statistics(self) -> dict[str, int | float]:
        """Return how many there are, and how often they were put in order."""
        return {"others": len(self._peers), "ordered": self._ordered}

    def __repr__(self) -> str:
        return f"<Others: {len(self._peers)}>"

    def _look(self) -> None:
        candidates = self._partners()
        if candidates is self._candidates:
            return
        self._candidates = candidates
        self._rounds = tuple([candidate.round for candidate in candidates])
        self._speeds = tuple([candidate.speed for candidate in candidates])
        peers = tuple([candidate.peer for candidate in candidates])
        if peers != self._peers:
            self._peers = peers
