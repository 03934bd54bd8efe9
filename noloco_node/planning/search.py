"""A plan from machines: stages, form of the state, window, codec and rounds of a run, for the most tokens a second.

Memory comes first, since it says how many stages a run takes. Then a small grid, all of it tried; of plans that reach
the same, the mildest is taken. The budget of tokens stays. A batch goes neither beyond `MOST_TOKENS` nor so far that
the run has fewer than `LEAST_STEPS` inner steps, if it had as many. docs/design/planning.md says what has to pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2, prod
from typing import NamedTuple

from msgspec import structs

from gossip.settings import MOST_STEPS_PER_ROUND
from noloco_node.errors import UserError, config_error
from noloco_node.machine.memory import gpu_for, wanted_bytes
from noloco_node.planning.model_layout import ModelLayout, model_layout
from noloco_node.planning.plan import LEAST_ROUNDS, LEAST_STEPS, Memory
from noloco_node.planning.throughput import Machines, Throughput, fits, forecast, gpu_memories, missing
from noloco_node.run.config import MOST_MICROBATCHES, PipelineConfig, RunConfig
from noloco_node.units import format_bytes
from pipeline.adapters.settings import Form
from pipeline.inner_step import MOST_STEPS, MomentForm
from pipeline.messages import ACTIVATION_CODECS, check_width

MOST_TOKENS = 2**20  # of an inner step of all peers together: the paper trains on half of that to twice
DOUBLING = 1.2
"""What twice the batch, or half of it, must bring in tokens a second: what a token teaches falls as batches grow."""
STALE = 1.1
"""What a second window in flight must bring in tokens a second: its gradients are stale, and short runs learn less then
(research/results.md, "Two windows")."""
CLEARLY = 1.1  # what 8-bit codes must bring in tokens a second to take the place of float32
_FORMS: tuple[Form, ...] = ("bfloat16", "int8", "nf4")  # of a frozen model, from the most bits to the fewest
_LEAST_BYTES: dict[MomentForm, int] = {"float32": 16, "int8": 5}
"""A parameter takes on a device, by the form of the state: weights, gradients and moments that cannot lie beside it."""
_AMPLE = 1e15  # bytes of memory in which every stage fits
_STAGE_COUNTS = 2  # numbers of stages that are tried of those that fit: with more, only bytes and ways grow
_SUBSPACE_PARTS = (4, 8)
"""Of the width, what travels in the subspaces that are weighed: the parts that were trained (research/results.md)."""
_FACTORS = (1.0, 0.5, 2.0, 4.0, 8.0, 16.0)  # of the batch that was asked for, those that are tried
_CODECS = tuple(name for name in ACTIVATION_CODECS if name != "float32")


class Planned(NamedTuple):
    """A run for its machines. `needs`: of each stage with a GPU."""

    run: RunConfig
    layout: ModelLayout
    needs: tuple[Memory, ...]
    expected: Throughput


def plan_for(run: RunConfig, machines: Machines) -> Planned:
    """Return the run as it is best cut for these machines; raise `UserError` (Exit.CONFIG) where nothing fits."""
    plain, coded = (plan_in(state, run, machines) for state in _LEAST_BYTES)
    best = coded if plain is None else plain
    if best is None:
        raise _nothing_fits(run, machines)
    if coded is not None and merit(coded, run) >= CLEARLY * merit(best, run):
        return coded
    return best


def plan_in_any_form(run: RunConfig, machines: Machines) -> Planned:
    """Return the best plan of a run of adapters, with the frozen model in the form of most bits that reaches as much.

    Raises `UserError` (Exit.CONFIG) where nothing fits in any form.
    """
    best: Planned | None = None
    for form in _FORMS:
        adapter = replace(run.adapter, base=form)
        try:
            plan = plan_for(structs.replace(run, adapter=adapter), machines)
        except UserError:
            if best is None and form == _FORMS[-1]:
                raise
            continue
        if best is None or merit(plan, run) >= CLEARLY * merit(best, run):
            best = plan
    assert best is not None
    return best


def plan_in(state: MomentForm, run: RunConfig, machines: Machines) -> Planned | None:
    """Return the best plan whose stages keep their state in this form; None where nothing fits."""
    run = structs.replace(run, inner=replace(run.inner, state=state))
    found: list[Planned] = []
    for base in _bases(run, machines):
        if found and base.pipeline.replicas == found[-1].run.pipeline.replicas:
            continue  # more stages of as many replicas: more ways, and nothing else
        best = max(_plans(base, run, machines), key=lambda plan: merit(plan, run), default=None)
        if best is not None:
            found.append(best)
        if len(found) == _STAGE_COUNTS:
            break
    # Of equals `max` takes the first.
    best = max(found, key=lambda plan: merit(plan, run), default=None)
    return None if best is None else best._replace(run=_with_rounds(best, run))


def in_fewer_stages(planned: Planned, machines: Machines) -> tuple[Planned, Machines] | None:
    """Return a plan with fewer stages, so that each has more replicas, and the memory that it takes; None with one."""
    stages = machines.count // (planned.run.pipeline.replicas + 1)
    if not 0 < stages < planned.run.pipeline.stages:
        return None
    ample = structs.replace(machines, gpu_bytes=_AMPLE, ram_bytes=_AMPLE)
    base = _with_stages(planned.run, stages, machines)
    best = max(_plans(base, planned.run, ample), key=lambda plan: merit(plan, planned.run))
    larger = structs.replace(
        machines,
        gpu_bytes=max(machines.gpu_bytes, gpu_for(max(memory.computing for memory in best.needs))),
        ram_bytes=max(machines.ram_bytes, wanted_bytes(max(memory.beside for memory in best.needs))),
    )
    return best._replace(expected=forecast(best.run, best.layout, larger, best.needs)), larger


def merit(plan: Planned, asked: RunConfig) -> float:
    """Return the tokens a second of a plan, less what stale gradients cost, and a batch that was not asked for."""
    stale = STALE if plan.run.pipeline.windows_in_flight == 2 else 1.0
    return plan.expected.tokens_per_s / (stale * float(DOUBLING ** abs(log2(plan.run.batch / asked.batch))))


def _bases(run: RunConfig, machines: Machines) -> list[RunConfig]:
    """Return the run with each number of stages that may fit, the fewest first; with the most where none does."""
    whole = model_layout(_with_stages(run, 1, machines))
    bytes_in_all = (
        _LEAST_BYTES[run.inner.state] * sum(map(prod, whole.shapes[0].values())) + whole.sizes[0].frozen.bytes
    )
    counts = range(1, 1 + min(machines.count, int(whole.prepared.config.num_hidden_layers)))
    return [
        _with_stages(run, stages, machines)
        for stages in [count for count in counts if bytes_in_all <= count * machines.gpu_bytes] or counts[-1:]
    ]


def _with_stages(run: RunConfig, stages: int, machines: Machines) -> RunConfig:
    replicas = min(machines.count // stages, _largest_batch(run) // _sizes(run)[-1])
    # Codecs are tried later (`_codecs`): with one that takes any width, no layout is worked out for each of them.
    return _with_pipeline(run, stages=stages, replicas=replicas, boundaries=None, codec="float32")


def in_subspaces(planned: Planned, machines: Machines) -> Iterator[Planned]:
    """Yield the same plan with smaller and smaller parts of the width travelling, for as far as the model allows it."""
    width = int(planned.layout.prepared.config.hidden_size)
    for part in _SUBSPACE_PARTS:
        run = _with_pipeline(planned.run, subspace=width // part)
        try:
            layout = model_layout(run)
        except UserError:
            return
        needs = gpu_memories(run, layout, machines)
        yield Planned(run, layout, needs, forecast(run, layout, machines, needs))


def _plans(base: RunConfig, before: RunConfig, machines: Machines) -> Iterator[Planned]:
    layout = model_layout(base)
    for flow in _flows(base, before):
        for choice in _codecs(flow, layout.width):
            needs = gpu_memories(choice, layout, machines)
            if fits(needs, machines):
                yield Planned(choice, layout, needs, forecast(choice, layout, machines, needs))


def _flows(base: RunConfig, before: RunConfig) -> Iterator[RunConfig]:
    """Yield windows and microbatches, those of the batch that was asked for first.

    Between stages a window is shared out without a rest by multiples of the replicas alone, so these are tried too.
    """
    replicas, most, asked = base.pipeline.replicas, _largest_batch(before), before.batch
    found: dict[tuple[int, int], float] = {}
    for size in _sizes(before):
        largest = min(MOST_MICROBATCHES, most // (replicas * size))
        for factor in _FACTORS:
            window = max(1, min(largest, round(factor * asked / (replicas * size))))
            even = max(1, round(window / replicas)) * replicas
            for choice in (window, even) if base.pipeline.stages > 1 else (window,):
                if choice <= largest:
                    found[choice, size] = abs(log2(choice * size * replicas / asked))
    for windows_in_flight in (1, 2) if base.pipeline.stages > 1 else (1,):
        for window, size in sorted(found, key=lambda choice: (found[choice], choice[0])):
            yield _with_pipeline(
                base, windows_in_flight=windows_in_flight, microbatches_per_step=window, microbatch_size=size
            )


def _sizes(run: RunConfig) -> list[int]:
    """Return the sizes of a microbatch that are tried: the one that was asked for, and its halves."""
    sizes = [run.pipeline.microbatch_size]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes


def _largest_batch(run: RunConfig) -> int:
    asked, enough = run.batch, run.budget_samples // LEAST_STEPS
    return max(asked, min(MOST_TOKENS // run.pipeline.sequence_length, enough))


def _codecs(run: RunConfig, width: int) -> Iterator[RunConfig]:
    for codec in _CODECS if run.pipeline.stages > 1 else _CODECS[:1]:
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
    steps = min(MOST_STEPS, max(1, round(before.budget_samples / planned.run.batch)))
    # Rarer rounds than these teach nothing; `plan_text` says so where lines do not carry them in time.
    most = min(MOST_STEPS_PER_ROUND, steps // LEAST_ROUNDS)
    early = max(outer.inner_steps_per_round, min(planned.expected.steps_per_round, most))
    late = outer.late_inner_steps_per_round
    if late is not None:
        late = max(early, min(late, most))
    warmup = min(steps - 1, round(before.inner.warmup_steps * steps / before.inner.steps))
    return structs.replace(
        run,
        inner=replace(run.inner, steps=steps, warmup_steps=warmup),
        outer=replace(outer, inner_steps_per_round=early, late_inner_steps_per_round=late),
    )


def _nothing_fits(run: RunConfig, machines: Machines) -> UserError:
    run = structs.replace(run, inner=replace(run.inner, state="int8"))
    base = _bases(run, machines)[-1]
    layout = model_layout(base)
    choices = (choice for flow in _flows(base, base) for choice in _codecs(flow, layout.width))
    each_needs = (gpu_memories(choice, layout, machines) for choice in choices)
    needs = min(each_needs, key=lambda each: sum(missing(each, machines)))
    lacks = missing(needs, machines)
    device, beside = (max(getattr(memory, where) for memory in needs) for where in ("computing", "beside"))
    return config_error(
        f"{run.name} does not fit on {machines.in_words()}.",
        f"even with the most stages that they can serve, {base.pipeline.stages}, and with their state in 8-bit codes "
        f"one takes {format_bytes(device)} on the GPU and {format_bytes(beside)} beside it; what may be used is too "
        f"little by {lacks.in_words()}",
        "more machines (--peers), larger ones (--gpu, --ram), or a smaller --preset",
    )
