"""Microbatches through whole chains of stages: exact windows, clean cuts, no step under a living graph, no deadlock."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.sim.clock import run
from pipeline.admission_window import PASSES_OF_ONE, AdmissionWindow, EvaluationQuota, WindowOutcome
from pipeline.messages import EvaluationReply, Gradient, Microbatch, Reason, Refused, Reply, SequenceLosses
from pipeline.next_stage import NextStage, NextStageClient
from pipeline.routing import Hop
from pipeline.worker import MOST_EVALUATING, UNFIT_S, UNFIT_SHORTAGES, Worker

T = TypeVar("T")
IDS = torch.zeros(1, 2, dtype=torch.int64)
MICROBATCH = Microbatch(hidden=IDS, targets=IDS, progress=0.25, budget_s=1e5)
LONGEST_S = 300.0
"""The longest budget of a worker here."""


class Weights:
    """The weights of a fake stage: a version, and the forward passes and pieces of work that depend on it."""

    def __init__(self) -> None:
        self.version = 0
        self.running = 0
        self.backwards = 0
        self.stale = self.may_lag = 0

    def step(self) -> None:
        assert self.running == 0, "the weights change under work that still runs"
        self.version += 1


class FakeForward:
    def __init__(self, weights: Weights, output: Tensor) -> None:
        self.output = output
        self._weights, self._version = weights, weights.version

    def backward(self, gradient: Tensor, /) -> Tensor:
        behind = self._weights.version - self._version
        assert behind <= self._weights.may_lag, "the weights changed under a living graph"
        self._weights.stale += behind
        self._weights.backwards += 1
        return gradient


class FakeStage:
    """Passes activations on unchanged."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def forward(self, hidden: Tensor, targets: Tensor | None = None, /) -> FakeForward:
        return FakeForward(self._weights, hidden.float())

    def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
        self._weights.backwards += 1
        return Gradient(hidden=hidden.float(), loss=2.0, tokens=targets.numel())

    def activations(self, hidden: Tensor, targets: Tensor | None = None, /) -> Tensor:
        return hidden.float()

    def token_losses(self, hidden: Tensor, targets: Tensor, /) -> Tensor:
        raise NotImplementedError


class Device:
    """One piece of work at a time, each as long as the device is slow; what has begun is awaited to its end."""

    def __init__(self, weights: Weights, seconds: float) -> None:
        self.seconds = seconds
        self._weights, self.turn = weights, asyncio.Lock()
        self._clock_s = 0.0

    def clock(self) -> float:
        """Each reading is one piece of work later than the last."""
        self._clock_s += self.seconds
        return self._clock_s

    async def run(self, function: Callable[[], T], /) -> T:
        async with self.turn:
            work = asyncio.get_running_loop().create_task(self._work(function))
            cut: asyncio.CancelledError | None = None
            while not work.done():
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError as error:
                    cut = error
            if cut is not None:
                raise cut
            return work.result()

    async def _work(self, function: Callable[[], T]) -> T:
        self._weights.running += 1
        await asyncio.sleep(self.seconds / 2)
        result = function()
        await asyncio.sleep(self.seconds / 2)
        self._weights.running -= 1
        return result


class Peer:
    """A replica: its worker, and a task that takes the inner steps."""

    def __init__(self, name: str, downstream: NextStage | None, gate: AdmissionWindow, device_s: float) -> None:
        self.name, self.weights, self.gate = name, Weights(), gate
        self.weights.may_lag = gate.windows - 1
        self.device = Device(self.weights, device_s)
        self.downstream = downstream
        device = self.device
        self.worker = Worker(FakeStage(self.weights), self.gate, device.run, downstream, 300.0, device.clock)
        self.alive = True
        self.calls: set[asyncio.Task[Reply]] = set()
        self.windows: list[int] = []

    async def steps(self) -> None:
        while True:
            await self.gate.full()
            done = self.weights.backwards
            await asyncio.sleep(0.1)
            async with self.device.turn:
                self.weights.step()
            assert self.weights.backwards == done, "a gradient came between a window and its step"
            self.windows.append(len(self.gate.next_window()))

    async def rounds(self, rng: Random) -> None:
        """The blocking form of gossip, at random moments, in the middle of windows too."""
        while True:
            await asyncio.sleep(rng.uniform(20.0, 60.0))
            try:
                async with self.gate.alone(retry_after_s=2.0, deadline_s=30.0):
                    assert self.weights.running == 0
                    self.weights.step()
                    await asyncio.sleep(2.0)
                    self.weights.step()
            except TimeoutError:
                continue

    def crash(self) -> None:
        self.alive = False
        for call in self.calls:
            call.cancel()

    def assert_idle(self) -> None:
        assert (self.gate.in_flight, self.gate.queued, self.weights.running) == (0, 0, 0)


class Swarm:
    """Stages of fake peers that call each other with a latency; `seed` decides everything that is left to chance."""

    def __init__(self, replicas: list[int], window: int, seed: int = 0, windows: int = 1) -> None:
        self.seed, self.latency_s = seed, 0.05
        speeds = Random(f"swarm|{seed}")
        self.stages: list[list[Peer]] = [[] for _ in replicas]
        for stage, count in enumerate(replicas):
            for number in range(count):
                name = f"{stage}.{number}"
                downstream = None if stage == len(replicas) - 1 else self._downstream(name, stage + 1)
                gate = AdmissionWindow(window, windows=windows)
                self.stages[stage].append(Peer(name, downstream, gate, speeds.choice([0.2, 0.5, 1.0])))
        self.peers = {peer.name: peer for stage in self.stages for peer in stage}

    def _downstream(self, sender: str, stage: int) -> NextStage:
        async def call(name: str, microbatch: Microbatch) -> Reply:
            return await self.call(sender, name, microbatch)

        def hops() -> list[Hop]:
            return [Hop(peer.name, peer.worker.device_s) for peer in self.stages[stage] if peer.alive or self.stale]

        return NextStage(NextStageClient(hops=hops, call=call), Random(f"{self.seed}|routes|{sender}"))

    stale = True
    """Whether the dead stay in the roster."""

    async def call(self, sender: str, name: str, microbatch: Microbatch) -> Reply:
        await asyncio.sleep(self.latency_s)
        peer = self.peers[name]
        if not peer.alive:
            raise ConnectionRefusedError(name)
        task = asyncio.get_running_loop().create_task(peer.worker.process(microbatch, sender))
        peer.calls.add(task)
        try:
            reply = await task
        except asyncio.CancelledError:
            task.cancel()
            if peer.alive:
                raise
            raise ConnectionResetError(name) from None
        finally:
            peer.calls.discard(task)
        await asyncio.sleep(self.latency_s)
        return reply

    def background(self, *, gossip: bool = False) -> list[asyncio.Task[None]]:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(peer.steps()) for peer in self.peers.values()]
        if gossip:
            tasks += [
                loop.create_task(peer.rounds(Random(f"{self.seed}|rounds|{name}"))) for name, peer in self.peers.items()
            ]
        return tasks


async def end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    faults = [task.exception() for task in tasks if not task.cancelled()]
    assert not faults, faults


async def source(swarm: Swarm, peer: Peer, samples: int) -> None:
    """Keep in flight what the gate lets in until `samples` gradients have come back, or the peer is dead."""
    left = samples

    async def lane() -> None:
        nonlocal left
        while left > 0 and peer.alive:
            left -= 1
            reply = await peer.worker.process(MICROBATCH, peer.name)
            if not isinstance(reply, Gradient):
                assert reply.reason is not Reason.EXPIRED, "a deadlock: a day's budget was not enough"
                left += 1
                await asyncio.sleep(reply.retry_after_s + 0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(peer.gate.window * peer.gate.windows):
            group.create_task(lane())


async def test_a_microbatch_walks_down_and_its_gradient_comes_back() -> None:
    swarm = Swarm([1, 1, 1], window=1)
    background = swarm.background()
    for count in range(1, 4):
        reply = await swarm.peers["0.0"].worker.process(MICROBATCH, "0.0")
        assert isinstance(reply, Gradient)
        assert (reply.loss, reply.tokens) == (2.0, 2)
        await asyncio.sleep(1.0)
        assert [peer.weights.version for peer in swarm.peers.values()] == [count] * 3
    assert swarm.peers["0.0"].worker.device_s == pytest.approx(2 * swarm.peers["0.0"].device.seconds)
    assert swarm.peers["2.0"].worker.device_s == pytest.approx(swarm.peers["2.0"].device.seconds)
    await end(background)


async def test_the_outcome_of_a_microbatch_reaches_the_inner_step() -> None:
    swarm = Swarm([1, 1], window=1)
    await swarm.peers["0.0"].worker.process(MICROBATCH, "0.0")
    for peer in swarm.peers.values():
        await peer.gate.full()
        assert peer.gate.next_window() == (WindowOutcome(0.25, 2.0, 2),)


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan")])
async def test_no_budget_no_work(budget_s: float) -> None:
    peer = Swarm([1], window=1).peers["0.0"]
    reply = await peer.worker.process(replace(MICROBATCH, budget_s=budget_s), "x")
    assert reply == Refused(reason=Reason.EXPIRED)
    assert peer.gate.statistics()["admitted"] == 0


@pytest.mark.parametrize("budget_s", [float("inf"), 1e9])
async def test_a_budget_is_clamped_to_what_the_run_allows(budget_s: float) -> None:
    swarm = Swarm([1], window=1)
    peer = swarm.peers["0.0"]
    await peer.gate.enter("holder")
    assert await peer.worker.process(replace(MICROBATCH, budget_s=budget_s), "x") == Refused(reason=Reason.EXPIRED)
    assert asyncio.get_running_loop().time() == 300.0
    assert peer.worker.statistics()["expired"] == 1


@given(st.floats(0.1, 40.0), st.lists(st.tuples(st.floats(0.0, 300.0), st.floats(0.0, 1e3)), min_size=1, max_size=20))
def test_a_device_computes_nothing_that_its_budget_does_not_cover(
    seconds: float, arrivals: list[tuple[float, float]]
) -> None:
    """Or a stage whose windows take longer than the budget would compute all of them, each again elsewhere."""

    async def main() -> None:
        peer = Swarm([1], window=len(arrivals) + 1).peers["0.0"]
        peer.device.seconds = seconds
        assert isinstance(await peer.worker.process(MICROBATCH, "x"), Gradient)
        begun_s = asyncio.get_running_loop().time()

        async def arrive(at_s: float, budget_s: float) -> None:
            await asyncio.sleep(begun_s + at_s - asyncio.get_running_loop().time())
            idle, due_s = not peer.gate.in_flight, at_s + min(budget_s, LONGEST_S)
            reply = await peer.worker.process(replace(MICROBATCH, budget_s=budget_s), "x")
            ended_s = asyncio.get_running_loop().time() - begun_s
            if isinstance(reply, Gradient):
                assert ended_s <= due_s + 1e-6
            elif reply.reason is Reason.FULL:
                assert ended_s == pytest.approx(at_s), "at once"
                assert not (idle and budget_s >= max(seconds, LONGEST_S / 2))
            else:
                assert reply.reason is Reason.EXPIRED
                assert budget_s < seconds

        async with asyncio.TaskGroup() as group:
            for at_s, budget_s in arrivals:
                group.create_task(arrive(at_s, budget_s))

    run(main())


async def test_a_device_that_was_slow_once_is_asked_again() -> None:
    peer = Swarm([1], window=100).peers["0.0"]
    peer.device.seconds = 10.0 * LONGEST_S
    assert isinstance(await peer.worker.process(MICROBATCH, "x"), Gradient)
    peer.device.seconds = 1.0
    assert isinstance(await peer.worker.process(replace(MICROBATCH, budget_s=LONGEST_S / 3), "x"), Refused)
    assert peer.worker.statistics()["refused_late"] == 1
    assert isinstance(await peer.worker.process(MICROBATCH, "x"), Gradient)
    assert peer.worker.device_s < 10.0 * LONGEST_S


@given(st.floats(0.01, 2.0), st.floats(1.0, 1e4))
def test_one_long_microbatch_has_none_refused_and_a_slower_device_is_known_soon(seconds: float, times: float) -> None:
    """One that the process was stopped in: the device is what it was."""

    async def main() -> None:
        peer = Swarm([1], window=200).peers["0.0"]

        async def take(count: int, seconds: float) -> list[Reply]:
            peer.device.seconds = seconds
            return await asyncio.gather(*[peer.worker.process(MICROBATCH, str(n)) for n in range(count)])

        await take(1, seconds)
        await take(1, times * seconds)
        assert all(isinstance(reply, Gradient) for reply in await take(20, seconds))
        for _ in range(100):
            await take(1, times * seconds)
        assert peer.worker.device_s == pytest.approx(times * seconds, rel=0.01)

    run(main())


def test_a_budget_that_ends_anywhere_ends_in_expired_and_accuses_nobody() -> None:
    async def main(budget_s: float) -> None:
        swarm = Swarm([1, 1, 1], window=1, seed=3)
        background = swarm.background()
        first = swarm.peers["0.0"]
        reply = await first.worker.process(replace(MICROBATCH, budget_s=budget_s), "0.0")
        if isinstance(reply, Refused):
            assert reply.reason is Reason.EXPIRED
        await asyncio.sleep(10.0)
        for peer in swarm.peers.values():
            peer.assert_idle()
            assert peer.downstream is None or not peer.downstream.suspects
        assert first.gate.statistics()["windows"] == (0 if isinstance(reply, Refused) else 1)
        await end(background)

    for tenths in range(1, 60, 2):
        run(main(tenths / 10))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_call_cut_at_any_moment_leaves_slots_and_gates_free(stages: int) -> None:
    """Cut a microbatch at every 100 ms of its way, then send two whole ones: only completed backwards are left."""

    async def main(cut_at_s: float) -> tuple[int, ...]:
        swarm = Swarm([1] * stages, window=2, seed=5)
        background = swarm.background()
        first = swarm.peers["0.0"]
        busy = asyncio.get_running_loop().create_task(first.device.run(lambda: None))
        await asyncio.sleep(0.0)
        cut = asyncio.get_running_loop().create_task(first.worker.process(MICROBATCH, "0.0"))
        await asyncio.sleep(cut_at_s)
        cut.cancel()
        await asyncio.gather(busy, cut, return_exceptions=True)
        await asyncio.sleep(5.0)
        for peer in swarm.peers.values():
            peer.assert_idle()
            assert peer.gate.succeeded == peer.weights.backwards, "a backward that was completed counts, no other"
        done = tuple(peer.weights.backwards for peer in swarm.peers.values())
        assert list(done) == sorted(done), "backwards happen from the last stage up"
        for _ in range(2):
            assert isinstance(await first.worker.process(MICROBATCH, "0.0"), Gradient)
            await asyncio.sleep(1.0)
        now = tuple(sum(peer.windows) + peer.gate.succeeded for peer in swarm.peers.values())
        assert now == tuple(before + 2 for before in done)
        await end(background)
        return done

    seen = {run(main(step * 0.1 - 0.05)) for step in range(1, 71)}
    assert len(seen) == stages + 1, "the cuts reached every stage of the way"


async def test_a_backward_that_completes_after_its_caller_is_gone_counts_here() -> None:
    peer = Swarm([1], window=2).peers["0.0"]
    call = asyncio.get_running_loop().create_task(peer.worker.process(MICROBATCH, "x"))
    await asyncio.sleep(peer.device.seconds / 4)
    call.cancel()
    await asyncio.sleep(peer.device.seconds / 2)
    assert peer.gate.in_flight == 1, "the slot is held while it runs"
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    assert (peer.gate.in_flight, peer.gate.succeeded) == (0, 1)
    assert peer.worker.statistics()["counted_twice"] == 1
    peer.worker.reply_lost()
    assert peer.worker.statistics()["counted_twice"] == 2


async def test_a_microbatch_that_is_abandoned_runs_no_backward_on_other_weights() -> None:
    """A node that ends has waited long enough for it, and its last round moves the weights."""
    swarm = Swarm([1, 1], window=1)
    first = swarm.peers["0.0"]
    swarm.latency_s = 30.0
    call = asyncio.create_task(first.worker.process(MICROBATCH, "0.0"))
    await asyncio.sleep(40.0)
    first.worker.abandon()
    first.weights.step()
    assert await call == Refused(reason=Reason.LEAVING)
    assert (first.weights.backwards, swarm.peers["1.0"].weights.backwards) == (0, 1)
    first.assert_idle()


@pytest.mark.parametrize("why", ["its budget ends", "the node leaves", "its caller is gone"])
async def test_a_microbatch_that_waits_for_its_turn_lets_go(why: str) -> None:
    swarm = Swarm([1, 1], window=1, windows=2)
    first, last = swarm.peers.values()
    last.weights.may_lag = 0
    background = [asyncio.create_task(last.steps())]
    assert isinstance(await first.worker.process(MICROBATCH, "0.0"), Gradient)
    call = asyncio.create_task(first.worker.process(replace(MICROBATCH, budget_s=50.0), "0.0"))
    await asyncio.sleep(20.0)
    assert not call.done(), "its reply has come, the window is complete, and no step is taken"
    assert (first.gate.in_flight, first.weights.backwards, last.weights.backwards) == (1, 1, 2)
    if why == "the node leaves":
        first.worker.abandon()
    elif why == "its caller is gone":
        call.cancel()
    (result,) = await asyncio.gather(call, return_exceptions=True)
    if why == "its caller is gone":
        assert isinstance(result, asyncio.CancelledError)
    else:
        assert result == Refused(reason=Reason.LEAVING if why == "the node leaves" else Reason.EXPIRED)
    first.assert_idle()
    assert first.weights.backwards == 1
    await end(background)


async def test_the_last_stage_computes_in_its_turn_and_is_never_stale() -> None:
    peer = Swarm([1], window=2, windows=2).peers["0.0"]
    calls = [asyncio.create_task(peer.worker.process(MICROBATCH, "x")) for _ in range(4)]
    await asyncio.sleep(20.0)
    assert [call.done() for call in calls] == [True, True, False, False]
    background = [asyncio.create_task(peer.steps())]
    await asyncio.gather(*calls)
    await asyncio.sleep(5.0)
    assert peer.windows == [2, 2]
    assert peer.gate.statistics()["stale"] == 0
    await end(background)


async def test_a_refusal_at_the_gate_is_passed_on_as_it_is() -> None:
    peer = Swarm([1], window=1).peers["0.0"]
    peer.gate.close()
    assert await peer.worker.process(MICROBATCH, "x") == Refused(reason=Reason.LEAVING)


@pytest.mark.parametrize(("seed", "windows"), [*((seed, 1) for seed in range(12)), *((seed, 2) for seed in range(8))])
async def test_chains_with_unequal_replicas_gossip_and_crashes_never_deadlock(seed: int, windows: int) -> None:
    rng = Random(f"chains|{seed}")
    replicas = [rng.randint(1, 4) for _ in range(rng.randint(3, 8))]
    window, crashing, samples = rng.choice([2, 3, 8]), seed % 2 == 1, 40

    swarm = Swarm(replicas, window, seed, windows)
    swarm.stale = seed % 4 == 1
    background = swarm.background(gossip=seed % 3 == 0)

    async def crashes() -> None:
        for stage in swarm.stages:
            for peer in stage[1:]:
                await asyncio.sleep(rng.uniform(1.0, 20.0))
                if rng.random() < 0.5:
                    peer.crash()

    async with asyncio.timeout(5e4), asyncio.TaskGroup() as group:
        if crashing:
            group.create_task(crashes())
        for peer in swarm.stages[0]:
            group.create_task(source(swarm, peer, samples))
    await asyncio.sleep(30.0)
    for peer in swarm.peers.values():
        assert set(peer.windows) <= {window}
        if peer.alive:
            peer.assert_idle()
            assert sum(peer.windows) + peer.gate.succeeded == peer.weights.backwards
            assert windows == 2 or peer.weights.stale == 0
            assert peer.weights.stale == peer.gate.statistics()["stale"]
    alive = [peer for peer in swarm.stages[0] if peer.alive]
    assert all(peer.weights.backwards == samples for peer in alive)
    accused = frozenset().union(*(peer.downstream.suspects for peer in swarm.peers.values() if peer.downstream))
    assert all(not swarm.peers[name].alive for name in accused), "only the dead are suspects"
    await end(background)


async def test_a_stage_without_memory_refuses_and_takes_the_next() -> None:
    class Short(FakeStage):
        def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
            if next(shortages, None) is not None:
                raise MemoryError("CUDA out of memory")
            return super().loss(hidden, targets)

    shortages = iter(range(1))
    peer = Peer("a", None, AdmissionWindow(2, 4), 0.1)
    worker = Worker(Short(peer.weights), peer.gate, peer.device.run, None, 1e6, peer.device.clock)
    refused, reply = [await worker.process(MICROBATCH, "x") for _ in range(2)]
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after_s > 0) == (Reason.FULL, True)
    assert isinstance(reply, Gradient)
    assert (peer.gate.succeeded, peer.gate.in_flight) == (1, 0)
    assert worker.statistics()["shortages"] == 1


@given(st.lists(st.tuples(st.floats(1.0, 100.0), st.booleans()), max_size=60))
async def test_a_stage_that_runs_out_of_memory_for_minutes_does_not_fit(story: list[tuple[float, bool]]) -> None:
    """Each microbatch begins so many seconds after the last one, and has memory or not."""

    class Short(FakeStage):
        def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
            if not suffices:
                raise MemoryError("CUDA out of memory")
            return super().loss(hidden, targets)

    suffices = True

    loop, since_s, in_a_row, unfit = asyncio.get_running_loop(), 0.0, 0, False
    peer = Peer("a", None, AdmissionWindow(100, 100), 0.0)
    worker = Worker(Short(peer.weights), peer.gate, peer.device.run, None, 1e6, peer.device.clock)
    for pause_s, suffices in story:
        await asyncio.sleep(pause_s)
        await worker.process(MICROBATCH, "x")
        if suffices:
            in_a_row = 0
            continue
        since_s, in_a_row = since_s if in_a_row else loop.time(), in_a_row + 1
        unfit = unfit or (in_a_row >= UNFIT_SHORTAGES and loop.time() - since_s >= UNFIT_S)
    assert worker.unfit.is_set() == unfit


class Losing(FakeStage):
    """Has a loss of half a nat a token, or what it is told."""

    each = 0.5

    def token_losses(self, hidden: Tensor, targets: Tensor, /) -> Tensor:
        return torch.full(targets.shape, self.each)


def evaluating(passes: int = 1, each: float = 0.5, stages: int = 2) -> list[Worker]:
    """Return the workers of so many stages of one replica, the first one first."""
    workers: list[Worker] = []
    for stage in reversed(range(stages)):
        weights, below = Weights(), workers[0] if workers else None
        part, device = Losing(weights), Device(weights, 0.2)
        part.each = each
        following = None
        if below is not None:

            async def evaluate(name: str, microbatch: Microbatch, below: Worker = below) -> EvaluationReply:
                return await below.evaluate(microbatch, f"of stage {name}")

            client = NextStageClient(hops=tuple, call=no_call, evaluators=lambda: (Hop("next"),), evaluate=evaluate)
            following = NextStage(client, Random(1))
        gate, quota = AdmissionWindow(2), EvaluationQuota(passes, 10)
        workers.insert(0, Worker(part, gate, device.run, following, 300.0, device.clock, quota))
        assert stage == stages - len(workers)
    return workers


async def no_call(name: str, microbatch: Microbatch) -> Reply:
    raise AssertionError("an evaluation is no training")


async def test_an_evaluation_goes_to_the_last_stage_and_takes_no_place_in_any_window() -> None:
    workers = evaluating(stages=3)
    reply = await workers[0].evaluate(MICROBATCH, "me")
    assert isinstance(reply, SequenceLosses)
    assert reply.sums.tolist() == [1.0]
    for worker in workers:
        assert (worker._gate.statistics()["admitted"], worker._gate.succeeded) == (0, 0)
        assert worker.statistics()["succeeded"] == 0


@pytest.mark.parametrize("far", [0, 1])
async def test_a_sender_beyond_its_quota_is_refused_by_any_stage_with_the_reason(far: int) -> None:
    workers = evaluating(passes=3)
    for _ in range(PASSES_OF_ONE * 3):
        assert isinstance(await workers[far].evaluate(MICROBATCH, "of stage next"), SequenceLosses)
    assert await workers[0].evaluate(MICROBATCH, "of stage next") == Refused(reason=Reason.QUOTA)


async def test_few_evaluations_are_under_way_at_once_and_the_refused_ones_cost_no_quota() -> None:
    """Many would fill the memory, and microbatches of the training would wait behind them for the device."""
    worker = evaluating(passes=MOST_EVALUATING)[0]
    for _ in range(2):
        asked = [worker.evaluate(MICROBATCH, "me") for _ in range(3 * MOST_EVALUATING)]
        replies = await asyncio.gather(*asked)
        assert sum(isinstance(reply, SequenceLosses) for reply in replies) == MOST_EVALUATING
        assert replies.count(Refused(reason=Reason.FULL)) == 2 * MOST_EVALUATING
    assert await worker.evaluate(MICROBATCH, "me") == Refused(reason=Reason.QUOTA)


@pytest.mark.parametrize("each", [math.nan, math.inf])
async def test_a_loss_that_is_not_finite_is_a_refusal(each: float) -> None:
    assert await evaluating(each=each)[0].evaluate(MICROBATCH, "me") == Refused(reason=Reason.NOT_FINITE)


async def test_an_evaluation_without_a_budget_or_a_next_stage_is_refused() -> None:
    worker, _ = evaluating(passes=5)
    assert await worker.evaluate(replace(MICROBATCH, budget_s=0.0), "me") == Refused(reason=Reason.EXPIRED)
    for ways in (
        NextStageClient(hops=tuple, call=no_call),
        NextStageClient(hops=tuple, call=no_call, evaluators=lambda: (Hop("x"),), evaluate=lost),
    ):
        worker._next_stage = NextStage(ways, Random(1))
        assert await worker.evaluate(MICROBATCH, "me") == Refused(reason=Reason.NO_ROUTE)
        assert not worker._next_stage.suspects


async def lost(name: str, microbatch: Microbatch) -> EvaluationReply:
    raise ConnectionAbortedError("it fell silent")
