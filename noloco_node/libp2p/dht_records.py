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
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noloco_node.errors import Exit, UserError
from noloco_node.libp2p.addresses import RELAYS_KEY, PeerAddress
from noloco_node.libp2p.control import Control
from noloco_node.libp2p.hivemind_compat import DaemonClient, DhtEntries, DhtNode, HivemindParts, PeerId
from noloco_node.libp2p.record_checks import (
    RECORD_BYTES,
    RECORD_LIFETIME_S,
    SIGNATURE_BYTES,
    BoundedStorage,
    Signatures,
    Signer,
    content_of,
    keep_signed,
    place_of,
    read_signer,
    shorten,
)
from noloco_node.libp2p.settings import NetworkSettings, RunSecret

_ANSWER_S = 5.0
"""A node of the DHT has so long to answer one question."""
_MOST_PLACES = 4096
_CLOSE_S = 2.0


class DhtRecords:
    """Our node of the DHT; `join` it before use. `identity`: the file of the key that our records are signed with."""

    def __init__(self, control: Control, identity: Path, secret: RunSecret, settings: NetworkSettings) -> None:
        self._control, self._identity, self._secret, self._settings = control, identity, secret, settings
        self._wait_s = settings.timeouts.dht_s
        self._signer: Signer | None = None
        self._node: DhtNode | None = None
        self._known: dict[bytes, frozenset[str]] = {}
        """The subkeys that the last reading of each place found."""
        self._begun: dict[bytes, list[Any]] = {}
        """By place, what we kept there ourselves when each reading that is under way began."""
        self._expiry: dict[tuple[str, str], float] = {}
        self.unpublished = 0
        """Records that the DHT did not take."""

    @property
    def neighbours(self) -> int:
        return self._joined().neighbours

    async def join(
        self, parts: HivemindParts, client: DaemonClient, bootstrap: Sequence[PeerAddress], wait_s: float
    ) -> None:
        peers = [address.peer for address in bootstrap]
        node = await self._control.bounded(
            DhtNode.create(parts, client, peers, Signatures(self._accepts), self._secret.code, _ANSWER_S), wait_s
        )
        node.replace_store(BoundedStorage(node.storage).store)
        salt = os.urandom(16)

        def prune(place: bytes, dictionary: DhtEntries) -> None:
            own = self._kept(place)
            # Records that were put there since a reading began are no part of it.
            ours = all(begun is own for begun in self._begun.get(place, ()))
            kept = {subkey: entry.expiration_time for subkey, entry in own.items()} if ours else {}
            keep_signed(place, dictionary, self._known.get(place, frozenset()), salt, kept)

        node.filter_answers(prune)
        self._node = node

    def _accepts(self, place: bytes, peer: str, content: bytes) -> bool:
        """Say whether we keep a record of somebody's: relays tell of themselves before there is a ticket."""
        accepts = self._settings.accepts
        return accepts is None or place == place_of(self._secret.key(RELAYS_KEY)) or accepts(peer, content)

    async def greet(self, peer_id: PeerId) -> None:
        await self._control.bounded(self._joined().ping(peer_id), self._wait_s)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """Store a record of ours; False when the DHT refused it or did not answer in time."""
        if len(value) + SIGNATURE_BYTES > RECORD_BYTES or lifetime_s > RECORD_LIFETIME_S:
            raise ValueError(f"a record of {len(value)} bytes for {lifetime_s:g} s is more than the DHT takes")
        expiry = next_expiry(self._expiry.get((key, subkey), 0.0), lifetime_s, time.time())
        signed = self._sign(key, expiry, value)
        self._expiry = {place: until for place, until in self._expiry.items() if until > time.time()}
        self._expiry[key, subkey] = expiry
        storing = self._joined().store(key, subkey, signed, expiry)
        try:
            stored = await self._control.bounded(storing, self._wait_s)
        except ConnectionError:
            stored = False
        self.unpublished += not stored
        return stored

    async def read(self, key: str) -> Mapping[str, bytes]:
        """Return the live records under `key` that their peers signed; a `ConnectionError` when the DHT does not
        answer.
        """
        place = place_of(key)
        own = self._kept(place)
        before = frozenset(dict(own.items()))
        self._begun.setdefault(place, []).append(own)
        try:
            found = await self._control.bounded(self._joined().get(key), self._wait_s)
        finally:
            begun = self._begun[place]
            del begun[next(number for number, each in enumerate(begun) if each is own)]
            if not begun:
                del self._begun[place]
            shorten(self._kept(place), before)
        contents = {}
        if found is not None and isinstance(found.value, dict):
            for subkey, entry in found.value.items():
                if isinstance(subkey, str) and isinstance(entry.value, bytes):
                    content = content_of(place, subkey, entry.expiration_time, entry.value)
                    if content is not None:
                        contents[subkey] = content
        if len(self._known) >= _MOST_PLACES:
            self._known.clear()
        self._known[place] = frozenset(contents)
        return contents

    def _kept(self, place: bytes) -> Any:
        return getattr(self._joined().storage.get(int.from_bytes(place)), "value", {})

    def _joined(self) -> DhtNode:
        if self._node is None:
            raise ConnectionResetError("we are no node of the DHT")
        return self._node

    def _sign(self, key: str, expiry: float, content: bytes) -> bytes:
        if self._signer is None:
            self._signer = read_signer(self._identity)
        if self._signer is None:
            raise UserError(
                "The records of this peer cannot be signed.",
                why=f"the key in {self._identity} is not an Ed25519 key",
                hint="move the file away to become a new peer; the weights in the home directory stay",
                code=Exit.STORAGE,
            )
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
