"""Random schedules of a stage whose members know only samples of it, and what must hold of every roster.

    python -m tests.explorer.sample_schedules [--count 1000] [--first 0]
    python -m tests.explorer.sample_schedules --replay SEED

Production's membership and its holders of records (`Membership`, `DhtRecords`) run in virtual time over a DHT in
memory, without training. Shards have 2 to 12 records instead of 16 to 64, so that a stage of 28 peers has four of them,
of which a member follows two. A schedule has one to five of these faults:

- `holders die`: the nodes that keep the records of a shard end at once, members or not;
- `holders lie`: they take all and keep nothing, or keep what they have, or show each peer its own record alone;
- `view dies`: all peers that a member has in its roster end at once;
- `partition`: the nodes are divided in two groups that do not reach each other, for a while;
- `churn`: for a while members end, and as many newcomers come.

Some of the peers that ended come back under their names. What must hold is in `SampleChecker`. Exit code 1 if a
schedule breaks it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

from noloco_node.libp2p.record_checks import place_of
from noloco_node.libp2p.record_holders import DOUBTED_S
from noloco_node.run.peer_state import PeerState
from noloco_node.sim import clock
from noloco_node.swarm import shards, stage_division
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.shards import RENEWED_S
from noloco_node.swarm.stage_division import READ_S
from noloco_node.swarm.stage_records import CLOCK_ERROR_S
from noloco_node.tasks import loop_s
from tests.explorer.memory_dht import MemoryDht, MemoryPeerNetwork, unix_s, virtual_time_of_day
from tests.explorer.observation import InvariantBroken, told

RUN = "run"
MOST_IN_SHARD, LEAST_IN_SHARD = 12, 2
LEAST_MEMBERS = 12
"""That a fault leaves."""
WARM_S, FAULTS_S = 400.0, 600.0
"""Until the first fault may come, and how long faults may begin."""
SETTLED_S = 2 * READ_S + 4 * RENEWED_S + CLOCK_ERROR_S
"""Without a fault, until rosters must be right: two of the longest pauses between readings, and twice the time for
which a record is believed, as the DHT may show the last record of the dead late; it keeps it so much longer.
"""
DOUBTS_S = 2 * DOUBTED_S
"""So much longer once holders have lied: peers that doubt a node write elsewhere after its last lie, and until they
write there again, others doubt it for what it lacks. Seed 380 has such a doubt six minutes after the lie.
"""
STEADY_S = 2 * READ_S + 2 * RENEWED_S
"""Since a member has chosen the depth by which it divides the stage, until it must know others, and they it."""
READINGS = 4
"""Readings in turn within which a member must find all: each asks another node first, and one may know less."""
LOOK_S, REFRESH_S = 30.0, 30.0
SIZE_ERRORS = 5.0
"""Standard errors by which the size of a stage may be wrong."""
HOLDERS = (3, 6)
"""The nodes beside a key that die or lie: those with which a record is stored, or half of those that a search finds."""
RETURN_SHARE = 0.3
"""Of the newcomers that are peers which ended before."""


class SampleFault(NamedTuple):
    """`for_s`: how long it lasts. `number`: of nodes, or of members that end a minute. `how`: holders lie."""

    at_s: float
    kind: str
    for_s: float = 0.0
    number: int = 0
    how: str = ""


class SampleSchedule(NamedTuple):
    """`members`: at first; `others`: nodes of the DHT that belong to other stages."""

    seed: int
    members: int
    others: int
    faults: tuple[SampleFault, ...]


class SampleResult(NamedTuple):
    """What became of a schedule. `counts`: faults that struck, and how often each invariant was evaluated."""

    schedule: SampleSchedule
    broken: InvariantBroken | None
    counts: Counter[str]


def draw_samples(seed: int) -> SampleSchedule:
    rng = Random(f"{seed}|samples")
    return SampleSchedule(
        seed, members=rng.randint(26, 30), others=rng.randint(10, 30), faults=tuple(sorted(_faults(rng)))
    )


def _faults(rng: Random) -> Iterator[SampleFault]:
    for _ in range(rng.randint(1, 5)):
        at_s = round(WARM_S + rng.uniform(0.0, FAULTS_S), 1)
        for_s = round(rng.choice((rng.uniform(20.0, 200.0), rng.uniform(200.0, 1000.0))), 1)
        match rng.choice(("holders die", "holders lie", "view dies", "partition", "churn")):
            case "holders die":
                yield SampleFault(at_s, "holders die", number=rng.randint(*HOLDERS))
            case "holders lie":
                how = rng.choice(("keep nothing", "keep the old", "show each its own"))
                yield SampleFault(at_s, "holders lie", for_s, rng.randint(*HOLDERS), how)
            case "churn":
                yield SampleFault(at_s, "churn", for_s, rng.randint(1, 5))
            case "view dies":
                yield SampleFault(at_s, "view dies")
            case _:
                yield SampleFault(at_s, "partition", for_s)


def examine_samples(schedule: SampleSchedule) -> SampleResult:
    """Run a schedule, and check what must hold."""
    seen: list[SampleChecker] = []

    async def main() -> None:
        swarm = SampleSwarm(schedule)
        seen.append(swarm.checker)
        await swarm.run()

    with small_shards(), virtual_time_of_day():
        clock.run(main())
    return SampleResult(schedule, seen[0].broken, seen[0].counts)


@contextmanager
def small_shards() -> Iterator[None]:
    """Let a stage have shards from 13 replicas on."""
    with ExitStack() as patches:
        for module in (shards, stage_division):
            patches.enter_context(patch.object(module, "MOST_IN_SHARD", MOST_IN_SHARD))
            patches.enter_context(patch.object(module, "LEAST_IN_SHARD", LEAST_IN_SHARD))
        yield


class Member(NamedTuple):
    """A peer whose process runs. `born_s`: when it began (loop seconds)."""

    membership: Membership
    task: asyncio.Task[None]
    born_s: float


class SampleSwarm:
    """The members of a stage over one DHT, and what happens to them."""

    def __init__(self, schedule: SampleSchedule) -> None:
        self.schedule, self.rng = schedule, Random(f"{schedule.seed}|swarm")
        self.dht = MemoryDht(finds_silent=False)
        self.members: dict[str, Member] = {}
        self.ended_s: dict[str, float] = {}
        """When each peer ended that is not there."""
        self.quiet_s, self.lasting = 0.0, 0
        """Since when nothing begins, ends or comes; how many faults last."""
        self.checker = SampleChecker(self)
        self._comings = 0

    async def run(self) -> None:
        for number in range(self.schedule.others):
            self.dht.peer(f"other {number}")
        looks = asyncio.create_task(self.checker.run())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.schedule.members):
                    group.create_task(self._join_later(self.rng.uniform(0.0, RENEWED_S)))
                for fault in self.schedule.faults:
                    group.create_task(self._strike(fault))
            lied = any(fault.kind == "holders lie" for fault in self.schedule.faults)
            await asyncio.sleep(SETTLED_S + DOUBTS_S * lied)
            await self.checker.check_settled()
        finally:
            tasks = [looks, *(member.task for member in self.members.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _join_later(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self._comings += 1
        self._join(f"p{self._comings}")

    def _join(self, name: str) -> None:
        self.quiet_s = loop_s()
        self.ended_s.pop(name, None)
        self.dht.dead.discard(name)
        network: Any = MemoryPeerNetwork(name, self.dht.peer(name))
        own = Membership(network, RUN, 1, refresh_s=REFRESH_S, unix_time=unix_s)
        record = PeerRecord(peer=name, stage=0, state=PeerState.TRAINING)
        self.members[name] = Member(own, asyncio.create_task(_live(own, record), name=name), loop_s())

    def _end(self, name: str) -> None:
        """End the process of a node, whether it is a member's or not."""
        self.quiet_s = loop_s()
        self.dht.dead.add(name)
        self.dht.kept.pop(name, None)
        member = self.members.pop(name, None)
        if member is not None:
            member.task.cancel()
            self.ended_s[name] = loop_s()

    # What happens.

    async def _strike(self, fault: SampleFault) -> None:
        await asyncio.sleep(fault.at_s)
        self.checker.counts[f"struck.{fault.kind}"] += 1
        self.lasting += 1
        match fault.kind:
            case "holders die":
                await self._end_all(self._holders(fault.number))
            case "view dies":
                reader = self.rng.choice(list(self.members.values()))
                await self._end_all([each.peer for each in reader.membership.roster.stage(0)])
            case "holders lie":
                await self._lie(fault)
            case "partition":
                await self._divide(fault)
            case _:
                await self._churn(fault)
        self.lasting -= 1
        self.quiet_s = loop_s()

    def _holders(self, count: int) -> list[str]:
        """Return the nodes nearest to the key of a shard that some member follows."""
        reader = self.rng.choice(list(self.members.values()))
        shard = self.rng.choice(reader.membership._divisions[0].follow(0))
        return self.dht.nearest(place_of(shard.key(f"{RUN}/stage/0")), count)

    async def _end_all(self, names: Sequence[str]) -> None:
        """End these nodes at once, as far as enough members are left; then as many come."""
        gone = 0
        for name in names:
            if name not in self.members or len(self.members) > LEAST_MEMBERS:
                gone += name in self.members
                self._end(name)
        for _ in range(gone):
            await self._come()

    async def _come(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 10.0))
        if self.ended_s and self.rng.random() < RETURN_SHARE:
            self._join(self.rng.choice(list(self.ended_s)))
        else:
            await self._join_later(0.0)

    async def _lie(self, fault: SampleFault) -> None:
        dht = self.dht
        liars = {"keep nothing": dht.liars, "keep the old": dht.frozen}.get(fault.how, dht.mirrors)
        # More than half of the nodes that a search finds would be too many for any reader.
        room = HOLDERS[1] - len(dht.liars | dht.frozen | dht.mirrors)
        names = [name for name in self._holders(fault.number) if name not in dht.liars | dht.frozen | dht.mirrors][
            :room
        ]
        liars.update(names)
        await asyncio.sleep(fault.for_s)
        liars.difference_update(names)

    async def _divide(self, fault: SampleFault) -> None:
        if self.dht.sides:
            return  # another partition lasts
        share, begun_s = self.rng.uniform(0.2, 0.8), loop_s()
        self.quiet_s = begun_s
        self.dht.sides = {name: int(self.rng.random() < share) for name in self.dht.kept}
        await asyncio.sleep(fault.for_s)
        if self.lasting == 1 and loop_s() - self.quiet_s >= SETTLED_S:
            await self.checker.check_settled()
        self.dht.sides = {}

    async def _churn(self, fault: SampleFault) -> None:
        ends_s = loop_s() + fault.for_s
        while loop_s() < ends_s:
            await asyncio.sleep(self.rng.expovariate(fault.number / 60.0))
            if len(self.members) > LEAST_MEMBERS:
                self._end(self.rng.choice(list(self.members)))
                await self._come()


async def _live(own: Membership, record: PeerRecord) -> None:
    await own.claim(record)
    await own.run()


class SampleChecker:
    """What must hold of the rosters of a swarm.

    `failure`: no member fails. `dead`: nobody lists a peer that has been dead for `SETTLED_S` in which nothing
    happened. Once nothing has happened for so long, also on each side of a partition that lasts: `missing`: each member
    lists all living peers of the shards that it follows, or does after a few readings; `stray`: it lists no others;
    `size`: its estimate is within its errors; `unlisted`: its record is taken.
    """

    def __init__(self, swarm: SampleSwarm) -> None:
        self._swarm = swarm
        self.counts: Counter[str] = Counter()
        """Faults that struck, and how often each invariant was evaluated."""
        self.broken: InvariantBroken | None = None
        self._divided_s: dict[str, tuple[int, float]] = {}
        """The depth by which each member divides the stage, and since when, as far as was seen."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._check_failures()
            for name, member in self._swarm.members.items():
                depth = member.membership._divisions[0].depth
                if self._divided_s.get(name, (-1, 0.0))[0] != depth:
                    self._divided_s[name] = depth, loop_s()
            if not self._swarm.lasting:
                self._check_dead()

    async def check_settled(self) -> None:
        for name, member in self._swarm.members.items():
            await self._check_missing(name, member.membership)
            self._check_roster(name, member.membership)
            self.counts["checked.unlisted"] += 1
            if member.membership.unlisted_since_s is not None:
                self._complain("unlisted", f"no node takes the record of {name}")

    def _complain(self, kind: str, sentence: str) -> None:
        if self.broken is None:
            self.broken = InvariantBroken(kind, loop_s(), sentence)

    def _check_failures(self) -> None:
        for name, member in self._swarm.members.items():
            self.counts["checked.failure"] += 1
            if member.task.done() and not member.task.cancelled() and (error := member.task.exception()) is not None:
                self._complain("failure", f"{name} failed: {told(error)}")

    def _check_dead(self) -> None:
        swarm, now_s = self._swarm, loop_s()
        long_dead = {name for name, ended_s in swarm.ended_s.items() if now_s - max(ended_s, swarm.quiet_s) > SETTLED_S}
        for name, member in swarm.members.items():
            listed = {each.peer for stage in member.membership.roster.stages for each in stage}
            self.counts["checked.dead"] += len(listed)
            if found := listed & long_dead:
                self._complain("dead", f"{name} lists {', '.join(sorted(found))}")

    async def _check_missing(self, name: str, own: Membership) -> None:
        if name not in self._steady():
            return
        for _ in range(READINGS):
            missing = self._expected(name, own) - {each.peer for each in own.roster.stage(0)}
            if not missing:
                break
            self.counts["read again"] += 1
            await own.peek()
        else:
            self._complain("missing", f"{name} does not list {', '.join(sorted(missing))}")

    def _expected(self, name: str, own: Membership) -> set[str]:
        """Return the peers that a member must know."""
        found = {
            other
            for other, depth in self._steady().items()
            if self._swarm.dht.reaches(name, other)
            and any(shard.holds(other, depth) for shard in own._divisions[0].follow(0))
        }
        self.counts["checked.missing"] += len(found)
        return found

    def _steady(self) -> dict[str, int]:
        """Return the depths by which members divide the stage, where they have done so for long.

        Peers of a lower depth are looked for seldom, and a depth that was chosen just now is known to nobody.
        """
        now_s, members = loop_s(), self._swarm.members
        return {name: depth for name, (depth, s) in self._divided_s.items() if name in members and now_s - s > STEADY_S}

    def _check_roster(self, name: str, own: Membership) -> None:
        living = {other for other in self._swarm.members if self._swarm.dht.reaches(name, other)}
        listed = {each.peer for each in own.roster.stage(0)}
        self.counts["checked.stray"] += len(listed)
        if stray := listed - living:
            self._complain("stray", f"{name} lists {', '.join(sorted(stray))}, whom it cannot reach")
        size = own.roster.size(0)
        self.counts["checked.size"] += bool(size.error)
        # Each record that was found stands for so many: this is the error of a Poisson number of them.
        weight = 1.0 + size.peers * size.error**2
        if abs(size.peers - len(living)) > max(1.0, SIZE_ERRORS * math.sqrt(weight * len(living))):
            self._complain("size", f"{name} takes the stage for {size}, and it has {len(living)}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="schedules to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this seed alone")
    arguments = parser.parse_args(words)
    first, count = (arguments.first, arguments.count) if arguments.replay is None else (arguments.replay, 1)
    begun_s, counts, broken = time.monotonic(), Counter[str](), 0
    for seed in range(first, first + count):
        result = examine_samples(draw_samples(seed))
        counts += result.counts
        if result.broken is not None:
            broken += 1
            print(f"seed {seed}: {result.broken}\n  {result.schedule}", flush=True)
    print(f"{count} schedules, {broken} violations, {time.monotonic() - begun_s:.0f} s")
    print(", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
