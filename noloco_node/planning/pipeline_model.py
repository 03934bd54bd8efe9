"""How busy a pipeline will be: a model of its cost, in virtual time, without tensors and without a network.

The unit of time is the forward pass of the slowest stage, or whatever the caller takes. Each replica has one device,
first come, first served. A microbatch takes a forward pass at every stage on its way down and a backward pass, twice
the work, on its way up; the last stage does both at once. The rest is production's behaviour, and where it is a
function there it is called and not copied:

- a sender draws its next hop from a bag, in proportion to speed (`pipeline.routing`), and a call is one message down
  and one up: streams stay open (`noloco_node.network.conversation_pool`), and what opened them is not counted;
- a replica admits exactly a window of microbatches between two inner steps, queues two more, a fair share per sender
  and the senders in turn, and refuses the rest (`pipeline.admission_window`); who is refused leaves that replica in
  peace for as long as it was told, asks another, and sleeps when all refuse (`pipeline.next_stage`);
- with two windows in flight it admits and queues one more, and a gradient that has come may have to wait for its turn:
  those let in before the last step have one kept (`pipeline.window_turns`). The last stage has one window whatever the
  others have (`noloco_node.node.replica`);
- a source has a window of microbatches on their way, or two, and starts the next when a gradient is back.

Between two windows every stage runs dry and fills again, and a replica that waits for a slow one has nothing else to
do: that is what the model measures. It leaves out inner steps, gossip, bandwidth, faults, and what measuring speeds
gets wrong, so it is an upper bound. `tests/planning/test_pipeline_model.py` holds it against production nodes.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import msgspec

from pipeline.routing import Bag, Hop, next_hop
from pipeline.schedule import fair_share

WINDOW = 256
"""Largest window in the model: beyond, filling and draining no longer count."""
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
"""Its multiples, less their whole parts, lie evenly between 0 and 1."""
HOPS = 30_000
"""Microbatches times stages of one forecast, about; half a second."""
_LEAST_WINDOWS, _MOST_WINDOWS = 5, 120
"""Of every replica in one forecast; a third of them, or the first two dozen, warm up."""
_WARM_UP = 24
_FEWEST_UNEVEN = 5


class PipelineShape(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline.

    `passes`: for each stage the time of a forward pass at each of its replicas. `window`: microbatches of an inner
    step. `latency`: mean time of one message. `jitter`: its standard deviation over its mean, log-normal.
    """

    passes: tuple[tuple[float, ...], ...]
    window: int
    latency: float = 0.0
    jitter: float = 0.0
    windows_in_flight: int = 1

    @property
    def capacity(self) -> float:
        """Microbatches in a unit of time when the weakest stage never waits."""
        return min(math.fsum(1.0 / (3.0 * time) for time in replicas) for replicas in self.passes)


def spread_speeds(work: Sequence[float], speeds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return the `passes` of stages with so much work each, whose replicas have these speeds, relative to their mean.

    Replicas are set up to a hundredth apart: where clocks are equal to the last bit, much hangs on who is served first
    in the same instant, and forecast and production differed by up to a fifth. No real machines are so equal.
    """
    mean = math.fsum(speeds) / len(speeds)
    apart = 0.02 if len(speeds) > 1 else 0.0
    return tuple(
        tuple(
            each * mean / speed * (1.0 + apart * ((stage * len(speeds) + number + 1) * _GOLDEN % 1.0 - 0.5))
            for number, speed in enumerate(speeds)
        )
        for stage, each in enumerate(work)
    )


def stand_in(replicas: int, window: int, stages: int, hops: int = HOPS) -> int:
    """Return how many replicas a stage of the model needs to behave like one of `replicas`, within `hops`.

    What counts is whether the window is a multiple of the replicas. Then each sender's bag shares it out with nothing
    left over, and every replica gets whole windows. Else arrivals meet a replica in the middle of its window: some get
    in, the others wait until those have been all the way down and back, and that at every stage (8 stages, windows of
    16, latency 1: 0.48 with 8 replicas, 0.28 with 6). Within either kind the number matters little. One replica stands
    for a stage that would take too long: the forecast is then too good.
    """
    window = min(window, WINDOW)
    most = hops // (_LEAST_WINDOWS * window * stages)
    if window % replicas == 0:
        candidates = [number for number in (4, 3, 2, replicas) if number <= replicas and window % number == 0]
    else:
        candidates = [min(replicas, next(number for number in range(_FEWEST_UNEVEN, WINDOW) if window % number))]
    return next((number for number in candidates if number <= most), 1)


class _Microbatch:
    """One sample on its way: the replicas it has been through, and how many steps each had taken when it was let in."""

    __slots__ = ("path", "steps")

    def __init__(self, source: _Replica) -> None:
        self.path, self.steps = [source], [0]


class _Replica:
    """One device and the gate in front of it."""

    def __init__(self, stage: int, number: int, time: float, windows: int) -> None:
        self.stage, self.name, self.time, self.windows = stage, f"{stage}/{number}", time, windows
        self.free_at = 0.0
        self.rng = Random(f"forecast|routing|{self.name}")
        self.bag = Bag()
        self.hops: tuple[Hop, ...] = ()
        self.resting: dict[str, float] = {}
        self.admitted = self.steps = self.queued = 0
        self.succeeded = self.turns = self.kept = 0
        """In the window under way: microbatches that succeeded, and turns that were given and that are kept."""
        self.stepping = False
        self.deferred: deque[_Microbatch] = deque()
        """Those who wait for a turn."""
        self.queue: OrderedDict[str, deque[_Microbatch]] = OrderedDict()
        self.heard: tuple[set[str], set[str]] = (set(), set())
        self.pace = self.last_success = 0.0

    def refuses(self, sender: str, limit: int) -> float | None:
        """Return for how long a sender is refused by a queue of `limit` places, None if it is not: see the gate."""
        heard, before = self.heard
        if len(heard) < limit:
            heard.add(sender)
        share = fair_share(limit, len(heard | before))
        if self.queued < limit and len(self.queue.get(sender, ())) < share:
            return None
        return (self.pace or 3.0 * self.time) * max(1.0, self.queued / 2)

    def enqueue(self, sender: str, microbatch: _Microbatch) -> None:
        """Let a microbatch wait in its sender's row."""
        self.queue.setdefault(sender, deque()).append(microbatch)
        self.queued += 1

    def next_queued(self) -> _Microbatch:
        """Take the next out of the queue, the senders in turn."""
        sender, waiting = self.queue.popitem(last=False)
        microbatch = waiting.popleft()
        if waiting:
            self.queue[sender] = waiting
        self.queued -= 1
        return microbatch

    def gives_turn(self, steps: int, window: int) -> bool:
        """Let a microbatch that was let in after so many steps begin its backward pass, if it may."""
        if steps < self.steps:
            self.kept -= 1
        elif self.turns + self.kept >= window:
            return False
        self.turns += 1
        return True

    def note_success(self, now: float) -> None:
        """Count a success."""
        self.succeeded += 1
        interval = now - self.last_success
        self.pace = 0.9 * self.pace + 0.1 * interval if self.pace else interval
        self.last_success = now


Action = Callable[[int, _Microbatch], None]


class _Model:
    """The events of one run: at a time, something happens to a microbatch at a stage."""

    def __init__(self, shape: PipelineShape) -> None:
        self.shape = shape
        self.now, self.done, self.passes, self._counter = 0.0, 0, 0, 0
        self._events: list[tuple[float, int, Action, int, _Microbatch]] = []
        self._rng = Random("forecast|latency")
        self._last = len(shape.passes) - 1
        stages = [
            [
                _Replica(stage, number, time, 1 if stage == self._last else shape.windows_in_flight)
                for number, time in enumerate(times)
            ]
            for stage, times in enumerate(shape.passes)
        ]
        self._replicas = {replica.name: replica for replicas in stages for replica in replicas}
        for here, below in pairwise(stages):
            hops = tuple(Hop(replica.name, 3.0 * replica.time) for replica in below)
            for replica in here:
                replica.hops = hops
        for source in stages[0]:
            for _ in range(shape.window * shape.windows_in_flight):
                self._at(0.0, self._arrive, 0, _Microbatch(source))

    def run(self, microbatches: int) -> float:
        """Go on until so many microbatches are done; return the time."""
        while self.done < microbatches:
            self.now, _, action, stage, microbatch = heapq.heappop(self._events)
            action(stage, microbatch)
        return self.now

    def _at(self, time: float, action: Action, stage: int, microbatch: _Microbatch) -> None:
        # The counter keeps events of one moment in order.
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, action, stage, microbatch))

    def _on_line(self) -> float:
        """Return how long a message takes."""
        mean = self.shape.latency
        if not self.shape.jitter:
            return mean
        variance = math.log1p(self.shape.jitter**2)
        return mean * self._rng.lognormvariate(-variance / 2, math.sqrt(variance))

    def _compute(self, replica: _Replica, passes: int) -> float:
        """Queue work of so many forward passes at a device; return when it is done."""
        self.passes += passes
        replica.free_at = max(self.now, replica.free_at) + passes * replica.time
        return replica.free_at

    def _arrive(self, stage: int, microbatch: _Microbatch) -> None:
        replica, shape = microbatch.path[stage], self.shape
        sender = microbatch.path[max(0, stage - 1)].name
        if not replica.stepping and replica.admitted < (replica.steps + replica.windows) * shape.window:
            replica.heard[0].add(sender)
            self._admit(stage, microbatch)
            return
        refused = replica.refuses(sender, (1 + shape.windows_in_flight) * shape.window)
        if refused is None:
            replica.enqueue(sender, microbatch)
            return
        del microbatch.path[stage], microbatch.steps[stage]
        told_at = self.now + self._on_line()
        self._replicas[sender].resting[replica.name] = told_at + refused
        self._at(told_at, self._ask, stage - 1, microbatch)

    def _admit(self, stage: int, microbatch: _Microbatch) -> None:
        replica = microbatch.path[stage]
        microbatch.steps[stage] = replica.steps
        replica.admitted += 1
        if stage == self._last:
            replica.gives_turn(replica.steps, self.shape.window)
            self._at(self._compute(replica, 3), self._finish, stage, microbatch)
        else:
            self._at(self._compute(replica, 1), self._ask, stage, microbatch)

    def _ask(self, stage: int, microbatch: _Microbatch) -> None:
        """Send a microbatch to a replica of the next stage; sleep if all refused of late."""
        replica = microbatch.path[stage]
        resting = [name for name, until in replica.resting.items() if until > self.now] if replica.resting else ()
        peer, replica.bag = next_hop(replica.bag, replica.hops, resting, replica.rng)
        if peer is None:
            pause = min(replica.resting.values()) - self.now
            self._at(self.now + pause * replica.rng.uniform(1.0, 1.25), self._ask, stage, microbatch)
            return
        microbatch.path.append(self._replicas[peer])
        microbatch.steps.append(0)
        self._at(self.now + self._on_line(), self._arrive, stage + 1, microbatch)

    def _answer(self, stage: int, microbatch: _Microbatch) -> None:
        replica = microbatch.path[stage]
        if replica.gives_turn(microbatch.steps[stage], self.shape.window):
            self._at(self._compute(replica, 2), self._finish, stage, microbatch)
        else:
            replica.deferred.append(microbatch)

    def _finish(self, stage: int, microbatch: _Microbatch) -> None:
        replica, shape = microbatch.path[stage], self.shape
        replica.note_success(self.now)
        if stage:
            self._at(self.now + self._on_line(), self._answer, stage - 1, microbatch)
        else:
            self.done += 1
            self._at(self.now, self._arrive, 0, _Microbatch(replica))
        if replica.succeeded == shape.window:
            # The step takes no time, but its turn among the passes that the device has been given.
            replica.stepping = replica.free_at > self.now
            if replica.stepping:
                self._at(replica.free_at, self._step, stage, microbatch)
            else:
                self._step(stage, microbatch)

    def _step(self, stage: int, microbatch: _Microbatch) -> None:
        """Take an inner step: the next window opens."""
        replica = microbatch.path[stage]
        replica.stepping = False
        replica.steps += 1
        replica.succeeded = replica.turns = 0
        replica.kept = replica.admitted - replica.steps * self.shape.window
        replica.heard = (set(), replica.heard[0])
        deferred, replica.deferred = replica.deferred, deque()
        for waiting in deferred:
            self._answer(stage, waiting)
        room = (replica.steps + replica.windows) * self.shape.window
        while replica.queued and replica.admitted < room:
            self._admit(stage, replica.next_queued())


def efficiency(shape: PipelineShape, hops: int = HOPS) -> float:
    """Return the work done over what the weakest stage could do if it never waited, 0 to 1, once the pipeline is full.

    Deterministic. `hops`: microbatches times stages to spend on it, about; fewer are faster and less sure. Raises
    ValueError for a shape without stages, work or replicas.
    """
    times = [time for replicas in shape.passes for time in replicas]
    counts = [len(replicas) for replicas in shape.passes]
    if not counts or min(counts) < 1 or not min(times) > 0 or shape.window < 1 or shape.windows_in_flight not in (1, 2):
        raise ValueError(f"{shape} is no pipeline")
    if not shape.latency >= 0 or not shape.jitter >= 0:
        raise ValueError(f"{shape} is no pipeline: a message cannot arrive before it was sent")
    shape = msgspec.structs.replace(shape, window=min(shape.window, WINDOW))
    window = shape.window * max(counts)
    windows = max(_LEAST_WINDOWS, min(_MOST_WINDOWS, hops // (window * len(counts))))
    if max(counts) == shape.windows_in_flight == 1 and not shape.jitter:
        # All runs dry before the next window begins, and it begins as the first did.
        windows = 2
    model = _Model(shape)
    begun = model.run(min(_WARM_UP, -(-windows // 3)) * window)
    # Passes at all stages, not microbatches that are done: those come in bursts, these do not.
    before = model.passes
    elapsed = model.run(windows * window) - begun
    return min(1.0, (model.passes - before) / (3 * len(counts)) / elapsed / shape.capacity)
