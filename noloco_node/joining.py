"""How a newcomer becomes a replica: it claims a stage, and finds the weights to start from.

The claim is announced, read again a moment later, and given up for another stage if several newcomers chose alike
(all of them compute the same answer from the same records, `pipeline.placement`). The weights come from a living
replica where the run has begun, else from this peer's own checkpoint, else from the run itself: its seed or the model
that it continues.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from random import Random
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from gossip import catch_up
from gossip.messages import Parts, ReplicaState
from noloco_node import __version__, journal
from noloco_node.beginning import Beginning, copied, fresh, restored
from noloco_node.checkpoint import Checkpoint, Counters
from noloco_node.errors import Exit, Trouble
from noloco_node.machine import Machine, Stage, Voice
from noloco_node.post import SLOWEST_BYTES_PER_S
from noloco_node.presence import Presence
from noloco_node.recipe import Recipe
from noloco_node.roster import PeerRecord, State
from noloco_node.topics import STATE, state_schema, topic
from pipeline.placement import Claim, choose_stage, yields

if TYPE_CHECKING:
    from noloco_node.port import Network

LOOKS = 5
"""Readings of the roster that may fail before a newcomer gives up."""
SETTLE_S = 1.0
"""Between a claim and its second reading: time for a claim made at the same moment to be seen."""
COPY_AGAIN_S = 10.0
"""Before all donors are asked again, when none gave its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Newcomer:
    """A peer that is about to take part. `wish`: the stage that its owner asked for.

    `slowest_bytes_per_s`: a donor whose line is slower is given up. `deadlines`: False waits for a copy without end.
    """

    recipe: Recipe
    network: Network
    presence: Presence
    machine: Machine
    voice: Voice
    wish: int | None = None
    slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S
    deadlines: bool = True

    @property
    def me(self) -> str:
        """Our peer id."""
        return self.network.peer_id


class Start(NamedTuple):
    """What joining yields: the stage's number, its slice, where it starts, and what we counted in an earlier life."""

    number: int
    stage: Stage
    beginning: Beginning
    counted: Counters | None


async def join(newcomer: Newcomer) -> Start:
    """Claim a stage, build it and find its weights."""
    saved = await newcomer.machine.load()
    number = await _claim(newcomer, saved.counters.stage if saved is not None else None)
    if saved is not None and saved.counters.stage != number:
        saved = None
    stage = await newcomer.machine.device.run(newcomer.machine.build, number)
    beginning = await _beginning(newcomer, number, stage, saved)
    return Start(number, stage, beginning, saved.counters if saved is not None else None)


async def _first_look(newcomer: Newcomer) -> list[int]:
    """Return how many replicas each stage has, once the DHT has answered for all of them."""
    for _ in range(LOOKS):
        roster = await newcomer.presence.peek()
        if newcomer.presence.complete:
            return list(map(len, roster.stages))
        newcomer.voice.say("the DHT did not answer; asking again who is there")
        await asyncio.sleep(SETTLE_S)
    raise Trouble(
        "Nobody could tell who takes part in the run.",
        why=f"the DHT did not answer {LOOKS} times in a row",
        attempt="start the node again in a minute; if it happens again, ask whoever sent the invite",
        code=Exit.UNREACHABLE,
    )


async def _claim(newcomer: Newcomer, served: int | None) -> int:
    """Announce a stage, read again, and move if another newcomer chose alike. `served`: by us, in an earlier life."""
    presence, run, wish, me = newcomer.presence, newcomer.recipe.run, newcomer.wish, newcomer.me
    counts = await _first_look(newcomer)
    try:
        stage = choose_stage(counts, wish, Random(f"{run.seed}|placement|{me}"))
    except ValueError as error:
        raise Trouble(
            f"There is no stage {wish}.",
            why=str(error),
            attempt="leave out --stage, or choose one that is there",
            code=Exit.USAGE,
        ) from error
    if wish is None and served is not None and counts[served] == min(counts):
        stage = served
    # Whoever was told its stage does not move for others; the claims of the rest are open for a moment.
    state = State.JOINING if wish is None else State.CATCHING_UP
    claimed_at = newcomer.machine.unix_time()
    while True:
        await presence.claim(PeerRecord(peer=me, stage=stage, state=state, claimed_at=claimed_at, version=__version__))
        if wish is not None:
            return stage
        await asyncio.sleep(SETTLE_S)
        await presence.peek()
        elsewhere = yields(me, _claims(presence), run.pipeline.stages)
        if elsewhere is None:
            return stage
        newcomer.voice.say(f"another newcomer chose stage {stage} too; moving to stage {elsewhere}")
        stage = elsewhere


def _claims(presence: Presence) -> list[Claim]:
    return [
        Claim(record.peer, record.stage, record.claimed_at, settled=record.state is not State.JOINING)
        for records in presence.roster.stages
        for record in records
    ]


async def _beginning(newcomer: Newcomer, number: int, stage: Stage, saved: Checkpoint | None) -> Beginning:
    """Decide where our weights come from, and put them into the stage."""
    device, say = newcomer.machine.device, newcomer.voice.say
    while True:
        roster = newcomer.presence.roster
        living = [r.peer for r in roster.stage(number) if r.state in (State.TRAINING, State.FINISHED)]
        donors = catch_up.donors(newcomer.me, living, newcomer.recipe.run.seed)
        begun = any(record.round > 0 for records in roster.stages for record in records)
        progress = median_low([r.progress for r in roster.stage(number) if r.peer in donors]) if donors else 0.0
        if not (donors and begun):
            break
        say(f"copying stage {number} from one of {len(donors)} replicas")
        newcomer.voice.record(journal.StateChanged(state=State.CATCHING_UP))
        state = await _copy(newcomer, number, stage, donors)
        if state is not None:
            # The stage's word on how far the run is, not one donor's.
            return replace(await device.run(copied, stage, state), progress=progress)
        # Older weights, or the first ones, would be averaged into those of the living: rather wait.
        await asyncio.sleep(COPY_AGAIN_S)
        await newcomer.presence.peek()
    if saved is not None:
        say(f"going on from our own checkpoint of inner step {saved.counters.inner_steps}")
        return await device.run(restored, stage, saved)
    if begun:
        say(f"the run has begun, and no replica of stage {number} lives: starting it from the run's first weights")
    return await device.run(fresh, stage)


def copying_s(weight_bytes: int, slowest_bytes_per_s: float) -> float:
    """Return how long a whole state may take: weights, momentum and two moments over the slowest line."""
    return 60.0 + 4 * weight_bytes / slowest_bytes_per_s


async def _copy(newcomer: Newcomer, number: int, stage: Stage, donors: tuple[str, ...]) -> ReplicaState | None:
    import torch

    like = tuple(torch.empty(shape, device="meta") for shape in stage.shapes)
    schema = state_schema(stage.shapes)
    weight_bytes = sum(tensor.nbytes for tensor in like)
    deadline_s = copying_s(weight_bytes, newcomer.slowest_bytes_per_s) if newcomer.deadlines else math.inf
    wanted = catch_up.Wanted(parts=Parts.ALL, like=like, optimiser_like=like + like, deadline_s=deadline_s)
    try:
        return await catch_up.catch_up(
            donors,
            lambda peer: newcomer.network.talk(peer, topic(STATE, number), schema),
            wanted,
            newcomer.machine.device.run,
        )
    except ConnectionError as error:
        newcomer.voice.say(f"could not copy the state: {error}")
        return None
