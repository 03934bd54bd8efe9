"""How a newcomer claims a stage: it measures itself, announces its choice, reads again, and gives way if it must.

It builds the stage that the roster says is the weakest, takes made-up microbatches through it
(`noloco_node.node.joining.stage_benchmark`) and reads the roster once more. From then on its speed is known at every
stage, for all peers know what a microbatch costs at each. Stages that do not fit the memory of the device are left out.
The need is the plan's, and what a microbatch keeps is measured here once more: a newcomer whose stage needs more than
fits looks at the others. What fits is `noloco_node.machine.memory`'s to say. Where nothing fits, the newcomer leaves
before it copies anything: memory that runs out later costs a window, and perhaps the owner's other programs.

Several newcomers may choose alike. All of them compute the same answer from the same records (`pipeline.placement`), so
that only as many move as must. It takes one reading as a rule, and a few where rosters disagree; who is still not sure
after `CLAIMS` of them stays where it is, since a replica too many does no harm and waiting for ever does.

A newcomer whose owner names its stage takes that one if it fits without any reserve, measures nothing, and moves for
nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from msgspec import structs

from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine.interface import ComputeHost, StageModel
from noloco_node.machine.memory import usable_bytes, wanted_bytes
from noloco_node.node.joining.newcomer import Newcomer
from noloco_node.node.joining.stage_benchmark import measure
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import Roster
from noloco_node.units import format_bytes
from pipeline.placement import StageClaim, capacities, choose_stage, parse_stage, reason, should_yield, stages_that_fit

LOOKS = 5
"""Readings of the roster that may fail before a newcomer gives up."""
AGAIN_S = 30.0
"""Between two later readings of who moves, and does not give up."""
SETTLE_S = 1.0
"""Between a claim and its second reading: time for a claim made at the same moment to be seen."""
CLAIMS = 8
"""Announced at most, one after the other."""


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


def servable(newcomer: Newcomer) -> range:
    """Return the stages at which others can reach this peer; its own calls are all that the first one needs."""
    return range(newcomer.run.pipeline.stages if newcomer.network.dialable else 1)


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


async def claim_stage(newcomer: Newcomer, served: int | None) -> ClaimedStage:
    """Claim the stage that the owner asked for, or the one that limits the swarm. `served`: in an earlier life."""
    await _read_roster(newcomer)
    if newcomer.requested_stage is not None:
        return await _claim_requested(newcomer, newcomer.requested_stage)
    if not newcomer.network.dialable:
        newcomer.reporter.say("looking at stage 0 alone, which dials the others: nobody can dial us")
    membership, work, fitting = newcomer.membership, newcomer.dimensions.work, _FittingStages(newcomer)
    rng = Random(f"{newcomer.run.seed}|placement|{newcomer.me}")
    stage = choose_stage(capacities(claims_of(membership.roster), work), fitting.stages(), rng, served)
    part = await build_stage(newcomer.host, stage)
    device_s, kept_bytes = await _measure(newcomer, part, stage)
    fitting.correct(stage, kept_bytes)
    own = _OwnCapacity(fitting.stages(), device_s)
    # Others may have come while we were building.
    await membership.peek()
    capacity = capacities(claims_of(membership.roster), work)
    built, stage = stage, choose_stage(capacity, own.fits, rng, stage)
    _report_choice(newcomer, stage, reason(stage, capacity, own.speed(stage)), own)
    stage = await _settle(newcomer, stage, own)
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


async def _read_roster(newcomer: Newcomer) -> None:
    """Read who is there until the DHT has answered for all stages."""
    for look in count(1):
        roster = await newcomer.membership.peek()
        if newcomer.membership.complete:
            return
        # Whoever moves takes part already, and knows that others do: it waits as long as it takes.
        moves = any(record.peer == newcomer.me for records in roster.stages for record in records)
        if look >= LOOKS and not moves:
            break
        newcomer.reporter.say("the DHT did not answer; asking again who is there")
        await asyncio.sleep(SETTLE_S if look < LOOKS else AGAIN_S)
    raise UserError(
        "Nobody could tell who takes part in the run.",
        why=f"the DHT did not answer {LOOKS} times in a row",
        hint="start the node again in a minute; if it happens again, ask whoever sent the invite",
        code=Exit.UNREACHABLE,
    )


async def _claim_requested(newcomer: Newcomer, requested: int) -> ClaimedStage:
    try:
        stage = parse_stage(requested, newcomer.run.pipeline.stages)
    except ValueError as error:
        raise UserError(
            f"There is no stage {requested}.",
            why=str(error).partition(": ")[2],
            hint="leave out --stage, or choose one that is there",
            code=Exit.USAGE,
        ) from error
    if stage not in servable(newcomer):
        newcomer.reporter.say(
            f"nobody can dial us, and stage {stage} lives on calls: expect no work; stage 0 needs none"
        )
    host, free = newcomer.host, free_memory(newcomer.host)
    both = ((host.needs_bytes, free.device), (host.beside_bytes, free.beside))
    # A replica that moves knows its speed, has compared before it left, and may not have all of its memory back yet.
    moves = newcomer.device_s > 0.0
    if not moves and any(has is not None and needs and needs[stage] > has for needs, has in both):
        raise _does_not_fit(host, free, (stage,), reserve=False)
    await newcomer.membership.claim(newcomer.claim_record(stage, PeerState.CATCHING_UP, newcomer.device_s))
    return ClaimedStage(stage)


class _FittingStages:
    """Which stages fit the memory that is free before one is built: by the plan, until one is measured.

    For whoever can only dial that is the first stage or none: all others are dialled by the stage before.
    """

    def __init__(self, newcomer: Newcomer) -> None:
        self._pipeline, self._host, self._say = newcomer.run.pipeline, newcomer.host, newcomer.reporter.say
        self._within, self._free = servable(newcomer), free_memory(newcomer.host)

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


async def _measure(newcomer: Newcomer, stage: StageModel, number: int) -> tuple[tuple[float, ...], int]:
    """Take a microbatch through a stage. Return the seconds of one at every stage, on the device or on the line, and
    the bytes that it keeps at this one.
    """
    host, work, stages = newcomer.host, newcomer.dimensions.work, newcomer.run.pipeline.stages
    probe = await host.device.run(measure, stage, number, newcomer.run.pipeline, newcomer.dimensions, host.device.clock)
    device_s = tuple(max(probe.device_s * work[each] / work[number], host.line_s(each)) for each in range(stages))
    return device_s, probe.kept_bytes


async def _settle(newcomer: Newcomer, stage: int, own: _OwnCapacity) -> int:
    """Announce a stage, read again, and move if another newcomer chose alike; return where we stay."""
    membership, work = newcomer.membership, newcomer.dimensions.work
    claim = newcomer.claim_record(stage, PeerState.JOINING, own.device_s[stage], own.fits)
    for left in reversed(range(CLAIMS)):
        await membership.claim(structs.replace(claim, stage=stage, device_s=own.device_s[stage]))
        await asyncio.sleep(SETTLE_S)
        await membership.peek()
        claims = claims_of(membership.roster)
        elsewhere = should_yield(newcomer.me, claims, work) if left else None
        if elsewhere is None:
            break
        capacity = capacities([each for each in claims if each.peer != newcomer.me], work)
        rivals = any(each.peer != newcomer.me and each.stage == stage and not each.settled for each in claims)
        news = f"another newcomer chose stage {stage} too" if rivals else "the swarm is another one by now"
        why = f"{news}; {reason(elsewhere, capacity, own.speed(elsewhere))}"
        _report_choice(newcomer, elsewhere, why, own)
        stage = elsewhere
    return stage


def _report_choice(newcomer: Newcomer, stage: int, why: str, own: _OwnCapacity) -> None:
    newcomer.reporter.say(f"taking stage {stage}: {why}")
    newcomer.reporter.record(events.Placed(stage=stage, why=why, device_s=own.device_s[stage]))


def _in_a_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__
