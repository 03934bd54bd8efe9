"""Records that expire, in hivemind's DHT.

Nothing is cached: the DHT is small, and a roster that is a minute old is worse than a slow one. A record is stored at
the nodes nearest to its key and carries its own expiry; the one that expires last wins. What we store for others is
bounded in number, size and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from noloco_node.libp2p.addresses import PeerAddress
from noloco_node.libp2p.control import Control

_RECORD_BYTES = 16 * 1024
_RECORD_LIFETIME_S = 3600.0
_CLOCK_ERROR_S = 60.0
_LENGTH_BYTES = 5
"""What MessagePack adds to the bytes of a value."""
_ANSWER_S = 5.0
"""For one node of the DHT to answer one question."""
_MOST_KEYS = 4096
_CLOSE_S = 2.0


class Records:
    """Our node of the DHT; `join` it before use."""

    def __init__(self, control: Control, wait_s: float) -> None:
        self._control, self._wait_s = control, wait_s
        self._node: Any = None
        self._unpublished = 0

    def __repr__(self) -> str:
        return f"Records({0 if self._node is None else self.neighbours} neighbours)"

    @property
    def neighbours(self) -> int:
        """How many other nodes of the DHT we know."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    def statistics(self) -> dict[str, int | float]:
        """Return counts since the start."""
        return {"publish.failed": self._unpublished}

    async def join(self, kind: Any, p2p: Any, bootstrap: Sequence[PeerAddress], wait_s: float) -> None:
        """Become a node of the DHT that the bootstrap peers are in; `kind` is hivemind's DHTNode."""
        creating = kind.create(
            p2p=p2p,
            initial_peers=[f"/p2p/{address.peer}" for address in bootstrap],
            wait_timeout=_ANSWER_S,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            record_validator=RecordLimits(),
            ensure_bootstrap_success=False,
            strict=False,
        )
        self._node = await self._control.bounded(creating, wait_s)
        self._node.protocol.storage.maxsize = _MOST_KEYS

    async def greet(self, peer_id: Any) -> None:
        """Make ourselves known to a node (again); `peer_id` is hivemind's PeerID."""
        await self._control.bounded(self._node.protocol.call_ping(peer_id), self._wait_s)

    async def publish(self, key: str, subkey: str, value: bytes, lifetime_s: float) -> bool:
        """Store a record; False when the DHT refused it or did not answer in time."""
        if len(value) > _RECORD_BYTES or lifetime_s > _RECORD_LIFETIME_S:
            raise ValueError(f"a record of {len(value)} bytes for {lifetime_s:g} s is more than the DHT takes")
        storing = self._node.store(key, value, time.time() + lifetime_s, subkey=subkey)
        try:
            stored = bool(await self._control.bounded(storing, self._wait_s))
        except ConnectionError:
            stored = False
        self._unpublished += not stored
        return stored

    async def read(self, key: str) -> Mapping[str, bytes]:
        """Return the live records under `key`; a `ConnectionError` when the DHT does not answer."""
        found = await self._control.bounded(self._node.get(key, latest=True), self._wait_s)
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            subkey: entry.value
            for subkey, entry in found.value.items()
            if isinstance(subkey, str) and isinstance(entry.value, bytes)
        }

    async def close(self) -> None:
        """Stop answering others; returns soon even when the daemon is gone."""
        if self._node is not None:
            with contextlib.suppress(ConnectionError):
                await self._control.bounded(self._node.shutdown(), _CLOSE_S)


def overlook_orphans(loop: asyncio.AbstractEventLoop) -> None:
    """Keep asyncio from complaining about one thing: tasks that hivemind's search drops while they wait for an event.

    A search starts such a task at each hop and forgets it; when the search is cut off, as all are when the daemon dies,
    the garbage collector finds them pending, and asyncio would print a line for each on the person's screen.
    """
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        task = context.get("task")
        orphan = isinstance(task, asyncio.Task) and getattr(task.get_coro(), "__qualname__", "") == "Event.wait"
        if orphan and "was destroyed" in context.get("message", ""):
            return
        if before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class RecordLimits:
    """Decides for hivemind which records are stored here and which are believed when others return them.

    Keys of records and values are MessagePack to hivemind; one that does not decode would make every reading of its key
    fail, so it counts as none. The subkey must be text: a record without one would take the place of all others.
    """

    def validate(self, record: Any) -> bool:
        """Say whether a record is one of ours by its form."""
        if (
            len(record.value) > _RECORD_BYTES + _LENGTH_BYTES
            or not 0.0 < record.expiration_time <= time.time() + _RECORD_LIFETIME_S + _CLOCK_ERROR_S
        ):
            return False
        try:
            msgspec.msgpack.decode(record.subkey, type=str)
            msgspec.msgpack.decode(record.value, type=bytes)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        return True

    def sign_value(self, record: Any) -> bytes:
        """Return the value as it is: records bear no signature."""
        return bytes(record.value)

    def strip_value(self, record: Any) -> bytes:
        """Return the value as it is."""
        return bytes(record.value)
