"""The window of microbatches of an inner step, and the gate in front of it.

With one window in flight it admits exactly as many microbatches as an inner step takes: those in flight and those that
succeeded never add up to more, and one that fails gives its slot back to the next. So the batch of every inner step is
exact, and no weights change under a living graph: the step is taken when the window is full, when nothing is in flight
and nothing is let in.

With two windows in flight twice as many are let in. Then the step leaves the younger half of them in flight: their
gradients belong to the next window, whose turn they wait for before their backward passes begin
(`pipeline.window_turns`).

What comes while there is no room queues, two windows' worth by default, in turn by sender. A sender may take a
fair share of the queue, counted over the senders heard of in this window and the last, the refused ones too: so whoever
finds the queue taken by another has a place in it one window later. Beyond that the answer is `Refused(FULL)`, at once,
with an estimate of when half of the queue will have moved on; to wait longer would let the queue run dry.

Three things change who is let in:

- the step: from `full()` until `next_window()`. Arrivals queue;
- `alone()`: the blocking form of a gossip round. Everything is refused at once, the queue too, what is in flight ends
  (of two windows the first still takes its step, else the second could not end), and the body runs with nothing in
  flight and no step being taken. It works in the middle of a window, whose count goes on afterwards. It must not be
  opened by whoever holds the step: that would wait for itself, until its deadline;
- `close()`: we are leaving. Everything is refused from now on, what is in flight ends.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import NamedTuple

from pipeline.messages import Reason, Refused
from pipeline.schedule import fair_share
from pipeline.window_turns import GradientTurns

UNKNOWN_PACE_S = 0.25
"""Seconds a microbatch to assume before one has been measured."""
LONGEST_RETRY_S = 30.0


class WindowOutcome(NamedTuple):
    """What a microbatch that succeeded leaves behind for the inner step.

    `stale`: whether a step was taken between its forward and its backward pass.
    """

    progress: float
    loss: float | None
    tokens: int
    stale: bool = False


class Slot:
    """A microbatch's place among those in flight; used as a context it is given back unless it succeeded."""

    def __init__(self, gate: AdmissionWindow) -> None:
        self._gate: AdmissionWindow | None = gate
        self._claim = gate.turns.claim()

    @property
    def stale(self) -> bool:
        """Whether an inner step has been taken since it was let in."""
        return self._gate is not None and self._claim.step < self._gate.steps

    def take_turn(self) -> bool:
        """Take a turn in the window that is under way if there is one for us; at once."""
        return self._gate is not None and self._gate.turns.take(self._claim)

    async def turn(self) -> bool:
        """Wait until the backward pass may begin; False if no inner step will be taken any more."""
        return self._gate is not None and await self._gate.turns.wait(self._claim)

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
            gate.turns.release(self._claim)
            gate._gave_back()

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()


Place = asyncio.Future[Slot | Refused]


class AdmissionWindow:
    """Admits `window` microbatches an inner step, `windows` of them at a time (1 or 2); queues `queue_limit` more."""

    def __init__(self, window: int, queue_limit: int | None = None, windows: int = 1) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} microbatches cannot make an inner step")
        if windows not in (1, 2):
            raise ValueError(f"with {windows} windows in flight weights would be older than a step, or none could work")
        self.window, self.windows = window, windows
        self.queue_limit = 2 * window if queue_limit is None else queue_limit
        self.in_flight = 0
        self.turns = GradientTurns(window)
        self._outcomes: list[WindowOutcome] = []
        self._queue: OrderedDict[str, deque[Place]] = OrderedDict()
        self._heard: tuple[set[str], set[str]] = (set(), set())
        self._stepping = False
        self._closed: Reason | None = None
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
        """Microbatches of the present window that succeeded."""
        return len(self._outcomes)

    @property
    def queued(self) -> int:
        """Microbatches that wait for a place in a window."""
        return sum(len(places) for places in self._queue.values())

    async def enter(self, sender: str) -> Slot | Refused:
        """Wait for a place in the window, or be refused at once.

        A wait that is cancelled leaves no trace. Those who wait are refused as well when the gate is shut or closed.
        """
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
        # Whoever queues has been let in as soon as there was room: nobody is overtaken here.
        self._hear(sender)
        return self._admit()

    async def full(self) -> tuple[WindowOutcome, ...] | None:
        """Wait until the window is complete; return what it is made of: the step is ours.

        Until `next_window` nobody is let in, no backward pass begins, and `alone` waits; with one window in flight
        nothing is in flight either. None: the gate was closed, this window stays partial.
        """
        await self._until(self._due)
        if not self._complete():
            return None
        self._stepping = True
        return tuple(self._outcomes)

    def next_window(self) -> tuple[WindowOutcome, ...]:
        """Open the next window after the step; return what the finished one was made of."""
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
        """Shut the gate and run the body with nothing in flight and no step being taken.

        `retry_after_s`: how long the gate will be shut, as the refused are told. `deadline_s`: seconds until everything
        must have drained, else TimeoutError, and the gate is open again.
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

    def close(self, reason: Reason = Reason.LEAVING) -> None:
        """Refuse everything from now on, the queue too; what is in flight goes on."""
        self._closed = reason
        self._refuse_queued(Refused(reason=reason))
        self._changed()

    def statistics(self) -> dict[str, int | float]:
        """Return what is where now, and totals since the start."""
        return {
            "window": self.window,
            "in_flight": self.in_flight,
            "succeeded": self.succeeded,
            "queued": self.queued,
            "pace_s": self._pace_s,
            "windows": self.steps,
            "deferred": self.turns.deferred,
            **{name: self._counts[name] for name in ("admitted", "given_back", "stale")},
            **{f"refused_{reason}": self._counts[f"refused_{reason}"] for reason in ("full", "gossiping", "leaving")},
        }

    def _complete(self) -> bool:
        return len(self._outcomes) == self.window

    def _over(self) -> bool:
        return self._closed is not None and self.in_flight == 0

    def _due(self) -> bool:
        """Say whether `full` may return. What is in flight while the gate is shut may need a step to end."""
        if self._shut_until_s is not None:
            return self._complete() and self.in_flight > 0
        return self._complete() or self._over()

    def _room(self) -> int:
        if self._stepping or self._closed is not None or self._shut_until_s is not None:
            return 0
        return self.windows * self.window - len(self._outcomes) - self.in_flight

    def _refusal(self, sender: str) -> Refused | None:
        if self._closed is not None:
            return Refused(reason=self._closed)
        if self._shut_until_s is not None:
            left_s = self._shut_until_s - asyncio.get_running_loop().time()
            return Refused(reason=Reason.GOSSIPING, retry_after_s=max(0.0, left_s))
        self._hear(sender)
        heard, before = self._heard
        queued = self.queued
        share = fair_share(self.queue_limit, len(heard | before))
        if queued < self.queue_limit and len(self._queue.get(sender, ())) < share:
            return None
        pace_s = self._pace_s or UNKNOWN_PACE_S
        return Refused(reason=Reason.FULL, retry_after_s=min(LONGEST_RETRY_S, pace_s * max(1.0, queued / 2)))

    def _hear(self, sender: str) -> None:
        heard, _ = self._heard
        if len(heard) < self.queue_limit:
            # With as many senders as places a share is one place; counting further would change nothing.
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
        """Give turns, let in whoever there is room for, and wake those who wait for the gate itself."""
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
