"""One peer is killed without warning and started again, so that one sees what the others do meanwhile.

Pure decisions: `due` says what is to be done, `Outage` remembers what was done and what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from noloco_node.observe.peer_history import PeerHistory

KILLED_AT = 0.3
"""Share of the run after which the peer is killed: late enough for a usual speed, and early enough for its return."""
AWAY_S = 5.0
"""Between its end and its new start; to load its libraries and copy the weights takes it longer."""


class OutageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an outage did. `progress`: share of the run at the kill. `away_s`: until its first inner step afterwards.

    `from_tokens`, `to_tokens`: what the swarm had trained on at the kill, and at the return. Speeds are in tokens/s of
    the whole swarm: until the kill, until the return, and from then on. None: the peer never came back to work before
    the run was over.
    """

    peer: str
    progress: float
    away_s: float | None
    from_tokens: int
    to_tokens: int
    tokens_per_s_before: float
    tokens_per_s_away: float | None
    tokens_per_s_after: float | None


@dataclass(slots=True)
class Outage:
    """The outage of `peer`, a name. Times are unix seconds, tokens those of the whole swarm at that time."""

    peer: str
    progress: float = 0.0
    killed_at: float | None = None
    killed_tokens: int = 0
    restarted: bool = False
    back_at: float | None = None
    back_tokens: int = 0

    def due(self, progress: float, histories: Sequence[PeerHistory], now: float) -> Literal["kill", "restart"] | None:
        """Return what is to be done now, and remember when; `progress`: of the run, 0 to 1."""
        history = next(each for each in histories if each.name == self.peer)
        tokens = trained(histories)
        if self.killed_at is None:
            if not KILLED_AT <= progress < 1.0 or not history.underway or history.finished is not None:
                return None
            self.progress, self.killed_at, self.killed_tokens = progress, now, tokens
            return "kill"
        if not self.restarted:
            self.restarted = now - self.killed_at >= AWAY_S
            return "restart" if self.restarted else None
        if self.back_at is None and history.underway and history.gone is None:
            self.back_at, self.back_tokens = now, tokens
        return None

    def summary(self, histories: Sequence[PeerHistory]) -> OutageSummary | None:
        """Return what came of it; None if nobody was killed."""
        began = min((each.began_at for each in histories if each.began_at is not None), default=None)
        if self.killed_at is None or began is None:
            return None
        ended, tokens = max(each.ended_at for each in histories), trained(histories)
        away_until, away_tokens = (ended, tokens) if self.back_at is None else (self.back_at, self.back_tokens)
        return OutageSummary(
            peer=self.peer,
            progress=self.progress,
            away_s=None if self.back_at is None else self.back_at - self.killed_at,
            from_tokens=self.killed_tokens,
            to_tokens=away_tokens,
            tokens_per_s_before=_speed(self.killed_tokens, self.killed_at - began) or 0.0,
            tokens_per_s_away=_speed(away_tokens - self.killed_tokens, away_until - self.killed_at),
            tokens_per_s_after=_speed(tokens - away_tokens, ended - away_until),
        )


def trained(histories: Sequence[PeerHistory]) -> int:
    """Return the tokens that the swarm has trained on; they count once, where they were drawn (stage 0)."""
    return sum(history.tokens for history in histories if history.stage == 0)


def _speed(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0.0 else None
