"""What to expect of a run on given machines, in words, and what else they could do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isclose, log, prod, sqrt
from typing import NamedTuple

from msgspec import structs

from noloco_node.data.held_out_text import FORWARD_PASSES, evaluated_sequences
from noloco_node.planning import throughput
from noloco_node.planning.bandwidth import hop_bytes, round_bytes
from noloco_node.planning.model_layout import model_layout
from noloco_node.planning.plan import LEAST_ROUNDS, mean_steps_per_round, rounds_of
from noloco_node.planning.plan_text import fitted, in_phases
from noloco_node.planning.search import CLEARLY, Planned, in_fewer_stages, in_subspaces, plan_for, plan_in
from noloco_node.run.config import RunConfig
from noloco_node.units import format_bytes, format_count, format_duration, format_rate, format_roughly
from pipeline.admission_window import MOST_IN_FLIGHT
from pipeline.inner_step import MomentForm

TOKENS_A_PARAMETER = 20
EVALUATIONS = 100  # of a run on held-out text
FAR = 4.0
"""Times as many or as few sends of its weights as on any line of the map, and a run's lines are unlike all of them.
Beyond so many times the map's replicas, a run is unlike them too."""
IDLE = 0.5  # less of their time at work than this, and a plan leaves devices idle


def planned_values(run: RunConfig) -> dict[str, dict[str, object]]:
    """Return the fields of a run file that a plan chooses, by section, as they are written."""
    pipeline, outer = run.pipeline, run.outer
    late = outer.late_inner_steps_per_round
    return {
        "pipeline": {
            "stages": pipeline.stages,
            "replicas": pipeline.replicas,
            "microbatch_size": pipeline.microbatch_size,
            "microbatches_per_step": pipeline.microbatches_per_step,
            "windows_in_flight": pipeline.windows_in_flight,
            "codec": f'"{pipeline.codec}"',
        },
        "inner": {"steps": run.inner.steps, "warmup_steps": run.inner.warmup_steps, "state": f'"{run.inner.state}"'},
        "outer": {
            "inner_steps_per_round": outer.inner_steps_per_round,
            **({} if late is None else {"late_inner_steps_per_round": late}),
        },
        **({"adapter": {"base": f'"{run.adapter.base}"'}} if run.adapter.is_trained else {}),
        **({"data": {"evaluate_every_rounds": every}} if (every := run.data.evaluate_every_rounds) else {}),
    }


def with_evaluations(run: RunConfig) -> RunConfig:
    """Return a run with about `EVALUATIONS` evaluations, or with none where a peer could not evaluate.

    An evaluation takes one replica of each stage no longer than an inner step, so that so many cost next to nothing.
    """
    possible = not run.model.is_foreign and run.data.validation_percent > 0
    every = max(1, rounds_of(run) // EVALUATIONS) if possible else 0
    return structs.replace(run, data=structs.replace(run.data, evaluate_every_rounds=every))


def describe_expectation(planned: Planned, machines: throughput.Machines) -> list[str]:
    """Say what to expect of a run on its machines, in lines that a terminal holds."""
    run, layout, needs, found = planned
    pipeline, tokens = run.pipeline, run.tokens(run.budget_samples)
    each = tokens / sum(prod(shape) for shapes in layout.shapes for shape in shapes.values())
    enough = (
        f"; they are {format_roughly(each)} a parameter "
        f"({TOKENS_A_PARAMETER} use the work best, by a rule of thumb of Hoffmann and others, 2022)"
    )
    device = max(memory.computing for memory in needs)
    beside = max(memory.beside for memory in needs)
    moments = max(memory.moments_beside for memory in needs)
    said = [
        f"On {machines.in_words()}, {machines.flops / 1e12:g} TFLOP/s, lines of "
        f"{format_rate(machines.down_bytes_per_s)} down and {format_rate(machines.up_bytes_per_s)} up, "
        f"{1000 * machines.latency_s:g} ms apart:",
        f"{pipeline.stages} stage{'s' * (pipeline.stages > 1)} of {_replicas(found.replicas)}, "
        f"windows of {pipeline.microbatches_per_step}, "
        f"{pipeline.windows_in_flight} in flight, {pipeline.codec}: about {found.tokens_per_s:,.0f} tokens/s, "
        f"{found.tokens_per_s / found.possible:.0%} of what these devices could do without a network. Those of the "
        f"slowest stage are {found.busy:.0%} busy, and {found.bound} set the pace. "
        f"{format_count(tokens)} tokens take {format_duration(tokens / found.tokens_per_s)}"
        f"{enough if layout.adapter is None else ''}.",
        *_alone(planned, machines),
        _other_form(planned, machines),
        f"Memory: {format_bytes(device)} on the GPU at least, and {format_bytes(beside)} beside it at most "
        f"({in_phases(max(needs, key=lambda memory: memory.beside))}); "
        f"{found.computed_again:.0%} of the forward passes are computed again"
        + (f", and steps fetch {format_bytes(moments)} of AdamW's moments from beside it." if moments else "."),
    ]
    spare = machines.count - throughput.taking_part(run, machines)
    if spare > 0:
        said.append(f"This run leaves out {spare} of {machines.count} machines, which may join as more replicas.")
    if len(set(found.replicas)) > 1:
        said.append(
            "Stages that ask for more have more replicas. Peers choose so by themselves where their owners name their "
            "lines (--max-upload, --max-download)."
        )
    if pipeline.stages > 1:
        hop = hop_bytes(pipeline, layout.width)
        said.append(f"A microbatch's hop: {format_bytes(hop.down)} down, {format_bytes(hop.back)} back.")
    if pipeline.replicas > 1:
        said += _rounds(planned, machines)
    if every := run.data.evaluate_every_rounds:
        number = max(1, rounds_of(run) // every)
        share = number * evaluated_sequences(run) / FORWARD_PASSES / run.budget_samples
        rounds = "every round" if every == 1 else f"every {every} rounds"
        said.append(f"About {number} evaluations on held-out text, one {rounds}, take {share:.2%} of the work.")
    if found.busy < IDLE:
        said.append(f"Warning: devices stand still more than half of the time. {_remedy(found.bound)}")
    return fitted([*said, *_alternatives(planned, machines)])


def describe_changes(planned: Planned, before: RunConfig, machines: throughput.Machines) -> list[str]:
    """Say what a plan changed that a person asked for, and why; nothing where it kept the batch."""
    run, said = planned.run, list[str]()
    asked, batch = before.tokens(before.batch), run.tokens(run.batch)
    if not isclose(batch, asked, rel_tol=0.01):
        why = "longer windows keep these devices at work" if batch > asked else "the replicas share it out evenly so"
        said.append(
            f"The batch is {batch:,} tokens of all replicas an inner step, {format_roughly(batch / asked)} times the "
            f"{asked:,} that were asked for: {why}. The budget of tokens stays, so {before.inner.steps:,} steps become "
            f"{run.inner.steps:,}. The learning rate stays; by a rule of thumb for Adam one "
            f"{format_roughly(sqrt(batch / asked))} times as high suits that batch."
        )
    return fitted(said)


def _rounds(planned: Planned, machines: throughput.Machines) -> Iterator[str]:
    """Yield what a round takes, whether the lines carry enough of them, and how a mean over all replicas compares."""
    run, found = planned.run, planned.expected
    largest = max(round_bytes(run.outer, tuple(shapes.values())) for shapes in planned.layout.shapes)
    yield (
        f"A round: {format_bytes(largest)} each way, due every {mean_steps_per_round(run.outer):.0f} inner steps; "
        f"with {throughput.share_of_rounds(run):.0%} of the line it comes every {found.steps_per_round} at the "
        "soonest."
    )
    if found.steps_per_round * LEAST_ROUNDS > run.inner.steps:
        yield (
            f"Warning: the lines carry {run.inner.steps // found.steps_per_round} of the {LEAST_ROUNDS} rounds that "
            f"mix the replicas in the {run.inner.steps:,} inner steps of this run. "
            "Fewer machines, faster lines or more tokens help."
        )
    tokens = run.tokens(run.budget_samples)
    carried = min(machines.up_bytes_per_s, machines.down_bytes_per_s) * tokens / found.tokens_per_s
    yield on_such_lines(carried / largest, run.pipeline.replicas)


def _alone(planned: Planned, machines: throughput.Machines) -> list[str]:
    if machines.count == 1:
        return []
    pipeline = structs.replace(
        planned.run.pipeline, stages=1, replicas=1, boundaries=None, windows_in_flight=1, subspace=None, codec="float32"
    )
    alone = structs.replace(planned.run, pipeline=pipeline)
    layout = model_layout(alone)
    needs = throughput.gpu_memories(alone, layout, machines)
    speed = throughput.forecast(alone, layout, structs.replace(machines, count=1), needs).tokens_per_s
    lacks = throughput.missing(needs, machines)
    times = planned.expected.tokens_per_s / speed
    does = f"the swarm does the work of {times:,.{1 if times < 10 else 0}f} of them"
    if any(lacks):
        said = (
            f"The model does not fit one such machine, by {lacks.in_words()}; with the memory it would do about "
            f"{speed:,.0f} tokens/s alone: {does}."
        )
    else:
        said = f"One such machine alone: about {speed:,.0f} tokens/s; {does}."
    if planned.expected.tokens_per_s < speed:
        said += " Warning: one machine is faster than all of these together."
    return [said]


_FORMS: dict[MomentForm, str] = {"float32": "float32", "int8": "8-bit codes"}
"""What the forms of a stage's state are called."""


def _other_form(planned: Planned, machines: throughput.Machines) -> str:
    """Say in which form the state is kept, and what the best plan with the other form reaches."""
    state = planned.run.inner.state
    here, (name, there) = _FORMS[state], next(each for each in _FORMS.items() if each[0] != state)
    other = plan_in(name, planned.run, machines)
    said = f"The state of a stage is kept in {here} (inner.state)"
    if other is None:
        return f"{said}; in {there} no number of stages fits these machines."
    stages = other.run.pipeline.stages
    return (
        f"{said}; in {there} {stages} stage{'s' * (stages > 1)} would reach about "
        f"{other.expected.tokens_per_s:,.0f} tokens/s."
    )


def _alternatives(planned: Planned, machines: throughput.Machines) -> Iterator[str]:
    """Yield what else would bring clearly more tokens a second: more memory, faster lines, a subspace."""
    enough, fewer = CLEARLY * planned.expected.tokens_per_s, in_fewer_stages(planned, machines)
    if fewer is not None and fewer[0].expected.tokens_per_s >= enough:
        plan, larger = fewer
        stages = plan.run.pipeline.stages
        memory = f"{format_bytes(larger.gpu_bytes)} on the GPU and {format_bytes(larger.ram_bytes)} beside it"
        yield (
            f"With {'the memory that these machines have' if larger == machines else memory} {stages} "
            f"stage{'s' * (stages > 1)} of {plan.run.pipeline.replicas} replicas would do: about "
            f"{plan.expected.tokens_per_s:,.0f} tokens/s."
        )
    faster = structs.replace(
        machines, up_bytes_per_s=2 * machines.up_bytes_per_s, down_bytes_per_s=2 * machines.down_bytes_per_s
    )
    speed = throughput.forecast(planned.run, planned.layout, faster, planned.needs).tokens_per_s
    if speed >= enough:
        yield f"On lines twice as fast this plan would reach about {speed:,.0f} tokens/s."
    expected = planned.expected
    if expected.busy < IDLE and "links" in expected.bound and planned.run.pipeline.subspace is None:
        yield from _subspaces(planned, machines)


def _subspaces(planned: Planned, machines: throughput.Machines) -> list[str]:
    before, narrow = planned.expected.tokens_per_s, list(in_subspaces(planned, machines))
    faster = [plan for plan in narrow if plan.expected.tokens_per_s > before]
    if not faster:
        return []
    fields = [f"subspace = {plan.run.pipeline.subspace}" for plan in faster]
    speeds = [f"{plan.expected.tokens_per_s:,.0f}" for plan in faster]
    times = [f"{plan.expected.tokens_per_s / before:.1f}" for plan in faster]
    return [
        f"With {' or '.join(fields)} in [pipeline] it would be about {' or '.join(speeds)} tokens/s. A model learns "
        f"less from each token then; that pays while it takes less than {' or '.join(times)} times the tokens "
        '(research/results.md, "A subspace").'
    ]


def _replicas(counts: Sequence[int]) -> str:
    if len(set(counts)) == 1:
        return f"{counts[0]} replica{'s' * (counts[0] > 1)}"
    return f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} replicas"


def report_machines(run: RunConfig, machines: throughput.Machines | None) -> list[str]:
    """Say what a run does on machines, and what a plan would change where it leaves them idle."""
    if machines is None:
        return fitted(
            ["Tokens a second: name the machines, with --peers, --gpu, --ram, --line, --tflops, --latency-ms."]
        )
    layout = model_layout(run)
    needs, peers = throughput.gpu_memories(run, layout, machines), run.pipeline.peers
    here = Planned(run, layout, needs, throughput.forecast(run, layout, machines, needs))
    good = throughput.fits(needs, machines) and peers <= machines.count
    if peers > machines.count:
        lines = fitted([f"Warning: this run plans {peers} peers, more than {machines.in_words()}."])
    else:
        lines = describe_expectation(here, machines)
        if not good:
            lines += fitted(
                [f"Warning: it does not fit on these machines, by {throughput.missing(needs, machines).in_words()}."]
            )
    if here.expected.busy < IDLE or not good:
        better = plan_for(run, machines)
        if better.expected.tokens_per_s > here.expected.tokens_per_s or not good:
            before = planned_values(run)
            fields = ", ".join(
                f"{name} = {value}"
                for section, values in planned_values(better.run).items()
                for name, value in values.items()
                if value != before[section][name]
            )
            speed = better.expected.tokens_per_s
            lines += fitted([f"A plan for them reaches about {speed:,.0f} tokens/s, with {fields}."])
    return lines


def _remedy(bound: str) -> str:
    if "links" in bound:
        return "Their lines are too narrow for this run: a codec of fewer bits, fewer stages or faster lines help."
    if "in flight" in bound:
        return f"{MOST_IN_FLIGHT} microbatches in flight are few for so long a way: fewer stages or larger ones help."
    return "The windows are too short for so long a way: more microbatches_per_step or fewer stages help."


class Versus(NamedTuple):
    """A mean over all replicas beside gossip, at the map's places of one kind of line.

    `least` and `most`: its time to the same loss, over gossip's. `better` and `worse`: the places at which gossip has
    the lower or the higher loss by more than two standard errors.
    """

    least: float
    most: float
    better: int
    worse: int


class MapLine(NamedTuple):
    """One kind of line on the map, with so many replicas.

    `sends`: of a replica's weights that fit into a run. `places`: compared there.
    """

    replicas: int
    sends: int
    places: int
    barrier: Versus
    nobody_waits: Versus


MAP = (
    # What a planner needs of the laboratory's map (research/map.md); a test compares it with the map's record.
    MapLine(4, 2700, 12, Versus(0.87, 1.04, 0, 1), Versus(0.85, 1.17, 2, 0)),
    MapLine(4, 270, 12, Versus(0.97, 1.20, 3, 0), Versus(0.87, 1.13, 2, 0)),
    MapLine(4, 54, 12, Versus(1.26, 1.55, 12, 0), Versus(0.97, 1.14, 1, 0)),
    MapLine(4, 13, 12, Versus(1.91, 2.70, 12, 0), Versus(0.94, 1.21, 1, 0)),
    MapLine(16, 2700, 6, Versus(0.69, 1.26, 0, 5), Versus(0.90, 1.03, 0, 2)),
    MapLine(16, 54, 6, Versus(1.31, 2.20, 6, 0), Versus(1.10, 1.48, 5, 0)),
    MapLine(16, 13, 6, Versus(1.61, 6.52, 6, 0), Versus(1.03, 1.56, 5, 0)),
    MapLine(64, 2700, 2, Versus(0.97, 1.21, 1, 1), Versus(0.90, 1.05, 0, 1)),
    MapLine(64, 54, 2, Versus(3.93, 4.34, 2, 0), Versus(1.75, 1.79, 2, 0)),
    MapLine(64, 13, 2, Versus(1.28, 2.56, 2, 0), Versus(1.72, 1.72, 2, 0)),
)


def on_such_lines(sends: float, replicas: int) -> str:
    """Say how a mean over so many replicas compares with gossip where each could send its weights so many times.

    That number, in the code of a round and while the run lasts, is what lines of the map and of a run are compared by.
    The map's number of replicas that is nearest to the run's decides where to look.
    """
    near = min(MAP, key=lambda line: (_distance(replicas, line.replicas), _distance(sends, line.sends)))
    barrier, late = near.barrier, near.nobody_waits
    unlike = [
        f", and {what} unlike all of the map's"
        for what, distance in (
            ("these lines are", _distance(sends, near.sends)),
            (f"{replicas:,} replicas are", _distance(replicas, near.replicas)),
        )
        if distance > log(FAR)
    ]
    return (
        f"Gossip or a mean over all replicas: a line could carry a replica's weights {sends:,.0f} times "
        f"in this run. Where it could {near.sends:,} times, a mean with a barrier needed {barrier.least:.2f} to "
        f"{barrier.most:.2f} times as long as gossip for the same loss, a mean for which no machine waits "
        f"{late.least:.2f} to {late.most:.2f} times. Of {near.places} conditions gossip was clearly better in "
        f"{barrier.better} and {late.better}, clearly worse in {barrier.worse} and {late.worse} (research/map.md: tiny "
        f"models, {near.replicas} whole replicas{''.join(unlike)})."
    )


def _distance(one: float, other: float) -> float:
    return abs(log(one / other))
