"""What the DHT says of one stage's peers, and how long to believe it.

A peer is believed as long as news of it comes: a record that differs and bears a higher serial number than the last.
The DHT's own expiry follows the clocks of those who write and read, and clocks are wrong by minutes; so it is only a
generous bound, and a peer's age is counted by the reader, from the reading that found the news.

Only time in which we could see counts. In a reading that says something about us and not about them
(`noloco_node.swarm.stage_records` tells which) the clock by which they age stands still, and after it moves by half a
lifetime at most. So neither a DHT out of reach nor a machine that slept declares everybody dead; who is dead follows
soon after.

A record that is seen for the first time may be left over from a peer that died minutes ago. If it is old by its own
time of writing, both against our clock and against the youngest of all records read so far, it is doubted: its peer
counts from its next record on, ten seconds later if it lives. Two clocks are asked, since one of them may be wrong;
where all records are old, they are rather believed for a while than a living swarm taken for a dead one. A third clock
has a part in it, the writer's: what is old by no more than `CLOCK_S` beyond a lifetime may be fresh. Whoever looks at a
stage only now and then (`pipeline.placement`) sees every record of it for the first time, and would never see such a
peer.

A record that is still found after its lifetime is remembered, so that it is not taken for news once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

import msgspec

from noloco_node.network.wire import decoded
from noloco_node.swarm.roster import PeerRecord
from noloco_node.units import Count, Seconds, UnixSeconds

RECORD_BYTES = 4096
MOST_RECORDS = 4096
MOST_DECODED = 4 * MOST_RECORDS
USUAL_BYTES = 1024
"""Of a record that is worth keeping decoded."""
CLOCK_S = 60.0
"""By which the clock of whoever wrote a record may be behind without a doubt."""
LONGEST_LIFETIME_S = 300.0
"""For which a record is believed, whatever it asks for."""
LEAST_CLOCKS = 3
"""Of others, that tell how right our own is."""
CLOCK_ERROR_S = 300.0
"""By which the clocks of a swarm may differ without harm."""


class Published(msgspec.Struct, frozen=True, array_like=True):
    """A record as it is stored. `serial` grows with each publication; `at`: Unix time of it, 0 if not said.

    `lifetime_s`: for which it asks to be believed, since its peer may publish more seldom than we do; 0 if not said.
    """

    serial: Count
    record: PeerRecord
    at: UnixSeconds = 0.0
    lifetime_s: Seconds = 0.0


class PeerEntry(msgspec.Struct, frozen=True):
    """A peer's last record, its bytes, and when they were new to us, on the clock of `PeerTable`.

    `believed`: whether the peer counts as there. `offset_s`: our clock minus its own, its record's age included; None
    until it is known from a record that was fresh.
    """

    published: Published
    raw: bytes
    news_s: float
    believed: bool
    offset_s: float | None = None


class DhtRead(NamedTuple):
    """The circumstances of one reading. `now_s`: loop seconds; `unix_s`: by our clock. `youngest_at`: when the
    youngest record so far was written. `ages`: whether peers of whom it has no news grow older by it.
    """

    now_s: float
    unix_s: float
    youngest_at: float
    ages: bool


class PeerTable:
    """The peers of one stage as they were last seen. One of which nothing is new for `lifetime_s`, or as long as its
    last record asked for, is gone.
    """

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._entries: dict[str, PeerEntry] = {}
        self._clock_s = 0.0
        self._aged_s: float | None = None
        """When it moved last (loop seconds)."""
        self._believed: dict[str, PeerRecord] | None = {}
        """What `believed` returns, until something changes."""

    @property
    def believed(self) -> dict[str, PeerRecord]:
        """The records of those who count as there, by peer."""
        if self._believed is None:
            self._believed = {peer: each.published.record for peer, each in self._entries.items() if each.believed}
        return self._believed

    @property
    def known(self) -> Mapping[str, PeerEntry]:
        """All that is remembered."""
        return self._entries

    def clear(self) -> None:
        """Forget everybody."""
        self._entries.clear()
        self._aged_s = self._believed = None

    def take(self, news: Mapping[str, Published], raws: Mapping[str, bytes], reading: DhtRead) -> None:
        """Note the later records that a reading found, checked, and let the others age. `raws`: all that was found."""
        if reading.ages:
            if self._aged_s is not None:
                self._clock_s += min(reading.now_s - self._aged_s, self._lifetime_s / 2)
            self._aged_s = reading.now_s
        for peer, published in news.items():
            believed, offset_s = True, None
            if peer not in self._entries:
                believed = not is_doubtful(published.at, reading, self._life_s(published))
            elif published.at:
                offset_s = reading.unix_s - published.at
            self._entries[peer] = PeerEntry(published, raws[peer], self._clock_s, believed, offset_s)
        aged = [
            peer
            for peer, entry in self._entries.items()
            if entry.news_s + self._lifetime_s <= self._clock_s  # nobody's is shorter
            and entry.news_s + self._life_s(entry.published) <= self._clock_s
        ]
        if news or aged:
            self._believed = None
        for peer in aged:
            entry = self._entries[peer]
            if raws.get(peer) == entry.raw:
                self._entries[peer] = msgspec.structs.replace(entry, believed=False)
            else:
                del self._entries[peer]

    def _life_s(self, published: Published) -> float:
        return max(self._lifetime_s, min(published.lifetime_s, LONGEST_LIFETIME_S))


def is_doubtful(at: float, reading: DhtRead, lifetime_s: float) -> bool:
    """Say whether a record that is seen for the first time is likely left over: old by our clock and by the others'."""
    return bool(at) and min(reading.unix_s, reading.youngest_at) - at > lifetime_s + CLOCK_S


def skew_s(offsets_s: Iterable[float | None], typical_age_s: float) -> float | None:
    """Return by how much our clock is ahead of the others', negative if behind; None if too few are known to tell.

    The median of what single peers' records say, so that no single wrong clock decides. `typical_age_s`: of a record
    when it is read.
    """
    known = [offset_s for offset_s in offsets_s if offset_s is not None]
    return median(known) - typical_age_s if len(known) >= LEAST_CLOCKS else None


def at_most(found: Collection[str], known: Mapping[str, Any]) -> Iterable[str]:
    """Return the peers of a reading; of too many the known first, so that a flood drives nobody out."""
    if len(found) <= MOST_RECORDS:
        return found
    return sorted(found, key=lambda peer: (peer not in known, peer))[:MOST_RECORDS]


_decoded: dict[str, tuple[bytes, Published]] = {}
"""Each peer's record as it was decoded last, and its bytes: the many readers of a simulation share one of each."""


def decode_record(raw: bytes, peer: str, stage: int) -> Published | None:
    """Return the record if it is one that this peer may publish for this stage."""
    last = _decoded.get(peer)
    if last is not None and last[0] == raw:
        published = last[1]
    else:
        found = decoded(raw, Published, RECORD_BYTES)
        if found is None or found.record.peer != peer:
            return None
        published = found
        if len(_decoded) >= MOST_DECODED:
            _decoded.clear()
        if len(raw) <= USUAL_BYTES:
            _decoded[peer] = raw, published
    return published if published.record.stage == stage else None
