"""The files that a run starts from travel between peers: weights, and the tokenizer that goes with them.

Every node serves the pieces that it has, and fetches those that its stage needs in an order of its own, so that the
first copy leaves the owner once. A peer without a piece answers with the pieces of the file that it has. Only the
digests of the run file are believed (`noloco_node.storage.weight_store`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from noloco_node.network.calls import patient
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, Schema, Violation
from noloco_node.storage.weight_store import MOST_HELD_BYTES, FilePieceKey, WeightStore, disk_errors, is_held
from noloco_node.tasks import loop_s
from noloco_node.units import Count

if TYPE_CHECKING:
    from gossip.interface import Compute

TOPIC = "weights"
TOKENIZER_TOPIC = "tokenizer"
STREAMS = 4  # of one newcomer, each to a peer
STREAMS_SERVED = 32
PATIENCE_S = 60.0  # for one message
STANDS_STILL_S = 5.0  # if all streams are taken, one gives way whose peer has asked for nothing for so long
ASK_AGAIN_S = 30.0  # after this time a peer may have new pieces
SLOW_S = 20.0  # a peer that takes so long for a piece is asked again if no quicker one has what is left


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigestsRequest:
    """Asks for the digests of a file's pieces."""

    file: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePieceRequest:
    """Asks for a piece of a file."""

    file: Count
    number: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class FileContent:
    """The requested bytes, or none; `held`: then, the pieces of the file that the peer has (a bit each)."""

    content: bytes
    held: bytes = b""


SCHEMA = Schema(
    {
        FileDigestsRequest: MessageSpec("FileDigestsRequest"),
        FilePieceRequest: MessageSpec("FilePieceRequest"),
        FileContent: MessageSpec("FileContent", header_bytes=LONG_HEADER_BYTES, added=("held",)),
    }
)


@dataclass(eq=False, slots=True)
class _Stream:
    """A stream that is served. `since_s`: when its peer last asked for a piece or took one."""

    peer: str
    end: asyncio.Timeout
    since_s: float


class WeightServer:
    """Serves the pieces of a store. `job`: runs the reading of the disk."""

    def __init__(self, store: WeightStore, job: Compute) -> None:
        self._store, self._job = store, job
        self._streams: list[_Stream] = []

    async def serve(self, conversation: Conversation) -> None:
        """Answer the requests of one stream until the newcomer leaves; answer none if there are too many streams."""
        peer = conversation.peer
        if not self._has_room(peer):
            return
        with suppress(ConnectionResetError, TimeoutError):
            async with asyncio.timeout(None) as end:
                stream = _Stream(peer, end, loop_s())
                self._streams.append(stream)
                try:
                    await self._answer(conversation, stream)
                finally:
                    if stream in self._streams:
                        self._streams.remove(stream)

    def _has_room(self, peer: str) -> bool:
        """Say whether a peer may have one more stream; end another stream for it if need be."""
        count = Counter(stream.peer for stream in self._streams)
        if count[peer] >= STREAMS:
            return False
        if len(self._streams) < STREAMS_SERVED:
            return True
        now_s = loop_s()
        last = max(self._streams, key=lambda stream: (count[stream.peer], now_s - stream.since_s))
        if count[last.peer] <= count[peer] + 1:
            last = min(self._streams, key=lambda stream: stream.since_s)
            if now_s - last.since_s < STANDS_STILL_S:
                return False
        self._streams.remove(last)
        last.end.reschedule(now_s)
        return True

    async def _answer(self, conversation: Conversation, stream: _Stream) -> None:
        while True:
            async with patient(conversation, PATIENCE_S):
                request = await conversation.receive()
            stream.since_s = loop_s()
            content = None
            while content is None:  # a disk with gigabytes is looked at in many short jobs
                content = await self._job(self._content, request)
            async with patient(conversation, PATIENCE_S):
                await conversation.send(content)
            stream.since_s = loop_s()

    def _content(self, request: object) -> FileContent | None:
        """Return the reply; None as long as the store has not looked at all of the file that it lacks a piece of."""
        if not isinstance(request, FileDigestsRequest | FilePieceRequest):
            raise Violation(f"expected a request, got {type(request).__name__}")
        if not 0 <= request.file < len(self._store.files):
            raise Violation(f"there is no file {request.file}")
        if isinstance(request, FileDigestsRequest):
            return FileContent(content=self._store.digests(request.file) or b"")
        key = FilePieceKey(request.file, request.number)
        if content := self._store.read(key):
            return FileContent(content=content)
        return FileContent(content=b"", held=self._store.others_held(key)) if self._store.look(key.file) else None


class WeightDownload:
    """Fetches pieces into a store. `tell`: is told how many pieces are here, of how many."""

    def __init__(
        self,
        network: PeerNetwork,
        store: WeightStore,
        job: Compute,
        tell: Callable[[int, int], None] = lambda *_: None,
        topic: str = TOPIC,
    ) -> None:
        self._network, self._store, self._job, self._tell, self._topic = network, store, job, tell, topic
        self._held: dict[tuple[str, int], _Held] = {}
        self._slow: set[str] = set()
        self._streams = Counter[str]()  # to each peer
        self._missing: deque[FilePieceKey] = deque()  # the pieces still to come, of `_count`
        self._count = 0

    async def everything(self, peers: Sequence[str]) -> bool:
        """Fetch all files; say whether all pieces are here."""
        return await self.digests(peers) and await self.pieces(self._store.all_pieces(), peers)

    async def digests(self, peers: Sequence[str]) -> bool:
        """Fetch the digests of all files, from one peer after the other; say whether all are here.

        The last ones are asked soon: they are bootstrap peers, and those before them may be many names of a stranger.
        """
        for peer in dict.fromkeys(chain.from_iterable(zip(peers, reversed(peers), strict=True))):
            lacking = [file for file in range(len(self._store.files)) if self._store.digests(file) is None]
            if not lacking:
                break
            with suppress(ConnectionError):
                try:
                    async with self._network.talk(peer, self._topic, SCHEMA) as conversation:
                        for file in lacking:
                            reply = await _ask(conversation, FileDigestsRequest(file=file))
                            if not reply.content:
                                break
                            await self._keep(peer, self._store.learn, file, reply.content)
                except TimeoutError:
                    self._slow.add(peer)
        return all(self._store.digests(file) is not None for file in range(len(self._store.files)))

    async def pieces(self, keys: Sequence[FilePieceKey], peers: Sequence[str]) -> bool:
        """Fetch pieces from all peers that have them; say whether all are here. A piece that has come stays."""
        missing = await self._job(self._store.missing, keys)
        if not missing:
            return True
        with disk_errors(self._store.directory):
            await self._job(self._store.check_room, len(missing))
        Random(self._network.peer_id).shuffle(missing)
        self._missing, self._count = deque(missing), len(keys)
        async with asyncio.TaskGroup() as group:
            for first in range(min(STREAMS, len(peers))):
                group.create_task(self._stream([*peers[first:], *peers[:first]]))
        return not await self._job(self._store.missing, keys)

    async def _stream(self, peers: Sequence[str]) -> None:
        left = list(peers)
        while left:
            peer = min(left, key=self._order)
            left.remove(peer)
            if not self._may_have_any(peer):
                continue
            is_slow = peer in self._slow or not any(
                other not in self._slow and self._may_have_any(other) for other in left
            )
            self._streams[peer] += 1
            with suppress(ConnectionError):
                try:
                    async with self._network.talk(peer, self._topic, SCHEMA) as conversation:
                        await self._drain(conversation, PATIENCE_S if is_slow else SLOW_S)
                except TimeoutError:
                    self._slow.add(peer)
                    if not is_slow:
                        left.append(peer)
            self._streams[peer] -= 1

    async def _drain(self, conversation: Conversation, patience_s: float) -> None:
        peer = conversation.peer
        while (key := self._take(peer)) is not None:
            came = False
            try:
                reply = await _ask(conversation, FilePieceRequest(file=key.file, number=key.number), patience_s)
                if reply.content:
                    await self._keep(peer, self._store.write, key, reply.content)
                    came = True
                    self._tell(self._count - len(self._missing), self._count)
                else:
                    self._held[peer, key.file] = _Held(loop_s(), reply.held[:MOST_HELD_BYTES])
                    if is_held(reply.held, key.number):
                        raise Violation(f"{peer} does not give a piece that it says it has")
            finally:
                if not came:
                    self._missing.append(key)

    def _take(self, peer: str) -> FilePieceKey | None:
        """Take the next of the missing pieces to ask a peer for; None if there is none."""
        for _ in range(len(self._missing)):
            key = self._missing.popleft()
            if self._may_have(peer, key):
                return key
            self._missing.append(key)
        return None

    def _order(self, peer: str) -> tuple[bool, int]:
        """Return how late to ask a peer: in the order of the list, but where some are slow the streams spread."""
        return peer in self._slow, self._streams[peer] if self._slow else 0

    def _may_have_any(self, peer: str) -> bool:
        return any(self._may_have(peer, key) for key in self._missing)

    def _may_have(self, peer: str, key: FilePieceKey) -> bool:
        """Say whether to ask a peer for a piece: the peer says that it has it, or has said nothing for a while."""
        told = self._held.get((peer, key.file))
        return told is None or loop_s() - told.at_s >= ASK_AGAIN_S or is_held(told.pieces, key.number)

    async def _keep(self, peer: str, keep: Callable[..., None], what: object, content: bytes) -> None:
        try:
            with disk_errors(self._store.directory):
                await self._job(keep, what, content)
        except ValueError as lie:
            raise ConnectionAbortedError(f"{peer}: {lie}") from lie


class _Held(NamedTuple):
    """The pieces of a file that a peer said it has, and when (loop seconds)."""

    at_s: float
    pieces: bytes


async def _ask(conversation: Conversation, request: object, patience_s: float = PATIENCE_S) -> FileContent:
    async with asyncio.timeout(patience_s):
        await conversation.send(request)
        reply = await conversation.receive()
    if not isinstance(reply, FileContent):
        raise Violation(f"expected content, got {type(reply).__name__}")
    return reply
