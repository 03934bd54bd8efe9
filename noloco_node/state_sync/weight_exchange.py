"""The files that a run starts from, on their way to those who begin it: weights, and the tokenizer that goes with them.

Whoever has pieces of them answers for these: the owner of the checkpoint (`bootstrap --weights`, `join --weights`), and
every node that has fetched some. A newcomer asks the nodes before the bootstrap peers, and fetches its pieces in an
order of its own: so the first copy leaves the owner once, and the rest travels between newcomers. Of the weights a node
fetches what its stage needs; the tokenizer is small, and every node has all of it.

What comes is believed by the digests of the run file alone (`noloco_node.storage.weight_store`). A message is bounded,
and streams are few: a stranger costs a peer at most `STREAMS_SERVED` pieces of memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.question import patient
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, Schema, Violation
from noloco_node.storage.weight_store import FilePieceKey, WeightStore, refused_by_disk
from noloco_node.units import Count

if TYPE_CHECKING:
    from gossip.exchange.swap import Compute

TOPIC = "weights"
TOKENIZER_TOPIC = "tokenizer"
STREAMS = 4
"""Of one newcomer at once, each to a peer."""
STREAMS_SERVED = 32
PATIENCE_S = 60.0
"""For one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigestsRequest:
    """Send me the digests of a file's pieces, please."""

    file: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePieceRequest:
    """Send me a piece of a file, please."""

    file: Count
    number: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class FileContent:
    """What was asked for; empty where it is not here."""

    content: bytes


SCHEMA = Schema(
    {
        FileDigestsRequest: MessageSpec("FileDigestsRequest"),
        FilePieceRequest: MessageSpec("FilePieceRequest"),
        FileContent: MessageSpec("FileContent", header_bytes=LONG_HEADER_BYTES),
    }
)


class WeightServer:
    """Gives the pieces that a store holds. `job`: runs what reads the disk."""

    def __init__(self, store: WeightStore, job: Compute) -> None:
        self._store, self._job = store, job
        self._streams: Counter[str] = Counter()

    async def serve(self, conversation: Conversation) -> None:
        """Answer the requests of one stream until the newcomer leaves; nothing where there are too many of them."""
        peer = conversation.peer
        if self._streams.total() >= STREAMS_SERVED or self._streams[peer] >= STREAMS:
            return
        self._streams[peer] += 1
        try:
            while True:
                async with patient(conversation, PATIENCE_S):
                    request = await conversation.receive()
                content = await self._job(self._content, request)
                async with patient(conversation, PATIENCE_S):
                    await conversation.send(FileContent(content=content))
        except ConnectionResetError:
            return
        finally:
            self._streams -= Counter([peer])  # which forgets peers without a stream

    def _content(self, request: object) -> bytes:
        if not isinstance(request, FileDigestsRequest | FilePieceRequest):
            raise Violation(f"expected a request, got {type(request).__name__}")
        if not 0 <= request.file < len(self._store.files):
            raise Violation(f"there is no file {request.file}")
        if isinstance(request, FileDigestsRequest):
            return self._store.digests(request.file) or b""
        return self._store.read(FilePieceKey(request.file, request.number)) or b""


class WeightDownload:
    """Fetches pieces into a store. `tell`: how many pieces are here, of how many. `topic`: by which they are asked."""

    def __init__(
        self,
        network: PeerNetwork,
        store: WeightStore,
        job: Compute,
        tell: Callable[[int, int], None] = lambda *_: None,
        topic: str = TOPIC,
    ) -> None:
        self._network, self._store, self._job, self._tell, self._topic = network, store, job, tell, topic

    async def everything(self, peers: Sequence[str]) -> bool:
        """Fetch all files; say whether all is here."""
        return await self.digests(peers) and await self.pieces(self._store.all_pieces(), peers)

    async def digests(self, peers: Sequence[str]) -> bool:
        """Fetch the digests of all files from the first that has them; say whether all are here."""
        for peer in peers:
            lacking = [file for file in range(len(self._store.files)) if self._store.digests(file) is None]
            if not lacking:
                break
            with suppress(ConnectionError, TimeoutError):
                async with self._network.talk(peer, self._topic, SCHEMA) as conversation:
                    for file in lacking:
                        content = await _ask(conversation, FileDigestsRequest(file=file))
                        if content:
                            await self._keep(peer, self._store.learn, file, content)
        return all(self._store.digests(file) is not None for file in range(len(self._store.files)))

    async def pieces(self, keys: Sequence[FilePieceKey], peers: Sequence[str]) -> bool:
        """Fetch pieces from all who have them; say whether all are here. What has come stays."""
        missing = await self._job(self._store.missing, keys)
        if not missing:
            return True
        try:
            await self._job(self._store.check_room, len(missing))
        except OSError as error:
            raise refused_by_disk(self._store.directory, error) from error
        Random(self._network.peer_id).shuffle(missing)
        progress = _Progress(deque(missing), len(keys), self._tell)
        async with asyncio.TaskGroup() as group:
            for first in range(min(STREAMS, len(peers))):
                group.create_task(self._stream([*peers[first:], *peers[:first]], progress))
        return not await self._job(self._store.missing, keys)

    async def _stream(self, peers: Sequence[str], progress: _Progress) -> None:
        """Ask one peer after the other for what is missing."""
        for peer in peers:
            if not progress.missing:
                return
            with suppress(ConnectionError, TimeoutError):
                async with self._network.talk(peer, self._topic, SCHEMA) as conversation:
                    await self._drain(conversation, progress)

    async def _drain(self, conversation: Conversation, progress: _Progress) -> None:
        """Ask a peer once for each piece that is missing."""
        for _ in range(len(progress.missing)):
            if not progress.missing:
                return
            key, came = progress.missing.popleft(), False
            try:
                content = await _ask(conversation, FilePieceRequest(file=key.file, number=key.number))
                if content:
                    await self._keep(conversation.peer, self._store.write, key, content)
                    came = True
                    progress.tell(progress.count - len(progress.missing), progress.count)
            finally:
                if not came:
                    progress.missing.append(key)

    async def _keep(self, peer: str, keep: Callable[..., None], what: object, content: bytes) -> None:
        try:
            await self._job(keep, what, content)
        except ValueError as lie:
            raise ConnectionAbortedError(f"{peer}: {lie}") from lie
        except OSError as error:
            raise refused_by_disk(self._store.directory, error) from error


@dataclass(slots=True)
class _Progress:
    """What is still to come of so many pieces."""

    missing: deque[FilePieceKey]
    count: int
    tell: Callable[[int, int], None]


async def _ask(conversation: Conversation, request: object) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        await conversation.send(request)
        reply = await conversation.receive()
    if not isinstance(reply, FileContent):
        raise Violation(f"expected content, got {type(reply).__name__}")
    return reply.content
