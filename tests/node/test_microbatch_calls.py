"""Calls from stage to stage as the callee sees them: one microbatch after another on a conversation, and its end."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from handlers import now
from memory_swarms import recipe
from msgspec import structs
from torch import Tensor

from noloco_node.journal import events
from noloco_node.libp2p.settings import Capacity
from noloco_node.network.bans import BanHook
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.network.schema import Violation
from noloco_node.node import microbatches
from noloco_node.node.microbatches import IDLE_S, MicrobatchClient, MicrobatchServer, SendTurns
from noloco_node.node.node_context import NodeOptions
from noloco_node.node.stage_server import violations_journalled
from noloco_node.run.config import RunConfig
from noloco_node.run.protocols import microbatch_schema
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork
from pipeline.activation_codec import UnusualSizeError, encode
from pipeline.messages import ACTIVATION_CODECS, ActivationCode, Gradient, Microbatch, Reply

RUN, WIDTH = recipe().run, 64
CELLS = (RUN.pipeline.microbatch_size, RUN.pipeline.sequence_length)
MICROBATCH = Microbatch(
    hidden=torch.zeros(*CELLS, WIDTH), targets=torch.zeros(CELLS, dtype=torch.int64), progress=0.0, budget_s=100.0
)
WORK_S, LATENCY_S = 1.0, 0.1
CODEC = ACTIVATION_CODECS["int5-int3"]
CODED = structs.replace(RUN, pipeline=structs.replace(RUN.pipeline, codec="int5-int3"))


class Worker:
    """Takes a second for each microbatch."""

    def __init__(self) -> None:
        self.taken = self.lost = 0
        self.work_s = WORK_S
        self.answer: Gradient | None = None
        """In place of the activations."""

    async def process(self, microbatch: Microbatch, sender: str) -> Reply:
        await asyncio.sleep(self.work_s)
        self.taken += 1
        return self.answer or Gradient(hidden=microbatch.hidden, loss=1.0, tokens=1)

    def reply_lost(self) -> None:
        self.lost += 1


class Callee:
    """A server of microbatches at `b`, and whoever calls it from `a`."""

    def __init__(self, run: RunConfig = RUN) -> None:
        self.network = SimNetwork(NetworkConditions(latency=Latency(mean_s=LATENCY_S)))
        self.caller: PeerNetwork = self.network.network("a")
        self._callee = self.network.network("b")
        self.worker = Worker()
        self.run, self.schema = run, microbatch_schema(run, WIDTH)
        self.journal = list[events.Event]()
        self.server = MicrobatchServer(self._context(lambda event: None), 1, self.worker, SendTurns(1))

    async def serve(self) -> None:
        await self._callee.serve("microbatch/1", self.schema, self.server.serve)

    @asynccontextmanager
    async def called(self) -> AsyncIterator[Conversation]:
        async with self.caller.talk("b", "microbatch/1", self.schema) as conversation:
            yield conversation

    def client(self) -> MicrobatchClient:
        return MicrobatchClient(self._context(self.journal.append, self.caller), 0, SendTurns(1))

    def _context(self, record: Callable[[events.Event], None], network: PeerNetwork | None = None) -> Any:
        return SimpleNamespace(
            run=self.run,
            network=network,
            dimensions=SimpleNamespace(width=WIDTH, vocabulary=32),
            host=SimpleNamespace(unix_time=lambda: 1e9),
            reporter=SimpleNamespace(record=record),
            options=NodeOptions(),
        )

    def open(self) -> int:
        return self.network.open_calls("b")


async def ask(conversation: Conversation) -> None:
    await conversation.send(MICROBATCH)
    assert isinstance(await conversation.receive(), Gradient)


async def callee(run: RunConfig = RUN) -> Callee:
    made = Callee(run)
    await made.serve()
    return made


async def test_one_microbatch_after_another_costs_a_latency_down_and_one_up() -> None:
    b, loop = await callee(), asyncio.get_running_loop()
    async with b.called() as conversation:
        begun_s = loop.time()
        for number in range(1, 4):
            await ask(conversation)
            assert loop.time() - begun_s == pytest.approx(number * (WORK_S + 2 * LATENCY_S))
            assert b.server.idle == 1
    await asyncio.sleep(1.0)
    assert (b.worker.taken, b.worker.lost, b.open(), b.server.idle) == (3, 0, 0, 0)


async def test_who_speaks_out_of_turn_gets_no_answer() -> None:
    """Answers belong to questions by their order: a second question might be taken for another's."""
    b = await callee()
    async with b.called() as conversation:
        await conversation.send(MICROBATCH)
        await conversation.send(MICROBATCH)
        with pytest.raises(ConnectionResetError, match="spoke again"):
            await conversation.receive()
    assert (b.worker.taken, b.worker.lost) == (1, 1)


async def test_who_hangs_up_meanwhile_ends_the_work() -> None:
    b = await callee()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5 * WORK_S + 3 * LATENCY_S), b.called() as conversation:
            await ask(conversation)
    await asyncio.sleep(2 * WORK_S)
    assert (b.worker.taken, b.open(), b.server.idle) == (0, 0, 0)


async def test_a_conversation_that_nobody_uses_is_ended_after_the_callers_patience() -> None:
    b = await callee()
    async with b.called() as conversation:
        await ask(conversation)
        await asyncio.sleep(IDLE_S)
        await ask(conversation)
        await asyncio.sleep(IDLE_S + RUN.pipeline.budget_s + 1.0)
        assert not conversation.is_quiet
        assert b.server.idle == 0


async def test_of_too_many_idle_conversations_the_longest_idle_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches, "MOST_IDLE", 2)

    b = await callee()
    async with b.called() as first, b.called() as second, b.called() as third:
        for conversation in (first, second, third):
            await ask(conversation)
        await asyncio.sleep(1.0)
        assert [each.is_quiet for each in (first, second, third)] == [False, True, True]


def test_peers_of_one_address_prefix_have_room_beside_their_idle_conversations() -> None:
    """Or nobody in a large swarm within one cloud could meet, or ask for a ticket, for a minute after a busy one."""
    assert 0.75 * Capacity().per_prefix >= microbatches.MOST_IDLE


async def test_a_server_that_closes_ends_who_is_idle_at_once_and_who_is_not_after_the_answer() -> None:
    b = await callee()
    async with b.called() as idle, b.called() as busy:
        await ask(idle)
        await busy.send(MICROBATCH)
        await asyncio.sleep(0.5 * WORK_S)
        b.server.close()
        b.server.close()
        await asyncio.sleep(2 * LATENCY_S)
        assert not idle.is_quiet
        assert isinstance(await busy.receive(), Gradient)
        await asyncio.sleep(1.0)
        assert not busy.is_quiet
        assert b.server.idle == 0


async def test_a_microbatch_that_crosses_the_end_of_its_conversation_is_sent_once_more() -> None:
    b = await callee()
    client = b.client()
    assert isinstance(await client.call("b", MICROBATCH), Gradient)
    b.server.close()
    assert isinstance(await client.call("b", MICROBATCH), Gradient)
    assert (b.worker.taken, b.journal) == (2, [])
    await client.aclose()


def coded(code: ActivationCode, *, top: float = math.nan) -> Tensor:
    """Return activations or a gradient; one token has this `top`."""
    wire = encode(code, torch.randn(*CELLS, WIDTH, generator=torch.Generator().manual_seed(0)))
    if not math.isnan(top):
        wire[0, 1, :2] = torch.tensor([top]).bfloat16().view(torch.uint8)
    return wire


async def test_activations_without_a_bound_are_a_violation_and_reach_no_stage() -> None:
    b = await callee(CODED)
    async with b.called() as conversation:
        await conversation.send(replace(MICROBATCH, hidden=coded(CODEC.down, top=math.inf)))
        with pytest.raises(ConnectionResetError, match="top of a token"):
            await conversation.receive()
    assert b.worker.taken == 0


async def test_activations_of_an_unusual_size_are_refused_and_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest replica may send them, for one after its stage has lost its weights; violations would shut it out."""
    b, failures = Callee(CODED), list[type[Exception]]()

    def refuse(*_: object) -> None:
        raise UnusualSizeError("values of the size 99")

    async def serve(conversation: Conversation) -> None:
        try:
            await b.server.serve(conversation)
        except ConnectionError as error:
            failures.append(type(error))
            raise

    monkeypatch.setattr(b.server.bound, "bounded", refuse)
    await b._callee.serve("microbatch/1", b.schema, serve)
    async with b.called() as conversation:
        await conversation.send(replace(MICROBATCH, hidden=coded(CODEC.down)))
        with pytest.raises(ConnectionResetError, match="its microbatch was refused: values of the size 99"):
            await conversation.receive()
    assert failures == [ConnectionAbortedError]


async def test_a_gradient_without_a_bound_is_a_violation_that_is_journalled_and_bans_in_the_end() -> None:
    b = await callee(CODED)
    b.caller = HookedNetwork(b.caller, bans := BanHook())
    b.worker.answer = Gradient(hidden=coded(CODEC.back, top=math.inf), loss=1.0, tokens=2)
    client = b.client()
    for number in range(1, 10):
        with pytest.raises(Violation, match="top of a token"):
            await client.call("b", replace(MICROBATCH, hidden=coded(CODEC.down)))
        assert [type(event) for event in b.journal] == number * [events.PeerViolation]
        if bans.statistics().get("bans.begun"):
            break
    with pytest.raises(ConnectionRefusedError, match="shut out"):
        await client.call("b", replace(MICROBATCH, hidden=coded(CODEC.down)))
    assert isinstance(b.journal[0], events.PeerViolation)
    assert (b.journal[0].peer, b.journal[0].topic) == ("b", "microbatch")


@pytest.mark.parametrize("busy_s", [0.0, 3600.0])
async def test_a_violation_is_journalled_however_long_the_handler_is_busy_when_it_comes(busy_s: float) -> None:
    b, journal = Callee(CODED), list[events.Event]()

    async def work(conversation: Conversation) -> None:
        await conversation.receive()
        await asyncio.sleep(busy_s)
        await conversation.receive()

    await b._callee.serve("microbatch/1", b.schema, violations_journalled(journal.append, "microbatch", work))
    async with b.called() as conversation:
        await conversation.send(replace(MICROBATCH, hidden=coded(CODEC.down)))
        await conversation.send(replace(MICROBATCH, hidden=coded(CODEC.down), progress=2.0))
        with pytest.raises(ConnectionError):
            await conversation.receive()
    await asyncio.sleep(10.0)
    assert [type(event) for event in journal] == [events.PeerViolation]


ROWS = structs.replace(RUN, data=structs.replace(RUN.data, source="json", path="rows.jsonl", form="messages"))
FEW = MICROBATCH.targets.clone().fill_(-1)
FEW[0, 3] = 5


async def patience(run: RunConfig, microbatch: Microbatch) -> float:
    """Return how long a client waits for a replica that has answered five times."""
    b = await callee(run)
    client = b.client()
    for _ in range(5):
        await client.call("b", microbatch)
    b.worker.work_s = 1e9
    begun_s = now()
    with pytest.raises(ConnectionAbortedError, match="has not answered"):
        await client.call("b", microbatch)
    await client.aclose()
    return now() - begun_s


async def test_the_call_after_one_that_was_given_up_shows_how_slow_a_replica_has_become() -> None:
    """Or it would be given up for ever: a reply for which nobody waits teaches nothing."""
    b, loop = await callee(), asyncio.get_running_loop()
    client, slow_s, sent = b.client(), 20.0 * WORK_S, replace(MICROBATCH, budget_s=1000.0)

    async def wait_s(work_s: float) -> float:
        b.worker.work_s, begun_s = work_s, loop.time()
        with pytest.raises(ConnectionAbortedError, match="has not answered"):
            await client.call("b", sent)
        return loop.time() - begun_s

    for _ in range(5):
        await client.call("b", sent)
    assert await wait_s(slow_s) < slow_s
    assert await wait_s(1e9) == pytest.approx(sent.budget_s / 2), "with time left for another replica"
    for _ in range(9):
        b.worker.work_s = slow_s
        assert isinstance(await client.call("b", sent), Gradient)
    assert slow_s < await wait_s(1e9) < 10.0 * slow_s
    await client.aclose()


async def test_deadlines_with_rows_are_those_of_text() -> None:
    """However few tokens of a microbatch are learnt: its work and its bytes are the same."""
    three = structs.replace(ROWS, pipeline=structs.replace(RUN.pipeline, stages=3))
    for run, like in ((ROWS, RUN), (three, structs.replace(three, data=RUN.data))):
        waited_s = await patience(run, replace(MICROBATCH, targets=FEW))
        assert waited_s == pytest.approx(await patience(like, MICROBATCH))


@pytest.mark.parametrize(
    ("run", "targets", "why"),
    [
        (RUN, FEW, "outside the vocabulary"),
        (ROWS, FEW.clone().fill_(-1), "none is learnt"),
        (ROWS, FEW.clone().fill_(-33), "outside the vocabulary"),
        (ROWS, FEW.clone().fill_(32), "outside the vocabulary"),
    ],
)
async def test_marks_that_no_peer_sends_are_a_violation(run: RunConfig, targets: Tensor, why: str) -> None:
    b = await callee(run)
    async with b.called() as conversation:
        await conversation.send(replace(MICROBATCH, targets=targets))
        with pytest.raises(ConnectionResetError, match=why):
            await conversation.receive()
    assert b.worker.taken == 0
