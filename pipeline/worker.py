"""One microbatch through this stage: in at the admission window, forward, the next stage's reply, backward, and the
gradient back.

A microbatch is a coroutine: the call to the next stage returns the gradient. A microbatch has succeeded here when its
own backward pass is complete. If its caller is cut off meanwhile, the sample counts in this window although the caller
will have it computed again elsewhere; such samples are counted (`counted_twice`). The travelling budget bounds
everything before our own backward pass, which runs without a deadline: all work of later stages is done.

`run` must be shielded: a job that has begun is awaited to its end even when its caller is cancelled, so
no slot is free and no step taken while a backward pass runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pipeline.admission_window import AdmissionWindow, EvaluationQuota, Slot, WindowOutcome
from pipeline.messages import EvaluationReply, Gradient, Microbatch, Reason, Refused, Reply, SequenceLosses
from pipeline.next_stage import Expired, NextStage, within

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

SHORT_S = 5.0  # a stage that ran out of memory may be asked again after so long
UNFIT_S, UNFIT_SHORTAGES = 300.0, 16
"""For how long, and how often in a row, memory runs out in a stage that does not fit; what another program has for a
while comes back before."""
MOST_EVALUATING = 4
"""Microbatches without a backward pass that are under way from a stage. One peer evaluates at a time, one microbatch
after another; a stranger who sends many at once shall not fill the memory, nor the device's queue before the training.
"""
SMOOTHING = 0.1  # weight of the newest microbatch in the moving average of device seconds
MOST_TIMES = 10.0
"""How many times the average it counts as at most. One during which the process was stopped says nothing of the device,
and as it is, it would have microbatches refused for about as long again. A device that is slower shows that soon."""


class WorkerForward(Protocol):
    """A forward pass that waits for its gradient; dropping it frees its graph."""

    @property
    def output(self) -> Tensor:
        """Activations for the next stage."""

    def backward(self, gradient: Tensor, /) -> Tensor | None:
        """Accumulate the parameters' gradients; return that of the input, None at stage 0."""


class WorkerStage(Protocol):
    """The slice of the model that this peer holds."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None, /) -> WorkerForward:
        """Compute the stage's output."""

    def loss(self, hidden: Tensor, targets: Tensor, /) -> Gradient:
        """Compute the loss, run backward, and return the input's gradient: the last stage's whole work."""

    def activations(self, hidden: Tensor, targets: Tensor | None = None, /) -> Tensor:
        """Return what `forward` sends on, without dropout and with no backward pass to come: nothing of it is kept.

        Raises FloatingPointError where it is not finite.
        """

    def token_losses(self, hidden: Tensor, targets: Tensor, /) -> Tensor:
        """Return the loss of each target [b, s], 0 where one is only given, without dropout and backward pass."""


class Run(Protocol):
    """Runs a function on the device, in its turn; once begun it is awaited to its end, even when cancelled."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]:
        """Return what the function returns."""


class _Work(Generic[T]):
    """A job of the device that keeps its own result, for a caller that is cancelled while it runs."""

    def __init__(self, clock: Callable[[], float], function: Callable[[], T]) -> None:
        self._clock, self._function = clock, function
        self.results: tuple[T, ...] = ()
        self.seconds = 0.0

    def __call__(self) -> T:
        begun_s = self._clock()
        result = self._function()
        self.seconds = self._clock() - begun_s
        self.results = (result,)
        return result


class Worker:
    """Takes microbatches through one stage; `next_stage` is None at the last.

    `run` runs jobs on the device, and `clock` measures them there, in seconds. `budget_s`: the longest time that any
    microbatch may travel from here. `quota`: of passes without a backward pass, none by default.
    """

    def __init__(
        self,
        stage: WorkerStage,
        gate: AdmissionWindow,
        run: Run,
        next_stage: NextStage | None,
        budget_s: float,
        clock: Callable[[], float] = time.perf_counter,
        quota: EvaluationQuota | None = None,
    ) -> None:
        self._stage, self._gate, self._run, self._clock = stage, gate, run, clock
        self._next_stage, self._budget_s = next_stage, budget_s
        self._quota = EvaluationQuota() if quota is None else quota
        self._counts: Counter[str] = Counter()
        self._abandoned = False
        self._evaluating = 0  # microbatches without a backward pass that are under way from here
        self._short_since_s, self._short_in_a_row = 0.0, 0
        self.unfit = asyncio.Event()
        """Set once memory has run out for `UNFIT_S` seconds without a microbatch that succeeded."""
        self.device_s = 0.0  # device seconds a microbatch, a moving average; 0 until one has succeeded

    async def process(self, microbatch: Microbatch, sender: str) -> Reply:
        """Take a microbatch through this stage and all later ones; return its gradient, or why there is none."""
        deadline_s = self._deadline_s(microbatch)
        reply: Reply = Refused(reason=Reason.EXPIRED)
        if deadline_s > asyncio.get_running_loop().time():
            try:
                slot: Slot | Refused | None = self._too_late(deadline_s)
                self._counts["refused_late"] += slot is not None
                slot = slot or self._gate.enter_at_once(sender)
                if slot is None:
                    slot = await within(deadline_s, self._gate.enter(sender))
                if isinstance(slot, Refused):
                    return slot
                with slot:
                    reply = await self._take(microbatch, slot, deadline_s)
            except Expired:
                pass
            except MemoryError:
                self._note_shortage()
                reply = Refused(reason=Reason.FULL, retry_after_s=SHORT_S)
        if isinstance(reply, Refused):
            self._counts[reply.reason.name.lower()] += 1
        return reply

    async def evaluate(self, microbatch: Microbatch, sender: str) -> EvaluationReply:
        """Take a microbatch without a backward pass through this stage and all later ones; return its losses.

        It takes no place in the window, and is no sample of the training.
        """
        if self._evaluating >= MOST_EVALUATING:
            return Refused(reason=Reason.FULL)
        if not self._quota.take(sender, self._counts["succeeded"]):
            return Refused(reason=Reason.QUOTA)
        deadline_s = self._deadline_s(microbatch)
        self._evaluating += 1
        try:
            return await within(deadline_s, self._evaluate(microbatch, deadline_s))
        except Expired:
            return Refused(reason=Reason.EXPIRED)
        except MemoryError:
            return Refused(reason=Reason.FULL, retry_after_s=SHORT_S)
        except FloatingPointError:
            return Refused(reason=Reason.NOT_FINITE)
        finally:
            self._evaluating -= 1

    async def _evaluate(self, microbatch: Microbatch, deadline_s: float) -> EvaluationReply:
        stage, hidden, targets = self._stage, microbatch.hidden, microbatch.targets
        if self._next_stage is None:
            losses = await self._run(lambda: stage.token_losses(hidden, targets))
            sums = losses.sum(1)
            if not sums.isfinite().all():
                raise FloatingPointError("losses that are not finite")
            return SequenceLosses(sums=sums)
        output = await self._run(lambda: stage.activations(hidden, targets))
        return await self._next_stage.evaluate(replace(microbatch, hidden=output), deadline_s)

    def _deadline_s(self, microbatch: Microbatch) -> float:
        """Return until when a microbatch may travel, in loop seconds."""
        # The budget is a stranger's: if it is not a number, none is left.
        return asyncio.get_running_loop().time() + min(max(0.0, microbatch.budget_s), self._budget_s)

    def _too_late(self, deadline_s: float) -> Refused | None:
        """Refuse a microbatch that the device would not complete within its budget, after those before it.

        It would be computed in vain, and again elsewhere. Where none is before it, one with half of the longest budget
        is taken all the same, for the device may be faster by now.
        """
        before, left_s = self._gate.in_flight + self._gate.queued, deadline_s - asyncio.get_running_loop().time()
        if (before + 1) * self.device_s <= left_s or (not before and left_s >= self._budget_s / 2):
            return None
        return Refused(reason=Reason.FULL, retry_after_s=self.device_s)

    def abandon(self) -> None:
        """Begin no backward pass any more: the weights will change under the graphs that wait for a reply."""
        self._abandoned = True
        self._gate.turns.end()

    def reply_lost(self) -> None:
        """Count a gradient that could not be delivered: its sample counts here, and again wherever it is retried."""
        self._counts["counted_twice"] += 1

    def statistics(self) -> dict[str, int | float]:
        names = ("succeeded", "expired", "no_route", "counted_twice", "shortages", "refused_late")
        return {**{name: self._counts[name] for name in names}, "device_s": self.device_s}

    def _note_shortage(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._counts["shortages"] += 1
        if self._short_in_a_row == 0:
            self._short_since_s = now_s
        self._short_in_a_row += 1
        if self._short_in_a_row >= UNFIT_SHORTAGES and now_s - self._short_since_s >= UNFIT_S:
            self.unfit.set()

    async def _take(self, microbatch: Microbatch, slot: Slot, deadline_s: float) -> Reply:
        clock, stage = self._clock, self._stage
        if self._next_stage is None:
            if not (slot.take_turn() or await within(deadline_s, slot.turn())):
                return Refused(reason=Reason.LEAVING)
            whole = _Work(clock, lambda: stage.loss(microbatch.hidden, microbatch.targets))

            def done(reply: Gradient) -> None:
                self._succeeded(slot, WindowOutcome(microbatch.progress, reply.loss, reply.tokens), whole.seconds)

            return await self._finish(whole, done)
        ahead = _Work(clock, lambda: stage.forward(microbatch.hidden, microbatch.targets))
        forward, reply = await within(deadline_s, self._ask_below(slot, microbatch, ahead, deadline_s))
        if isinstance(reply, Refused):
            return reply
        if self._abandoned:
            return Refused(reason=Reason.LEAVING)
        assert reply.hidden is not None, "NextStage lets no other gradient through"
        below, gradient = reply, reply.hidden
        back = _Work(clock, lambda: forward.backward(gradient))
        outcome = WindowOutcome(microbatch.progress, below.loss, below.tokens, slot.stale)
        hidden = await self._finish(back, lambda _: self._succeeded(slot, outcome, ahead.seconds + back.seconds))
        return replace(below, hidden=hidden)

    async def _ask_below(
        self, slot: Slot, microbatch: Microbatch, ahead: _Work[WorkerForward], deadline_s: float
    ) -> tuple[WorkerForward, Reply]:
        """Run forward, have the later stages do their part, and wait for our turn; the caller watches the deadline."""
        assert self._next_stage is not None
        forward = await self._run(ahead)
        reply = await self._next_stage.ask(replace(microbatch, hidden=forward.output), deadline_s)
        if isinstance(reply, Gradient) and not await slot.turn():
            reply = Refused(reason=Reason.LEAVING)
        return forward, reply

    async def _finish(self, work: _Work[T], succeeded: Callable[[T], None]) -> T:
        """Run a backward and report that it is complete, also when we are cancelled meanwhile."""
        try:
            return await self._run(work)
        except asyncio.CancelledError:
            self._counts["counted_twice"] += len(work.results)
            raise
        finally:
            for result in work.results:
                succeeded(result)

    def _succeeded(self, slot: Slot, outcome: WindowOutcome, device_s: float) -> None:
        slot.succeed(outcome)
        self._short_in_a_row = 0
        newest_s = min(device_s, MOST_TIMES * self.device_s or device_s)
        self.device_s = (1.0 - SMOOTHING) * self.device_s + SMOOTHING * newest_s if self.device_s else device_s
        self._counts["succeeded"] += 1
