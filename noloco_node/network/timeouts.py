"""How long we wait for a peer: for its answer, and for any sign of life.

Each wait is bounded by what was observed, as TCP bounds its retransmissions (RFC 6298; docs/design/network.md). For a
peer that was never reached, the first contacts with others count. Each wait in vain makes the next one for that peer
half as long again, up to a bound; an answer ends that. (With doubling, a silent peer would cost more at each trial than
the time for which it is left alone.) The bounds are wide, because an event loop that was busy for a second must accuse
nobody.

**Liveness.** Both sides of a stream send beats. All streams with a peer share one `PeerLiveness`, because on a slow
link the beats of one stream queue up behind the bulk of another. It notes every gap of half a beat or more between the
peer's bytes. On a good line these gaps are as long as a beat and equal, so a dead peer is noticed after some five of
them; on an uneven line a longer silence is tolerated. A gap counts only where we listened, not after our own sleep or
while we had stopped reading. But a peer that we gave up and that comes back soon was there all the time, so that
silence is a gap like others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from noloco_node.network.interface import Conversation, NetworkHook
from noloco_node.tasks import loop_s

MEAN_WEIGHT, DEVIATION_WEIGHT, DEVIATIONS = 1 / 8, 1 / 4, 4.0
MOST_PEERS = 1024  # we remember the times of so many peers; beyond them we forget the one that we heard of longest ago
GROWTH = 1.5
MOST_GROWTHS = 12


class RttEstimate(NamedTuple):
    """What a wait usually takes: smoothed mean and mean deviation, in seconds."""

    mean_s: float
    deviation_s: float


class TimeoutBounds(NamedTuple):
    """The shortest deadline, the longest, and the one where nothing was observed, in seconds."""

    least_s: float
    most_s: float
    unknown_s: float


DIALS = TimeoutBounds(least_s=2.0, most_s=60.0, unknown_s=10.0)
ANSWERS = TimeoutBounds(least_s=4.0, most_s=120.0, unknown_s=12.0)  # of a partner to a proposal, the dial included


def observed(before: RttEstimate | None, took_s: float) -> RttEstimate:
    if before is None:
        return RttEstimate(took_s, took_s / 2)
    deviation_s = before.deviation_s + DEVIATION_WEIGHT * (abs(took_s - before.mean_s) - before.deviation_s)
    return RttEstimate(before.mean_s + MEAN_WEIGHT * (took_s - before.mean_s), deviation_s)


def deadline_s(known: RttEstimate | None, timeouts: int, bounds: TimeoutBounds) -> float:
    """Return how long to wait after `timeouts` waits in a row that came to nothing."""
    usual_s = bounds.unknown_s
    if known is not None:
        # Times that were equal for long have no deviation left, and are no promise.
        usual_s = known.mean_s + max(DEVIATIONS * known.deviation_s, known.mean_s)
    return float(min(bounds.most_s, max(bounds.least_s, usual_s) * GROWTH ** min(timeouts, MOST_GROWTHS)))


class _Known(NamedTuple):
    """What we know of one peer: the estimate, waits in vain in a row, and when the last one ended (loop seconds)."""

    estimate: RttEstimate | None = None
    timeouts: int = 0
    failed_s: float = float("-inf")


class AdaptiveTimeout:
    """What one kind of wait took, peer by peer."""

    def __init__(self, bounds: TimeoutBounds) -> None:
        self._bounds = bounds
        self._peers: dict[str, _Known] = {}
        self._first: RttEstimate | None = None  # the estimate of first contacts, with any peer

    def deadline_s(self, peer: str) -> float:
        known = self._peers.get(peer, _Known())
        return deadline_s(known.estimate or self._first, known.timeouts, self._bounds)

    def took(self, peer: str, seconds: float) -> None:
        before = self._peers.get(peer, _Known()).estimate
        if before is None:
            self._first = observed(self._first, seconds)
        self._remember(peer, _Known(observed(before, seconds)))

    def record_timeout(self, peer: str, begun_s: float, now_s: float) -> None:
        """Note a wait that ended at its deadline; of several that were under way together only the first counts."""
        known = self._peers.get(peer, _Known())
        if begun_s >= known.failed_s:
            self._remember(peer, known._replace(timeouts=known.timeouts + 1, failed_s=now_s))

    def _remember(self, peer: str, known: _Known) -> None:
        self._peers.pop(peer, None)
        self._peers[peer] = known
        if len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]


class DialTimeouts(NetworkHook):
    """Gives dials up that take much longer than usual."""

    def __init__(self) -> None:
        self._timing = AdaptiveTimeout(DIALS)
        self._given_up = 0

    async def calling(self, peer: str, dial: Callable[[], Awaitable[Conversation]]) -> Conversation:
        """Open a conversation within what is usual for the peer, and learn from what it took."""
        begun_s, limit_s = loop_s(), self._timing.deadline_s(peer)
        try:
            async with asyncio.timeout(limit_s) as limit:
                conversation = await dial()
        except TimeoutError:
            if not limit.expired():
                raise
            self._timing.record_timeout(peer, begun_s, loop_s())
            self._given_up += 1
            raise ConnectionRefusedError(f"{peer} did not take a call within {limit_s:.1f} s") from None
        self._timing.took(peer, loop_s() - begun_s)
        return conversation

    def statistics(self) -> dict[str, int | float]:
        return {"dials.given_up": self._given_up}


class PeerLiveness:
    """How far apart the bytes of one peer come; all streams with it share this."""

    def __init__(self, beat_s: float, silences: TimeoutBounds, stalls: TimeoutBounds) -> None:
        self.streams = 0
        self._least_gap_s = beat_s / 2
        self._silences, self._stalls = silences, stalls
        self._gaps: RttEstimate | None = None
        self._pauses: RttEstimate | None = None
        self._heard_s = float("-inf")
        self._silent_since_s: float | None = None  # from when on it was silent, if it was given up for that

    @property
    def silence_s(self) -> float:
        return deadline_s(self._gaps, 0, self._silences)

    @property
    def stall_s(self) -> float:
        return deadline_s(self._pauses, 0, self._stalls)

    def hear(self, now_s: float, since_s: float) -> None:
        """Note that bytes came by a stream that has listened for them since `since_s`."""
        if self._silent_since_s is None:
            self._gaps = self._with(self._gaps, now_s - max(self._heard_s, since_s), self.silence_s)
        else:
            self._gaps = self._with(self._gaps, now_s - self._silent_since_s, self._silences.most_s)
            self._silent_since_s = None
        self._heard_s = now_s

    def is_silent(self, now_s: float, since_s: float) -> bool:
        return now_s - max(self._heard_s, since_s) > self.silence_s

    def give_up(self, since_s: float) -> None:
        """Note that a stream that has listened since `since_s` gave the peer up for its silence."""
        if self._silent_since_s is None:
            self._silent_since_s = max(self._heard_s, since_s)

    def take(self, pause_s: float) -> None:
        self._pauses = self._with(self._pauses, pause_s, self.stall_s)

    def _with(self, known: RttEstimate | None, gap_s: float, most_s: float) -> RttEstimate | None:
        """Return an estimate with one more gap. A gap longer than we tolerate was our own absence."""
        return observed(known, gap_s) if self._least_gap_s <= gap_s <= most_s else known
