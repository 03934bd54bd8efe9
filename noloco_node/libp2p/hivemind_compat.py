"""Everything that we know of hivemind's insides; the rest of the product sees the classes of this module.

Three parts of hivemind are used: the daemon program p2pd with its protobuf messages, `P2P` (which the DHT speaks
through), and `DHTNode`. Neither `hivemind.DHT` (a forked process) nor its averager is. Where hivemind has no public way
to do what we need, its attributes are read or replaced here and nowhere else; tests/libp2p/test_hivemind_compat.py
names each of them, and fails by that name when hivemind changes it.

hivemind is loaded without torch. `import hivemind` would load torch and scipy, seconds and hundreds of megabytes that a
bootstrap peer or `status` has no use for; the parts named above need neither. So its package and two subpackages are
entered in `sys.modules` as shells, which know where their modules lie but do not run their `__init__`. If somebody has
imported hivemind already, nothing is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import importlib
import importlib.machinery
import importlib.util
import logging
import math
import os
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from noloco_node.admission.admission_state import AdmissionState
from noloco_node.errors import Exit, UserError, reason_of, storage_error
from noloco_node.libp2p.call_rules import (
    CALLEE,
    CALLER,
    CALLER_READS,
    KNOWN,
    TOLD_TIME,
    Authorizer,
    CallRules,
    calling,
    node_of,
)
from noloco_node.libp2p.record_holders import NodeSearch, PeerId
from noloco_node.libp2p.short_answers import Version
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.tasks import loop_s

_LOADING = threading.Lock()  # a program may start two peers, each in a thread of its own
_MOST_GHOSTS = 64
_MOST_REFUSED = 1024
_MET_S, _MOST_MET = 60.0, 4096
"""A peer counts as a new neighbour, which is handed records, once in so long at most: one that calls and never answers
would be a new one at each call. That is remembered of so many peers.
"""
_MOST_SPARE = 256  # peers that wait for a place in a bucket of the routing table
_SILENT_S = 15.0  # a peer that did not answer is left out for so long
_ASK_AGAIN_S = 1.0
_BUCKET = 8
"""Neighbours in a bucket of the routing table, and in an answer. hivemind's 20 make each answer 0.6 kB longer."""


class DaemonClient(Protocol):
    """hivemind's P2P on a daemon."""

    peer_id: PeerId

    async def shutdown(self) -> None: ...


class DhtEntry(Protocol):
    """A record in the DHT; hivemind packs its value as MessagePack."""

    value: Any
    expiration_time: float


class DhtEntries(Protocol):
    """What hivemind keeps for some time, by key or by subkey: its TimedStorage."""

    maxsize: float
    latest_expiration_time: float

    def get(self, key: Any) -> DhtEntry | None: ...
    def items(self) -> Iterator[tuple[Any, DhtEntry]]: ...
    def freeze(self) -> AbstractContextManager[Any]: ...
    def __contains__(self, key: Any) -> bool: ...
    def __len__(self) -> int: ...
    def __delitem__(self, key: Any) -> None: ...


class StoreSubkey(Protocol):
    """`store_subkey` of hivemind's local storage; says whether it kept the value."""

    def __call__(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool: ...


class LocalStorage(DhtEntries, Protocol):
    """What a node keeps for others."""

    store_subkey: StoreSubkey


class RecordValidator(Protocol):
    """Decides which records are stored and believed."""

    def validate(self, record: Any) -> bool: ...
    def sign_value(self, record: Any) -> bytes: ...
    def strip_value(self, record: Any) -> bytes: ...


class HivemindParts(NamedTuple):
    """hivemind's classes, the module of the daemon's protobuf `messages`, and the path of the daemon's program."""

    P2P: Any
    PeerID: Any
    Multiaddr: Any
    DHTNode: Any
    DHTID: Any
    messages: Any
    binary: str

    def peer_bytes(self, peer: str) -> bytes:
        try:
            return bytes(self.PeerID.from_base58(peer).to_bytes())
        except ValueError:
            raise ConnectionRefusedError(f"{peer!r} is no peer id") from None

    def peer_text(self, peer: bytes) -> str:
        return str(self.PeerID(peer).to_base58())

    async def connect(self, control_path: str) -> DaemonClient:
        connecting = asyncio.ensure_future(self.P2P.replicate(self.Multiaddr(f"/unix{control_path}")))
        try:
            client: DaemonClient = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # Cancelled half-way it would leave tasks and a connection behind; the daemon's death ends it at the latest.
            with contextlib.suppress(Exception):
                await disconnect(await connecting)
            raise
        mend_calls(client)
        return client


def mend_calls(client: DaemonClient) -> None:
    """Have hivemind's P2P forget calls that are over, its own and those that it answers.

    An answer to a call that has just been given up would end the task that reads all answers, and a task that answers a
    caller that gives up would be kept for ever.
    """
    control: Any = client._client.control  # type: ignore[attr-defined]
    control._pending_calls, control._handler_tasks = _CallsUnderWay(), _CallsUnderWay()


class _CallsUnderWay(dict[Any, "asyncio.Future[Any]"]):
    """Calls by their ids; one that is over counts as gone."""

    def __setitem__(self, call_id: Any, call: asyncio.Future[Any]) -> None:
        super().__setitem__(call_id, call)
        call.add_done_callback(lambda _: self.pop(call_id, None))

    def __contains__(self, call_id: object) -> bool:
        return super().__contains__(call_id) and not self[call_id].done()


async def disconnect(client: DaemonClient) -> None:
    """Shut hivemind's P2P down, without a complaint of asyncio's about its reader and its writer."""
    await client.shutdown()
    # They fail with a daemon that is killed, and nobody would ask them why.
    control: Any = client._client.control  # type: ignore[attr-defined]
    for task in (control._read_task, control._write_task):
        if task.done() and not task.cancelled():
            task.exception()


class DhtNode:
    """hivemind's DHTNode, made to keep and believe what we decide; made by `DhtNode.create`.

    The id of a peer's node follows from its peer id, that is from its key, so nobody can choose a place in the DHT. A
    peer whose node says another id is neither asked nor stored to, and our answers do not name it.
    """

    def __init__(self, node: Any, id_of: Callable[[PeerId], Any], admission: AdmissionState | None = None) -> None:
        self._node, self._id_of, self._admission = node, id_of, admission
        self.storage: LocalStorage = node.protocol.storage  # what we keep for others
        self._refused: dict[PeerId, None] = {}
        """Peers whose nodes have said another id than theirs; the one refused last comes last."""
        self._is_known = False  # whether we have asked the nodes near our place, which take note of those that ask

    @classmethod
    async def create(
        cls, parts: HivemindParts, client: DaemonClient, validator: RecordValidator, rules: CallRules, answer_s: float
    ) -> DhtNode:
        """Become a node of a DHT, in which others have `answer_s` for each answer; it caches nothing."""

        def id_of(peer: PeerId) -> Any:
            return parts.DHTID.from_bytes(node_of(rules, peer.to_bytes()))

        _name_callers(client)
        node = await parts.DHTNode.create(
            p2p=client,
            node_id=id_of(client.peer_id),
            bucket_size=_BUCKET,
            wait_timeout=answer_s,
            # Its own way doubles the time with each failure: who is cut off for a minute would be deaf for six.
            blacklist_time=_SILENT_S,
            backoff_rate=1.0,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            record_validator=validator,
            authorizer=Authorizer(rules),
        )
        # Else a stranger could have its records put there, unbounded, and answered with instead of those stored.
        node.protocol.cache.store = node.protocol.cache.store_subkey = lambda *_: False
        self = cls(node, id_of, rules.admission)
        self.check_ids(rules.may_hand_over)
        self.bound_readings(rules.may_send)
        return self

    async def join(self, peers: Collection[PeerId], wait_s: float) -> bool:
        """Make us known to peers and, if we may ask them, to the nodes near our place; say whether a peer answers.

        hivemind's own way to join asks before the ids are checked.
        """
        answers: list[bool] = []
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            async with asyncio.timeout(wait_s):
                answers += await asyncio.gather(*map(self._ask_door, peers))
                while answers and not any(answers):  # a peer is reached a moment before its node of the DHT answers
                    await asyncio.sleep(_ASK_AGAIN_S)
                    answers = await asyncio.gather(*map(self._ask_door, peers))
                await self._become_known()
        return any(answers)

    async def _ask_door(self, door: PeerId) -> bool:
        return await self.ask_time(door, door.to_base58(), is_door=True)

    @property
    def me(self) -> str:
        """Our own peer id in base 58."""
        return str(self._node.peer_id.to_base58())

    @property
    def neighbours(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    def is_neighbour(self, peer: PeerId) -> bool:
        return peer in self._node.protocol.routing_table.peer_id_to_uid

    def replace_store(self, store: StoreSubkey) -> None:
        self.storage.store_subkey = store

    def bound_readings(self, may_send: Callable[[int], bool]) -> None:
        """Show a caller the records that it may have, by `CallRules`, and none where it asks for nodes.

        hivemind packs what it finds before anybody can refuse: two megabytes, for a request of a hundred bytes.
        """
        get = self.storage.get

        def shown(key: Any) -> DhtEntry | None:
            reads = CALLER_READS.get()
            found = None if reads is False else get(key)
            if reads and found and not may_send(sum(len(each.value) for _, each in found.value.items())):
                raise PermissionError("this caller has read its share of records")
            return found

        self.storage.get = shown  # type: ignore[method-assign]

    def filter_answers(self, keep_good: Callable[[bytes, DhtEntries], None]) -> None:
        """Have what is bad in the answers of others dropped, by place and records.

        hivemind asks whether an answer with many records is good as a whole; it is made good instead.
        """

        def validate(place: bytes, dictionary: DhtEntries) -> bool:
            keep_good(place, dictionary)
            return True

        self._node.protocol._validate_dictionary = validate

    async def ping(self, peer_id: PeerId) -> bool:
        """Make us known to a node; say whether it answers."""
        return await self._node.protocol.call_ping(peer_id) is not None

    async def ask_time(self, peer_id: PeerId, voice: str, *, is_door: bool = False) -> bool:
        """Ping a node, and note the time of day that it tells; say whether it answers.

        A peer that does not know the run cannot say the id of its node, and counts for nothing. `voice`: whose answer
        its own is. `is_door`: we join by it.
        """
        told = list[float]()
        before = TOLD_TIME.set(told)
        try:
            node_id = await self._node.protocol.call_ping(peer_id)
        finally:
            TOLD_TIME.reset(before)
        if told and node_id == self._id_of(peer_id):
            CLOCK.note(voice, told[0], is_door=is_door)
        return node_id is not None

    async def nearest(self, place: bytes, most: int) -> tuple[PeerId, ...]:
        """Return the peers whose nodes are nearest to a place, of those that answer and of us; the nearest first."""
        await self._become_known()
        return await self._search(self._at(place), most)

    async def named(self, peer: PeerId, place: bytes) -> list[PeerId] | None:
        """Return the peers that one names as near a place; None: no answer."""
        query = self._at(place)
        if peer == self._node.peer_id:
            return self._true(self._node.protocol.routing_table.get_nearest_neighbors(query, _BUCKET))
        answer = await self._ask(peer, query)
        return None if answer is None else self._true(answer[1].items())

    def distance(self, place: bytes, peer: PeerId) -> int:
        """Return how far the node of a peer is from a place."""
        far: int = self._at(place).xor_distance(self._id_of(peer))
        return far

    def _at(self, place: bytes) -> Any:
        return type(self._node.node_id).from_bytes(place)

    async def _become_known(self) -> None:
        """Search our own place, until a search has ended; raise ConnectionResetError while we need a good ticket.

        Others do not wait for a search that is under way.
        """
        if self._is_known:
            return
        if self._admission is not None and (self._admission.own is None or self._admission.own.is_expired):
            # Nodes would refuse our calls, and hivemind would drop them from our table as silent ones.
            raise ConnectionResetError("we hold no ticket yet, without which no node of the DHT answers")
        self._is_known = True
        try:
            await self._search(self._node.node_id, _BUCKET)
        except BaseException:  # most often the caller's time is up
            self._is_known = False
            raise

    async def _search(self, query: Any, most: int) -> tuple[PeerId, ...]:
        """Search by `NodeSearch`.

        hivemind's own search believes in nodes that do not answer, so one liar on the way, who names a dozen that do
        not exist, hides all others.
        """
        table = self._node.protocol.routing_table.get_nearest_neighbors(query, most)

        @functools.cache
        def distance(peer: PeerId) -> int:
            far: int = query.xor_distance(self._id_of(peer))
            return far

        search = NodeSearch(distance, most, self._true(table), self._node.peer_id)
        while batch := search.next_batch():
            answers = await asyncio.gather(*(self._ask(peer, query) for peer in batch))
            for peer, answer in zip(batch, answers, strict=True):
                search.note(peer, None if answer is None else self._true(answer[1].items()))
        return tuple(search.nearest())

    def _true(self, named: Iterable[tuple[Any, PeerId]]) -> list[PeerId]:
        """Return the peers that are named with the ids of their nodes."""
        return [peer for node_id, peer in named if node_id == self._id_of(peer)]

    def check_ids(self, may_hand_over: Callable[[], bool] = lambda: True) -> None:
        """Refuse from now on every peer whose node says another id than the peer's; no refused one is a neighbour.

        hivemind looks at all that we keep for each new neighbour, and packs what that one should keep: names are free.
        """
        protocol, enter = self._node.protocol, self._node.protocol.update_routing_table
        met_s: dict[PeerId, float] = {}  # since when each of the latest peers has not been met as a new one

        async def checked(node_id: Any, peer_id: PeerId, responded: bool = True) -> None:
            CALLEE.set("")  # this is a task of hivemind, which may ask other peers by itself
            TOLD_TIME.set(None)
            if responded and node_id not in (None, self._id_of(peer_id)):
                self._refused[peer_id] = None
                if len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
            if self._is_refused(peer_id):
                node_id, responded = None, False  # so hivemind drops it from the table, and gives it no records to keep
            table = protocol.routing_table
            if responded and node_id is not None:
                is_met = loop_s() - met_s.get(peer_id, -math.inf) < _MET_S
                if is_met or (node_id not in table and not may_hand_over()):
                    table.add_or_update_node(node_id, peer_id)  # else hivemind hands it all records again
                else:
                    met_s.pop(peer_id, None)
                    met_s[peer_id] = loop_s()
                    if len(met_s) > _MOST_MET:
                        del met_s[next(iter(met_s))]
            await enter(node_id, peer_id, responded)
            if node_id is not None:
                spare = table.buckets[table.get_bucket_index(node_id)].replacement_nodes
                if len(spare) > _MOST_SPARE:  # hivemind remembers everybody who ever called
                    del table[next(iter(spare))]

        protocol.update_routing_table = checked

    async def _ask(self, peer: PeerId, query: Any) -> tuple[Any, Mapping[Any, PeerId]] | None:
        """Return what a peer holds at a place, and the nodes that it names; None: no answer, or not to be believed."""
        if self._is_refused(peer):
            return None
        with calling(peer):
            answer = await self._node._call_find_with_blacklist(peer, [query])
        await asyncio.sleep(0)  # hivemind enters who has answered in a task of its own
        return None if answer is None or self._is_refused(peer) else answer[query]

    def _is_refused(self, peer: PeerId) -> bool:
        """Say whether a peer's node says another id than the peer's, or its ticket is good no longer."""
        return peer in self._refused or (
            self._admission is not None and bool(self._admission.known_refusal(peer.to_base58()))
        )

    async def find(
        self, peer: PeerId, place: bytes, known: Mapping[str, Version] = MappingProxyType({})
    ) -> dict[str, DhtEntry] | None:
        """Return the records of a place that one peer holds, by subkey, as far as we believe it; None: no answer.

        `known`: versions that we have; what the peer holds of them does not travel.
        """
        query = self._at(place)
        if peer == self._node.peer_id:
            held = self.storage.get(query)
        else:
            before = KNOWN.set(known)
            try:
                answer = await self._ask(peer, query)
            finally:
                KNOWN.reset(before)
            if answer is None:
                return None
            held, _ = answer
        records: Any = getattr(held, "value", None)
        return dict(records.items()) if hasattr(records, "items") else {}

    async def store(self, peer: PeerId, place: bytes, subkey: str, packed: bytes, expiry: float) -> bool | None:
        """Store a record with one peer; say whether the peer took it, None where it does not answer."""
        query = self._at(place)
        if peer == self._node.peer_id:
            return self.storage.store_subkey(query, subkey, packed, expiry)
        if self._is_refused(peer):
            return None
        with calling(peer):
            taken = await self._node.protocol.call_store(peer, [query], [packed], [expiry], subkeys=[subkey])
        return bool(taken[0]) if taken else None

    async def shutdown(self) -> None:
        """Stop answering others."""
        await self._node.shutdown()


def _name_callers(client: Any) -> None:
    """Write into each request its caller, whose id libp2p has authenticated: hivemind does not tell authorizers.

    `CALLER` tells it to the validator.
    """
    add = client.add_protobuf_handler

    async def add_naming(name: str, handler: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        async def answer(request: Any, context: Any) -> Any:
            caller = context.remote_id.to_base58()
            request.auth.client_access_token.username = caller
            CALLER.set(caller)  # each request is answered in a task of its own
            return await handler(request, context)

        await add(name, answer, *arguments, **options)

    client.add_protobuf_handler = add_naming


def forget_ghosts(entries: Any) -> None:
    """Shorten the heap of a timed storage of hivemind's, which grows with everything that is stored once more."""
    heap = getattr(entries, "expiration_heap", None)
    if heap is not None and len(heap) > 2 * len(entries.key_to_heap) + _MOST_GHOSTS:
        heap[:] = entries.key_to_heap.values()
        heapq.heapify(heap)


def load_hivemind() -> HivemindParts:
    """Import the parts in use, quietly, and without torch (see the module's docstring); once, whatever the threads."""
    with _LOADING:
        return _loaded_hivemind()


@functools.cache
def _loaded_hivemind() -> HivemindParts:
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        raise daemon_trouble("the package hivemind is not installed")
    root = os.path.dirname(spec.origin)
    if "hivemind" not in sys.modules:
        utils = {
            "MSGPackSerializer": "serializer",
            "SerializerBase": "serializer",
            "get_logger": "logging",
            "DHTExpiration": "timed_storage",
            "get_dht_time": "timed_storage",
        }
        _enter_shell("hivemind", root, {})
        _enter_shell("hivemind.utils", f"{root}/utils", {name: f"hivemind.utils.{m}" for name, m in utils.items()})
        _enter_shell("hivemind.dht", f"{root}/dht", {})
    try:  # it makes a lock of processes, which we do not use
        from hivemind.dht.node import DHTNode
        from hivemind.dht.routing import DHTID
        from hivemind.p2p.p2p_daemon import P2P
        from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
        from hivemind.proto import p2pd_pb2
        from hivemind.utils.logging import use_hivemind_log_handler
        from hivemind.utils.multiaddr import Multiaddr
    except OSError as error:
        raise storage_error(
            "The package hivemind cannot be loaded.",
            why=f"{reason_of(error)}, as where /dev/shm is missing or not to be written",
            hint="mount /dev/shm, and let every user write there (mode 1777)",
        ) from None
    for module in ("utils.timed_storage", "dht.protocol", "dht.routing", "dht.node"):
        vars(importlib.import_module(f"hivemind.{module}"))["get_dht_time"] = CLOCK.unix_s
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)  # its errors are answers of strangers
    logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process
    return HivemindParts(P2P, PeerID, Multiaddr, DHTNode, DHTID, p2pd_pb2, f"{root}/hivemind_cli/p2pd")


def _enter_shell(name: str, path: str, names: Mapping[str, str]) -> None:
    """Enter a package in `sys.modules` whose modules can be imported and whose `__init__` is not run."""
    shell = types.ModuleType(name)
    shell.__path__ = [path]
    shell.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def find(attribute: str) -> Any:
        if attribute in names:
            return getattr(importlib.import_module(names[attribute]), attribute)
        raise AttributeError(attribute)

    shell.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[name] = shell


def daemon_trouble(why: str) -> UserError:
    """Return the error of hivemind's daemon that runs and does not do what it should."""
    return UserError(
        "The libp2p daemon did not work.",
        why=why,
        hint="start again; if it happens again, reinstall hivemind, whose package holds the daemon",
        code=Exit.DAEMON,
    )
