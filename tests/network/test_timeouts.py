"""Deadlines that follow what was observed: the estimate, its bounds, and dials in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random

import pytest
from handlers import echo
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Peer, recipe, until
from sample_messages import ASKS, Ask

from noloco_node.journal import events
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import Conversation
from noloco_node.network.schema import Schema
from noloco_node.network.timeouts import (
    DIALS,
    MOST_PEERS,
    AdaptiveTimeout,
    DialTimeouts,
    TimeoutBounds,
    deadline_s,
    observed,
)
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork

TIMES = st.floats(0.0, 1e4)
BOUNDS = TimeoutBounds(least_s=2.0, most_s=60.0, unknown_s=10.0)


@given(st.lists(TIMES, min_size=1, max_size=50), st.integers(0, 100))
def test_a_deadline_is_bounded_and_grows_with_what_was_in_vain(times: list[float], timeouts: int) -> None:
    estimate = None
    for seconds in times:
        estimate = observed(estimate, seconds)
    assert min(times) - 1e-9 <= estimate.mean_s <= max(times) + 1e-9
    assert 0.0 <= estimate.deviation_s <= max(times)
    for known in (None, estimate):
        limits = [deadline_s(known, count, BOUNDS) for count in range(timeouts + 1)]
        assert all(BOUNDS.least_s <= limit_s <= BOUNDS.most_s for limit_s in limits)
        assert all(later >= earlier for earlier, later in pairwise(limits))


@given(st.floats(0.1, 20.0), st.floats(0.0, 0.5), st.integers(0))
def test_who_is_as_slow_as_ever_is_never_cut_off(mean_s: float, spread: float, seed: int) -> None:
    estimate, rng = None, Random(seed)
    for number in range(200):
        took_s = mean_s * (1.0 + spread * rng.uniform(-1.0, 1.0))
        if number > 20:
            assert took_s <= deadline_s(estimate, 0, BOUNDS)
        estimate = observed(estimate, took_s)


@given(st.floats(0.0, 1e3), st.floats(5.0, 60.0))
def test_no_line_is_too_slow_for_ever(usual_s: float, now_takes_s: float) -> None:
    timing = AdaptiveTimeout(BOUNDS)
    timing.took("a", usual_s)
    for attempt in range(20):
        begun_s = 100.0 * attempt
        limit_s = timing.deadline_s("a")
        if limit_s >= now_takes_s:
            break
        timing.record_timeout("a", begun_s, begun_s + limit_s)
    assert timing.deadline_s("a") >= now_takes_s
    timing.took("a", now_takes_s)
    assert timing.deadline_s("a") >= min(BOUNDS.most_s, now_takes_s)


def test_several_waits_that_were_under_way_together_count_once_and_peers_are_bounded() -> None:
    timing = AdaptiveTimeout(BOUNDS)
    for _ in range(8):
        timing.record_timeout("a", 5.0, 15.0)
    assert timing.deadline_s("a") == 15.0
    for number in range(MOST_PEERS + 10):
        timing.took(f"p{number}", 1.0)
    assert timing.deadline_s("a") == timing.deadline_s("never met"), "forgotten: what first contacts take counts"


async def test_a_dial_into_the_dark_costs_what_is_usual_and_not_what_the_transport_allows() -> None:
    hub = SimNetwork(NetworkConditions(latency=Latency(mean_s=0.05)))
    network, other = HookedNetwork(hub.network("a"), DialTimeouts()), hub.network("b")
    await other.serve("echo", ASKS, echo)
    loop = asyncio.get_running_loop()

    async def ask() -> float:
        begun_s = loop.time()
        try:
            async with network.talk("b", "echo", ASKS) as conversation:
                await conversation.send(Ask(text="hello"))
                assert await conversation.receive() == Ask(text="hello")
        except ConnectionRefusedError:
            return loop.time() - begun_s
        return 0.0

    assert await ask() == 0.0
    hub.silence("b")
    spent = [await ask() for _ in range(3)]
    assert spent == pytest.approx([DIALS.least_s, 1.5 * DIALS.least_s, 2.25 * DIALS.least_s])
    assert network.statistics()["dials.given_up"] == 3
    hub.resume("b")
    assert await ask() == 0.0
    hub.silence("b")
    assert await ask() == pytest.approx(DIALS.least_s), "an answer ends the growth"


async def test_a_slow_line_is_learnt_and_its_peer_reached() -> None:
    hub = SimNetwork(NetworkConditions(latency=Latency(mean_s=6.0)))
    network, other = HookedNetwork(hub.network("a"), DialTimeouts()), hub.network("b")
    await other.serve("echo", ASKS, echo)
    refused = 0
    for _ in range(10):
        try:
            async with network.talk("b", "echo", ASKS) as conversation:
                await conversation.send(Ask(text="hello"))
                await conversation.receive()
        except ConnectionRefusedError:
            refused += 1
    assert refused == 1, "a dial takes twelve seconds here"


async def test_one_silent_replica_holds_the_others_up_for_seconds() -> None:
    hub, what = SimNetwork(), recipe(stages=2, replicas=2, steps=4000, window=4)
    source = Peer(hub, what, "source", 0, 0.5)
    _others = [Peer(hub, what, name, 1, 0.5) for name in ("well", "silent")]
    await until(lambda: len(source.of(events.InnerStep)) >= 4)
    hub.silence("silent")
    seen, changed_s, longest_s = len(source.of(events.InnerStep)), asyncio.get_running_loop().time(), 0.0
    until_s = changed_s + 16.0
    while (now_s := asyncio.get_running_loop().time()) < until_s:
        if len(source.of(events.InnerStep)) > seen:
            seen, changed_s = len(source.of(events.InnerStep)), now_s
        longest_s = max(longest_s, now_s - changed_s)
        await asyncio.sleep(0.1)
    # A dial into the dark took twenty seconds; the transport gives a silent conversation up after six.
    assert longest_s < 12.0
    assert not any(event.peer == "well" for event in source.of(events.Lost))


async def test_our_own_cancellation_is_nobody_s_fault() -> None:
    class Never:
        """A network on which nothing opens."""

        peer_id = "a"

        @asynccontextmanager
        async def talk(self, peer: str, topic: str, schema: Schema) -> AsyncIterator[Conversation]:
            await asyncio.get_running_loop().create_future()
            yield  # it is never reached

    network = HookedNetwork(Never(), DialTimeouts())  # nothing else of it is used
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0), network.talk("b", "echo", ASKS):
            pytest.fail("it opened")
    with pytest.raises(ConnectionRefusedError, match="within 10"):
        async with network.talk("b", "echo", ASKS):
            pytest.fail("it opened")
