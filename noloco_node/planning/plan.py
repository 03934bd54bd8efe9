"""What a run file means before anybody trains: memory, traffic, tokens, and how busy the slowest stage will be.

Parameters and bytes are exact, as the wire and the optimiser have them. Work is floating-point operations of matrices
and attention. Microbatches of one window, or two, wait for their gradients at once, except at the last stage; their
graphs are kept while there is room, and otherwise computed again.
"""

from __future__ import annotations

from math import log, prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from gossip.settings import OuterConfig
from noloco_node.data.encoding import check_vocabulary
from noloco_node.machine.memory import GraphBytes, bytes_beside, usable_bytes
from noloco_node.planning.bandwidth import float32_bytes, gossip_memory, hop_bytes, round_bytes
from noloco_node.planning.windows import BUSY, WindowSuggestion, predict_efficiency, suggest_windows
from noloco_node.run.config import RunConfig
from noloco_node.run.runfile import content_hashes, run_digest
from pipeline.inner_step import is_coded, moment_bytes, orthogonal_bytes
from pipeline.messages import ACTIVATION_CODECS

if TYPE_CHECKING:
    from noloco_node.planning.model_layout import ModelLayout

_UNEVEN = 1.3
LEAST_STEPS = 400
"""Inner steps of a replica: the shortest run of this project that learns to speak of (the preset tiny). In fewer, AdamW
has hardly warmed up, and a batch is wasted on each."""
LEAST_ROUNDS = 20
"""That a replica opens. Each doubles the replicas that know of a step at best, so twenty mix the largest swarm."""
_DEEP, _IDLE = 4, 0.7  # more stages than this, and less of their time at work, are cause for a warning
_SPARE = 1.1
"""Times a planned graph, what room is made for: a measured one may be larger, and other programs take memory."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a peer of one stage needs."""

    weights: int  # in float32, or the multiplied ones in bfloat16 with a correction of a byte each
    frozen: int  # what adapters are trained over, in the form that the run file names
    unpacked: int  # the largest matrix of it, in the type in which it is multiplied, where that is another
    gradients: int  # in float32, or in bfloat16 where the weights are so
    optimiser: int  # AdamW's two moments on the device, in the form that the run file names
    coded_moments: int  # of those, the ones that can lie in main memory instead
    moments_beside: int  # moments in main memory, where the device has no room for them
    orthogonal_step: int  # of the largest matrix, and what it takes to make it orthogonal, where the run file says so
    slow_weights: int
    outer_momentum: int
    snapshot: int
    """Of the fast weights, which becomes the correction; with a lossy codec a difference from the slow ones."""
    exchange: int  # the weights of both sides as they travel, until the step of their meeting has been taken
    adopted: int  # the weights of one side as they travel to a side that adopts them
    ahead: int  # slow weights of both sides, where they travel ahead of time
    gathered: int  # what a period of the outer momentum has gathered
    cast_weights: int  # the multiplied weights in bfloat16, where `weights` holds them in float32
    stale_weights: int  # those before the last inner step, with two windows in flight; the last stage has one always
    graph: int  # what autograd keeps of one microbatch at least, where the backward pass computes each layer again
    whole_graph: int  # what it keeps otherwise, while there is room
    waiting: int
    """Inputs and outputs of the microbatches that wait for their gradient, as they travel; in main memory always."""
    other_graphs: int  # whole ones of the other microbatches in flight, while there is room

    @property
    def phases(self) -> dict[str, int]:
        """What a replica needs beside what a GPU computes with, by phase. Checkpoints and copies take no more.

        In steps it keeps the memory of its last snapshot; where the device computes in main memory it does not.
        """
        lasting = self.slow_weights + self.outer_momentum + self.gathered + self.moments_beside
        steps = lasting + self.ahead + self.waiting
        return {
            "steps": steps + self.snapshot,
            "a round": steps + self.snapshot + self.exchange,
            "adopting": steps + self.snapshot + self.adopted,
            "catching up": lasting + self.optimiser + self.moments_beside,
        }

    @property
    def beside(self) -> int:
        """What a replica with a GPU needs of main memory, in the phase that needs most."""
        return max(self.phases.values())

    @property
    def total(self) -> int:
        """What a replica needs where the device computes in main memory."""
        # A stage that catches up has no gradients yet, and takes less than in a round.
        return self.computing + max(self.phases["a round"], self.phases["adopting"])

    @property
    def computing(self) -> int:
        """What the device computes with: of a GPU's own memory. Gossip's copies lie in the main memory."""
        lasting = self.weights + self.frozen + self.unpacked + self.gradients + self.optimiser + self.cast_weights
        return lasting + self.orthogonal_step + self.stale_weights + self.graph

    def placed(self, gpu: float, ram: float) -> Memory:
        """Return the same with as many moments beside the GPU as `bytes_beside` says.

        `gpu`, `ram`: bytes that it may take of a GPU, and of main memory beside it.
        """
        moments = bytes_beside(self.computing, self.beside, self.coded_moments, self.rest_of_graph, gpu, ram)
        return msgspec.structs.replace(
            self,
            optimiser=self.optimiser - moments,
            coded_moments=self.coded_moments - moments,
            moments_beside=self.moments_beside + moments,
        )

    @property
    def rest_of_graph(self) -> int:
        """What the whole graph takes beyond `graph` where a stage has one microbatch in flight, with some to spare.

        With more in flight it is 0: all but one are computed again then, as long as there is no room for many.
        """
        return 0 if self.other_graphs else max(0, round(_SPARE * self.whole_graph) - self.graph)

    @property
    def graphs(self) -> GraphBytes:
        return GraphBytes(self.whole_graph, self.graph)


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage."""

    layers: tuple[int, int]  # first layer, and the one behind the last
    parameters: int  # those that are trained
    frozen_parameters: int
    flops_per_token: int  # of a forward pass; `backward` says how many times as long a backward pass takes
    work: float  # share of the model's work
    memory: Memory  # on a CPU
    gpu: Memory  # on a GPU: `gpu.computing` of its own memory, `gpu.beside` beside it
    round_bytes: int  # what a peer sends its partner in a round, and receives from it


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    name: str
    run_id: str
    parameters: int
    stages: tuple[StagePlan, ...]
    replicas: int  # planned, of each stage
    hop_down_bytes: int  # a microbatch on its way to the next stage: activations and targets
    hop_up_bytes: int  # its gradient on the way back
    tokens: int  # the budget of the run
    tokens_per_step: int  # of one inner step of one replica
    rounds: int  # that a replica opens, when as many peers come as planned
    fetched_bytes: int  # of the files that the run starts from, all stages together
    backward: float  # what a backward pass takes, in forward passes: less where the model is frozen
    efficiency: tuple[float, ...]  # share of its time for which the slowest stage works, for each of `windows.MESSAGES`
    remedies: tuple[WindowSuggestion, ...]  # other windows that would make it busier
    warnings: tuple[str, ...]


def plan(run: RunConfig) -> RunPlan:
    """Work out what a run means; raise `UserError` (Exit.CONFIG) where model, cut or tokenizer do not fit together."""
    from noloco_node.planning.model_layout import check_hub_weights, model_layout

    drawn = model_layout(run)
    check_hub_weights(run.model, drawn)
    if not run.data.has_travelling_tokenizer:  # whose files `init --from` has compared with the model
        check_vocabulary(run.data, drawn.vocabulary)
    stages = tuple(
        StagePlan(
            layers=(cut.first_layer, cut.end_layer),
            parameters=sum(map(prod, size.shapes.values())),
            frozen_parameters=sum(map(prod, checkpoint.values())) if drawn.adapter is not None else 0,
            flops_per_token=flops,
            work=flops / sum(drawn.work),
            memory=memory,
            gpu=gpu,
            round_bytes=round_bytes(run.outer, tuple(size.shapes.values())),
        )
        for cut, checkpoint, flops, size, memory, gpu in zip(
            drawn.cuts,
            drawn.checkpoint,
            drawn.work,
            drawn.sizes,
            memories(run, drawn),
            memories(run, drawn, half=run.precision == "auto"),
            strict=True,
        )
    )
    hop = hop_bytes(run.pipeline, drawn.width)
    shares = tuple(stage.work for stage in stages)
    passes = 1.0 + drawn.backward
    efficiency = predict_efficiency(run.pipeline, shares, passes)
    return RunPlan(
        name=run.name,
        run_id=run_digest(run, content_hashes(run)),
        parameters=sum(stage.parameters for stage in stages),
        stages=stages,
        replicas=run.pipeline.replicas,
        hop_down_bytes=hop.down if len(stages) > 1 else 0,
        hop_up_bytes=hop.back if len(stages) > 1 else 0,
        tokens=run.tokens(run.budget_samples),
        tokens_per_step=run.tokens(run.samples_per_step),
        rounds=rounds_of(run),
        fetched_bytes=sum(each.size_bytes for each in run.model.fetched),
        backward=drawn.backward,
        efficiency=efficiency,
        remedies=suggest_windows(run.pipeline, shares, passes) if efficiency[1] < BUSY else (),
        warnings=(*_warnings(run, stages, efficiency[1]), *drawn.notes),
    )


def memories(run: RunConfig, drawn: ModelLayout, *, half: bool = False, splits: bool = True) -> tuple[Memory, ...]:
    """Return what a peer of each stage needs.

    `half`: it computes in bfloat16 or float16. `splits`: where weights may have 24 bits it holds them so, as bfloat16
    lets it.
    """
    return tuple(_memory(run, drawn, number, half, splits) for number in range(len(drawn.cuts)))


def memories_on(run: RunConfig, drawn: ModelLayout, device: torch.device) -> tuple[Memory, ...]:
    """Return what a peer of each stage needs with a device, which decides in what format it computes."""
    from noloco_node.machine.device import autocast_dtype

    half = autocast_dtype(device, run.precision)
    return memories(run, drawn, half=half is not None, splits=half is not torch.float16)


class KeptGraphs(NamedTuple):
    """How many passes that wait for their gradient may keep their graph, None for all; and whether by layers."""

    number: int | None = None
    by_layers: bool = False

    def computed_again(self, most: int) -> float:
        """Return the share of passes that are computed again, of `most` in flight."""
        return 1.0 if self.by_layers else 0.0 if self.number is None else max(0.0, 1.0 - self.number / most)


def graphs_that_fit(free: int | None, needs: float, graph: GraphBytes, most: int) -> KeptGraphs:
    """Return which graphs of `most` passes in flight may be kept where a stage `needs` so much with one by layers.

    Graphs are whole where one is: to compute each layer again takes as long as to compute a pass again.
    """
    if free is None:
        return KeptGraphs()
    room = usable_bytes(free) - needs + graph.by_layers
    by_layers = graph.by_layers < graph.whole > room
    number = max(0, int(room // max(1, graph.by_layers if by_layers else graph.whole)) - 1)
    return KeptGraphs(number if number < most - 1 else None, by_layers)


def mean_steps_per_round(outer: OuterConfig) -> float:
    """Return the inner steps of a round on average over a run of equal replicas.

    With progress p, H is early * (late / early)^p, and a run has the steps times the mean of 1 / H rounds.
    """
    early, late = outer.inner_steps_per_round, outer.late_inner_steps_per_round
    return float(early) if late is None or late == early else log(late / early) / (1 / early - 1 / late)


def rounds_of(run: RunConfig) -> int:
    return int(run.inner.steps / mean_steps_per_round(run.outer))


def _memory(run: RunConfig, drawn: ModelLayout, number: int, half: bool, splits: bool) -> Memory:
    from noloco_node.planning.graph_memory import graph_bytes  # which loads transformers

    cut, size, pipeline = drawn.cuts[number], drawn.sizes[number], run.pipeline
    shapes, frozen = tuple(size.shapes.values()), size.frozen
    once = float32_bytes(shapes)
    cast, split = 2 * size.multiplied if half else 0, splits and run.inner.state == "int8"
    multiplied, kept = 2 if half else 4, 4 if run.adapter.base == "float32" else 2
    graph = graph_bytes(pipeline, drawn, number, half=half, packed=run.data.packs)
    at_once, tokens = pipeline.in_flight(number), pipeline.microbatch_tokens
    activations = ACTIVATION_CODECS[pipeline.codec].down.size_bytes(tokens, drawn.width)
    return Memory(
        # Of a multiplied weight the upper half is what passes compute with, and a byte of its float32 is left out.
        weights=once - cast // 2 if split else once,
        frozen=frozen.bytes,
        unpacked=multiplied * max(frozen.coded, 0 if kept == multiplied else frozen.plain),
        gradients=once - cast if split else once,
        optimiser=2 * sum(moment_bytes(shape, run.inner.state) for shape in shapes),
        coded_moments=sum(2 * moment_bytes(shape, "int8") for shape in shapes if is_coded(shape, run.inner.state)),
        moments_beside=0,
        # Stages take it in bfloat16 or float32, never in float16.
        orthogonal_step=max(
            (orthogonal_bytes(shape, 2 if half and splits else 4) for shape in size.matrices), default=0
        )
        if run.inner.orthogonal
        else 0,
        slow_weights=once,
        **gossip_memory(run.outer, shapes),
        cast_weights=0 if split else cast,
        # What is cast has a copy of its own; the rest moves on to one.
        stale_weights=once - cast if pipeline.windows_in_flight == 2 and not cut.head else 0,
        graph=int(graph.by_layers),
        whole_graph=int(graph.whole),
        waiting=at_once * ((8 * tokens if cut.embeds else activations) + (0 if cut.head else activations)),
        other_graphs=(at_once - 1) * int(graph.whole),
    )


def _warnings(run: RunConfig, stages: tuple[StagePlan, ...], efficiency: float) -> list[str]:
    """Name costly choices. `efficiency`: where a message takes as long as a forward pass of the slowest stage."""
    found: list[str] = []
    count, window = len(stages), run.pipeline.microbatches_per_step
    if count > _DEEP and efficiency < _IDLE:
        slow = f"the slowest stage works {efficiency:.0%} of the time where a message takes as long as its forward pass"
        if run.pipeline.windows_in_flight == 1:
            found.append(
                f"{count} stages with one window in flight: each inner step waits until the whole pipeline has run "
                f"dry, and {slow}. Fewer stages, or more microbatches_per_step, help; so does windows_in_flight = 2, "
                "whose gradients are one step stale."
            )
        else:
            found.append(
                f"{count} stages, and windows of {window} microbatches, are too much even for two windows in flight: "
                f"{slow}. Fewer stages, or more microbatches_per_step, help."
            )
    if count > 1 and window < 2 * count:
        found.append(
            f"A window of {window} microbatches is short for {count} stages: give microbatches_per_step "
            f"{2 * count} or more (with a smaller microbatch_size the batch stays the same)."
        )
    for number, stage in enumerate(stages):
        if stage.work * count > _UNEVEN:
            found.append(
                f"Stage {number} has {stage.work * count:.2f} times the mean work, and the others wait for it: "
                "leave boundaries out, take another number of stages, or plan more replicas there."
            )
    if run.pipeline.replicas == 1:
        found.append("One planned replica a stage: nobody gossips, every round is taken alone.")
    elif rounds_of(run) < LEAST_ROUNDS:
        early, late = run.outer.inner_steps_per_round, run.outer.late_inner_steps_per_round
        often, fields = (f"{early}", "") if late is None else (f"{early} to {late}", " and late_inner_steps_per_round")
        found.append(
            f"{run.inner.steps} inner steps with a round every {often}: the replicas hardly ever meet. "
            f"Fewer inner_steps_per_round{fields}, or more steps, for {LEAST_ROUNDS} rounds at least."
        )
    elif run.inner.steps < LEAST_STEPS:
        found.append(
            f"{run.inner.steps} inner steps of a replica are few to learn in. More steps, or a smaller batch, for "
            f"{LEAST_STEPS} at least."
        )
    if run.outer.momentum_period > max(1, rounds_of(run)):
        found.append(
            f"A momentum_period of {run.outer.momentum_period} in a run of {rounds_of(run)} rounds: the outer momentum "
            "never moves. Give a shorter one, or 1 for a momentum that moves in every round."
        )
    return found
