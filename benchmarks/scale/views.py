"""Rosters that are samples: which rounds meet, what a peer reads, and whom it takes for alive, up to 10^5 peers.

    python -m benchmarks.scale.views [--peers 1000 10000] [--churn 0 0.5 10] [--seeds 5] [--minutes 20] [--json]
    python -m benchmarks.scale.views --peers 100000 --no-rounds --minutes 5  # peers die and come, and open no rounds

In virtual time, with the functions by which production decides: where a record stands and which shards are followed
(`noloco_node.swarm.shards`), in which order partners are asked, how long one is picky, what is answered and when
somebody is asked again (`gossip.rounds.matching`). Nothing else is there: no training, no lines. A run has four stages;
one of them is simulated. Peers publish and read samples as often as production does (`noloco_node.swarm.membership`),
each at its own moment, and open a round every 60 s. An answer takes 0.2 s, a dead peer 5 s, a meeting 10 s. A tenth of
the records are of Sybils that refuse every proposal. A dead peer is believed as long as production believes it; who has
asked it leaves it out (`noloco_node.swarm.partners`).
`--churn`: percent of the peers that die a minute; as many newcomers come. The first 5 minutes do not count.

`met`: share of the rounds of living peers that met. `dead`, `sybils`: share of a roster. `knows_s`, `works_s`: the time
from a newcomer's record until a peer of the stage before has read it, and until the first microbatch, if each of those
peers sends one a second and draws from its bag (`pipeline.routing`); medians and the slowest of a hundred.

`kb_per_s`: what a peer receives and sends for membership, and of that `read`, `search`, `write` and `look` (the stage
that is not read otherwise, for a move): by the bytes of records as production encodes and compresses them, and by what
twelve daemons took. `busiest_kb_per_s`: what the node sends that answers most readings, of all nodes of the run.
"""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from statistics import fmean, median
from typing import NamedTuple

import msgspec
import numpy as np

from gossip.exchange.messages import Accept, Decline, DeclineReason, Propose
from gossip.rounds.matching import (
    ASKED_AT_MOST,
    AnswerState,
    PartnerQueue,
    answer,
    good_enough_at,
    preferences,
)
from gossip.settings import RoundTimeouts
from noloco_node.libp2p.record_checks import SIGNATURE_BYTES
from noloco_node.libp2p.record_holders import LONGEST_SEARCH_S, MORE_EVERY, SEARCH_S, WRITTEN
from noloco_node.libp2p.short_answers import NAME_BYTES, shortened
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.membership import SAMPLE_RENEWALS
from noloco_node.swarm.roster import Given, PeerRecord, brief
from noloco_node.swarm.shards import (
    CALM_PAUSE_S,
    FOLLOWED,
    FOLLOWED_S,
    MOST_IN_SHARD,
    RENEWED_S,
    WHOLE_OF,
    Shard,
    followed,
    next_depth,
    next_pause_s,
    stage_size,
    written,
)
from noloco_node.swarm.stage_division import READ_OTHERS_S, READ_OWN_S, READ_S, read_next_s
from noloco_node.swarm.stage_records import CLOCK_ERROR_S, CLOCK_S, Published, encode_record
from pipeline.placement import StagePace
from pipeline.routing import Bag, Hop, next_hop

STAGES, SYBILS, ROUND_S = 4, 0.1, 60.0
ANSWER_S, MEETING_S, WARM_S = 0.2, 10.0, 300.0
PATIENCE = RoundTimeouts()
BELIEVED_S = SAMPLE_RENEWALS * RENEWED_S
READ_KB, WRITTEN_KB, SEARCH_KB = 1.3, 4.25, 16.4
"""Measured with twelve daemons: a reading of one holder without its records, a publication (4.1 of a brief record, of
the eighth that is whole 5.1), and a search for holders.
"""
SEARCHES_A_LIFE, SEARCHES = 0.9, 1.2
"""Searches beside the first one, in a life of nodes and in `LONGEST_SEARCH_S`: a line through what
`benchmarks.scale.known_nodes --liars 0` prints.
"""
ID = "12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"
USUAL = PeerRecord(
    peer=ID,
    stage=2,
    state=PeerState.TRAINING,
    claimed_at=1.8e9 + 0.5,
    round=431,
    inner_steps=43112,
    progress=0.431222,
    samples=344000,
    device_s=0.123456,
    tokens_per_s=5321.3,
    loss=3.2131,
    gap=0.0131,
    partner=ID,
    addresses=(
        f"/ip4/203.0.113.77/tcp/31337/p2p/{ID}",
        f"/ip6/2001:db8:85a3:8d3:1319:8a2e:370:7348/tcp/31337/p2p/{ID}",
    ),
    may_serve=(0, 1, 3),
    version="0.4.0",
    name="gpu-at-home",
    hops=(("gUriHhKu", 120), ("abcdefgh", 99)),
    given=Given(10**9, 10**6, 10**11, 10**11, 10**8),
)


def record_bytes(count: int = 64) -> float:
    """Return what one of so many records takes in an answer: signed, and compressed with the others."""
    rng, now_s, entries = Random(0), 1.8e9, []

    def peer_id() -> str:
        return ID[:8] + "".join(rng.choices(ID[8:], k=44))

    for number in range(count):
        peer, at_s, factor = peer_id(), now_s - rng.uniform(0.0, RENEWED_S), rng.uniform(0.5, 2.0)
        record = msgspec.structs.replace(
            USUAL,
            peer=peer,
            claimed_at=now_s - 1e5 * factor,
            inner_steps=int(USUAL.inner_steps * factor),
            progress=USUAL.progress + rng.uniform(-0.01, 0.01),
            samples=int(USUAL.samples * factor),
            device_s=USUAL.device_s / factor,
            tokens_per_s=USUAL.tokens_per_s * factor,
            loss=3.2 + rng.gauss(0.0, 0.05),
            partner=peer_id(),
            addresses=(f"/ip4/{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}.9/tcp/31337/p2p/{peer}",),
            name=f"gpu-{peer[-4:]}",
            hops=((peer_id()[-8:], 120), (peer_id()[-8:], 99)),
        )
        shown = record if number % WHOLE_OF == 0 else brief(record)
        raw = encode_record(Published(int(1000 * at_s), shown, round(at_s), math.ceil(BELIEVED_S), 3))
        signed = msgspec.msgpack.encode(rng.randbytes(SIGNATURE_BYTES) + raw)
        entries.append((peer, signed, at_s + BELIEVED_S + CLOCK_ERROR_S))
    dictionary = msgspec.msgpack.Ext(80, msgspec.msgpack.encode((2**31, now_s, entries)))
    return len(shortened(msgspec.msgpack.encode(dictionary), b"", b"")) / count


RECORD_BYTES = record_bytes()


@dataclass(eq=False)
class Peer:
    """One replica. `offset_s`, `reads_s`: of its publications and its readings. `order`: of its open round."""

    name: str
    born_s: float
    offset_s: float
    reads_s: float
    sybil: bool = False
    died_s: float = math.inf
    round: int = 0
    opened_s: float = 0.0
    open: bool = False
    meets: bool = False
    asking: str | None = None
    order: tuple[str, ...] = ()
    lost: set[str] = field(default_factory=set)
    queue: PartnerQueue = field(default_factory=lambda: PartnerQueue(PATIENCE, Random(0)))

    def read_s(self, now_s: float, pause_s: float) -> float:
        """Return when it read its stage last."""
        return max(self.born_s, now_s - (now_s - self.reads_s) % pause_s)

    def written_s(self, now_s: float) -> float:
        """Return when its newest record was written, as of now."""
        until_s = min(now_s, self.died_s)
        return max(self.born_s, until_s - (until_s - self.offset_s) % RENEWED_S)

    def delay_s(self, place: int, count: int, now_s: float) -> float:
        """Return for how long a preference will not do (`RoundSchedule.preference_delay_s`)."""
        return max(0.0, good_enough_at(place, count) * ROUND_S - (now_s - self.opened_s))


class Found(NamedTuple):
    met: float
    dead: float
    sybils: float
    roster: float
    error: float
    kb_per_s: float
    read: float
    search: float
    write: float
    look: float
    busiest_kb_per_s: float
    knows_s: float
    works_s: float
    slowest_s: float


class Stage:
    """One stage whose replicas die and come."""

    def __init__(self, replicas: int, churn: float, seed: int, *, rounds: bool = True) -> None:
        self.rounds = rounds
        self.rng, self.churn = Random(f"{replicas}|{churn}|{seed}"), churn
        self.seed, self.now_s, self.depth = seed, 0.0, 0
        self.life_s = 6000.0 / churn if churn else math.inf
        self.peers: dict[str, Peer] = {}
        self.shards: defaultdict[Shard, list[Peer]] = defaultdict(list)
        self.events: list[tuple[float, int, str, Peer]] = []
        self.counts = [0, 0]
        self.looks: list[tuple[int, int, int, float, float]] = []
        self._number = 0
        while (depth := next_depth([self.depth] * replicas, replicas)) != self.depth:
            self.depth = depth
        self.own, self.others = (
            self._uses(CALM_PAUSE_S, READ_OWN_S),
            self._uses(CALM_PAUSE_S, READ_OTHERS_S, calls=False),
        )
        self.callers = self._uses(CALM_PAUSE_S, read_next_s(replicas / 2**self.depth))
        self.pause_s, self.callers_pause_s = self.own[-1][0], self.callers[-1][0]
        for number in range(replicas):
            self.join(sybil=number < SYBILS * replicas, born_s=-3600.0)

    def join(self, *, sybil: bool, born_s: float) -> Peer:
        rng = self.rng
        reads_s = born_s if born_s >= 0.0 else rng.uniform(0.0, self.pause_s)
        peer = Peer(f"{rng.getrandbits(64):016x}", born_s, rng.uniform(0.0, RENEWED_S), reads_s, sybil)
        peer.queue = PartnerQueue(PATIENCE, rng)
        self.peers[peer.name] = peer
        for shard in written(peer.name, self.depth):
            self.shards[shard].append(peer)
        if not sybil:
            if self.rounds:
                self.at(self.now_s + rng.uniform(0.0, ROUND_S), "open", peer)
            if self.churn:
                self.at(self.now_s + rng.expovariate(self.churn / 100 / 60 / (1 - SYBILS)), "die", peer)
        return peer

    def at(self, when_s: float, what: str, peer: Peer) -> None:
        self._number += 1
        heappush(self.events, (when_s, self._number, what, peer))

    def roster(self, reader: Peer) -> list[Peer]:
        """Return the peers that a reader takes for alive since its last reading."""
        read_s = reader.read_s(self.now_s, self.pause_s)
        before_s = read_s - self.pause_s
        found: dict[str, Peer] = {}
        for shard in followed(reader.name, 0, self.depth, read_s):
            new = before_s < reader.born_s or shard not in followed(reader.name, 0, self.depth, before_s)
            # Where a shard was read before, its peers count that have published since.
            since_s = read_s - BELIEVED_S - CLOCK_S if new else min(before_s, read_s - BELIEVED_S)
            for peer in self.shards[shard]:
                if peer.born_s <= read_s and peer.written_s(read_s) > since_s:
                    found[peer.name] = peer
        for name in (reader.name, *reader.lost):
            found.pop(name, None)
        return list(found.values())

    def run(self, seconds: float) -> None:
        while self.events and self.events[0][0] <= seconds:
            self.now_s, _, what, peer = heappop(self.events)
            if peer.died_s <= self.now_s:
                continue
            getattr(self, f"_{what}")(peer)

    def _die(self, peer: Peer) -> None:
        peer.died_s = self.now_s
        self.peers.pop(peer.name)
        self.join(sybil=False, born_s=self.now_s)
        for shard in written(peer.name, self.depth):
            # Records of the dead stay in the DHT for minutes, and are read.
            self.shards[shard] = [
                each for each in self.shards[shard] if each.died_s + BELIEVED_S + CLOCK_ERROR_S > self.now_s
            ]

    def _open(self, peer: Peer) -> None:
        if self.now_s > WARM_S and peer.round:
            self.counts[peer.open] += 1
        peer.round, peer.open, peer.opened_s = peer.round + 1, True, self.now_s
        there = self.roster(peer)
        peer.order = preferences(peer.name, [each.name for each in there], self.seed, int(self.now_s // ROUND_S))
        peer.queue.clear(peer.order, self.now_s)
        if self.now_s > WARM_S and self.rng.random() < 0.1:
            dead = sum(each.died_s <= self.now_s for each in there)
            size = stage_size([self.depth] * len(there), max(1, len(followed(peer.name, 0, self.depth, 0.0))))
            self.looks.append((len(there), dead, sum(each.sybil for each in there), size.peers, size.error))
        self.at(self.now_s + ROUND_S, "open", peer)
        self.at(self.now_s, "ask", peer)

    def _ask(self, peer: Peer) -> None:
        """Ask the next partner (`MeetingProtocol.run`)."""
        if not peer.open or peer.meets or peer.asking is not None:
            return
        order = peer.order
        places = range(min(len(order), ASKED_AT_MOST))
        good = bisect_right(places, 0.0, key=lambda place: peer.delay_s(place, len(order), self.now_s))
        partner, wait_s = peer.queue.next(order[:good], self.now_s)
        if partner is None:
            self.at(self.now_s + min(max(wait_s, 0.05), 1.0), "ask", peer)
            return
        peer.asking = partner
        other = self.peers.get(partner)
        self.at(self.now_s + (PATIENCE.answer_s if other is None else ANSWER_S), "hear", peer)

    def _hear(self, peer: Peer) -> None:
        partner, peer.asking = peer.asking, None
        other = self.peers.get(partner or "")
        if not peer.open or peer.meets or partner is None:
            return
        if other is None:
            peer.lost.add(partner)
            peer.order = tuple(name for name in peer.order if name != partner)
            peer.queue.put_off(partner, PATIENCE.sleep_s, self.now_s)
        elif other.sybil:
            peer.queue.declined(
                partner, Decline(reason=DeclineReason.ENGAGED, retry_after_s=3600.0, round=other.round), self.now_s
            )
        else:
            reply = answer(self._state(other, peer.name), peer.name, Propose(round=other.round))
            if isinstance(reply, Accept):
                for each in (peer, other):
                    each.meets = True
                    self.at(self.now_s + MEETING_S, "part", each)
            else:
                peer.queue.declined(partner, reply, self.now_s)
        self.at(self.now_s + self.rng.uniform(0.0, PATIENCE.jitter_s), "ask", peer)

    def _part(self, peer: Peer) -> None:
        peer.meets = peer.open = False

    def _state(self, peer: Peer, sender: str) -> AnswerState:
        place = peer.order.index(sender) if sender in peer.order else len(peer.order)
        return AnswerState(
            me=peer.name,
            round=peer.round,
            open=peer.open,
            engaged=peer.meets,
            asking=peer.asking,
            leaving=False,
            had=False,
            preference_delay_s=peer.delay_s(place, max(len(peer.order), place + 1), self.now_s),
            ready_in_s=max(0.0, peer.opened_s + ROUND_S - self.now_s),
        )

    def newcomer_s(self) -> tuple[float, float]:
        """Return how long after its record a newcomer is known to a peer of the stage before, and gets a microbatch."""
        name, rng = f"{self.rng.getrandbits(64):016x}", self.rng
        own = set(written(name, self.depth))
        knows, first = math.inf, math.inf
        for caller in self.peers.values():
            shards = followed(caller.name, 1, self.depth, self.now_s)
            if caller.sybil or not own.intersection(shards):
                continue
            reads_s = rng.uniform(0.0, self.callers_pause_s)
            knows = min(knows, reads_s)
            if reads_s >= first:
                continue
            living = [Hop(peer.name) for shard in shards for peer in self.shards[shard] if peer.died_s > self.now_s]
            if living:
                # A part of the bag is drawn already.
                _, bag = next_hop(Bag(), living, (), rng)
                bag = bag._replace(entries=bag.entries[: rng.randint(0, len(living))])
                hops, drawn, sent_s = (*living, Hop(name)), None, reads_s + rng.random() - 1.0
                while drawn != name and sent_s < first:
                    sent_s += 1.0
                    drawn, bag = next_hop(bag, hops, (), rng)
                first = min(first, sent_s) if drawn == name else first
        return knows, first

    def kb_per_s(self) -> tuple[float, float, float, float]:
        """Return what a peer receives and sends in membership: for readings, searches, its record, and looks."""
        peers = self.rng.sample(list(self.peers.values()), min(200, len(self.peers)))
        read = search = write = look = 0.0
        # A newcomer reads the keys of whole stages first, by which it learns their depths, and then shards of them all.
        read += len(peers) * STAGES * self._first_kb(Shard(0, 0)) / self.life_s
        search += len(peers) * STAGES * SEARCH_KB / self.life_s
        look_s = StagePace.of(READ_S).look_s
        for peer in peers:
            for stage, uses in enumerate((self.others, self.own, self.callers)):
                for shard in followed(peer.name, stage, self.depth, self.now_s, FOLLOWED if stage else FOLLOWED // 2):
                    read += self._reading_kb(shard, uses)
                    search += self._search_kb(uses)
            for shard in followed(peer.name, STAGES - 1, self.depth, self.now_s, FOLLOWED // 2):
                uses = self._uses(look_s, look_s)
                look += self._reading_kb(shard, uses) + self._search_kb(uses)
                # The first look after the choice of a stage finds the last answer with neighbours too old.
                look += SEARCH_KB * math.exp(-look_s / self.life_s) / self.life_s
            keys = len(written(peer.name, self.depth))
            write += WRITTEN_KB * keys / RENEWED_S
            search += keys * self._search_kb(self._uses(RENEWED_S, RENEWED_S))
        count = len(peers)
        return read / count, search / count, write / count, look / count

    def busiest_kb_per_s(self) -> float:
        """Return what the busiest node sends: of each key's readings the nearest nodes answer equal parts."""
        nodes = np.array([self.rng.getrandbits(64) for _ in range(STAGES * len(self.peers))], dtype=np.uint64)
        sent = np.zeros(len(nodes))
        for shard in self.shards:
            readers = len(self.peers) * len(followed("", 0, self.depth, 0.0)) / 2**self.depth
            for _ in range(STAGES if shard.depth == self.depth else 0):
                key = np.uint64(self.rng.getrandbits(64))
                rate = self._reading_kb(shard, self.own) + self._reading_kb(shard, self.callers)
                sent[np.argpartition(nodes ^ key, WRITTEN)[:WRITTEN]] += readers * rate / WRITTEN
        return float(sent.max())

    def _uses(self, first_s: float, most_s: float, *, calls: bool = True) -> list[tuple[float, float]]:
        """Return the pauses between two uses of a key in a peer's life, and how many such uses there are a second.

        `first_s`: the first pause; as many peers live on after it as their mean life says. `calls`: whether the peer
        calls those whose records it reads there.
        """
        if not self.churn:
            return [(most_s, 1.0 / most_s)]
        found: list[tuple[float, float]] = []
        age_s, pause = 0.0, first_s
        while True:
            age_s += pause
            alive = math.exp(-age_s / self.life_s) / self.life_s
            gone = -math.expm1(-pause / self.life_s) if calls else 0.0
            after = next_pause_s(pause, gone, most_s)
            if after == pause or age_s > 10.0 * self.life_s:
                # All further uses follow after the same pause.
                return [*found, (pause, alive / -math.expm1(-pause / self.life_s))]
            found.append((pause, alive))
            # At a churn between the two bounds the pause stays; beside them it goes to and fro.
            pause = after if len(found) < 20 else pause

    def _search_kb(self, uses: list[tuple[float, float]]) -> float:
        """Return what it costs a second to know the nodes near a key that is used so.

        One search in a peer's life and others as nodes go (`SEARCHES_A_LIFE`), an answer with neighbours every few
        minutes, and one answer of each node that comes near the key; of those as many as records are stored with at a
        use, at most.
        """
        found = SEARCH_KB * ((1.0 + SEARCHES_A_LIFE) / self.life_s + SEARCHES / LONGEST_SEARCH_S)
        for pause, rate in uses:
            named = min(1.0, pause / (SEARCH_S - min(pause, SEARCH_S - 1.0)))
            comes = min(WRITTEN, WRITTEN * self.churn / 6000.0 * pause)
            found += READ_KB * rate * (named + comes)
        return found

    def _reading_kb(self, shard: Shard, uses: list[tuple[float, float]]) -> float:
        """Return what readings cost a second: records travel once, as far as they are new; a holder is named all.

        Every twelfth asks the usual nodes and one more. A shard is read for the first time when its turn comes, too.
        """
        there = self.shards[shard]
        found = self._first_kb(shard) * (1.0 / FOLLOWED_S + 1.0 / self.life_s)
        for pause, rate in uses:
            new = sum(peer.written_s(self.now_s) > self.now_s - pause for peer in there)
            asked = 1.0 + WRITTEN / MORE_EVERY
            found += rate * (asked * (READ_KB + NAME_BYTES / 1000 * len(there)) + RECORD_BYTES / 1000 * new)
        return found

    def _first_kb(self, shard: Shard) -> float:
        """Return what the first reading of a key costs, which asks twice as many nodes as records are stored with."""
        there = len(self.shards[shard])
        return READ_KB + (2 * WRITTEN - 1) * (READ_KB + NAME_BYTES / 1000 * there) + RECORD_BYTES / 1000 * there


def measure(peers: int, churn: float, seed: int, minutes: float, *, rounds: bool = True) -> Found:
    """Return the figures of one seed; without `rounds` those of rounds and rosters are not a number."""
    stage = Stage(peers // STAGES, churn, seed, rounds=rounds)
    stage.run(WARM_S + 60.0 * minutes)
    stage.now_s = WARM_S + 60.0 * minutes
    met, skipped = stage.counts if rounds else (math.nan, math.nan)
    looks: list[tuple[float, ...]] = [*stage.looks] or [(math.nan,) * 5]
    listed, dead, sybils, sizes, _ = map(fmean, zip(*looks, strict=True))
    knows, works = zip(*(stage.newcomer_s() for _ in range(100)), strict=True)
    true, cost = peers // STAGES, stage.kb_per_s()
    error = math.sqrt(fmean((each[3] / true - 1.0) ** 2 for each in looks)) if sizes else 0.0
    return Found(
        met / (met + skipped),
        dead / listed,
        sybils / listed,
        listed,
        error,
        sum(cost),
        *cost,
        stage.busiest_kb_per_s(),
        median(knows),
        median(works),
        max(works),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", type=int, nargs="+", default=[1000, 10000], metavar="N")
    parser.add_argument("--churn", type=float, nargs="+", default=[0.0, 0.5, 10.0], metavar="PERCENT")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--minutes", type=float, default=20.0, metavar="M")
    parser.add_argument("--no-rounds", action="store_true", help="leave rounds out, which take most of the time")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_args()
    if min(options.peers) <= STAGES * MOST_IN_SHARD or min(options.seeds, options.minutes) <= 0:
        parser.error(
            f"--peers above {STAGES * MOST_IN_SHARD}, so that a stage has shards; --seeds and --minutes above 0"
        )
    for peers in options.peers:
        for churn in options.churn:
            rounds = not options.no_rounds
            found = [measure(peers, churn, seed, options.minutes, rounds=rounds) for seed in range(options.seeds)]
            figures = {
                name: [round(getattr(each, name), 4) for each in found] if options.json else values(found, name)
                for name in Found._fields
                if not math.isnan(getattr(found[0], name))
            }
            facts = {"peers": peers, "churn": churn, "record_bytes": round(RECORD_BYTES)} | figures
            print(json.dumps(facts) if options.json else "  ".join(f"{k} {v}" for k, v in facts.items()), flush=True)


def values(found: list[Found], name: str) -> str:
    """Return the mean, the least and the most of a figure."""
    each = [getattr(one, name) for one in found]
    return f"{fmean(each):.3g} ({min(each):.3g} to {max(each):.3g})"


if __name__ == "__main__":
    main()
