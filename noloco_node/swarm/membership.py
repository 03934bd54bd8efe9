"""The members of the run: keeps our own record alive in the DHT, and reads all records into one immutable `Roster`.

Each peer has one record, under the key of its stage with its own id as the subkey. A peer publishes its record every
`refresh_s` with a higher serial number. A peer without news for `LIFETIME_S`, or for as long as its record asks within
bounds, drops out of the roster (`noloco_node.swarm.stage_records` has the rules). A peer that leaves politely says so
in its last record, and readers drop it at once.

In the same rhythm a peer reads the stages: a newcomer all of them, a replica those that it works with (`focus`). While
a newcomer of the next stage copies its weights, we read four times as often, so that it does not wait for work.
Decisions use the last roster and never wait for the DHT.

In the DHT a record stays five minutes longer than readers believe it, since it expires by other peers' clocks. The
network guarantees that a peer signed its own record. After a
failed reading the roster stays, and says since when it is old (`Roster.old_since_s`): its peers can still be called.

A stage of more than 64 replicas has shards (`noloco_node.swarm.shards`): a peer writes under the keys of its own, and
reads a few. Then the roster is a sample, which says how many peers there are (`Roster.sizes`), and no sum of all peers
is read: the keys of sources and of receipts are left alone. A peer that knows only a sample of its stage publishes its
record every `RENEWED_S`. Most records of such a stage are brief (`noloco_node.swarm.roster.brief`).

A source and a visitor also read the receipts for all sources' samples (`noloco_node.swarm.receipts`). A replica of the
last stage publishes the receipts that it gives. Both happen every second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import msgspec

from noloco_node.libp2p.addresses import present
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.receipts import (
    SOURCE_LIFETIME_S,
    TELL_SOURCES_S,
    IssuedReceipts,
    RunProgress,
    SourceCount,
    SourceRecord,
)
from noloco_node.swarm.roster import Given, PeerRecord, Roster, SourceProgress, brief
from noloco_node.swarm.shards import FOLLOWED, RENEWED_S, Shard, StageSize, is_brief, written
from noloco_node.swarm.stage_division import StageDivision
from noloco_node.swarm.stage_records import (
    CLOCK_ERROR_S,
    LONGEST_LIFETIME_S,
    RECORD_BYTES,
    Published,
    StageRecords,
    encode_record,
    newest,
)
from noloco_node.tasks import loop_s

LIFETIME_S = 30.0
"""Readers believe a record for this long at least."""
REFRESHES = 3
"""Our record outlives this many refreshes, since one or two may be lost on the way."""
SAMPLE_RENEWALS = 2
"""The same where a roster is a sample: another reading finds the peer again."""
LONGEST_IN_DHT_S = 3600.0
MOST_ADDRESSES = 8
"""The most addresses in our record, which has little room."""
REFRESHES_PER_RECEIPTS = 2
"""Refreshes between two publications of receipts, and between two readings."""
READS_FOR_NEWCOMERS = 4
"""Readings in the time of one, while a newcomer of the next stage catches up."""


class Membership:
    """Keeps our record in the DHT and the roster up to date while `run` is awaited.

    `given`: returns our totals for the run, whenever we publish our record. `shards`: of a large stage that are read.
    """

    def __init__(
        self,
        network: PeerNetwork,
        run_id: str,
        stages: int,
        *,
        refresh_s: float = 10.0,
        unix_time: Callable[[], float] = CLOCK.unix_s,
        name: str = "",
        given: Callable[[], Given | None] = lambda: None,
        shards: int = FOLLOWED,
    ) -> None:
        self._network, self._run_id, self._unix_time, self._name = network, run_id, unix_time, name
        self._sources_key, self._receipts_key = f"{run_id}/sources", f"{run_id}/receipts"
        self._given = given
        self._addresses: tuple[str, ...] = ()
        """Where others reach us: a machine may change its address while it runs."""
        self._lifetime_s, self._refresh_s = max(LIFETIME_S, REFRESHES * refresh_s), refresh_s
        self._own: PeerRecord | None = None
        self._publish_s = float("-inf")
        """When our record is to be published again (loop seconds)."""
        self._published_at: list[str] = []
        """The keys of our last record."""
        self._serial = 0
        self._kept_s = 0.0
        """The longest life in the DHT that a record of ours had."""
        self._records = StageRecords(network.peer_id, stages, self._lifetime_s, refresh_s)
        self._divisions = [StageDivision(network.peer_id, stage, shards) for stage in range(stages)]
        self._progress = RunProgress(network.peer_id)
        self.receipts = self._progress.receipts
        self.issued: IssuedReceipts | None = None
        """The receipts that we publish: of the last stage, or of our partners in a run of one stage; None: none."""
        self._signed_s = self._read_receipts_s = float("-inf")
        """When we last published receipts, and when we last read them (loop seconds)."""
        self._told: tuple[bool, float] | None = None
        """Whether we had finished when we last published our samples as a source, and when (loop seconds)."""
        self._roster = Roster(stages=((),) * stages)
        self._change = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reading = asyncio.Lock()
        self.complete = False
        """Whether the last reading reached all keys; only then does an empty roster mean that no peer is there."""
        self.failed = False
        """Whether `run` has failed, as where the run lets us in no more."""
        self.unlisted_since_s: float | None = None
        """Since when the DHT has taken no record of ours (loop seconds); None while it takes them."""
        self._rng = random.Random(f"{run_id}|presence|{network.peer_id}")

    @property
    def me(self) -> str:
        return self._network.peer_id

    @property
    def _stage(self) -> int | None:
        """The stage that we serve."""
        return None if self._own is None else self._own.stage

    @property
    def roster(self) -> Roster:
        return self._roster

    @property
    def news_age_s(self) -> dict[str, float]:
        """The age of the last news of each peer that is late, and so may be dead."""
        return self._records.news_age_s(self._unix_time())

    @property
    def sources_renewed_s(self) -> float:
        """The time between two records of a source: of a stage that is a sample, sources publish more seldom."""
        return self._refresh_s if self._divisions[0].size is None else max(RENEWED_S, self._refresh_s)

    @property
    def watched(self) -> tuple[int, ...]:
        """The stages that we read and of which the roster already tells."""
        return self._records.known

    def note_samples(self, samples: int) -> None:
        """Note the samples that we have done at stage 0, whatever our record says."""
        if samples:
            self._progress.note(self.me, SourceRecord(samples, finished=False), loop_s())

    def begin_counting(self) -> None:
        """Begin to count the samples of other sources (`Roster.other_sources`), and those for which we sign."""
        self._progress.begin()
        if self.issued is not None:
            self.issued.begin()
        self._show(self._roster.read_at)

    def publish_now(self) -> None:
        self._publish_s = float("-inf")
        self._hurry.set()

    async def changed(self) -> Roster:
        """Wait for a roster that differs, and return it."""
        await self._change.wait()
        return self._roster

    def focus(self, stages: Collection[int]) -> None:
        """Read only these stages from now on, and stage 0; the others count as empty."""
        self._records.focus(stages)

    def update(self, record: PeerRecord) -> None:
        """Replace our record; a new state and our first round are published soon, other changes in the usual rhythm.

        By the first round a newcomer knows that the run has begun, so that it copies weights instead of beginning.
        """
        if self._own is None or record.stage != self._own.stage:
            raise ValueError("a stage is taken with claim(), not with update()")
        publish_now = record.state is not self._own.state or self._own.round == 0 < record.round
        self._own = record
        if publish_now:
            self.publish_now()

    async def claim(self, record: PeerRecord) -> Roster:
        """Publish that we serve `record.stage` from now on; return the roster read right after."""
        await self._note_addresses()
        before, self._own = self._own, record
        if before is not None and before.stage != record.stage:
            await self._publish(msgspec.structs.replace(before, state=PeerState.LEAVING))
        await self._publish(record)
        return await self.peek()

    async def withdraw(self) -> None:
        """Publish that we leave; our samples as a source stay. A lost network is not raised.

        Where a stage is a sample, a record that says that we have finished stays instead.
        """
        last, self._own = self._own, None
        if last is not None:
            self._progress.note_own(last, loop_s())
            stays = last.state is PeerState.FINISHED and self._roster.is_sample
            await self._publish(last if stays else msgspec.structs.replace(last, state=PeerState.LEAVING))

    async def peek(self, stages: Collection[int] | None = None) -> Roster:
        """Read the stages that we watch, or these stages once; return the new roster.

        Samples that we watch, and whose reading is not due, are not read for the latter.
        """
        async with self._reading:
            watched = self._records.watched
            if stages is None:
                await self._read(watched, watched)
            elif due := [stage for stage in stages if stage not in watched or self._is_due_now(stage)]:
                await self._read(due, stages)
        return self._roster

    async def _read_due(self) -> None:
        """Read those of the stages that we watch whose reading is due: all but samples."""
        async with self._reading:
            watched = self._records.watched
            if due := [stage for stage in watched if self._is_due_now(stage)]:
                await self._read(due, watched)

    def _is_due_now(self, stage: int) -> bool:
        """Say whether a stage that we watch is to be read: always, unless it is a sample."""
        return self._divisions[stage].is_due(self._stage)

    async def _read(self, stages: Collection[int], kept: Collection[int]) -> None:
        """Read stages and show the new roster; forget all stages but those that are `kept`."""
        shards = {stage: self._divisions[stage].next_reading(self._stage) for stage in stages}
        keys = [shard.key(self._stage_key(stage)) for stage in stages for shard in shards[stage]]
        is_sample = self._roster.is_sample
        if self._progress.is_due(loop_s()) and not is_sample:
            keys.append(self._sources_key)
        # A peer of a later stage counts the samples that pass through it.
        if self._stage in (None, 0) and self._is_due(self._read_receipts_s) and not is_sample:
            keys.append(self._receipts_key)
        read = dict(zip(keys, await self._network.read_all(keys), strict=True))
        now_s = loop_s()
        found = self._take_stages(shards, kept, read, now_s)
        receipts = read.get(self._receipts_key)
        if receipts is not None:
            self._read_receipts_s = now_s
            self.receipts.take(receipts, () if self.issued is None else self.issued.brought)
        if found.get(0) is not None:
            self._progress.see(self._records.believed[0].values(), self._records.of_sources, now_s)
        if self._progress.lost_one and not is_sample and not any(self._sizes):
            read[self._sources_key], *_ = await self._network.read_all([self._sources_key])
        sources = read.get(self._sources_key)
        if sources is not None:
            self._progress.take(sources, now_s)
        self.complete = all(records is not None for key, records in read.items() if key != self._receipts_key)
        self._records.keep_only(kept)
        self._show(now_s)

    def _take_stages(
        self,
        shards: Mapping[int, Sequence[Shard]],
        kept: Collection[int],
        read: Mapping[str, Mapping[str, bytes] | None],
        now_s: float,
    ) -> Mapping[int, Mapping[str, bytes] | None]:
        """Take what was read of stages, by the keys of these shards; return it by stage, None where no key was read."""
        found: dict[int, Mapping[str, bytes] | None] = {}
        for stage in shards:
            answers = [read[shard.key(self._stage_key(stage))] for shard in shards[stage]]
            known = [answer for answer in answers if answer is not None]
            found[stage] = newest(known) if known else None
        # Of a parent those alone that stand in no deeper shard: others there are the same for all readers.
        own = {s: [each for each in shards[s] if each.depth == self._divisions[s].depth] for s in shards}
        # The peers under a key that could not be read, or under its parent's, grow no older.
        unread = {
            s: [each for each in own[s] if None in (read[each.key(key)], read.get(each.parent.key(key), ()))]
            for s, key in zip(shards, map(self._stage_key, shards), strict=True)
        }
        pauses_s = {s: self._divisions[s].pause_s for s in shards}
        before = {s: self._records.believed[s].keys() for s in shards}
        self._records.take(found, own, now_s, self._unix_time(), unread, pauses_s)
        for stage, division in enumerate(self._divisions):
            if found.get(stage) is not None:
                division.read_s = now_s
            if stage in shards or stage not in kept:
                division.size = None
        for stage in shards:
            division = self._divisions[stage]
            depth = division.depth
            division.divide(own[stage], self._records, self._stage)
            if stage == self._stage and division.depth != depth:
                self._publish_s = float("-inf")
            if not unread[stage]:  # else they are due until they could be read
                gone = len(before[stage] - self._records.believed[stage].keys()) / max(1, len(before[stage]))
                division.note_reading(own[stage], self._records, self._stage, now_s, gone)
        self._records.seldom = [stage for stage, size in enumerate(self._sizes) if size is not None]
        return found

    async def run(self) -> NoReturn:
        try:
            while True:
                self._hurry.clear()
                if self._own is not None and loop_s() >= self._publish_s:
                    await self._note_addresses()
                    if self._own is not None:
                        await self._publish(self._own)
                await self._read_due()
                await self._rest(self._refresh_s * self._rng.uniform(0.9, 1.1))
        except Exception:
            self.failed = True
            raise

    async def _rest(self, pause_s: float) -> None:
        """Wait for the next reading or `publish_now`; meanwhile look for newcomers."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + pause_s
        while (left_s := until_s - now_s()) > 0:
            expects = self._expects_newcomer()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._refresh_s / READS_FOR_NEWCOMERS) if expects else left_s):
                    await self._hurry.wait()
                    return
            if expects and now_s() < until_s:
                await self.peek()

    def _expects_newcomer(self) -> bool:
        """Say whether a newcomer of the next stage is about to begin its work."""
        after = None if self._own is None else self._own.stage + 1
        if after is None or after not in self.watched or self._roster.is_sample:
            return False
        return any(record.state is PeerState.CATCHING_UP for record in self._roster.stages[after])

    @property
    def _sizes(self) -> tuple[StageSize | None, ...]:
        return tuple(division.size for division in self._divisions)

    async def _note_addresses(self) -> None:
        with contextlib.suppress(ConnectionError):  # the last ones stay
            now = await self._network.addresses()
            self._addresses = tuple(present(self._addresses, now[:MOST_ADDRESSES]))

    def _stage_key(self, number: int) -> str:
        return f"{self._run_id}/stage/{number}"

    async def _publish(self, record: PeerRecord) -> None:
        # Grows over a restart too, and should our clock be set back.
        unix_s = max(0.0, self._unix_time())
        self._serial = max(self._serial + 1, int(1000 * unix_s))
        named = msgspec.structs.replace(record, name=self._name, addresses=self._addresses, given=self._given())
        division, lifetime_s = self._divisions[record.stage], self._lifetime_s
        # All who read us see that we have finished, for by that they end; where any stage is a sample, by this alone.
        ends = record.state is PeerState.FINISHED and self._roster.is_sample
        is_sampled = division.size is not None or ends
        if is_sampled:
            # A whole number takes one byte instead of nine.
            lifetime_s = math.ceil(max(lifetime_s, LONGEST_LIFETIME_S if ends else SAMPLE_RENEWALS * RENEWED_S))
            named = brief(named) if is_brief(self.me) else named
        # Nobody needs the moment to a fraction of a second where records come once a minute.
        at = round(unix_s) if is_sampled else unix_s
        raw = encode_record(Published(self._serial, named, at, lifetime_s, division.depth))
        # Never shorter than before: of two records the DHT keeps the one that expires later.
        kept_s = self._kept_s = min(max(self._kept_s, lifetime_s + CLOCK_ERROR_S), LONGEST_IN_DHT_S)
        self._progress.note_own(record, loop_s())
        keys = [shard.key(self._stage_key(record.stage)) for shard in written(self.me, division.depth)]
        stored: list[Coroutine[Any, Any, bool]] = [self._store(key, raw, kept_s) for key in keys]
        source = None if self._roster.is_sample else self._progress.sources.get(self._network.peer_id)
        if source is not None and (record.state is PeerState.LEAVING or not self._has_told(source.said)):
            stored.append(self._tell(source.said))
        ends = record.state in (PeerState.FINISHED, PeerState.LEAVING)
        signs = self.issued is not None and self.issued.samples and not self._roster.is_sample
        if self.issued is not None and signs and (ends or self._is_due(self._signed_s)):
            self._signed_s = loop_s()
            stored.append(self._store(self._receipts_key, self.issued.raw(), SOURCE_LIFETIME_S))
        self._publish_s = loop_s()  # not after what asks for another record from now on
        # All at once: others may call us until our last record is out.
        took = await asyncio.gather(*stored)
        is_listed = any(took[: len(keys)])
        self.unlisted_since_s = None if is_listed else self.unlisted_since_s or loop_s()
        # Within a tenth: the next chance is a refresh later.
        # The first record under new keys is soon followed by another: who changes with us may have read before it.
        is_known = is_listed and is_sampled and keys == self._published_at
        self._published_at = keys if is_listed else []
        if is_known and self._publish_s > float("-inf"):
            self._publish_s = loop_s() + 0.9 * RENEWED_S

    def _is_due(self, last_s: float) -> bool:
        """Say whether receipts that we last published or read at that time are to be published or read again."""
        return loop_s() - last_s > (REFRESHES_PER_RECEIPTS - 0.5) * self._refresh_s

    async def _tell(self, said: SourceRecord) -> bool:
        """Publish our samples as a source where they outlive us."""
        stored = await self._store(self._sources_key, msgspec.msgpack.encode(said), SOURCE_LIFETIME_S)
        self._told = (said.finished, loop_s()) if stored else None
        return stored

    def _has_told(self, said: SourceRecord) -> bool:
        """Say whether what we published of our samples as a source is good for now; our record says more."""
        return self._told is not None and self._told[0] == said.finished and loop_s() - self._told[1] < TELL_SOURCES_S

    async def _store(self, key: str, raw: bytes, lifetime_s: float) -> bool:
        if len(raw) > RECORD_BYTES:
            raise ValueError(f"our record has {len(raw)} bytes, {RECORD_BYTES} are allowed")
        with contextlib.suppress(ConnectionError):  # it is published again soon
            return await self._network.publish(key, self._network.peer_id, raw, lifetime_s)
        return False

    def _show(self, now_s: float) -> None:
        """Make the new roster, and wake the waiting tasks if it differs."""
        before, me = self._roster, self._network.peer_id
        believed, old_since_s = self._records.believed, self._records.old_since_s(now_s)
        sizes = self._sizes if any(self._sizes) else ()
        other_sources = () if sizes else self._progress.other_sources()
        roster = roster_of(me, self._own, believed, self._progress.sources, now_s, old_since_s, other_sources)
        self._roster = sampled(roster, sizes, tuple(each.read_s for each in self._divisions)) if sizes else roster
        if msgspec.structs.replace(before, read_at=now_s, stages_read_at=self._roster.stages_read_at) != self._roster:
            self._change.set()
            self._change = asyncio.Event()


def roster_of(
    me: str,
    own: PeerRecord | None,
    believed: Sequence[Mapping[str, PeerRecord]],
    sources: Mapping[str, SourceCount],
    read_at: float,
    old_since_s: float | None,
    other_sources: tuple[SourceProgress, ...] = (),
) -> Roster:
    """Return one reader's roster: others' records by stage and peer, its own, and all sources."""
    stages = []
    for number, by_peer in enumerate(believed):
        records = [record for peer, record in by_peer.items() if peer != me]
        if own is not None and own.stage == number:
            records.append(own)
        present = [record for record in records if record.state is not PeerState.LEAVING]
        stages.append(tuple(sorted(present, key=attrgetter("peer"))))
    finished = {peer for peer, source in sources.items() if source.said.finished}
    at_work = {record.peer for record in stages[0] if record.state is PeerState.TRAINING} - finished
    return Roster(
        stages=tuple(stages),
        read_at=read_at,
        old_since_s=old_since_s,
        run_samples=sum(source.samples for source in sources.values()),
        own_samples=sources[me].samples if me in sources else 0,
        first_samples=sum(source.first for peer, source in sources.items() if peer != me),
        sources=len(finished | at_work),
        sources_finished=len(finished),
        other_sources=other_sources,
    )


def sampled(roster: Roster, sizes: tuple[StageSize | None, ...], read_at: tuple[float, ...]) -> Roster:
    """Return a roster as one that is a sample. Sources count that are in it now: whoever has left it may be there.

    `read_at`: when each stage was read (loop seconds).
    """
    finished = sum(record.state is PeerState.FINISHED for record in roster.stages[0])
    at_work = sum(record.state is PeerState.TRAINING for record in roster.stages[0])
    return msgspec.structs.replace(
        roster, sizes=sizes, stages_read_at=read_at, sources=finished + at_work, sources_finished=finished
    )
