"""Who is there: our own record kept alive in the DHT, and everybody's read into one immutable `Roster`.

Each peer has one record, under the key of its stage and its own id as the subkey. It expires after `lifetime_s` unless
it is published again, which happens every `refresh_s`: a peer that dies without a word leaves the roster by itself. In
the same rhythm the stages are read: all of them by whoever looks for a place, by a peer at work those that it has to do
with (`focus`). Decisions only ever look at the last snapshot; they never wait for the DHT.

The DHT is written by strangers and read over lossy paths, so a record counts only if it is small, decodes strictly,
names the peer and the stage that it is filed under and holds possible numbers; a record that one reading misses stays
in the roster until nothing new was heard of its peer for `lifetime_s`. A peer on its way out publishes that as its last
record, and readers drop it at once.

How much of the run is done is kept apart, because it must outlive whoever did it: each source (a peer of stage 0) has a
record under the run's `sources` key that lives for minutes, and readers remember the highest count of each. Only peers
that were seen at work are believed, and those that a newcomer's first reading finds. Records are not signed: whoever
takes the trouble to pose as a source can still lie about samples, and so about the end of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import msgspec

from noloco_node.port import Network
from noloco_node.roster import PeerRecord, Roster, State

_RECORD_BYTES = 4096
_SOURCE_BYTES = 64
_MOST_RECORDS = 4096
_SOURCE_LIFETIME_S = 600.0
_LARGEST_COUNT = 2**53


class _Published(msgspec.Struct, frozen=True, array_like=True):
    """A record as it is stored: `serial` makes each publication differ, so that readers tell news from an echo."""

    serial: int
    record: PeerRecord


class _Source(msgspec.Struct, frozen=True, array_like=True):
    """What outlives a source: its samples, and whether it finished."""

    samples: int
    finished: bool


class _Sighting(NamedTuple):
    """A peer's last record, its bytes, and when they were new to us (loop seconds)."""

    record: PeerRecord
    raw: bytes
    heard_s: float


class Presence:
    """Keeps our record in the DHT and the roster up to date; `run` is to be awaited as long as we take part."""

    def __init__(
        self, network: Network, run_id: str, stages: int, *, lifetime_s: float = 30.0, refresh_s: float = 10.0
    ) -> None:
        self._network, self._run_id = network, run_id
        self._lifetime_s, self._refresh_s = lifetime_s, refresh_s
        self._own: PeerRecord | None = None
        self._serial = 0
        self._seen: tuple[dict[str, _Sighting], ...] = tuple({} for _ in range(stages))
        self._watched = tuple(range(stages))
        self._sources: dict[str, _Source] = {}
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

    async def changed(self) -> Roster:
        """Wait until the roster says something new, and return it."""
        await self._change.wait()
        return self._roster

    def focus(self, stages: Collection[int]) -> None:
        """Read only these stages from now on, beside the sources and their stage; the others count as empty."""
        self._watched = tuple(number for number in range(len(self._seen)) if number in stages or number == 0)

    def update(self, record: PeerRecord) -> None:
        """Replace our record; it is published in the usual rhythm, or soon if its state is another one."""
        if self._own is None or record.stage != self._own.stage:
            raise ValueError("a stage is taken with claim(), not with update()")
        hurry = record.state is not self._own.state
        self._own = record
        if hurry:
            self._hurry.set()

    async def claim(self, record: PeerRecord) -> Roster:
        """Publish that we serve `record.stage` from now on, and return the roster as read right after."""
        before, self._own = self._own, record
        if before is not None and before.stage != record.stage:
            await self._publish(msgspec.structs.replace(before, state=State.LEAVING))
        await self._publish(record)
        return await self.peek()

    async def withdraw(self) -> None:
        """Leave the roster and say so; what we did as a source stays. A loss on the way is counted, not raised."""
        last, self._own = self._own, None
        if last is not None:
            self._note_own(last)
            await self._publish(msgspec.structs.replace(last, state=State.LEAVING))

    async def peek(self) -> Roster:
        """Read all records that we watch now and return the new roster."""
        async with self._reading:
            watched = self._watched
            keys = [*map(self._stage_key, watched), self._sources_key]
            readings: list[Mapping[str, bytes] | None] = [None] * len(keys)

            async def read(place: int) -> None:
                try:
                    readings[place] = await self._network.read(keys[place])
                except ConnectionError:
                    self._counts["reads.failed"] += 1

            async with asyncio.TaskGroup() as group:
                for place in range(len(keys)):
                    group.create_task(read(place))
            self.complete = all(reading is not None for reading in readings)
            now = asyncio.get_running_loop().time()
            for stage, found in zip(watched, readings, strict=False):
                self._take_records(stage, found or {}, now)
            self._take_sources(readings[-1])
            self._show(now)
        return self._roster

    async def run(self) -> NoReturn:
        """Publish and read until cancelled."""
        while True:
            self._hurry.clear()
            if self._own is not None:
                await self._publish(self._own)
            await self.peek()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s * self._rng.uniform(0.9, 1.1)):
                    await self._hurry.wait()

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
        self._serial += 1
        raw = msgspec.msgpack.encode(_Published(self._serial, record))
        await self._store(self._stage_key(record.stage), raw, self._lifetime_s)
        self._note_own(record)
        source = self._sources.get(self._network.peer_id)
        if source is not None:
            await self._store(self._sources_key, msgspec.msgpack.encode(source), _SOURCE_LIFETIME_S)

    def _note_own(self, record: PeerRecord) -> None:
        """Remember our own samples, if we are or were a source, and whether we finished."""
        if record.stage == 0 and record.samples:
            finished = record.state is State.FINISHED
            self._sources[record.peer] = _joined(self._sources.get(record.peer), _Source(record.samples, finished))

    async def _store(self, key: str, raw: bytes, lifetime_s: float) -> None:
        if len(raw) > _RECORD_BYTES:
            raise ValueError(f"our record has {len(raw)} bytes, {_RECORD_BYTES} are allowed")
        try:
            stored = await self._network.publish(key, self._network.peer_id, raw, lifetime_s)
        except ConnectionError:
            stored = False
        self._counts["published" if stored else "publish.failed"] += 1

    def _take_records(self, stage: int, found: Mapping[str, bytes], now: float) -> None:
        """Note what one reading of a stage says, and forget peers of whom nothing new was heard for a lifetime."""
        seen = self._seen[stage]
        for peer in _at_most(found, seen):
            raw, known = found[peer], seen.get(peer)
            if known is not None and known.raw == raw:
                continue
            record = _decode_record(raw)
            if record is None or record.peer != peer or record.stage != stage:
                self._counts["records.garbled"] += 1
            else:
                seen[peer] = _Sighting(record, raw, now)
        for peer in [peer for peer, sighting in seen.items() if now - sighting.heard_s >= self._lifetime_s]:
            if found.get(peer) != seen[peer].raw:
                del seen[peer]

    def _take_sources(self, found: Mapping[str, bytes] | None) -> None:
        if found is None:
            return
        working = (State.TRAINING, State.FINISHED)
        self._worked.update([peer for peer, sighting in self._seen[0].items() if sighting.record.state in working])
        if not self._looked:
            # They may have left before we came.
            self._looked = True
            self._worked.update(_at_most(found, {}))
        for peer in _at_most(found, self._sources):
            source = _decode_source(found[peer]) if len(found[peer]) <= _SOURCE_BYTES else None
            if source is None:
                self._counts["records.garbled"] += 1
                continue
            if peer not in self._worked:
                self._counts["sources.unknown"] += 1
            elif peer in self._sources or len(self._sources) < _MOST_RECORDS:
                self._sources[peer] = _joined(self._sources.get(peer), source)

    def _show(self, now: float) -> None:
        """Make the new snapshot, and wake who waits if it differs."""
        own, me = self._own, self._network.peer_id
        stages = []
        for number, seen in enumerate(self._seen):
            if number not in self._watched:
                seen.clear()
            records = [sighting.record for peer, sighting in seen.items() if peer != me]
            if own is not None and own.stage == number:
                records.append(own)
            present = [record for record in records if record.state is not State.LEAVING]
            stages.append(tuple(sorted(present, key=attrgetter("peer"))))
        finished = {peer for peer, source in self._sources.items() if source.finished}
        at_work = {record.peer for record in stages[0] if record.state is State.TRAINING} - finished
        before = self._roster
        self._roster = Roster(
            stages=tuple(stages),
            read_at=now,
            run_samples=sum(source.samples for source in self._sources.values()),
            own_samples=self._sources[me].samples if me in self._sources else 0,
            sources=len(finished | at_work),
            sources_finished=len(finished),
        )
        if msgspec.structs.replace(before, read_at=now) != self._roster:
            self._change.set()
            self._change = asyncio.Event()


def _at_most(found: Mapping[str, bytes], known: Mapping[str, Any]) -> Iterable[str]:
    """Return the peers of a reading; of too many the known first, so that a flood drives nobody out."""
    if len(found) <= _MOST_RECORDS:
        return found
    return sorted(found, key=lambda peer: (peer not in known, peer))[:_MOST_RECORDS]


def _joined(known: _Source | None, news: _Source) -> _Source:
    """Return the most that was ever said of a source."""
    if known is None or (news.samples >= known.samples and news.finished >= known.finished):
        return news
    return _Source(max(known.samples, news.samples), known.finished or news.finished)


_decoded: WeakValueDictionary[bytes, PeerRecord] = WeakValueDictionary()
"""Records that somebody holds, by their bytes: the many peers of a simulation share one of each."""


def _decode_record(raw: bytes) -> PeerRecord | None:
    """Return the record if it is one that a peer may publish; whether under this name is for the caller to see."""
    known = _decoded.get(raw)
    if known is not None:
        return known
    if len(raw) > _RECORD_BYTES:
        return None
    try:
        record = msgspec.msgpack.decode(raw, type=_Published).record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    numbers = (record.claimed_at, record.device_s, record.tokens_per_s, record.loss or 0.0, record.gap or 0.0)
    counts = (record.round, record.inner_steps, record.samples)
    possible = (
        all(map(math.isfinite, numbers))
        and min(record.claimed_at, record.device_s, record.tokens_per_s) >= 0.0
        and 0.0 <= record.progress <= 1.0
        and all(0 <= count <= _LARGEST_COUNT for count in counts)
    )
    if not possible:
        return None
    _decoded[raw] = record
    return record


@lru_cache(maxsize=_MOST_RECORDS)
def _decode_source(raw: bytes) -> _Source | None:
    try:
        source = msgspec.msgpack.decode(raw, type=_Source)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return source if 0 <= source.samples <= _LARGEST_COUNT else None
