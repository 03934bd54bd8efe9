"""Stages too large for everybody to know everybody: who is found, what is estimated, and what a reader reads."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count, islice, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.cli.status import picture, summary
from noloco_node.evaluation.evaluator import EVALUATORS, chosen
from noloco_node.node.stage_claim import claims_of
from noloco_node.node.stage_work import StageWork
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import line, lines
from noloco_node.run.config import PipelineConfig
from noloco_node.run.peer_state import Evaluation, PeerState, Wait, WaitCause
from noloco_node.run.presets import demo_run_text
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.swarm import stage_records
from noloco_node.swarm.membership import Membership, roster_of, sampled
from noloco_node.swarm.receipts import IssuedReceipts, ReceiptLedger, RunProgress
from noloco_node.swarm.roster import NUMBER_BITS, Given, PeerRecord, Roster, brief
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.swarm.run_samples import (
    ALONE_S,
    MOST_PACE,
    NEARLY_OVER,
    RunSamples,
    SampledWork,
    believed_samples,
    run_over,
)
from noloco_node.swarm.shards import (
    CALM_PAUSE_S,
    DEEPEST,
    FOLLOWED,
    LEAST_PAUSE_S,
    MANY_GONE,
    MOST_IN_SHARD,
    PAUSE_GROWTH,
    RENEWED_S,
    Shard,
    StageSize,
    followed,
    written,
)
from noloco_node.swarm.stage_division import (
    READ_NEXT_S,
    READ_OTHERS_S,
    READ_OWN_S,
    READ_S,
    READINGS_PER_PARENT,
    StageDivision,
    read_next_s,
)
from noloco_node.swarm.stage_records import Published, StageRecords, decode_record, encode_record, newest
from noloco_node.tasks import loop_s

WEATHER = NetworkConditions(latency=Latency(mean_s=0.05))


def record(peer: str, stage: int = 0, **facts: Any) -> PeerRecord:
    return PeerRecord(peer=peer, stage=stage, **({"state": PeerState.TRAINING} | facts))


class Crowd:
    """Members of one stage, and the keys and records that they read."""

    def __init__(self) -> None:
        self.hub, self.loop = SimNetwork(WEATHER, seed=3), asyncio.get_running_loop()
        self.members: dict[str, tuple[Membership, asyncio.Task[Any]]] = {}
        self.read: Counter[str] = Counter()
        self.published: Counter[tuple[str, str]] = Counter()
        self.keys: set[str] = set()

    async def join(self, name: str) -> None:
        network = self.hub.network(name)
        read_all = network.read_all

        async def noted(keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
            found = await read_all(keys)
            self.keys.update(keys)
            self.read[name] += sum(len(records or ()) for records in found)
            return found

        publish = network.publish

        async def counted(key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
            self.published[name, key] += 1
            return await publish(key, subkey, value, lifetime_s)

        network.read_all = noted
        network.publish = counted
        membership = Membership(network, "run", 1, unix_time=lambda: 1e9 + self.loop.time())
        await membership.claim(record(name))
        self.members[name] = membership, asyncio.create_task(membership.run())

    async def join_all(self, count: int) -> None:
        """Let them join one after the other, until there are so many."""
        for number in range(len(self.members), count):
            await self.join(f"p{number}")

    async def lie(self, liars: int, depth: int, serial: int = 1) -> None:
        """Let so many say a depth under the key of the whole stage; a name costs them nothing."""
        for name in islice((n for n in map("liar {}".format, count()) if written(n, depth)[-1].depth == 0), liars):
            raw = encode_record(Published(serial, record(name), 1e9 + self.loop.time(), 300.0, depth))
            network = self.hub.peer(name) or self.hub.network(name)
            await network.publish("run/stage/0", name, raw, 300.0)

    async def leave(self, name: str) -> None:
        membership, task = self.members.pop(name)
        task.cancel()
        await membership.withdraw()

    @property
    def rosters(self) -> list[Roster]:
        return [membership.roster for membership, _ in self.members.values()]

    def known(self) -> set[str]:
        """Return the members that another one knows."""
        return {
            each.peer
            for name, (membership, _) in self.members.items()
            for each in membership.roster.stage(0)
            if each.peer != name
        }


async def test_a_stage_grows_into_shards_and_shrinks_back_and_nobody_gets_lost() -> None:
    crowd = Crowd()
    await crowd.join_all(MOST_IN_SHARD)
    await asyncio.sleep(30.0)
    assert {len(roster.stage(0)) for roster in crowd.rosters} == {MOST_IN_SHARD}
    assert not any(roster.is_sample for roster in crowd.rosters)
    assert {key for key in crowd.keys if "/stage/" in key} == {"run/stage/0"}, "as it was before there were shards"
    await crowd.join_all(140)
    for _ in range(30):
        await asyncio.sleep(10.0)
        assert crowd.known() == crowd.members.keys(), "each is known to somebody, whatever depths they have"
    # A record of the depth before is believed for two minutes.
    crowd.read.clear()
    crowd.published.clear()
    await asyncio.sleep(4 * READ_S)
    assert crowd.known() == crowd.members.keys()
    assert max(crowd.read.values()) <= 5 * (FOLLOWED + 1) * MOST_IN_SHARD
    assert max(crowd.published.values()) <= 1 + 4 * READ_S / (0.9 * RENEWED_S)
    for roster in crowd.rosters:
        size = roster.size(0)
        assert roster.is_sample
        assert len(roster.stage(0)) < 140
        assert abs(size.peers - 140) <= 5.0 * size.error * size.peers
    membership, _ = crowd.members["p0"]
    for _ in range(6):
        await asyncio.sleep(10.0)
        assert (await membership.peek([0])).old_since_s is None, "a peer that reads nothing is not deaf"
    visitor = Membership(crowd.hub.network("v"), "run", 1, unix_time=lambda: 1e9 + crowd.loop.time(), shards=8)
    first = await visitor.peek()
    assert first.is_sample
    assert first.stage(0), "the key of the whole stage shows some"
    second = await visitor.peek()
    assert len(second.stage(0)) == pytest.approx(140, abs=1), "a visitor reads up to eight shards, here all"
    assert not second.is_sample
    for name in list(crowd.members)[20:]:
        await crowd.leave(name)
    await asyncio.sleep(4 * READ_S)
    assert {len(roster.stage(0)) for roster in crowd.rosters} == {20}
    assert not any(roster.is_sample for roster in crowd.rosters)


@pytest.mark.parametrize("slow_s", [0.5, 5.0])
async def test_what_is_to_be_published_while_an_earlier_record_is_on_its_way_follows_at_once(slow_s: float) -> None:
    crowd = Crowd()
    await crowd.join_all(140)
    await asyncio.sleep(4 * READ_S)
    membership, _ = crowd.members["p0"]
    assert membership.roster.is_sample
    network, under_way, told = crowd.hub.peer("p0"), asyncio.Event(), set[PeerState]()
    assert network is not None
    publish = network.publish

    async def slow(key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        under_way.set()
        await asyncio.sleep(slow_s)
        published = decode_record(value, "p0", 0)
        assert published is not None
        told.add(published.record.state)
        return await publish(key, subkey, value, lifetime_s)

    network.publish = slow
    await under_way.wait()
    membership.update(record("p0", state=PeerState.FINISHED))
    await asyncio.sleep(3 * slow_s + 2.0)
    assert PeerState.FINISHED in told


async def test_of_a_stage_that_begins_large_each_keeps_a_sample_from_its_first_reading_on() -> None:
    crowd = Crowd()
    await asyncio.gather(*(crowd.join(f"p{number}") for number in range(200)))
    for roster in crowd.rosters:
        size = roster.size(0)
        assert roster.is_sample
        assert 2 * MOST_IN_SHARD < size.peers <= 200, "those that had published"
        assert len(roster.stage(0)) == pytest.approx(size.peers / 2, rel=0.3), "two shards of four"
        assert roster.scale(0) == pytest.approx(2.0, rel=0.3)
    await asyncio.sleep(60.0)
    assert crowd.known() == crowd.members.keys()
    for roster in crowd.rosters:
        assert abs(roster.size(0).peers - 200) <= 5.0 * roster.size(0).error * 200


@given(st.lists(st.integers(0, 3), min_size=20, max_size=80), st.integers(1, 3))
def test_what_a_reading_of_these_shards_and_their_parents_would_show_is_not_forgotten(
    depths: list[int], depth: int
) -> None:
    said = {f"p{number}": each for number, each in enumerate(depths)}
    raws = {peer: encode_record(Published(1, record(peer), 1e9, 300.0, each)) for peer, each in said.items()}
    records = StageRecords("me", 1, 300.0, 10.0)
    records.take({0: raws}, {0: [Shard(0, 0)]}, 0.0, 1e9, {0: ()}, {0: 10.0})
    before = set(records.believed[0])
    shards = followed("me", 0, depth, 0.0)
    left = records.narrow(0, shards, 1)
    keys = {each.key("stage") for shard in shards for each in (shard, shard.parent)}
    shown = {
        peer
        for peer, each in said.items()
        if peer in before and keys & {shard.key("stage") for shard in written(peer, each)}
    }
    assert shown <= records.believed[0].keys()
    assert left in (0, len(records.believed[0]))


async def test_names_that_say_a_great_depth_displace_nobody() -> None:
    crowd = Crowd()
    await crowd.lie(100, depth=4)
    await crowd.join_all(20)
    newcomer, _ = crowd.members["p19"]
    assert {each.peer for each in newcomer.roster.stage(0)} >= crowd.members.keys()


async def test_sources_that_all_know_each_other_tell_a_large_later_stage_that_they_have_finished() -> None:
    """They leave seconds later, while each replica of the other stage reads them every half a minute or less often."""
    hub, loop = SimNetwork(WEATHER, seed=3), asyncio.get_running_loop()
    tasks, members, seen = dict[str, asyncio.Task[Any]](), dict[str, Membership](), set[str]()

    async def begin(name: str, stage: int) -> None:
        members[name] = membership = Membership(hub.network(name), "run", 2, unix_time=lambda: 1e9 + loop.time())
        await membership.claim(record(name, stage, samples=1000 * (stage == 0)))
        membership.focus((stage, 1))
        tasks[name] = asyncio.create_task(membership.run())

    async def watch(name: str) -> None:
        while not run_over(members[name].roster.sources, members[name].roster.sources_finished):
            await members[name].changed()
        seen.add(name)

    names = [f"r{number}" for number in range(150)]
    await asyncio.gather(*(begin(f"s{number}", 0) for number in range(12)), *(begin(name, 1) for name in names))
    await asyncio.sleep(120.0)
    assert members["s0"].roster.is_sample
    tasks |= {f"watch {name}": asyncio.create_task(watch(name)) for name in names}
    for name in (f"s{number}" for number in range(12)):
        members[name].update(record(name, 0, samples=1000, state=PeerState.FINISHED))
        await asyncio.sleep(3.0)
        tasks[name].cancel()
        await members[name].withdraw()
    await asyncio.sleep(120.0)
    assert seen == set(names)


@pytest.mark.parametrize(("progress", "pause_s"), [(NEARLY_OVER, LEAST_PAUSE_S), (0.5, ALONE_S)])
@pytest.mark.parametrize("changes_s", [1e6, 10.0])
async def test_a_later_stage_without_work_reads_a_sample_whose_reading_is_not_due(
    progress: float, pause_s: float, changes_s: float
) -> None:
    """Else it learns of the end minutes later. `changes_s`: between two changes of another stage."""
    ended = sample(2000, 90, 2, state=PeerState.FINISHED, progress=1.0)
    ended = msgspec.structs.replace(ended, sources=90, sources_finished=90)

    async def peek() -> Roster:
        membership.roster = ended
        return ended

    async def changed() -> None:
        await asyncio.sleep(changes_s)

    known = sample(2000, 90, 2, loop_s())
    membership = cast(Any, SimpleNamespace(roster=known, changed=changed, peek=peek))
    run = cast(Any, SimpleNamespace(budget_samples=10**6, pipeline=PipelineConfig(stages=2)))
    served = SimpleNamespace(returned_s=loop_s(), issued=SimpleNamespace(samples={}))
    replica = cast(Any, SimpleNamespace(stage=1, microbatches=served, progress=SimpleNamespace(value=progress)))
    begun_s = loop_s()
    work = StageWork(run, membership, cast(Any, None), cast(Any, None))
    await work.run_until_done(replica)
    assert pause_s < loop_s() - begun_s <= pause_s + LEAST_PAUSE_S


def division(stage: int, depth: int = 0) -> StageDivision:
    made = StageDivision("me", stage)
    made.depth = depth
    return made


@given(st.integers(1, 3))
async def test_a_stage_is_looked_through_for_peers_of_a_lower_depth(depth: int) -> None:
    divided = division(0, depth)
    assert sum(len(divided.next_reading(0)) > FOLLOWED for _ in range(READINGS_PER_PARENT)) == 1


@given(st.floats(0.0, 200.0))
def test_a_key_of_fewer_peers_is_read_as_often_in_all(peers: float) -> None:
    """As many peers read it as share it; beyond the bounds of a shard the pause stays."""
    shared = min(max(peers, MOST_IN_SHARD / 2), MOST_IN_SHARD)
    assert shared / read_next_s(peers) == pytest.approx(MOST_IN_SHARD / READ_NEXT_S)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 6))
async def test_half_as_many_shards_are_followed_where_nobody_is_called(own: int, stage: int, depth: int) -> None:
    divided = division(stage, depth)
    assert len(divided.follow(None)) == min(FOLLOWED, 2**depth), "a newcomer has to choose"
    calls = stage in (own, own + 1)
    assert len(divided.follow(own)) == (FOLLOWED // 2 if depth > 1 and not calls else min(FOLLOWED, 2**depth))


@given(st.integers(0, 4), st.integers(0, 4), st.floats(0.0, 1.0))
async def test_a_sample_is_read_as_often_as_our_work_needs(own: int, stage: int, gone: float) -> None:
    """The next stage most often, for its newcomers; whoever is gone matters where we call somebody."""
    divided = division(stage)
    divided.size = StageSize(20.0, 0.1)
    records = cast(Any, SimpleNamespace(believed=[dict.fromkeys("abcdefghijklmnopqrst", record("a"))] * 5))
    for number in range(9):
        divided.note_reading((), records, own, float(number), gone)
    calm_s = {own: READ_OWN_S if own else READ_S, own + 1: read_next_s(20)}
    pause_s = divided.pause_s
    if gone <= MANY_GONE / PAUSE_GROWTH or stage not in calm_s:
        assert pause_s == calm_s.get(stage, READ_OTHERS_S)
    elif gone > MANY_GONE:
        assert pause_s == LEAST_PAUSE_S
    else:
        assert pause_s == (LEAST_PAUSE_S if own == stage == 0 else min(CALM_PAUSE_S, calm_s[stage]))


@pytest.mark.parametrize(("honest", "liars", "depth"), [(4, 1, 3), (4, 3, 3), (1, 2, 8), (6, 12, 8)])
async def test_liars_that_say_that_a_stage_is_large_do_not_make_its_rosters_samples(
    honest: int, liars: int, depth: int
) -> None:
    """A new stage has few honest peers, and names cost nothing: its receipts would end."""
    crowd = Crowd()
    await crowd.join_all(honest)
    for serial in range(1, 8):
        await crowd.lie(liars, depth, serial)
        await asyncio.sleep(10.0)
        assert not any(roster.is_sample for roster in crowd.rosters)
        assert crowd.known() >= (crowd.members.keys() if honest > 1 else set())


async def test_peers_of_a_shard_that_cannot_be_read_stay() -> None:
    """Of a stage of two shards a reader knows everybody, and shall not lose half of them for one silent key."""
    crowd = Crowd()
    await crowd.join_all(100)
    await asyncio.sleep(80.0)
    membership, _ = crowd.members["p7"]
    network, silent = membership._network, "run/stage/0/1/1"
    read_all = network.read_all
    assert silent in crowd.keys
    assert len(membership.roster.stage(0)) == 100

    async def read_others(keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
        found = await read_all([key for key in keys if key != silent])
        answers = iter(found)
        return [None if key == silent else next(answers) for key in keys]

    network.read_all = read_others
    for _ in range(8):
        await asyncio.sleep(10.0)
        assert len(membership.roster.stage(0)) == 100
        assert not membership.complete


@given(st.integers(0, 2**40), st.integers(0, DEEPEST))
def test_a_record_of_a_small_stage_has_the_bytes_that_it_always_had(serial: int, depth: int) -> None:
    published = Published(serial, record("p", 2), 5.0, 30.0, depth)
    raw = encode_record(published)
    assert decode_record(raw, "p", 2) == published
    assert len(msgspec.msgpack.decode(raw)) == (5 if depth else 4)
    beyond = msgspec.msgpack.encode((*msgspec.msgpack.decode(raw)[:4], DEEPEST + 1))
    assert decode_record(beyond, "p", 2) is None


NAME = "12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"
ROUNDED = ("progress", "device_s", "tokens_per_s", "loss")
AMOUNTS = st.floats(0.0, 1e9)


@given(
    st.builds(
        PeerRecord,
        peer=st.just(NAME),
        state=st.sampled_from(PeerState),
        stage=st.integers(0, 99),
        claimed_at=st.floats(0.0, 4e9),
        round=st.integers(0, 2**32),
        progress=st.floats(0.0, 1.0),
        device_s=AMOUNTS,
        tokens_per_s=AMOUNTS,
        loss=st.none() | AMOUNTS,
    )
)
def test_a_brief_record_has_what_decisions_read(whole: PeerRecord) -> None:
    short = brief(whole)
    for name in ("peer", "stage", "state", "round", "inner_steps", "samples", "may_serve", "moves_to"):
        assert getattr(short, name) == getattr(whole, name)
    assert abs(short.claimed_at - whole.claimed_at) <= 0.5
    assert (short.loss is None) == (whole.loss is None)
    for name in ROUNDED:
        assert (getattr(short, name) or 0.0) == pytest.approx(getattr(whole, name) or 0.0, rel=2.0**-NUMBER_BITS)
    assert brief(short) == short
    raw = encode_record(Published(1, short, 1e9, 120.0, 3))
    found = decode_record(raw, NAME, whole.stage)
    assert found is None or found.record == short, "it is one of those that were always read"


def test_a_brief_record_takes_a_hundred_and_sixty_bytes_at_most_and_its_last_evaluation_some_rounds() -> None:
    made = Evaluation(number=3, round=40, loss=3.1, margin=0.01, tokens=10**6, documents=10**4)
    whole = record(
        NAME,
        9,
        claimed_at=1.8e9 + 0.1,
        round=41,
        inner_steps=10**6,
        progress=0.123,
        samples=10**9,
        device_s=0.1,
        tokens_per_s=0.1,
        loss=3.1,
        waiting=(Wait(WaitCause.MICROBATCHES, 3.1, "x" * 200), Wait(WaitCause.OTHER, detail="y" * 200)),
        addresses=("/ip4/203.0.113.77/tcp/31337",) * 8,
        may_serve=(0, 1, 2, 3),
        moves_to=3,
        name="a name of twenty letters",
        given=Given(10**12, 10**8, 10**12, 10**12, 10**12),
    )
    assert len(encode_record(Published(10**13, brief(whole), 1.8e9 + 0.1, 120.0, 20))) <= 160
    assert brief(msgspec.structs.replace(whole, evaluation=made)).evaluation == made
    assert brief(msgspec.structs.replace(whole, evaluation=made, round=99)).evaluation is None


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=4))
def test_of_several_keys_the_newest_record_of_each_peer_counts(keys: list[dict[str, int]]) -> None:
    readings = [
        {peer: encode_record(Published(serial, record(peer))) for peer, serial in each.items()} for each in keys
    ]
    with pytest.MonkeyPatch.context() as patch:
        # A record is decoded where it is news, and not at each reading that finds an old version beside it.
        patch.setattr(stage_records, "decode_record", None)
        found = newest(readings)
    serials = {peer: cast(Published, decode_record(raw, peer, 0)).serial for peer, raw in found.items()}
    assert serials == {peer: max(each.get(peer, 0) for each in keys) for each in keys for peer in each}


# What is estimated.


def sample(replicas: int, listed: int, stages: int = 1, read_at: float = 0.0, **facts: Any) -> Roster:
    """A roster that lists a part of each stage."""
    found = [[record(f"s{stage}r{number:04}", stage, **facts) for number in range(listed)] for stage in range(stages)]
    return Roster(stages=tuple(map(tuple, found)), sizes=(StageSize(float(replicas), 0.1),) * stages, read_at=read_at)


@given(
    st.integers(0, 10**6),
    st.integers(150, 1000),
    st.sampled_from([0.0, 0.005, 0.05]),
    st.lists(st.floats(30.0, 180.0), min_size=20, max_size=40),
    st.floats(5.0, 100.0),
)
@settings(max_examples=25, deadline=None)
def test_samples_of_all_follow_from_readings_of_some(
    seed: int, replicas: int, churn: float, pauses_s: list[float], step_s: float
) -> None:
    """Sources are of unequal speed, publish once a minute, come and go; of the listed now and then half are exchanged.

    `churn`: the part of the sources that leaves and comes between two readings. `step_s`: of a step of four samples.
    """
    rng, work, now_s = Random(seed), SampledWork(4), 0.0
    born_s = dict.fromkeys(range(replicas), 0.0)
    paces = {number: 4.0 * rng.uniform(0.5, 1.5) / step_s for number in born_s}
    listed = set(rng.sample(sorted(born_s), 90))
    estimate = left = 0.0

    def samples(number: int, at_s: float) -> int:
        return int(paces[number] * max(0.0, at_s - born_s[number]))

    for reading, pause_s in enumerate([0.0, *pauses_s]):
        for number in rng.sample(sorted(born_s), round(churn * replicas) if reading else 0):
            left += samples(number, now_s - RENEWED_S / 2)
            newest = max(born_s) + 1
            born_s[newest], paces[newest] = now_s + rng.uniform(0.0, pause_s), paces[number]
            del born_s[number]
            # Those that come are as likely to be listed as others.
            listed = listed - {number} | ({newest} if rng.random() < 90 / replicas else set())
        if reading % 10 == 9:
            kept = set(rng.sample(sorted(listed), 45))
            listed = kept | set(rng.sample(sorted(born_s.keys() - kept), 45))
        now_s += pause_s
        records = []
        for number in sorted(listed):
            published_s = now_s - (now_s - number * RENEWED_S / replicas) % RENEWED_S
            records.append(record(f"{number}", samples=samples(number, published_s)))
        roster = Roster(stages=(tuple(records),), sizes=(StageSize(float(replicas), 0.1),), read_at=now_s)
        drawn, pace = work.take(roster)
        estimate += drawn
    done = left + sum(samples(number, now_s - RENEWED_S / 2) for number in born_s)
    assert estimate == pytest.approx(done, rel=0.15)
    assert pace == pytest.approx(sum(paces[number] for number in born_s), rel=0.25)


@given(st.lists(st.floats(1.0, 300.0), min_size=3, max_size=30), st.floats(0.001, 50.0), st.integers(100, 10**6))
@settings(max_examples=50)
def test_what_is_heard_late_counts_in_full(pauses_s: list[float], pace: float, replicas: int) -> None:
    """However seldom a sample is read, and however slow its sources are."""
    work, now_s, estimate = SampledWork(8), 0.0, 0.0
    for pause_s in [0.0, *pauses_s]:
        now_s += pause_s
        estimate += work.take(sample(replicas, 20, read_at=now_s, samples=int(pace * now_s)))[0]
    assert estimate == pytest.approx(replicas * int(pace * now_s))


@given(
    st.lists(st.tuples(st.integers(0, 10**4), st.sampled_from(PeerState)), min_size=3, max_size=20),
    st.integers(20, 100),
    st.floats(0.0, 0.49),
)
def test_sources_that_boast_count_up_to_twice_the_typical(
    says: list[tuple[int, PeerState]], listed: int, share: float
) -> None:
    """Whatever fewer than half of the listed sources say, and whether they say that they work."""
    work, pace, estimate, liars = SampledWork(8), 0.1, 0.0, int(share * listed)
    for reading, (samples, state) in enumerate(says):
        now_s = 60.0 * reading
        honest = [record(f"h{number}", samples=int(pace * now_s)) for number in range(listed - liars)]
        others = [record(f"l{number}", samples=samples, state=state) for number in range(liars)]
        roster = Roster(stages=((*honest, *others),), sizes=(StageSize(1000.0, 0.1),), read_at=now_s)
        drawn, _ = work.take(roster)
        assert drawn >= 0.0
        estimate += drawn
    share = liars / listed
    true = 1000.0 * int(pace * now_s)
    assert estimate <= true * (1.0 - share) + share * 1000.0 * (MOST_PACE * pace * now_s + 8) + 1e-6
    assert estimate >= true * (1.0 - share) - 1e-6


@pytest.mark.parametrize("pause", [1, 18])
async def test_a_source_estimates_how_far_the_run_is(pause: int) -> None:
    """Beyond shards nobody can add up claims: each adds up the pace of those it knows, and follows the others.

    `pause`: tens of seconds between two readings.
    """
    pace_s, replicas, budget = 12.0, 2000, 2000 * 100 * 8
    run = cast(
        Any,
        SimpleNamespace(
            budget_samples=budget, samples_per_step=8, pipeline=PipelineConfig(stages=2, replicas=replicas)
        ),
    )
    facts = {"issued": None, "receipts": ReceiptLedger(), "begin_counting": lambda: None}
    facts["sources_renewed_s"] = RENEWED_S
    begun_s = asyncio.get_running_loop().time()
    membership = cast(Any, SimpleNamespace(me="s0r0000", roster=sample(replicas, 90, 2, begun_s), **facts))
    counted, reached, loop = RunSamples(run, membership, reached=0, own=0), [], asyncio.get_running_loop()
    for reading in range(1, 119):
        await asyncio.sleep(10.0)
        told_s = max(0.0, 10.0 * reading - RENEWED_S / 2)
        read_at = begun_s + 10.0 * reading
        if reading % pause == 0:
            news = {"samples": int(8 * told_s / pace_s), "progress": min(1.0, told_s / (100 * pace_s))}
            membership.roster = sample(replicas, 90, 2, read_at, **news)
        reached.append(counted.progress(int(80.0 * reading / pace_s), loop.time()))
    assert reached == sorted(reached)
    assert max(after - before for before, after in pairwise(reached[40:])) < 0.04, "also while nothing is read"
    assert reached[-1] == pytest.approx(118 / 120, abs=0.04)
    ended = sample(replicas, 90, 2, begun_s + 1200.0, state=PeerState.FINISHED, progress=1.0)
    membership.roster = msgspec.structs.replace(ended, sources=90, sources_finished=90)
    assert (counted.progress(800, loop.time()) == 1.0) == (reached[-1] >= 0.95)
    assert believed_samples(run, membership.roster) == budget


@pytest.mark.parametrize("refresh_s", [5.0, 10.0, 20.0])
@pytest.mark.parametrize("depth", [0, 2])
async def test_a_source_that_knows_all_others_is_not_misled_by_names_at_a_later_stage(
    depth: int, refresh_s: float
) -> None:
    """Its estimate says how far the run is now, and not how far it will be.

    `depth`: that the names say. Those that say none are found by every second reading, so the roster is a sample by
    turns.
    """
    hub, loop, members = SimNetwork(WEATHER, seed=3), asyncio.get_running_loop(), dict[str, Membership]()
    places = {f"s{stage}r{number}": stage for stage in (0, 1) for number in range(4)}
    signers = {peer: IssuedReceipts(1) for peer, stage in places.items() if stage}
    tasks = set[asyncio.Task[Any]]()
    for peer, stage in places.items():
        network = hub.network(peer)
        members[peer] = Membership(network, "run", 2, refresh_s=refresh_s, unix_time=lambda: 1e9 + loop.time())
        members[peer].issued = signers.get(peer)
        await members[peer].claim(record(peer, stage, samples=not stage))
        tasks.add(asyncio.create_task(members[peer].run()))
    await asyncio.sleep(2 * refresh_s)
    me = members["s0r0"]
    pipeline, whole_s = PipelineConfig(stages=2), 400
    run = cast(Any, SimpleNamespace(budget_samples=32 * whole_s, samples_per_step=8, pipeline=pipeline))
    counted, was_sample, told = RunSamples(run, cast(Any, me), reached=0, own=0), set[bool](), 0.0
    for second in range(1, 301):
        if second == 60:
            for name in (f"x{number}" for number in range(200)):
                network = hub.network(name)
                raw = encode_record(Published(1, record(name, 1), 1e9 + loop.time(), 300.0, depth))
                for shard in written(name, depth):
                    await network.publish(shard.key("run/stage/1"), name, raw, 300.0)
        await asyncio.sleep(1.0)
        for peer, stage in places.items():
            if stage:
                me.receipts.prove(peer, 2)
                for source in range(4):
                    signers[peer].add(f"s0r{source}", 2)
            done = {"samples": 8 * second * (not stage), "inner_steps": second, "progress": second / whole_s}
            members[peer].update(record(peer, stage, round=1, **done))
        before, told = told, counted.progress(8 * second, loop.time())
        assert told >= before
        was_sample.add(me.roster.is_sample)
        # Receipts are published at every second refresh, and read as often.
        assert -4.0 * refresh_s <= whole_s * told - second <= 0.5 * refresh_s
    assert was_sample == {False, True}
    for task in tasks:
        task.cancel()


@given(st.floats(0.0, 1.0), st.floats(0.02, 0.3), st.integers(0, 90))
async def test_a_source_of_which_most_have_finished_ends_within_the_error_of_its_estimate(
    reached: float, error: float, finished: int
) -> None:
    run = cast(Any, SimpleNamespace(budget_samples=10**6, samples_per_step=8, pipeline=PipelineConfig(stages=2)))
    listed = [
        record(f"s0r{number}", state=PeerState.FINISHED if number < finished else PeerState.TRAINING)
        for number in range(90)
    ]
    roster = Roster(stages=(tuple(listed), ()), sizes=(StageSize(2000.0, error), None))
    roster = sampled(roster, roster.sizes, (loop_s(), loop_s()))
    told = {"issued": None, "receipts": ReceiptLedger(), "begin_counting": lambda: None}
    told["sources_renewed_s"] = RENEWED_S
    membership = cast(Any, SimpleNamespace(me="s0r89", roster=roster, **told))
    counted = RunSamples(run, membership, reached=round(reached * 10**6), own=0)
    may_end = round(reached * 10**6) * (1.0 + 2.0 * error) >= NEARLY_OVER * 10**6
    assert counted.is_over(0, loop_s()) == (may_end and 2 * finished > 90)


def test_capacities_count_those_that_are_not_listed() -> None:
    claims = claims_of(sample(6400, 80, 3))
    assert {claim.stands_for for claim in claims} == {80.0}
    whole = claims_of(msgspec.structs.replace(sample(80, 80, 3), sizes=()))
    assert {claim.stands_for for claim in whole} == {1.0}


@given(st.integers(10, 10**6), st.integers(0, 50))
def test_some_evaluate_where_nobody_knows_all(replicas: int, seed: int) -> None:
    listed = min(64, replicas)
    rng, known = Random(seed), listed / replicas
    peers = [f"{seed}-{number}" for number in range(listed)]
    rng.shuffle(peers)
    one = chosen("run", seed, peers, known)
    assert one in {None, chosen("run", seed, peers)}
    if known == 1.0:
        assert one is not None


def test_as_many_evaluate_as_were_meant() -> None:
    replicas, listed = 400, 50
    everybody = [f"peer {number}" for number in range(replicas)]
    rng, made = Random(1), []
    for number in range(20):
        seen = {me: [me, *rng.sample(everybody, listed - 1)] for me in everybody}
        made.append(sum(chosen("run", number, peers, listed / replicas) == me for me, peers in seen.items()))
    assert 0.5 * EVALUATORS < sum(made) / len(made) < 2.0 * EVALUATORS


def test_views_say_what_is_an_estimate() -> None:
    recipe = RunFileText(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "a test")
    roster = sample(24600, 90, 2, tokens_per_s=10.0, inner_steps=50, progress=0.5, round=5)
    roster = msgspec.structs.replace(roster, sizes=(StageSize(24600.0, 0.035), StageSize(90.0)))
    observer = RosterObserver(recipe.run, recipe.digest)
    view = observer.view(roster, 1e9)
    assert [stage.replicas for stage in view.stages] == [24600, 90]
    assert view.stages[0].tokens_per_s == pytest.approx(246_000.0)
    assert "0: ≈ 24,600 ± 7%, 1: 90" in line(view)
    assert "stage 0: ≈ 24,600 ± 7%" in "\n".join(lines(view))
    assert view.progress == pytest.approx(0.5, abs=0.01)
    # Each that tells what it has given stands for as many as tell nothing.
    gives = [
        msgspec.structs.replace(each, given=Given(100, 10, 1, 1)) if place % 9 == 0 else each
        for place, each in enumerate(roster.stages[0])
    ]
    told_view = observer.view(msgspec.structs.replace(roster, stages=(tuple(gives), roster.stages[1])), 1e9 + 5.0)
    assert told_view.given.tokens == 24600 * 100
    # Another sample is no news of anybody.
    others = [tuple(msgspec.structs.replace(each, peer=f"x{each.peer}") for each in stage) for stage in roster.stages]
    assert observer.view(msgspec.structs.replace(roster, stages=tuple(others)), 1e9 + 10.0).changes == ()
    assert "90 of ≈ 24,600 ± 7%" in picture(recipe, roster)
    told = json.loads(msgspec.json.encode(summary(recipe, roster, "invite")))
    assert told["replicas"] == [{"peers": 24600.0, "error": 0.035}, {"peers": 90.0, "error": 0.0}]


class Told:
    """A membership whose roster is made from what `others` do, as a sample of all peers or of everybody."""

    me, complete, sources_renewed_s = "s0r0", True, RENEWED_S

    def __init__(self, others: int, stages: int) -> None:
        self.counts, self.issued = RunProgress(self.me), None if stages > 1 else IssuedReceipts(1)
        self.receipts, self.others, self.stages = self.counts.receipts, others, stages
        self.signers = [IssuedReceipts(1) for _ in range(3)]
        self.done = dict.fromkeys((f"s0r{number}" for number in range(others + 1)), 0)
        self.roster = Roster(stages=((),) * stages)
        self.read(is_sample=False, progress=0.0)

    def begin_counting(self) -> None:
        self.counts.begin()
        if self.issued is not None:
            self.issued.begin()
        self.roster = msgspec.structs.replace(self.roster, other_sources=self.counts.other_sources())

    def work(self, samples: Mapping[str, int]) -> None:
        """Let each source have so many samples more, of which the last stage computes equal parts."""
        for peer, each in samples.items():
            self.done[peer] += each
            for number, signer in enumerate(self.signers):
                signer.add(peer, each // 3)
                if peer == self.me:
                    self.receipts.prove(f"s1r{number}", each // 3)

    def read(self, *, is_sample: bool, progress: float) -> None:
        now_s = loop_s()
        records = {
            peer: record(peer, samples=done, inner_steps=done // 6, progress=progress)
            for peer, done in self.done.items()
        }
        if is_sample:
            listed = {peer: each for place, (peer, each) in enumerate(records.items()) if place % 2 == 0}
            scale = len(records) / len(listed)
            self.counts.see(listed.values(), list(listed.values()), now_s)
            roster = roster_of(self.me, records[self.me], [listed, {}], self.counts.sources, now_s, None)
            sizes = (StageSize(scale * len(listed), 0.1), None)
            self.roster = sampled(roster, sizes, (now_s, now_s))
            return
        self.counts.see(records.values(), list(records.values()), now_s)
        self.receipts.take({f"s1r{number}": each.raw() for number, each in enumerate(self.signers)})
        told = self.counts.other_sources()
        self.roster = roster_of(self.me, records[self.me], [records, {}], self.counts.sources, now_s, None, told)


@given(st.lists(st.tuples(st.booleans(), st.integers(4, 12)), min_size=3, max_size=6), st.integers(4, 9))
@settings(max_examples=20)
async def test_a_source_counts_exactly_again_once_everybody_is_known(
    spans: list[tuple[bool, int]], others: int
) -> None:
    """Its progress never falls, and after each span of readings it is near to what was done in all."""
    told = Told(others, 2)
    budget = 10**6
    run = cast(Any, SimpleNamespace(budget_samples=budget, samples_per_step=6, pipeline=PipelineConfig(stages=2)))
    counted, shown = RunSamples(run, cast(Any, told), reached=0, own=0), [0.0]
    for is_sample, readings in spans:
        for _ in range(readings):
            for _ in range(10):
                await asyncio.sleep(6.0)
                told.work(dict.fromkeys(told.done, 60))
            true = sum(told.done.values())
            told.read(is_sample=is_sample, progress=true / budget)
            shown.append(counted.progress(told.done[told.me], loop_s()))
            assert counted._is_estimate == is_sample
        assert shown == sorted(shown)
        assert shown[-1] * budget == pytest.approx(true, rel=0.1, abs=10 * 60 * others), spans
