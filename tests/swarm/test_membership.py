"""The roster over a network in memory and virtual time: who appears, who leaves, and what strangers may write."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.cli.options import JoinOptions
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.sim.clock import VirtualLoop
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork, SimPeerNetwork
from noloco_node.swarm import stage_records
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.stage_records import (
    CLOCK_ERROR_S,
    CLOCK_S,
    LONGEST_LIFETIME_S,
    DhtRead,
    PeerTable,
    Published,
    decode_record,
    encode_record,
    is_doubtful,
)

RUN = "run"
WEATHER = NetworkConditions(latency=Latency(mean_s=0.05))


def record(peer: str, stage: int = 0, **facts: Any) -> PeerRecord:
    return PeerRecord(peer=peer, stage=stage, **({"state": PeerState.TRAINING} | facts))


def peers(roster: Roster) -> list[list[str]]:
    return [[record.peer for record in stage] for stage in roster.stages]


def present(hub: SimNetwork, peer: str, error_s: float = 0.0, stages: int = 2) -> tuple[SimPeerNetwork, Membership]:
    """Return a peer whose clock is wrong by so much."""
    network, loop = hub.network(peer), asyncio.get_running_loop()
    return network, Membership(network, RUN, stages, unix_time=lambda: 1e9 + loop.time() + error_s)


async def joined(
    hub: SimNetwork, peer: str, stage: int = 0, error_s: float = 0.0
) -> tuple[Membership, asyncio.Task[Any]]:
    """Return a peer that serves a stage, and the task that publishes its record and reads."""
    _, membership = present(hub, peer, error_s)
    await membership.claim(record(peer, stage))
    return membership, asyncio.create_task(membership.run())


def stored(serial: int, record: PeerRecord) -> bytes:
    """A record as `Membership` stores it."""
    return encode_record(Published(serial, record))


@pytest.mark.parametrize(
    "refresh_s", [60.0, get_args(get_type_hints(JoinOptions, include_extras=True)["refresh"])[1].max]
)
async def test_a_peer_that_publishes_seldom_is_believed_in_between_and_gone_in_the_end(refresh_s: float) -> None:
    hub, loop = SimNetwork(WEATHER), asyncio.get_running_loop()
    one, _ = await joined(hub, "a")
    _third, _running = await joined(hub, "c", 1)
    slow = Membership(hub.network("b"), RUN, 2, refresh_s=refresh_s, unix_time=lambda: 1e9 + loop.time())
    await slow.claim(record("b", 1))
    living = asyncio.create_task(slow.run())
    await asyncio.sleep(20.0)
    for _ in range(40):
        await asyncio.sleep(10.0)
        assert peers(one.roster) == [["a"], ["b", "c"]]
    hub.kill("b")
    living.cancel()
    await asyncio.sleep(LONGEST_LIFETIME_S + 20.0)
    assert peers(one.roster) == [["a"], ["c"]]


async def test_peers_appear_change_and_leave() -> None:
    hub = SimNetwork(WEATHER)
    _, one = present(hub, "a")
    _, other = present(hub, "b")
    assert peers(await one.claim(record("a", 0))) == [["a"], []]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(membership.run()) for membership in (one, other)]
        assert peers(await other.claim(record("b", 1))) == [["a"], ["b"]]
        while peers(one.roster) != [["a"], ["b"]]:
            await one.changed()
        # A change of state travels at once, other changes in the usual rhythm.
        other.update(record("b", 1, round=3, state=PeerState.FINISHED))
        begun = asyncio.get_running_loop().time()
        while not one.roster.stage(1) or one.roster.stage(1)[0].round != 3:
            await one.changed()
        assert one.roster.stage(1)[0].state is PeerState.FINISHED
        assert asyncio.get_running_loop().time() - begun < 12.0
        # Moving to another stage leaves no ghost; nor does leaving.
        await other.claim(record("b", 0))
        assert peers(await one.peek()) == [["a", "b"], []]
        await other.withdraw()
        assert peers(await one.peek()) == [["a"], []]
        await asyncio.sleep(60)
        assert peers(one.roster) == peers(other.roster) == [["a"], []]
        for task in tasks:
            task.cancel()


async def test_a_peer_that_dies_without_a_word_is_late_with_its_news_and_then_leaves_by_itself() -> None:
    hub = SimNetwork(WEATHER)
    one, _ = await joined(hub, "a")
    _, living = await joined(hub, "b", 1)
    _, visitor = present(hub, "v", -3000.0)
    for _ in range(40):
        await asyncio.sleep(2.5)
        await visitor.peek()
        assert visitor.news_age_s == {}
    assert peers(one.roster) == [["a"], ["b"]]
    living.cancel()
    hub.kill("b")
    await asyncio.sleep(15.0)
    assert peers(one.roster) == [["a"], ["b"]]
    await asyncio.sleep(10.0)
    assert peers(await visitor.peek()) == [["a"], ["b"]]
    _, late = present(hub, "w")
    await late.peek()
    assert list(late.news_age_s) == ["b"]
    assert late.news_age_s["b"] > 15.0
    await asyncio.sleep(30.0)
    assert peers(one.roster) == [["a"], []]


@pytest.mark.parametrize("copies_s", [12.0, 17.0, 33.0])
async def test_who_waits_for_a_newcomer_of_the_next_stage_sees_it_ready_soon(
    copies_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, now = SimNetwork(WEATHER), asyncio.get_running_loop().time
    network, one = present(hub, "a")
    _, other = present(hub, "b")
    looks, published = list[int](), list[str]()
    read_all, publish = network.read_all, network.publish

    async def noted(keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
        looks.extend(int(key[-1]) for key in keys if "/stage/" in key)
        return await read_all(keys)

    async def noted_too(key: str, subkey: str, raw: bytes, lifetime_s: float) -> bool:
        published.append(key)
        return await publish(key, subkey, raw, lifetime_s)

    monkeypatch.setattr(network, "read_all", noted)
    monkeypatch.setattr(network, "publish", noted_too)
    await one.claim(record("a", 0))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(membership.run()) for membership in (one, other)]
        await asyncio.sleep(1.0)
        await other.claim(record("b", 1, state=PeerState.CATCHING_UP))
        await asyncio.sleep(copies_s)
        other.update(record("b", 1))
        begun = now()
        while not one.roster.stage(1) or one.roster.stage(1)[0].state is PeerState.CATCHING_UP:
            await one.changed()
        assert now() - begun < 4.0
        # In peace it reads as seldom as ever, and it never published more often.
        await asyncio.sleep(20.0)
        looks.clear()
        await asyncio.sleep(30.0)
        assert 2 <= looks.count(1) <= 4
        assert len(published) < now() / 8.5 + 3
        for task in tasks:
            task.cancel()


async def test_others_read_soon_that_the_run_has_begun() -> None:
    hub = SimNetwork(WEATHER)
    one, running = await joined(hub, "a")
    _, newcomer = present(hub, "b")
    await asyncio.sleep(1.0)
    one.update(record("a", round=1))
    await asyncio.sleep(1.0)
    assert [each.round for each in (await newcomer.peek()).stage(0)] == [1], "long before the next usual record"
    running.cancel()


class Forgetful:
    """A network whose readings fail or come back empty while `blind`."""

    def __init__(self, network: SimPeerNetwork) -> None:
        self._network, self.blind, self.fails = network, False, False
        self.peer_id, self.publish = network.peer_id, network.publish
        self.talk, self.serve, self.statistics = network.talk, network.serve, network.statistics
        self.addresses = network.addresses

    async def read_all(self, keys: Sequence[str]) -> list[Mapping[str, bytes] | None]:
        if self.fails:
            return [None] * len(keys)
        return [{}] * len(keys) if self.blind else await self._network.read_all(keys)


@pytest.mark.parametrize("how", ["blind", "fails"])
@pytest.mark.parametrize("others", [1, 4])
async def test_trouble_of_our_own_empties_no_roster_and_is_marked(how: str, others: int) -> None:
    hub, loop = SimNetwork(WEATHER), asyncio.get_running_loop()
    network = Forgetful(hub.network("a"))
    one = Membership(network, RUN, 2, unix_time=lambda: 1e9 + loop.time())
    await one.claim(record("a", 0))
    names = [f"b{number}" for number in range(others)]
    living = [(await joined(hub, name, 1))[1] for name in names]
    living.append(asyncio.create_task(one.run()))
    await asyncio.sleep(25)
    assert peers(one.roster) == [["a"], names]
    assert one.roster.old_since_s is None
    setattr(network, how, True)
    since_s = loop.time()
    await asyncio.sleep(200)
    assert peers(one.roster) == [["a"], names], "they may well be there"
    assert one.roster.old_since_s == pytest.approx(since_s, abs=12.0)
    assert one.complete == (how != "fails")
    setattr(network, how, False)
    await asyncio.sleep(12)
    assert peers(one.roster) == [["a"], names]
    assert one.roster.old_since_s is None
    for task in living[1:others]:
        task.cancel()
    await asyncio.sleep(60)
    assert peers(one.roster) == [["a"], names[:1]], "with a clear sight the dead leave as ever"


async def test_a_peer_whose_record_nobody_takes_knows_since_when() -> None:
    hub, loop = SimNetwork(WEATHER), asyncio.get_running_loop()
    network, one = present(hub, "a")
    publish, takes = network.publish, True

    async def refused(key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        return takes and await publish(key, subkey, value, lifetime_s)

    network.publish = refused
    await one.claim(record("a"))
    task = asyncio.create_task(one.run())
    await asyncio.sleep(30.0)
    assert one.unlisted_since_s is None
    takes, since_s = False, loop.time()
    await asyncio.sleep(100.0)
    assert one.unlisted_since_s == pytest.approx(since_s, abs=12.0), "since the first publication that failed"
    takes = True
    await asyncio.sleep(12.0)
    assert one.unlisted_since_s is None
    task.cancel()


async def test_where_nobody_says_anything_new_for_minutes_all_are_gone_at_last() -> None:
    hub = SimNetwork(WEATHER)
    one, _ = await joined(hub, "a")
    for name in "bcd":
        await present(hub, name)[1].claim(record(name, 1))
    await asyncio.sleep(100)
    assert peers(one.roster) == [["a"], ["b", "c", "d"]], "nobody is heard: it may be us"
    assert one.roster.old_since_s is not None
    await asyncio.sleep(300)
    assert peers(one.roster) == [["a"], []]


async def test_who_is_left_behind_politely_is_alone_and_not_blind() -> None:
    hub = SimNetwork(WEATHER)
    one, _ = await joined(hub, "a")
    others = [await joined(hub, name, 1) for name in "bcd"]
    await asyncio.sleep(30)
    for other, task in others:
        task.cancel()
        await other.withdraw()
    for _ in range(30):
        await asyncio.sleep(11)
        assert peers(one.roster) == [["a"], []]
        assert one.roster.old_since_s is None


@given(st.lists(st.floats(-250.0, 250.0), min_size=4, max_size=6))
@settings(max_examples=15)
async def test_clocks_that_are_wrong_by_minutes_neither_hide_nor_immortalise_anybody(errors_s: list[float]) -> None:
    hub, names = SimNetwork(WEATHER), [f"p{number}" for number in range(len(errors_s))]
    living = [await joined(hub, name, 0, error_s) for name, error_s in zip(names, errors_s, strict=True)]
    await asyncio.sleep(40)
    for membership, _ in living:
        assert peers(membership.roster) == [names, []]
    living[0][1].cancel()
    hub.kill("p0")
    await asyncio.sleep(55)
    for membership, _ in living[1:]:
        assert peers(membership.roster) == [names[1:], []]
    # A newcomer is fooled by the record of the dead one for no longer than that.
    late, _ = await joined(hub, "late")
    await asyncio.sleep(55)
    assert peers(late.roster) == [["late", *names[1:]], []]


async def test_a_clock_that_is_set_back_a_day_costs_nobody_anything() -> None:
    hub, loop, error_s = SimNetwork(WEATHER), asyncio.get_running_loop(), [0.0]
    one = Membership(hub.network("a"), RUN, 2, unix_time=lambda: 1e9 + loop.time() + error_s[0])
    await one.claim(record("a", 0))
    running = asyncio.create_task(one.run())
    other, _ = await joined(hub, "b")
    for error_s[0] in (0.0, -86_400.0, 86_400.0, 0.0):
        for _ in range(12):
            await asyncio.sleep(5)
            assert peers(one.roster) == peers(other.roster) == [["a", "b"], []]
    running.cancel()


async def test_a_record_follows_the_address_of_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = SimNetwork(WEATHER)
    first, second, here = (("/ip4/" + host + "/tcp/4001/p2p/a",) for host in ("192.0.2.1", "192.0.2.2", "127.0.0.1"))
    network, one = present(hub, "a")
    now: list[tuple[str, ...]] = [here]

    async def addresses() -> tuple[str, ...]:
        if not now:
            raise ConnectionResetError("our own libp2p daemon is gone")
        return now[-1]

    monkeypatch.setattr(network, "addresses", addresses)
    await one.claim(record("a", 0))
    other, _ = await joined(hub, "b")
    running = asyncio.create_task(one.run())
    for found, expected in (([first], first), ([second], second), ([], second), ([()], second), ([here], second)):
        now[:] = found
        await asyncio.sleep(25)
        assert other.roster.stages[0][0].addresses == expected
    running.cancel()


async def test_a_machine_that_slept_declares_nobody_dead() -> None:
    hub, loop = SimNetwork(WEATHER), asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    one, _ = await joined(hub, "a")
    _others = [await joined(hub, name, 1) for name in "bcd"]
    await asyncio.sleep(30)
    # All timers are late by ten minutes; and all records have expired meanwhile.
    loop.jump(600.0)
    for _ in range(60):
        await asyncio.sleep(0.5)
        assert peers(one.roster) == [["a"], ["b", "c", "d"]]


async def test_an_old_record_that_somebody_repeats_is_no_news() -> None:
    hub = SimNetwork(WEATHER)
    _, one = present(hub, "a")
    network, _ = present(hub, "m")
    key = f"{RUN}/stage/0"
    await one.claim(record("a", 0))
    for serial, state in ((5, PeerState.TRAINING), (4, PeerState.LEAVING), (3, PeerState.FINISHED)):
        await network.publish(key, "m", stored(serial, record("m", 0, state=state)), 300.0 + 10 - serial)
        roster = await one.peek()
        assert [record.state for record in roster.stage(0)] == [PeerState.TRAINING] * 2


@given(st.lists(st.sampled_from([None, 1, 2]), min_size=40, max_size=40))
def test_a_dead_peer_is_believed_once_whichever_version_of_its_record_each_reading_finds(
    found: list[int | None],
) -> None:
    table, lifetime_s, every_s = PeerTable(30.0), 30.0, 10.0
    versions = {serial: Published(serial, record("m"), 1e9 + serial) for serial in (1, 2)}
    believed = []
    for number, serial in enumerate([2, *found]):
        at_s = number * every_s
        reading = DhtRead(at_s, 1e9 + at_s, youngest_at=1e9 + at_s, ages=True)
        known = table.known.get("m")
        raws = {} if serial is None or at_s > lifetime_s + CLOCK_ERROR_S else {"m": encode_record(versions[serial])}
        is_news = bool(raws) and (known is None or versions[serial or 0].serial > known.published.serial)
        table.take({"m": versions[serial or 0]} if is_news else {}, raws, reading)
        believed.append("m" in table.believed)
    assert believed == [at * every_s < lifetime_s for at in range(len(believed))]
    assert not table.known, "it is forgotten once the DHT has nothing of it"


def test_names_without_end_are_not_remembered_for_longer_than_they_are_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_records, "MOST_RECORDS", at_once := 64)
    table, lifetime_s, every_s = PeerTable(30.0), 30.0, 10.0
    for number in range(60):
        news = {f"{number}.{name}": Published(1, record("m"), 1e9 + number) for name in range(at_once)}
        reading = DhtRead(number * every_s, 1e9, youngest_at=1e9, ages=True)
        table.take(news, dict.fromkeys(news, b""), reading)
        assert len(table.known) <= (1 + lifetime_s / every_s) * at_once


@given(st.floats(0.0, 1e4), st.floats(-500.0, 500.0), st.floats(-500.0, 500.0))
def test_a_first_record_is_doubted_only_if_two_clocks_say_so(age_s: float, ours_s: float, youngest_s: float) -> None:
    now_s = 1e6
    reading = DhtRead(now_s=0.0, unix_s=now_s + ours_s, youngest_at=now_s + youngest_s, ages=True)
    doubted = is_doubtful(now_s - age_s, reading, 30.0)
    assert doubted == (age_s + ours_s > 30.0 + CLOCK_S and age_s + youngest_s > 30.0 + CLOCK_S)
    assert not is_doubtful(0.0, reading, 30.0), "it says no time"


@given(st.floats(0.0, 59.0), st.floats(-CLOCK_S, 0.0), st.lists(st.floats(-CLOCK_S, CLOCK_S), max_size=4))
@settings(max_examples=10)
async def test_who_looks_at_a_stage_for_once_sees_peers_whose_clock_is_a_minute_behind(
    when_s: float, error_s: float, errors_s: list[float]
) -> None:
    hub = SimNetwork(WEATHER)
    living = [await joined(hub, f"p{number}", 0, each) for number, each in enumerate([error_s, *errors_s])]
    await asyncio.sleep(60.0 + when_s)
    _, mover = present(hub, "mover")
    assert peers(await mover.peek([0])) == [[f"p{number}" for number in range(len(living))], []]


async def test_samples_outlive_their_sources_and_never_shrink() -> None:
    hub = SimNetwork(WEATHER)
    _, one = present(hub, "a")
    _, other = present(hub, "b")
    await one.claim(record("a", 0, samples=100))
    await other.claim(record("b", 0, samples=50))
    roster = await one.peek()
    assert (roster.run_samples, roster.own_samples) == (150, 100)
    assert (roster.sources, roster.sources_finished) == (2, 0)
    other.update(record("b", 0, samples=60, state=PeerState.FINISHED))
    await other.withdraw()
    roster = await one.peek()
    assert (roster.run_samples, roster.sources, roster.sources_finished) == (160, 2, 1)
    assert peers(roster) == [["a"], []]
    # A newcomer learns of it for minutes; who knew it does not forget. The record of "a", of whom nothing is heard
    # any more, has expired: it neither ends the run nor holds it up.
    await asyncio.sleep(400)
    _, late = present(hub, "c")
    roster = await late.peek()
    assert (roster.run_samples, roster.sources, roster.sources_finished) == (160, 1, 1)
    await asyncio.sleep(1000)
    assert (await one.peek()).run_samples == 160
    # Whoever comes back is known by its old count, and cannot lower it.
    hub.kill("b")
    _, again = present(hub, "b")
    await again.claim(record("b", 0, samples=10))
    assert (await one.peek()).run_samples == 160


def test_a_record_says_where_its_own_peer_is_and_nobody_else() -> None:
    direct, circuit = "/ip4/192.0.2.1/tcp/4001", "/ip4/192.0.2.1/tcp/4001/p2p/relay/p2p-circuit"
    own = (f"{direct}/p2p/m", f"{circuit}/p2p/m")
    found = decode_record(stored(1, record("m", addresses=(*own, f"{direct}/p2p/other"))), "m", 0)
    assert (found.record.peer, found.record.addresses) == ("m", own)
    assert b"/p2p/m" not in stored(1, record("m", addresses=own))


BAD_RECORDS = {
    "not MessagePack": b"\xc1garbage",
    "a record of another peer": msgspec.msgpack.encode(Published(1, record("b", 0))),
    "a record of another stage": stored(1, record("m", 1)),
    "a number that is none": stored(1, record("m", 0, device_s=float("nan"))),
    "infinite speed": stored(1, record("m", 0, tokens_per_s=float("inf"))),
    "negative speed": stored(1, record("m", 0, device_s=-1.0)),
    "progress beyond the end": stored(1, record("m", 0, progress=1.5)),
    "a negative round": stored(1, record("m", 0, round=-1)),
    "an absurd count": stored(1, record("m", 0, samples=2**60)),
    "too long": stored(1, record("m", 0, budget="x" * 5000)),
    "a wait of too many words": stored(1, record("m", 0, waiting=(Wait(WaitCause.OTHER, detail="x" * 201),))),
    "a wait since long ago": stored(1, record("m", 0, waiting=(Wait(WaitCause.ROOM, 1e10),))),
    "too many waits": stored(1, record("m", 0, waiting=5 * (Wait(WaitCause.ROOM),))),
    "an unknown wait": stored(1, record("m", 0, waiting=({"cause": "boredom"},))),
    "an unknown state": stored(1, record("m", 0, state="bored")),
    "no record at all": msgspec.msgpack.encode([1, 2, 3]),
}


@pytest.mark.parametrize("raw", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
async def test_what_strangers_write_is_checked(raw: bytes) -> None:
    hub = SimNetwork(WEATHER)
    stranger, _ = present(hub, "m")
    _, one = present(hub, "a")
    assert await stranger.publish(f"{RUN}/stage/0", "m", raw, 30.0)
    assert peers(await one.claim(record("a", 0))) == [["a"], []]
    assert await stranger.publish(f"{RUN}/stage/0", "m", stored(2, record("m", 0)), 31.0)
    assert peers(await one.peek()) == [["a", "m"], []]


@given(st.binary(max_size=60), st.sampled_from(["stage/0", "stage/1", "sources"]))
async def test_random_records_harm_nobody(raw: bytes, key: str) -> None:
    hub = SimNetwork(WEATHER)
    stranger, _ = present(hub, "m")
    _, one = present(hub, "a")
    await stranger.publish(f"{RUN}/{key}", "m", raw, 30.0)
    roster = await one.claim(record("a", 0))
    assert peers(roster) == [["a"], []]
    assert roster.run_samples <= 2**53


async def test_a_flood_of_records_is_bounded_and_the_known_stay() -> None:
    hub = SimNetwork(NetworkConditions(latency=Latency(mean_s=0.0)))
    _, one = present(hub, "z")
    _, other = present(hub, "y")
    await other.claim(record("y", 0))
    await one.claim(record("z", 0))
    for number in range(5000):
        name = f"a{number:05}"
        hub.dht.publish((f"{RUN}/stage/0", name), (stored(1, record(name, 0)), 300.0), 0.0, side=None)
    roster = await one.peek()
    assert len(roster.stage(0)) <= 4097
    assert {"y", "z"} <= {record.peer for record in roster.stage(0)}


async def test_mistakes_of_our_own_are_raised_and_a_lost_network_is_not() -> None:
    hub = SimNetwork(WEATHER)
    _, one = present(hub, "a")
    with pytest.raises(ValueError, match="claim"):
        one.update(record("a", 0))
    with pytest.raises(ValueError, match="4096 are allowed"):
        await present(hub, "b")[1].claim(record("b", 0, budget="x" * 5000))
    await one.claim(record("a", 1, samples=5))
    assert (await one.peek()).sources == 0, "only at stage 0 a peer is a source"
    hub.kill("a")
    await one.withdraw()
    assert peers(await one.peek()) == [[], []]


async def test_what_is_forged_in_another_s_name_is_believed_by_nobody() -> None:
    hub = SimNetwork(WEATHER)
    _, one = present(hub, "a")
    _, other = present(hub, "b")
    stranger, _ = present(hub, "m")
    await one.claim(record("a", 0, samples=100))
    await other.claim(record("b", 0, samples=10))
    before = await one.peek()
    # That "b" left, that it finished, that there is one more: each would end the run or keep it from its end.
    gone = stored(10**12, record("b", 0, state=PeerState.LEAVING))
    more = stored(10**12, record("c", 0))
    finished = msgspec.msgpack.encode((2**50, True))
    for key, name, raw in (("stage/0", "b", gone), ("stage/0", "c", more), ("sources", "b", finished)):
        assert not await stranger.publish(f"{RUN}/{key}", name, raw, 600.0)
    after = await one.peek()
    assert msgspec.structs.replace(after, read_at=0.0) == msgspec.structs.replace(before, read_at=0.0)
    assert hub.statistics()["records.forged"] == 3


async def test_a_peer_at_work_reads_only_the_stages_that_it_has_to_do_with() -> None:
    hub = SimNetwork(WEATHER)
    one = Membership(hub.network("a"), RUN, 4)
    for stage, name in enumerate("bcde"):
        await Membership(hub.network(name), RUN, 4).claim(record(name, stage, samples=10))
    assert peers(await one.claim(record("a", 2))) == [["b"], ["c"], ["a", "d"], ["e"]]
    one.focus((2, 3))
    roster = await one.peek()
    assert peers(roster) == [["b"], [], ["a", "d"], ["e"]]
    assert one.complete
    assert (roster.run_samples, roster.sources) == (10, 1), "the sources count for everybody"
    one.focus(range(4))
    assert one.watched == (0, 2, 3), "of stage 1 nothing is known yet: nobody may call it deserted"
    assert peers(await one.peek()) == [["b"], ["c"], ["a", "d"], ["e"]]
    assert one.watched == (0, 1, 2, 3)
    one.focus((2, 3))
    looking = asyncio.create_task(one.peek(range(4)))
    await asyncio.sleep(0.0)
    assert one.watched == (0, 2, 3)
    assert peers(await looking) == [["b"], ["c"], ["a", "d"], ["e"]]
    assert one.watched == (0, 2, 3), "a look for once changes nothing"
    assert peers(await one.peek()) == [["b"], [], ["a", "d"], ["e"]]
