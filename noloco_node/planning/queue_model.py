"""How busy the slowest stage of a run will be, and which other windows would make it busier.

The forecast follows the queues of a pipeline of equal replicas in virtual time, without tensors or a network. It uses
the routing of production (`pipeline.routing`) and the rule of its admission window (`pipeline.admission_window`).
Refusals, inner steps, rounds, bandwidth and faults are left out. `tests/planning/test_windows.py` holds the model
against production nodes. The network is not known here, so `check` shows a forecast for three lengths of a message.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import msgspec
from msgspec import structs

from noloco_node.run.config import PipelineConfig
from pipeline.routing import Bag, Hop, next_hop

_LONGEST = 256
"""Window in the model, and the longest that is suggested: beyond, filling and draining no longer count."""
_FEWEST_UNEVEN = 5
_LEAST_WINDOWS, _MOST_WINDOWS = 5, 120
"""Of every replica in one forecast; the first third of them, or the first two dozen, warm up."""
_WARM_UP = 24
_APART = 0.02
"""Between the fastest and the slowest replica. Of devices equal to the last bit the order of events decides; no real
ones are."""
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
"""Its multiples, less their whole parts, lie evenly between 0 and 1."""


class _Replica:
    """One device and the admission window before it."""

    def __init__(self, stage: int, number: int, time: float, windows: int) -> None:
        self.name, self.time, self.windows = f"{stage}/{number}", time, windows
        self.free_at = 0.0
        self.rng, self.bag = Random(f"forecast|{self.name}"), Bag()
        self.admitted = self.steps = self.succeeded = self.turns = self.kept = 0
        """Since the start; and of the window under way, also turns that were given and that are kept."""
        self.stepping = False
        self.queue, self.deferred = deque["_Microbatch"](), deque["_Microbatch"]()

    def gives_turn(self, steps: int, window: int) -> bool:
        """Let a microbatch that was let in after so many steps begin its backward pass, if it may."""
        if steps < self.steps:
            self.kept -= 1
        elif self.turns + self.kept >= window:
            return False
        self.turns += 1
        return True


class _Microbatch:
    """The replicas it has been through, and how many steps each had taken when it was let in."""

    __slots__ = ("path", "steps")

    def __init__(self, source: _Replica) -> None:
        self.path, self.steps = [source], [0]


class _Model:
    """The events of one run: at a time, something happens to a microbatch at a stage."""

    def __init__(
        self, work: Sequence[float], replicas: int, window: int, windows_in_flight: int, latency: float
    ) -> None:
        self.window, self.latency, self.last = window, latency, len(work) - 1
        self.now, self.done, self.passes, self._counter = 0.0, 0, 0, 0
        self._events: list[tuple[float, int, Callable[[int, _Microbatch], None], int, _Microbatch]] = []
        apart = _APART if replicas > 1 else 0.0
        self.stages = [
            {
                each.name: each
                for each in (
                    _Replica(
                        stage,
                        number,
                        time * (1.0 + apart * ((stage * replicas + number + 1) * _GOLDEN % 1.0 - 0.5)),
                        1 if stage == self.last else windows_in_flight,
                    )
                    for number in range(replicas)
                )
            }
            for stage, time in enumerate(work)
        ]
        self._hops = [tuple(Hop(each.name, 3.0 * each.time) for each in stage.values()) for stage in self.stages]
        for source in self.stages[0].values():
            for _ in range(window * windows_in_flight):
                self._at(0.0, self._arrive, 0, _Microbatch(source))

    def run(self, microbatches: int) -> float:
        while self.done < microbatches:
            self.now, _, action, stage, microbatch = heapq.heappop(self._events)
            action(stage, microbatch)
        return self.now

    def _at(self, time: float, action: Callable[[int, _Microbatch], None], stage: int, microbatch: _Microbatch) -> None:
        # The counter keeps events of one moment in order.
        self._counter += 1
        heapq.heappush(self._events, (time, self._counter, action, stage, microbatch))

    def _compute(self, replica: _Replica, passes: int) -> float:
        self.passes += passes
        replica.free_at = max(self.now, replica.free_at) + passes * replica.time
        return replica.free_at

    def _arrive(self, stage: int, microbatch: _Microbatch) -> None:
        replica = microbatch.path[stage]
        replica.queue.append(microbatch)
        self._admit(stage, replica)

    def _admit(self, stage: int, replica: _Replica) -> None:
        room = (replica.steps + replica.windows) * self.window
        while replica.queue and replica.admitted < room and not replica.stepping:
            microbatch = replica.queue.popleft()
            microbatch.steps[stage] = replica.steps
            replica.admitted += 1
            if stage == self.last:
                replica.gives_turn(replica.steps, self.window)
                self._at(self._compute(replica, 3), self._finish, stage, microbatch)
            else:
                self._at(self._compute(replica, 1), self._send, stage, microbatch)

    def _send(self, stage: int, microbatch: _Microbatch) -> None:
        replica = microbatch.path[stage]
        peer, replica.bag = next_hop(replica.bag, self._hops[stage + 1], (), replica.rng)
        assert peer is not None
        microbatch.path.append(self.stages[stage + 1][peer])
        microbatch.steps.append(0)
        self._at(self.now + self.latency, self._arrive, stage + 1, microbatch)

    def _answer(self, stage: int, microbatch: _Microbatch) -> None:
        replica = microbatch.path[stage]
        if replica.gives_turn(microbatch.steps[stage], self.window):
            self._at(self._compute(replica, 2), self._finish, stage, microbatch)
        else:
            replica.deferred.append(microbatch)

    def _finish(self, stage: int, microbatch: _Microbatch) -> None:
        replica = microbatch.path[stage]
        replica.succeeded += 1
        if stage:
            self._at(self.now + self.latency, self._answer, stage - 1, microbatch)
        else:
            self.done += 1
            self._at(self.now, self._arrive, 0, _Microbatch(replica))
        if replica.succeeded == self.window:
            # The step takes no time, but its turn among the passes that the device has been given.
            replica.stepping = True
            self._at(replica.free_at, self._step, stage, microbatch)

    def _step(self, stage: int, microbatch: _Microbatch) -> None:
        replica = microbatch.path[stage]
        replica.stepping = False
        replica.steps += 1
        replica.succeeded = replica.turns = 0
        replica.kept = replica.admitted - replica.steps * self.window
        deferred, replica.deferred = replica.deferred, deque()
        for waiting in deferred:
            self._answer(stage, waiting)
        self._admit(stage, replica)


def efficiency(
    work: Sequence[float], replicas: int, window: int, windows_in_flight: int, latency: float, hops: int
) -> float:
    """Return the share of its time for which the slowest stage works, 0 to 1, once the pipeline is full; deterministic.

    `work`: time of a forward pass at each stage; `latency`: of a message. `hops`: microbatches times stages to spend
    on it, about.
    """
    window = min(window, _LONGEST)
    replicas = _stand_in(replicas, window, hops // (_LEAST_WINDOWS * window * len(work)))
    each = window * replicas
    windows = max(_LEAST_WINDOWS, min(_MOST_WINDOWS, hops // (each * len(work))))
    model = _Model(work, replicas, window, windows_in_flight, latency)
    begun = model.run(min(_WARM_UP, -(-windows // 3)) * each)
    # Passes at all stages, not microbatches that are done: those come in bursts, these do not.
    before = model.passes
    elapsed = model.run(windows * each) - begun
    capacity = min(math.fsum(1.0 / each.time for each in stage.values()) for stage in model.stages)
    return min(1.0, (model.passes - before) / len(work) / elapsed / capacity)


def _stand_in(replicas: int, window: int, most: int) -> int:
    """Return how many replicas behave like so many, at most about `most`.

    Where the window is a multiple of the replicas, bags share it out with nothing left over. Else arrivals meet a
    replica in the middle of its window, and at every stage some wait until others have been all the way down and back.
    Within either kind the number matters little. One stands for a stage that would take too long.
    """
    if window % replicas == 0:
        candidates = [number for number in (4, 3, 2, replicas) if number <= replicas and window % number == 0]
    else:
        candidates = [min(replicas, next(number for number in range(_FEWEST_UNEVEN, _LONGEST) if window % number))]
    return next((number for number in candidates if number <= most), 1)


MESSAGES = (0.0, 1.0, 3.0)
"""How long a message may take, in forward passes of the slowest stage of the run as it is."""
BUSY = 0.85
"""Efficiency with which nobody needs advice."""
_HOPS = 8_000
"""Of one forecast: a tenth of a second."""


class WindowSuggestion(msgspec.Struct, frozen=True, kw_only=True):
    """Another window and, where the batch is to stay the same, another microbatch."""

    microbatches_per_step: int
    microbatch_size: int
    batch: float
    """Sequences of an inner step, in batches of the run as it is."""
    efficiency: tuple[float, ...]


def predict_efficiency(pipeline: PipelineConfig, work: tuple[float, ...]) -> tuple[float, ...]:
    """Return the share of its time for which the slowest stage works, for each of `MESSAGES`.

    `work`: of a microbatch at each stage, in any unit.
    """
    return _predict(pipeline, work, 1)


def suggest_windows(pipeline: PipelineConfig, work: tuple[float, ...]) -> tuple[WindowSuggestion, ...]:
    """Return what other windows would give: a longer one, and one twice as long as that."""
    window, replicas = pipeline.microbatches_per_step, pipeline.replicas
    least = 2 * window if window % replicas == 0 else window
    first = -(-least // replicas) * replicas
    if first > 4 * window:
        first = 2 * window
    found = []
    for longer in (first, 2 * first):
        if longer > _LONGEST:
            break
        factor, rest = divmod(longer, window)
        shrinks = rest == 0 and pipeline.microbatch_size % factor == 0
        found.append(
            WindowSuggestion(
                microbatches_per_step=longer,
                microbatch_size=pipeline.microbatch_size // (factor if shrinks else 1),
                batch=1.0 if shrinks else longer / window,
                efficiency=_predict(
                    structs.replace(pipeline, microbatches_per_step=longer), work, factor if shrinks else 1
                ),
            )
        )
    return tuple(found)


def _predict(pipeline: PipelineConfig, work: tuple[float, ...], message: int) -> tuple[float, ...]:
    """`message`: how many times as long as `MESSAGES` one takes, in forward passes of the microbatch as it is here."""
    passes = [each / max(work) for each in work]
    window, windows = pipeline.microbatches_per_step, pipeline.windows_in_flight
    return tuple(efficiency(passes, pipeline.replicas, window, windows, length * message, _HOPS) for length in MESSAGES)


def in_words(now: tuple[float, ...], others: tuple[WindowSuggestion, ...], replicas: int) -> list[str]:
    nothing, one, three = now
    lines = [
        f"The slowest stage works about {nothing:.0%} of the time if messages take none, {one:.0%} if a message "
        f"takes as long as its forward pass, and {three:.0%} if three times as long.",
    ]
    for other in others:
        nothing, one, three = other.efficiency
        fields = f"microbatches_per_step = {other.microbatches_per_step}"
        if other.batch == 1.0:
            fields += f", microbatch_size = {other.microbatch_size}"
            batch = "the same batch"
        else:
            batch = f"a batch {other.batch:.3g} times as large"
        even = replicas > 1 and other.microbatches_per_step % replicas == 0
        why = f"{batch}, a multiple of the replicas" if even else batch
        lines.append(f"  {nothing:4.0%}, {one:4.0%}, {three:4.0%} with {fields} ({why})")
    return lines
