"""One step in a hundred lines of code: a microbatch through three stages, an inner step, and a round of gossip.

    python docs/one_step.py

All parts are the product's own. What is missing is the shell: a call to a peer is a call of a function here, and a
conversation is two queues. `noloco_node` puts libp2p, the DHT, the disk and the command line around the same parts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from random import Random
from typing import NamedTuple, TypeVar

import torch

from gossip.interface import Candidate, Event, Origin, OuterStepTaken, RoundContext
from gossip.rounds.rounds import Rounds
from gossip.rule.outer_step import OuterState, Tensors
from gossip.settings import Format, OuterConfig
from pipeline.admission_window import AdmissionWindow
from pipeline.forward_pass import StageSettings
from pipeline.inner_step import InnerConfig
from pipeline.messages import Gradient, Microbatch, Reply
from pipeline.model_config import family_config, prepare
from pipeline.next_stage import NextStage, NextStageClient
from pipeline.partition import build, cut
from pipeline.routing import Hop
from pipeline.stage import Stage
from pipeline.worker import Worker

T = TypeVar("T")
STAGES, REPLICAS, WINDOW, STEPS, STEPS_PER_ROUND, TOKENS = 3, 2, 4, 12, 4, 16
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64}
# Both replicas of a pair move to the mean of their weights.
SETTINGS = OuterConfig(
    alpha=0.0, beta=1.0, gamma=1.0, inner_steps_per_round=STEPS_PER_ROUND, dynamic_steps=False, codec=Format.FLOAT32
)
SWARM: dict[str, "Peer"] = {}


async def at_once(function: Callable[..., T], *arguments: object) -> T:
    """Compute on this thread, in its turn; a node has a thread for each device."""
    await asyncio.sleep(0)
    return function(*arguments)


class Line(NamedTuple):
    """One end of a conversation."""

    peer: str
    outbox: "asyncio.Queue[object]"
    inbox: "asyncio.Queue[object]"

    async def send(self, message: object) -> None:
        """Send a message to the other end."""
        self.outbox.put_nowait(message)

    async def receive(self) -> object:
        """Return the next message of the other end."""
        return await self.inbox.get()


class Peer:
    """One replica of one stage."""

    def __init__(self, number: int, replica: int) -> None:
        self.name, self.number = f"stage {number}, replica {replica}", number
        model = prepare(family_config("llama", SIZES))
        weights = build(model, cut(model.config, STAGES, None, TOKENS)[number], seed=0)
        last = number == STAGES - 1
        self.stage = Stage(weights, InnerConfig(), StageSettings(torch.device("cpu")), first=number == 0, last=last)
        # A microbatch: through the gate, forward here, by a random replica of the next stage, backward here.
        self.gate = AdmissionWindow(WINDOW)
        routes = NextStage(NextStageClient(hops=self.hops, call=self.call), Random(self.name))
        self.worker = Worker(self.stage, self.gate, at_once, None if last else routes, budget_s=60.0)
        # A round: every few inner steps the weights of two replicas of a stage meet, while both train on.
        self.events: list[Event] = []
        here = RoundContext(
            seed=0, compute=at_once, partners=self.partners, converse=self.converse, record=self.events.append
        )
        slow = tuple(weight.clone() for weight in self.stage.weights())
        self.rounds = Rounds(self.name, SETTINGS, Origin(OuterState(slow)), self, here)

    def hops(self) -> list[Hop]:
        """Return who serves the next stage; a node reads it from records in the DHT."""
        return [Hop(peer.name) for peer in SWARM.values() if peer.number == self.number + 1]

    async def call(self, peer: str, microbatch: Microbatch) -> Reply:
        """Have a peer of the next stage do its part: the reply is the gradient."""
        return await SWARM[peer].worker.process(microbatch, self.name)

    def partners(self) -> tuple[Candidate, ...]:
        """Return the other replicas of this stage."""
        others = [peer for peer in SWARM.values() if peer.number == self.number and peer is not self]
        return tuple(Candidate(peer.name, peer.rounds.finished) for peer in others)

    @asynccontextmanager
    async def converse(self, peer: str) -> AsyncIterator[Line]:
        """Talk to a partner, whose rounds answer."""
        there: asyncio.Queue[object] = asyncio.Queue()
        back: asyncio.Queue[object] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(SWARM[peer].rounds.serve(Line(self.name, back, there)))
            yield Line(peer, there, back)

    async def snapshot(self, slow: Tensors) -> Tensors:
        """Return a copy of the fast weights, or their difference from the slow ones, for a round that opens."""
        return self.stage.weights(slow)

    async def correct(self, correction: Tensors) -> None:
        """Add to the fast weights what a round has changed of the slow ones."""
        self.stage.correct(correction)

    async def replace(self, weights: Tensors) -> None:
        """Replace the fast weights by a partner's; in this program nobody is so far behind."""
        self.stage.set_weights(weights)

    def alone(self, retry_after_s: float) -> AbstractAsyncContextManager[None]:
        """Serve the paper's blocking form of a round, which these settings do not use."""
        return nullcontext()

    async def train(self) -> list[float]:
        """Take inner steps, a round when one is due; return the mean loss of each window (nats a token)."""
        losses = []
        for step in range(1, STEPS + 1):
            window = await self.gate.full()
            assert window is not None
            self.stage.step(learning_rate=0.01, microbatches=len(window))
            await self.rounds.between_steps(step, seconds_per_step=0.1)
            self.gate.next_window()
            losses.append(sum(outcome.loss or 0.0 for outcome in window) / len(window))
        return losses

    async def read(self) -> None:
        """Draw the microbatches of all windows; the text says the same few words again and again."""
        text = torch.arange(TOKENS + 1).repeat(2, 1) % 7
        for _ in range(STEPS * WINDOW):
            microbatch = Microbatch(hidden=text[:, :-1], targets=text[:, 1:], progress=0.0, budget_s=60.0)
            assert isinstance(await self.worker.process(microbatch, self.name), Gradient)


async def main() -> tuple[list[float], int]:
    """Train the swarm; return the losses of one source's windows, and how many outer steps met a partner."""
    for number in range(STAGES):
        for replica in range(REPLICAS):
            peer = Peer(number, replica)
            SWARM[peer.name] = peer
    peers = list(SWARM.values())
    gossip = [asyncio.create_task(peer.rounds.run()) for peer in peers]
    later = [asyncio.create_task(peer.train()) for peer in peers if peer.number > 0]
    async with asyncio.TaskGroup() as group:
        sources = [(group.create_task(peer.train()), group.create_task(peer.read())) for peer in peers[:REPLICAS]]
    for task in gossip + later:
        task.cancel()
    await asyncio.gather(*gossip, *later, return_exceptions=True)
    met = [event for peer in peers for event in peer.events if isinstance(event, OuterStepTaken) and event.partner]
    return sources[0][0].result(), len(met)


if __name__ == "__main__":
    losses, met = asyncio.run(main())
    print("loss of each window:", *(f"{loss:.2f}" for loss in losses))
    print(f"{met} outer steps, each with a partner")
