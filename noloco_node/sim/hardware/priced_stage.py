"""A device in virtual time, and a stage on it that names a price for each job and watches its promises.

The device computes a job at once, in the event loop, and hands the result over when its price has passed. `PricedStage`
wraps a quadratic model or a real slice. It names the price by `charge`, in seconds of a device of speed 1, and watches
that an inner step gets exactly the passes of its window, and that no weights change between the forward and the
backward pass of a microbatch; with two windows in flight they may change once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

from torch import Tensor

from noloco_node.machine.interface import StageModel
from noloco_node.planning.plan import KeptGraphs
from noloco_node.planning.windows import BACKWARD
from pipeline.inner_step import OptimiserState, StepReport
from pipeline.messages import Gradient
from pipeline.worker import WorkerForward


class Prices(NamedTuple):
    """Device seconds of a pass forward, of an inner step, and of a copy of the weights.

    `backward`: forward passes that a backward pass takes as long as. `coding_s`: of what a pass, forward or backward,
    decodes and encodes. `graphs`: passes that may wait for their gradient with their graph; a backward pass of another
    computes the forward one again. None: all. `by_layers`: every backward pass does.
    """

    forward_s: float = 0.01
    step_s: float = 0.0
    copy_s: float = 0.0
    coding_s: float = 0.0
    graphs: int | None = None
    by_layers: bool = False
    backward: float = BACKWARD

    def passes(self, most: int) -> float:
        """Return how many forward passes a microbatch takes as long as, where a replica has `most` in flight."""
        return 1.0 + self.backward + KeptGraphs(self.graphs, self.by_layers).computed_again(most)

    @property
    def passes_s(self) -> float:
        """Of a microbatch, forward and backward, with nothing computed again."""
        return (1.0 + self.backward) * self.forward_s


class _Version(NamedTuple):
    """Which weights: inner steps so far, and changes of another kind since the last of them."""

    steps: int = 0
    changes: int = 0


class _WatchedPass:
    """A forward pass that notices when the weights change under it."""

    def __init__(self, stage: PricedStage, forward: WorkerForward) -> None:
        self._stage, self._forward, self._version = stage, forward, stage._version
        self.has_graph = True

    @property
    def output(self) -> Tensor:
        return self._forward.output

    def backward(self, gradient: Tensor, /) -> Tensor | None:
        again, self.has_graph = self._stage._prices.by_layers or not self.has_graph, False
        return self._stage._backward(self._forward, self._version, gradient, again=again)


class PricedStage:
    """A `noloco_node.machine.interface.StageModel` around another. `wrong` takes the promises that were broken, in
    words.

    `windows`: how many are in flight, 1 or 2.
    """

    def __init__(
        self,
        stage: StageModel,
        prices: Prices,
        charge: Callable[[float], None],
        wrong: Callable[[str], None],
        windows: int = 1,
    ) -> None:
        self._stage, self._prices, self._charge, self._wrong = stage, prices, charge, wrong
        self._windows = windows
        self._collected = 0
        self._version = _Version()
        self._waiting: WeakSet[_WatchedPass] = WeakSet()

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        return self._stage.shapes

    @property
    def fixed(self) -> frozenset[int]:
        return self._stage.fixed

    def forward(self, hidden: Tensor, targets: Tensor | None = None, /) -> _WatchedPass:
        self._charge(self._prices.forward_s + self._prices.coding_s)
        waiting = _WatchedPass(self, self._stage.forward(hidden, targets))
        if self._prices.graphs is not None:
            waiting.has_graph = sum(each.has_graph for each in self._waiting) < self._prices.graphs
            self._waiting.add(waiting)
        return waiting

    def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
        prices = self._prices
        self._charge(prices.passes_s + prices.by_layers * prices.forward_s + 2 * prices.coding_s)
        gradient = self._stage.loss(hidden, targets)
        self._collected += 1
        return gradient

    def _backward(self, forward: WorkerForward, version: _Version, gradient: Tensor, *, again: bool) -> Tensor | None:
        prices = self._prices
        self._charge((again + prices.backward) * prices.forward_s + prices.coding_s)
        behind = self._version.steps - version.steps
        if behind >= self._windows or (behind == 0 and version != self._version):
            self._wrong("the weights changed between a microbatch's forward and its backward pass")
        hidden = forward.backward(gradient)
        self._collected += 1
        return hidden

    def step(self, learning_rate: float, microbatches: float, /) -> StepReport:
        self._charge(self._prices.step_s)
        if self._collected != microbatches:
            self._wrong(f"an inner step for {microbatches} microbatches was taken on {self._collected}")
        self._collected = 0
        self._version = _Version(steps=self._version.steps + 1)
        return self._stage.step(learning_rate, microbatches)

    def discard(self) -> None:
        self._collected = 0
        self._stage.discard()

    def activations(self, hidden: Tensor, targets: Tensor | None = None, /) -> Tensor:
        self._charge(self._prices.forward_s + self._prices.coding_s)
        return self._stage.activations(hidden, targets)

    def token_losses(self, hidden: Tensor, targets: Tensor, /) -> Tensor:
        self._charge(self._prices.forward_s + self._prices.coding_s)
        return self._stage.token_losses(hidden, targets)

    def infer(self, hidden: Tensor, /) -> Tensor:
        self._charge(self._prices.forward_s)
        return self._stage.infer(hidden)

    def weights(self, less: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        self._charge(self._prices.copy_s)
        return self._stage.weights(less)

    def set_weights(self, weights: Sequence[Tensor], /) -> None:
        self._note_change()
        self._stage.set_weights(weights)

    def correct(self, delta: Sequence[Tensor], /) -> None:
        self._charge(self._prices.copy_s)
        self._note_change()
        self._stage.correct(delta)

    def _note_change(self) -> None:
        self._version = self._version._replace(changes=self._version.changes + 1)

    def current_weights(self) -> tuple[Tensor, ...]:
        """Return the fast weights themselves, at the price of a copy: somebody reads them all now."""
        self._charge(self._prices.copy_s)
        return self._stage.current_weights()

    def optimiser_state(self) -> OptimiserState:
        """Return the inner optimiser's memory, at the price of two copies of the weights."""
        self._charge(2 * self._prices.copy_s)
        return self._stage.optimiser_state()

    def load_optimiser_state(self, state: OptimiserState, /) -> None:
        self._stage.load_optimiser_state(state)

    def statistics(self) -> dict[str, int | float]:
        return self._stage.statistics()


T = TypeVar("T")


class Stutter(NamedTuple):
    """Of all jobs the share `share` take `pause_s` longer."""

    share: float = 0.0
    pause_s: float = 0.0


class _Job:
    """`waiter` is replaced when its task is cancelled while the job is under way."""

    __slots__ = ("args", "begun", "ended", "function", "waiter")

    def __init__(self, function: Callable[..., Any], args: tuple[object, ...], waiter: asyncio.Future[Any]) -> None:
        self.function, self.args, self.waiter = function, args, waiter
        self.begun = self.ended = False


class VirtualDevice:
    """Runs jobs in their turn. A job that has begun is always finished, also when its caller is cancelled."""

    def __init__(self, job_s: float = 0.0, *, seed: str = "") -> None:
        """`job_s`: what every job costs, whatever it says itself."""
        self.busy_s = 0.0
        self.jobs = 0
        self.slowness, self.stutter = 1.0, Stutter()
        self._job_s, self._rng = job_s, Random(f"{seed}|stutter")
        self._queue: deque[_Job] = deque()
        self.busy = False
        self._charged_s = 0.0

    def charge(self, seconds: float) -> None:
        self._charged_s += seconds * self.slowness

    def clock(self) -> float:
        """Return the virtual time as the job in hand sees it."""
        return asyncio.get_running_loop().time() + self._charged_s

    async def run(self, job: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        entry = _Job(job, args, loop.create_future())
        self._queue.append(entry)
        if not self.busy:
            self._begin()
        try:
            result: T = await entry.waiter
        except asyncio.CancelledError:
            if not entry.begun:
                self._queue.remove(entry)
                raise
            await self._see_through(entry)
            raise
        return result

    async def beside(self, job: Callable[..., T], *args: object) -> T:
        """Run `job(*args)` beside what the device does; it costs what every job costs."""
        result = job(*args)
        await asyncio.sleep(self._job_s * self.slowness)
        return result

    async def _see_through(self, entry: _Job) -> None:
        while not entry.ended:
            entry.waiter = asyncio.get_running_loop().create_future()
            try:
                await entry.waiter
            except asyncio.CancelledError:
                continue
            except Exception:  # the caller is gone: what the job raised is nobody's any more
                return

    def _begin(self) -> None:
        entry = self._queue.popleft()
        self.busy = entry.begun = True
        self._charged_s = self._job_s * self.slowness
        failure, result = None, None
        try:
            result = entry.function(*entry.args)
        except Exception as error:  # for the caller that waits for the job
            failure = error
        cost_s, self._charged_s = self._charged_s, 0.0
        if self.stutter.share and self._rng.random() < self.stutter.share:
            cost_s += self.stutter.pause_s
        self.busy_s += cost_s
        self.jobs += 1
        asyncio.get_running_loop().call_later(cost_s, self._end, entry, result, failure)

    def _end(self, entry: _Job, result: Any, failure: Exception | None) -> None:
        entry.ended, self.busy = True, False
        if entry.waiter.cancelled():
            # Its task wakes up to a cancellation that came in this very moment: the job is done all the same.
            pass
        elif failure is None:
            entry.waiter.set_result(result)
        else:
            entry.waiter.set_exception(failure)
        if self._queue:
            self._begin()
