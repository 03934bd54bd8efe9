"""A DHT in memory and in virtual time, asked by `DhtRecords`: its nodes die, lie, or cannot be reached."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from noloco_node.libp2p import dht_records
from noloco_node.libp2p.dht_records import DhtRecords
from noloco_node.libp2p.record_checks import SIGNATURE_BYTES
from noloco_node.libp2p.settings import NetworkSettings, RunSecret

UNIX_S = 1.8e9
"""The time of day when the virtual clock is at 0."""
ANSWER_S = 5.0
"""For so long a node that does not answer is waited for."""

NAMED = 8
"""Neighbours that a node names in an answer."""

Entries = dict[str, Any]
"""The records of a place by subkey, each with `value` and `expiration_time`, as hivemind shows them."""


class MemoryDht:
    """All nodes by name, and what each keeps by place.

    `dead` nodes do not answer, `liars` take all and keep nothing, `frozen` keep what they have, `mirrors` show each
    peer its own record alone. Nodes of different `sides` do not reach each other; one without a side is on side 0.
    `finds_silent`: whether a search finds nodes that do not answer, too; production's leaves them out.
    """

    def __init__(self, *, finds_silent: bool = True) -> None:
        self._finds_silent = finds_silent
        self.kept: dict[str, dict[bytes, Entries]] = {}
        self.dead, self.liars, self.frozen, self.mirrors = set[str](), set[str](), set[str](), set[str]()
        self.sides: dict[str, int] = {}
        self.asked = Counter[str]()
        """How many nodes each peer has asked for records."""

    def nearest(self, place: bytes, most: int) -> list[str]:
        return sorted(self.kept, key=lambda name: _far(place, name))[:most]

    def search(self, peer: str, place: bytes, most: int) -> list[str]:
        """Return the nearest nodes that a peer finds."""
        if self._finds_silent:
            return self.nearest(place, most)
        return [name for name in self.nearest(place, len(self.kept)) if self.reaches(peer, name)][:most]

    def reaches(self, peer: str, other: str) -> bool:
        return other not in self.dead and self.sides.get(peer, 0) == self.sides.get(other, 0)

    def peer(self, name: str) -> DhtRecords:
        """Let a peer join with its node; return its records, which are not signed.

        Its neighbours hand it the records that it should have, as hivemind does.
        """
        self.kept[name] = {}
        for place in {place for kept in self.kept.values() for place in kept}:
            near = [other for other in self.nearest(place, NAMED) if self.reaches(name, other)]
            if name in near and len(near) > 1:
                held = self.kept[next(other for other in near if other != name)].get(place, {})
                self.kept[name][place] = dict(held)
        control: Any = SimpleNamespace(bounded=_bounded)
        records = DhtRecords(control, Path("unused"), RunSecret("run"), NetworkSettings(run="run"))
        node: Any = MemoryNode(self, name)
        records._node = node
        records._sign = lambda key, expiry, content: bytes(SIGNATURE_BYTES) + content  # type: ignore[method-assign]
        return records


class MemoryNode:
    """What `DhtNode` does, for one peer of a `MemoryDht`."""

    def __init__(self, dht: MemoryDht, me: str) -> None:
        self.dht, self.me = dht, me

    @property
    def neighbours(self) -> int:
        return max(0, len(self.dht.kept) - 1)

    async def nearest(self, place: bytes, most: int) -> tuple[str, ...]:
        return tuple(self.dht.search(self.me, place, most))

    async def named(self, peer: str, place: bytes) -> list[str] | None:
        if not self.dht.reaches(self.me, peer):
            await asyncio.sleep(ANSWER_S)
            return None
        return self.dht.search(peer, place, NAMED)

    def distance(self, place: bytes, peer: str) -> int:
        return _far(place, peer)

    async def find(self, peer: str, place: bytes, known: object) -> Entries | None:
        self.dht.asked[self.me] += 1
        if not self.dht.reaches(self.me, peer):
            await asyncio.sleep(ANSWER_S)
            return None
        now_s = UNIX_S + asyncio.get_running_loop().time()
        entries = self.dht.kept[peer].get(place, {})
        kept = {subkey: each for subkey, each in entries.items() if each.expiration_time > now_s}
        return {subkey: each for subkey, each in kept.items() if peer not in self.dht.mirrors or subkey == self.me}

    async def store(self, peer: str, place: bytes, subkey: str, packed: bytes, expiry: float) -> bool | None:
        if not self.dht.reaches(self.me, peer):
            await asyncio.sleep(ANSWER_S)
            return None
        if peer not in self.dht.liars | self.dht.frozen:
            entries = self.dht.kept[peer].setdefault(place, {})
            entries[subkey] = SimpleNamespace(value=packed, expiration_time=expiry)
        return True


class MemoryPeerNetwork:
    """What `Membership` needs of a peer's network, as `Libp2pNetwork` does it over these records."""

    def __init__(self, peer_id: str, records: DhtRecords) -> None:
        self.peer_id, self._records = peer_id, records

    async def addresses(self) -> tuple[str, ...]:
        return ()

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        return await self._records.publish(key, subkey, value, lifetime_s)

    async def read_all(self, keys: list[str]) -> list[Mapping[str, bytes] | None]:
        async def read(key: str) -> Mapping[str, bytes] | None:
            try:
                return await self._records.read(key)
            except ConnectionError:
                return None

        return list(await asyncio.gather(*map(read, keys)))


@contextmanager
def virtual_time_of_day() -> Iterator[None]:
    """Let records expire by the virtual clock."""
    clock = SimpleNamespace(unix_s=unix_s)
    with patch.object(dht_records, "CLOCK", clock):
        yield


def unix_s() -> float:
    return UNIX_S + asyncio.get_running_loop().time()


async def _bounded(call: Coroutine[Any, Any, Any], wait_s: float) -> Any:
    """Await a call without a deadline: no answer here takes as long as `wait_s`."""
    return await call


@cache
def _far(place: bytes, name: str) -> int:
    return int.from_bytes(hashlib.sha256(place + name.encode()).digest())
