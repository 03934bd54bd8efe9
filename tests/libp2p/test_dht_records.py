"""Signed records: whose they are, what a stranger may store, and what a reader believes of an answer."""

import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import LAST_RESORT_S, PATIENT, RECORD_S

from noloco_node.libp2p import dht_records, record_checks
from noloco_node.libp2p.dht_records import next_expiry
from noloco_node.libp2p.hivemind_compat import DhtNode, load_hivemind
from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.record_checks import (
    MOST_KEYS_OF_ONE,
    BoundedStorage,
    Signatures,
    Signer,
    chosen,
    content_of,
    has_our_form,
    keep_believed,
    place_of,
    read_signer,
)
from noloco_node.libp2p.settings import NetworkSettings, RunSecret, ensure_identity, peer_bytes

KEY = "run/stage/0"
PLACE = place_of(KEY)


class Identity:
    """A peer of whom a key file was made."""

    def __init__(self, path: Path) -> None:
        ensure_identity(path)
        signer, raw = read_signer(path), peer_bytes(path)
        assert signer is not None
        self.signer: Signer = signer
        self.name = str(load_hivemind().PeerID(raw).to_base58())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Identity, Identity]:
    home = tmp_path_factory.mktemp("identities")
    return Identity(home / "one"), Identity(home / "other")


@pytest.fixture(scope="module")
def one_s_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "one"
    ensure_identity(path)
    return path


@given(st.binary(max_size=300), st.integers(0), st.integers(1, 255))
def test_a_record_is_its_peer_s_at_its_place_to_the_last_bit(
    two: tuple[Identity, Identity], content: bytes, where: int, change: int
) -> None:
    one, other = two
    value = one.signer.signed(PLACE, 7.0, content)
    assert content_of(PLACE, one.name, 7.0, value) == content
    assert content_of(PLACE, other.name, 7.0, value) is None, "another's subkey"
    assert content_of(place_of("run/stage/1"), one.name, 7.0, value) is None, "another place"
    assert content_of(PLACE, one.name, 7.5, value) is None, "another expiry"
    assert content_of(PLACE, one.name, 7.0, content) in (None, content[64:]), "unsigned"
    spoiled = bytearray(value)
    spoiled[where % len(spoiled)] ^= change
    assert content_of(PLACE, one.name, 7.0, bytes(spoiled)) is None
    assert content_of(PLACE, one.name, 7.0, value[:-1]) is None


@given(content=st.binary(max_size=20), expiry=st.floats(0.0, 2.0**32))
def test_no_other_cut_of_the_same_bytes_has_the_verdict_of_a_record(
    two: tuple[Identity, Identity], content: bytes, expiry: float
) -> None:
    one, _ = two
    value = one.signer.signed(PLACE, expiry, content)
    told = PLACE + struct.pack("!d", expiry) + value
    for cut in range(len(PLACE) + len(value)):
        if cut != len(PLACE):
            (forged,) = struct.unpack("!d", told[cut : cut + 8])
            assert content_of(told[:cut], one.name, forged, told[cut + 8 :]) is None
    assert content_of(PLACE, one.name, expiry, value) == content
    assert content_of(PLACE, one.name[:-1], expiry, value) is None
    assert content_of(PLACE, one.name[1:], expiry, one.name[:1].encode() + value) is None


def test_what_is_remembered_of_signatures_is_bounded(two: tuple[Identity, Identity]) -> None:
    one, _ = two
    value = one.signer.signed(PLACE, 7.0, b"kept")
    for number in range(record_checks.VERDICTS + 10):
        assert content_of(PLACE, one.name, float(number + 8), value) is None
    assert len(record_checks._known) == record_checks.VERDICTS
    assert content_of(PLACE, one.name, 7.0, value) == b"kept"


def test_a_record_that_may_not_be_looked_at_counts_as_none_however_well_it_is_known(
    two: tuple[Identity, Identity],
) -> None:
    """One record a thousand times in a request for storage costs as much as a thousand records."""
    one, _ = two
    expiry = time.time() + RECORD_S
    value = msgspec.msgpack.encode(one.signer.signed(PLACE, expiry, b"kept"))
    record = SimpleNamespace(key=PLACE, subkey=msgspec.msgpack.encode(one.name), value=value, expiration_time=expiry)
    assert Signatures().validate(record)
    verdicts = len(record_checks._known)
    left = [True] * 3
    signatures = Signatures(may_look=lambda: bool(left) and left.pop())
    assert [signatures.validate(record) for _ in range(6)] == [True] * 3 + [False] * 3
    assert not Signatures(may_look=lambda: False).validate(SimpleNamespace(**vars(record) | {"key": b"another"}))
    assert len(record_checks._known) == verdicts, "nothing has driven a verdict out"


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6), st.data())
async def test_a_version_that_is_refused_late_takes_nothing_from_a_later_one(
    one_s_file: Path, versions: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """Publications of one record may overlap: what others have taken is what counts."""

    async def bounded(call: Coroutine[Any, Any, bool], wait_s: float) -> bool:
        return await call

    control: Any = SimpleNamespace(bounded=bounded)
    records = dht_records.DhtRecords(control, one_s_file, RunSecret("run"), NetworkSettings(run="run"))
    answers, taken = list[asyncio.Future[bool]](), [0.0]

    async def store(place: bytes, subkey: str, packed: bytes, expiry: float) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        answers.append(answer)
        took = await answer
        if took:
            taken.append(expiry)
        return took

    records._store = store  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        for minutes, _ in versions:
            group.create_task(records.publish(KEY, "me", b"", 60.0 * minutes))
        await asyncio.sleep(0.0)
        for number in data.draw(st.permutations(range(len(versions)))):
            answers[number].set_result(versions[number][1])
            await asyncio.sleep(0.0)
    assert records._expiry[KEY, "me"] >= max(taken)


@given(st.integers(0, 2 * record_checks._ALL_BYTES))
async def test_a_node_however_full_hands_over_to_a_new_neighbour_every_half_minute(
    one_s_file: Path, size_bytes: int
) -> None:
    """One that never did would leave an honest newcomer without records until they are published again."""
    nothing: Any = None
    records = dht_records.DhtRecords(nothing, one_s_file, RunSecret("run"), NetworkSettings(run="run"))
    kept: Any = SimpleNamespace(size_bytes=size_bytes)
    records._kept = kept
    for _ in range(3):
        assert records._may_hand_over()
        await asyncio.sleep(dht_records.READ_BYTES / dht_records.READ_BYTES_PER_S)


@given(st.text(max_size=80))
def test_what_is_no_peer_id_signs_nothing(name: str) -> None:
    assert content_of(PLACE, name, 7.0, bytes(200)) is None


@pytest.mark.parametrize("size", [1, 128, 134, 2**20])
def test_no_record_has_a_long_subkey(size: int) -> None:
    subkey, value = map(msgspec.msgpack.encode, ("s" * size, bytes(200)))
    record = SimpleNamespace(key=PLACE, subkey=subkey, value=value, expiration_time=time.time() + RECORD_S)
    assert has_our_form(record) == (size <= 128)


@given(st.text(max_size=300))
def test_the_place_is_where_hivemind_files_a_key(key: str) -> None:
    load_hivemind()
    from hivemind.dht.routing import DHTID

    assert place_of(key) == DHTID.generate(source=key).to_bytes()


@given(st.sets(st.text(max_size=8)), st.sets(st.text(max_size=8)), st.integers(1, 5), st.binary(max_size=4))
def test_of_too_many_the_known_come_first(found: set[str], known: set[str], most: int, salt: bytes) -> None:
    taken = chosen(sorted(found), known, salt, most)
    assert len(taken) == min(len(found), most)
    assert set(taken) <= found
    assert len(known & set(taken)) == min(len(known & found), most)


@given(st.floats(0.0, 2e9), st.floats(1.0, 3600.0), st.floats(0.0, 2e9))
def test_an_expiry_never_falls_as_long_as_others_take_it(before: float, lifetime_s: float, unix_s: float) -> None:
    expiry = next_expiry(before, lifetime_s, unix_s)
    assert expiry >= unix_s + lifetime_s
    assert expiry <= unix_s + 3601.0
    assert expiry > before or before >= unix_s + 3600.0


def record(subkey: str, value: bytes, expiry: float) -> Any:
    packed = msgspec.msgpack.encode
    return SimpleNamespace(key=PLACE, subkey=packed(subkey), value=packed(value), expiration_time=expiry)


def test_only_signed_records_of_our_form_are_stored(two: tuple[Identity, Identity]) -> None:
    one, other = two
    soon = time.time() + RECORD_S
    value = one.signer.signed(PLACE, soon, b"content")
    good = record(one.name, value, soon)

    def changed(**fields: Any) -> Any:
        return SimpleNamespace(**vars(good) | fields)

    assert Signatures().validate(good)
    for wrong in (
        record(other.name, value, soon),
        record("me", value, soon),
        record(one.name, b"content", soon),
        record(one.name, value, soon + 60.0),
        record(one.name, one.signer.signed(PLACE, -1e10, b"content"), -1e10),
        record(one.name, one.signer.signed(PLACE, soon + 1e5, b"content"), soon + 1e5),
        changed(key=place_of("run/stage/1")),
        changed(value=value),
        *(changed(subkey=subkey) for subkey in (b"\xc0", b"\xa1")),
        *(changed(value=raw) for raw in (b"\x01", b"\xc1", b"\xc5\xff\xff" + bytes(65535))),
        changed(expiration_time=float("nan")),
    ):
        assert not Signatures().validate(wrong)


def test_a_bad_record_in_an_answer_does_not_spoil_the_good_ones(two: tuple[Identity, Identity]) -> None:
    load_hivemind()
    from hivemind.dht.storage import DictionaryDHTValue

    one, other = two
    soon = time.time() + RECORD_S
    good = msgspec.msgpack.encode(one.signer.signed(PLACE, soon, b"good"))
    found = DictionaryDHTValue()
    found.store(one.name, good, soon)
    found.store(other.name, good, soon + 1.0)
    for later_s, subkey in enumerate(("me", 7, "\udcff", "x" * 200), start=2):
        found.store(subkey, b"\xc4\x01x", soon + later_s)
    keep_believed(PLACE, found, Signatures(), frozenset(), b"salt")
    assert {subkey: entry.value for subkey, entry in found.items()} == {one.name: good}
    assert found.latest_expiration_time == soon
    keep_believed(PLACE, found, Signatures(lambda *_: False), frozenset(), b"salt")
    assert not dict(found.items()), "what is not accepted is not believed either"


def hivemind_storage() -> tuple[Any, Any]:
    """Return hivemind's class of an id in the DHT, and a storage of it."""
    load_hivemind()
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage

    return DHTID, DHTLocalStorage()


def test_no_more_is_kept_under_a_key_than_fits_into_an_answer() -> None:
    dht_id, storage = hivemind_storage()
    key, soon, store = dht_id.generate(source=KEY), time.time() + RECORD_S, BoundedStorage(storage).store
    taken = [store(key, str(number), bytes(2**20 // 2), soon) for number in range(6)]
    assert taken == [True] * 4 + [False] * 2
    assert store(key, "0", b"small", soon + 1.0), "who is in may speak again"
    taken = [store(key, f"small {number}", b"x", soon) for number in range(3000)]
    assert sum(taken) == 2048 - 4


def test_nobody_drives_a_record_out_or_ends_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_checks, "_MOST_KEYS", 1024)
    dht_id, storage = hivemind_storage()
    key, soon = dht_id.generate(source=KEY), time.time() + RECORD_S
    assert storage.get(int.from_bytes(PLACE)) is None
    store = BoundedStorage(storage).store
    assert store(key, "one", b"last", soon)
    assert not store(key, "one", b"repeated", time.time() + 0.01)
    taken = [store(dht_id(number), "x", b"x", soon + 900.0) for number in range(1500)]
    assert taken == [True] * MOST_KEYS_OF_ONE + [False] * (1500 - MOST_KEYS_OF_ONE), "one identity has a share"
    taken = [store(dht_id(number), f"{number // 100}", b"x", soon + 900.0) for number in range(200, 1500)]
    assert taken == [True] * (1023 - MOST_KEYS_OF_ONE) + [False] * (len(taken) - 1023 + MOST_KEYS_OF_ONE)
    assert all(store(key, "one", b"next", soon + number) for number in range(1, 1000))
    kept = storage.get(int.from_bytes(PLACE)).value
    assert kept.get("one").value == b"next"
    assert len(kept.expiration_heap) < 100


def test_a_record_costs_no_more_where_there_are_more_keys() -> None:
    dht_id, storage = hivemind_storage()
    soon, looks, get = time.time() + RECORD_S, list[object](), storage.get

    def counted(key: object) -> Any:
        looks.append(key)
        return get(key)

    storage.get = counted
    store = BoundedStorage(storage).store
    for number in range(3 * MOST_KEYS_OF_ONE):
        looks.clear()
        assert store(dht_id(number), "one", b"x", soon) == (number < MOST_KEYS_OF_ONE)
        assert len(looks) <= 2


def test_a_peer_has_room_again_for_each_record_that_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    dht_id, storage = hivemind_storage()
    begin_s, timed = time.time(), sys.modules["hivemind.utils.timed_storage"]
    store = BoundedStorage(storage).store
    taken = [store(dht_id(number), "one", b"x", begin_s + 100.0 + number) for number in range(MOST_KEYS_OF_ONE)]
    assert all(taken)
    assert store(dht_id(0), "one", b"next", begin_s + 1000.0)
    for number in range(1, 20):
        monkeypatch.setattr(timed, "get_dht_time", lambda at=begin_s + 100.5 + number: at)
        assert store(dht_id(1000 + number), "one", b"x", begin_s + 2000.0)
        assert not store(dht_id(2000 + number), "one", b"x", begin_s + 2000.0)


def test_all_that_is_kept_together_is_bounded() -> None:
    dht_id, storage = hivemind_storage()
    soon = time.time() + RECORD_S
    store, value = BoundedStorage(storage).store, bytes(2**19)
    taken = sum(store(dht_id(number // 3), str(number % 3), value, soon) for number in range(300))
    assert 2**27 - 2**21 < taken * len(value) <= 2**27
    assert store(dht_id(0), "0", value, soon + 1.0), "who is in may speak again"


@pytest.mark.network
async def test_a_forged_record_is_neither_stored_by_others_nor_believed() -> None:
    alone = NetworkSettings(run="run", listen=("/ip4/127.0.0.1/tcp/0",), timeouts=PATIENT)
    async with asyncio.timeout(LAST_RESORT_S), Libp2pNetwork.open(alone) as one:
        joining = msgspec.structs.replace(alone, bootstrap=tuple(await one.addresses()))
        async with Libp2pNetwork.open(joining) as forger:
            node = forger._joined.records._node._node
            assert await one.publish(KEY, one.peer_id, b"true", RECORD_S)
            assert await forger.publish(KEY, forger.peer_id, b"also true", RECORD_S)
            assert not await node.store(KEY, b"forged", time.time() + 2 * RECORD_S, subkey=one.peer_id)
            # A peer with another program keeps what it likes, and answers with it.
            node.protocol.record_validator = None
            await node.store(KEY, b"forged", time.time() + 2 * RECORD_S, subkey=one.peer_id)
            await node.store(KEY, b"invented", time.time() + 2 * RECORD_S, subkey="nobody")
            theirs = await node.get(KEY, latest=True)
            assert {"nobody", one.peer_id, forger.peer_id} <= set(theirs.value)
            assert theirs.value[one.peer_id].value == b"forged"
            assert await one.read(KEY) == {one.peer_id: b"true", forger.peer_id: b"also true"}


@asynccontextmanager
async def flooded() -> AsyncIterator[tuple[Libp2pNetwork, DhtNode, Any, Libp2pNetwork]]:
    """Yield a peer, the DHT node of another that asks it for much, the peer's id for hivemind, and a third peer."""
    alone = NetworkSettings(run="run", listen=("/ip4/127.0.0.1/tcp/0",), timeouts=PATIENT)
    async with asyncio.timeout(LAST_RESORT_S), Libp2pNetwork.open(alone) as one:
        joining = msgspec.structs.replace(alone, bootstrap=tuple(await one.addresses()))
        async with Libp2pNetwork.open(joining) as flooder, Libp2pNetwork.open(joining) as other:
            yield one, flooder._joined.records._node, load_hivemind().PeerID.from_base58(one.peer_id), other


@pytest.mark.network
@pytest.mark.parametrize("whole", [False, True], ids=["by record", "by key"])
async def test_one_caller_has_a_bounded_number_of_signatures_checked(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """However many records a request for storage holds, and however often it comes."""
    load_hivemind()
    from hivemind.dht.storage import DictionaryDHTValue

    most, asked = 20, []
    monkeypatch.setattr(dht_records, "LOOKS_AT_ONCE", most)
    monkeypatch.setattr(dht_records, "LOOK_REFILL_S", 3600.0)
    verifies = record_checks._verifies

    def counted(place: bytes, peer: str, expiry: float, value: bytes) -> bool:
        asked.append(peer)
        return verifies(place, peer, expiry, value)

    async with flooded() as (one, flooder, target, other):
        node, dht_id = flooder._node, load_hivemind().DHTID
        monkeypatch.setattr(record_checks, "_verifies", counted)
        expiry = time.time() + RECORD_S
        for turn in range(3):
            forged = [msgspec.msgpack.encode(bytes(64) + b"%d" % number) for number in range(100)]
            keys = [dht_id.generate(source=f"{turn} {number}") for number in range(100)]
            if whole:
                kept = DictionaryDHTValue()
                for number, value in enumerate(forged):
                    kept.store(f"{turn} {number}", value, expiry)
                taken = await node.protocol.call_store(target, keys[:1], [kept], [expiry])
            else:
                names = [f"{turn} {number}" for number in range(100)]
                taken = await node.protocol.call_store(target, keys, forged, [expiry] * 100, subkeys=names)
            assert taken is not None
        assert len(asked) == most
        assert await other.publish(KEY, other.peer_id, b"true", RECORD_S)
        assert other.peer_id in await one.read(KEY)


@pytest.mark.network
async def test_one_caller_reads_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_records, "READ_BYTES", 5000)
    monkeypatch.setattr(dht_records, "READ_BYTES_PER_S", 1e-3)
    async with flooded() as (one, node, target, other):
        assert await one.publish(KEY, one.peer_id, bytes(2000), RECORD_S)
        answers = [await node.find(target, PLACE) for _ in range(4)]
        assert [answer is not None for answer in answers] == [True, True, False, False]
        assert await node.ping(target)
        assert one.peer_id in await other.read(KEY)
