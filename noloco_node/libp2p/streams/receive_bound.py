"""What others send on streams that we answer and nobody has received yet: bounded in bytes, for each peer and in all.

A message is checked against its schema before memory is taken for it, but a stranger may open many streams and send
something good on each, faster than handlers take it, or never to its end. Memory is taken as bytes come, so it is those
that count. When they are too many, the stream that has held some the longest is broken off: nobody waits for room, so
nobody can keep others waiting by holding it, and to fill it again and again costs a line.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)


class ReceiveBudget:
    """The bytes of all streams that we answer."""

    def __init__(self, most_bytes: int) -> None:
        """Bear with so many bytes in all, and half of them of one peer; one stream alone may have more."""
        self._most_bytes = most_bytes
        self._streams: dict[StreamBudget, None] = {}
        """Of streams that hold something, in the order in which they began to."""
        self._held: Counter[str] = Counter()
        self.evicted = 0
        """Streams broken off for their bytes."""

    @property
    def held_bytes(self) -> int:
        """The bytes that are held now."""
        return self._held.total()

    def expect(self, message_bytes: int) -> None:
        """Have room for two peers who each have two messages of this size on a stream, whatever the bound was."""
        self._most_bytes = max(self._most_bytes, 4 * message_bytes)

    def more(self, stream: StreamBudget, size: int) -> None:
        """Hold more bytes; streams may be broken off for them, this one as well."""
        if not stream.held:
            self._streams[stream] = None
        stream.held += size
        self._held[stream.peer] += size
        if self._is_greedy(stream.peer):
            self._evict(
                [each for each in self._streams if each.peer == stream.peer], lambda: self._is_greedy(stream.peer)
            )
        if self._is_full():
            self._evict(list(self._streams), self._is_full)

    def less(self, stream: StreamBudget, size: int) -> None:
        """Hold fewer bytes."""
        stream.held -= size
        self._held[stream.peer] -= size
        if not stream.held:
            self._streams.pop(stream, None)
        if not self._held[stream.peer]:
            del self._held[stream.peer]

    def _is_full(self) -> bool:
        return self._held.total() > self._most_bytes

    def _is_greedy(self, peer: str) -> bool:
        return self._held[peer] > self._most_bytes / 2

    def _evict(self, streams: list[StreamBudget], too_many: Callable[[], bool]) -> None:
        """Break off streams, all but the youngest at most."""
        for stream in streams[:-1]:
            if not too_many():
                return
            self.evicted += 1
            logger.info("Breaking a stream with %s off: %d bytes wait on it to be received", stream.peer, stream.held)
            stream.evict()
            self.less(stream, stream.held)


class StreamBudget:
    """What one stream holds; `evict` breaks it off."""

    def __init__(self, budget: ReceiveBudget, peer: str, evict: Callable[[], None]) -> None:
        self.peer, self.evict, self.held = peer, evict, 0
        self._budget = budget

    def hold(self, size: int) -> None:
        """Hold so many bytes from now on; the stream may be broken off for them."""
        if size > self.held:
            self._budget.more(self, size - self.held)
        elif size < self.held:
            self._budget.less(self, self.held - size)
