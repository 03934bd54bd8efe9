"""A plan from machines: stages, window, codec and rounds of a run, chosen for the most tokens a second that fit.

A small grid, all of it tried. What fits in memory is `plan`'s to say, what it reaches `throughput`'s. Of plans that
reach the same the mildest is taken: fewer stages, exact windows, shorter ones, more bits. The budget of tokens stays
what it was, and so does the batch, unless other windows are what keeps devices at work.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from msgspec import structs

from noloco_node.errors import UserError, config_error
from noloco_node.planning.model_layout import ModelLayout, model_layout
from noloco_node.planning.plan import Memory
from noloco_node.planning.throughput import Machines, Throughput, fits, forecast, gpu_memories
from noloco_node.run.config import PipelineConfig, RunConfig
from noloco_node.units import format_bytes
from pipeline.activations.formats import ACTIVATION_CODECS, check_width

MOST_TOKENS = 2**20
"""Of an inner step of all peers together: the paper trains on half of that to twice."""
_LEAST_BYTES = 16
"""A parameter takes on a device: float32 weights, gradients and two moments."""
_STAGE_COUNTS = 2
"""Numbers of stages that are tried of those that fit: with more, only bytes and ways grow."""
_SUBSPACE_PARTS = (4, 8)
"""Of the width, what travels in the subspaces that are weighed: the parts that were trained (docs/results.md)."""
_CODECS = tuple(name for name in ACTIVATION_CODECS if name != "float32")


class Planned(NamedTuple):
    """A run for its machines. `needs`: of each stage with a GPU."""

    run: RunConfig
    layout: ModelLayout
    needs: tuple[Memory, ...]
    expected: Throughput


def plan_for(run: RunConfig, machines: Machines) -> Planned:
    """Return the run as it is best cut for these machines; raise `UserError` (Exit.CONFIG) where nothing fits."""
    found: list[Planned] = []
    whole = model_layout(_with_pipeline(run, stages=1, boundaries=None))
    bytes_in_all = _LEAST_BYTES * sum(map(prod, whole.shapes[0].values()))
    counts = _stage_counts(machines.count, int(whole.prepared.config.num_hidden_layers))
    for stages in [count for count in counts if bytes_in_all <= count * machines.gpu_bytes] or counts[-1:]:
        base = _with_pipeline(run, stages=stages, replicas=machines.count // stages, boundaries=None)
        layout = model_layout(base)
        best = max(_plans(base, run, layout, machines), key=lambda plan: plan.expected.tokens_per_s, default=None)
        if best is not None:
            found.append(best)
        if len(found) == _STAGE_COUNTS:
            break
    if not found:
        raise _nothing_fits(base, layout, machines)
    # Of equals `max` takes the first.
    best = max(found, key=lambda plan: plan.expected.tokens_per_s)
    return best._replace(run=_with_rounds(best, run))


def in_subspaces(planned: Planned, machines: Machines) -> Iterator[Planned]:
    """Yield the same plan with smaller and smaller parts of the width travelling, for as far as the model allows it."""
    width = int(planned.layout.prepared.config.hidden_size)
    for part in _SUBSPACE_PARTS:
        run = _with_pipeline(planned.run, subspace=width // part)
        try:
            layout = model_layout(run)
        except UserError:
            return
        needs = gpu_memories(run, layout)
        yield Planned(run, layout, needs, forecast(run, layout, machines, needs))


def _stage_counts(machines: int, layers: int) -> list[int]:
    """Return the numbers of stages that leave the fewest machines over, one for each number of replicas."""
    counts = {machines // replicas for replicas in range(1, machines + 1)}
    return sorted(count for count in counts if count <= layers)


def _plans(base: RunConfig, before: RunConfig, layout: ModelLayout, machines: Machines) -> Iterator[Planned]:
    """Yield what fits in these stages, the mildest first."""
    for flow in _flows(base, before):
        needs = gpu_memories(flow, layout)
        if fits(needs, machines):
            for choice in _codecs(flow, layout.width):
                yield Planned(choice, layout, needs, forecast(choice, layout, machines, needs))


def _flows(base: RunConfig, before: RunConfig) -> Iterator[RunConfig]:
    """Yield windows that are multiples of the replicas, by which alone they are shared out without a rest.

    The batch's own comes first, its half last: two of these in flight take no more memory than one of that.
    """
    replicas, batch = base.pipeline.replicas, before.pipeline.microbatches_per_step * before.pipeline.replicas
    shortest = -(-max(1, batch // replicas) // replicas) * replicas
    each = base.pipeline.microbatch_size * base.pipeline.sequence_length * replicas
    windows = [shortest, *(window for window in (2 * shortest, 4 * shortest) if window * each <= MOST_TOKENS)]
    if shortest % (2 * replicas) == 0:
        windows.append(shortest // 2)
    for windows_in_flight in (1, 2) if base.pipeline.stages > 1 else (1,):
        for window in windows:
            yield _with_pipeline(base, windows_in_flight=windows_in_flight, microbatches_per_step=window)


def _codecs(run: RunConfig, width: int) -> Iterator[RunConfig]:
    for codec in _CODECS:
        try:
            check_width(codec, width)
        except ValueError:
            continue
        yield _with_pipeline(run, codec=codec)


def _with_pipeline(run: RunConfig, **fields: object) -> RunConfig:
    pipeline: PipelineConfig = structs.replace(run.pipeline, **fields)
    return structs.replace(run, pipeline=pipeline)


def _with_rounds(planned: Planned, before: RunConfig) -> RunConfig:
    """Return the plan with rounds as often as their share allows, and the budget of tokens that the run had."""
    run, outer = planned.run, before.outer
    steps = max(1, round(before.budget_samples / (run.samples_per_step * run.pipeline.replicas)))
    early = max(outer.inner_steps_per_round, min(planned.expected.steps_per_round, steps))
    late = None if outer.late_inner_steps_per_round is None else max(early, outer.late_inner_steps_per_round)
    warmup = min(steps - 1, round(before.inner.warmup_steps * steps / before.inner.steps))
    return structs.replace(
        run,
        inner=structs.replace(run.inner, steps=steps, warmup_steps=warmup),
        outer=structs.replace(outer, inner_steps_per_round=early, late_inner_steps_per_round=late),
    )


def _nothing_fits(run: RunConfig, layout: ModelLayout, machines: Machines) -> UserError:
    needs = gpu_memories(next(_flows(run, run)), layout)
    device = max(memory.computing for memory in needs)
    beside = max(memory.total - memory.computing for memory in needs)
    return config_error(
        f"{run.name} does not fit on {machines.in_words()}.",
        f"even with the most stages that they can serve, {run.pipeline.stages}, one takes {format_bytes(device)} on "
        f"the GPU and {format_bytes(beside)} beside it",
        "more machines (--peers), larger ones (--gpu, --ram), or a smaller --preset",
    )
