"""Conversations of one question and one answer: who asks waits for so long, and so does who answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.schema import Schema

T = TypeVar("T")


async def ask(
    network: PeerNetwork, peer: str, topic: str, schema: Schema, question: Any, expected: type[T], patience_s: float
) -> T:
    """Return a peer's answer; raise a `ConnectionError` where none comes, or another than is expected."""
    try:
        async with asyncio.timeout(patience_s), network.talk(peer, topic, schema) as conversation:
            await conversation.send(question)
            answer = await conversation.receive()
            if not isinstance(answer, expected):
                raise ConnectionAbortedError(f"expected a {expected.__name__}, got {type(answer).__name__}")
            return answer
    except TimeoutError as silence:
        raise ConnectionAbortedError(f"no answer within {patience_s:g} s") from silence


@asynccontextmanager
async def patient(conversation: Conversation, patience_s: float) -> AsyncIterator[None]:
    """Answer in the body; raise ConnectionAbortedError where whoever asks takes longer than `patience_s` seconds."""
    try:
        async with asyncio.timeout(patience_s):
            yield
    except TimeoutError as silence:
        raise ConnectionAbortedError(f"{conversation.peer} took longer than {patience_s:g} s") from silence
