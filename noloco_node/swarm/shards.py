"""Shards of a stage: the keys under which its records stand, and what a few of them tell of all. No I/O, no clock.

Up to `MOST_IN_SHARD` replicas a stage has one key, and everybody knows everybody. Beyond, a peer of *depth* d writes
under the key of those peers whose hash begins with the same d bits. Depths are chosen so that 16 to 64 records share a
key. A reader follows `FOLLOWED` shards of a stage, drawn by chance and exchanged one after the other. So the roster is
a sample, and what a peer reads does not grow with the stage.

Peers need not agree on the depth. A peer also writes under each shorter prefix that its hash continues with zeros up to
its depth: on average one key more. So 16 to 64 peers are found under every key that is too short, down to that of the
whole stage, where newcomers look first; each says its depth. A reader whose key is too long also reads the next shorter
one (`Shard.parent`). So two peers whose depths differ by one find each other.

Each record counts for as many peers as chance has left out: 2 to the power of its depth, divided by the shards that are
followed. This sum has no bias, whatever depths the peers have (Horvitz and Thompson). A peer takes the depth that a
quarter of the stage has, unless a shard would have too many records then, or too few: so one depth prevails.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from hashlib import blake2b
from statistics import median_low
from typing import NamedTuple

MOST_IN_SHARD, LEAST_IN_SHARD = 64, 16
"""Records under one key. Their ratio is 4: after a change of the depth by one, the number is far from both."""
DEEPEST = 20
FOLLOWED = 2
"""Shards of a stage that a reader follows; a power of two."""
FOLLOWED_S = 14_400.0
"""A shard is followed for so long. The readers of one change at different times, and a reader one after the other."""
RENEWED_S = 60.0
"""A peer of a stage of which nobody knows all publishes its record so often."""
LEAST_PAUSE_S = 30.0
"""The shortest pause between two readings of a sample."""
CALM_PAUSE_S = 85.0
"""The first pause in a sample from which nobody counts work: at a churn of 10 % a minute 13 % are gone after it."""
MANY_GONE, PAUSE_GROWTH = 0.15, math.sqrt(2.0)
"""The part of a sample that may be gone at a reading: of the listed peers nearly as many are dead, just before it. Two
pauses in turn differ by this factor at most.
"""
WHOLE_OF = 8
"""Of so many peers of such a stage one publishes its whole record, for views; the others what decisions read."""
PREVAILING = 0.25
"""The share of a stage whose depth the others take."""
_BITS = 64


class Shard(NamedTuple):
    """The peers whose hash begins with `prefix`, a number of `depth` bits."""

    depth: int
    prefix: int

    def key(self, stage: str) -> str:
        """Return the key of the shard, `stage` being that of its stage."""
        return f"{stage}/{self.depth}/{self.prefix:x}" if self.depth else stage

    @property
    def parent(self) -> Shard:
        return Shard(self.depth - 1, self.prefix >> 1)

    def holds(self, peer: str, depth: int) -> bool:
        """Say whether a peer of this depth writes here."""
        return depth >= self.depth and _hash(peer) >> (_BITS - depth) == self.prefix << (depth - self.depth)

    def counts(self, peer: str, depth: int) -> bool:
        """Say whether a reader of this shard and its parent counts a peer of this depth for its estimate.

        Of those that stand in the parent alone it counts the peers of the parent's depth.
        """
        above = depth == self.depth - 1 and self.parent.holds(peer, depth)
        return above or self.holds(peer, depth)

    def would_hold(self, peer: str, depth: int) -> bool:
        """Say whether a peer of this depth writes here, or would if it took the depth of this shard."""
        return self.holds(peer, max(depth, self.depth))


def next_pause_s(pause_s: float, gone: float, most_s: float) -> float:
    """Return the pause after the next reading of a sample, of which this part was gone after the last pause.

    It grows while few are gone, up to `most_s`, and falls where many are.
    """
    factor = PAUSE_GROWTH if gone <= MANY_GONE / PAUSE_GROWTH else 1.0 / PAUSE_GROWTH if gone > MANY_GONE else 1.0
    return max(LEAST_PAUSE_S, min(factor * pause_s, most_s))


class ReadingRhythm:
    """When a large stage is read again: seldom while it keeps its depth, and enough of its peers are known and stay."""

    def __init__(self) -> None:
        self.pause_s = LEAST_PAUSE_S
        self._is_steady = False
        self._read: tuple[Shard, ...] = ()
        self._read_s = -math.inf

    def is_due(self, shards: Sequence[Shard], now_s: float) -> bool:
        """Say whether these shards, which are followed now, are to be read. Others than before always are."""
        return tuple(shards) != self._read or now_s - self._read_s >= self.pause_s

    def note(
        self,
        shards: Sequence[Shard],
        now_s: float,
        *,
        steady: bool,
        gone: float,
        most_s: float,
        first_s: float = LEAST_PAUSE_S,
    ) -> None:
        """Note that these shards were read. `gone`, `most_s`: as for `next_pause_s`. `first_s`: the first pause."""
        self._read, self._read_s = tuple(shards), now_s
        if not steady:
            self.pause_s = LEAST_PAUSE_S
        else:
            self.pause_s = next_pause_s(self.pause_s, gone, most_s) if self._is_steady else min(first_s, most_s)
        self._is_steady = steady


class StageSize(NamedTuple):
    """The replicas of a stage. `error`: the relative standard error of the number; 0 where all are known."""

    peers: float
    error: float = 0.0

    def __str__(self) -> str:
        return f"≈ {self.peers:,.0f} ± {2 * self.error:.0%}" if self.error else f"{self.peers:,.0f}"


def total(sizes: Sequence[StageSize]) -> StageSize:
    """Return the replicas of several stages, whose errors are independent."""
    peers = math.fsum(size.peers for size in sizes)
    return StageSize(peers, math.hypot(*(size.peers * size.error for size in sizes)) / peers if peers else 0.0)


def written(peer: str, depth: int) -> list[Shard]:
    """Return the shards under whose keys a peer of this depth writes, its own first."""
    own = Shard(depth, _hash(peer) >> (_BITS - depth))
    found = [own]
    while own.depth and own.prefix % 2 == 0:
        own = own.parent
        found.append(own)
    return found


def is_brief(peer: str) -> bool:
    """Say whether this peer leaves out of its record what only views read, once nobody knows all of its stage."""
    return _hash(peer) % WHOLE_OF != 0


def followed(reader: str, stage: int, depth: int, now_s: float, count: int = FOLLOWED) -> list[Shard]:
    """Return the shards of a stage that a reader follows: `count`, a power of two, or all where there are fewer.

    Their prefixes begin differently. A change of the depth lengthens or shortens each of them.
    """
    spread = min(count, 2**depth)
    head = spread.bit_length() - 1
    found = []
    for slot in range(spread):
        start_s = FOLLOWED_S * (_hash(reader) / 2**_BITS + slot / spread)
        drawn = _hash(f"{reader}|{stage}|{slot}|{math.floor((now_s + start_s) / FOLLOWED_S)}")
        found.append(Shard(depth, slot << (depth - head) | drawn >> (_BITS - depth + head)))
    return found


def prevailing(depths: Collection[int]) -> int:
    """Return the deepest depth that at least `PREVAILING` of these peers have (0 of none): at most the median and one.

    A quarter of the names under one key cost little; they shall not make a stage seem a thousand times as large.
    """
    falling = sorted(depths, reverse=True)
    return min(falling[math.ceil(PREVAILING * len(falling)) - 1], median_low(falling) + 1) if falling else 0


def stage_size(depths: Collection[int], shards: int) -> StageSize:
    """Estimate the replicas of a stage from the depths of all peers that so many followed shards count.

    A depth far beyond the prevailing one counts as little more than that: a liar shall not stand for many.
    """
    most = prevailing(depths) + 1
    weights = [max(1.0, 2.0 ** min(depth, most) / shards) for depth in depths]
    peers = math.fsum(weights)
    variance = math.fsum(weight * (weight - 1.0) for weight in weights)
    return StageSize(peers, math.sqrt(variance) / peers if peers else 0.0)


def next_depth(depths: Collection[int], peers: float) -> int:
    """Return the depth to take in a stage of so many peers: the prevailing one, unless keys are too full or too empty.

    `depths`: as for `stage_size`.
    """
    least = math.ceil(math.log2(max(1.0, peers / MOST_IN_SHARD)))
    most = math.floor(math.log2(max(1.0, peers / LEAST_IN_SHARD)))
    return min(max(least, min(prevailing(depths), most)), DEEPEST)


@lru_cache(maxsize=2**16)
def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=_BITS // 8).digest(), "big")
