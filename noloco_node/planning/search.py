"""A plan from machines: stages, window, codec and rounds of a run, chosen for the most tokens a second that fit.

A small grid, all of it tried. Of plans that reach the same, the mildest is taken: fewer stages, exact windows, the
batch that was asked for, more bits. The budget of tokens stays. Another batch is taken only where each doubling brings
`DOUBLING` times the tokens a second, never beyond `MOST_TOKENS`, and never so large that the run has fewer than
`LEAST_STEPS` inner steps, if it had as many. Machines beyond that are left over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2, prod
from typing import NamedTuple

from msgspec import structs

from noloco_node.errors import UserError, config_error
from noloco_node.planning.model_layout import ModelLayout, model_layout
from noloco_node.planning.plan import LEAST_ROUNDS, LEAST_STEPS, Memory
from noloco_node.planning.throughput import Machines, Throughput, fits, forecast, gpu_memories, missing
from noloco_node.run.config import PipelineConfig, RunConfig
from noloco_node.units import format_bytes
from pipeline.messages import ACTIVATION_CODECS, check_width

MOST_TOKENS = 2**20
"""Of an inner step of all peers together: the paper trains on half of that to twice."""
DOUBLING = 1.2
"""What twice the batch, or half of it, must bring in tokens a second: what a token teaches falls as batches grow."""
_LEAST_BYTES = 16
"""A parameter takes on a device: float32 weights, gradients and two moments."""
_STAGE_COUNTS = 2
"""Numbers of stages that are tried of those that fit: with more, only bytes and ways grow."""
_SUBSPACE_PARTS = (4, 8)
"""Of the width, what travels in the subspaces that are weighed: the parts that were trained (research/results.md)."""
_FACTORS = (1.0, 0.5, 2.0, 4.0, 8.0, 16.0)
"""Of the batch that was asked for, those that are tried."""
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
    most, asked = _largest_batch(run), run.batch

    def merit(plan: Planned) -> float:
        return plan.expected.tokens_per_s / float(DOUBLING ** abs(log2(plan.run.batch / asked)))

    for stages in [count for count in counts if bytes_in_all <= count * machines.gpu_bytes] or counts[-1:]:
        base = _with_pipeline(run, stages=stages, replicas=min(machines.count // stages, most), boundaries=None)
        layout = model_layout(base)
        best = max(_plans(base, run, layout, machines), key=merit, default=None)
        if best is not None:
            found.append(best)
        if len(found) == _STAGE_COUNTS:
            break
    if not found:
        raise _nothing_fits(base, layout, machines)
    # Of equals `max` takes the first.
    best = max(found, key=merit)
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
    for flow in _flows(base, before):
        needs = gpu_memories(flow, layout)
        if fits(needs, machines):
            for choice in _codecs(flow, layout.width):
                yield Planned(choice, layout, needs, forecast(choice, layout, machines, needs))


def _flows(base: RunConfig, before: RunConfig) -> Iterator[RunConfig]:
    """Yield windows and microbatches, those of the batch that was asked for first.

    Between stages a window is shared out without a rest by multiples of the replicas alone, so these are tried too.
    """
    replicas, most, asked = base.pipeline.replicas, _largest_batch(before), before.batch
    sizes = [before.pipeline.microbatch_size]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    found: dict[tuple[int, int], float] = {}
    for size in sizes:
        for factor in _FACTORS:
            window = max(1, round(factor * asked / (replicas * size)))
            even = max(1, round(window / replicas)) * replicas
            for choice in (window, even) if base.pipeline.stages > 1 else (window,):
                batch = choice * size * replicas
                if batch <= most:
                    found[choice, size] = abs(log2(batch / asked))
    for windows_in_flight in (1, 2) if base.pipeline.stages > 1 else (1,):
        for window, size in sorted(found, key=lambda choice: (found[choice], choice[0])):
            yield _with_pipeline(
                base, windows_in_flight=windows_in_flight, microbatches_per_step=window, microbatch_size=size
            )


def _largest_batch(run: RunConfig) -> int:
    asked, enough = run.batch, run.budget_samples // LEAST_STEPS
    return max(asked, min(MOST_TOKENS // run.pipeline.sequence_length, enough))


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
    steps = max(1, round(before.budget_samples / planned.run.batch))
    # Rarer rounds than these teach nothing; `plan_text` says so where lines do not carry them in time.
    early = max(outer.inner_steps_per_round, min(planned.expected.steps_per_round, steps // LEAST_ROUNDS))
    late = outer.late_inner_steps_per_round
    if late is not None:
        late = max(early, min(late, steps // LEAST_ROUNDS))
    warmup = min(steps - 1, round(before.inner.warmup_steps * steps / before.inner.steps))
    return structs.replace(
        run,
        inner=structs.replace(run.inner, steps=steps, warmup_steps=warmup),
        outer=replace(outer, inner_steps_per_round=early, late_inner_steps_per_round=late),
    )


def _nothing_fits(run: RunConfig, layout: ModelLayout, machines: Machines) -> UserError:
    needs = min(
        (gpu_memories(flow, layout) for flow in _flows(run, run)), key=lambda each: sum(missing(each, machines))
    )
    lacks = missing(needs, machines)
    device = max(memory.computing for memory in needs)
    beside = max(memory.total - memory.computing for memory in needs)
    return config_error(
        f"{run.name} does not fit on {machines.in_words()}.",
        f"even with the most stages that they can serve, {run.pipeline.stages}, one takes {format_bytes(device)} on "
        f"the GPU and {format_bytes(beside)} beside it; what may be used is too little by {lacks.in_words()}",
        "more machines (--peers), larger ones (--gpu, --ram), or a smaller --preset",
    )
