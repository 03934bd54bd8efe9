"""Records that expire, in hivemind's DHT.

Nothing is cached: the DHT is small, and a roster that is a minute old is worse than a slow one. A record is stored at
the nodes nearest to its key and carries its own expiry; the one that expires last wins.

Every record is signed by the peer that it is filed under (`record_checks`), its expiry included: an old record with a
later expiry would keep its peer's next ones out. We neither store unsigned records nor believe them when others return
them; hivemind would throw a node's whole answer away for one bad record in it, so we hand it the rest. We look at a
bounded number of records under one key, those that were known before first and then in an order that nobody outside
can guess: a flood costs us little, and hides nobody whom we see already.

Expiry is by the clock, and a clock may be set back: then our record in the DHT would outlive the new one, and the new
one be refused. So the expiry of what we publish never falls, as far as others still take it.

A second process with our key, as of a copied home that was started in the same moment, files its records under our
id. Then a node that took our last version has a later one, which we have not signed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from noloco_node.admission.ticket_service import Quota
from noloco_node.libp2p.addresses import RELAYS_KEY, PeerAddress
from noloco_node.libp2p.call_rules import CALLER, CallRules
from noloco_node.libp2p.control import Control
from noloco_node.libp2p.hivemind_compat import DaemonClient, DhtNode, HivemindParts
from noloco_node.libp2p.record_checks import (
    RECORD_BYTES,
    RECORD_LIFETIME_S,
    SIGNATURE_BYTES,
    BoundedStorage,
    Signatures,
    Signer,
    chosen,
    keep_believed,
    place_of,
    read_signer,
)
from noloco_node.libp2p.record_holders import SEARCHED, Holders, PeerId
from noloco_node.libp2p.settings import NetworkSettings, RunSecret, identity_in_use
from noloco_node.libp2p.short_answers import Version
from noloco_node.network.swarm_clock import CLOCK
from noloco_node.tasks import loop_s

_ANSWER_S = 5.0  # a node of the DHT has so long to answer one question
_MOST_PLACES = 4096
_CLOSE_S = 2.0
SIGHTINGS = 3
"""So many later and later versions show another process: a clock that was set back explains one of a former life."""
LOOKS_AT_ONCE, LOOK_REFILL_S = 512, 0.1
"""Records that one caller may have us look at. A signature takes a tenth of a millisecond: a thousandth of a core.

A node that meets a new neighbour hands all its records of some places over at once. Those beyond the bound are refused:
their peers publish them again soon.
"""
READ_BYTES, READ_BYTES_PER_S = 32 * 1024 * 1024, 1024 * 1024
"""Bytes of records that one caller may read, as they lie here: most readers have most of them, which do not travel.

A request of a hundred bytes can ask for two megabytes, which cost time to be packed and a line to be sent.
"""


class DhtRecords:
    """Our node of the DHT; `join` it before use. `identity`: the file of the key that our records are signed with."""

    def __init__(self, control: Control, identity: Path, secret: RunSecret, settings: NetworkSettings) -> None:
        self._control, self._identity, self._secret, self._settings = control, identity, secret, settings
        self._wait_s = settings.timeouts.dht_s
        self._signer: Signer | None = None
        self._node: DhtNode | None = None
        self._places: dict[bytes, Holders] = {}
        self._salt = os.urandom(16)
        self._looks = Quota(LOOKS_AT_ONCE, LOOK_REFILL_S)
        self._reads = Quota(READ_BYTES, 1 / READ_BYTES_PER_S)
        self._expiry: dict[tuple[str, str], float] = {}
        self._latest: dict[tuple[str, str], float] = {}
        """The latest expiry under our id that we have signed, or that we have seen."""
        self._sightings = 0
        self._kept: BoundedStorage | None = None

    @property
    def neighbours(self) -> int:
        return self._joined().neighbours

    def is_neighbour(self, peer_id: PeerId) -> bool:
        return self._joined().is_neighbour(peer_id)

    async def join(
        self, parts: HivemindParts, client: DaemonClient, bootstrap: Sequence[PeerAddress], wait_s: float
    ) -> bool:
        """Become a node of the DHT; say whether a peer that we join by answers."""
        signatures = Signatures(self._accepts, self._may_look)
        rules = CallRules(self._secret.code, self._settings.admission, self._may_send, self._may_hand_over)
        node = await self._control.bounded(DhtNode.create(parts, client, signatures, rules, _ANSWER_S), wait_s)
        self._kept = BoundedStorage(node.storage)
        node.replace_store(self._kept.store)
        node.filter_answers(
            lambda place, entries: keep_believed(place, entries, signatures, self._known(place), self._salt)
        )
        self._node = node
        return await node.join([parts.PeerID.from_base58(address.peer) for address in bootstrap], _ANSWER_S)

    def _known(self, place: bytes) -> Collection[str]:
        """Return the peers of which our last reading of a place found a record."""
        holders = self._places.get(place)
        return () if holders is None else holders.known

    def _accepts(self, place: bytes, peer: str, content: bytes) -> bool:
        """Say whether we keep a record of somebody's: those of relays carry no ticket."""
        admission = self._settings.admission
        is_relays = place == place_of(self._secret.key(RELAYS_KEY))
        return admission is None or is_relays or admission.accepts(peer, content)

    def _may_look(self) -> bool:
        """Say whether the peer that we answer may have us look at a record; what we ask for is bounded by `chosen`."""
        caller = CALLER.get()
        return not caller or self._looks.take(caller, loop_s())

    def _may_send(self, size: int) -> bool:
        """Say whether the peer that we answer may read so many bytes of records."""
        return self._reads.take(CALLER.get(), loop_s(), size)

    def _may_hand_over(self) -> bool:
        """Say whether we may look once more at all records that we keep for others: all new neighbours are one."""
        return self._kept is None or self._reads.take("", loop_s(), min(READ_BYTES, self._kept.size_bytes))

    async def greet(self, peer_id: PeerId) -> None:
        await self._control.bounded(self._joined().ping(peer_id), self._wait_s)

    async def ask_time(self, peer_id: PeerId, voice: str, *, is_door: bool) -> None:
        await self._control.bounded(self._joined().ask_time(peer_id, voice, is_door=is_door), self._wait_s)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """Store a record of ours; False when the DHT refused it or did not answer in time.

        Raises `UserError` (HOME_IN_USE) where another process publishes under our id.
        """
        if len(value) + SIGNATURE_BYTES > RECORD_BYTES or lifetime_s > RECORD_LIFETIME_S:
            raise ValueError(f"a record of {len(value)} bytes for {lifetime_s:g} s is more than the DHT takes")
        await self._look_for_copy(key, subkey)
        before = self._expiry.get((key, subkey), 0.0)
        expiry = next_expiry(before, lifetime_s, CLOCK.unix_s())
        signed = self._sign(key, expiry, value)
        self._expiry = {place: until for place, until in self._expiry.items() if until > CLOCK.unix_s()}
        self._expiry[key, subkey] = expiry
        self._latest = {place: until for place, until in self._latest.items() if until > CLOCK.unix_s()}
        self._latest[key, subkey] = max(expiry, self._latest.get((key, subkey), 0.0))
        storing = self._store(place_of(key), subkey, msgspec.msgpack.encode(signed), expiry)
        try:
            stored = await self._control.bounded(storing, self._wait_s)
        except ConnectionError:
            return False
        # As where our clock was far ahead: others still have the version before. A later one may be out meanwhile.
        if not stored and self._expiry.get((key, subkey)) == expiry:
            self._expiry[key, subkey] = before
        return stored

    async def _look_for_copy(self, key: str, subkey: str) -> None:
        """Ask a node that took our last version for the one that it has now, where that is due."""
        place = place_of(key)
        holders = self._places.get(place)
        witness = None if holders is None else holders.next_witness(loop_s())
        if holders is None or witness is None:
            return
        known = {peer: version for peer, version in holders.versions(CLOCK.unix_s()).items() if peer != subkey}
        try:
            (answer,) = await self._control.bounded(self._ask([witness], place, known), self._wait_s)
        except ConnectionError:
            return
        found = (answer or {}).get(subkey)
        if found is None or found.expiry <= self._latest.get((key, subkey), math.inf):
            return
        self._latest[key, subkey] = found.expiry
        self._sightings += 1
        if self._sightings >= SIGHTINGS:
            raise identity_in_use(
                f"it publishes under the peer id {subkey}, and {self._identity} holds its key", self._identity
            )

    async def _store(self, place: bytes, subkey: str, packed: bytes, expiry: float) -> bool:
        """Store a record with the nodes nearest to its place; say whether one of them took it."""
        node, holders = self._joined(), await self._searched(place)
        left, enough = holders.next_writing(loop_s())
        answered, stored = 0, False
        while left and answered < enough:
            asked, left = left[: enough - answered], left[enough - answered :]
            answers = await asyncio.gather(*(node.store(peer, place, subkey, packed, expiry) for peer in asked))
            for peer, took in zip(asked, answers, strict=True):
                if took is None:
                    holders.note_silence(peer, loop_s())
                    continue
                holders.note_answer(peer)
                answered += 1
                if took:
                    stored = True
                    holders.note_written(peer, expiry)
        return stored

    async def read(self, key: str) -> Mapping[str, bytes]:
        """Return the live records under `key` that their peers signed; a `ConnectionError` when the DHT does not
        answer.
        """
        place = place_of(key)
        found = await self._control.bounded(self._find(place), self._wait_s)
        return {subkey: msgspec.msgpack.decode(each.packed)[SIGNATURE_BYTES:] for subkey, each in found.items()}

    async def _find(self, place: bytes) -> dict[str, Version]:
        holders = await self._searched(place)
        known, found = holders.versions(CLOCK.unix_s()), dict[str, Version]()
        answers: dict[PeerId, dict[str, Version]] = {}
        wrote: dict[PeerId, float] = {}
        for number, group in enumerate(holders.next_reading(loop_s())):
            wrote |= {peer: holders.written(peer) for peer in group if not holders.is_candidate(peer)}
            # One first: the others leave out what it has told.
            for asked in (group,) if answers else (group[:1], group[1:]):
                for peer, answer in zip(asked, await self._ask(asked, place, known | found), strict=True):
                    if answer is None:
                        holders.note_silence(peer, loop_s())
                        continue
                    holders.note_answer(peer)
                    answers[peer] = answer
                    for subkey, version in answer.items():
                        if subkey not in found or version.expiry > found[subkey].expiry:
                            found[subkey] = version
            lacks = not answers or holders.lacks(found, CLOCK.unix_s())
            if not lacks and (number or not holders.is_stale(found, loop_s(), CLOCK.unix_s())):
                break
        else:
            holders.suspect()
        if not answers:
            raise ConnectionResetError("no node of the DHT answers that is near the key")
        holders.judge(answers, self._joined().me, wrote, loop_s(), CLOCK.unix_s())
        found = {subkey: found[subkey] for subkey in chosen(found, holders.known, self._salt)}
        holders.note_found(found, loop_s())
        return found

    async def _ask(
        self, peers: Sequence[PeerId], place: bytes, known: Mapping[str, Version]
    ) -> list[dict[str, Version] | None]:
        """Return what each of these nodes holds of a place; None where one does not answer. `known`: as for `find`."""
        found = await asyncio.gather(*(self._joined().find(peer, place, known) for peer in peers))
        return [
            None if entries is None else {k: Version(each.expiration_time, each.value) for k, each in entries.items()}
            for entries in found
        ]

    async def _searched(self, place: bytes) -> Holders:
        """Return what we know of a place, with the nodes near it."""
        if place not in self._places:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            for each in self._places.values():
                each.forget_expired(CLOCK.unix_s())
        node = self._joined()
        holders = self._places.setdefault(place, Holders(partial(node.distance, place)))
        if holders.is_search_due(loop_s(), node.neighbours):
            holders.note_search(await node.nearest(place, SEARCHED), loop_s(), node.neighbours)
        elif holders.is_hearing_due(loop_s()):
            peer = holders.next_teller(loop_s())
            named = await node.named(peer, place)
            if named is None:
                holders.note_silence(peer, loop_s())
            else:
                holders.note_named(peer, named, loop_s())
        return holders

    def _joined(self) -> DhtNode:
        if self._node is None:
            raise ConnectionResetError("we are no node of the DHT")
        return self._node

    def _sign(self, key: str, expiry: float, content: bytes) -> bytes:
        if self._signer is None:
            self._signer = read_signer(self._identity)
            assert self._signer is not None, "the network was opened with it"
        return self._signer.signed(place_of(key), expiry, content)

    async def close(self) -> None:
        if self._node is not None:
            with contextlib.suppress(ConnectionError):
                await self._control.bounded(self._node.shutdown(), _CLOSE_S)


def next_expiry(before: float, lifetime_s: float, unix_s: float) -> float:
    """Return when a record is to expire (Unix time): never before its last version, unless others refuse that."""
    wanted = unix_s + lifetime_s
    latest = unix_s + RECORD_LIFETIME_S
    return before + 1e-3 if wanted <= before < latest else wanted
