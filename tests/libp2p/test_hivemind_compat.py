"""What we rely on inside hivemind, by name: whoever upgrades it reads here what has changed.

The classes are looked at after all of hivemind's modules in use were loaded as a node loads them; no daemon is started.
"""

import asyncio
import contextlib
import contextvars
import hashlib
import importlib
import inspect
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from admission_keys import NOW_S, OWNER, RUN, key, member, public
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.admission.admission_state import AdmissionState, HeldTicket
from noloco_node.admission.ticket import MEMBER, Right, encode, encode_list, grant, peer_of, signed_list
from noloco_node.errors import Exit, UserError
from noloco_node.libp2p import call_rules, hivemind_compat
from noloco_node.libp2p.call_rules import CALLEE, KNOWN, PLACE_BYTES, Authorizer, CallRules, calling
from noloco_node.libp2p.hivemind_compat import (
    DhtNode,
    _name_callers,
    disconnect,
    forget_ghosts,
    load_hivemind,
    mend_calls,
)
from noloco_node.libp2p.record_holders import MOST_NAMED
from noloco_node.libp2p.short_answers import MOST_VERSIONS, _packed

SIGNATURES = {
    "p2p.p2p_daemon:P2P.replicate": "daemon_listen_maddr",
    "p2p.p2p_daemon:P2P.shutdown": "self",
    "p2p.p2p_daemon_bindings.datastructures:PeerID.from_base58": "base58_id",
    "p2p.p2p_daemon_bindings.datastructures:PeerID.to_base58": "self",
    "p2p.p2p_daemon_bindings.datastructures:PeerID.to_bytes": "self",
    "p2p.p2p_daemon:P2P.add_protobuf_handler": (
        "self name handler input_protobuf_type stream_input stream_output balanced"
    ),
    "dht.node:DHTNode._call_find_with_blacklist": "self peer_id keys",
    "dht.node:Blacklist.__contains__": "self peer",
    "dht.routing:RoutingTable.get_nearest_neighbors": "self query_id k exclude",
    "dht.node:DHTNode.shutdown": "self",
    "dht.protocol:DHTProtocol.call_ping": "self peer validate strict",
    "dht.protocol:DHTProtocol.call_store": "self peer keys values expiration_time subkeys in_cache",
    "dht.routing:DHTID.from_bytes": "raw byteorder signed",
    "dht.routing:DHTID.xor_distance": "self other",
    "dht.protocol:DHTProtocol.update_routing_table": "self node_id peer_id responded",
    "dht.protocol:DHTProtocol._validate_dictionary": "self key_bytes dictionary",
    "dht.storage:DHTLocalStorage.store": "self key value expiration_time subkey",
    "dht.storage:DHTLocalStorage.store_subkey": "self key subkey value expiration_time",
    "dht.storage:DictionaryDHTValue.store": "self key value expiration_time",
    "dht.storage:DictionaryDHTValue.freeze": "self",
    "dht.storage:DictionaryDHTValue.items": "self",
    "dht.storage:DictionaryDHTValue.get": "self key",
    "dht.validation:RecordValidatorBase.validate": "self record",
    "dht.validation:RecordValidatorBase.sign_value": "self record",
    "dht.validation:RecordValidatorBase.strip_value": "self record",
}
CREATE_OPTIONS = """
    p2p node_id bucket_size wait_timeout blacklist_time backoff_rate cache_locally cache_nearest cache_on_store
    cache_refresh_before_expiry record_validator authorizer
"""
MESSAGES = {
    "Request": "type streamOpen streamHandler connect",
    "Response": "type error identify peers",
    "ErrorResponse": "msg",
    "StreamInfo": "peer addr proto",
    "StreamOpenRequest": "peer proto",
    "StreamHandlerRequest": "addr proto balanced",
    "ConnectRequest": "peer addrs",
    "IdentifyResponse": "addrs",
    "PeerInfo": "id addrs",
}
KINDS = "IDENTIFY CONNECT STREAM_OPEN STREAM_HANDLER LIST_PEERS"


def inside(name: str) -> Any:
    """Return what stands at `module:attribute.attribute` in hivemind."""
    load_hivemind()
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(f"hivemind.{module}")
    for attribute in path.split("."):
        found = getattr(found, attribute)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_takes_what_we_give(name: str) -> None:
    assert " ".join(inspect.signature(inside(name)).parameters) == SIGNATURES[name]


@pytest.mark.parametrize("option", CREATE_OPTIONS.split())
def test_a_node_is_created_with_our_options(option: str) -> None:
    assert option in inspect.signature(inside("dht.node:DHTNode.create")).parameters


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_the_daemon_has_its_fields(name: str) -> None:
    fields = {field.name for field in getattr(load_hivemind().messages, name).DESCRIPTOR.fields}
    assert not set(MESSAGES[name].split()) - fields


@pytest.mark.parametrize("kind", KINDS.split())
def test_the_daemon_knows_a_kind_of_request(kind: str) -> None:
    assert isinstance(getattr(load_hivemind().messages.Request, kind), int)


def test_the_daemon_s_program_is_in_the_package() -> None:
    assert os.access(load_hivemind().binary, os.X_OK)


def attributes(function: Callable[..., Any]) -> set[str]:
    """Return the names that a function's code reads or assigns as attributes."""
    return set(inspect.unwrap(function).__code__.co_names)


@pytest.mark.parametrize("attribute", ["storage", "cache", "routing_table"])
def test_the_protocol_of_a_node_has_its_parts(attribute: str) -> None:
    assert attribute in inside("dht.protocol:DHTProtocol").__annotations__


def test_the_routing_table_knows_peers_by_node() -> None:
    table = inside("dht.routing:RoutingTable")(inside("dht.routing:DHTID")(7), bucket_size=20, depth_modulo=5)
    assert len(table.uid_to_peer_id) == 0


REPLACED = {
    "dht.protocol:DHTProtocol.call_find": "_validate_dictionary",
    "dht.protocol:DHTProtocol.rpc_store": "_validate_dictionary",
    "dht.storage:DHTLocalStorage.store": "store_subkey",
}


@pytest.mark.parametrize("name", REPLACED)
def test_answers_are_judged_and_records_kept_by_the_function_that_we_replace(name: str) -> None:
    assert REPLACED[name] in inspect.getsource(inside(name))


@pytest.mark.parametrize("attribute", ["_read_task", "_write_task", "_pending_calls", "_handler_tasks"])
def test_the_tasks_of_a_client_are_where_we_look_for_them(attribute: str) -> None:
    """P2P._client.control."""
    assert "_client" in attributes(inside("p2p.p2p_daemon:P2P.__init__"))
    assert "control" in inside("p2p.p2p_daemon_bindings.p2pclient:Client").__annotations__
    assert attribute in attributes(inside("p2p.p2p_daemon_bindings.control:ControlClient.__init__"))


def test_a_timed_storage_has_a_heap_that_can_be_shortened() -> None:
    kept = inside("dht.storage:DictionaryDHTValue")()
    for number in range(1000):
        kept.store("one", b"x", time.time() + 1000.0 + number)
    assert len(kept.expiration_heap) == 1000
    forget_ghosts(kept)
    assert kept.expiration_heap == list(kept.key_to_heap.values())
    assert kept.get("one").value == b"x"
    assert kept.latest_expiration_time > time.time()
    assert kept.maxsize == float("inf")


def test_a_node_keeps_and_believes_what_we_decide() -> None:
    """On hivemind's own protocol object, which needs no daemon as long as it asks nobody."""
    protocol = inside("dht.protocol:DHTProtocol")(_initialized_with_create=True)
    protocol.storage, protocol.cache = (inside("dht.storage:DHTLocalStorage")() for _ in range(2))
    node = DhtNode(SimpleNamespace(protocol=protocol), id_of)
    taken: list[Any] = []

    def store(key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        taken.append((key, subkey, value, expiration_time))
        return False

    node.replace_store(store)
    assert not protocol.storage.store(inside("dht.routing:DHTID")(7), b"x", 9.0, subkey="me")
    node.filter_answers(lambda place, dictionary: taken.append((place, dictionary)))
    assert protocol._validate_dictionary(b"place", "records")
    assert taken == [(7, "me", b"x", 9.0), (b"place", "records")]


def code(*parts: Any) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def message(kind: str, **fields: Any) -> Any:
    """Return a message of hivemind's DHT."""
    return inside(f"proto.dht_pb2:{kind}")(**fields)


async def is_answered(request: Any) -> bool:
    """Return whether a callee answers a request that its caller has signed."""
    rules = CallRules(code)
    await Authorizer(rules).sign_request(request, None)
    return await Authorizer(rules).validate_request(request)


def id_of(peer: Any) -> Any:
    return inside("dht.routing:DHTID").from_bytes(hashlib.sha1(peer.to_bytes()).digest())


def some_peer(rng: Random) -> Any:
    return load_hivemind().PeerID(b"\x00\x24\x08\x01\x12\x20" + rng.randbytes(32))


class Neighbourhood:
    """Nodes in memory around one that is ours, with hivemind's own routing table. `says`: other ids than the true."""

    def __init__(self, peers: Sequence[Any]) -> None:
        self.me, *others = peers
        self.peers, self.dead, self.says = list(peers), set[Any](), dict[Any, Any]()
        self.asked = Counter[Any]()
        self.table = inside("dht.routing:RoutingTable")(id_of(self.me), bucket_size=8, depth_modulo=5)
        for peer in others:
            self.table.add_or_update_node(id_of(peer), peer)
        self.protocol = SimpleNamespace(
            storage=inside("dht.storage:DHTLocalStorage")(),
            routing_table=self.table,
            update_routing_table=self._enter,
            call_store=self._store,
        )
        own: Any = SimpleNamespace(
            node_id=id_of(self.me), peer_id=self.me, protocol=self.protocol, _call_find_with_blacklist=self._find
        )
        self.node = DhtNode(own, id_of)
        self.node.check_ids()

    def names(self, asked: Any, query: Any) -> dict[Any, Any]:
        """Return the nodes that one names beside a place, by their ids."""
        return {id_of(peer): peer for peer in self.order(query)[:20]}

    def order(self, query: Any) -> list[Any]:
        return sorted(self.peers, key=lambda peer: query.xor_distance(id_of(peer)))

    async def _enter(self, node_id: Any, peer_id: Any, responded: bool) -> None:
        if not responded and peer_id in self.table:
            del self.table[self.table.get(peer_id=peer_id)]

    async def _find(self, peer: Any, keys: Any) -> Any:
        self.asked[peer] += 1
        if peer not in self.peers or peer in self.dead:
            return None
        await self.protocol.update_routing_table(self.says.get(peer, id_of(peer)), peer)
        return {keys[0]: (None, self.names(peer, keys[0]))}

    async def _store(self, peer: Any, *_: Any, subkeys: Any) -> list[bool]:
        self.asked[peer] += 1
        return [True]


@pytest.mark.parametrize("liars", [0, 1, 5])
@pytest.mark.parametrize("lie", ["invents", "renames"])
@pytest.mark.parametrize("seed", range(5))
async def test_no_neighbours_hide_others_by_what_they_say_of_a_place(lie: str, liars: int, seed: int) -> None:
    """The liars name peers beside the place that do not exist, or others under ids beside it. A tenth just died."""
    dht_id, rng = inside("dht.routing:DHTID"), Random(seed)
    place = rng.randbytes(20)
    query = dht_id(int.from_bytes(place) ^ 1)

    class Lying(Neighbourhood):
        def names(self, asked: Any, query: Any) -> dict[Any, Any]:
            if asked not in lying:
                return {id_of(peer): peer for peer in self.order(query)[:20] if rng.random() < 0.4}
            if lie == "invents":
                return {id_of(peer): peer for peer in invented}
            return {dht_id(int(query) ^ number): rng.choice(self.peers) for number in range(2, 40)}

    nodes = Lying([some_peer(rng) for _ in range(60)])
    nearest = [peer for peer in nodes.order(query) if peer != nodes.me]
    # Their keys were tried until they lay nearer to the place than nearly all others.
    tried = sorted((some_peer(rng) for _ in range(800)), key=lambda peer: query.xor_distance(id_of(peer)))
    lying, invented = set(nearest[2 : 2 + liars]), tried[:40]
    nodes.dead = set(rng.sample(sorted(set(nearest) - lying, key=str), 6))

    found = await nodes.node.nearest(place, 12)
    assert len(found) == len(set(found)) == 12
    assert set(found) <= set(nodes.peers) - nodes.dead
    living = [peer for peer in nodes.order(query) if peer not in nodes.dead][:12]
    assert len(set(found) & set(living)) >= 8
    assert nodes.asked.total() <= 48


@given(st.integers(0, 2**32), st.floats(0.1, 3.9))
async def test_a_search_of_our_own_place_that_is_cut_off_is_made_again(seed: int, wait_s: float) -> None:
    rng = Random(seed)

    class Slow(Neighbourhood):
        async def _find(self, peer: Any, keys: Any) -> Any:
            await asyncio.sleep(4.0 * is_slow)
            ours.extend(key for key in keys if key == id_of(self.me))
            return await super()._find(peer, keys)

    nodes, is_slow, ours = Slow([some_peer(rng) for _ in range(9)]), True, list[Any]()
    assert not await nodes.node.join([], wait_s)
    is_slow = False
    assert not ours
    await nodes.node.nearest(rng.randbytes(20), 5)
    assert ours
    ours.clear()
    await nodes.node.nearest(rng.randbytes(20), 5)
    assert not ours


@given(st.integers(1, 4), st.lists(st.integers(0, 12), max_size=4))
async def test_a_node_that_starts_while_we_join_is_asked_again(wait_s: int, silences: list[int]) -> None:
    """`silences`: how often each door is asked in vain. After a power cut all peers start at once."""
    rng = Random(0)
    nodes, doors = Neighbourhood([some_peer(rng) for _ in range(9)]), [some_peer(rng) for _ in silences]
    asked = Counter[Any]()

    async def call_ping(peer: Any) -> Any:
        asked[peer] += 1
        return id_of(peer) if asked[peer] > silences[doors.index(peer)] else None

    nodes.protocol.call_ping = call_ping
    assert await nodes.node.join(doors, wait_s + 0.5) == any(each <= wait_s for each in silences)


@given(st.integers(0, 2**32), st.integers(2, 30), st.integers(1, 6))
async def test_a_peer_whose_node_says_another_id_is_neither_asked_again_nor_stored_to(
    seed: int, count: int, liars: int
) -> None:
    rng = Random(seed)
    place = rng.randbytes(20)
    query = inside("dht.routing:DHTID").from_bytes(place)
    beside = type(query)(int(query) ^ 1)
    nodes = Neighbourhood([some_peer(rng) for _ in range(count)])
    lying = set(nodes.order(query)[:liars]) - {nodes.me}
    nodes.says = {peer: type(query)(int(query) ^ number) for number, peer in enumerate(lying, 2)}

    for _ in range(2):
        found = await nodes.node.nearest(place, 12)
        assert list(found) == [peer for peer in nodes.order(beside) if peer not in lying][:12]
    assert not any(peer in nodes.table for peer in lying)
    nodes.asked.clear()
    for peer in lying:
        assert await nodes.node.find(peer, place) is None
        assert await nodes.node.store(peer, place, "me", b"", 1.0) is None
    assert not nodes.asked
    for peer in set(nodes.peers) - lying - {nodes.me}:
        assert await nodes.node.find(peer, place) == {}
        assert await nodes.node.store(peer, place, "me", b"", 1.0)


@given(st.integers(0, 2**32))
async def test_a_peer_that_says_another_id_in_its_own_request_is_refused(seed: int) -> None:
    rng = Random(seed)
    nodes = Neighbourhood([some_peer(rng) for _ in range(3)])
    liar = nodes.peers[1]

    await nodes.protocol.update_routing_table(id_of(some_peer(rng)), liar)
    assert liar not in nodes.table
    assert await nodes.node.find(liar, rng.randbytes(20)) is None
    assert not nodes.asked


async def test_of_callers_that_find_no_place_in_the_routing_table_the_latest_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Open(Neighbourhood):
        async def _enter(self, node_id: Any, peer_id: Any, responded: bool) -> None:
            self.table.add_or_update_node(node_id, peer_id)

    monkeypatch.setattr("noloco_node.libp2p.hivemind_compat._MOST_SPARE", 4)
    rng = Random(0)
    nodes = Open([some_peer(rng) for _ in range(3)])
    for _ in range(1000):
        caller = some_peer(rng)
        await nodes.protocol.update_routing_table(id_of(caller), caller)
        assert caller in nodes.table
        assert all(len(bucket.replacement_nodes) <= 4 for bucket in nodes.table.buckets)
    placed = sum(len(bucket.nodes_to_peer_id) for bucket in nodes.table.buckets)
    assert placed > 50
    assert placed < len(nodes.table.uid_to_peer_id) == len(nodes.table.peer_id_to_uid) <= 2 * placed


class Giver:
    """hivemind's own protocol with one record, and when it handed records to a new neighbour."""

    def __init__(self, may_hand_over: Callable[[], bool] = lambda: True) -> None:
        dht_id, self.handed = inside("dht.routing:DHTID"), list[float]()
        self.protocol = protocol = inside("dht.protocol:DHTProtocol")(_initialized_with_create=True)
        protocol.storage, protocol.node_id, protocol.num_replicas = (
            inside("dht.storage:DHTLocalStorage")(),
            dht_id(7),
            5,
        )
        protocol.routing_table = inside("dht.routing:RoutingTable")(dht_id(7), bucket_size=8, depth_modulo=5)
        protocol.storage.store_subkey(dht_id(9), "peer", b"x", time.time() + 3600.0)
        protocol.call_store, protocol.call_ping = self._hand_over, self._ping
        DhtNode(SimpleNamespace(protocol=protocol), id_of).check_ids(may_hand_over)

    async def _hand_over(self, *_: Any, **options: Any) -> None:
        self.handed.append(asyncio.get_running_loop().time())

    async def _ping(self, peer: Any) -> None:
        """Find nobody."""


async def test_a_neighbour_that_comes_and_goes_is_handed_records_once_a_minute() -> None:
    giver, caller, loop, calls = Giver(), some_peer(Random(0)), asyncio.get_running_loop(), 0
    begin_s = loop.time()
    while loop.time() < begin_s + 200.0:
        await giver.protocol.update_routing_table(id_of(caller), caller)
        assert caller in giver.protocol.routing_table
        await asyncio.sleep(5.0)
        del giver.protocol.routing_table[id_of(caller)]
        calls += 1
    assert calls == 40
    assert giver.handed == [begin_s + after_s for after_s in (0.0, 60.0, 120.0, 180.0)]


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 9))
async def test_of_many_new_neighbours_few_are_handed_records_and_all_are_entered(turns: list[bool], seed: int) -> None:
    """Names are free, and each costs a look at all records that we keep. A neighbour that we know costs nothing."""
    left = turns.copy()
    giver, rng, entered = Giver(lambda: left.pop(0)), Random(seed), 0
    for _ in turns:
        caller = some_peer(rng)
        for _ in range(2):
            await giver.protocol.update_routing_table(id_of(caller), caller)
        entered += caller in giver.protocol.routing_table
        await asyncio.sleep(100.0)
    assert (left, entered) == ([], len(turns))
    assert len(giver.handed) <= sum(turns)


def test_no_answer_of_a_stranger_writes_onto_the_screen() -> None:
    load_hivemind()
    assert not logging.getLogger("hivemind.dht.protocol").isEnabledFor(logging.ERROR)


TICKETS = {
    "none": b"",
    "train": member(1),
    "look": encode((grant(key(0), RUN, Right.LOOK, NOW_S + 60, public(1)),)),
    "another's": member(2),
    "expired": member(1, NOW_S - 1),
    "foreign": encode((grant(key(1), RUN, MEMBER, NOW_S + 60, public(1)),)),
}


@pytest.mark.parametrize("shown", TICKETS)
@pytest.mark.parametrize("kind", ["PingRequest", "FindRequest", "StoreRequest"])
async def test_in_a_run_with_an_owner_a_caller_is_answered_by_its_ticket(kind: str, shown: str) -> None:
    """A ping is answered always, a reading by a ticket to look; neighbours are the peers that may train."""
    server = AdmissionState(RUN, lambda: NOW_S)
    server.pin(OWNER, "invited")
    caller = AdmissionState(RUN, lambda: NOW_S)
    caller.own = HeldTicket.fixed(TICKETS[shown])
    calls, answers = Authorizer(CallRules(code, caller)), Authorizer(CallRules(code, server))
    request = message(kind, peer=message("NodeInfo", node_id=b"n" * 20))

    async def handler(request: Any, context: Any) -> bool:
        return await answers.validate_request(request)

    added: list[Any] = []

    async def add(*arguments: Any, **options: Any) -> None:
        added.append((*arguments, options))

    client = SimpleNamespace(add_protobuf_handler=add)
    _name_callers(client)
    await client.add_protobuf_handler("rpc", handler, "type", balanced=False)
    ((name, noting, *others),) = added
    assert (name, others) == ("rpc", ["type", {"balanced": False}])
    context = SimpleNamespace(remote_id=load_hivemind().PeerID.from_base58(peer_of(public(1))))
    await calls.sign_request(request, None)
    answered = await noting(request, context)
    assert answered == (shown in {"PingRequest": TICKETS, "FindRequest": ("train", "look")}.get(kind, ("train",)))
    if answered:
        assert bool(request.peer.node_id) == (shown == "train")
    request.auth.signature = b"spoilt"
    assert not await noting(request, context)


@pytest.mark.parametrize("knows", ["nobody", "the callee", "no owner yet"])
@pytest.mark.parametrize("shown", TICKETS)
@pytest.mark.parametrize("kind", ["Ping", "Find", "Store"])
async def test_in_a_run_with_an_owner_an_answer_counts_by_the_ticket_that_the_callee_shows_once(
    kind: str, shown: str, knows: str
) -> None:
    """Any member may name any node: only a member's counts. A ping is answered without a ticket, and shows none."""
    callee = load_hivemind().PeerID.from_base58(peer_of(public(1)))
    caller, server = AdmissionState(RUN, lambda: NOW_S), AdmissionState(RUN, lambda: NOW_S)
    server.own = HeldTicket.fixed(TICKETS[shown])
    if knows != "no owner yet":
        caller.pin(OWNER, "invited")
    if knows == "the callee":
        assert caller.show(callee.to_base58(), member(1)) == ""
    calls, answers = (Authorizer(CallRules(code, each)) for each in (caller, server))

    async def told() -> tuple[bool, bool]:
        """Return whether the answer counts, and whether it contains the ticket."""
        request, response = message(f"{kind}Request"), message(f"{kind}Response")
        with calling(callee):
            await calls.sign_request(request, None)
            await answers.sign_response(response, request)
            counts = await calls.validate_response(response, request)
        return counts, bool(response.auth.service_access_token.signature)

    is_known, is_ping = knows != "nobody", kind == "Ping"
    shows = not is_known and not is_ping and shown != "none"
    assert await told() == (is_known or (shows and shown == "train"), shows)
    if shown == "train" and not is_ping:
        assert await told() == (True, False)


async def test_what_hivemind_asks_by_itself_after_an_answer_is_not_taken_for_a_question_to_the_same_peer() -> None:
    nodes, callees = Neighbourhood([some_peer(Random(number)) for number in range(2)]), []

    async def enter(*_: Any) -> None:
        callees.append(CALLEE.get())

    nodes.protocol.update_routing_table = enter
    nodes.node.check_ids()
    with calling(nodes.peers[1]):
        await asyncio.create_task(nodes.protocol.update_routing_table(id_of(nodes.peers[1]), nodes.peers[1]))
        callees.append(CALLEE.get())
    assert callees == ["", nodes.peers[1].to_base58()]


@pytest.mark.parametrize("says", ["its own id", "another id", "no id"])
def test_a_peer_that_we_ask_tells_the_time_of_its_machine(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that knows the run knows the id of its node. Another has no voice, though anybody may connect with us."""
    peer, other, noted, told = some_peer(Random(0)), some_peer(Random(1)), list[tuple[object, ...]](), 1.8e9
    monkeypatch.setattr(call_rules.CLOCK, "note", lambda *each, is_door: noted.append((*each, is_door)))
    monkeypatch.setattr(call_rules.CLOCK, "own_s", lambda: told)
    calls = Authorizer(CallRules(lambda *parts: b"c" * 32, None))
    node_id = {"its own id": id_of(peer), "another id": id_of(other), "no id": None}[says]

    async def call_ping(_: Any) -> Any:
        request, response = inside("proto.dht_pb2:PingRequest")(), inside("proto.dht_pb2:PingResponse")(dht_time=1.0)
        await calls.sign_response(response, request)
        assert await calls.validate_response(response, request)
        return node_id

    node = DhtNode(SimpleNamespace(protocol=SimpleNamespace(storage=None, call_ping=call_ping)), id_of)

    async def main() -> None:
        is_answered = node_id is not None
        assert await node.ask_time(peer, "voice") == is_answered
        assert await node.ask_time(peer, "voice", is_door=True) == is_answered
        assert await node.ping(peer) == is_answered
        await call_ping(peer)  # which hivemind calls by itself

    asyncio.run(main())
    assert noted == [("voice", told, is_door) for is_door in (False, True) if says == "its own id"]


def test_a_machine_that_lends_no_lock_of_processes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """hivemind makes one as it is imported."""
    load_hivemind()

    class Refusing:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "hivemind.dht.node":
                raise PermissionError(13, "Permission denied")

    for name in [each for each in sys.modules if each.split(".")[0] == "hivemind"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refusing, *sys.meta_path])
    with pytest.raises(UserError, match="hivemind cannot be loaded") as caught:
        hivemind_compat._loaded_hivemind.__wrapped__()
    assert caught.value.code is Exit.STORAGE
    assert "/dev/shm" in caught.value.hint


@pytest.mark.parametrize("module", ["utils.timed_storage", "dht.protocol", "dht.routing", "dht.node"])
def test_hivemind_goes_by_the_clock_of_the_swarm(module: str) -> None:
    assert inside(f"{module}:get_dht_time") == call_rules.CLOCK.unix_s


@pytest.mark.parametrize("keys", [0, 1, 2, 100])
async def test_a_request_asks_for_one_key_at_most(keys: int) -> None:
    assert await is_answered(message("FindRequest", keys=[b"k" * 20] * keys)) == (keys <= 1)


@pytest.mark.parametrize("kind", ["Ping", "Find", "Store"])
@pytest.mark.parametrize("size", [0, 1, 19, 20, 21, 1000])
async def test_a_peer_that_says_an_id_that_is_none_neither_asks_nor_answers(kind: str, size: int) -> None:
    """hivemind raises AssertionError for it, after a ping beyond all that it catches: it would end the node."""
    info = message("NodeInfo", node_id=b"\xff" * size)
    request, response = message(f"{kind}Request", peer=info), message(f"{kind}Response", peer=info)
    assert await is_answered(request) == (size in (0, 20))
    assert await Authorizer(CallRules(code)).validate_response(response, request) == (size in (0, 20))


@pytest.mark.parametrize("wanted", [False, True])
async def test_no_caller_has_us_call_it_back(wanted: bool) -> None:
    request = message("PingRequest", validate=wanted)
    assert await is_answered(request)
    assert not request.validate


async def counts(results: list[Any]) -> bool:
    """Return whether an answer of these results to a request for one key is taken."""
    request, response = message("FindRequest", keys=[b"k" * 20]), message("FindResponse", results=results)
    return await Authorizer(CallRules(code)).validate_response(response, request)


@pytest.mark.parametrize("size", [34, 38, 64, 65, 100_000])
async def test_a_node_names_peers_by_ids_of_a_usual_length(size: int) -> None:
    """hivemind writes each in base 58, which takes minutes for a long one."""
    assert await counts([message("FindResult", nearest_peer_ids=[b"p" * 38, b"p" * size])]) == (size <= 64)


@pytest.mark.parametrize("results", [0, 1, 2, 100])
async def test_an_answer_has_one_result_for_a_key(results: int) -> None:
    """Each would be decompressed, to up to a thousand times its bytes."""
    assert await counts([message("FindResult")] * results) == (results == 1)


@given(
    st.sampled_from([0, 1, 1000, 2047, 2048, 2049]),
    st.lists(st.sampled_from([0, 1, 1100]), max_size=3),
    st.sampled_from([None, b"\x90", b""]),
)
async def test_a_request_for_storage_holds_so_many_records_as_an_answer_at_most(
    singles: int, dictionaries: list[int], malformed: bytes | None
) -> None:
    """hivemind decodes any value: millions of empty lists, say, to a hundred times their bytes."""
    packed = [_packed(0x50, float("inf"), 1e10, [(f"{n}", b"", 1e10) for n in range(size)]) for size in dictionaries]
    packed += [] if malformed is None else [malformed]
    request = message(
        "StoreRequest",
        keys=[b"k" * 20] * (singles + len(packed)),
        subkeys=[b"\xa1p"] * singles + [b""] * len(packed),
        values=[b"\xc4\x00"] * singles + packed,
    )
    assert await is_answered(request) == (malformed is None and singles + sum(dictionaries) <= MOST_VERSIONS)


class Holder:
    """hivemind's own protocol with our rules, a record at one place, and more neighbours than an answer may name."""

    def __init__(self, kept: bytes, may_send: Callable[[int], bool] = lambda _: True) -> None:
        self.protocol = protocol = inside("dht.protocol:DHTProtocol")(_initialized_with_create=True)
        dht_id, self.packed = inside("dht.routing:DHTID"), 0
        protocol.storage, protocol.cache = (inside("dht.storage:DHTLocalStorage")() for _ in range(2))
        protocol.node_info, protocol.bucket_size = message("NodeInfo", node_id=b"h" * 20), 2 * MOST_NAMED
        protocol.routing_table = inside("dht.routing:RoutingTable")(dht_id(7), 2 * MOST_NAMED, depth_modulo=5)
        for number in range(2 * MOST_NAMED):
            peer = load_hivemind().PeerID(bytes([number]) * 38)
            protocol.routing_table.add_or_update_node(dht_id.from_bytes(code("node", peer.to_bytes())[:20]), peer)
        dumps = protocol.serializer.dumps

        def packed(value: Any) -> bytes:
            self.packed += 1
            return bytes(dumps(value))

        protocol.serializer = SimpleNamespace(dumps=packed, loads=protocol.serializer.loads)
        if kept:
            protocol.storage.store_subkey(dht_id.from_bytes(b"p" * 20), "peer", kept, 1e10)
        self.authorizer = Authorizer(CallRules(code))
        DhtNode(SimpleNamespace(protocol=protocol), id_of).bound_readings(may_send)

    async def answer(self, request: Any) -> Any:
        role = inside("utils.auth:AuthRole").SERVICER
        answering = inside("utils.auth:AuthRPCWrapper")(self.protocol, role, self.authorizer)
        context = contextvars.copy_context()  # each request is answered in a task of its own
        asked = answering.rpc_find(request, SimpleNamespace(remote_id=None))
        return await asyncio.get_running_loop().create_task(asked, context=context)


async def question(*, reads: bool) -> Any:
    request = message("FindRequest", keys=[b"p" * 20])
    before = KNOWN.set({} if reads else None)
    await Authorizer(CallRules(code)).sign_request(request, None)
    KNOWN.reset(before)
    return request


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("kept", [b"", b"value"])
async def test_an_answer_has_what_was_asked_for(kept: bytes, reads: bool) -> None:
    """Records or neighbours, so that no record hides a node; ids of nodes follow from peers."""
    holder, request = Holder(kept), await question(reads=reads)
    response = await holder.answer(request)
    told = response.results[0]
    named = list(told.nearest_peer_ids)
    assert len(named) == 2 * MOST_NAMED * (not reads)
    assert not told.nearest_node_ids
    assert await holder.authorizer.validate_response(response, request)
    assert list(told.nearest_peer_ids) == named[:MOST_NAMED]
    assert list(told.nearest_node_ids) == [code("node", peer)[:20] for peer in named[:MOST_NAMED]]
    assert bool(told.value) == bool(told.type) == (bool(kept) and reads)
    assert not told.value or dict(holder.protocol.serializer.loads(told.value).items())["peer"].value == kept


@given(st.binary(min_size=1, max_size=200), st.integers(0, 300), st.booleans())
async def test_nothing_is_packed_for_a_caller_that_has_read_its_share_or_asks_for_nodes(
    kept: bytes, left: int, reads: bool
) -> None:
    """The former is answered by an error, which it takes for silence; the latter is not charged."""
    asked = list[int]()

    def may_send(size: int) -> bool:
        asked.append(size)
        return size <= left

    holder, request = Holder(kept, may_send), await question(reads=reads)
    is_refused = reads and len(kept) > left
    with pytest.raises(PermissionError) if is_refused else contextlib.nullcontext():
        await holder.answer(request)
    assert asked == [len(kept)] * reads
    assert holder.packed == (reads and not is_refused)
    assert holder.protocol.storage.get(inside("dht.routing:DHTID").from_bytes(b"p" * 20)), "we ourselves see it"


def test_a_place_has_as_many_bytes_as_hivemind_s_id() -> None:
    assert inside("dht.routing:DHTID").HASH_NBYTES == PLACE_BYTES


async def test_a_ticket_costs_a_call_so_many_bytes() -> None:
    """The figures of docs/design/admission.md: the owner's ticket, and an invite's."""

    async def signed(raw: bytes) -> int:
        caller = AdmissionState(RUN, lambda: NOW_S)
        caller.own = HeldTicket.fixed(raw) if raw else None
        request = message("FindRequest", peer=message("NodeInfo", node_id=b"n" * 20))
        await Authorizer(CallRules(code, caller)).sign_request(request, None)
        return int(request.ByteSize())

    invite = grant(key(0), RUN, MEMBER | Right.ONCE, NOW_S + 60, public(2))
    invited = encode((invite, grant(key(2), RUN, MEMBER, NOW_S + 60, public(1))))
    assert [await signed(ticket) - await signed(b"") for ticket in (member(1), invited)] == [113, 222]


@given(st.integers(0, 2**32), st.integers(2, 30), st.sets(st.integers(0, 29)), st.booleans())
async def test_peers_that_the_owner_shuts_out_are_neither_found_nor_asked_nor_stored_to(
    seed: int, count: int, places: set[int], shown: bool
) -> None:
    """`shown`: we know their tickets, which have expired; else the owner's list names them."""
    rng = Random(seed)
    nodes = Neighbourhood([load_hivemind().PeerID.from_base58(peer_of(public(number))) for number in range(count)])
    out = {number for number in places if 0 < number < count}
    now_s, place = NOW_S, rng.randbytes(20)
    state = AdmissionState(RUN, lambda: now_s)
    state.pin(OWNER, "invited")
    state.own = HeldTicket.fixed(member(0))
    nodes.node = DhtNode(nodes.node._node, id_of, state)
    nodes.node.check_ids()
    if shown:
        assert not any(state.show(peer_of(public(number)), member(number, NOW_S + 1)) for number in out)
        now_s += 2
    else:
        state.take_revocations(encode_list(signed_list(key(0), RUN, 1, {public(each): NOW_S + 9 for each in out})))

    refused = {nodes.peers[number] for number in out}
    found = await nodes.node.nearest(place, 30)
    assert set(found) == set(nodes.peers) - refused
    for peer in refused:
        assert await nodes.node.find(peer, place) is None
        assert await nodes.node.store(peer, place, "me", b"", 1.0) is None
    assert not refused & set(nodes.asked)
    for peer in nodes.peers[1:]:  # as when it answers a ping
        await nodes.protocol.update_routing_table(id_of(peer), peer)
    assert not any(peer in nodes.table for peer in refused), "a neighbour is given records to keep"
    assert all(peer in nodes.table for peer in set(nodes.peers[1:]) - refused)


@pytest.mark.parametrize("right", ["open", "ticket", "none"])
def test_a_node_joins_by_pings_and_asks_further_as_soon_as_it_may(right: str) -> None:
    """One of the peers that it joins by is silent."""
    nodes = Neighbourhood([some_peer(Random(number)) for number in range(9)])
    state = None if right == "open" else AdmissionState(RUN, lambda: NOW_S)
    if state is not None and right == "ticket":
        state.own = HeldTicket.fixed(member(1))
    nodes.node = DhtNode(nodes.node._node, id_of, state)
    silent, other = nodes.peers[1:3]

    async def ping(peer: Any) -> Any:
        return None if peer is silent else id_of(peer)

    nodes.protocol.call_ping = ping
    assert asyncio.run(nodes.node.join([silent, other], 5.0))
    assert bool(nodes.asked) == (right != "none")
    assert not asyncio.run(nodes.node.join([silent], 0.01))


@pytest.mark.parametrize("first", ["none", "expired"])
async def test_before_it_has_a_good_ticket_a_node_asks_nobody_in_a_run_with_an_owner(first: str) -> None:
    rng = Random(0)
    nodes = Neighbourhood([some_peer(rng) for _ in range(20)])
    state, place = AdmissionState(RUN, lambda: NOW_S), rng.randbytes(20)
    nodes.node = DhtNode(nodes.node._node, id_of, state)

    async def ask() -> bytes:
        raise AssertionError("nobody needs another ticket")

    if first == "expired":
        state.own = HeldTicket(lambda: NOW_S, tuple, ask)
        state.own.raw = member(1, NOW_S - 1)
    with pytest.raises(ConnectionResetError, match="no ticket yet"):
        await nodes.node.nearest(place, 12)
    assert not nodes.asked
    state.own = HeldTicket.fixed(member(1))
    assert len(await nodes.node.nearest(place, 12)) == 12
    own = [peer for peer in nodes.order(id_of(nodes.me)) if peer != nodes.me][:8]
    assert all(nodes.asked[peer] for peer in own), "those near our own place hear of us"


async def test_a_reader_and_a_writer_that_failed_are_asked_why() -> None:
    async def fail() -> None:
        raise OSError("the daemon was killed")

    async def shutdown() -> None:
        pass

    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    tasks = [asyncio.ensure_future(fail()) for _ in range(2)]
    await asyncio.wait(tasks)
    control = SimpleNamespace(_read_task=tasks[0], _write_task=tasks[1])
    client: Any = SimpleNamespace(shutdown=shutdown, _client=SimpleNamespace(control=control))
    await disconnect(client)
    del tasks, control, client
    assert complaints == []


@pytest.mark.parametrize("dies", [False, True])
async def test_a_connection_that_is_given_up_half_way_is_ended(dies: bool) -> None:
    ended = list[str]()

    async def shutdown() -> None:
        ended.append("shut down")

    async def replicate(place: str) -> Any:
        await asyncio.sleep(1.0)
        if dies:
            ended.append("died")
            raise EOFError
        tasks = SimpleNamespace(**dict.fromkeys(("_read_task", "_write_task"), asyncio.current_task()))
        return SimpleNamespace(shutdown=shutdown, _client=SimpleNamespace(control=tasks))

    parts = load_hivemind()._replace(P2P=SimpleNamespace(replicate=replicate), Multiaddr=str)
    connecting = asyncio.ensure_future(parts.connect("/control"))
    await asyncio.sleep(0.5)
    connecting.cancel()
    await asyncio.wait([connecting])
    assert connecting.cancelled()
    assert ended == ["died" if dies else "shut down"]


class Line:
    """hivemind's client of a daemon, and the daemon's end of the connection."""

    def __init__(self) -> None:
        self.control = inside("p2p.p2p_daemon_bindings.control:ControlClient")(None, _initialized_with_create=True)
        client: Any = SimpleNamespace(_client=SimpleNamespace(control=self.control))
        mend_calls(client)
        self.words = asyncio.StreamReader()
        self.reader = asyncio.ensure_future(self.control._read_from_persistent_conn(self.words))

    def say(self, **told: Any) -> None:
        content = inside("proto.p2pd_pb2:PersistentConnectionResponse")(**told).SerializeToString()
        self.words.feed_data(bytes([len(content)]) + content)


@pytest.mark.parametrize("steps", range(4))
async def test_an_answer_to_a_call_that_is_given_up_in_this_moment_ends_no_others(steps: int) -> None:
    """As after sleep mode, in which both the answer and the end of the wait for it came."""
    line, answer = Line(), inside("proto.p2pd_pb2:CallUnaryResponse")(response=b"an answer")

    async def ask() -> bytes:
        asking = line.control.call_unary_handler(SimpleNamespace(to_bytes=lambda: b"peer"), "topic", b"a question")
        return bytes(await asking)

    async def question() -> Any:
        return await line.control._pending_messages.get()

    given_up = asyncio.ensure_future(ask())
    asked = await question()
    line.say(callId=asked.callId, callUnaryResponse=answer)
    for _ in range(steps):
        await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    other = asyncio.ensure_future(ask())
    while (asked := await question()).HasField("cancel"):
        pass
    line.say(callId=asked.callId, callUnaryResponse=answer)
    await asyncio.wait([other, line.reader], return_when=asyncio.FIRST_COMPLETED)
    assert not line.reader.done()
    assert other.result() == b"an answer"
    assert not line.control._pending_calls


@pytest.mark.parametrize("topic", ["topic", "another"])
@pytest.mark.parametrize("steps", range(3))
async def test_no_caller_that_gives_up_leaves_anything_behind(steps: int, topic: str) -> None:
    line, call = Line(), b"0123456789abcdef"

    async def hang(data: bytes, peer: Any) -> bytes:
        await asyncio.Event().wait()
        return data

    line.control.unary_handlers["topic"] = hang
    line.say(callId=call, requestHandling=inside("proto.p2pd_pb2:CallUnaryRequest")(peer=b"p", proto=topic, data=b""))
    for _ in range(steps):
        await asyncio.sleep(0)
    line.say(callId=call, cancel=inside("proto.p2pd_pb2:Cancel")())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not line.control._handler_tasks
    assert not line.reader.done()
