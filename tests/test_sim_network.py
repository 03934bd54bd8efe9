"""The network in memory behaves as the real one does: order, latency, refusals, silence, and both kinds of ending."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from noloco_node.port import Conversation, Network
from noloco_node.sim.clock import run
from noloco_node.sim.lines import Latency, Weather
from noloco_node.sim.network import Hub
from noloco_node.wire import MessageSpec, Schema

LATENCY_S = 0.05
WEATHER = Weather(latency=Latency(mean_s=LATENCY_S))


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question."""

    number: int


SCHEMA = Schema({Ask: MessageSpec()})


def now() -> float:
    return asyncio.get_running_loop().time()


async def echo(conversation: Conversation) -> None:
    while True:
        await conversation.send(await conversation.receive())


class Work:
    """A handler that takes one question and works for so long; tells what became of it."""

    def __init__(self, seconds: float = 1e6) -> None:
        self.seconds, self.outcome, self.ended = seconds, "", asyncio.Event()

    async def __call__(self, conversation: Conversation) -> None:
        try:
            await conversation.receive()
            await asyncio.sleep(self.seconds)
            self.outcome = "done"
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        finally:
            self.ended.set()


async def ask(network: Network, peer: str, topic: str, number: int = 0) -> int:
    async with network.talk(peer, topic, SCHEMA) as conversation:
        await conversation.send(Ask(number=number))
        answer: Ask = await conversation.receive()
        return answer.number


def test_messages_arrive_in_order_after_the_latency() -> None:
    async def main() -> None:
        heard: list[int] = []

        async def listen(conversation: Conversation) -> None:
            while True:
                message = await conversation.receive()
                heard.append(message.number)
                await conversation.send(message)

        hub = Hub(WEATHER)
        a, b = hub.network("a"), hub.network("b")
        await b.serve("listen", SCHEMA, listen)
        async with a.talk("b", "listen", SCHEMA) as conversation:
            assert conversation.peer == "b"
            begun = now()
            for number in range(100):
                await conversation.send(Ask(number=number))
            assert [(await conversation.receive()).number for _ in range(100)] == list(range(100))
            assert now() - begun == pytest.approx(2 * LATENCY_S)
            assert heard == list(range(100))
        assert hub.failures == []

    run(main())


def test_nothing_can_be_said_after_the_end() -> None:
    async def main() -> None:
        errors: list[str] = []

        async def listen(conversation: Conversation) -> None:
            await asyncio.sleep(1)
            for call in (conversation.receive(), conversation.send(Ask(number=0))):
                try:
                    await call
                except ConnectionResetError as error:
                    errors.append(str(error))

        hub = Hub(WEATHER)
        a, b = hub.network("a"), hub.network("b")
        await b.serve("listen", SCHEMA, listen)
        async with a.talk("b", "listen", SCHEMA) as conversation:
            pass
        with pytest.raises(ConnectionResetError, match="over"):
            await conversation.send(Ask(number=0))
        await asyncio.sleep(2)
        assert errors == ["a ended the conversation"] * 2

    run(main())


def test_who_cannot_be_reached_refuses() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        a, b = hub.network("a"), hub.network("b")
        await b.serve("echo", SCHEMA, echo)
        for peer, topic, words in (("nobody", "echo", "cannot be reached"), ("b", "nonsense", "run or version")):
            with pytest.raises(ConnectionRefusedError, match=words):
                await ask(a, peer, topic)
        hub.silence("b")
        begun = now()
        with pytest.raises(ConnectionRefusedError, match="within 20"):
            await ask(a, "b", "echo")
        assert now() - begun == 20.0
        hub.kill("b")
        with pytest.raises(ConnectionRefusedError, match="within 20"):
            await ask(a, "b", "echo")

    run(main())


def test_a_killed_peer_breaks_its_conversations_on_both_sides() -> None:
    async def main() -> None:
        hub, work = Hub(WEATHER), Work()
        a, b = hub.network("a"), hub.network("b")
        await b.serve("work", SCHEMA, work)
        asking = asyncio.create_task(ask(a, "b", "work"))
        await asyncio.sleep(1)
        begun = now()
        hub.kill("b")
        with pytest.raises(ConnectionResetError):
            await asking
        assert now() - begun == pytest.approx(LATENCY_S)
        await work.ended.wait()
        assert work.outcome == "cancelled"
        with pytest.raises(ConnectionRefusedError):
            await ask(b, "a", "work")

    run(main())


def test_a_silent_peer_is_given_up_and_one_that_resumes_is_not() -> None:
    async def main() -> None:
        hub, work = Hub(WEATHER), Work()
        a, b = hub.network("a"), hub.network("b")
        await b.serve("work", SCHEMA, work)
        await b.serve("echo", SCHEMA, echo)
        async with a.talk("b", "echo", SCHEMA) as conversation:
            hub.silence("b")
            await conversation.send(Ask(number=1))
            await asyncio.sleep(5)
            hub.resume("b")
            assert (await conversation.receive()).number == 1
        asking = asyncio.create_task(ask(a, "b", "work"))
        await asyncio.sleep(1)
        hub.silence("b")
        begun = now()
        with pytest.raises(ConnectionAbortedError, match="silent for 6"):
            await asking
        assert now() - begun == pytest.approx(6.0)
        await work.ended.wait()
        assert work.outcome == "cancelled"

    run(main())


@pytest.mark.parametrize(("cancelled", "outcome"), [(True, "cancelled"), (False, "done")])
def test_a_cancelled_caller_cancels_the_work_and_a_polite_one_does_not(cancelled: bool, outcome: str) -> None:
    async def main() -> None:
        hub, work = Hub(WEATHER), Work(seconds=100)
        a, b = hub.network("a"), hub.network("b")
        await b.serve("work", SCHEMA, work)

        async def call() -> None:
            async with a.talk("b", "work", SCHEMA) as conversation:
                await conversation.send(Ask(number=0))
                if cancelled:
                    await conversation.receive()

        calling = asyncio.create_task(call())
        await asyncio.sleep(10)
        calling.cancel()
        await asyncio.sleep(1)
        assert repr(a).endswith("0 conversations)")
        hub.silence("a")
        await work.ended.wait()
        assert work.outcome == outcome

    run(main())


def test_a_handler_that_fails_is_reported_and_the_caller_loses() -> None:
    async def main() -> None:
        async def fail(conversation: Conversation) -> None:
            raise ValueError("a bug")

        hub = Hub(WEATHER)
        a, b = hub.network("a"), hub.network("b")
        await b.serve("fail", SCHEMA, fail)
        with pytest.raises(ConnectionResetError, match="ValueError"):
            await ask(a, "b", "fail")
        assert [(peer, str(error)) for peer, error in hub.failures] == [("b", "a bug")]

    run(main())


def test_records_expire_and_the_longer_lived_wins() -> None:
    async def main() -> None:
        hub = Hub(WEATHER)
        a, b = hub.network("a"), hub.network("b")
        assert await a.publish("key", "a", b"long", 30.0)
        assert not await a.publish("key", "a", b"short", 10.0)
        assert await b.publish("key", "b", b"other", 5.0)
        assert await b.read("key") == {"a": b"long", "b": b"other"}
        await asyncio.sleep(6)
        assert await b.read("key") == {"a": b"long"}
        await asyncio.sleep(30)
        assert await b.read("key") == {}
        hub.silence("a")
        assert not await a.publish("key", "a", b"unheard", 30.0)
        assert await b.read("key") == {}

    run(main())
