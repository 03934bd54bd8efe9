"""Conversations that are kept open: what a call costs, what breaks with it, and what is let go of."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from handlers import now
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_messages import ASKS, Ask

from noloco_node.network.interface import Conversation
from noloco_node.node import microbatches
from noloco_node.node.microbatches import FEWEST_AT_ONCE, IDLE_S, LEAST_S, ConversationPool, SendTurns
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork

LATENCY_S = 0.05


class World:
    """A caller `a` with a pool, and others who echo: "slowly" takes a second, "twice" is said twice."""

    def __init__(self, *others: str) -> None:
        self.network = SimNetwork(NetworkConditions(latency=Latency(mean_s=LATENCY_S)))
        self.caller = self.network.network("a")
        self.others = {name: self.network.network(name) for name in others or ("b",)}
        self.pool = ConversationPool(self.caller, "echo", ASKS)
        self.handled: list[str] = []

    async def serve(self) -> None:
        for other in self.others.values():
            await other.serve("echo", ASKS, self._echo)

    async def _echo(self, conversation: Conversation) -> None:
        with suppress(ConnectionResetError):
            while True:
                word = await conversation.receive()
                if word.text == "slowly":
                    await asyncio.sleep(1.0)
                self.handled.append(word.text)
                await conversation.send(word)
                if word.text == "twice":
                    await conversation.send(word)

    async def ask(self, text: str, peer: str = "b") -> float:
        """Return the seconds that a call took."""
        begun_s = now()
        async with self.pool.talk(peer) as conversation:
            await conversation.send(Ask(text=text))
            assert await conversation.receive() == Ask(text=text)
        return now() - begun_s

    @property
    def opened(self) -> int:
        return int(self.network.statistics()["conversations.opened"])


@asynccontextmanager
async def world(*others: str) -> AsyncIterator[World]:
    made = World(*others)
    await made.serve()
    yield made
    await made.pool.aclose()
    await asyncio.sleep(1.0)
    assert all(made.network.open_calls(name) == 0 for name in ("a", *made.others))


async def test_a_first_call_takes_three_latencies_down_and_every_further_one_a_single_one() -> None:
    async with world() as w:
        took_s = [await w.ask(str(number)) for number in range(4)]
        assert took_s == pytest.approx([4 * LATENCY_S] + 3 * [2 * LATENCY_S])
        assert w.opened == 1


async def test_calls_at_the_same_time_have_a_conversation_each_and_leave_them_to_the_next() -> None:
    async with world() as w:
        for _ in range(3):
            await asyncio.gather(*(w.ask(f"{number}") for number in range(5)))
        assert w.opened == 5


async def test_a_call_that_is_cancelled_breaks_its_own_stream_alone() -> None:
    async with world() as w:
        other, cut = (asyncio.ensure_future(w.ask("slowly")) for _ in range(2))
        await asyncio.sleep(0.5)
        cut.cancel()
        assert await other == pytest.approx(1.0 + 4 * LATENCY_S)
        assert w.handled == ["slowly"], "the callee's work was cancelled too"
        assert await w.ask("again") == pytest.approx(2 * LATENCY_S)
        assert w.opened == 2


async def test_a_stream_that_broke_while_nobody_used_it_is_opened_anew() -> None:
    async with world() as w:
        await w.ask("one")
        w.network.kill("b")
        await asyncio.sleep(1.0)
        w.others["b"] = w.network.network("b")
        await w.serve()
        assert await w.ask("two") == pytest.approx(4 * LATENCY_S)


async def test_an_answer_too_many_is_nobodys() -> None:
    async with world() as w:
        await w.ask("twice")
        await w.ask("once")
        assert w.opened == 2


async def test_a_conversation_that_nobody_uses_is_ended() -> None:
    async with world("b", "c") as w:
        await w.ask("one", "c")
        for _ in range(3):
            await asyncio.sleep(0.6 * IDLE_S)
            await w.ask("one", "b")
        assert w.opened == 2
        assert w.network.open_calls("b") == 1
        assert w.network.open_calls("c") == 0


async def test_no_more_than_so_many_are_kept_and_the_longest_idle_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches, "MOST_POOLED", 2)

    async with world("b", "c", "d") as w:
        for peer in ("b", "c", "b", "d"):
            await w.ask("one", peer)
        await asyncio.sleep(1.0)
        assert [w.network.open_calls(peer) for peer in "abcd"] == [2, 1, 0, 1]


async def test_who_is_under_way_when_the_pool_closes_has_its_answer_and_nothing_is_kept() -> None:
    async with world() as w:
        call = asyncio.ensure_future(w.ask("slowly"))
        await asyncio.sleep(0.5)
        await w.pool.aclose()
        await call
        await asyncio.sleep(1.0)
        assert w.network.open_calls("a") == w.network.open_calls("b") == 0


NOT_FOR_GOOD = 1000.0


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.9), st.booleans()), max_size=30), st.integers(1, 20))
async def test_never_more_at_once_and_first_come_first_served(
    jobs: list[tuple[int, float, bool]], receivers: int
) -> None:
    turns, under_way, order = SendTurns(receivers), set[int](), list[int]()

    async def send(number: int, seconds: float, breaks: bool) -> None:
        try:
            async with turns.turn():
                under_way.add(number)
                order.append(number)
                assert len(under_way) <= turns.at_once <= max(FEWEST_AT_ONCE, receivers)
                await asyncio.sleep(seconds)
                under_way.remove(number)
                if breaks:
                    raise ConnectionResetError
        except ConnectionResetError:
            pass

    async with asyncio.TaskGroup() as group:
        for number, (pause, seconds, breaks) in enumerate(jobs):
            await asyncio.sleep(pause / 10)
            group.create_task(send(number, seconds, breaks))
    assert order == list(range(len(jobs)))


async def test_slow_receivers_hold_up_nobody_for_long_and_who_gives_up_leaves_its_place() -> None:
    turns, loop = SendTurns(FEWEST_AT_ONCE), asyncio.get_running_loop()

    async def send(seconds: float) -> float:
        async with turns.turn():
            await asyncio.sleep(seconds)
        return loop.time()

    slow = [asyncio.create_task(send(NOT_FOR_GOOD)) for _ in range(FEWEST_AT_ONCE)]
    await asyncio.sleep(0)
    gives_up = asyncio.create_task(send(NOT_FOR_GOOD))
    await asyncio.sleep(LEAST_S / 2)
    gives_up.cancel()
    assert await send(0.1) <= LEAST_S + 0.2
    assert await send(0.1) <= LEAST_S + 0.4, "the others have had their turns"
    await asyncio.gather(*slow)
