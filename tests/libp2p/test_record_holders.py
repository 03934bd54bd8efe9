"""Holders of records: readers find all living peers though nodes die, lie or come, and mostly ask one node."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import LAST_RESORT_S, PATIENT, RECORD_S

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import dht_records
from noloco_node.libp2p.dht_records import DhtRecords
from noloco_node.libp2p.hivemind_compat import load_hivemind
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.record_checks import RECORD_LIFETIME_S
from noloco_node.libp2p.record_holders import (
    HEARD_PAUSES,
    LONGEST_SEARCH_S,
    MORE_EVERY,
    SEARCH_S,
    SEARCHED,
    WITNESSED,
    WRITTEN,
    Holders,
)
from noloco_node.libp2p.settings import NetworkSettings, RunSecret, ensure_identity, peer_bytes
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.tasks import loop_s
from tests.explorer.memory_dht import MemoryDht, unix_s, virtual_time_of_day

KEY, REFRESH_S, LIFETIME_S = "run/stage/0", 10.0, 330.0
LOCAL = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture(autouse=True)
def virtual_clock() -> Iterator[None]:
    with virtual_time_of_day():
        yield


async def refresh(peers: dict[str, DhtRecords], number: int) -> dict[str, dict[str, bytes]]:
    """Have all peers publish and read once, in turn, as membership does; return what each has found."""
    found = {}
    for name, records in peers.items():
        await records.publish(KEY, name, str(number).encode(), LIFETIME_S)
        found[name] = dict(await records.read(KEY))
    await asyncio.sleep(REFRESH_S)
    return found


@given(st.integers(3, 20), st.sets(st.integers(0, 19), max_size=6), st.sets(st.integers(0, 19), max_size=6))
async def test_the_living_find_each_other_whoever_is_dead_or_lies(count: int, dead: set[int], liars: set[int]) -> None:
    """Dead nodes and liars stand nearest to the key, and there are no more of them than others."""
    dht = MemoryDht()
    peers = {f"peer {number}": dht.peer(f"peer {number}") for number in range(count)}
    order = dht.nearest(dht_records.place_of(KEY), count)[: (count + 1) // 2]
    dht.liars = {name for number, name in enumerate(order) if number in liars}
    dht.dead = {name for number, name in enumerate(order) if number in dead} - dht.liars
    living = {name: records for name, records in peers.items() if name not in dht.dead | dht.liars}
    for number in range(4):
        found = await refresh(living, number)
    assert all(living.keys() <= each.keys() for each in found.values())


async def life(records: DhtRecords, name: str, after_s: float) -> None:
    """Publish and read as membership does."""
    await asyncio.sleep(after_s)
    while True:
        await records.publish(KEY, name, str(loop_s()).encode(), LIFETIME_S)
        await records.read(KEY)
        await asyncio.sleep(REFRESH_S)


@settings(max_examples=40)
@given(st.integers(2, 12), st.floats(0.01, REFRESH_S - 0.01), st.sampled_from((0.0, 35.0, 170.0)))
async def test_of_two_processes_with_one_key_one_ends_and_the_other_goes_on(
    others: int, apart_s: float, after_s: float
) -> None:
    """Whenever the second one comes, also a moment later."""
    dht = MemoryDht()
    peers = {f"peer {number}": dht.peer(f"peer {number}") for number in range(others)}
    tasks = [asyncio.create_task(life(records, name, 0.0)) for name, records in peers.items()]
    twins = [dht.peer("twin"), dht.peer("twin")]
    begins_s = (after_s, after_s + apart_s)
    same = [asyncio.create_task(life(each, "twin", at_s)) for each, at_s in zip(twins, begins_s, strict=True)]
    await asyncio.sleep(400.0)
    ended = [task.exception() for task in same if task.done()]
    assert [error.code for error in ended if isinstance(error, UserError)] == [Exit.HOME_IN_USE], ended
    assert not any(task.done() for task in tasks), "the others have keys of their own"
    for task in (*tasks, *same):
        task.cancel()
    await asyncio.wait((*tasks, *same))


@settings(max_examples=40)
@given(st.integers(2, 12), st.sampled_from(["lost", "late", "dead"]), st.floats(-300.0, 300.0))
async def test_no_peer_takes_its_own_records_for_another_s(count: int, trouble: str, back_s: float) -> None:
    """Though its clock was set, and though nodes took its records and their answers were lost."""
    dht = MemoryDht()
    peers = {f"peer {number}": dht.peer(f"peer {number}") for number in range(count)}
    one = peers["peer 0"]
    node: Any = one._node
    store = node.store

    async def unheard(peer: str, place: bytes, subkey: str, packed: bytes, expiry: float) -> bool | None:
        await store(peer, place, subkey, packed, expiry)
        return {"lost": False, "late": None, "dead": True}[trouble]

    for number in range(3 * MORE_EVERY):
        node.store = unheard if number % 3 else store
        with patch.object(dht_records.CLOCK, "unix_s", lambda at=number: unix_s() + (back_s if at % 5 > 2 else 0.0)):
            await one.publish(KEY, "peer 0", str(number).encode(), LIFETIME_S)
        await refresh({name: each for name, each in peers.items() if name != "peer 0"}, number)
    # Another life of the same peer knows nothing of the first one.
    again = dht.peer("peer 0")
    for number in range(3 * MORE_EVERY):
        await refresh({"peer 0": again}, number)


@given(st.integers(3, 20), st.integers(1, 8), st.integers(0, 5))
async def test_the_nearest_nodes_hide_nobody_by_showing_each_peer_its_own_record(
    count: int, mirrors: int, known: int
) -> None:
    """Whether they come first or later; a newcomer sees all at once."""
    dht = MemoryDht()
    peers = {f"peer {number}": dht.peer(f"peer {number}") for number in range(count)}
    nearest = dht.nearest(dht_records.place_of(KEY), min(mirrors, (count + 1) // 2))
    for number in range(known):
        await refresh(peers, number)
    dht.mirrors = set(nearest)
    living = {name: records for name, records in peers.items() if name not in nearest}
    for number in range(2 * MORE_EVERY):
        found = await refresh(living, number)
    assert all(living.keys() <= each.keys() for each in found.values())
    newcomer = dht.peer("newcomer")
    assert living.keys() <= (await newcomer.read(KEY)).keys()


@given(st.integers(1, 30))
async def test_a_quiet_swarm_asks_one_node_a_reading(count: int) -> None:
    dht = MemoryDht()
    peers = {f"peer {number}": dht.peer(f"peer {number}") for number in range(count)}
    for number in range(WITNESSED + 1):
        await refresh(peers, number)
    dht.asked.clear()
    for number in range(MORE_EVERY):
        found = await refresh(peers, number)
    assert all(each.keys() == peers.keys() for each in found.values())
    holders = min(WRITTEN, count)
    witnesses = 1
    assert set(dht.asked.values()) == {MORE_EVERY - 1 + holders + (count > WRITTEN) + witnesses}
    assert sum(map(bool, dht.kept.values())) == min(SEARCHED, count)


@given(st.integers(WRITTEN + 1, 20), st.integers(0, WRITTEN - 1))
async def test_newer_versions_are_seen_though_a_node_answers_with_old_ones(count: int, place: int) -> None:
    dht = MemoryDht()
    peers = {f"peer {number}": dht.peer(f"peer {number}") for number in range(count)}
    await refresh(peers, 0)
    dht.frozen = {dht.nearest(dht_records.place_of(KEY), count)[place]}
    newest: dict[str, dict[str, bytes]] = {name: {} for name in peers}
    for number in range(1, 2 * MORE_EVERY):
        for reader, found in (await refresh(peers, number)).items():
            for name, version in found.items():
                newest[reader][name] = max(version, newest[reader].get(name, b""), key=lambda each: int(each or b"0"))
            assert min(map(int, newest[reader].values())) >= number - 2


@given(st.integers(2, 12), st.lists(st.booleans(), min_size=2, max_size=8), st.randoms(use_true_random=False))
async def test_newcomers_are_found_within_two_refreshes_and_the_dead_expire(
    count: int, comes: list[bool], random: Any
) -> None:
    dht = MemoryDht()
    peers = {f"peer {number}": dht.peer(f"peer {number}") for number in range(count)}
    for number, newcomer in enumerate(comes):
        await refresh(peers, number)
        if newcomer:
            name = f"newcomer {number}"
            peers[name] = dht.peer(name)
        elif len(peers) > 2:
            gone = random.choice(sorted(peers))
            del peers[gone]
            dht.dead.add(gone)
    for number in range(3):
        found = await refresh(peers, number)
    assert all(peers.keys() <= each.keys() for each in found.values())
    await asyncio.sleep(LIFETIME_S - 4 * REFRESH_S)
    for number in range(4):
        found = await refresh(peers, number)
    assert all(each.keys() == peers.keys() for each in found.values())


async def test_where_nobody_answers_the_reading_fails() -> None:
    dht = MemoryDht()
    dht.peer("other")
    dht.dead = {"other", "me"}
    with pytest.raises(ConnectionResetError, match="no node of the DHT answers"):
        await dht.peer("me").read(KEY)


async def test_a_search_is_repeated_when_it_is_old_or_the_neighbours_are_others() -> None:
    dht = MemoryDht()
    me = dht.peer("me")
    await me.read(KEY)
    holders = me._places[dht_records.place_of(KEY)]
    now_s = asyncio.get_running_loop().time()
    assert not holders.is_search_due(now_s + SEARCH_S / 2, 0)
    assert holders.is_search_due(now_s + SEARCH_S / 2, 1)
    assert holders.is_search_due(now_s + 2 * SEARCH_S, 0)


@given(st.floats(1.0, 2400.0), st.sampled_from(["well", "unheard", "lacking"]))
def test_nodes_near_a_place_are_searched_seldom_while_one_names_its_neighbours(pause_s: float, how: str) -> None:
    holders, begun_s = holders_of("bcd"), 1e5
    holders.note_search(peers_of("bcd"), begun_s, 3)
    for use in range(3):
        holders.next_reading(begun_s + use * pause_s)
        if how != "unheard":
            holders.note_named(*peers_of("b"), peers_of("c"), begun_s + use * pause_s)
    if how == "lacking":
        holders.suspect()
    heard_s = max(SEARCH_S, HEARD_PAUSES * pause_s)
    ends_s = (
        [heard_s] if how == "unheard" else [2 * pause_s + heard_s, SEARCH_S if how == "lacking" else LONGEST_SEARCH_S]
    )
    assert not holders.is_search_due(begun_s + 0.99 * min(ends_s), 3)
    assert holders.is_search_due(begun_s + 1.01 * min(ends_s), 3)
    if how != "unheard" and pause_s < SEARCH_S:
        # In time, so that no search is due at the next use.
        assert not holders.is_hearing_due(begun_s + 2 * pause_s + 0.99 * (SEARCH_S - pause_s))
        assert holders.is_hearing_due(begun_s + 2 * pause_s + 1.01 * (SEARCH_S - pause_s))


def holders_of(names: str) -> Holders:
    """Return the holders of a place by which peers lie as in the alphabet, the first of which were found."""
    holders = Holders(lambda peer: ord(str(peer)))
    holders.note_search(peers_of(names), 0.0, len(names))
    return holders


def peers_of(names: str) -> list[Any]:
    return list(names)


@given(st.sets(st.sampled_from("abcdefghijkl")), st.booleans())
def test_a_nearer_node_that_is_named_takes_its_place_once_it_answers(named: set[str], answers: bool) -> None:
    known = "dgjmnopqrstu"
    holders = holders_of(known)
    holders.next_reading(0.0)
    holders.note_named(*peers_of("g"), peers_of("".join(sorted(named))), 1.0)
    nearer = sorted(named - set("dgj"))
    nearer = [name for name in nearer if name < "j"][:WRITTEN]
    first, *rest = holders.next_reading(2.0)
    assert first == ["g", *nearer]
    assert sorted(peer for group in rest for peer in group) == ["d", *known[2:]]
    assert holders.next_writing(2.0)[0] == sorted([*known, *nearer])
    for name in peers_of("".join(nearer)):
        if answers:
            holders.note_answer(name)
        else:
            holders.note_silence(name, 3.0)
    expected = sorted([*known, *(nearer if answers else [])])[:SEARCHED]
    assert holders.order(3.0) == expected
    holders.note_named(*peers_of("g"), peers_of("".join(nearer)), 4.0)
    assert holders.order(4.0) == expected


def test_nodes_that_stay_do_not_become_the_only_ones_as_others_go() -> None:
    """Others take the places of those that have gone, or a search is due."""
    holders = holders_of("abcmnopqrstu")
    for name in peers_of("mn"):
        holders.note_silence(name, 1.0)
    holders.next_reading(2.0)
    holders.note_named(*peers_of("a"), peers_of("xyz"), 2.0)
    assert holders.next_reading(3.0)[0][1:] == ["x", "y", "z"]
    for name in peers_of("xy"):
        holders.note_answer(name)
    assert len(holders.order(4.0)) == SEARCHED
    assert not holders.is_search_due(SEARCH_S + 1.0, 12)
    for name in peers_of("opqr"):
        holders.note_silence(name, 5.0)
    assert not holders.is_search_due(6.0, 12)
    assert holders.is_search_due(SEARCH_S + 1.0, 12)
    assert {holders.next_teller(float(second)) for second in range(40, 48)} == set(holders.order(48.0))


def test_a_node_that_names_silent_ones_is_not_believed_until_the_next_search() -> None:
    holders = holders_of("xyz")
    holders.next_reading(0.0)
    for number, name in enumerate(peers_of("abc")):
        holders.note_named(*peers_of("x"), [name], float(number))
        holders.note_silence(name, float(number))
    holders.note_named(*peers_of("x"), peers_of("d"), 5.0)
    assert holders.next_writing(5.0)[0] == [*"xyz"]
    holders.note_named(*peers_of("y"), peers_of("e"), 5.0)
    assert holders.next_writing(5.0)[0] == [*"exyz"]
    holders.note_search(peers_of("xyz"), 6.0, 3)
    holders.note_named(*peers_of("x"), peers_of("d"), 6.0)
    assert holders.next_writing(6.0)[0] == [*"dxyz"]


def test_a_node_that_was_silent_is_asked_again_once_somebody_names_it() -> None:
    holders = holders_of("abcd")
    holders.note_silence(*peers_of("a"), 0.0)
    holders.note_named(*peers_of("b"), peers_of("a"), 1.0)
    assert holders.next_writing(1.0)[0] == [*"bcd"]
    holders.note_named(*peers_of("b"), peers_of("a"), 100.0)
    assert holders.next_writing(100.0)[0] == [*"abcd"]


async def test_a_search_that_finds_too_few_is_repeated_soon() -> None:
    """As after a minute in which the line was down: nobody answered, and the DHT leaves the silent out for a while."""
    dht = MemoryDht()
    peers = {name: dht.peer(name) for name in ("me", "other", "third")}
    cut_off, dht.kept = dht.kept, {}
    with pytest.raises(ConnectionResetError):
        await peers["me"].read(KEY)
    dht.kept = cut_off
    await asyncio.sleep(REFRESH_S)
    assert (await refresh(peers, 1))["third"].keys() == peers.keys()
    assert (await refresh(peers, 2))["me"].keys() == peers.keys()


def tried_keys(path: Path, place: bytes, count: int, settings: NetworkSettings) -> list[Path]:
    """Return identities whose nodes lie nearest to a place, of eight times as many that are tried."""
    secret, found = RunSecret(settings.run), []
    for number in range(8 * count):
        identity = path / str(number)
        ensure_identity(identity)
        peer = peer_bytes(identity)
        node = secret.code("node", peer)[: len(place)]
        found.append((int.from_bytes(node) ^ int.from_bytes(place), identity))
    return [identity for _, identity in sorted(found)[:count]]


@given(st.lists(st.floats(-1e5, 1e5), max_size=8), st.floats(1.0, 600.0))
async def test_a_clock_that_was_wrong_is_forgiven_as_soon_as_it_is_right(
    errors_s: list[float], lifetime_s: float
) -> None:
    """A node refuses what expires no later than the version that it has, and what expires too far in the future."""
    peer, held_s = MemoryDht().peer("me"), 0.0
    now_s = unix_s()

    async def store(place: bytes, subkey: str, packed: bytes, expiry: float) -> bool:
        nonlocal held_s
        taken = held_s < expiry <= now_s + RECORD_LIFETIME_S
        held_s = max(held_s, expiry) if taken else held_s
        return taken

    with patch.object(peer, "_store", store):
        for error_s in errors_s:
            with patch.object(dht_records, "CLOCK", SimpleNamespace(unix_s=lambda wrong_s=error_s: now_s + wrong_s)):
                await peer.publish(KEY, "me", b"", lifetime_s)
        assert await peer.publish(KEY, "me", b"", lifetime_s) or held_s > now_s + RECORD_LIFETIME_S - 1.0


@pytest.mark.network
async def test_six_nodes_beside_a_key_that_keep_nothing_hide_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With real daemons of the run: three say ids beside the key, and three have tried keys for such ids."""
    monkeypatch.setattr(dht_records, "CLOCK", CLOCK)
    load_hivemind()
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID

    honest_create, place = DHTNode.create, dht_records.place_of(KEY)
    async with asyncio.timeout(LAST_RESORT_S), AsyncExitStack() as networks:

        async def opened(*doors: str, identity: Path | None = None) -> Libp2pNetwork:
            settings = NetworkSettings(run="run", listen=(LOCAL,), bootstrap=doors, timeouts=PATIENT, identity=identity)
            return await networks.enter_async_context(Libp2pNetwork.open(settings))

        first = await opened()
        doors = tuple(await first.addresses())

        async def lie(identity: Path | None = None) -> str:
            liar = await opened(*doors, identity=identity)
            joined: Any = liar._joined
            joined.records._node.replace_store(lambda *_: True)
            return liar.peer_id

        by_keys = {await lie(each) for each in tried_keys(tmp_path, place, 3, NetworkSettings(run="run"))}
        by_ids = set[str]()
        for number in range(3):

            async def create(number: int = number, **options: Any) -> Any:
                beside = DHTID(int.from_bytes(place) ^ (number + 2))
                return await honest_create(**options | {"node_id": beside})

            monkeypatch.setattr(DHTNode, "create", create)
            by_ids.add(await lie())
        monkeypatch.setattr(DHTNode, "create", honest_create)
        members = [first, await opened(*doors), await opened(*doors)]
        everybody = {member.peer_id for member in members}
        for _ in range(3):
            found = []
            for member in members:
                assert await member.publish(KEY, member.peer_id, b"here", RECORD_S)
                found.append((await member.read(KEY)).keys())
        assert found == [everybody] * 3
        for member in members:
            records: Any = member._joined
            nearest = records.records._places[place].order(0.0)
            asked = {str(peer.to_base58()) for peer in nearest}
            assert asked & by_keys
            assert not asked & by_ids
