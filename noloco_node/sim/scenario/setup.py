"""What a scenario means: the run that its peers train, what a pass costs them, and what a message weighs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import structs

from gossip.exchange.messages import Piece, Probe, Weights
from gossip.settings import OuterConfig, wire_bytes
from noloco_node.errors import config_error
from noloco_node.machine.interface import Dimensions, StageModel
from noloco_node.machine.memory import free_of_gpu, usable_bytes
from noloco_node.planning.bandwidth import (
    PROBE_BYTES,
    SLOWEST_BYTES_PER_S,
    HopBytes,
    float32_bytes,
    hop_bytes,
    microbatch_bytes,
)
from noloco_node.planning.plan import graphs_that_fit, mean_steps_per_round, memories
from noloco_node.planning.throughput import BUS_BYTES_PER_S, coding_seconds, orthogonal_seconds
from noloco_node.run.config import ModelConfig, PipelineConfig, RunConfig
from noloco_node.run.runfile import load_run, validate
from noloco_node.sim.hardware.priced_stage import Prices
from noloco_node.sim.hardware.quadratic_model import SIZE, WIDE, WIDE_CENTRE, QuadraticModel, quadratic_layout
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.scenario.scenario import MOST_PEERS, RUN_FIELDS, NetworkConfig, Scenario, SwarmConfig, planned
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.units import format_bytes
from pipeline.inner_step import InnerConfig
from pipeline.messages import Gradient, Microbatch

if TYPE_CHECKING:
    from noloco_node.planning.model_layout import ModelLayout


FRAME_BYTES = 100
"""Of a message without tensors."""
WEIGHT_SETS = 4
"""Sets of weights in a whole state: slow weights, momentum, two moments."""
QUADRATIC_BYTES = {"quadratic": 4 * SIZE, "wide quadratic": 4 * WIDE}
"""Of the weights that a quadratic model really has."""


class MessageSizes:
    """The sizes of one simulation's messages. `stage_bytes`: of the weights of each stage.

    `microbatch_bytes`, `gradient_bytes`: of the two messages of a hop.
    """

    def __init__(self, scenario: Scenario, run: RunConfig, plan: ModelLayout | None) -> None:
        network, codec, stages = scenario.network, run.outer.codec, run.pipeline.stages
        hop = HopBytes(network.microbatch_bytes, network.microbatch_bytes)
        self.stage_bytes, self._probes = [network.weights_bytes] * stages, [0] * stages
        self._coded = [round(network.weights_bytes * wire_bytes(codec, [(2**20,)]) / 2**22)] * stages
        if plan is not None:
            hop = hop_bytes(run.pipeline, plan.width)
            shapes = [tuple(named.values()) for named in plan.shapes]
            self.stage_bytes = [float32_bytes(each) for each in shapes]
            self._coded = [wire_bytes(codec, each) for each in shapes]
            self._probes = [min(PROBE_BYTES, total) for total in self.stage_bytes]
        self.microbatch_bytes, self.gradient_bytes = FRAME_BYTES + hop.down, FRAME_BYTES + hop.back
        self._held_bytes = QUADRATIC_BYTES.get(scenario.swarm.model)

    @property
    def largest_state_bytes(self) -> int:
        return FRAME_BYTES + WEIGHT_SETS * max(self.stage_bytes)

    def size_bytes(self, message: object, topic: str) -> int:
        match message:
            case Microbatch():
                return self.microbatch_bytes
            case Gradient():
                return self.gradient_bytes
            case Weights():
                return FRAME_BYTES + (bool(message.fast) + bool(message.slow)) * self._coded[_stage_of(topic)]
            case Probe():
                return FRAME_BYTES + (1 + (message.fast is not None)) * self._probes[_stage_of(topic)]
            case Piece():
                # A share of a section, which is as large as the weights, or as those that a quadratic model stands for.
                whole = self.stage_bytes[_stage_of(topic)]
                return FRAME_BYTES + message.data.nbytes * whole // (self._held_bytes or whole)
        return FRAME_BYTES


def _stage_of(topic: str) -> int:
    return int(topic.rpartition("/")[2])


FOREVER_S = 1e9
"""A deadline that no simulation reaches."""
MBIT_BYTES = 1e6 / 8


class SimSetup(NamedTuple):
    """A scenario worked out. `prices`: by stage. `build`: makes a stage's arithmetic. `faults`: without churn.

    `microbatch_tokens`: that a microbatch stands for, also where a quadratic model computes.
    """

    scenario: Scenario
    recipe: RunFileText
    dimensions: Dimensions
    prices: tuple[Prices, ...]
    build: Callable[[int], StageModel]
    sizes: MessageSizes
    faults: tuple[Fault, ...]
    microbatch_tokens: int
    parameters: int
    """Of the run file's whole model; 0 where there is none."""
    slowest_bytes_per_s: float
    """By which nodes reckon their deadlines: from the weights in their hands, and a quadratic model's are small."""
    line_s: tuple[float, ...]
    """That a microbatch takes of a line at each stage, as owners know it."""
    access: Access

    @property
    def run(self) -> RunConfig:
        return self.recipe.run

    @property
    def peers(self) -> list[str]:
        return planned(self.run.pipeline.stages, self.run.pipeline.replicas)


def _access(network: NetworkConfig) -> Access:
    up, down = (rate or math.inf for rate in (network.up_mbit_per_s, network.down_mbit_per_s))
    return Access(up_bytes_per_s=up * MBIT_BYTES, down_bytes_per_s=down * MBIT_BYTES)


def base(transformer: bool, stages: int | None = None) -> RunConfig:
    """Return the run that a scenario without a run file begins from, with a layer for each of `stages` at least."""
    sizes = {
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": max(4, stages or 0),
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return RunConfig(
        name="simulated",
        model=ModelConfig(architecture="llama", sizes=sizes),
        pipeline=PipelineConfig(
            sequence_length=32 if transformer else 1,
            microbatch_size=2 if transformer else 1,
            microbatches_per_step=4,
        ),
        inner=InnerConfig(steps=100, learning_rate=5e-3 if transformer else 0.05, warmup_steps=0),
        outer=OuterConfig(inner_steps_per_round=5, overlap_steps=2),
    )


def build_setup(scenario: Scenario) -> SimSetup:
    """Work a scenario out; raise `UserError` where its run file is wrong, or does not go with the rest."""
    swarm, transformer = scenario.swarm, scenario.swarm.model == "transformer"
    start = base(transformer, swarm.stages) if swarm.run is None else load_run(Path(swarm.run))
    real = run = _run(start, swarm, scenario.seed)
    validate(run, f"the scenario {scenario.name}")
    stages, replicas = run.pipeline.stages, run.pipeline.replicas
    if stages * replicas > MOST_PEERS:
        what = f"The scenario {scenario.name} has {stages * replicas} peers."
        raise config_error(what, f"{MOST_PEERS} are simulated at most", "fewer stages or replicas")
    plan = None
    if transformer or swarm.run is not None:
        from noloco_node.planning.model_layout import make_stage, model_layout

        plan = model_layout(run)
    if not transformer:
        run = _with_shapes_of_bowls(run)
    if not swarm.impatient:
        run = structs.replace(run, pipeline=structs.replace(run.pipeline, budget_s=FOREVER_S))
    prices = _prices(scenario, real, plan)
    size, centre = (WIDE, WIDE_CENTRE) if swarm.model == "wide quadratic" else (SIZE, 0.0)
    layout = quadratic_layout(stages, [price.forward_s for price in prices], size)
    sizes = MessageSizes(scenario, real, plan)
    largest_bytes = max(sizes.stage_bytes)
    dimensions: Dimensions = plan if plan is not None and transformer else layout
    access = _access(scenario.network)

    def build(number: int) -> StageModel:
        if plan is not None and transformer:
            return make_stage(run, plan, number, torch.device("cpu"))
        return QuadraticModel(number, size, centre)

    return SimSetup(
        scenario=scenario,
        recipe=RunFileText.made(run),
        dimensions=dimensions,
        prices=prices,
        build=build,
        sizes=sizes,
        faults=faults.unfold(scenario.fault, planned(stages, replicas), scenario.seed),
        microbatch_tokens=real.pipeline.microbatch_tokens,
        parameters=0 if plan is None else sum(sizes.stage_bytes) // 4,
        slowest_bytes_per_s=SLOWEST_BYTES_PER_S * QUADRATIC_BYTES.get(swarm.model, largest_bytes) / largest_bytes,
        line_s=_line_seconds(access, real, plan) if plan is not None and swarm.choose_stages else (),
        access=access,
    )


def _line_seconds(line: Access, run: RunConfig, plan: ModelLayout) -> tuple[float, ...]:
    moved = [microbatch_bytes(run, plan, stage) for stage in run.pipeline.all_stages]
    return tuple(max(each.up / line.up_bytes_per_s, each.down / line.down_bytes_per_s) for each in moved)


def _run(start: RunConfig, swarm: SwarmConfig, seed: int) -> RunConfig:
    given: dict[str, dict[str, Any]] = {"pipeline": {}, "inner": {}, "outer": {}, "data": {}}
    for name, (section, _) in RUN_FIELDS.items():
        if (value := getattr(swarm, name)) is not None:
            given[section][name] = value
    if swarm.stages is not None:
        given["pipeline"].setdefault("boundaries", None)
    outer = replace(start.outer, **given["outer"])
    early, late = outer.inner_steps_per_round, outer.late_inner_steps_per_round
    # A default is made to fit between any two rounds.
    overlap = outer.overlap_steps if swarm.overlap_steps is not None else min(outer.overlap_steps, (late or early) - 1)
    outer = replace(outer, overlap_steps=min(overlap, early - 1))
    inner = replace(start.inner, **given["inner"])
    if swarm.rounds is not None:
        inner = replace(inner, steps=math.ceil(swarm.rounds * mean_steps_per_round(outer)))
    inner = replace(inner, warmup_steps=min(inner.warmup_steps, inner.steps - 1))
    pipeline = structs.replace(start.pipeline, **given["pipeline"])
    data = structs.replace(start.data, **given["data"])
    return structs.replace(start, seed=seed, pipeline=pipeline, inner=inner, outer=outer, data=data)


def _with_shapes_of_bowls(run: RunConfig) -> RunConfig:
    """Return the run with the activations of a quadratic model, one number: other shapes would only cost time."""
    pipeline = structs.replace(
        run.pipeline, sequence_length=1, microbatch_size=1, codec="float32", subspace=None, boundaries=None
    )
    return structs.replace(run, pipeline=pipeline)


def _prices(scenario: Scenario, run: RunConfig, plan: ModelLayout | None) -> tuple[Prices, ...]:
    devices, stages = scenario.devices, run.pipeline.stages
    prices = (Prices(forward_s=devices.forward_s, step_s=devices.step_s),) * stages
    if plan is None:
        return prices
    if devices.tflops is not None:
        per_s = devices.tflops * 1e12
        tokens = run.pipeline.microbatch_tokens
        coding_s = coding_seconds(run, plan.width, per_s)
        prices = tuple(
            Prices(
                forward_s=tokens * flops / per_s,
                backward=plan.backward,
                step_s=devices.step_s + orthogonal_seconds(run, plan, number, per_s),
                coding_s=coding_s * ((number > 0) + (not run.pipeline.is_last(number))),
            )
            for number, flops in enumerate(plan.work)
        )
    if devices.memory_gib is None:
        return prices
    # GPUs of this memory keep the graphs that it holds.
    memory_bytes = devices.memory_gib * 2**30
    free, found = free_of_gpu(memory_bytes), []
    usable = usable_bytes(free)
    for number, resident in enumerate(memories(run, plan, half=run.precision == "auto")):
        memory = resident.placed(usable, math.inf)
        if memory.computing > usable:
            raise config_error(
                f"Stage {number} does not fit on devices of {format_bytes(memory_bytes)}.",
                f"it takes {format_bytes(memory.computing)} at least, and {format_bytes(usable)} may be used",
                "more stages, or a larger devices.memory_gib",
            )
        kept = graphs_that_fit(int(free), memory.computing, memory.graphs, run.pipeline.in_flight(number))
        step_s = prices[number].step_s + memory.moments_beside / BUS_BYTES_PER_S
        found.append(prices[number]._replace(step_s=step_s, graphs=kept.number, by_layers=kept.by_layers))
    return tuple(found)
