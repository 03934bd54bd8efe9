"""How a node claims a stage: it measures itself, announces its choice, reads the roster again, and yields if it must.

The node builds the stage that is the weakest by the roster, passes made-up microbatches through it (`measure`), and
reads the roster once more. The run file says what a microbatch costs at each stage, so one measurement gives the node
its speed at every stage. The node leaves out stages that do not fit its memory (`noloco_node.machine.memory`), first by
the plan and then by the measurement. If no stage fits, it leaves before it copies anything: memory that runs out later
costs a window, and perhaps the owner's other programs.

Newcomers that choose the same stage compute the same answer from the same records (`pipeline.placement`), so only as
many yield as must. After `CLAIMS` readings a newcomer stays where it is: one replica too many does no harm.

A node whose owner names a stage takes it if it fits without a reserve, by the plan and by the measurement, and never
yields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from msgspec import structs

from noloco_node.errors import Exit, UserError, usage_error
from noloco_node.journal import events
from noloco_node.machine.interface import Host, StageModel
from noloco_node.machine.memory import GraphBytes, usable_bytes, wanted_bytes
from noloco_node.node.node_context import NodeContext, StageRequest
from noloco_node.node.stage_benchmark import measure
from noloco_node.planning.plan import graphs_that_fit
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import Roster
from noloco_node.units import format_bytes, format_duration
from pipeline.placement import StageClaim, capacities, choose_stage, parse_stage, reason, should_yield, stages_that_fit

LOOKS = 5  # failed readings of the roster after which a newcomer gives up
AGAIN_S = 30.0  # pause between later readings of a replica that moves: it does not give up
SETTLE_S = 1.0  # pause between a claim and the reading after it, in which claims of the same moment arrive
CLAIMS = 8  # the most claims that a newcomer announces
MORE_MEMORY = "end other programs, allow more with --max-memory or --max-ram, or join a run with more stages"


class ClaimedStage(NamedTuple):
    """The number of the claimed stage, and its slice if the node built it for the measurement."""

    number: int
    stage: StageModel | None = None


class _OwnCapacity(NamedTuple):
    """The stages that fit a newcomer, and its device seconds of a microbatch at each stage; 0 is unknown."""

    fits: tuple[int, ...]
    device_s: tuple[float, ...]

    def speed(self, stage: int) -> float:
        return 1.0 / self.device_s[stage] if self.device_s[stage] > 0.0 else 0.0


def claims_of(roster: Roster) -> list[StageClaim]:
    """Return the records of all peers that serve a stage, or join one, as `pipeline.placement` reads them."""
    return [
        StageClaim(
            record.peer,
            record.stage,
            record.claimed_at,
            settled=record.state is not PeerState.JOINING,
            device_s=record.device_s,
            # A newcomer that names no stages may go to any; a replica that names none stays.
            may_serve=record.may_serve or (None if record.state is PeerState.JOINING else ()),
            moves_to=record.moves_to,
            training=record.state is PeerState.TRAINING,
            stands_for=max(1.0, roster.scale(number)),
        )
        for number, records in enumerate(roster.stages)
        for record in records
        if record.state is not PeerState.FINISHED
    ]


def servable(context: NodeContext) -> range:
    """Return the stages that this peer can serve: stage 0 only calls others, all others must be dialable."""
    return context.run.pipeline.all_stages if context.network.dialable else range(1)


class FreeMemory(NamedTuple):
    """Free bytes of the device, and of main memory beside it; None is unknown."""

    device: int | None
    beside: int | None


def free_memory(host: Host, given_back: int | None = None) -> FreeMemory:
    """Return the free memory. `given_back`: a stage that we serve now, whose memory counts as free."""

    def own(needs: list[int]) -> int:
        return needs[given_back] if needs and given_back is not None else 0

    return FreeMemory(host.free_bytes(own(host.needs_bytes)), host.free_beside_bytes(own(host.beside_bytes)))


def fitting_stages(host: Host, free: FreeMemory, stages: int) -> tuple[int, ...]:
    """Return the stages that fit the device, and main memory beside it."""
    device, beside = (None if each is None else int(usable_bytes(each)) for each in free)
    both = stages_that_fit(host.needs_bytes, device, stages), stages_that_fit(host.beside_bytes, beside, stages)
    return tuple(stage for stage in both[0] if stage in both[1])


def _does_not_fit(host: Host, free: FreeMemory, stages: Sequence[int], *, reserve: bool) -> UserError:
    """Return the error that refuses these stages. `reserve`: they want more free memory than they need."""

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
        hint=MORE_MEMORY,
        code=Exit.DEVICE,
    )


def out_of_memory(stage: int, why: str) -> UserError:
    """Return the error of a stage for which the memory of the device was not enough."""
    return UserError(f"Stage {stage} does not fit in memory here.", why=why, hint=MORE_MEMORY, code=Exit.DEVICE)


async def claim_stage(context: NodeContext, request: StageRequest, served: int | None) -> ClaimedStage:
    """Claim the stage that the owner names, or the one that limits the swarm. `served`: by an earlier session."""
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
    keeps = _still_fits(context.host, stage, kept_bytes, fitting.free.device)
    own = _OwnCapacity(fitting.stages(), device_s)
    # Others may have come meanwhile.
    await membership.peek()
    capacity = capacities(claims_of(membership.roster), work)
    built, stage = stage, choose_stage(capacity, own.fits, rng, stage)
    _report_choice(context, stage, reason(stage, capacity, own.speed(stage)), own)
    stage = await _settle(context, stage, own)
    return ClaimedStage(stage, part if keeps and stage == built else None)


async def build_stage(host: Host, number: int) -> StageModel:
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
    """Read the roster until the DHT has answered for all stages."""
    for look in count(1):
        roster = await context.membership.peek()
        if context.membership.complete:
            return
        # A replica that moves knows that a swarm is there: it waits as long as it takes.
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
        stage = parse_stage(requested, len(context.dimensions.work))
    except ValueError as error:
        raise usage_error(
            f"There is no stage {requested}.",
            why=str(error).partition(": ")[2],
            hint="leave out --stage, or choose one that is there",
        ) from error
    if stage not in servable(context):
        context.reporter.say(
            f"nobody can dial us, and stage {stage} lives on calls: expect no work; stage 0 needs none"
        )
    # A replica that moves has compared before it left, and may not have all of its memory back yet.
    part = None if device_s > 0.0 else await _probe(context, stage)
    await context.membership.claim(context.claim_record(stage, PeerState.CATCHING_UP, device_s))
    return ClaimedStage(stage, part)


async def _probe(context: NodeContext, stage: int) -> StageModel | None:
    """Build a stage and measure whether it fits, as far as anything is known; raise `UserError` if it does not.

    Returns the stage; None where it was not built, or has to be built anew.
    """
    host, free = context.host, free_memory(context.host)

    def check() -> None:
        both = ((host.needs_bytes, free.device), (host.beside_bytes, free.beside))
        if any(has is not None and needs and needs[stage] > has for needs, has in both):
            raise _does_not_fit(host, free, (stage,), reserve=False)

    check()
    if free.device is None or not host.graph_bytes:
        return None
    part = await build_stage(host, stage)
    _, kept_bytes = await _measure(context, part, stage)
    _note_kept(host, stage, kept_bytes)
    check()
    return part if _still_fits(host, stage, kept_bytes, free.device) else None


class _FittingStages:
    """The stages that fit the free memory: by the plan, until one is measured."""

    def __init__(self, context: NodeContext) -> None:
        self._stages, self._host, self._say = len(context.dimensions.work), context.host, context.reporter.say
        self._within, self.free = servable(context), free_memory(context.host)

    def stages(self) -> tuple[int, ...]:
        """Return the stages that fit; raise `UserError` (DEVICE) where none does."""
        fits = fitting_stages(self._host, self.free, self._stages)
        fits = tuple(stage for stage in fits if stage in self._within)
        if not fits:
            raise _does_not_fit(self._host, self.free, self._within, reserve=True)
        return fits

    def correct(self, stage: int, kept_bytes: int) -> None:
        """Correct what a stage needs by the bytes that a microbatch was measured to keep."""
        free, (planned, measured) = self.free.device, _note_kept(self._host, stage, kept_bytes)
        if free is not None and planned <= usable_bytes(free) < measured:
            self._say(
                f"stage {stage} does not fit: it needs {format_bytes(measured)} by what a microbatch takes"
                f" ({format_bytes(planned)} by the plan), and {format_bytes(usable_bytes(free))} of the"
                f" {format_bytes(free)} that are free may be used"
            )


def _note_kept(host: Host, stage: int, kept_bytes: int) -> tuple[int, int]:
    """Correct what a stage needs by the bytes that a microbatch was measured to keep.

    Returns the bytes that it needs by the plan and by the measurement; twice 0 where either is unknown.
    """
    needs, graph = host.needs_bytes, host.graph_bytes
    if not (needs and graph and kept_bytes):
        return 0, 0
    planned, times = needs[stage], kept_bytes / graph[stage].whole
    before, graph[stage] = graph[stage].by_layers, GraphBytes(*(times * each for each in graph[stage]))
    needs[stage] += round(graph[stage].by_layers - before)
    return planned, needs[stage]


def _still_fits(host: Host, stage: int, kept_bytes: int, free: int | None) -> bool:
    """Return whether a stage may stay as it was built, now that it is measured.

    A stage that was built to keep whole graphs may not where none has room: built anew, it computes each layer again.
    """
    if not (kept_bytes and host.needs_bytes and host.graph_bytes):
        return True
    return not graphs_that_fit(free, host.needs_bytes[stage], host.graph_bytes[stage], 1).by_layers


async def _measure(context: NodeContext, stage: StageModel, number: int) -> tuple[tuple[float, ...], int]:
    """Measure a stage. Return the seconds of a microbatch at every stage, on the device or the line, and the bytes
    that it keeps at this one; raise `UserError` if memory runs out meanwhile.
    """
    host, run = context.host, context.run
    try:
        probe = await host.device.run(measure, stage, number, run, context.dimensions, host.device.clock)
    except MemoryError as error:
        raise out_of_memory(number, f"a first microbatch ran out of it: {_in_a_line(error)}") from error
    # At work more graphs are in flight than the memory may keep.
    device_s = probe.device_s * (host.passes[number] / host.passes_alone[number] if host.passes else 1.0)
    if device_s > run.pipeline.budget_s / 2:
        context.reporter.warn(
            f"a microbatch takes this device {format_duration(device_s)} at stage {number}, and is given up after "
            f"{format_duration(run.pipeline.budget_s)} on its way (pipeline.budget_s): much of this node's work "
            "may not count. Another --device, or a stage with less work (--stage), is faster"
        )
    return microbatch_s(context, number, device_s), probe.kept_bytes


def microbatch_s(context: NodeContext, stage: int, device_s: float) -> tuple[float, ...]:
    """Return the seconds of a microbatch at every stage, on the device or the line, by its device seconds at one.

    They are 0, which is unknown, where `device_s` is: by its line alone a replica would seem faster than it is.
    """
    host, work = context.host, context.dimensions.work
    cost = [flops * passes for flops, passes in zip(work, host.passes or [1.0] * len(work), strict=True)]
    if not device_s:
        return (0.0,) * len(cost)
    return tuple(max(device_s * each / cost[stage], host.line_s(other)) for other, each in enumerate(cost))


async def _settle(context: NodeContext, stage: int, own: _OwnCapacity) -> int:
    """Announce a stage, read again, and yield if another newcomer chose the same; return where we stay."""
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
