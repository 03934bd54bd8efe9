"""A bandwidth budget is read as it was meant, kept to the byte, and costs nobody their good name."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import torch
from handlers import now
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_swarms import Peer, ended, recipe, until
from torch import Tensor
from user_errors import user_error

from noloco_node.cli.status import picture
from noloco_node.errors import Exit
from noloco_node.journal import events
from noloco_node.limits import budget
from noloco_node.limits.budget import (
    Hours,
    MonthUsage,
    OwnerLimits,
    TrafficLedger,
    read_hours,
    read_owner_limits,
    read_rate,
    read_size,
)
from noloco_node.limits.rate_limit import FairLimiter, LimitHook, spending
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, Schema, TensorSpec
from noloco_node.network.wire import message_bytes
from noloco_node.node.sessions import Sessions
from noloco_node.planning.bandwidth import (
    MicrobatchBytes,
    bandwidth_seconds,
    bandwidth_table,
    microbatch_bytes,
    slowest_bytes_per_s,
)
from noloco_node.run.peer_state import PeerState
from noloco_node.sim.clock import run
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm.roster import PeerRecord, Roster

RATE = 1e6


@dataclass(frozen=True, kw_only=True)
class Load:
    """So many bytes."""

    content: bytes


@dataclass(frozen=True, kw_only=True)
class Took:
    """How many arrived."""

    count: int


@dataclass(frozen=True, kw_only=True)
class Heavy:
    """Four megabytes."""

    content: Tensor


HEAVY = Schema({Heavy: MessageSpec("Heavy", {"content": TensorSpec((1_000_000,), "float32")})})
SCHEMA = Schema({Load: MessageSpec("Load", header_bytes=LONG_HEADER_BYTES), Took: MessageSpec("Took")})


# What people write.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20mbit", 2.5e6),
        ("20Mbit/s", 2.5e6),
        ("20 mbps", 2.5e6),
        ("1gbit", 125e6),
        ("512kbit/s", 64e3),
        ("2.5MB/s", 2.5e6),
        ("2 MiB/s", 2.0 * 2**20),
        ("250kB/s", 250e3),
        ("1000000bit", 125e3),
        *(("300GB", 300 * 10**9), ("1.5 TB", 15 * 10**11), ("500GiB", 500 * 2**30), ("10mb", 10**7), ("5B", 5)),
    ],
)
def test_rates_and_sizes(text: str, expected: float) -> None:
    if isinstance(expected, int):
        assert read_size(text, "--monthly-cap") == expected
    else:
        assert read_rate(text, "--max-upload") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("--max-upload", text) for text in ("", "20", "20m", "20MB", "20mb/s", "-1mbit", "1e9bit", "0mbit", "1kbit")),
        *(("--max-upload", text) for text in ("fast", "٣mbit")),
        *(("--monthly-cap", text) for text in ("300", "GB", "300gbit", "0GB", "300GB/s")),
        *(("--hours", text) for text in ("22", "25-08", "22:60-08", "22-24:01", "a-b", "22-08-09", "8-8", "08:00-8")),
    ],
)
def test_what_is_none_or_can_be_read_in_two_ways_is_refused(option: str, text: str) -> None:
    values = {"--max-upload": None, "--max-download": None, "--monthly-cap": None, "--hours": None} | {option: text}
    with user_error(Exit.USAGE) as caught:
        read_owner_limits(*values.values())
    assert option in str(caught.value)


def test_all_options_together() -> None:
    read = read_owner_limits("8mbit", None, "1GB", "22:30-6")
    assert read == OwnerLimits(
        upload_bytes_per_s=1e6, monthly_cap_bytes=10**9, hours=Hours(begin_min=22 * 60 + 30, end_min=6 * 60)
    )
    assert str(read.hours) == "22:30-06:00"
    assert read.is_limited
    assert not read_owner_limits(None, None, None, "22-8").is_limited


# The hours.

MINUTES = st.integers(0, 24 * 60 - 1)
HOURS = st.builds(lambda begin, end: Hours(begin_min=begin, end_min=end), MINUTES, MINUTES)
BERLIN = ZoneInfo("Europe/Berlin")
MOMENTS = st.datetimes(datetime(2025, 1, 1), datetime(2030, 1, 1))


@given(HOURS, MOMENTS)
def test_without_changes_of_the_clock_the_hours_are_those_of_the_day(hours: Hours, moment: datetime) -> None:
    here = moment.replace(tzinfo=UTC)
    minute = here.hour * 60 + here.minute
    if hours.begin_min < hours.end_min:
        expected = hours.begin_min <= minute < hours.end_min
    else:  # past midnight, or the whole day
        expected = minute >= hours.begin_min or minute < hours.end_min
    assert budget.in_hours(hours, here)[0] is expected


@given(HOURS, MOMENTS)
def test_the_hours_stay_as_they_are_until_the_moment_that_was_said(hours: Hours, moment: datetime) -> None:
    here = moment.replace(tzinfo=UTC).astimezone(BERLIN)
    inside, for_s = budget.in_hours(hours, here)
    if math.isinf(for_s):
        assert inside
        assert hours.begin_min == hours.end_min
        return
    assert 0.0 < for_s <= 49 * 3600

    def later(seconds: float) -> bool:
        return budget.in_hours(hours, datetime.fromtimestamp(here.timestamp() + seconds, BERLIN))[0]

    assert later(for_s + 0.001) is not inside
    if for_s > 0.002:
        assert later(for_s - 0.001) is inside
        assert later(for_s / 2) is inside


@given(HOURS, MOMENTS)
def test_a_day_begins_and_ends_once_and_is_an_hour_off_at_most(hours: Hours, moment: datetime) -> None:
    here = moment.replace(tzinfo=BERLIN)
    found = list(budget.stretches(hours, here.date(), here))
    nominal_s = 60 * ((hours.end_min - hours.begin_min - 1) % (24 * 60) + 1)
    assert len(found) >= 5
    for begin_s, end_s in found:
        assert abs(end_s - begin_s - nominal_s) <= 3600
    assert all(before[1] <= after[0] for before, after in pairwise(found))


def test_the_night_in_which_the_clock_is_put_forward_is_an_hour_shorter() -> None:
    evening = datetime(2026, 3, 28, 22, 0, tzinfo=BERLIN)
    assert budget.in_hours(read_hours("22-08"), evening) == (True, 9 * 3600)
    assert budget.in_hours(read_hours("22-08"), evening - timedelta(hours=1)) == (False, 3600)


# The month.


@given(st.datetimes(datetime(2025, 1, 1), datetime(2035, 1, 1)))
def test_the_next_month_begins_when_it_was_said(moment: datetime) -> None:
    here = moment.replace(tzinfo=UTC)
    then = datetime.fromtimestamp(here.timestamp() + budget.next_month_s(here) + 0.001, UTC)
    assert (then.day, then.hour, then.minute) == (1, 0, 0)
    assert budget.month_of(then) != budget.month_of(here)
    assert budget.next_month_s(here) <= 31 * 86400


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=20))
def test_what_was_spent_is_that_of_this_month(steps: list[tuple[int, int, int]]) -> None:
    moment, spent, expected = datetime(2026, 1, 30, tzinfo=UTC), MonthUsage(month="2026-01"), 0
    for days, sent, received in steps:
        before = moment
        moment += timedelta(days=days)
        expected = sent + received + (expected if (moment.year, moment.month) == (before.year, before.month) else 0)
        spent = budget.spend(spent, moment, sent, received)
        assert spent.total_bytes == expected
        assert budget.is_spent(spent, 10**10, moment) is (expected >= budget.SPENT_AT * 10**10)
        assert not budget.is_spent(spent, None, moment)


@given(st.datetimes(datetime(2025, 1, 1), datetime(2035, 1, 1)), st.integers(-4000, 4000))
def test_a_clock_that_was_set_wrong_and_right_again_forgets_nothing(moment: datetime, days: int) -> None:
    here = moment.replace(tzinfo=UTC)
    spent = budget.spend(MonthUsage(month=budget.month_of(here)), here, 3, 4)
    wrong = budget.spend(spent, here + timedelta(days=days), 1, 0)
    again = budget.spend(budget.spend(wrong, here, 0, 0), here, 10, 0)
    same = budget.month_of(here + timedelta(days=days)) == budget.month_of(here)
    assert again.total_bytes == 17 + same
    assert wrong.total_bytes == 1 + 7 * same
    assert again.before is None or again.before.before is None, "the file stays small"


# The bucket.


async def passing(valve: FairLimiter, sizes: list[int], delays: list[float]) -> list[tuple[float, int]]:
    """Let messages wait, each from its time on; return when each passed, and its size."""
    passed: list[tuple[float, int]] = []

    async def one(size: int, delay: float) -> None:
        await asyncio.sleep(delay)
        await valve.admit(size)
        passed.append((now(), size))

    async with asyncio.TaskGroup() as group:
        for size, delay in zip(sizes, delays, strict=True):
            group.create_task(one(size, delay))
    return passed


SIZES = st.lists(st.integers(1, 3_000_000), min_size=1, max_size=25)


@settings(max_examples=60)
@given(SIZES, st.floats(budget.LEAST_RATE, 1e7), st.randoms(use_true_random=False))
async def test_never_more_than_the_rate_and_one_burst(sizes: list[int], rate: float, rng: object) -> None:
    delays = [rng.uniform(0.0, 5.0) for _ in sizes]

    passed = await passing(FairLimiter(rate), sizes, delays)
    burst = budget.full_bucket(rate, 0.0).burst_bytes
    assert len(passed) == len(sizes)
    for (at, _), total in zip(passed, accumulate(size for _, size in passed), strict=True):
        assert total <= rate * at + burst + 1
    # And over any stretch, with what had saved up before it began.
    for first in range(len(passed)):
        since, before = passed[first][0], sum(size for _, size in passed[:first])
        asked = sum(size for size, delay in zip(sizes, delays, strict=True) if delay < since)
        saved = asked - before
        for last in range(first, len(passed)):
            inside = sum(size for _, size in passed[first : last + 1])
            assert inside <= rate * (passed[last][0] - since) + burst + saved + 1


@settings(max_examples=40)
@given(SIZES, st.floats(budget.LEAST_RATE, 1e7))
async def test_who_is_busy_uses_the_whole_rate(sizes: list[int], rate: float) -> None:
    await passing(FairLimiter(rate), sizes, [0.0] * len(sizes))
    burst = budget.full_bucket(rate, 0.0).burst_bytes
    assert now() == pytest.approx(max(0.0, sum(sizes) - burst) / rate, rel=0.01, abs=1e-3)


@settings(max_examples=40)
@given(st.integers(1, budget.SMALL_BYTES), st.floats(budget.LEAST_RATE, 1e7), st.floats(0.0, 20.0))
async def test_a_small_message_does_not_starve_behind_a_large_copy(size: int, rate: float, delay: float) -> None:
    valve = FairLimiter(rate)
    copies = [asyncio.create_task(valve.admit(100_000_000)) for _ in range(3)]
    await asyncio.sleep(delay)
    asked = now()
    await valve.admit(size)
    waited = now() - asked
    for copy in copies:
        copy.cancel()
    await asyncio.wait(copies)
    bucket = budget.full_bucket(rate, 0.0)
    assert waited <= (bucket.slice_bytes + size) / rate + 1e-6


async def test_large_messages_share_alike_whoever_came_first() -> None:
    valve, ends = FairLimiter(RATE), []

    async def one(size: int) -> None:
        await valve.admit(size)
        ends.append(now())

    await asyncio.gather(one(20_000_000), one(2_000_000), one(2_000_000))
    first, second, last = ends
    assert first == pytest.approx(second, abs=0.2)
    assert first == pytest.approx(6.0, abs=0.1)  # who came first had the burst; then three share
    assert last == pytest.approx(23.0, abs=0.1)


@pytest.mark.parametrize("others", [1, 30])
async def test_rounds_have_their_share_however_many_others_wait_and_all_of_it_alone(others: int) -> None:
    limiter, over = FairLimiter(RATE, 0.2), asyncio.Event()

    async def send(in_round: bool) -> int:
        sent, pace = 0, limiter.pace(in_round=in_round)
        assert pace is not None
        while not over.is_set():
            await pace.admit(pace.piece_bytes, 10**9)
            sent += pace.piece_bytes
        return sent

    rounds = asyncio.create_task(send(in_round=True))
    waiting = [asyncio.create_task(send(in_round=False)) for _ in range(others)]
    await asyncio.sleep(100)
    over.set()
    await asyncio.wait([rounds, *waiting])
    share = rounds.result() / (rounds.result() + sum(task.result() for task in waiting))
    begun = now()
    await limiter.admit(50_000_000, in_round=True)
    alone_s = now() - begun
    assert share == pytest.approx(0.2, abs=0.01)
    assert alone_s == pytest.approx(50.0, abs=1.5)


async def test_who_is_cancelled_gives_back_what_was_granted() -> None:
    valve = FairLimiter(RATE)
    await valve.admit(1_000_000)
    given_up = asyncio.create_task(valve.admit(10_000_000))
    await asyncio.sleep(0.9)
    given_up.cancel()
    await asyncio.wait([given_up])
    begun = now()
    await valve.admit(900_000)
    assert valve.passed_bytes == 1_900_000
    assert valve.waiting_bytes == 0
    assert now() - begun <= 0.06


async def test_the_rate_in_use_is_shown_and_forgotten() -> None:
    valve = FairLimiter(RATE)
    for _ in range(200):
        await valve.admit(1_000_000)
    busy = valve.used_bytes_per_s
    await asyncio.sleep(300)
    idle = valve.used_bytes_per_s
    assert busy == pytest.approx(RATE, rel=0.05)
    assert idle < 0.01 * RATE


# The network.


async def take_all(conversation: Conversation) -> None:
    while True:
        load = await conversation.receive()
        await conversation.send(Took(count=len(load.content)))


def conversing(allowance: OwnerLimits, work: Callable[[PeerNetwork, PeerNetwork], Awaitable[None]]) -> LimitHook:
    """Let a peer within an allowance work with one that has none; return its limits."""

    async def main() -> LimitHook:
        hub, limits = SimNetwork(), LimitHook(allowance)
        ours, theirs = HookedNetwork(hub.network("us"), limits), hub.network("them")
        for network in (ours, theirs):
            await network.serve("load", SCHEMA, take_all)
        await work(ours, theirs)
        assert not hub.failures
        return limits

    return run(main())


LOAD = Load(content=bytes(500_000))


async def carry(network: PeerNetwork, peer: str, count: int) -> None:
    async with network.talk(peer, "load", SCHEMA) as conversation:
        for _ in range(count):
            await conversation.send(LOAD)
            assert (await conversation.receive()).count == len(LOAD.content)


@pytest.mark.parametrize("way", ["upload", "download"])
def test_all_conversations_of_one_direction_share_its_budget_and_the_other_direction_is_free(way: str) -> None:
    async def work(ours: PeerNetwork, theirs: PeerNetwork) -> None:
        limited, free = ((ours, "them"), (theirs, "us"))[:: 1 if way == "upload" else -1]
        await asyncio.gather(*[carry(*limited, 5) for _ in range(4)])
        assert now() == pytest.approx(20 * message_bytes(LOAD, SCHEMA) / RATE - 1.0, rel=0.03)
        begun = now()
        await carry(*free, 5)
        assert now() - begun < 2.0

    limits = conversing(OwnerLimits(**{f"{way}_bytes_per_s": RATE}), work)
    passed = limits.up if way == "upload" else limits.down
    assert 20 * 500_000 < passed.passed_bytes < 20 * 500_000 + 30 * 200


def test_a_question_is_answered_while_a_copy_waits() -> None:
    small = Load(content=bytes(100))

    async def work(ours: PeerNetwork, _: PeerNetwork) -> None:
        copies = [asyncio.create_task(carry(ours, "them", 40)) for _ in range(8)]
        await asyncio.sleep(5)
        for _ in range(20):
            begun = now()
            async with ours.talk("them", "load", SCHEMA) as conversation:
                await conversation.send(small)
                await conversation.receive()
            assert now() - begun < 0.3
        for copy in copies:
            copy.cancel()
        await asyncio.wait(copies)

    conversing(OwnerLimits(upload_bytes_per_s=RATE, download_bytes_per_s=RATE), work)


def test_a_message_whose_taker_was_interrupted_stays_for_the_next() -> None:
    async def work(ours: PeerNetwork, theirs: PeerNetwork) -> None:
        got: list[int] = []

        async def impatient(conversation: Conversation) -> None:
            while not got:
                try:
                    async with asyncio.timeout(0.3):
                        got.append(len((await conversation.receive()).content))
                except TimeoutError:
                    continue
            await conversation.send(Took(count=got[0]))

        # The first second of the rate is used up, so that the next message has to wait for longer than 0.3 s.
        await carry(theirs, "us", 2)
        await ours.serve("impatient", SCHEMA, impatient)
        async with asyncio.timeout(60), theirs.talk("us", "impatient", SCHEMA) as conversation:
            await conversation.send(LOAD)
            assert (await conversation.receive()).count == len(LOAD.content)
        assert len(got) == 1

    conversing(OwnerLimits(download_bytes_per_s=RATE), work)


def test_a_budget_is_said_in_words() -> None:
    counts = {
        "budget.upload.allowed": 2.5e6,
        "budget.upload.used": 1.25e6,
        "budget.month.allowed": 300e9,
        "budget.month.used": 93e9,
    }
    assert spending(counts) == "upload 10 Mbit/s of 20 Mbit/s, 31% of this month's 300 GB"
    assert spending({}) is None


# Whole nodes.


class Capped(SimNetwork):
    """A world in which one peer keeps to a budget."""

    def __init__(self, name: str, allowance: OwnerLimits) -> None:
        super().__init__()
        self.name, self.allowance = name, allowance

    def network(self, peer: str, access: Access | None = None) -> Any:
        network = super().network(peer, access)
        if peer != self.name:
            return network
        self.limits = LimitHook(self.allowance)
        return HookedNetwork(network, self.limits)


async def test_a_swarm_with_one_slow_budget_has_no_suspects_from_it_and_sends_it_less() -> None:
    rate = 6_000.0

    hub = Capped("peer-11", OwnerLimits(upload_bytes_per_s=rate, download_bytes_per_s=rate))
    what = recipe(replicas=2, steps=24)
    peers = [Peer(hub, what, f"peer-{stage}{replica}", stage) for stage in (0, 1) for replica in (0, 1)]
    # A few of the first microbatches use up what was saved.
    for valve in (hub.limits.up, hub.limits.down):
        await valve.admit(budget.LEAST_BURST_BYTES)
    narrow_s = bandwidth_seconds(microbatch_bytes(what.run, peers[3].plan, 1), hub.allowance)
    assert narrow_s > 0.2
    # The test's device does not say how long a microbatch takes, so the others say it here.
    for peer, seconds in zip(peers, (0.1, 0.1, 0.1, narrow_s), strict=True):
        peer.node._context.host.line_s = lambda _, seconds=seconds: seconds
    async with asyncio.timeout(3600):
        await until(lambda: peers[3].node.replica is not None)
        slow = peers[3].node.replica
        assert slow.describe(PeerState.TRAINING).device_s == 0.0, "it claims no speed before it has worked"
        await until(lambda: slow.inner_steps > 0)
        assert slow.describe(PeerState.TRAINING).device_s == narrow_s
        await asyncio.gather(*[peer.task for peer in peers])
    for peer in peers[:2]:
        counts = peer.node.replica.next_stage.statistics()
        assert counts["gradients"] > 0
        assert not counts["suspects"] + counts["lost_unreachable"] + counts["lost_given_up"] + counts["lost_broken"]
    assert not hub.failures
    metered, ended = hub.limits, now()
    for peer in peers:
        assert peer.of(events.Finished)[0].why == "the run is over"
        assert not peer.of(events.Lost)
        assert not peer.of(events.PeerViolation)
    counts: Counter[str] = Counter()
    for peer in peers[:2]:
        counts.update(peer.of(events.Hops)[-1].counts)
    # Its line takes more than five times as long as the other's device, and it is asked accordingly.
    assert counts["peer-11"] < 0.45 * counts["peer-10"]
    assert peers[3].of(events.Budget)[-1].bytes["upload.allowed"] == rate
    assert any("upload" in line and "bit/s" in line for line in peers[3].said)
    assert 0 < metered.up.passed_bytes <= rate * ended + budget.LEAST_BURST_BYTES
    assert 0 < metered.down.passed_bytes <= rate * ended + budget.LEAST_BURST_BYTES


def test_line_time_is_that_of_the_slower_way() -> None:
    moved = MicrobatchBytes(up=1e6, down=3e6)
    assert bandwidth_seconds(moved, OwnerLimits()) == 0.0
    assert bandwidth_seconds(moved, OwnerLimits(upload_bytes_per_s=1e6)) == 1.0
    assert bandwidth_seconds(moved, OwnerLimits(upload_bytes_per_s=1e6, download_bytes_per_s=1e6)) == 3.0
    assert slowest_bytes_per_s(OwnerLimits(), 5e5) == 5e5
    assert slowest_bytes_per_s(OwnerLimits(upload_bytes_per_s=1e5), 5e5) == 5e4


async def test_what_a_stage_moves_is_what_the_wire_moves() -> None:
    """The bytes that a node of each stage really sent, against the plan's."""
    hub = Capped("peer-1", OwnerLimits())
    what = recipe(stages=3, steps=4, per_round=1000)
    peers = [Peer(hub, what, f"peer-{stage}", stage) for stage in range(3)]
    await ended(*peers)
    steps = [event.step for event in peers[1].of(events.Finished)]
    microbatches = steps[0] * what.run.pipeline.microbatches_per_step
    assert what.run.pipeline.replicas == 1
    for stage, peer in enumerate(peers):
        sent = peer.of(events.Traffic)[-1].sent["microbatch"] / microbatches
        planned = microbatch_bytes(what.run, peers[0].plan, stage).up
        assert sent == pytest.approx(planned, rel=0.25, abs=300)  # and a hundred bytes of each message's head
        assert sent > planned


def test_what_a_budget_carries_is_said_and_what_it_does_not() -> None:
    what = recipe(replicas=1).run
    light = bandwidth_table(what, [MicrobatchBytes(up=1000.0, down=1000.0)] * 2, OwnerLimits(upload_bytes_per_s=1e6))
    assert len(light) == 3
    assert "tokens/s" in light[1]
    heavy = bandwidth_table(
        what, [MicrobatchBytes(up=1e9, down=1e9)] * 2, OwnerLimits(upload_bytes_per_s=1e6, monthly_cap_bytes=10**9)
    )
    assert sum("cannot carry" in line for line in heavy) == 2
    assert any("monthly cap" in line and line.startswith("Warning") for line in heavy)
    apart = bandwidth_table(what, [MicrobatchBytes(1.0, 1.0, 1e8)], OwnerLimits(upload_bytes_per_s=1e5))
    assert any("hardly ever meet" in line for line in apart)


# Sessions, and the file of the month.


class Wall:
    """A wall clock that goes with virtual time."""

    def __init__(self, begin: datetime) -> None:
        self.begin = begin

    def __call__(self) -> datetime:
        return datetime.fromtimestamp(self.begin.timestamp() + now(), self.begin.tzinfo)


async def test_a_node_goes_with_the_hours_and_comes_back(tmp_path: Path) -> None:
    wall, said = Wall(datetime(2026, 3, 28, 12, 0, tzinfo=BERLIN)), list[str]()
    sessions = Sessions(OwnerLimits(hours=read_hours("22-08")), tmp_path / "traffic.json", wall, said.append)
    asked, network, seen = asyncio.Event(), SimNetwork().network("us"), []
    asyncio.get_running_loop().call_later(60 * 3600, asked.set)
    while not asked.is_set():
        await sessions.begin()
        seen.append(("begun", wall()))
        async with sessions.session(network, asked) as (within, leave):
            assert within is network
            await leave.wait()
        seen.append(("ended", wall()))
        assert sessions.goes_on() is not asked.is_set()
    # Summer time begins in the first night.
    assert [f"{what} {when:%d %H:%M}" for what, when in seen] == [
        "begun 28 22:00",
        "ended 29 08:00",
        "begun 29 22:00",
        "ended 30 08:00",
        "begun 30 22:00",
        "ended 31 01:00",
    ]
    assert any("waiting until 2026-03-28 22:00" in line for line in said)


async def test_rounds_have_their_share_of_the_line_in_every_shift(tmp_path: Path) -> None:
    wall = Wall(datetime(2026, 11, 29, 12, 0, tzinfo=UTC))
    sessions = Sessions(OwnerLimits(upload_bytes_per_s=1e6), tmp_path / "traffic.json", wall, lambda _: None)
    plain = SimNetwork().network("us")
    for number in range(2):
        async with sessions.session(plain, asyncio.Event()) as (network, _):
            assert isinstance(network, HookedNetwork)
            hook = sessions._hook
            assert hook.up.round_share == (0.5, 0.3)[number]
            sessions.share_with_rounds("gossip", 0.3)  # the run file is known only once the network is open
            assert hook.up.round_share == hook.down.round_share == 0.3


async def test_a_spent_cap_ends_the_shift_and_the_next_month_begins_another(tmp_path: Path) -> None:
    wall, said = Wall(datetime(2026, 11, 29, 12, 0, tzinfo=UTC)), list[str]()
    path = tmp_path / "traffic.json"
    allowance = OwnerLimits(monthly_cap_bytes=20_000_000)
    hub = SimNetwork()
    them = hub.network("them")
    await them.serve("heavy", HEAVY, lambda conversation: conversation.receive())
    plain = hub.network("us")
    sessions = Sessions(allowance, path, wall, said.append)
    await sessions.begin()
    assert now() == 0.0
    async with sessions.session(plain, asyncio.Event()) as (network, leave):
        while not leave.is_set():
            await network.publish("key", "us", b"", 10.0)
            async with network.talk("them", "heavy", HEAVY) as conversation:
                await conversation.send(Heavy(content=torch.zeros(1_000_000)))
            await asyncio.sleep(5.0)
    assert sessions.goes_on()
    spent = TrafficLedger(path, wall, said.append).spent
    assert 0.99 * 20_000_000 <= spent.total_bytes <= 36_000_000  # ten seconds between two looks
    # A restart remembers, and waits for the month to end.
    again = Sessions(allowance, path, wall, said.append)
    await again.begin()
    assert f"{wall():%Y-%m-%d}" == "2026-12-01"
    assert TrafficLedger(path, wall, said.append).spent.total_bytes == 0
    assert any("of this month's 20 MB are used up: leaving politely" in line for line in said)
    assert any("waiting until 2026-12-01 00:00" in line for line in said)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b'{"month": 3}', b'{"month": "2026-11", "sent_bytes": -5}', b"\xff"]
)
def test_a_garbled_ledger_counts_as_nothing_spent(content: bytes, tmp_path: Path) -> None:
    path, said = tmp_path / "traffic.json", list[str]()
    path.write_bytes(content)
    ledger = TrafficLedger(path, lambda: datetime(2026, 11, 2), said.append)
    assert ledger.spent == MonthUsage(month="2026-11")
    ledger.add(1, 2)
    ledger.keep()
    assert TrafficLedger(path, lambda: datetime(2026, 11, 2), said.append).spent.total_bytes == 3


def test_a_disk_that_refuses_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    ledger = TrafficLedger(tmp_path / "absent" / "traffic.json", lambda: datetime(2026, 11, 2), said.append)
    for _ in range(3):
        ledger.add(1, 1)
        ledger.keep()
    assert len(said) == 1
    assert ledger.spent.total_bytes == 6


# Shown.


@pytest.mark.parametrize("named", [["month"], ["upload", "download", "month"]])
@pytest.mark.parametrize("used", [1, 123_456_789])
def test_budgets_leave_the_table_its_room(named: list[str], used: int) -> None:
    counts = {f"budget.{name}.{what}": amount for name in named for what, amount in (("allowed", 2e9), ("used", used))}
    said = spending(counts)
    assert said is not None

    def record(peer: str, budget: str | None) -> PeerRecord:
        return PeerRecord(
            peer=peer,
            stage=0,
            state=PeerState.TRAINING,
            inner_steps=123_456,
            round=2_469,
            progress=0.5,
            loss=3.141,
            gap=0.0123,
            tokens_per_s=12_345.0,
            device_s=0.123,
            budget=budget,
        )

    peers, what = [f"peer-{number:03}" for number in range(3)], recipe()

    def shown(budget: str | None) -> list[str]:
        return picture(what, Roster(stages=(tuple(record(peer, budget) for peer in peers), ()))).splitlines()

    lines = shown(said)
    assert max(map(len, lines)) <= 100
    for peer in peers:
        row, mine = (line for line in lines if peer in line)
        assert all(figure in row for figure in ("123456", "2469", "50.0%", "3.141", "0.0123", "12,345"))
        assert mine.split(peer)[1].split() == said.split()[: len(mine.split()) - 1]
    without = shown(None)
    assert lines[: len(without)] == without
