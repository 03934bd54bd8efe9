"""How much of a run is done, by source; it is kept apart from who is there, because it must outlive whoever did it.

Each source (a peer of stage 0) has a record under the run's `sources` key that lives for minutes. Readers remember each
one's first and highest count (`counted`), so that none counts twice for whoever knew the run's progress before. Only
peers that were seen at work are believed, and those that a newcomer's first reading finds. These counts are claims:
what of them is covered is for receipts to say (`noloco_node.swarm.receipts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import msgspec

from noloco_node.network.wire import decoded
from noloco_node.run.peer_state import AT_WORK, PeerState
from noloco_node.swarm.peer_records import CLOCK_ERROR_S, MOST_RECORDS, at_most
from noloco_node.swarm.receipts import ReceiptLedger
from noloco_node.swarm.roster import PeerRecord, SourceCredit
from noloco_node.units import LARGEST_COUNT, Count

SOURCE_BYTES = 64
SOURCE_LIFETIME_S = 600.0
"""For which the record of a source's samples is kept."""
MOST_WORKED = 16 * MOST_RECORDS
"""Peers that are remembered to have been at work: strangers may make many."""


class SourceRecord(msgspec.Struct, frozen=True, array_like=True):
    """What outlives a source: its samples, and whether it finished."""

    samples: Count
    finished: bool


class SourceCount(NamedTuple):
    """What is known of a source: the most that it said, and when its record was found last (loop seconds).

    `first`: its samples when we first heard of it. `forgotten`: those of an earlier life that it counts no more itself.
    """

    said: SourceRecord
    found_s: float
    first: int
    forgotten: int = 0

    @property
    def samples(self) -> int:
        """All that it did."""
        return min(LARGEST_COUNT, self.forgotten + self.said.samples)


class RunProgress:
    """What one reader knows of all sources: `sources`, by peer, and `receipts` for their samples."""

    def __init__(self, me: str) -> None:
        self.sources: dict[str, SourceCount] = {}
        self.receipts = ReceiptLedger()
        self._me = me
        self._claimed_before: dict[str, int] = {}
        """Of each source, when we began to count."""
        self._worked = {me}
        """Peers that may speak of samples: those seen at work, and those whom our first reading found."""
        self._has_read = False

    def note(self, peer: str, said: SourceRecord, now_s: float) -> None:
        """Note what a source says of itself, and is believed."""
        self.sources[peer] = counted(self.sources.get(peer), said, now_s)

    def note_own(self, record: PeerRecord, now_s: float) -> None:
        """Note our own samples, if we are or were a source, and whether we finished."""
        if record.stage == 0 and record.samples:
            self.note(record.peer, SourceRecord(record.samples, record.state is PeerState.FINISHED), now_s)

    def take(self, raws: Mapping[str, bytes], records: Iterable[PeerRecord], now_s: float) -> None:
        """Note what a reading of the sources' key found. `records`: of the peers that are there at stage 0."""
        seen = (record.peer for record in records if record.state in AT_WORK)
        self._worked.update(list(islice(seen, max(0, MOST_WORKED - len(self._worked)))))
        if not self._has_read:
            # They may have left before we came.
            self._has_read = True
            self._worked.update(at_most(raws, {}))
        for peer in at_most(raws, self.sources):
            said = decode_source(raws[peer])
            is_room = peer in self.sources or len(self.sources) < MOST_RECORDS
            if said is not None and peer in self._worked and is_room:
                self.note(peer, said, now_s)

    def begin(self) -> None:
        """Begin to count what the others do from now on."""
        self.receipts.begin()
        self._claimed_before = {peer: source.samples for peer, source in self.sources.items()}

    def credits(self) -> tuple[SourceCredit, ...]:
        """Return of each other source what it claims, and what of that is covered."""
        return tuple(self._credit(peer, source) for peer, source in sorted(self.sources.items()) if peer != self._me)

    def _credit(self, peer: str, source: SourceCount) -> SourceCredit:
        claimed, receipts = source.samples, self.receipts
        since = max(0, claimed - self._claimed_before.get(peer, 0))
        credited = min(since, receipts.credited(peer))
        return SourceCredit(peer, claimed, min(claimed, receipts.covered(peer)), credited, source.said.finished)


def counted(known: SourceCount | None, news: SourceRecord, now_s: float) -> SourceCount:
    """Return what is known of a source once it says `news`.

    A smaller count than before is an old copy of its record, unless all copies have expired: then the source has lost
    count, and whatever it says beyond `news` comes on top of what it had done.
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
    """Return what a source left behind, if it can be."""
    return decoded(raw, SourceRecord, SOURCE_BYTES)
