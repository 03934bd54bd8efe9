"""The other replicas of our stage: how the roster has them, in which order we prefer them, and which to ask again when.

Asked at every offer, and computed anew only when the roster or the round is another one: an order of preference costs a
hash for each replica (`matching`), and a stage may have hundreds. Rosters come as tuples, so the same one is known by
its identity; one in which nobody came or went leaves names and order as they are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence

from gossip.exchange.messages import Declined, DeclineReason
from gossip.interface import Candidate, RoundTimeouts
from gossip.rounds.matching import preferences


class PartnerView:
    """Our view of them; `partners` returns those of the last roster, ourselves left out."""

    def __init__(self, me: str, seed: int, partners: Callable[[], tuple[Candidate, ...]]) -> None:
        self._me, self._seed, self._partners = me, seed, partners
        self._candidates: tuple[Candidate, ...] = ()
        self._peers: tuple[str, ...] = ()
        self._rounds: tuple[int, ...] = ()
        self._speeds: tuple[float, ...] = ()
        self._order: tuple[str, ...] = ()
        self._order_of: tuple[tuple[str, ...], int] | None = None

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

    def rounds_of(self, peers: Collection[str]) -> tuple[int, ...]:
        """Return the rounds that these of them say they have finished."""
        self._look()
        pairs = zip(self._peers, self._rounds, strict=True)
        return tuple([round for peer, round in pairs if peer in peers])

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
        return self._order

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


ASKED_AT_MOST = 32
"""Preferences that are followed in one round; the others may still ask us."""
SLACK_S = 1e-3
"""Times nearer than this are equal: a timer may fire a little early."""


class PartnerQueue:
    """The partners of one open round."""

    def __init__(self, patience: RoundTimeouts, rng: random.Random) -> None:
        self._patience = patience
        self._rng = rng
        self._not_before: dict[str, float] = {}

    @property
    def put_off_count(self) -> int:
        """How many are asked later, or not at all."""
        return len(self._not_before)

    def clear(self) -> None:
        """Forget everything: a new round."""
        self._not_before.clear()

    def next(self, order: Sequence[str], now: float) -> tuple[str | None, float]:
        """Return whom to ask now, or nobody and for how many seconds to wait at most."""
        order = order[:ASKED_AT_MOST]
        for peer in order:
            if self._not_before.get(peer, now) <= now + SLACK_S:
                return peer, 0.0
        return None, min([self._patience.sleep_s, *(self._not_before[peer] - now for peer in order)])

    def declined(self, peer: str, declined: Declined, now: float) -> None:
        """Learn from a refusal."""
        if declined.reason is DeclineReason.LEAVING:
            self._not_before[peer] = math.inf
        else:
            self.put_off(peer, declined.retry_after_s, now)

    def put_off(self, peer: str, seconds: float, now: float) -> None:
        """Ask this peer again only after so long, `sleep_s` at most, and a jitter."""
        bounded_s = seconds if 0.0 <= seconds <= self._patience.sleep_s else self._patience.sleep_s
        self._not_before[peer] = now + bounded_s + self._rng.uniform(0.5, 1.5) * self._patience.jitter_s

    def nobody_left(self, peers: Iterable[str]) -> bool:
        """Say whether all of these have told us that they are leaving; so it is when there are none."""
        return all(self._not_before.get(peer) == math.inf for peer in peers)
