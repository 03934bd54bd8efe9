"""A toy world for gossip: in-memory conversations with a latency, and replicas that roll down quadratic models.

Runs in virtual time. A test may tamper with every message on its way: change it, swallow it, or cut the line.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar

import torch

from gossip.interface import Candidate, Event, MeetingLost, Origin, OuterStepTaken, RoundContext
from gossip.rounds.outer_optimiser import OuterOptimiser
from gossip.rounds.rounds import Rounds
from gossip.rule.outer_step import OuterState, Tensors
from gossip.settings import Format, OuterConfig, RoundTimeouts

T = TypeVar("T")

SWALLOW = object()
CUT = object()
Tamper = Callable[[str, str, Any], Any]


def honest(sender: str, receiver: str, message: Any) -> Any:
    return message


def changed(by: str, kind: type | UnionType, change: Callable[[Any], Any]) -> Tamper:
    return lambda sender, receiver, message: change(message) if sender == by and isinstance(message, kind) else message


class Line:
    """One end of an in-memory stream: ordered, with a constant latency."""

    def __init__(self, me: str, peer: str, latency_s: float, tamper: Tamper) -> None:
        self.me, self.peer = me, peer
        self.other: Line = self
        self._latency_s, self._tamper = latency_s, tamper
        self._flying: deque[Any] = deque()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._broken = False

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)
        if self._broken:
            raise ConnectionResetError(f"the line to {self.peer} is cut")
        tampered = self._tamper(self.me, self.peer, message)
        if tampered is CUT:
            self.cut()
            raise ConnectionResetError(f"the line to {self.peer} was cut")
        if tampered is not SWALLOW:
            self.other._fly(tampered)

    async def receive(self) -> Any:
        message = await self._inbox.get()
        if message is CUT:
            self._inbox.put_nowait(CUT)
            raise ConnectionResetError(f"the line to {self.peer} is cut")
        return message

    def cut(self) -> None:
        for end in (self, self.other):
            if not end._broken:
                end._broken = True
                end._fly(CUT)

    def _fly(self, message: Any) -> None:
        self._flying.append(message)
        asyncio.get_running_loop().call_later(self._latency_s, lambda: self._inbox.put_nowait(self._flying.popleft()))


def line_pair(a: str, b: str, latency_s: float = 0.01, tamper: Tamper = honest) -> tuple[Line, Line]:
    to_b, to_a = Line(a, b, latency_s, tamper), Line(b, a, latency_s, tamper)
    to_b.other, to_a.other = to_a, to_b
    return to_b, to_a


async def at_once(function: Callable[..., T], /, *args: object) -> T:
    await asyncio.sleep(0)
    return function(*args)


Answerer = Callable[[Line], Awaitable[None]]


class World:
    """The peers that answer streams, and what happens to messages between them."""

    def __init__(self, latency_s: float = 0.01, tamper: Tamper = honest) -> None:
        self.latency_s, self.tamper = latency_s, tamper
        self.answerers: dict[str, Answerer] = {}
        self.toys: dict[str, Toy] = {}

    def conversing(self, me: str) -> Callable[[str], AbstractAsyncContextManager[Line]]:
        @asynccontextmanager
        async def converse(peer: str) -> AsyncIterator[Line]:
            await asyncio.sleep(self.latency_s)
            if peer not in self.answerers:
                raise ConnectionRefusedError(f"{peer} is not there")
            ours, theirs = line_pair(me, peer, self.latency_s, self.tamper)
            handler = asyncio.create_task(self._answer(peer, theirs), name=f"{peer} answers {me}")
            try:
                yield ours
            finally:
                ours.cut()
                handler.cancel()
                await asyncio.wait({handler})

        return converse

    async def _answer(self, peer: str, line: Line) -> None:
        try:
            await self.answerers[peer](line)
        except ConnectionError:
            pass
        finally:
            line.cut()


USUAL = RoundTimeouts()


@dataclass(frozen=True, kw_only=True, slots=True)
class ToySettings(OuterConfig):
    """What a toy's rounds are handed: plain settings, the run's seed, and how long to wait."""

    seed: int = 3
    patience: RoundTimeouts = USUAL
    inner_steps_per_round: int = 50
    dynamic_steps: bool = False
    codec: Format = Format.FLOAT32


class Toy:
    """A replica: one tensor of weights that rolls towards its own optimum, `step_s` seconds an inner step.

    `outer_step_s`: how long it computes an outer step; the slow weights move at the beginning of it.
    """

    def __init__(
        self,
        world: World,
        name: str,
        settings: ToySettings,
        *,
        step_s: float = 1.0,
        outer_step_s: float = 0.0,
        optimum: float = 10.0,
        rounds: int = 0,
        origin: Origin | None = None,
    ) -> None:
        self.world, self.name, self.step_s, self.outer_step_s = world, name, step_s, outer_step_s
        self.fast = torch.full((4,), 20.0) if origin is None else origin.state.slow[0].clone()
        self.optimum = optimum
        self.inner_steps = 0
        self.idle_s = 0.0
        self.listed = True
        self.stale_list: tuple[Candidate, ...] | None = None
        self.events: list[Event] = []
        self.saw: list[tuple[str, int, int]] = []
        self.at_work = asyncio.Lock()
        self.shut = 0
        if origin is None:
            origin = Origin(OuterState((self.fast.clone(),), (torch.zeros(4),)), rounds)
        around = RoundContext(
            seed=settings.seed,
            compute=self.compute,
            partners=self.partners,
            converse=world.conversing(name),
            record=self.events.append,
            timeouts=settings.patience,
            saw=lambda *met: self.saw.append(met),
        )
        self.rounds = Rounds(name, settings, origin, self, around)
        world.answerers[name] = self.rounds.serve
        world.toys[name] = self

    async def compute(self, function: Callable[..., T], /, *args: object) -> T:
        result = await at_once(function, *args)
        if self.outer_step_s and getattr(function, "__func__", None) is OuterOptimiser._take:
            await asyncio.sleep(self.outer_step_s)
        return result

    # What gossip may do to it.

    async def snapshot(self, slow: Tensors) -> Tensors:
        await asyncio.sleep(0)
        return tuple([(self.fast - each).bfloat16() for each in slow]) or (self.fast.clone(),)

    async def correct(self, correction: Tensors) -> None:
        await asyncio.sleep(0)
        self.fast = self.fast + correction[0]
        await asyncio.sleep(0)

    async def replace(self, weights: Tensors) -> None:
        await asyncio.sleep(0)
        self.fast = weights[0].clone()
        await asyncio.sleep(0)

    @asynccontextmanager
    async def alone(self, retry_after_s: float) -> AsyncIterator[None]:
        assert retry_after_s > 0
        async with self.at_work:
            self.shut += 1
            yield

    def partners(self) -> tuple[Candidate, ...]:
        if self.stale_list is not None:
            return self.stale_list
        return tuple(
            Candidate(toy.name, toy.rounds.finished)
            for toy in self.world.toys.values()
            if toy.listed and toy.name != self.name
        )

    # Its session.

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            async with self.at_work:
                await asyncio.sleep(self.step_s)
                self.fast = self.fast - 0.05 * (self.fast - self.optimum)
                self.inner_steps += 1
            before = asyncio.get_running_loop().time()
            await self.rounds.between_steps(self.inner_steps, self.step_s)
            self.idle_s += asyncio.get_running_loop().time() - before

    @property
    def slow(self) -> float:
        return float(self.rounds.state.slow[0][0])

    @property
    def met(self) -> list[OuterStepTaken]:
        return [event for event in self.events if isinstance(event, OuterStepTaken) and event.partner is not None]

    @property
    def solo(self) -> list[OuterStepTaken]:
        return [event for event in self.events if isinstance(event, OuterStepTaken) and event.partner is None]

    @property
    def lost(self) -> list[MeetingLost]:
        return [event for event in self.events if isinstance(event, MeetingLost)]


@asynccontextmanager
async def gossiping(*toys: Toy) -> AsyncIterator[None]:
    """Let toys gossip while something else has them train."""
    runners = [asyncio.create_task(toy.rounds.run(), name=f"{toy.name} gossips") for toy in toys]
    try:
        yield
    finally:
        for runner in runners:
            runner.cancel()
        await asyncio.wait(runners)
        for runner in runners:
            if not runner.cancelled() and (bug := runner.exception()) is not None:
                raise bug


async def live(
    toys: list[Toy], steps: dict[str, int] | int, end: Callable[[Toy], Awaitable[None]] | None = None
) -> None:
    """Let all toys train and gossip until each has taken its steps (and has come to its `end`)."""

    async def one(toy: Toy) -> None:
        await toy.train(steps if isinstance(steps, int) else steps[toy.name])
        if end is not None:
            await end(toy)

    async with gossiping(*toys), asyncio.TaskGroup() as group:
        for toy in toys:
            group.create_task(one(toy), name=f"{toy.name} trains")
