"""What a scenario means: the run that its peers train, what a pass costs them, and what a message weighs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from gossip.exchange.formats import Format, wire_bytes
from gossip.exchange.messages import Piece, Probe, ReplicaState, Weights
from noloco_node.errors import Exit, UserError
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S
from noloco_node.planning.message_sizes import PROBE_BYTES
from noloco_node.planning.plan import mean_steps_per_round
from noloco_node.run.config import InnerConfig, ModelConfig, OuterConfig, PipelineConfig, RunConfig
from noloco_node.run.protocols import GOSSIP, STATE
from noloco_node.run.runfile import load_run, validate
from noloco_node.sim.hardware.priced_stage import Prices
from noloco_node.sim.hardware.quadratic_model import SIZE, QuadraticModel, quadratic_layout
from noloco_node.sim.network.link_model import Access, NetworkConditions
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.scenario import MOST_PEERS, Scenario, SwarmConfig, planned
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.messages import Gradient, Microbatch

if TYPE_CHECKING:
    from noloco_node.machine.interface import Dimensions, StageModel
    from noloco_node.planning.model_layout import ModelLayout
    from noloco_node.sim.scenario.faults import Fault

FOREVER_S = 1e9
"""A deadline that no simulation reaches."""
FRAME_BYTES = 100
"""Of a message without tensors."""
MBIT_BYTES = 1e6 / 8
WEIGHT_SETS = 4
"""Sets of weights in a whole state: slow weights, momentum, two moments."""


class SimSetup(NamedTuple):
    """A scenario worked out.

    `prices`: by stage. `build`: makes a stage's arithmetic. `size_bytes`: of a message, by its topic. `faults`: the
    scenario's, each churn as the departures and returns that it stands for.
    `microbatch_tokens`: that a microbatch stands for, also where a bowl computes.
    """

    scenario: Scenario
    recipe: RunFileText
    dimensions: Dimensions
    prices: tuple[Prices, ...]
    build: Callable[[int], StageModel]
    size_bytes: Callable[[object, str], int]
    conditions: NetworkConditions
    faults: tuple[Fault, ...]
    microbatch_tokens: int
    parameters: int = 0
    """Of the run file's whole model; 0 where there is none."""
    slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S
    """By which nodes reckon their deadlines: from the weights in their hands, and a bowl's are small."""

    @property
    def run(self) -> RunConfig:
        """The run's config."""
        return self.recipe.run

    @property
    def peers(self) -> list[str]:
        """The planned peers, stage by stage."""
        return planned(self.run.pipeline.stages, self.run.pipeline.replicas)

    def access(self) -> Access:
        """Return the line of a peer that no fault has touched."""
        network = self.scenario.network
        up, down = network.up_mbit_per_s, network.down_mbit_per_s
        return Access(
            up_bytes_per_s=math.inf if up is None else up * MBIT_BYTES,
            down_bytes_per_s=math.inf if down is None else down * MBIT_BYTES,
        )


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
    run = _run(start, swarm, scenario.seed)
    validate(run, f"the scenario {scenario.name}")
    if run.pipeline.stages * run.pipeline.replicas > MOST_PEERS:
        raise UserError(
            f"The scenario {scenario.name} has {run.pipeline.stages * run.pipeline.replicas} peers.",
            why=f"{MOST_PEERS} are simulated at most",
            hint="fewer stages or replicas",
            code=Exit.CONFIG,
        )
    plan = _layout(run) if transformer or swarm.run is not None else None
    if not transformer:
        run = _with_shapes_of_bowls(run)
    if not swarm.impatient:
        run = structs.replace(run, pipeline=structs.replace(run.pipeline, budget_s=FOREVER_S))
    prices = _prices(scenario, run, start, plan)
    bowls = quadratic_layout(run.pipeline.stages, [price.forward_s for price in prices])
    dimensions: Dimensions = plan if plan is not None and transformer else bowls
    return SimSetup(
        scenario=scenario,
        recipe=RunFileText.made(run),
        dimensions=dimensions,
        prices=prices,
        build=_transformers(run, plan) if plan is not None and transformer else QuadraticModel,
        size_bytes=_sizes(scenario, start, run.outer, plan),
        conditions=_conditions(scenario),
        faults=faults.unfold(scenario.fault, planned(run.pipeline.stages, run.pipeline.replicas), scenario.seed),
        microbatch_tokens=start.pipeline.microbatch_size * start.pipeline.sequence_length,
        parameters=0 if plan is None else sum(math.prod(shape) for part in plan.shapes for shape in part.values()),
        slowest_bytes_per_s=SLOWEST_BYTES_PER_S * (1.0 if transformer else 4 * SIZE / _weights_bytes(scenario, plan)),
    )


def _run(start: RunConfig, swarm: SwarmConfig, seed: int) -> RunConfig:
    def given(**fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    pipeline = structs.replace(
        start.pipeline,
        **given(
            stages=swarm.stages,
            replicas=swarm.replicas,
            microbatches_per_step=swarm.microbatches_per_step,
            windows_in_flight=swarm.windows_in_flight,
            budget_s=swarm.budget_s,
        ),
    )
    if swarm.stages is not None and start.pipeline.boundaries is not None:
        pipeline = structs.replace(pipeline, boundaries=None)
    per_round = swarm.inner_steps_per_round or start.outer.inner_steps_per_round
    late = swarm.late_inner_steps_per_round or start.outer.late_inner_steps_per_round
    overlap = swarm.overlap_steps
    if overlap is None:  # a default is made to fit between any two rounds
        overlap = min(start.outer.overlap_steps, (late or per_round) - 1)
    outer = structs.replace(
        start.outer,
        inner_steps_per_round=per_round,
        late_inner_steps_per_round=late,
        overlap_steps=min(overlap, per_round - 1),
        **given(
            dynamic_steps=swarm.dynamic_steps,
            blocking=swarm.blocking,
            codec=swarm.codec,
            alpha=swarm.alpha,
            beta=swarm.beta,
            gamma=swarm.gamma,
            momentum_period=swarm.momentum_period,
            staleness_at_most=swarm.staleness_at_most,
        ),
    )
    steps = None if swarm.rounds is None else math.ceil(swarm.rounds * mean_steps_per_round(outer))
    inner = structs.replace(start.inner, **given(steps=steps, learning_rate=swarm.learning_rate))
    inner = structs.replace(inner, warmup_steps=min(inner.warmup_steps, inner.steps - 1))
    return structs.replace(start, seed=seed, pipeline=pipeline, inner=inner, outer=outer)


def _with_shapes_of_bowls(run: RunConfig) -> RunConfig:
    """A bowl's activations are one number: the run's other shapes would only cost time."""
    pipeline = structs.replace(
        run.pipeline, sequence_length=1, microbatch_size=1, wire_dtype="float32", boundaries=None
    )
    return structs.replace(run, pipeline=pipeline)


def _layout(run: RunConfig) -> ModelLayout:
    from noloco_node.planning.model_layout import model_layout

    return model_layout(run)


def _transformers(run: RunConfig, plan: ModelLayout) -> Callable[[int], StageModel]:
    def build(number: int) -> StageModel:
        import torch

        from noloco_node.planning.model_layout import make_stage

        return make_stage(run, plan, number, torch.device("cpu"))

    return build


def _prices(scenario: Scenario, run: RunConfig, start: RunConfig, plan: ModelLayout | None) -> tuple[Prices, ...]:
    devices, stages = scenario.devices, run.pipeline.stages
    if devices.tflops is None or plan is None:
        return (Prices(forward_s=devices.forward_s, step_s=devices.step_s),) * stages
    tokens = start.pipeline.microbatch_size * start.pipeline.sequence_length
    return tuple(
        Prices(forward_s=tokens * flops / (devices.tflops * 1e12), step_s=devices.step_s) for flops in plan.work
    )


def _sizes(
    scenario: Scenario, start: RunConfig, outer: OuterConfig, plan: ModelLayout | None
) -> Callable[[object, str], int]:
    """Return what messages weigh, by kind and topic: as the run file's would, or as the scenario says."""
    network = scenario.network
    codec = Format(outer.codec)
    # Of each topic: the sets of weights that a message brings, each as the codec has it; a probe; a whole state.
    unknown = round(network.weights_bytes * wire_bytes(codec, [(2**20,)]) / 2**22)
    weights: dict[str, int] = {}
    probes: dict[str, int] = {}
    states: dict[str, int] = {}
    microbatch, targets = network.microbatch_bytes, 0
    if plan is not None:
        tokens = start.pipeline.microbatch_size * start.pipeline.sequence_length
        microbatch, targets = tokens * plan.width * (2 if start.pipeline.wire_dtype == "bfloat16" else 4), 8 * tokens
        for number, shapes in enumerate(plan.shapes):
            total = 4 * sum(math.prod(shape) for shape in shapes.values())
            weights[f"{GOSSIP}/{number}"] = wire_bytes(codec, tuple(shapes.values()))
            probes[f"{GOSSIP}/{number}"] = min(PROBE_BYTES, total)
            states[f"{STATE}/{number}"] = WEIGHT_SETS * total

    def size_bytes(message: object, topic: str) -> int:
        if isinstance(message, Microbatch | Gradient):
            return FRAME_BYTES + microbatch + (targets if isinstance(message, Microbatch) else 0)
        if isinstance(message, Weights):
            brought = bool(message.fast) + bool(message.slow)
            return FRAME_BYTES + brought * weights.get(topic, unknown)
        if isinstance(message, Probe):
            return FRAME_BYTES + (1 + (message.fast is not None)) * probes.get(topic, 0)
        if isinstance(message, ReplicaState):
            return FRAME_BYTES + states.get(topic, WEIGHT_SETS * network.weights_bytes)
        if isinstance(message, Piece):
            # A share of a section, which is as large as the weights, or as those that a bowl stands for.
            whole = states.get(topic, WEIGHT_SETS * network.weights_bytes) // WEIGHT_SETS
            here = whole if scenario.swarm.model == "transformer" else 4 * SIZE
            return FRAME_BYTES + message.data.nbytes * whole // here
        return FRAME_BYTES

    return size_bytes


def _weights_bytes(scenario: Scenario, plan: ModelLayout | None) -> int:
    """Return what the weights of the largest stage stand for."""
    if plan is None:
        return scenario.network.weights_bytes
    return max(4 * sum(math.prod(shape) for shape in shapes.values()) for shapes in plan.shapes)


def _conditions(scenario: Scenario) -> NetworkConditions:
    network = scenario.network
    return NetworkConditions(
        latency=network.latency,
        loss=network.loss,
        late=network.late,
        late_s=network.late_s,
        duplicate=network.duplicate,
        roster_lag_s=network.roster_lag_s,
    )
