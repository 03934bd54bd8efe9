"""Who is there: our own record kept alive in the DHT, and everybody's read into one immutable `Roster`.

Each peer has one record, under the key of its stage and its own id as the subkey. It is published every `refresh_s`,
each time with a higher serial number, and a peer of which no news comes for `lifetime_s` (or as long as its record asks
for, within bounds) leaves the roster: a peer that dies without a word leaves by itself
(`noloco_node.swarm.peer_records` has the rules). In the same rhythm the stages are read: all of them by whoever looks
for a place, by a peer at work those that it has to do with (`focus`). Where a newcomer of the next stage is copying its
weights they are read four times as often, so that it does not wait for work. Decisions only ever look at the last
snapshot; they never wait for the DHT.

In the DHT a record stays for five minutes longer than it is believed, since it expires by the clocks of others. If our
own clock turns out to be behind theirs, we ask for as much more.

The DHT is written by strangers and read over lossy paths, so a record counts only if it is small, decodes strictly,
names the peer and the stage that it is filed under and holds possible numbers. (That the peer itself has written it is
for the network to say: records are signed.) A peer on its way out publishes that as its last record, and readers drop
it at once.

A reading that fails, or that finds nobody else though others were there, is trouble of our own. The roster stays as it
is then, and says since when it is old (`Roster.old_since_s`): whoever is in it can still be called. Where at least two
others were known and none of them says anything new, the same holds for `ISOLATED_S`; after that they count as gone.

How much of the run is done is kept apart, because it must outlive whoever did it: each source (a peer of stage 0) has a
record under the run's `sources` key that lives for minutes, and readers remember each one's first and highest count
(`noloco_node.swarm.peer_records.counted`), so that none counts twice for whoever knew the run's progress before. Only
peers that were seen at work are believed, and those that a newcomer's first reading finds. A source can still lie about
its own samples, and so about the end of the run; about another's it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from operator import attrgetter
from typing import NoReturn

import msgspec

from noloco_node.network.interface import PeerNetwork
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.peer_records import (
    CLOCK_ERROR_S,
    MOST_RECORDS,
    RECORD_BYTES,
    SOURCE_LIFETIME_S,
    DhtRead,
    PeerTable,
    Published,
    SourceCount,
    SourceRecord,
    at_most,
    counted,
    decode_record,
    decode_source,
    skew_s,
    youngest_at,
)
from noloco_node.swarm.roster import PeerRecord, Roster

ISOLATED_S = 300.0
"""For which a roster is kept of which nobody but ourselves is heard any more."""
LONGEST_IN_DHT_S = 3600.0
MOST_WORKED = 16 * MOST_RECORDS
"""Peers that are remembered to have been at work: strangers may make many."""
LOOKS_FOR_NEWCOMERS = 4
"""Readings in the time of one, while somebody is about to take work from us."""
CLOCKS_ASKED = 64
"""Of other peers, to learn how right our own is."""


class Membership:
    """Keeps our record in the DHT and the roster up to date; `run` is to be awaited as long as we take part."""

    def __init__(
        self,
        network: PeerNetwork,
        run_id: str,
        stages: int,
        *,
        lifetime_s: float = 30.0,
        refresh_s: float = 10.0,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._network, self._run_id, self._unix_time = network, run_id, unix_time
        self._lifetime_s, self._refresh_s = lifetime_s, refresh_s
        self._own: PeerRecord | None = None
        self._serial = 0
        self._skew_s: float | None = None
        self._behind_s = 0.0
        """By how much our clock has been behind the others'."""
        self._seen = tuple(PeerTable(lifetime_s) for _ in range(stages))
        self._watched = tuple(range(stages))
        self._read: set[int] = set()
        """Stages of which the roster says something: they were read since we began to watch them."""
        self._sighted_s: float | None = None
        """When somebody was heard last, or there was nobody to hear (loop seconds)."""
        self._youngest_at = 0.0
        """Of all records of others that we read: when it was written, by its own clock."""
        self._sources: dict[str, SourceCount] = {}
        self._worked: set[str] = {network.peer_id}
        """Peers that may speak of samples: those seen at work, and those whom our first reading found."""
        self._looked = False
        self._roster = Roster(stages=((),) * stages)
        self._change = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reading = asyncio.Lock()
        self.complete = False
        """Whether the last reading reached all keys: an empty roster says something only then."""
        self._counts: Counter[str] = Counter()
        self._rng = random.Random(f"{run_id}|presence|{network.peer_id}")

    def __repr__(self) -> str:
        return f"Presence({self._network.peer_id}, {sum(map(len, self._roster.stages))} peers)"

    @property
    def roster(self) -> Roster:
        """The last snapshot."""
        return self._roster

    @property
    def skew_s(self) -> float | None:
        """By how much our clock is ahead of those of the peers that we read; None if there are too few to tell."""
        return self._skew_s

    @property
    def watched(self) -> tuple[int, ...]:
        """The stages that are read, and of which the roster says something by now."""
        return tuple(number for number in self._watched if number in self._read)

    def publish_now(self) -> None:
        """Publish and read at once."""
        self._hurry.set()

    async def changed(self) -> Roster:
        """Wait until the roster says something new, and return it."""
        await self._change.wait()
        return self._roster

    def focus(self, stages: Collection[int]) -> None:
        """Read only these stages from now on, beside the sources and their stage; the others count as empty."""
        self._watched = tuple(number for number in range(len(self._seen)) if number in stages or number == 0)
        self._compare_clocks()

    def update(self, record: PeerRecord) -> None:
        """Replace our record; it is published in the usual rhythm, or soon if its state is another one."""
        if self._own is None or record.stage != self._own.stage:
            raise ValueError("a stage is taken with claim(), not with update()")
        publish_now = record.state is not self._own.state
        self._own = record
        if publish_now:
            self._hurry.set()

    async def claim(self, record: PeerRecord) -> Roster:
        """Publish that we serve `record.stage` from now on, and return the roster as read right after."""
        before, self._own = self._own, record
        if before is not None and before.stage != record.stage:
            await self._publish(msgspec.structs.replace(before, state=PeerState.LEAVING))
        await self._publish(record)
        return await self.peek()

    async def withdraw(self) -> None:
        """Leave the roster and say so; what we did as a source stays. A loss on the way is counted, not raised."""
        last, self._own = self._own, None
        if last is not None:
            self._note_own(last)
            await self._publish(msgspec.structs.replace(last, state=PeerState.LEAVING))

    async def peek(self, stages: Collection[int] | None = None) -> Roster:
        """Read all records that we watch now, or of these stages for once, and return the new roster."""
        async with self._reading:
            watched = self._watched if stages is None else tuple(stages)
            keys = [*map(self._stage_key, watched), self._sources_key]
            readings = await self._network.read_all(keys)
            failed = sum(reading is None for reading in readings)
            self._counts["reads.failed"] += failed
            self.complete = not failed
            now_s = asyncio.get_running_loop().time()
            self._take_stages(dict(zip(watched, readings, strict=False)), now_s)
            self._take_sources(readings[-1])
            self._show(now_s, watched)
        return self._roster

    async def run(self) -> NoReturn:
        """Publish and read until cancelled."""
        while True:
            self._hurry.clear()
            if self._own is not None:
                await self._publish(self._own)
            await self.peek()
            await self._rest(self._refresh_s * self._rng.uniform(0.9, 1.1))

    async def _rest(self, pause_s: float) -> None:
        """Wait until it is time for the next round, or for haste; look out for newcomers meanwhile."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + pause_s
        while (left_s := until_s - now_s()) > 0:
            expects = self._expects_newcomer()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._refresh_s / LOOKS_FOR_NEWCOMERS) if expects else left_s):
                    await self._hurry.wait()
                    return
            if expects and now_s() < until_s:
                await self.peek()

    def _expects_newcomer(self) -> bool:
        """Say whether a replica of the stage after ours is about to begin its work."""
        after = None if self._own is None else self._own.stage + 1
        if after is None or after not in self.watched:
            return False
        return any(record.state is PeerState.CATCHING_UP for record in self._roster.stages[after])

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start, and the sizes of the roster."""
        sizes: dict[str, int | float] = {
            f"replicas.stage{number}": len(records) for number, records in enumerate(self._roster.stages)
        }
        return {**self._counts, **sizes, "sources": self._roster.sources}

    @property
    def _sources_key(self) -> str:
        return f"{self._run_id}/sources"

    def _stage_key(self, number: int) -> str:
        return f"{self._run_id}/stage/{number}"

    async def _publish(self, record: PeerRecord) -> None:
        # Grows over a restart too, and should our clock be set back.
        unix_s = max(0.0, self._unix_time())
        self._serial = max(self._serial + 1, int(1000 * unix_s))
        raw = msgspec.msgpack.encode(Published(self._serial, record, unix_s, self._lifetime_s))
        # Never shorter than before: of two records the DHT keeps the one that expires later.
        self._behind_s = max(self._behind_s, -(self.skew_s or 0.0))
        kept_s = min(self._lifetime_s + CLOCK_ERROR_S + self._behind_s, LONGEST_IN_DHT_S)
        await self._store(self._stage_key(record.stage), raw, kept_s)
        self._note_own(record)
        source = self._sources.get(self._network.peer_id)
        if source is not None:
            await self._store(self._sources_key, msgspec.msgpack.encode(source.said), SOURCE_LIFETIME_S)

    def _note_own(self, record: PeerRecord) -> None:
        """Remember our own samples, if we are or were a source, and whether we finished."""
        if record.stage == 0 and record.samples:
            self._note_source(record.peer, SourceRecord(record.samples, record.state is PeerState.FINISHED))

    def _note_source(self, peer: str, said: SourceRecord) -> None:
        self._sources[peer] = counted(self._sources.get(peer), said, asyncio.get_running_loop().time())

    async def _store(self, key: str, raw: bytes, lifetime_s: float) -> None:
        if len(raw) > RECORD_BYTES:
            raise ValueError(f"our record has {len(raw)} bytes, {RECORD_BYTES} are allowed")
        try:
            stored = await self._network.publish(key, self._network.peer_id, raw, lifetime_s)
        except ConnectionError:
            stored = False
        self._counts["published" if stored else "publish.failed"] += 1

    def _take_stages(self, found: Mapping[int, Mapping[str, bytes] | None], now_s: float) -> None:
        """Note what one reading of all watched stages says; a stage that could not be read is None."""
        read = {stage: raws for stage, raws in found.items() if raws is not None}
        self._read.update(read)
        news = {stage: self._news(stage, raws) for stage, raws in read.items()}
        if self._is_sight(read, news):
            self._sighted_s = now_s
        given_up = self._sighted_s is not None and now_s - self._sighted_s >= ISOLATED_S
        me = self._network.peer_id
        youngest = youngest_at(each for records in news.values() for peer, each in records.items() if peer != me)
        self._youngest_at = max(self._youngest_at, youngest)
        sighted = self._sighted_s == now_s or (given_up and bool(read))
        reading = DhtRead(now_s, self._unix_time(), self._youngest_at, sighted)
        for stage, records in news.items():
            self._seen[stage].take(records, read[stage], reading)

    def _news(self, stage: int, raws: Mapping[str, bytes]) -> dict[str, Published]:
        """Decode the records of a stage that are later ones than we know, and that their peers may publish."""
        known, news = self._seen[stage].known, {}
        for peer in at_most(raws, known):
            raw, before = raws[peer], known.get(peer)
            if before is not None and before.raw == raw:
                continue
            published = decode_record(raw, peer, stage)
            if published is None:
                self._counts["records.garbled"] += 1
            elif before is None or published.serial > before.published.serial:
                news[peer] = published
        return news

    def _is_sight(self, read: Mapping[int, Mapping[str, bytes]], news: Mapping[int, Mapping[str, Published]]) -> bool:
        """Say whether a reading is a sight of the swarm, or trouble of our own."""
        if not read:
            return False
        me = self._network.peer_id
        if any(peer != me for records in news.values() for peer in records):
            return True
        known = [
            (number, peer)
            for number in self._watched
            for peer, record in self._seen[number].believed.items()
            if peer != me and record.state is not PeerState.LEAVING
        ]
        return not known or (len(known) == 1 and known[0][1] in read.get(known[0][0], ()))

    def _take_sources(self, found: Mapping[str, bytes] | None) -> None:
        if found is None:
            return
        working = (PeerState.TRAINING, PeerState.FINISHED)
        seen = (peer for peer, record in self._seen[0].believed.items() if record.state in working)
        self._worked.update(list(islice(seen, max(0, MOST_WORKED - len(self._worked)))))
        if not self._looked:
            # They may have left before we came.
            self._looked = True
            self._worked.update(at_most(found, {}))
        for peer in at_most(found, self._sources):
            source = decode_source(found[peer])
            if source is None:
                self._counts["records.garbled"] += 1
                continue
            if peer not in self._worked:
                self._counts["sources.unknown"] += 1
            elif peer in self._sources or len(self._sources) < MOST_RECORDS:
                self._note_source(peer, source)

    def _show(self, now_s: float, watched: Collection[int]) -> None:
        """Make the new snapshot of the stages that are watched, and wake who waits if it differs."""
        own, me = self._own, self._network.peer_id
        stages = []
        for number, seen in enumerate(self._seen):
            if number not in watched:
                seen.clear()
                self._read.discard(number)
            records = [record for peer, record in seen.believed.items() if peer != me]
            if own is not None and own.stage == number:
                records.append(own)
            present = [record for record in records if record.state is not PeerState.LEAVING]
            stages.append(tuple(sorted(present, key=attrgetter("peer"))))
        self._compare_clocks()
        finished = {peer for peer, source in self._sources.items() if source.said.finished}
        at_work = {record.peer for record in stages[0] if record.state is PeerState.TRAINING} - finished
        before = self._roster
        self._roster = Roster(
            stages=tuple(stages),
            read_at=now_s,
            old_since_s=self._old_since(now_s),
            run_samples=sum(source.samples for source in self._sources.values()),
            own_samples=self._sources[me].samples if me in self._sources else 0,
            first_samples=sum(source.first for peer, source in self._sources.items() if peer != me),
            sources=len(finished | at_work),
            sources_finished=len(finished),
        )
        if msgspec.structs.replace(before, read_at=now_s) != self._roster:
            self._change.set()
            self._change = asyncio.Event()

    def _compare_clocks(self) -> None:
        """Learn how right our clock is; asked far more often than there is anything new to learn it from."""
        me = self._network.peer_id
        offsets = (
            sighting.offset_s
            for number in self._watched
            for peer, sighting in self._seen[number].known.items()
            if sighting.believed and peer != me
        )
        self._skew_s = skew_s(islice(offsets, CLOCKS_ASKED), self._refresh_s / 2)

    def _old_since(self, now_s: float) -> float | None:
        """Return since when nobody was heard, if that is longer than a reading that went wrong may explain."""
        since_s = self._sighted_s
        return since_s if since_s is not None and now_s - since_s > 2.5 * self._refresh_s else None
