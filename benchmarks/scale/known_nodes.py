"""What a peer knows of the nodes near a key while nodes end and others come: how often it searches, and who is left.

    python -m benchmarks.scale.known_nodes [--life-minutes 10 30 200] [--liars 3] [--seeds 5]

One peer publishes by production's `Holders`, without a network, for two hours and a half. Liars are the nodes nearest
to the key; they never end, answer well and show nobody what they took. `hidden`: the share of the last two hours in
which no honest one of the twelve nearest nodes has the record. Peers that read besides find such liars out sooner.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from random import Random
from statistics import mean
from typing import Any, NamedTuple

from noloco_node.libp2p.record_holders import LONGEST_SEARCH_S, SEARCHED, Holders

NODES, NAMED = 200, 20
WARM_S = 1800.0
RECORD_S = 3600.0
PAUSES_S = (77.0, 127.0, 254.0)
"""Between two publications or readings: of a record, and of samples of the next and of the own stage."""


class Known(NamedTuple):
    """What became of a key: searches in two hours, and `hidden`."""

    searches: float
    hidden: float


class Place:
    """The nodes near a key: `life_s` is their mean life."""

    def __init__(self, rng: Random, life_s: float, liars: int) -> None:
        self._rng, self._life_s = rng, life_s
        self.distance: dict[int, float] = {}
        self._ends_s: dict[int, float] = {}
        self.liars = {self._come(1e-6 * place, math.inf) for place in range(liars)}
        for _ in range(NODES):
            self._come(rng.random(), rng.expovariate(1.0 / life_s))

    def _come(self, distance: float, ends_s: float) -> int:
        node = len(self.distance)
        self.distance[node], self._ends_s[node] = distance, ends_s
        return node

    def end(self, now_s: float) -> None:
        """Let as many nodes come as have ended."""
        for node in [node for node, ends_s in self._ends_s.items() if ends_s <= now_s]:
            del self._ends_s[node]
            self._come(self._rng.random(), now_s + self._rng.expovariate(1.0 / self._life_s))

    def lives(self, node: int) -> bool:
        return node in self._ends_s

    def nearest(self, most: int) -> list[Any]:
        return sorted(self._ends_s, key=self.distance.__getitem__)[:most]


def known(seed: int, life_s: float, pause_s: float, liars: int) -> Known:
    """Let one peer publish for two hours and a half."""
    place = Place(Random(f"{seed}|known nodes"), life_s, liars)
    distance: Any = place.distance.__getitem__
    holders, searches, hidden, took = Holders(distance), 0, [], dict[int, float]()
    now_s = 0.0
    while now_s < WARM_S + LONGEST_SEARCH_S:
        now_s += pause_s
        place.end(now_s)
        if holders.is_search_due(now_s, NODES):
            holders.note_search(place.nearest(SEARCHED), now_s, NODES)
            searches += now_s > WARM_S
        elif holders.is_hearing_due(now_s):
            teller: Any = holders.next_teller(now_s)
            if place.lives(teller):
                holders.note_named(teller, place.nearest(NAMED), now_s)
            else:
                holders.note_silence(teller, now_s)
        order, wanted = holders.next_writing(now_s)
        for node in map(int, order):  # type: ignore[arg-type]
            peer: Any = node
            if wanted and place.lives(node):
                holders.note_answer(peer)
                holders.note_written(peer, now_s + RECORD_S)
                took[node] = now_s
                wanted -= 1
            elif wanted:
                holders.note_silence(peer, now_s)
        if now_s > WARM_S:
            honest = set(place.nearest(SEARCHED)) - place.liars
            hidden.append(all(now_s - took.get(node, -math.inf) > RECORD_S for node in honest))
    return Known(searches, mean(hidden))


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each life of nodes and each pause."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--life-minutes", type=float, nargs="+", default=(10.0, 30.0, 200.0))
    parser.add_argument("--liars", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args(words)
    print("life, min   pause, s   searches in two hours   hidden")
    for minutes in arguments.life_minutes:
        for pause_s in PAUSES_S:
            found = [known(seed, 60.0 * minutes, pause_s, arguments.liars) for seed in range(arguments.seeds)]
            searches, hidden = zip(*found, strict=True)
            spread = f"({min(searches):.0f} to {max(searches):.0f})"
            print(f"{minutes:9.0f} {pause_s:10.0f} {mean(searches):11.1f} {spread:>11s} {100 * mean(hidden):7.0f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
