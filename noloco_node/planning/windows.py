"""What windows cost: how long a microbatch takes of a replica in a pipeline, and which other windows would take less.

A closed form (docs/design/planning.md); `tests/planning/test_windows.py` holds it against production nodes in virtual
time. Refusals, inner steps and faults are left out. `check` does not know the network, so it shows a forecast for three
lengths of a message.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import structs

from noloco_node.run.config import PipelineConfig
from pipeline.admission_window import MOST_IN_FLIGHT

BACKWARD = 2.0
"""What a backward pass takes, in forward passes of the same stage: it has the gradients of inputs and of weights."""
FROZEN_BACKWARD = 1.4
"""The same where the weights are frozen. It would be 1 if all of a pass were products with weights; attention, norms
and the adapters have both gradients. Measured by `python -m benchmarks.memory.frozen_forms`."""


class _Shape(NamedTuple):
    """How pace and wait add up, fitted to pipelines of 2 to 16 stages, 1 to 8 replicas and windows of 4 to 64.

    `share`: of the wait that counts. `sharp`: of the norm in which both add up where there are two stages; in a deeper
    pipeline each waits for the other more often. `uneven`: by which power of half of the stages the wait grows where a
    window is no multiple of the replicas. Bags share it out with a rest then, and arrivals meet a replica in the middle
    of its window: those that do not get in wait until the others have been all the way down and back.
    """

    share: float
    sharp: float
    uneven: float


_SHAPES = {1: _Shape(1.06, 1.5, 0.72), 2: _Shape(0.59, 3.4, 0.15)}  # by windows in flight
_DEEPER = -0.33  # the power of half of the stages with which that norm gets less sharp
_MANY = 4.4  # from about so many microbatches of a window a replica, a rest hardly counts


def seconds_each(pipeline: PipelineConfig, pace_s: float, way_s: float) -> float:
    """Return what a microbatch takes of a replica that needs `pace_s` for one, where its windows alone hold it up.

    `way_s`: down the pipeline and back.
    """
    window, replicas, windows = pipeline.microbatches_per_step, pipeline.replicas, pipeline.windows_in_flight
    pace_s = max(pace_s, way_s / MOST_IN_FLIGHT)
    wait_s = (max(0.0, way_s - pace_s) if windows == 1 else way_s) / window
    if replicas == windows == 1:
        return pace_s + wait_s
    shape, depth = _SHAPES[windows], max(1.0, pipeline.stages / 2)
    if window % replicas:
        wait_s *= depth ** (shape.uneven / (1.0 + (window / (_MANY * replicas)) ** 2))
    sharp = max(1.0, shape.sharp * depth**_DEEPER)
    return float((pace_s**sharp + (shape.share * wait_s) ** sharp) ** (1.0 / sharp))


_LONGEST = 256  # the longest window that is suggested: beyond, filling and draining no longer count
MESSAGES = (0.0, 1.0, 3.0)  # how long a message may take, in forward passes of the slowest stage of the run as it is
BUSY = 0.85  # efficiency with which nobody needs advice


class WindowSuggestion(msgspec.Struct, frozen=True, kw_only=True):
    """Another window and, where the batch is to stay the same, another microbatch."""

    microbatches_per_step: int
    microbatch_size: int
    batch: float  # sequences of an inner step, in batches of the run as it is
    efficiency: tuple[float, ...]


def predict_efficiency(
    pipeline: PipelineConfig, work: tuple[float, ...], passes: float = 1.0 + BACKWARD, parts: int = 1
) -> tuple[float, ...]:
    """Return the share of its time for which the slowest stage works, for each of `MESSAGES`.

    `work`: of a microbatch at each stage, in any unit. `passes`: that it costs, forward and backward, in forward ones.
    `parts`: of which a microbatch is one, where `MESSAGES` are in forward passes of all of them together.
    """
    computing = passes * sum(work) / max(work)
    ways = (computing + 2 * (len(work) - 1) * length * parts for length in MESSAGES)
    return tuple(passes / seconds_each(pipeline, passes, way) for way in ways)


def suggest_windows(
    pipeline: PipelineConfig, work: tuple[float, ...], passes: float = 1.0 + BACKWARD
) -> tuple[WindowSuggestion, ...]:
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
        parts = factor if rest == 0 and pipeline.microbatch_size % factor == 0 else 1
        found.append(
            WindowSuggestion(
                microbatches_per_step=longer,
                microbatch_size=pipeline.microbatch_size // parts,
                batch=longer / (window * parts),
                efficiency=predict_efficiency(
                    structs.replace(pipeline, microbatches_per_step=longer), work, passes, parts
                ),
            )
        )
    return tuple(found)


def in_words(now: tuple[float, ...], others: tuple[WindowSuggestion, ...], replicas: int) -> list[str]:
    nothing, one, three = now
    lines = [
        f"The slowest stage works about {nothing:.0%} of the time if messages take none, {one:.0%} if a message "
        f"takes as long as its forward pass, and {three:.0%} if three times as long."
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
