"""When a daemon that died is started again: at once, then after growing pauses, and not at all when it is in vain."""

from __future__ import annotations

from collections.abc import Iterable

WITHIN_S = 600.0
"""Deaths that lie farther back say nothing about the next one."""
MOST_DEATHS = 10
_LONGEST_PAUSE_S = 30.0


def pause_s(deaths: Iterable[float], now: float) -> float | None:
    """Return how long to wait after the last of `deaths`, loop seconds; None: it dies again and again, give up."""
    recent = sum(now - death <= WITHIN_S for death in deaths)
    if recent > MOST_DEATHS:
        return None
    return 0.0 if recent <= 1 else min(_LONGEST_PAUSE_S, 2.0 ** (recent - 2))
