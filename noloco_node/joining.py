"""How a newcomer becomes a replica: it claims a stage, and finds the weights to start from.

The claim is announced, read again a moment later, and given up for another stage if several newcomers chose alike
(all of them compute the same answer from the same records, `pipeline.placement`). The weights come from a living
replica where the run has begun, else from this peer's own checkpoint, else from the run itself: its seed or the model
that it continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gossip import catch_up
from gossip.messages import Parts, ReplicaState
from noloco_node import __version__, journal
from noloco_node.checkpoint import Checkpoint
from noloco_node.errors import Exit, Trouble
from noloco_node.presence import Presence
from noloco_node.recipe import Recipe
from noloco_node.replica import Beginning, Runner, copied, fresh, restored
from noloco_node.roster import PeerRecord, State
from noloco_node.topics import STATE, state_schema
from pipeline.placement import Claim, choose_stage, yields

if TYPE_CHECKING:
    from torch import Tensor

    from noloco_node.port import Network
    from pipeline.stage import Stage

SETTLE_S = 1.0
"""Between a claim and its second reading: time for a claim made at the same moment to be seen."""
COPY_AGAIN_S = 10.0
"""Before all donors are asked again, when none gave its state."""
SLOWEST_BYTES_PER_S = 2**20
"""A donor whose line is slower than this is given up."""


class Text(Protocol):
    """Where a source's tokens come from. `position` and `restore`: to resume exactly."""

    async def draw(self) -> Tensor:
        """Return the next tokens [batch, sequence + 1], int64."""

    def position(self) -> dict[str, Any]:
        """Return where the next draw begins."""

    def restore(self, position: Mapping[str, Any]) -> None:
        """Go back to a position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine gives.

    `device`: the thread for tensor work. `build`: makes a stage, on that thread. `open_text`: the training text. `load`
    and `save`: this peer's own checkpoints. `unix_time`: the time of day, in seconds.
    """

    device: Runner
    build: Callable[[int], Stage]
    open_text: Callable[[], Awaitable[Text]]
    load: Callable[[], Awaitable[Checkpoint | None]]
    save: Callable[[Checkpoint], Awaitable[str]]
    unix_time: Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Voice:
    """How a node tells what it does: `record` to the journal, `say` to a person."""

    record: Callable[[journal.Event], None]
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Newcomer:
    """A peer that is about to take part. `wish`: the stage that its owner asked for."""

    recipe: Recipe
    network: Network
    presence: Presence
    machine: Machine
    voice: Voice
    wish: int | None = None

    @property
    def me(self) -> str:
        """Our peer id."""
        return self.network.peer_id


class Start(NamedTuple):
    """What joining yields: the stage's number, its slice, where it starts, and our own checkpoint if that was it."""

    number: int
    stage: Stage
    beginning: Beginning
    saved: Checkpoint | None


async def join(newcomer: Newcomer) -> Start:
    """Claim a stage, build it and find its weights."""
    number = await _claim(newcomer)
    stage = await newcomer.machine.device.run(newcomer.machine.build, number)
    beginning, saved = await _beginning(newcomer, number, stage)
    return Start(number, stage, beginning, saved)


async def _claim(newcomer: Newcomer) -> int:
    """Announce a stage, read again, and move if another newcomer chose alike."""
    presence, run, wish, me = newcomer.presence, newcomer.recipe.run, newcomer.wish, newcomer.me
    roster = await presence.peek()
    try:
        stage = choose_stage(list(map(len, roster.stages)), wish, Random(f"{run.seed}|placement|{me}"))
    except ValueError as error:
        raise Trouble(
            f"There is no stage {wish}.",
            why=str(error),
            attempt="leave out --stage, or choose one that is there",
            code=Exit.USAGE,
        ) from error
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


async def _beginning(newcomer: Newcomer, number: int, stage: Stage) -> tuple[Beginning, Checkpoint | None]:
    """Decide where our weights come from, and put them into the stage."""
    device, say = newcomer.machine.device, newcomer.voice.say
    while True:
        roster = newcomer.presence.roster
        living = [r.peer for r in roster.stage(number) if r.state in (State.TRAINING, State.FINISHED)]
        donors = catch_up.donors(newcomer.me, living, newcomer.recipe.run.seed)
        begun = any(record.round > 0 for records in roster.stages for record in records)
        if not (donors and begun):
            break
        say(f"copying stage {number} from one of {len(donors)} replicas")
        newcomer.voice.record(journal.StateChanged(state=State.CATCHING_UP))
        state = await _copy(newcomer, stage, donors)
        if state is not None:
            return await device.run(copied, stage, state), None
        # Older weights, or the first ones, would be averaged into those of the living: rather wait.
        await asyncio.sleep(COPY_AGAIN_S)
        await newcomer.presence.peek()
    saved = await newcomer.machine.load()
    if saved is not None and saved.counters.stage == number:
        say(f"going on from our own checkpoint of inner step {saved.counters.inner_steps}")
        return await device.run(restored, stage, saved), saved
    if begun:
        say(f"the run has begun, and no replica of stage {number} lives: starting it from the run's first weights")
    return await device.run(fresh, stage), None


async def _copy(newcomer: Newcomer, stage: Stage, donors: tuple[str, ...]) -> ReplicaState | None:
    import torch

    like = tuple(torch.empty(shape, device="meta") for shape in stage.shapes)
    schema = state_schema(stage.shapes)
    whole_bytes = 4 * sum(tensor.nbytes for tensor in like)
    wanted = catch_up.Wanted(
        parts=Parts.ALL, like=like, optimiser_like=like + like, deadline_s=60.0 + whole_bytes / SLOWEST_BYTES_PER_S
    )
    try:
        return await catch_up.catch_up(
            donors,
            lambda peer: newcomer.network.talk(peer, STATE, schema),
            wanted,
            newcomer.machine.device.run,
        )
    except ConnectionError as error:
        newcomer.voice.say(f"could not copy the state: {error}")
        return None
