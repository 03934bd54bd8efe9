"""When a peer was last heard, and after how long a silence it is given up: the longer, the less even its line is.

A peer that sends nothing else beats every `TimeoutSettings.beat_s`. How far apart its bytes come all the same is noted:
every gap of half a beat or more (shorter ones are one and the same burst). On a good line these gaps are as long as a
beat and equal, so a dead peer is noticed after some five of them; on one that stutters they are not, and the peer is
borne with accordingly (`noloco_node.network.timeouts`). As long as nothing is known, `TimeoutSettings.silence_s`
counts.

A gap is noted only where we listened. What came after our own sleep, or after we had stopped reading, says nothing of
the peer. But one that we gave up and that comes back soon was there all the time, so that silence is a gap like others.

What is known of a peer is kept when its last stream ends, for a conversation often lasts no longer than a few beats. Of
strangers no more is kept than of `MOST_PEERS`.
"""

from __future__ import annotations

from noloco_node.libp2p.endpoint.settings import TimeoutSettings
from noloco_node.network.timeouts import MOST_PEERS, RttEstimate, deadline_s, observed


class PeerLiveness:
    """Of one peer, shared by all streams with it."""

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self.streams = 0
        self._least_gap_s = timeouts.beat_s / 2
        self._silences, self._stalls = timeouts.silences(), timeouts.stalls()
        self._gaps: RttEstimate | None = None
        self._pauses: RttEstimate | None = None
        self._heard_s = float("-inf")
        self._silent_since_s: float | None = None
        """From when on it was silent, if it was given up for that."""

    @property
    def silence_s(self) -> float:
        """How long a silence is borne with."""
        return deadline_s(self._gaps, 0, self._silences)

    @property
    def stall_s(self) -> float:
        """How long it is borne with that the peer takes none of our bytes."""
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
        """Say whether the peer is to be given up by a stream that has listened since `since_s`."""
        return now_s - max(self._heard_s, since_s) > self.silence_s

    def give_up(self, since_s: float) -> None:
        """Note that a stream that has listened since `since_s` gave the peer up for its silence."""
        if self._silent_since_s is None:
            self._silent_since_s = max(self._heard_s, since_s)

    def take(self, pause_s: float) -> None:
        """Note that the peer took bytes again, after so long."""
        self._pauses = self._with(self._pauses, pause_s, self.stall_s)

    def _with(self, known: RttEstimate | None, gap_s: float, most_s: float) -> RttEstimate | None:
        """Return an estimate with one more gap. One that is longer than is borne with was our own absence."""
        return observed(known, gap_s) if self._least_gap_s <= gap_s <= most_s else known


class LivenessTable:
    """Of all peers: those with whom we converse, and the last with whom we did."""

    def __init__(self, timeouts: TimeoutSettings) -> None:
        self._timeouts = timeouts
        self._peers: dict[str, PeerLiveness] = {}

    def streams(self, peer: str) -> int:
        """Return how many streams are open with a peer."""
        return self._peers[peer].streams if peer in self._peers else 0

    def begin(self, peer: str) -> PeerLiveness:
        """Return what is known of a peer with whom another stream begins.

        That is no sign of life: daemons open streams for programs that hang.
        """
        liveness = self._peers.pop(peer, None) or PeerLiveness(self._timeouts)
        if len(self._peers) >= MOST_PEERS:
            idle = next((other for other, each in self._peers.items() if not each.streams), None)
            if idle is not None:
                del self._peers[idle]
        self._peers[peer] = liveness
        liveness.streams += 1
        return liveness

    def end(self, peer: str) -> None:
        """Note that a stream with a peer is over."""
        self._peers[peer].streams -= 1
