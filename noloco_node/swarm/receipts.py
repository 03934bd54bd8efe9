"""Receipts: replicas of the last stage sign for samples, and each reader decides how many samples it believes.

A source (a peer of stage 0) says its count of samples in its record. It also publishes it under the run's `sources`
key, now and then and when it leaves; there the count outlives the source by minutes. So readers look there now and
then, and when a source has gone. They keep each source's first and highest count, so that no sample counts twice. They
believe only peers that they saw at work or found at their first reading. The counts are claims.

Each replica of the last stage publishes how many samples of each source it has computed: a receipt for each source,
signed with the replica's key like every record in the DHT. A source stands in it by its tag, a short hash of its id.
Counts rise from zero in each session of a replica, its `epoch`, so that a restart neither loses receipts nor counts
them twice. A later epoch may have a lower number, because a clock may have been set back.

A claim counts as far as receipts cover it, and receipts count as far as several signers agree. Routes are random, so
every source's samples spread over the last stage as ours do, and we know which replicas computed ours. A signer that
gave us no gradient does not count; those that did stand for it. For each source, we divide every signer's count by the
signer's share of our samples; the weighted median of these is typical, and a signer counts up to `MOST_TIMES` its
typical part. So a signer that signs for a friend adds at most its own part of that source's work once more. A single
replica at the last stage cannot be compared; its receipts count up to the claim.

In a run of one stage no other peer computes a source's samples. There each replica signs for the inner steps that a
partner brings to a meeting and has not brought to another before. Receipts and names cost nothing, but a replica has
one meeting a round. So a reader believes all receipts together up to `MOST_TIMES` what its own meetings make likely
(`met_work`): the number of replicas times the work that one of them sees, both as medians over itself and its partners,
weighted by how much of our own work each met. The number of replicas follows from the partners that two replicas have
in common (capture and recapture); names that no replica meets do not count.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from noloco_node.network.wire import decoded
from noloco_node.run.peer_state import AT_WORK, PeerState
from noloco_node.swarm.roster import PeerRecord, SourceProgress
from noloco_node.swarm.stage_records import CLOCK_ERROR_S, MOST_RECORDS, at_most
from noloco_node.units import LARGEST_COUNT, Count

RECEIPT_BYTES = 4096
TAG_BYTES = 12
"""Of a source's tag. A peer that wants two identities with one tag has to try some 2^48 keys."""
LONGEST_ID = 64
MOST_LISTED = 48
"""Sources in one record: those with the most samples since the last record."""
MOST_SOURCES = 1024
MOST_SIGNERS = 1024
MOST_OF_STRANGER = 128
"""Sources remembered of a signer that has sent us no gradient."""
MOST_SESSIONS = 4
"""Sessions remembered of one signer, those read last."""
MOST_TIMES = 2.0
MOST_BROUGHT = 8
"""A partner is believed to bring up to so many times our own steps, or a round's, to a meeting: devices differ."""
SPARE = 4
"""Extra microbatches of a window that a signer may have by chance."""
ENOUGH = 16
"""Our microbatches for each signer that end a window."""
SOURCE_BYTES = 64
SOURCE_LIFETIME_S = 600.0
"""How long the DHT keeps the record of a source's samples."""
TELL_SOURCES_S, READ_SOURCES_S = SOURCE_LIFETIME_S / 3, SOURCE_LIFETIME_S / 6
"""The longest time between two publications of a source's samples, and between two readings."""
MOST_WORKED = 16 * MOST_RECORDS
"""Peers remembered to have been at work; strangers may make many."""


Tag: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]


@lru_cache(maxsize=4096)
def tag_of(peer: str) -> bytes:
    return hashlib.blake2b(peer.encode(), digest_size=TAG_BYTES).digest()


class ReceiptRecord(msgspec.Struct, frozen=True, array_like=True):
    """The samples that one replica of the last stage has computed in its session, by source."""

    epoch: Count
    samples: Annotated[dict[Tag, Count], msgspec.Meta(max_length=MOST_LISTED)]


class IssuedReceipts:
    """Samples computed here, by source; in a run of one stage, those that partners brought.

    `epoch`: differs in each session of this replica. `brought`: our own samples that each partner met.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.samples: dict[str, int] = {}
        self.brought: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin to count anew: a new epoch."""
        if self.samples:
            self.epoch += 1
        for counts in (self.samples, self.brought, self._told):
            counts.clear()

    def add(self, source: str, samples: int, brought: int = 0) -> None:
        """Count a microbatch or a meeting; of too many sources forget the one silent for longest."""
        if not 0 < len(source) <= LONGEST_ID:
            return
        self.samples[source] = self.samples.pop(source, 0) + samples
        if brought:
            self.brought[source] += brought
        if len(self.samples) > MOST_SOURCES:
            forgotten = next(iter(self.samples))
            del self.samples[forgotten], self._told[forgotten], self.brought[forgotten]

    def raw(self) -> bytes:
        grown = {source: count - self._told[source] for source, count in self.samples.items()}
        listed = sorted(grown, key=lambda source: (-grown[source], source))[:MOST_LISTED]
        counts = {tag_of(source): self.samples[source] for source in listed}
        self._told.update({source: grown[source] for source in listed})
        raw = msgspec.msgpack.encode(ReceiptRecord(self.epoch, counts))
        assert len(raw) <= RECEIPT_BYTES
        return raw


class _SignerBook:
    """The receipts of one signer: samples by a source's tag, in each of its last sessions and in all."""

    def __init__(self) -> None:
        self.sessions: dict[int, dict[bytes, int]] = {}
        """By epoch; the one read last comes last."""
        self.total: Counter[bytes] = Counter()

    def take(self, record: ReceiptRecord, most: int) -> dict[bytes, int]:
        """Take a record, of at most so many sources; return each source's growth."""
        session = self.sessions[record.epoch] = self.sessions.pop(record.epoch, {})
        if len(self.sessions) > MOST_SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        grown = {}
        for source, count in record.samples.items():
            before = session.get(source, 0)
            if count > before and (source in self.total or len(self.total) < most):
                session[source] = count
                self.total[source] += count - before
                grown[source] = count - before
        return grown


class ReceiptLedger:
    """All receipts that one reader has read. `verified` counts from `begin` on."""

    def __init__(self) -> None:
        self._books: dict[str, _SignerBook] = {}
        self._signed: Counter[bytes] = Counter()
        self._has_read = self._counts = False
        self._shares: dict[str, float] = {}
        """Each signer's share of our own samples, as of the last reading."""
        self._coverage = 1.0
        """The part of the last stage's work that these signers do, as our own samples make likely."""
        self._settled: dict[bytes, float] = {}
        self._verified: dict[str, int] = {}
        """What `verified` has returned since the last reading: rosters ask for it at every reading of a stage."""
        self._window: defaultdict[bytes, Counter[str]] = defaultdict(Counter)
        """Samples signed since the last window, by a source's tag and by signer."""
        self._proved: Counter[str] = Counter()
        """Our own samples of this window, by the replica that computed them."""
        self._proved_before: Counter[str] = Counter()
        self._microbatch = 1

    def begin(self) -> None:
        """Begin to count; earlier receipts do not count."""
        self._counts = True
        self._verified.clear()
        for counts in (self._settled, self._window, self._proved, self._proved_before, self._shares):
            counts.clear()

    def prove(self, signer: str, samples: int) -> None:
        """Note that a gradient of ours came back which `signer` computed."""
        if signer in self._proved or (0 < len(signer) <= LONGEST_ID and len(self._proved) < MOST_SIGNERS):
            self._proved[signer] += samples
            if samples != self._microbatch:
                self._microbatch = samples
                self._verified.clear()

    @property
    def signed_lately(self) -> Mapping[bytes, Mapping[str, int]]:
        """Samples signed since we began and since the last window, by a source's tag and by signer."""
        return self._window

    def take(self, raws: Mapping[str, bytes], met: Collection[str] = ()) -> None:
        """Note a reading of the receipts' key. `met`: signers that we have met ourselves."""
        proved = {*self._proved, *self._proved_before, *met}
        known = self._books.keys() | proved
        known_first = sorted(raws, key=lambda peer: (peer not in proved, peer not in known, peer))
        for signer in known_first[:MOST_SIGNERS]:
            record = decode_receipts(raws[signer])
            if record is None or (signer not in known and len(self._books) >= 2 * MOST_SIGNERS):
                continue
            most = MOST_SOURCES if signer in proved else MOST_OF_STRANGER
            grown = self._books.setdefault(signer, _SignerBook()).take(record, most)
            self._signed.update(grown)
            for source, count in grown.items() if self._has_read and self._counts else ():
                self._window[source][signer] += count
        self._has_read = True
        self._verified.clear()
        self._compare()
        if self._proved.total() >= ENOUGH * self._microbatch * max(1, len(self._proved)):
            self._settle()

    def signed(self, source: str) -> int:
        """Return all samples of a source that any peer signed."""
        return self._signed[tag_of(source)]

    def verified(self, source: str) -> int:
        """Return the samples of a source since we began that we believe."""
        if source not in self._verified:
            tag = tag_of(source)
            self._verified[source] = int(self._settled.get(tag, 0.0) + self._believed(self._window.get(tag)))
        return self._verified[source]

    def believed_in_all(self, source: str) -> int:
        """Return the samples of a source in its whole time that we believe, by the receipts of our present signers.

        0 until we have enough gradients: a few microbatches may all have gone to one signer.
        """
        if (self._proved + self._proved_before).total() < ENOUGH * self._microbatch:
            return 0
        tag = tag_of(source)
        return int(self._believed({each: self._books[each].total[tag] for each in self._shares}))

    def _compare(self) -> None:
        """Note which signers computed which share of our samples, and how much of all work they do.

        Signers that we have not met do the share of all work that signers we met once did of ours (Good and Turing).
        """
        proved = self._proved + self._proved_before
        in_all, met_once = proved.total(), sum(each for each in proved.values() if each <= self._microbatch)
        # Leave out signers whose receipts we have not read.
        for unread in proved.keys() - self._books.keys():
            del proved[unread]
        total = proved.total()
        self._shares = {signer: count / total for signer, count in proved.items()}
        if total:
            self._coverage = total / in_all * (1.0 - met_once / (in_all + self._microbatch))

    def _settle(self) -> None:
        for source, signed in self._window.items():
            if believed := self._believed(signed):
                self._settled[source] = self._settled.pop(source, 0.0) + believed
        for idle in list(islice(self._settled, max(0, len(self._settled) - MOST_SOURCES))):
            del self._settled[idle]
        self._window.clear()
        self._proved_before, self._proved = self._proved, Counter()

    def _believed(self, signed: Mapping[str, int] | None) -> float:
        shares = self._shares
        if not signed or not shares:
            return 0.0
        typical = weighted_median({signer: signed.get(signer, 0) / share for signer, share in shares.items()}, shares)
        spare = SPARE * self._microbatch
        bounded = (min(signed.get(signer, 0), MOST_TIMES * share * typical + spare) for signer, share in shares.items())
        return sum(bounded) / self._coverage


def weighted_median(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the lower median of values, each with a weight; the weights' sum is 1."""
    rising, below = sorted((value, name) for name, value in values.items()), 0.0
    for value, name in rising:
        below += weights[name]
        if below >= 0.5 - 1e-9:
            return value
    return rising[-1][0]


class MetWork(NamedTuple):
    """The others' samples that our meetings make believable, and the number of replicas."""

    samples: float
    replicas: float


def met_work(me: str, issued: IssuedReceipts, signed: Mapping[bytes, Mapping[str, int]]) -> MetWork | None:
    """Return the samples that we believe; None before our first meeting. `signed`: by a source's tag and by signer."""
    if not issued.brought:
        return None
    seen: dict[str, Mapping[bytes, int]] = {me: {tag_of(source): each for source, each in issued.samples.items()}}
    others: dict[str, dict[bytes, int]] = {}
    for tag, by in signed.items():
        for signer, samples in by.items():
            if signer != me and tag_of(signer) != tag:
                others.setdefault(signer, {})[tag] = samples
    seen |= others
    voices = {peer: float(brought) for peer, brought in issued.brought.items() if peer in others}
    voices[me] = sum(voices.values()) / len(voices) if voices else 1.0
    weights = {peer: voice / sum(voices.values()) for peer, voice in voices.items()}
    typical = weighted_median({peer: float(sum(seen[peer].values())) for peer in voices}, weights)
    replicas = weighted_median({peer: _replicas(me, seen[me], peer, seen[peer]) for peer in voices}, weights)
    # Bounds whatever the others say: devices differ by so much, and few partners tell little about the number.
    typical = min(typical, float(MOST_BROUGHT * issued.brought.total()))
    replicas = min(replicas, float((1 + len(issued.brought)) ** 2))
    said = sum(samples for by in seen.values() for tag, samples in by.items() if tag != tag_of(me))
    # We have seen ourselves what partners brought to us.
    likely = max(MOST_TIMES * replicas * typical, float(sum(issued.samples.values())))
    return MetWork(min(float(said), likely), replicas)


def _replicas(me: str, met: Mapping[bytes, int], peer: str, met_by_it: Mapping[bytes, int]) -> float:
    """Return the number of replicas that two replicas make likely by their partners, who are known by their tags."""
    both = {tag_of(me), tag_of(peer)}
    ours, theirs = met.keys() - both, met_by_it.keys() - both
    if peer == me or not ours or not theirs:
        return float(len(met.keys() | met_by_it.keys() | both))
    return 2.0 + len(ours) * len(theirs) / max(1, len(ours & theirs))


@lru_cache(maxsize=1024)  # for the many readers of a simulation
def decode_receipts(raw: bytes) -> ReceiptRecord | None:
    return decoded(raw, ReceiptRecord, RECEIPT_BYTES)


class SourceRecord(msgspec.Struct, frozen=True, array_like=True):
    """A source's samples and whether it finished; this record outlives the source."""

    samples: Count
    finished: bool


class SourceCount(NamedTuple):
    """What we know of a source: its highest claim, and when we last found its record (loop seconds).

    `first`: its samples when we first heard of it. `forgotten`: samples of an earlier session that it lost.
    """

    said: SourceRecord
    found_s: float
    first: int
    forgotten: int = 0

    @property
    def samples(self) -> int:
        return min(LARGEST_COUNT, self.forgotten + self.said.samples)


class RunProgress:
    """One reader's knowledge of all sources: `sources`, by peer, and `receipts` for their samples."""

    def __init__(self, me: str) -> None:
        self.sources: dict[str, SourceCount] = {}
        self.receipts = ReceiptLedger()
        self._me = me
        self._claimed_before: dict[str, int] = {}
        """The claim of each source when we began to count."""
        self._worked = {me}
        """Peers whose claims count: those seen at work, and those of our first readings."""
        self._at_work: set[str] = set()
        """The sources that the last reading of stage 0 found at work."""
        self._read_s: float | None = None
        """When we last read the sources' key (loop seconds)."""
        self.lost_one = False
        """Whether a source has gone since then, so that its key is to be read at once."""

    def note(self, peer: str, said: SourceRecord, now_s: float) -> None:
        """Note the record of a source that we believe."""
        self.sources[peer] = counted(self.sources.get(peer), said, now_s)

    def note_own(self, record: PeerRecord, now_s: float) -> None:
        """Note our own samples, if we are or were a source, and whether we finished."""
        if record.stage == 0 and record.samples:
            self.note(record.peer, SourceRecord(record.samples, record.state is PeerState.FINISHED), now_s)

    def see(self, believed: Iterable[PeerRecord], records: Collection[PeerRecord], now_s: float) -> None:
        """Note a reading of stage 0: the peers that we believe to be there, and all records."""
        at_work = {record.peer for record in believed if record.state in AT_WORK}
        self.lost_one |= not self._at_work <= at_work
        self._at_work = at_work
        self._worked.update(islice(at_work - self._worked, max(0, MOST_WORKED - len(self._worked))))
        if self._read_s is None:
            # They may have left before we came.
            self._worked.update(record.peer for record in records)
        for record in records:
            if record.samples:
                self._claim(record.peer, SourceRecord(record.samples, record.state is PeerState.FINISHED), now_s)

    def is_due(self, now_s: float) -> bool:
        """Say whether to read the sources' key with the others."""
        return self._read_s is None or now_s - self._read_s > READ_SOURCES_S

    def take(self, raws: Mapping[str, bytes], now_s: float) -> None:
        """Note a reading of the sources' key."""
        if self._read_s is None:
            self._worked.update(at_most(raws, {}))
        self._read_s, self.lost_one = now_s, False
        for peer in at_most(raws, self.sources):
            said = decode_source(raws[peer])
            if said is not None:
                self._claim(peer, said, now_s)

    def _claim(self, peer: str, said: SourceRecord, now_s: float) -> None:
        """Note what a peer says of itself, if its claims count."""
        if peer in self._worked and (peer in self.sources or len(self.sources) < MOST_RECORDS):
            self.note(peer, said, now_s)

    def begin(self) -> None:
        """Begin to count the others' samples."""
        self.receipts.begin()
        self._claimed_before = {peer: source.samples for peer, source in self.sources.items()}

    def other_sources(self) -> tuple[SourceProgress, ...]:
        """Return of each other source its claimed, signed and verified samples."""
        return tuple(
            self._progress_of(peer, source) for peer, source in sorted(self.sources.items()) if peer != self._me
        )

    def _progress_of(self, peer: str, source: SourceCount) -> SourceProgress:
        claimed, receipts = source.samples, self.receipts
        since = max(0, claimed - self._claimed_before.get(peer, 0))
        verified = min(since, receipts.verified(peer))
        return SourceProgress(peer, claimed, min(claimed, receipts.signed(peer)), verified, source.said.finished)


def counted(known: SourceCount | None, news: SourceRecord, now_s: float) -> SourceCount:
    """Return our knowledge of a source after its record `news`.

    A smaller count than before is an old copy of its record, unless all copies have expired: then the source has lost
    count, and its further samples come on top of those it had done.
    """
    if known is None:
        return SourceCount(news, now_s, first=news.samples)
    samples, forgotten, lost = news.samples, known.forgotten, known.said.samples - news.samples
    if lost > 0:
        if now_s - known.found_s > SOURCE_LIFETIME_S + CLOCK_ERROR_S:
            forgotten += lost
        else:
            samples += lost
    said = SourceRecord(samples, known.said.finished or news.finished)
    return SourceCount(said, now_s, known.first, forgotten)


@lru_cache(maxsize=1024)  # for the many readers of a simulation: one node decodes as many in a millisecond
def decode_source(raw: bytes) -> SourceRecord | None:
    return decoded(raw, SourceRecord, SOURCE_BYTES)
