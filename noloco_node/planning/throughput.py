"""Tokens a second that a run can reach on given machines, from its work, its bytes and its windows.

A closed form (docs/design/planning.md), which `tests/planning/test_throughput.py` holds against production nodes in
virtual time. A stage that asks for more has more replicas: `settled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import NamedTuple

import msgspec

from noloco_node.machine.memory import free_of_gpu, usable_bytes
from noloco_node.planning.bandwidth import hop_bytes, round_bytes
from noloco_node.planning.model_layout import ModelLayout
from noloco_node.planning.plan import Memory, graphs_that_fit, memories
from noloco_node.planning.windows import seconds_each
from noloco_node.run.config import RunConfig
from noloco_node.units import format_bytes
from pipeline.admission_window import MOST_IN_FLIGHT
from pipeline.inner_step import orthogonal_operations
from pipeline.messages import ACTIVATION_CODECS


class MicrobatchSeconds(NamedTuple):
    """Seconds that a microbatch takes of a replica: of its device, its uplink and its downlink without rounds."""

    device_s: float
    up_s: float
    down_s: float


def way_seconds(loads: Sequence[MicrobatchSeconds], latency_s: float) -> float:
    """Return what a microbatch takes down the pipeline and back where nobody else is on the way."""
    computing_s = sum(load.device_s for load in loads)
    # What leaves one peer reaches another: the slower of the two lines counts.
    moving_s = max(sum(load.up_s for load in loads), sum(load.down_s for load in loads))
    return computing_s + moving_s + 2 * (len(loads) - 1) * latency_s


CODING_FLOPS = 10_000.0
"""Of a value coded or decoded, where its code has fewer than 16 bits. On a CPU it takes some 7 ns, worth 300 in a
matrix product; on a GPU some 160 bytes of memory move, an estimate, whose time is worth far more."""

BUS_BYTES_PER_S = 8e9
"""Each way at once between main memory and a GPU: an estimate, two thirds of what PCIe 3.0 with 16 lanes carries."""
WAITING = 0.32
"""Of a line's time between the first and the last stage, for each such stage, by the root of how many microbatches are
in flight: a transfer whose other end is busy waits on a line that could carry more. Both directions of such a stage's
line are full, so one waits for the next; with more in flight another is there more often. Fitted to simulations
(`tests/planning/test_throughput.py`)."""


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that a run is meant for, all alike. `flops`: of training, a second, as reached."""

    count: int
    gpu_bytes: float
    ram_bytes: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    flops: float
    latency_s: float

    def in_words(self) -> str:
        return (
            f"{self.count} machine{'s' if self.count > 1 else ''} with {format_bytes(self.gpu_bytes)} on the GPU and "
            f"{format_bytes(self.ram_bytes)} beside it"
        )


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What to expect. `busy`: of the slowest stage's devices. `bound`: what sets the pace, in words."""

    tokens_per_s: float
    busy: float
    possible: float  # tokens a second of all these devices without any network, nothing computed again
    bound: str
    steps_per_round: int  # inner steps between two rounds that take the share of the line that they may have
    computed_again: float  # share of forward passes, of the stage with the most
    replicas: tuple[int, ...]  # of each stage, where peers choose theirs and know their lines


def coding_seconds(run: RunConfig, width: int, flops: float) -> float:
    """Return what a device takes to code or decode a microbatch at one of its two neighbours."""
    plain = ACTIVATION_CODECS[run.pipeline.codec].down.plain
    return 0.0 if plain else run.pipeline.microbatch_tokens * width * CODING_FLOPS / flops


def orthogonal_seconds(run: RunConfig, layout: ModelLayout, stage: int, flops: float) -> float:
    """Return what a device takes to make an inner step orthogonal, where the run has that."""
    return sum(map(orthogonal_operations, layout.sizes[stage].matrices)) / flops if run.inner.orthogonal else 0.0


def stage_loads(
    run: RunConfig, layout: ModelLayout, machines: Machines, needs: Sequence[Memory]
) -> tuple[MicrobatchSeconds, ...]:
    """Return what a microbatch asks of a replica of each stage, whose `needs` are `gpu_memories`'."""
    pipeline, tokens = run.pipeline, run.pipeline.microbatch_tokens
    hop, coding_s = hop_bytes(pipeline, layout.width), coding_seconds(run, layout.width, machines.flops)
    found = []
    for number, (work, memory) in enumerate(zip(layout.work, needs, strict=True)):
        sends, takes = not pipeline.is_last(number), number > 0
        passes = 1.0 + layout.backward + _computed_again(pipeline.in_flight(number), memory, machines)
        step_s = memory.moments_beside / BUS_BYTES_PER_S + orthogonal_seconds(run, layout, number, machines.flops)
        found.append(
            MicrobatchSeconds(
                device_s=passes * tokens * work / machines.flops
                + 2 * (sends + takes) * coding_s
                + step_s / pipeline.microbatches_per_step,
                up_s=(sends * hop.down + takes * hop.back) / machines.up_bytes_per_s,
                down_s=(takes * hop.down + sends * hop.back) / machines.down_bytes_per_s,
            )
        )
    return tuple(found)


def gpu_memories(run: RunConfig, layout: ModelLayout, machines: Machines) -> tuple[Memory, ...]:
    """Return what a replica of each stage needs of such a machine."""
    needs = memories(run, layout, half=run.precision == "auto")
    return tuple(memory.placed(*_usable(machines)) for memory in needs)


def _usable(machines: Machines) -> tuple[float, float]:
    """Return the bytes of a machine's GPU, and of its main memory, that may be used."""
    return usable_bytes(free_of_gpu(machines.gpu_bytes)), usable_bytes(machines.ram_bytes)


class Missing(NamedTuple):
    """Bytes by which the largest stage goes beyond what may be used of a machine's GPU, and of its main memory."""

    gpu: float
    ram: float

    def in_words(self) -> str:
        parts = ((self.gpu, "on the GPU"), (self.ram, "beside it"))
        return " and ".join(f"{format_bytes(size)} {where}" for size, where in parts if size)


def missing(needs: Sequence[Memory], machines: Machines) -> Missing:
    """Return what a machine lacks for the stage that needs most; 0 where all stages fit."""
    gpu, ram = _usable(machines)
    computing, beside = max(memory.computing for memory in needs), max(memory.beside for memory in needs)
    return Missing(max(0.0, computing - gpu), max(0.0, beside - ram))


def fits(needs: Sequence[Memory], machines: Machines) -> bool:
    return missing(needs, machines) == Missing(0.0, 0.0)


def taking_part(run: RunConfig, machines: Machines) -> int:
    """Return the peers that a forecast counts: those that a run plans, and what is left where stages divide machines.

    More machines than that would make another batch than the run asks for.
    """
    rest = machines.count - run.pipeline.peers
    return run.pipeline.peers + (rest if 0 < rest < run.pipeline.stages else 0)


def forecast(run: RunConfig, layout: ModelLayout, machines: Machines, needs: Sequence[Memory]) -> Throughput:
    """Return what to expect of a run on these machines, of `taking_part` of them."""
    pipeline, loads = run.pipeline, stage_loads(run, layout, machines, needs)
    slowest = _slowest(loads, run.outer.line_share if pipeline.replicas > 1 else 0.0, pipeline.most_in_flight)
    replicas = settled([seconds for seconds, _ in slowest], taking_part(run, machines))
    # What a microbatch asks of a replica, where all stages had as many.
    parts = [pipeline.replicas / count for count in replicas]
    pace_s, what, number = max(
        (seconds * part, what, number)
        for number, ((seconds, what), part) in enumerate(zip(slowest, parts, strict=True))
    )
    bound = f"{what} of stage {number}"
    way_s = way_seconds(loads, machines.latency_s)
    each_s = seconds_each(pipeline, pace_s, way_s)
    if pace_s < 0.7 * each_s:
        bound = "the windows" if way_s < MOST_IN_FLIGHT * pace_s else "the microbatches in flight"
    speed = pipeline.replicas * pipeline.microbatch_tokens / each_s
    return Throughput(
        tokens_per_s=speed,
        busy=max(load.device_s * part for load, part in zip(loads, parts, strict=True)) / each_s,
        possible=machines.count * machines.flops / ((1.0 + layout.backward) * sum(layout.work)),
        bound=bound,
        computed_again=max(
            _computed_again(pipeline.in_flight(number), memory, machines) for number, memory in enumerate(needs)
        ),
        steps_per_round=_steps_per_round(run, layout, machines, each_s),
        replicas=replicas,
    )


def settled(seconds: Sequence[float], count: int) -> tuple[int, ...]:
    """Return how many of `count` equal peers serve each stage, given the seconds that a microbatch takes of one there.

    One after the other takes the stage that limits the swarm, as newcomers do (`pipeline.placement`).
    """
    # A search asks this for thousands of peers, thousands of times: where all but the last few go is known at once.
    early = (count - len(seconds)) / sum(seconds)
    found = [max(0, ceil(early * each) - 1) for each in seconds]
    for _ in range(count - sum(found)):
        found[min(range(len(seconds)), key=lambda stage: found[stage] / seconds[stage])] += 1
    return tuple(found)


def _slowest(loads: Sequence[MicrobatchSeconds], line_share: float, in_flight: int) -> list[tuple[float, str]]:
    """Return for each stage what a microbatch takes of a replica, and of what.

    A round weighs alike on all stages, and where a line is used most it has its share.
    """
    between = 1.0 + WAITING * max(0, len(loads) - 2) / sqrt(in_flight)
    waits = [between if 0 < number < len(loads) - 1 else 1.0 for number in range(len(loads))]
    lines = [(load.up_s * wait, load.down_s * wait) for load, wait in zip(loads, waits, strict=True)]
    rounds_s = line_share / (1.0 - line_share) * max(map(max, lines))
    return [
        max((load.device_s, "the devices"), (up_s + rounds_s, "the uplinks"), (down_s + rounds_s, "the downlinks"))
        for load, (up_s, down_s) in zip(loads, lines, strict=True)
    ]


def _computed_again(most: int, memory: Memory, machines: Machines) -> float:
    free = int(free_of_gpu(machines.gpu_bytes))
    return graphs_that_fit(free, memory.computing, memory.graphs, most).computed_again(most)


def share_of_rounds(run: RunConfig) -> float:
    """Return the share of a line that rounds may have: all of it where no microbatch waits for the line."""
    return run.outer.line_share if run.pipeline.stages > 1 else 1.0


def _steps_per_round(run: RunConfig, layout: ModelLayout, machines: Machines, each_s: float) -> int:
    if run.pipeline.replicas == 1:
        return 1
    largest = max(round_bytes(run.outer, tuple(shapes.values())) for shapes in layout.shapes)
    rate = share_of_rounds(run) * min(machines.up_bytes_per_s, machines.down_bytes_per_s)
    return max(1, ceil(largest / rate / (run.pipeline.microbatches_per_step * each_s)))
