"""Into which shards one reader divides a stage, which of them it reads, and when it reads them again.

A sample is read every few minutes (`READ_S` and the like), and sooner where it is too small, its depth changes, or many
of its peers are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.shards import (
    CALM_PAUSE_S,
    FOLLOWED,
    LEAST_IN_SHARD,
    LEAST_PAUSE_S,
    MOST_IN_SHARD,
    ReadingRhythm,
    Shard,
    StageSize,
    followed,
    next_depth,
    stage_size,
)
from noloco_node.swarm.stage_records import StageRecords
from noloco_node.tasks import loop_s

READ_S, READ_NEXT_S, READ_OWN_S, READ_OTHERS_S, VISITOR_READ_S = 180.0, 127.0, 254.0, 480.0, 120.0
"""The longest time between two readings of a sample: by a source of its own stage, by which it counts others' work; of
the next stage, whose newcomers wait for us; of another's own stage; of the rest; and by a visitor.
"""
LEAST_DIVIDED = 2
"""The least depth of a stage of which nobody knows all; at a lower one `FOLLOWED` shards are all there are."""
READINGS_PER_PARENT = 8
"""Readings of large stages between two that look for peers of a lower depth, where none has been seen."""
ENDING = 0.2
"""Where so many peers of a sample say that they have finished, the run ends, and the sample is read often."""


def read_next_s(peers: float) -> float:
    """Return the longest pause between two readings of the next stage, where so many peers share a key.

    Fewer peers read a key that fewer share, so they read it more often: newcomers wait no longer, and the bytes are the
    same.
    """
    return READ_NEXT_S * min(1.0, max(0.5, peers / MOST_IN_SHARD))


class StageDivision:
    """How one reader divides one stage. `count`: shards that it follows where it calls their peers.

    Methods are told the stage that the reader serves: `own`, None for a visitor.
    """

    def __init__(self, me: str, stage: int, count: int = FOLLOWED) -> None:
        self._me, self._stage, self._count = me, stage, count
        self.depth = 0
        self.size: StageSize | None = None
        """An estimate, where the records that were read are a sample; else None."""
        self.read_s = 0.0
        """When the stage was read last (loop seconds)."""
        self._rhythm = ReadingRhythm()
        self._reads_parents = False
        """Whether the stage has peers of a lower depth, as far as we have seen."""
        self._readings = 0
        """Readings while it had shards."""

    @property
    def pause_s(self) -> float:
        """How long a sample is not read again; 0 where all records are read."""
        return 0.0 if self.size is None else self._rhythm.pause_s

    def follow(self, own: int | None) -> list[Shard]:
        """Return the shards that are followed: half as many where we call nobody, and nobody knows all."""
        calls = own is None or self._stage - own in (0, 1)
        count = self._count if calls or self.depth < LEAST_DIVIDED else max(1, self._count // 2)
        return followed(self._me, self._stage, self.depth, loop_s(), count)

    def is_due(self, own: int | None) -> bool:
        """Say whether the stage is to be read now: always, unless it is a sample."""
        return self.size is None or self._rhythm.is_due(self.follow(own), loop_s())

    def next_reading(self, own: int | None) -> list[Shard]:
        """Return the shards to read now: those that are followed, and while depths differ their parents too."""
        shards = self.follow(own)
        if self.depth:
            self._readings += 1
        if self.depth and (self._reads_parents or self._readings % READINGS_PER_PARENT == 0):
            shards += dict.fromkeys(shard.parent for shard in shards)
        return shards

    def divide(self, shards: Sequence[Shard], records: StageRecords, own: int | None) -> None:
        """Estimate the size of the stage by the shards that were read, and divide it by that from now on."""
        before, depths = self.depth, records.depths(self._stage)
        if self._stage == own:
            depths[self._me] = before
        # Under the key of the whole stage: a few that name a depth shall not keep us from adding up what all did.
        if not before and len(depths) <= MOST_IN_SHARD and not (depths and median_low(depths.values())):
            return
        counted = [each for peer, each in depths.items() if any(shard.counts(peer, each) for shard in shards)]
        size = stage_size(counted, len(shards))
        # No receipts are read from then on: a peer that takes part asks for a shard that is full enough.
        is_sure = own is None or (before > 0 and len(counted) >= LEAST_IN_SHARD)
        self.depth = next_depth(counted, size.peers)
        # Only where each record stands for itself: names that say a great depth shall displace nobody.
        if self.depth > before and not size.error:
            shards = self.follow(own)
            left = records.narrow(self._stage, shards, LEAST_IN_SHARD)
            if left:
                # The error is that of the readings to come.
                size, is_sure = StageSize(size.peers, stage_size([self.depth] * left, len(shards)).error), True
        self.size = size if size.error and is_sure else None
        self._reads_parents = any(each < self.depth for each in depths.values())

    def note_reading(
        self, shards: Sequence[Shard], records: StageRecords, own: int | None, now_s: float, gone: float
    ) -> None:
        """Note that these shards were read, and choose when they are read again if they are a sample.

        `gone`: the part of the peers before that it did not find.
        """
        believed = records.believed[self._stage]
        finished = sum(record.state is PeerState.FINISHED for record in believed.values())
        is_enough = len(believed) >= LEAST_IN_SHARD and finished < ENDING * len(believed)
        is_steady = is_enough and all(shard.depth == self.depth for shard in shards)
        most_s, first_s = VISITOR_READ_S, CALM_PAUSE_S
        if own is not None:
            pauses_s = {
                own: READ_OWN_S if self._stage else READ_S,
                own + 1: read_next_s(len(believed) / max(1, len(shards))),
            }
            most_s = pauses_s.get(self._stage, READ_OTHERS_S)
            # In other stages nobody is called, so it does not matter there who is gone.
            gone = gone if self._stage in pauses_s else 0.0
            if self._stage == own == 0:
                first_s = LEAST_PAUSE_S
        self._rhythm.note(shards, now_s, steady=is_steady, gone=gone, most_s=most_s, first_s=first_s)
