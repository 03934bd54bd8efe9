"""Answers a doctor that measures its line: every node sends some load, or takes some.

Strangers ask, so the answer costs little: one measurement at a time, a few MiB each, and at most `LOAD_BYTES_PER_S`
over time in all. It counts against the node's bandwidth budget. This module does not load torch, because bootstrap
peers answer too.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

from noloco_node.limits.budget import Bucket, take
from noloco_node.network.calls import patient
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import LONG_HEADER_BYTES, MessageSpec, Schema, Violation
from noloco_node.tasks import loop_s
from noloco_node.units import Count, Seconds

TOPIC = "doctor"
PIECE_BYTES = 256 * 1024
MOST_PIECES = 16
LOAD_BYTES_PER_S = 512.0 * 1024
PATIENCE_S = 60.0
"""The deadline of one measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendMe:
    """Asks the peer to send so many pieces."""

    pieces: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeFromMe:
    """Offers to send so many pieces."""

    pieces: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """Accepts the offer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedTestPayload:
    """A piece of random bytes."""

    content: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Took:
    """All pieces came: so many bytes after the first piece, in so many seconds since it."""

    count: Count
    seconds: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class NotNow:
    """Another measurement runs, or the budget for measurements is used up."""

    retry_after_s: Seconds


SCHEMA = Schema(
    {
        SendMe: MessageSpec("SendMe"),
        TakeFromMe: MessageSpec("TakeFromMe"),
        Go: MessageSpec("Go"),
        SpeedTestPayload: MessageSpec("Piece", header_bytes=LONG_HEADER_BYTES),
        Took: MessageSpec("Took"),
        NotNow: MessageSpec("NotNow"),
    }
)


class SpeedTestService:
    """Answers the topic, one measurement at a time."""

    def __init__(self) -> None:
        burst = 2.0 * MOST_PIECES * PIECE_BYTES
        self._budget = Bucket(LOAD_BYTES_PER_S, burst, burst, loop_s())
        self._busy = False
        self.refused = 0

    async def answer(self, conversation: Conversation) -> None:
        """Answer one question; ConnectionAbortedError if the asker takes too long."""
        async with patient(conversation, PATIENCE_S):
            question = await conversation.receive()
            if not isinstance(question, SendMe | TakeFromMe) or not 1 < question.pieces <= MOST_PIECES:
                raise Violation(f"a doctor asks for 2 to {MOST_PIECES} pieces to be sent or taken")
            wait_s = self._admit(question.pieces * PIECE_BYTES)
            if wait_s > 0.0:
                self.refused += 1
                await conversation.send(NotNow(retry_after_s=wait_s))
                return
            try:
                if isinstance(question, SendMe):
                    await send(conversation, question.pieces)
                else:
                    await conversation.send(Go())
                    await conversation.send(await count(conversation, question.pieces, await conversation.receive()))
            finally:
                self._busy = False

    def _admit(self, size: int) -> float:
        """Begin a measurement and return 0, or return the seconds to wait for one."""
        if self._busy:
            return 2.0
        self._budget, wait_s = take(self._budget, size, loop_s())
        self._busy = wait_s == 0.0
        return wait_s


async def send(conversation: Conversation, pieces: int) -> None:
    load = SpeedTestPayload(content=os.urandom(PIECE_BYTES))  # which no line can compress
    for _ in range(pieces):
        await conversation.send(load)


async def count(conversation: Conversation, pieces: int, first: object) -> Took:
    """Take the other pieces behind the `first` and say how long they took; Violation if anything else comes.

    The first piece does not count: it waited for the line to wake up.
    """
    loop, piece = asyncio.get_running_loop(), first
    begun_s = loop.time()
    for number in range(pieces):
        if number:
            piece = await conversation.receive()
        if not isinstance(piece, SpeedTestPayload) or len(piece.content) != PIECE_BYTES:
            raise Violation(f"expected a piece of {PIECE_BYTES} bytes, got {type(piece).__name__}")
    return Took(count=(pieces - 1) * PIECE_BYTES, seconds=max(1e-6, loop.time() - begun_s))
