"""Broken messages and records: the decoder makes a message or a violation of each, in bounded memory; peers live on."""

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.robustness import fuzz, fuzz_peers
from noloco_node.network.interface import Conversation
from noloco_node.swarm.run_distribution import RunFileText, RunHistory
from noloco_node.swarm.speed_test import SpeedTestService


def test_the_decoder_makes_a_message_or_a_violation_of_whatever_comes() -> None:
    tracemalloc.start()
    try:
        fuzz.outcomes(0, 2_000)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        fuzz.outcomes(1, 2_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    declared = max(chosen.cap_bytes for chosen in fuzz.fuzzed_schemas())
    # A long header is there twice for a moment, as bytes and decoded; the rest is a good message's.
    assert peak - before < 3 * declared
    seen = fuzz.outcomes(2, 30_000)
    assert seen.keys() == {"violation", "message", "waits for more"}
    assert min(seen.values()) > 2_000


def test_peers_that_live_refuse_whatever_comes_and_keep_nothing_of_it() -> None:
    seen = fuzz_peers.outcomes(0, 1_000, forward_s=4.0)
    kinds = {what.partition(":")[0] for what in seen}
    assert kinds >= {"messages", "records", "texts", "inner steps of honest nodes"}
    assert seen["messages: message"] > 50, "some reach the handlers"
    assert seen["messages: violation"] > 50
    assert seen["records: stored by the DHT"] > 0
    assert min(seen["texts: read"], seen["texts: refused"]) > 0


async def raising(_: object, conversation: Conversation) -> None:
    await conversation.receive()
    raise ValueError("a bug")


async def staying(_: object, conversation: Conversation) -> None:
    await conversation.receive()
    await asyncio.Event().wait()


async def leaking(_: object, conversation: Conversation) -> None:
    await conversation.receive()
    LEAKED.append(asyncio.get_running_loop().create_task(asyncio.sleep(10**6)))


LEAKED: list[asyncio.Task[None]] = []


@pytest.mark.parametrize(("handler", "found"), [(raising, "a bug"), (staying, "answers fuzz-"), (leaking, "")])
def test_a_handler_that_raises_stays_or_leaks_is_found(
    monkeypatch: pytest.MonkeyPatch, handler: Callable[[object, Conversation], Awaitable[None]], found: str
) -> None:
    for owner, name in ((RunHistory, "serve"), (RunFileText, "serve"), (SpeedTestService, "answer")):
        monkeypatch.setattr(owner, name, handler)
    with pytest.raises(ExceptionGroup) as caught:
        fuzz_peers.outcomes(0, 150, forward_s=8.0)
    (error,) = caught.value.exceptions
    assert isinstance(error, AssertionError)
    assert found in str(error)
