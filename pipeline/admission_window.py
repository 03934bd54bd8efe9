"""The admission window in front of a stage: which microbatches are in flight, and which inner step each gradient
belongs to.

With one window in flight, microbatches in flight and succeeded ones together never exceed what an inner step takes, and
one that fails gives its slot back. So every batch is exact, and nothing is in flight when weights change. Of a long
window only some are in flight at a time, since each of them takes memory.

With two windows twice as many are admitted. Before its backward pass a microbatch waits for a **turn**; a window has
exactly as many as its step takes.

- A turn is kept for each microbatch that was admitted before the last step; younger ones share the rest. So at most one
  step lies between a forward and its backward pass, and one that fails gives its turn back to its window.
- Only a microbatch with its reply waits for a turn, and only for the device, the step, or older microbatches here. So
  no stages wait for each other in a circle.
- From the end of the last turn until the next window no backward pass runs, so gradients of two windows never mix.

Arrivals without room queue, in turn by sender. A sender gets a fair share of the queue among the senders heard of in
this window and the last, refused ones too. Other arrivals get `Refused(FULL)` at once, with an estimate of when half of
the queue will have moved on. Admission stops in `alone` (the blocking form of a gossip round), from `full` until
`next_window` (the step; arrivals queue), and for good at `close`. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import NamedTuple

from pipeline.messages import Reason, Refused

MOST_IN_FLIGHT = 64
"""Microbatches that wait for their gradient at once, however long a window is: each takes memory, and so many fill any
way down a pipeline and back."""
UNKNOWN_PACE_S = 0.25  # seconds a microbatch to assume before one has been measured
LONGEST_RETRY_S = 30.0


class WindowOutcome(NamedTuple):
    """A microbatch's result, for the inner step.

    `loss`: a mean over so many `tokens`. `stale`: a step was taken between its forward and backward pass.
    """

    progress: float
    loss: float | None
    tokens: int
    stale: bool = False


class Slot:
    """A microbatch's place among those in flight; used as a context it is given back unless it succeeded.

    `step`: inner steps that had been taken when it was admitted. `granted`: whether it has its turn.
    """

    def __init__(self, gate: AdmissionWindow) -> None:
        self._gate: AdmissionWindow | None = gate
        self.step, self.granted = gate.steps, False

    @property
    def stale(self) -> bool:
        """Whether an inner step has been taken since it was admitted."""
        return self._gate is not None and self.step < self._gate.steps

    def take_turn(self) -> bool:
        """Take a turn in the present window at once; False if none is free for us."""
        return self._gate is not None and self._gate.turns.take(self)

    async def turn(self) -> bool:
        """Wait until the backward pass may begin; False if no inner step will be taken any more."""
        return self._gate is not None and await self._gate.turns.wait(self)

    def succeed(self, outcome: WindowOutcome) -> None:
        """Count the microbatch towards the inner step; nothing happens if the slot is finished already.

        Raises RuntimeError if it had no turn and none is free: its gradient would make the window too large.
        """
        if self._gate is not None:
            if not self.take_turn():
                raise RuntimeError("a gradient out of turn: await turn() before the backward pass")
            gate, self._gate = self._gate, None
            gate._succeeded(outcome)

    def give_back(self) -> None:
        """Let another microbatch have the place; nothing happens if the slot is finished already."""
        if self._gate is not None:
            gate, self._gate = self._gate, None
            gate.turns.release(self)
            gate._gave_back()

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


class GradientTurns:
    """The turns of the present window, and who waits for one. With one window in flight a turn is always free."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.steps = 0  # windows that have ended
        self.deferred = 0  # microbatches that had to wait for their turn, since the start
        self._given = 0
        self._kept = 0  # for microbatches that were admitted before the last step and have not had their turn
        self._waiting: dict[Slot, asyncio.Future[bool]] = {}  # the first to ask first
        self._ended = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take(self, slot: Slot) -> bool:
        """Give a microbatch its turn if there is one for it; at once."""
        if slot.granted:
            return True
        if slot.step < self.steps:
            self._kept -= 1
        elif self._given + self._kept >= self.window:
            return False
        self._given += 1
        slot.granted = True
        return True

    async def wait(self, slot: Slot) -> bool:
        """Wait until a microbatch has its turn; False if no further window will take it.

        It may get its turn in the moment in which the wait is cancelled; `release` looks.
        """
        if self.take(slot) or self._ended:
            return slot.granted
        self.deferred += 1
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[slot] = waiting
        try:
            return await waiting
        finally:
            del self._waiting[slot]

    def release(self, slot: Slot) -> None:
        """Take back the turn, given or kept, of a microbatch that failed."""
        if slot.granted:
            self._given -= 1
        elif slot.step < self.steps:
            self._kept -= 1

    def grant(self) -> None:
        """Give the waiting microbatches their turns, as far as there are any by now."""
        for slot, waiting in self._waiting.items():
            if not waiting.done() and self.take(slot):
                waiting.set_result(True)

    def next_window(self, in_flight: int) -> None:
        """Begin a window; a turn is kept for each that is in flight."""
        self.steps += 1
        self._given, self._kept = 0, in_flight

    def end(self) -> None:
        """Begin no window any more: all waits end in vain."""
        self._ended = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(False)


PASSES_OF_ONE, PASSES_OF_ALL = 2, 4
"""Evaluations' worth of forward passes that one sender, and all together, may have in the time of one: an evaluation is
also made at the end, and microbatches are sent again. Strangers who invent names share what is for all."""


class EvaluationQuota:
    """The forward passes without a backward pass that senders may have while a stage trains so many microbatches.

    Time is counted in training, so that evaluations stay small beside it on a device of any speed.
    """

    def __init__(self, passes: int = 0, microbatches: int = 1) -> None:
        """`passes`: of one evaluation. `microbatches`: trained from one to the next."""
        self._passes, self._microbatches = passes, microbatches
        self._window = 0
        self._taken: Counter[str] = Counter()

    def take(self, sender: str, trained: int) -> bool:
        """Count a pass for a sender if it has one left, after so many microbatches since the start."""
        window = trained // self._microbatches
        if window != self._window:
            self._window = window
            self._taken.clear()
        if self._taken[sender] >= PASSES_OF_ONE * self._passes:
            return False
        if self._taken.total() >= PASSES_OF_ALL * self._passes:
            return False
        self._taken[sender] += 1
        return True


Place = asyncio.Future[Slot | Refused]


class AdmissionWindow:
    """Admits `window` microbatches an inner step, `windows` of them at a time (1 or 2), and never more than `most`
    microbatches at once; queues `queue_limit` more.
    """

    def __init__(
        self, window: int, queue_limit: int | None = None, windows: int = 1, most: int = MOST_IN_FLIGHT
    ) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} microbatches cannot make an inner step")
        if windows not in (1, 2):
            raise ValueError(f"with {windows} windows in flight weights would be older than a step, or none could work")
        self.window, self.windows, self._most = window, windows, most
        self.queue_limit = 2 * min(window, most) if queue_limit is None else queue_limit
        self.in_flight = 0
        self.turns = GradientTurns(window)
        self._outcomes: list[WindowOutcome] = []
        self._queue: OrderedDict[str, deque[Place]] = OrderedDict()
        self._heard: tuple[set[str], set[str]] = (set(), set())
        self._stepping = False
        self._closed = False
        self._shut_until_s: float | None = None
        self._shutter = asyncio.Lock()
        self._watchers: dict[asyncio.Future[None], None] = {}
        """In the order in which they came: a set would wake them in another order each time."""
        self._pace_s = 0.0
        self._last_success_s: float | None = None
        self._counts: Counter[str] = Counter()

    @property
    def steps(self) -> int:
        """Windows that have ended."""
        return self.turns.steps

    @property
    def succeeded(self) -> int:
        return len(self._outcomes)

    @property
    def queued(self) -> int:
        return sum(len(places) for places in self._queue.values())

    async def enter(self, sender: str) -> Slot | Refused:
        """Wait for a place in the window, or be refused; a wait that is cancelled leaves no trace."""
        slot = self.enter_at_once(sender)
        if slot is not None:
            return slot
        refusal = self._refusal(sender)
        if refusal is not None:
            self._counts[f"refused_{refusal.reason.name.lower()}"] += 1
            return refusal
        place: Place = asyncio.get_running_loop().create_future()
        self._queue.setdefault(sender, deque()).append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                granted = place.result()
                if isinstance(granted, Slot):
                    granted.give_back()
            else:
                self._forget(sender, place)
            raise

    def enter_at_once(self, sender: str) -> Slot | None:
        """Take a place if there is room; None where `enter` would have to wait or would be refused."""
        if self._room() <= 0:
            return None
        # Where there is room the queue is empty, so no sender is overtaken.
        self._hear(sender)
        return self._admit()

    async def full(self) -> tuple[WindowOutcome, ...] | None:
        """Wait until the window is complete; return its outcomes, or None if the admission window was closed before.

        The caller holds the step until `next_window`: no microbatch enters, no backward pass begins, `alone` waits.
        """
        await self._until(self._due)
        if not self._complete():
            return None
        self._stepping = True
        return tuple(self._outcomes)

    def next_window(self) -> tuple[WindowOutcome, ...]:
        """Open the next window after the step; return the outcomes of the finished one."""
        if not self._stepping:
            raise RuntimeError("a window ends with a step: await full() first")
        outcomes, self._outcomes = tuple(self._outcomes), []
        self._stepping = False
        self.turns.next_window(self.in_flight)
        self._heard = (set(), self._heard[0])
        self._changed()
        return outcomes

    @asynccontextmanager
    async def alone(self, retry_after_s: float, deadline_s: float) -> AsyncIterator[None]:
        """Shut the admission window and run the body with nothing in flight and no step being taken.

        `retry_after_s`: how long the admission window will be shut, for refusals. If something is still in flight after
        `deadline_s` seconds, raises TimeoutError and opens the admission window again.
        """
        async with asyncio.timeout(deadline_s) as limit:
            async with self._shutter:
                self._shut_until_s = asyncio.get_running_loop().time() + retry_after_s
                try:
                    self._refuse_queued(Refused(reason=Reason.GOSSIPING, retry_after_s=retry_after_s))
                    await self._until(lambda: self.in_flight == 0 and not self._stepping)
                    limit.reschedule(None)
                    yield
                finally:
                    self._shut_until_s = None
                    self._changed()

    def close(self) -> None:
        """Refuse everything from now on, the queue too; what is in flight goes on."""
        self._closed = True
        self._refuse_queued(Refused(reason=Reason.LEAVING))
        self._changed()

    def statistics(self) -> dict[str, int | float]:
        return {
            "window": self.window,
            "in_flight": self.in_flight,
            "succeeded": self.succeeded,
            "queued": self.queued,
            "pace_s": self._pace_s,
            "windows": self.steps,
            "deferred": self.turns.deferred,
            "turns": self.turns.waiting,
            **{name: self._counts[name] for name in ("admitted", "given_back", "stale")},
            **{f"refused_{reason}": self._counts[f"refused_{reason}"] for reason in ("full", "gossiping", "leaving")},
        }

    def _complete(self) -> bool:
        return len(self._outcomes) == self.window

    def _over(self) -> bool:
        return self._closed and self.in_flight == 0

    def _due(self) -> bool:
        """Say whether `full` may return. Microbatches in flight may need a step to end while the window is shut."""
        if self._shut_until_s is not None:
            return self._complete() and self.in_flight > 0
        return self._complete() or self._over()

    def _room(self) -> int:
        if self._stepping or self._closed or self._shut_until_s is not None:
            return 0
        return min(self._most, self.windows * self.window - len(self._outcomes)) - self.in_flight

    def _refusal(self, sender: str) -> Refused | None:
        if self._closed:
            return Refused(reason=Reason.LEAVING)
        if self._shut_until_s is not None:
            left_s = self._shut_until_s - asyncio.get_running_loop().time()
            return Refused(reason=Reason.GOSSIPING, retry_after_s=max(0.0, left_s))
        self._hear(sender)
        heard, before = self._heard
        queued = self.queued
        share = max(1, self.queue_limit // max(1, len(heard | before)))
        if queued < self.queue_limit and len(self._queue.get(sender, ())) < share:
            return None
        pace_s = self._pace_s or UNKNOWN_PACE_S
        return Refused(reason=Reason.FULL, retry_after_s=min(LONGEST_RETRY_S, pace_s * max(1.0, queued / 2)))

    def _hear(self, sender: str) -> None:
        heard, _ = self._heard
        if len(heard) < self.queue_limit:
            # With as many senders as places a share is one place already.
            heard.add(sender)

    def _admit(self) -> Slot:
        self.in_flight += 1
        self._counts["admitted"] += 1
        return Slot(self)

    def _succeeded(self, outcome: WindowOutcome) -> None:
        self._counts["stale"] += outcome.stale
        self._outcomes.append(outcome)
        self.in_flight -= 1
        now_s = asyncio.get_running_loop().time()
        if self._last_success_s is not None:
            interval_s = now_s - self._last_success_s
            self._pace_s = 0.9 * self._pace_s + 0.1 * interval_s if self._pace_s else interval_s
        self._last_success_s = now_s
        self._changed()

    def _gave_back(self) -> None:
        self.in_flight -= 1
        self._counts["given_back"] += 1
        self._changed()

    def _changed(self) -> None:
        """Grant turns, admit from the queue while there is room, and wake the watchers of the gate."""
        self.turns.grant()
        while self._queue and self._room() > 0:
            sender, places = self._queue.popitem(last=False)
            place = places.popleft()
            if places:
                self._queue[sender] = places
            if not place.done():
                place.set_result(self._admit())
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _refuse_queued(self, refusal: Refused) -> None:
        queue, self._queue = self._queue, OrderedDict()
        for places in queue.values():
            for place in places:
                if not place.done():
                    place.set_result(refusal)
                    self._counts[f"refused_{refusal.reason.name.lower()}"] += 1

    def _forget(self, sender: str, place: Place) -> None:
        places = self._queue.get(sender)
        if places is not None and place in places:
            places.remove(place)
            if not places:
                del self._queue[sender]

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers[watcher] = None
            try:
                await watcher
            finally:
                self._watchers.pop(watcher)
