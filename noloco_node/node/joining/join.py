"""How a newcomer becomes a replica: it claims a stage (`noloco_node.node.joining.stage_claim`), and finds the weights
to start from.

Where the run has begun and the stage lives, the weights are those of this peer's own checkpoint if that is a few
rounds behind at most, else a living replica's (`noloco_node.state_sync.download`). Where nobody lives, they are those
of the checkpoint, or of a snapshot that somebody keeps (`noloco_node.node.joining.revival`), or the run's own: its
seed's or those of the model that it continues.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from gossip.exchange.messages import ReplicaState
from gossip.transfer import download
from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine.interface import StageModel
from noloco_node.node.joining.newcomer import Newcomer
from noloco_node.node.joining.revival import RevivalOutcome, revive
from noloco_node.node.joining.stage_claim import built, claim_stage
from noloco_node.run.peer_state import PeerState
from noloco_node.state_sync.deadlines import copying_s
from noloco_node.state_sync.download import DownloadLink, StateDownload, pause_s, waiting_line
from noloco_node.state_sync.starting_state import (
    StartingState,
    from_checkpoint,
    from_donor,
    from_seed,
    is_recent_enough,
    started,
)
from noloco_node.storage.checkpoint import Checkpoint, Counters
from noloco_node.swarm.roster import PeerRecord

if TYPE_CHECKING:
    pass


class Start(NamedTuple):
    """What joining yields: the stage's number, its slice, where it starts, and what we counted in an earlier life."""

    number: int
    stage: StageModel
    beginning: StartingState
    counted: Counters | None


async def join(newcomer: Newcomer) -> Start:
    """Claim a stage, build it and find its weights; raise `UserError` where this machine cannot hold it."""
    served = await newcomer.host.served() if newcomer.wish is None else None
    number, stage = await claim_stage(newcomer.claimant, served)
    if stage is None:
        stage = await built(newcomer.host, number)
    saved = await newcomer.host.load(number)
    try:
        beginning = await _beginning(newcomer, number, stage, saved)
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise UserError(
            f"The state of stage {number} does not fit into the memory that is free.",
            why=" ".join(str(error).split())[:300] or "no memory is left",
            attempt="end other programs, or serve a smaller stage with --stage",
            code=Exit.DEVICE,
        ) from error
    if newcomer.host.keep is not None:
        # Of a copy that an earlier life began, and that nobody needs now, say.
        await newcomer.host.device.run(newcomer.host.keep(number, 0).discard)
    return Start(number, stage, beginning, saved.counters if saved is not None else None)


def is_shortage(error: BaseException) -> bool:
    """Say whether an error is that of memory: torch raises a RuntimeError of its own words."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "allocate memory" in said


async def _beginning(newcomer: Newcomer, number: int, stage: StageModel, saved: Checkpoint | None) -> StartingState:
    """Decide where our weights come from, and put them into the stage."""
    device, say, run = newcomer.host.device, newcomer.reporter.say, newcomer.recipe.run
    copying: StateDownload | None = None
    since_unix_s, attempts = newcomer.host.unix_time(), 0
    while True:
        living = _living(newcomer, number)
        begun = any(record.round > 0 for records in newcomer.membership.roster.stages for record in records)
        if not (living and begun):
            if not begun:
                break
            revived = await revive(newcomer, number, stage, saved, attempts)
            if revived is RevivalOutcome.NOTHING:
                break
            if isinstance(revived, StartingState):
                return revived
            attempts += 1
            continue
        rounds = [record.round for record in living]
        if saved is not None and is_recent_enough(saved.counters.round, rounds, run.outer.staleness_at_most):
            say(
                f"going on from our own checkpoint of inner step {saved.counters.inner_steps}: it is of round"
                f" {saved.counters.round}, and the stage is in round {median_low(rounds)}"
            )
            return replace(await device.run(from_checkpoint, stage, saved), progress=_progress(living))
        donors = download.donors(newcomer.me, [record.peer for record in living], run.seed)
        say(f"copying stage {number} from one of {len(donors)} replicas")
        if copying is None:
            newcomer.reporter.record(events.StateChanged(state=PeerState.CATCHING_UP))
            _announce(newcomer, number, None)
            newcomer.host.copies(number)
            copying = _copying(newcomer, number, stage, saved)
        state = await copying.attempt(donors, partial(_living, newcomer, number, living))
        if isinstance(state, ReplicaState):
            # The stage's word on how far the run is by now, not one donor's.
            living = _living(newcomer, number, living)
            rounds = [record.round for record in living]
            beginning = started(await device.run(from_donor, stage, state), rounds, _progress(living))
            await device.run(copying.discard)
            return beginning
        # Older weights, or the first ones, would be averaged into those of the living: rather wait.
        say(f"could not copy the state: {state}")
        await _wait(newcomer, number, since_unix_s, pause_s(copying.attempts))
    if saved is not None:
        say(f"going on from our own checkpoint of inner step {saved.counters.inner_steps}")
        return await device.run(from_checkpoint, stage, saved)
    return await device.run(from_seed, stage)


def _living(newcomer: Newcomer, number: int, before: tuple[PeerRecord, ...] = ()) -> tuple[PeerRecord, ...]:
    """Return the records of the replicas that can give the state of a stage; those `before` if none is left."""
    records = newcomer.membership.roster.stage(number)
    others = [record for record in records if record.peer != newcomer.me]
    return tuple(record for record in others if record.state in (PeerState.TRAINING, PeerState.FINISHED)) or before


def _progress(living: tuple[PeerRecord, ...]) -> float:
    return median_low([record.progress for record in living])


def _announce(newcomer: Newcomer, number: int, waiting: str | None) -> None:
    """Say in our record that we catch up, and for what we wait."""
    for record in newcomer.membership.roster.stage(number):
        if record.peer == newcomer.me:
            newcomer.membership.update(structs.replace(record, state=PeerState.CATCHING_UP, waiting=waiting))


def _copying(newcomer: Newcomer, number: int, stage: StageModel, saved: Checkpoint | None) -> StateDownload:
    weight_bytes = 4 * sum(map(prod, stage.shapes))
    deadline_s = copying_s(weight_bytes, newcomer.slowest_bytes_per_s) if newcomer.deadlines else math.inf
    line = DownloadLink(newcomer.network, newcomer.host.device, deadline_s)
    keep = newcomer.host.keep(number, weight_bytes) if newcomer.host.keep is not None else None
    return StateDownload(number, stage, line, newcomer.reporter, keep, saved)


async def _wait(newcomer: Newcomer, number: int, since_unix_s: float, again_s: float) -> None:
    """Say for whom we wait and since when, to our owner and in our record, and look again a while later."""
    newcomer.reporter.say(waiting_line(number, since_unix_s, newcomer.host.unix_time(), again_s))
    _announce(newcomer, number, f"a replica of stage {number} that gives its state")
    await asyncio.sleep(again_s)
    await newcomer.membership.peek()
