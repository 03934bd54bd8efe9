"""How much of its time the slowest stage of a pipeline will work: a small model of windows, in virtual time.

Each stage has a few replicas with one device each, first come, first served. A microbatch takes a forward pass at
every stage on its way down (at the last one forward and backward at once) and a backward pass, twice the work, on its
way up; its next hop is drawn without replacement from a bag. A replica admits exactly a window of microbatches
between two inner steps, as `pipeline.gate` does; what comes too early queues. The first stage never lacks
microbatches.

Between two windows every stage runs dry and fills again: that is what the model measures. It leaves out all else
(serialisation, gossip, unequal machines, limits of queues), so it is an upper bound, and good for comparing plans.
"""

from __future__ import annotations

import heapq
from collections import deque
from enum import Enum, auto
from random import Random
from typing import NamedTuple

REPLICAS = 4
"""Replicas of a stage in the model, at most: more change the result little and its cost much."""
WINDOW = 256
"""Largest window in the model: beyond, filling and draining no longer count."""
_EVENTS = 300_000


class Shape(NamedTuple):
    """A pipeline. `work`: device time of a forward pass at each stage; `latency`: of a hop, in the same unit."""

    work: tuple[float, ...]
    window: int
    replicas: int
    latency: float


class _Event(Enum):
    """What happens to a microbatch at a stage: it arrives, its gradient comes back, its backward pass is done."""

    ARRIVED = auto()
    ANSWERED = auto()
    DONE = auto()


class _Replica:
    def __init__(self, rng: Random) -> None:
        self.admitted = self.succeeded = 0
        self.free_at = 0.0
        self.queue: deque[int] = deque()
        self.bag: list[int] = []
        self.rng = rng

    def route(self, replicas: int) -> int:
        if not self.bag:
            self.bag = list(range(replicas))
            self.rng.shuffle(self.bag)
        return self.bag.pop()


class _Model:
    """The events of one run. A microbatch is a number; `path` holds the replicas that it has been through."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.now, self.done, self._counter = 0.0, 0, 0
        self._events: list[tuple[float, int, _Event, int, int]] = []
        self._path: dict[int, list[int]] = {}
        self._stages = [
            [_Replica(Random(f"forecast|{stage}|{number}")) for number in range(shape.replicas)]
            for stage in range(len(shape.work))
        ]
        for number in range(shape.replicas):
            self._refill(number)

    def run(self, microbatches: int) -> float:
        """Go on until so many microbatches are done; return the time."""
        while self.done < microbatches:
            self.now, _, event, stage, microbatch = heapq.heappop(self._events)
            match event:
                case _Event.ARRIVED:
                    self._arrived(stage, microbatch)
                case _Event.ANSWERED:
                    done_at = self._compute(stage, microbatch, 2)
                    self._at(done_at, _Event.DONE, stage, microbatch)
                case _Event.DONE:
                    self._done(stage, microbatch)
        return self.now

    def _at(self, time: float, event: _Event, stage: int, microbatch: int) -> None:
        # The counter keeps events of one moment in order.
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, event, stage, microbatch))

    def _replica(self, stage: int, microbatch: int) -> _Replica:
        return self._stages[stage][self._path[microbatch][stage]]

    def _compute(self, stage: int, microbatch: int, passes: int) -> float:
        """Queue work of so many forward passes at a device; return when it is done."""
        replica = self._replica(stage, microbatch)
        replica.free_at = max(self.now, replica.free_at) + passes * self.shape.work[stage]
        return replica.free_at

    def _refill(self, number: int) -> None:
        """Hand a window of fresh microbatches to a replica of the first stage."""
        for _ in range(self.shape.window):
            microbatch = len(self._path)
            self._path[microbatch] = [number]
            self._at(self.now, _Event.ARRIVED, 0, microbatch)

    def _arrived(self, stage: int, microbatch: int) -> None:
        replica = self._replica(stage, microbatch)
        if replica.admitted == self.shape.window:
            replica.queue.append(microbatch)
        else:
            self._admit(stage, microbatch)

    def _admit(self, stage: int, microbatch: int) -> None:
        replica = self._replica(stage, microbatch)
        replica.admitted += 1
        if stage == len(self._stages) - 1:
            self._at(self._compute(stage, microbatch, 3), _Event.DONE, stage, microbatch)
        else:
            forward_at = self._compute(stage, microbatch, 1)
            self._path[microbatch].append(replica.route(self.shape.replicas))
            self._at(forward_at + self.shape.latency, _Event.ARRIVED, stage + 1, microbatch)

    def _done(self, stage: int, microbatch: int) -> None:
        if stage == 0:
            self.done += 1
        else:
            self._at(self.now + self.shape.latency, _Event.ANSWERED, stage - 1, microbatch)
        replica = self._replica(stage, microbatch)
        replica.succeeded += 1
        if replica.succeeded == self.shape.window:
            self._step(stage, microbatch)

    def _step(self, stage: int, microbatch: int) -> None:
        """Take an inner step: the next window opens."""
        replica = self._replica(stage, microbatch)
        replica.admitted = replica.succeeded = 0
        if stage == 0:
            self._refill(self._path[microbatch][0])
        while replica.queue and replica.admitted < self.shape.window:
            self._admit(stage, replica.queue.popleft())


def efficiency(shape: Shape) -> float:
    """Return the share of its time for which the slowest stage works, 0 to 1, once the pipeline has filled.

    Deterministic. Raises ValueError for a shape without stages, work or replicas.
    """
    if not shape.work or min(shape.work) <= 0 or shape.window < 1 or shape.replicas < 1 or shape.latency < 0:
        raise ValueError(f"{shape} is no pipeline")
    replicas, window = min(shape.replicas, REPLICAS), min(shape.window, WINDOW)
    if 36 * window * replicas * len(shape.work) > _EVENTS:
        replicas = 1
    windows = max(3, min(12, _EVENTS // (3 * window * replicas * len(shape.work))))
    model = _Model(shape._replace(replicas=replicas, window=window))
    filled = windows // 3 * window * replicas
    start = model.run(filled)
    counted = windows * window * replicas - filled
    elapsed = model.run(windows * window * replicas) - start
    return min(1.0, 3 * max(shape.work) * counted / (replicas * elapsed))
