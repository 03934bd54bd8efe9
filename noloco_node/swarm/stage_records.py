"""One reader's knowledge of the peers of each stage, from records in the DHT, and how long it believes them.

A record counts only if it is small, decodes strictly, names the stage of its key, and holds possible numbers. Its peer
is the one that it is filed under. A reader believes a peer as long as new records come: other bytes with a higher
serial number. The DHT's own expiry follows the clocks of writers and readers, which may be wrong by minutes. So it is
only a generous bound, and the reader counts a peer's age itself, from the reading that found its last news.

Peers age only while we can read. A reading that hears no other peer, though we know some, means trouble of our own:
peers do not age by it. If we know at least two others and none of them says anything new, the same holds for
`ISOLATED_S`; then they age. A pause between two readings counts as half a lifetime at most. So neither an
unreachable DHT nor a machine that slept declares all peers dead, and dead peers still disappear soon after.

A record that we see for the first time may be from a peer that died minutes ago. We doubt it if its time of writing is
old both by our clock and by the youngest of all records read so far; then we believe its peer from its next record on.
Two clocks must agree, since one of them may be wrong: when all records look old, we believe them. `CLOCK_S` allows for
a writer's slow clock, because a reader that reads a stage only now and then (`pipeline.placement`) sees every record of
it for the first time.

We remember a peer for as long as the DHT may have its last record, so that this does not count as news again: one
reading may find no version of it or an older one, and the next reading the last one. Of too many peers none is
remembered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from noloco_node.network.wire import decoded
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.shards import DEEPEST, Shard
from noloco_node.units import Count, Seconds, UnixSeconds

RECORD_BYTES = 4096
MOST_RECORDS = 4096
MOST_DECODED = 4 * MOST_RECORDS
USUAL_BYTES = 1024
"""The most bytes of a record that is kept decoded."""
CLOCK_S = 60.0
"""A writer's clock may be behind by this without a doubt."""
LONGEST_LIFETIME_S = 300.0
"""The longest time for which a record is believed."""
CLOCK_ERROR_S = 300.0
"""The clocks of a swarm may differ by this without harm."""
ISOLATED_S = 300.0
"""How long we keep peers while we hear none of several."""


class Published(msgspec.Struct, frozen=True, array_like=True):
    """A record as stored. `serial` grows with each publication; `at`: its Unix time, 0 if unknown.

    `lifetime_s`: how long it asks to be believed, since its peer may publish more seldom than we do; 0 if unknown.
    `depth`: by which its peer divides the stage into shards (`noloco_node.swarm.shards`).
    """

    serial: Count
    record: PeerRecord
    at: UnixSeconds = 0.0
    lifetime_s: Seconds = 0.0
    depth: Annotated[int, msgspec.Meta(ge=0, le=DEEPEST)] = 0


class PeerEntry(msgspec.Struct, frozen=True):
    """A peer's last record, its bytes, and when they were new to us, on the clock of `PeerTable`.

    `believed`: whether we believe that the peer is there.
    """

    published: Published
    raw: bytes
    news_s: float
    believed: bool


class DhtRead(NamedTuple):
    """The circumstances of one reading. `now_s`: loop seconds; `unix_s`: by our clock. `youngest_at`: when the
    youngest record so far was written. `ages`: whether peers without news grow older by it. `pause_s`: that was meant
    between this reading of the stage and the one before.
    """

    now_s: float
    unix_s: float
    youngest_at: float
    ages: bool
    pause_s: float = 0.0


class PeerTable:
    """The peers of one stage as last read. A peer without news for `lifetime_s`, or as long as its record asks, is
    gone.
    """

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._entries: dict[str, PeerEntry] = {}
        self._clock_s = 0.0
        self._aged_s: float | None = None
        """When the peers aged last (loop seconds)."""
        self._believed: dict[str, PeerRecord] | None = {}
        """The cached value of `believed`."""

    @property
    def believed(self) -> dict[str, PeerRecord]:
        """The records of the peers that we believe, by peer."""
        if self._believed is None:
            self._believed = {peer: each.published.record for peer, each in self._entries.items() if each.believed}
        return self._believed

    @property
    def known(self) -> Mapping[str, PeerEntry]:
        return self._entries

    def clear(self) -> None:
        self._entries.clear()
        self._aged_s = self._believed = None

    def keep(self, peers: Collection[str]) -> None:
        """Forget all other peers."""
        self._entries = {peer: entry for peer, entry in self._entries.items() if peer in peers}
        self._believed = None

    def take(
        self,
        news: Mapping[str, Published],
        raws: Mapping[str, bytes],
        reading: DhtRead,
        unread: Sequence[Shard] = (),
    ) -> None:
        """Note the newer records of a reading, and let the others age. `raws`: all that the reading found.

        `unread`: shards whose peers do not age, for they could not be read.
        """
        if reading.ages:
            if self._aged_s is not None:
                self._clock_s += min(reading.now_s - self._aged_s, max(self._lifetime_s / 2, reading.pause_s))
            self._aged_s = reading.now_s
        for peer, published in news.items():
            is_known = peer in self._entries
            believed = is_known or not is_doubtful(published.at, reading, self._life_s(published))
            self._entries[peer] = PeerEntry(published, raws[peer], self._clock_s, believed)
        aged = [
            peer
            for peer, entry in self._entries.items()
            if entry.news_s + self._lifetime_s <= self._clock_s  # no lifetime is shorter
            and entry.news_s + self._life_s(entry.published) <= self._clock_s
            and not any(shard.counts(peer, entry.published.depth) for shard in unread)
        ]
        if news or aged:
            self._believed = None
        for peer in aged:
            entry = self._entries[peer]
            expired = entry.news_s + self._life_s(entry.published) + CLOCK_ERROR_S <= self._clock_s
            if peer not in raws and (expired or len(self._entries) > MOST_RECORDS):
                del self._entries[peer]
            elif entry.believed:
                self._entries[peer] = msgspec.structs.replace(entry, believed=False)

    def _life_s(self, published: Published) -> float:
        return max(self._lifetime_s, min(published.lifetime_s, LONGEST_LIFETIME_S))


def is_doubtful(at: float, reading: DhtRead, lifetime_s: float) -> bool:
    """Say whether a record seen for the first time is likely left over: old by our clock and by the others'."""
    return bool(at) and min(reading.unix_s, reading.youngest_at) - at > lifetime_s + CLOCK_S


def at_most(found: Collection[str], known: Mapping[str, Any]) -> Iterable[str]:
    """Return the peers of a reading; of too many the known first, so that a flood displaces no peer."""
    if len(found) <= MOST_RECORDS:
        return found
    return sorted(found, key=lambda peer: (peer not in known, peer))[:MOST_RECORDS]


_decoded: dict[str, tuple[bytes, Published]] = {}
"""Each peer's last decoded record, and its bytes: the many readers of a simulation share them."""


def encode_record(published: Published) -> bytes:
    """Return a record as stored: without the id of its peer, under which the DHT files it."""
    record = published.record
    places = tuple(place.removesuffix(f"/p2p/{record.peer}") for place in record.addresses)
    bare = msgspec.structs.replace(record, peer="", addresses=places)
    fields = msgspec.structs.astuple(msgspec.structs.replace(published, record=bare))
    return msgspec.msgpack.encode(fields if published.depth else fields[:-1])


class _Head(msgspec.Struct, array_like=True):
    """The first field of a record, for which not all of it is decoded."""

    serial: Count


def newest(readings: Sequence[Mapping[str, bytes]]) -> Mapping[str, bytes]:
    """Return the records of several keys of a stage, of each peer the one with the highest serial number.

    An old version may stand under another key for minutes: all readers compare it with the new one at each reading.
    """
    if len(readings) == 1:
        return readings[0]
    found: dict[str, bytes] = {}
    for records in readings:
        for peer, raw in records.items():
            if found.setdefault(peer, raw) != raw:
                found[peer] = max(found[peer], raw, key=_serial)
    return found


def _serial(raw: bytes) -> int:
    head = decoded(raw, _Head, RECORD_BYTES)
    return -1 if head is None else head.serial


def decode_record(raw: bytes, peer: str, stage: int) -> Published | None:
    """Return the record if this peer may publish it for this stage."""
    last = _decoded.get(peer)
    if last is not None and last[0] == raw:
        published = last[1]
    else:
        found = decoded(raw, Published, RECORD_BYTES)
        if found is None or found.record.peer:
            return None
        # One that leads to another peer is left out.
        own = (place for place in found.record.addresses if "/" in place.rpartition("/p2p/")[2])
        places = tuple(f"{place}/p2p/{peer}" for place in own)
        whole = msgspec.structs.replace(found.record, peer=peer, addresses=places)
        published = msgspec.structs.replace(found, record=whole)
        if len(_decoded) >= MOST_DECODED:
            _decoded.clear()
        if len(raw) <= USUAL_BYTES:
            _decoded[peer] = raw, published
    return published if published.record.stage == stage else None


class StageRecords:
    """The peers of each stage, as `me` has read them; `refresh_s`: how often each publishes."""

    def __init__(self, me: str, stages: int, lifetime_s: float, refresh_s: float) -> None:
        self._me, self._refresh_s = me, refresh_s
        self._tables = tuple(PeerTable(lifetime_s) for _ in range(stages))
        self._read: set[int] = set()
        self._heard_s: float | None = None
        """When we last heard a peer, or knew none (loop seconds)."""
        self._deaf_s: float | None = None
        """When the first reading after that heard nobody (loop seconds); None: there was none."""
        self._youngest_at = 0.0
        """When the youngest of the others' records was written, by its own clock."""
        self.watched = tuple(range(stages))
        self.seldom: Collection[int] = ()
        """The stages that are read and written seldom, because nobody knows all of their peers."""

    @property
    def believed(self) -> list[Mapping[str, PeerRecord]]:
        """The records of the peers that we believe, by stage and peer."""
        return [table.believed for table in self._tables]

    @property
    def of_sources(self) -> list[PeerRecord]:
        """The last records of the peers of stage 0, whether we believe that they are there or not."""
        return [entry.published.record for entry in self._tables[0].known.values()]

    @property
    def known(self) -> tuple[int, ...]:
        """The watched stages that we have read since we began to watch them."""
        return tuple(number for number in self.watched if number in self._read)

    def depths(self, stage: int) -> dict[str, int]:
        """Return the depths of the peers of a stage that we believe and that do not leave."""
        return {
            peer: entry.published.depth
            for peer, entry in self._tables[stage].known.items()
            if entry.believed and entry.published.record.state is not PeerState.LEAVING
        }

    def narrow(self, stage: int, shards: Sequence[Shard], least: int) -> int:
        """Forget the peers of a stage that readings of these shards will not find, if at least so many are left.

        A peer of a depth that the shards or their parents do not show is found there once it takes their depth, or
        never. Returns how many believed peers are left, 0 if none was forgotten.
        """
        table = self._tables[stage]
        kept = {
            peer: entry.believed
            for peer, entry in table.known.items()
            if entry.published.depth >= shards[0].depth - 1
            or any(shard.would_hold(peer, entry.published.depth) for shard in shards)
        }
        left = sum(kept.values())
        if len(kept) == len(table.known) or left < least:
            return 0
        table.keep(kept)
        return left

    def focus(self, stages: Collection[int]) -> None:
        """Watch only these stages from now on, and stage 0."""
        self.watched = tuple(number for number in range(len(self._tables)) if number in stages or number == 0)

    def take(
        self,
        found: Mapping[int, Mapping[str, bytes] | None],
        shards: Mapping[int, Sequence[Shard]],
        now_s: float,
        unix_s: float,
        unread: Mapping[int, Sequence[Shard]],
        pauses_s: Mapping[int, float],
    ) -> None:
        """Note a reading of some stages; None stands for a stage that could not be read.

        `shards`: that we follow; `unread`: those of them of which a key could not be read. `pauses_s`: `DhtRead`.
        """
        read = {stage: raws for stage, raws in found.items() if raws is not None}
        self._read.update(read)
        news = {stage: self._news(stage, raws, shards[stage]) for stage, raws in read.items()}
        if self._hears(found, news):
            self._heard_s, self._deaf_s = now_s, None
        elif self._deaf_s is None:
            self._deaf_s = now_s
        given_up = self._heard_s is not None and now_s - self._heard_s >= ISOLATED_S
        others = (each.at for records in news.values() for peer, each in records.items() if peer != self._me)
        self._youngest_at = max([self._youngest_at, *others])
        ages = self._heard_s == now_s or (given_up and bool(read))
        for stage, records in news.items():
            reading = DhtRead(now_s, unix_s, self._youngest_at, ages, pauses_s[stage])
            self._tables[stage].take(records, read[stage], reading, unread[stage])

    def keep_only(self, stages: Collection[int]) -> None:
        """Forget all other stages, since what we know of them grows old."""
        for number, table in enumerate(self._tables):
            if number not in stages:
                table.clear()
                self._read.discard(number)

    def old_since_s(self, now_s: float) -> float | None:
        """Return since when we heard no peer, if longer than one failed reading explains."""
        if self._heard_s is None or self._deaf_s is None:
            return None
        # A large stage is read seldom: then the time before the first failed reading says nothing.
        since_s = max(self._heard_s, self._deaf_s - self._refresh_s)
        return self._heard_s if now_s - since_s > 2.5 * self._refresh_s else None

    def news_age_s(self, unix_s: float) -> dict[str, float]:
        """Return the age of the last news of each believed peer that is late.

        The age counts to the youngest of all records if that is earlier than our clock, which may be wrong. A peer of a
        stage that is read seldom is never late: the first reading without news ends it.
        """
        entries = [
            (peer, entry)
            for number, table in enumerate(self._tables)
            for peer, entry in table.known.items()
            if entry.believed and number not in self.seldom
        ]
        now_s = min(unix_s, self._youngest_at)
        ages_s = {peer: now_s - entry.published.at for peer, entry in entries if entry.published.at}
        lives_s = {peer: entry.published.lifetime_s for peer, entry in entries}
        # Three refreshes make a lifetime: one has been missed.
        return {peer: age_s for peer, age_s in ages_s.items() if age_s > 0.5 * lives_s[peer] > 0.0}

    def _news(self, stage: int, raws: Mapping[str, bytes], shards: Sequence[Shard]) -> dict[str, Published]:
        """Decode the records of a stage that are newer than what we know, of peers that these shards count."""
        known, news = self._tables[stage].known, {}
        for peer in at_most(raws, known):
            raw, before = raws[peer], known.get(peer)
            if before is not None and before.raw == raw:
                continue
            published = decode_record(raw, peer, stage)
            if published is None or not any(shard.counts(peer, published.depth) for shard in shards):
                continue
            if before is None or published.serial > before.published.serial:
                news[peer] = published
        return news

    def _hears(
        self, found: Mapping[int, Mapping[str, bytes] | None], news: Mapping[int, Mapping[str, Published]]
    ) -> bool:
        """Say whether a reading tells of other peers; if not, the trouble is ours."""
        if not news:
            return False
        if any(peer != self._me for records in news.values() for peer in records):
            return True
        known = [
            (number, peer)
            for number in found
            for peer, record in self._tables[number].believed.items()
            if peer != self._me and record.state is not PeerState.LEAVING
        ]
        return not known or (len(known) == 1 and known[0][1] in (found[known[0][0]] or ()))
