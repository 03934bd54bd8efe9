"""Whom to ask next in an open round, and when: what the answers so far have taught.

Partners are asked in the order of preference, each one not before the time that its last refusal named, and one that is
leaving not again. Times are loop seconds; `now` and the generator of the jitter are handed in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from gossip.exchange.messages import Declined, DeclineReason
from gossip.interface import Patience

ASKED_AT_MOST = 32
"""Preferences that are followed in one round; the others may still ask us."""
SLACK_S = 1e-3
"""Times nearer than this are equal: a timer may fire a little early."""


class Prospects:
    """The partners of one open round."""

    def __init__(self, patience: Patience, rng: random.Random) -> None:
        self._patience = patience
        self._rng = rng
        self._not_before: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Prospects: {len(self._not_before)} put off>"

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
