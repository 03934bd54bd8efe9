"""How a node claims a stage: it measures itself, announces its choice, reads the roster again, and yields if it must.

It builds the stage that the roster says is the weakest, takes made-up microbatches through it (`measure`), and reads
the roster once more. From then on it knows its speed at every stage, because all peers know what a microbatch costs at
each. It leaves out stages that do not fit its memory (`noloco_node.machine.memory`), first by the plan and then by what
a microbatch was measured to keep. Where nothing fits it leaves before it copies anything: memory that runs out later
costs a window, and perhaps the owner's other programs.

Newcomers that choose alike compute the same answer from the same records (`pipeline.placement`), so only as many move
as must. That takes one reading as a rule, and a few where rosters disagree. A newcomer that is still not sure after
`CLAIMS` readings stays where it is: one replica too many does no harm, and waiting for ever does.

A node whose owner names its stage takes that stage if it fits without any reserve, measures nothing, and moves for
nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count, pairwise
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine.interface import ComputeHost, Dimensions, StageModel
from noloco_node.machine.memory import usable_bytes, wanted_bytes
from noloco_node.node.node_context import NodeContext, StageRequest
from noloco_node.run.config import PipelineConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import Roster
from noloco_node.units import format_bytes
from pipeline.messages import ACTIVATION_CODECS, ActivationCode
from pipeline.placement import StageClaim, capacities, choose_stage, parse_stage, reason, should_yield, stages_that_fit

if TYPE_CHECKING:
    from torch import Tensor

LOOKS = 5
"""Readings of the roster that may fail before a newcomer gives up."""
AGAIN_S = 30.0
"""Between two later readings of who moves, and does not give up."""
SETTLE_S = 1.0
"""Between a claim and its second reading: time for a claim made at the same moment to be seen."""
CLAIMS = 8
"""Announced at most, one after the other."""
TIMES = 2
LOGITS_BESIDE = 3
"""Of the last stage: beside the softmax that autograd keeps its pass holds the logits, and the gradients of both."""


class ClaimedStage(NamedTuple):
    """The stage that was claimed, and its slice where it has been built for a measurement."""

    number: int
    stage: StageModel | None = None


class _OwnCapacity(NamedTuple):
    """What a newcomer knows of itself: where it fits, and its device seconds a microbatch at each stage, 0 unknown."""

    fits: tuple[int, ...]
    device_s: tuple[float, ...]

    def speed(self, stage: int) -> float:
        return 1.0 / self.device_s[stage] if self.device_s[stage] > 0.0 else 0.0


def claims_of(roster: Roster) -> list[StageClaim]:
    """Return the records of all who serve a stage, or are about to, as decisions read them."""
    return [
        StageClaim(
            record.peer,
            record.stage,
            record.claimed_at,
            settled=record.state is not PeerState.JOINING,
            device_s=record.device_s,
            # A newcomer that says nothing goes anywhere; a replica that says nothing stays.
            may_serve=record.may_serve or (None if record.state is PeerState.JOINING else ()),
            moves_to=record.moves_to,
            training=record.state is PeerState.TRAINING,
        )
        for records in roster.stages
        for record in records
        if record.state is not PeerState.FINISHED
    ]


def servable(context: NodeContext) -> range:
    """Return the stages at which others can reach this peer; its own calls are all that the first one needs."""
    return range(context.run.pipeline.stages if context.network.dialable else 1)


class FreeMemory(NamedTuple):
    """Bytes that are free: of the device, and of main memory beside it; None where nobody knows it."""

    device: int | None
    beside: int | None


def free_memory(host: ComputeHost, given_back: int | None = None) -> FreeMemory:
    """Return what is free. `given_back`: the stage that we serve until then."""

    def own(needs: list[int]) -> int:
        return needs[given_back] if needs and given_back is not None else 0

    beside = host.free_beside_bytes()
    return FreeMemory(
        host.free_bytes(own(host.needs_bytes)), None if beside is None else beside + own(host.beside_bytes)
    )


def fitting_stages(host: ComputeHost, free: FreeMemory, stages: int) -> tuple[int, ...]:
    """Return the stages that fit the device, and main memory beside it."""
    device, beside = (None if each is None else int(usable_bytes(each)) for each in free)
    both = stages_that_fit(host.needs_bytes, device, stages), stages_that_fit(host.beside_bytes, beside, stages)
    return tuple(stage for stage in both[0] if stage in both[1])


def _does_not_fit(host: ComputeHost, free: FreeMemory, stages: Sequence[int], *, reserve: bool) -> UserError:
    """Return the refusal of these stages. `reserve`: they want more memory to be free than they need."""

    def size(needs: int) -> str:
        return format_bytes(wanted_bytes(needs) if reserve else needs)

    has = "unknown" if free.device is None else format_bytes(free.device)
    if host.beside_bytes and free.beside is not None:
        has += f" of the device and {format_bytes(free.beside)} of main memory"
    wants = ", ".join(
        f"stage {stage} wants {size(host.needs_bytes[stage])}"
        + (f" and {size(host.beside_bytes[stage])} of main memory" if host.beside_bytes else "")
        for stage in stages
    )
    return UserError(
        f"Stage {stages[0]} does not fit in memory here." if len(stages) == 1 else "No stage fits in memory here.",
        why=f"free and allowed: {has}; {wants}" + (", a fifth of it in reserve" if reserve else ""),
        hint="end other programs, allow more with --max-memory, or join a run with more stages",
        code=Exit.DEVICE,
    )


async def claim_stage(context: NodeContext, request: StageRequest, served: int | None) -> ClaimedStage:
    """Claim the stage that the owner asked for, or the one that limits the swarm. `served`: in an earlier session."""
    await _read_roster(context)
    if request.stage is not None:
        return await _claim_requested(context, request.stage, request.device_s)
    if not context.network.dialable:
        context.reporter.say("looking at stage 0 alone, which dials the others: nobody can dial us")
    membership, work, fitting = context.membership, context.dimensions.work, _FittingStages(context)
    rng = Random(f"{context.run.seed}|placement|{context.me}")
    stage = choose_stage(capacities(claims_of(membership.roster), work), fitting.stages(), rng, served)
    part = await build_stage(context.host, stage)
    device_s, kept_bytes = await _measure(context, part, stage)
    fitting.correct(stage, kept_bytes)
    own = _OwnCapacity(fitting.stages(), device_s)
    # Others may have come while we were building.
    await membership.peek()
    capacity = capacities(claims_of(membership.roster), work)
    built, stage = stage, choose_stage(capacity, own.fits, rng, stage)
    _report_choice(context, stage, reason(stage, capacity, own.speed(stage)), own)
    stage = await _settle(context, stage, own)
    return ClaimedStage(stage, part if stage == built else None)


async def build_stage(host: ComputeHost, number: int) -> StageModel:
    """Build a stage; raise `UserError` where this machine cannot."""
    try:
        return await host.device.run(host.build, number)
    except (MemoryError, RuntimeError, OSError, ValueError) as error:
        raise UserError(
            f"Stage {number} could not be built.",
            why=_in_a_line(error),
            hint="another stage with --stage, or another --device; noloco-node doctor INVITE tells what fits",
            code=Exit.DEVICE,
        ) from error


async def _read_roster(context: NodeContext) -> None:
    """Read who is there until the DHT has answered for all stages."""
    for look in count(1):
        roster = await context.membership.peek()
        if context.membership.complete:
            return
        # Whoever moves takes part already, and knows that others do: it waits as long as it takes.
        moves = any(record.peer == context.me for records in roster.stages for record in records)
        if look >= LOOKS and not moves:
            break
        context.reporter.say("the DHT did not answer; asking again who is there")
        await asyncio.sleep(SETTLE_S if look < LOOKS else AGAIN_S)
    raise UserError(
        "Nobody could tell who takes part in the run.",
        why=f"the DHT did not answer {LOOKS} times in a row",
        hint="start the node again in a minute; if it happens again, ask whoever sent the invite",
        code=Exit.UNREACHABLE,
    )


async def _claim_requested(context: NodeContext, requested: int, device_s: float) -> ClaimedStage:
    try:
        stage = parse_stage(requested, context.run.pipeline.stages)
    except ValueError as error:
        raise UserError(
            f"There is no stage {requested}.",
            why=str(error).partition(": ")[2],
            hint="leave out --stage, or choose one that is there",
            code=Exit.USAGE,
        ) from error
    if stage not in servable(context):
        context.reporter.say(
            f"nobody can dial us, and stage {stage} lives on calls: expect no work; stage 0 needs none"
        )
    host, free = context.host, free_memory(context.host)
    both = ((host.needs_bytes, free.device), (host.beside_bytes, free.beside))
    # A replica that moves knows its speed, has compared before it left, and may not have all of its memory back yet.
    moves = device_s > 0.0
    if not moves and any(has is not None and needs and needs[stage] > has for needs, has in both):
        raise _does_not_fit(host, free, (stage,), reserve=False)
    await context.membership.claim(context.claim_record(stage, PeerState.CATCHING_UP, device_s))
    return ClaimedStage(stage)


class _FittingStages:
    """Which stages fit the memory that is free before one is built: by the plan, until one is measured.

    For whoever can only dial that is the first stage or none: all others are dialled by the stage before.
    """

    def __init__(self, context: NodeContext) -> None:
        self._pipeline, self._host, self._say = context.run.pipeline, context.host, context.reporter.say
        self._within, self._free = servable(context), free_memory(context.host)

    def stages(self) -> tuple[int, ...]:
        """Return the stages to choose from, those that fit; raise `UserError` (Exit.DEVICE) where none does."""
        fits = fitting_stages(self._host, self._free, self._pipeline.stages)
        fits = tuple(stage for stage in fits if stage in self._within)
        if not fits:
            raise _does_not_fit(self._host, self._free, self._within, reserve=True)
        return fits

    def correct(self, stage: int, kept_bytes: int) -> None:
        """Correct what a stage needs, given what a microbatch was seen to keep."""
        needs, graph, free = self._host.needs_bytes, self._host.graph_bytes, self._free.device
        if not (needs and graph and kept_bytes):
            return
        planned, measured = needs[stage], needs[stage] - graph[stage] + kept_bytes
        needs[stage], graph[stage] = measured, kept_bytes
        if free is not None and planned <= usable_bytes(free) < measured:
            self._say(
                f"stage {stage} does not fit: it needs {format_bytes(measured)} by what a microbatch takes"
                f" ({format_bytes(planned)} by the plan), and {format_bytes(usable_bytes(free))} of the"
                f" {format_bytes(free)} that are free may be used"
            )


async def _measure(context: NodeContext, stage: StageModel, number: int) -> tuple[tuple[float, ...], int]:
    """Take a microbatch through a stage. Return the seconds of one at every stage, on the device or on the line, and
    the bytes that it keeps at this one.
    """
    host, work, stages = context.host, context.dimensions.work, context.run.pipeline.stages
    probe = await host.device.run(measure, stage, number, context.run.pipeline, context.dimensions, host.device.clock)
    device_s = tuple(max(probe.device_s * work[each] / work[number], host.line_s(each)) for each in range(stages))
    return device_s, probe.kept_bytes


async def _settle(context: NodeContext, stage: int, own: _OwnCapacity) -> int:
    """Announce a stage, read again, and move if another newcomer chose alike; return where we stay."""
    membership, work = context.membership, context.dimensions.work
    claim = context.claim_record(stage, PeerState.JOINING, own.device_s[stage], own.fits)
    for left in reversed(range(CLAIMS)):
        await membership.claim(structs.replace(claim, stage=stage, device_s=own.device_s[stage]))
        await asyncio.sleep(SETTLE_S)
        await membership.peek()
        claims = claims_of(membership.roster)
        elsewhere = should_yield(context.me, claims, work) if left else None
        if elsewhere is None:
            break
        capacity = capacities([each for each in claims if each.peer != context.me], work)
        rivals = any(each.peer != context.me and each.stage == stage and not each.settled for each in claims)
        news = f"another newcomer chose stage {stage} too" if rivals else "the swarm is another one by now"
        why = f"{news}; {reason(elsewhere, capacity, own.speed(elsewhere))}"
        _report_choice(context, elsewhere, why, own)
        stage = elsewhere
    return stage


def _report_choice(context: NodeContext, stage: int, why: str, own: _OwnCapacity) -> None:
    context.reporter.say(f"taking stage {stage}: {why}")
    context.reporter.record(events.Placed(stage=stage, why=why, device_s=own.device_s[stage]))


def _in_a_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__


class StageBenchmark(NamedTuple):
    """What a microbatch takes: device seconds, forward and backward, and bytes that lie between the two passes.

    `kept_bytes` does without the weights, which are there anyway; 0 from a stage without autograd.
    """

    device_s: float
    kept_bytes: int


def measure(
    stage: StageModel, number: int, pipeline: PipelineConfig, layout: Dimensions, clock: Callable[[], float]
) -> StageBenchmark:
    """Return what a microbatch takes at stage `number`; a job of the device's thread, as is `clock`.

    A made-up microbatch of the run's shapes goes forward and backward through the real stage, twice. The faster pass
    counts, since the first one also pays for what a device does once; in the first pass the kept bytes are counted. A
    GPU is only known to have done its work when a number comes back from it, and a source's backward pass returns none.
    So time runs from one output to the next: a backward and a forward pass, in either order.
    """
    import torch

    from noloco_node.machine.memory import SavedTensors
    from pipeline.activation_codec import encode
    from pipeline.forward_pass import LOGITS

    generator = torch.Generator().manual_seed(0)
    shape = (pipeline.microbatch_size, pipeline.sequence_length)

    def ids(shape: tuple[int, int]) -> Tensor:
        return torch.randint(layout.vocabulary, shape, generator=generator)

    def numbers(code: ActivationCode) -> Tensor:
        return encode(code, torch.randn((*shape, layout.width), generator=generator))

    codec = ACTIVATION_CODECS[pipeline.codec]
    hidden, gradient = ids(shape) if number == 0 else numbers(codec.down), numbers(codec.back)
    targets = ids(pipeline.targets_shape)
    marks, saved = [], SavedTensors()
    if number == pipeline.stages - 1:
        marks.append(clock())
        for attempt in range(TIMES):
            with nullcontext() if attempt else saved:
                stage.loss(hidden, targets)
            marks.append(clock())
    else:
        for attempt in range(TIMES):
            with nullcontext() if attempt else saved:
                passed = stage.forward(hidden, targets)
            marks.append(clock())
            passed.backward(gradient)
        stage.forward(hidden, targets)
        marks.append(clock())
    stage.discard()
    last = saved.bytes and number == pipeline.stages - 1
    beside = LOGITS_BESIDE * 4 * min(LOGITS, layout.vocabulary * targets.numel()) if last else 0
    return StageBenchmark(min(after - before for before, after in pairwise(marks)), saved.bytes + beside)
