"""What one reader knows of the peers of all stages, from what it finds in the DHT under each stage's key.

A record counts only if it is small, decodes strictly, names the peer and the stage that it is filed under and holds
possible numbers.

A reading in which nobody else is heard, though others were there, is trouble of our own: nobody ages by it. Where at
least two others were known and none of them says anything new, the same holds for `ISOLATED_S`; after that they count
as gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice

from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.peer_records import DhtRead, PeerTable, Published, at_most, decode_record, skew_s
from noloco_node.swarm.roster import PeerRecord

ISOLATED_S = 300.0
"""For which a roster is kept of which nobody but ourselves is heard any more."""
CLOCKS_ASKED = 64
"""Of other peers, to learn how right our own is."""


class StageRecords:
    """The peers of each stage, as `me` has read them; `refresh_s`: how often each publishes."""

    def __init__(self, me: str, stages: int, lifetime_s: float, refresh_s: float) -> None:
        self._me, self._refresh_s = me, refresh_s
        self._tables = tuple(PeerTable(lifetime_s) for _ in range(stages))
        self._read: set[int] = set()
        self._heard_s: float | None = None
        """When somebody was heard last, or there was nobody to hear (loop seconds)."""
        self._youngest_at = 0.0
        """Of all records of others that we read: when it was written, by its own clock."""
        self.watched = tuple(range(stages))
        """The stages that are to be read."""
        self.skew_s: float | None = None
        """By how much our clock is ahead of those of the peers that we read; None if there are too few to tell."""

    @property
    def believed(self) -> list[Mapping[str, PeerRecord]]:
        """The records of those who count as there, by stage and peer."""
        return [table.believed for table in self._tables]

    @property
    def known(self) -> tuple[int, ...]:
        """The watched stages that were read since we began to watch them."""
        return tuple(number for number in self.watched if number in self._read)

    def focus(self, stages: Collection[int]) -> None:
        """Watch only these stages from now on, and that of the sources."""
        self.watched = tuple(number for number in range(len(self._tables)) if number in stages or number == 0)
        self.compare_clocks()

    def take(self, found: Mapping[int, Mapping[str, bytes] | None], now_s: float, unix_s: float) -> None:
        """Note what one reading says of some stages; a stage that could not be read is None."""
        read = {stage: raws for stage, raws in found.items() if raws is not None}
        self._read.update(read)
        news = {stage: self._news(stage, raws) for stage, raws in read.items()}
        if self._hears(read, news):
            self._heard_s = now_s
        given_up = self._heard_s is not None and now_s - self._heard_s >= ISOLATED_S
        others = (each.at for records in news.values() for peer, each in records.items() if peer != self._me)
        self._youngest_at = max([self._youngest_at, *others])
        ages = self._heard_s == now_s or (given_up and bool(read))
        reading = DhtRead(now_s, unix_s, self._youngest_at, ages)
        for stage, records in news.items():
            self._tables[stage].take(records, read[stage], reading)

    def keep_only(self, stages: Collection[int]) -> None:
        """Forget all other stages: what is known of them grows old."""
        for number, table in enumerate(self._tables):
            if number not in stages:
                table.clear()
                self._read.discard(number)
        self.compare_clocks()

    def old_since_s(self, now_s: float) -> float | None:
        """Return since when nobody was heard, if that is longer than a reading that went wrong may explain."""
        since_s = self._heard_s
        return since_s if since_s is not None and now_s - since_s > 2.5 * self._refresh_s else None

    def news_age_s(self, unix_s: float) -> dict[str, float]:
        """Return of each peer that counts as there how long nothing was heard, where that is longer than it may be.

        By the youngest of all records, should our own clock be wrong.
        """
        entries = [(peer, entry) for table in self._tables for peer, entry in table.known.items() if entry.believed]
        now_s = min(unix_s, self._youngest_at)
        ages_s = {peer: now_s - entry.published.at for peer, entry in entries if entry.published.at}
        lives_s = {peer: entry.published.lifetime_s for peer, entry in entries}
        # Three refreshes make a lifetime: one has been missed.
        return {peer: age_s for peer, age_s in ages_s.items() if age_s > 0.5 * lives_s[peer] > 0.0}

    def compare_clocks(self) -> None:
        """Learn how right our clock is; `skew_s` is asked far more often than there is anything new to learn."""
        offsets = (
            entry.offset_s
            for number in self.watched
            for peer, entry in self._tables[number].known.items()
            if entry.believed and peer != self._me
        )
        self.skew_s = skew_s(islice(offsets, CLOCKS_ASKED), self._refresh_s / 2)

    def _news(self, stage: int, raws: Mapping[str, bytes]) -> dict[str, Published]:
        """Decode the records of a stage that are later ones than we know, and that their peers may publish."""
        known, news = self._tables[stage].known, {}
        for peer in at_most(raws, known):
            raw, before = raws[peer], known.get(peer)
            if before is not None and before.raw == raw:
                continue
            published = decode_record(raw, peer, stage)
            if published is not None and (before is None or published.serial > before.published.serial):
                news[peer] = published
        return news

    def _hears(self, read: Mapping[int, Mapping[str, bytes]], news: Mapping[int, Mapping[str, Published]]) -> bool:
        """Say whether a reading tells of the swarm; if not, there is trouble of our own."""
        if not read:
            return False
        if any(peer != self._me for records in news.values() for peer in records):
            return True
        known = [
            (number, peer)
            for number in self.watched
            for peer, record in self._tables[number].believed.items()
            if peer != self._me and record.state is not PeerState.LEAVING
        ]
        return not known or (len(known) == 1 and known[0][1] in read.get(known[0][0], ()))
