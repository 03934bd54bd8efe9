"""Watches, beside the training, whether our replica is needed at another stage, and says when it is time to go.

A replica reads only the stages that it has to do with. So every few refreshes it looks at all of them for once, and
`pipeline.migration` judges what it sees. Nothing here asks anybody: what we would do, and what we are about to do,
stands in our record (`may_serve`, `moves_to`), and everybody reads it. A reading that the DHT did not fully answer is
none.

Where we fit is asked of the memory that is free plus what our own stage would give back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from random import Random
from typing import TYPE_CHECKING

import msgspec

from noloco_node import __version__
from noloco_node.machine.interface import Dimensions
from noloco_node.node.joining.newcomer import Newcomer
from noloco_node.node.joining.stage_claim import claims_of, servable
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import GOSSIP, MICROBATCH, STATE, gossip_schema, microbatch_schema, state_schema, topic
from noloco_node.swarm.roster import PeerRecord
from noloco_node.tasks import loop_s
from pipeline.migration import MigrationState, Move, OwnPlacement, StagePace, decide, may_move
from pipeline.placement import stages_that_fit

if TYPE_CHECKING:
    from noloco_node.network.interface import Conversation, PeerNetwork


class MigrationWatcher:
    """One replica's watch over the balance of the swarm; `run` beside the training.

    `may_serve`, `moves_to`: what our record is to say. `moves`: that this peer has made so far. `device_s`: of a
    microbatch at the stage that it goes to, once it has taken its place there. `unfit`: stages that turned out to be
    too much for this machine.
    """

    def __init__(
        self,
        newcomer: Newcomer,
        stage: int,
        moves: int,
        refresh_s: float,
        progress: Callable[[], float],
        unfit: Collection[int] = (),
    ) -> None:
        self.may_serve: tuple[int, ...] = ()
        self.moves_to: int | None = None
        self.moves = moves
        self.device_s = 0.0
        self._newcomer, self._stage, self._progress, self._unfit = newcomer, stage, progress, unfit
        self._pace = StagePace.of(refresh_s)
        self._me = OwnPlacement(newcomer.me, newcomer.run.seed, loop_s(), moves)
        self._mind = MigrationState()

    async def run(self, allowed: bool) -> Move:
        """Return when it is time to go, and where; never where the owner does not allow it."""
        if not allowed:
            await asyncio.Event().wait()
        rng = Random(f"{self._me.seed}|looks|{self._me.peer}|{self.moves}")
        while True:
            await asyncio.sleep(self._pace.look_s * rng.uniform(0.9, 1.1))
            if not may_move(self._me, self._pace, loop_s(), self._progress()):
                self.may_serve, self.moves_to, self._mind = (), None, MigrationState()
                continue
            self.may_serve = self._elsewhere()
            move = await self._look()
            if move is not None:
                return move

    def with_plans(self, record: PeerRecord) -> PeerRecord:
        """Return a record of ours with what we would do and are about to do."""
        if not self.may_serve and self.moves_to is None:
            return record
        return msgspec.structs.replace(record, may_serve=self.may_serve, moves_to=self.moves_to)

    async def take_place(self, move: Move, device_s: float) -> None:
        """Take our place at the other stage, before the microbatches in our hands are back: others shall know at once.

        `device_s`: of a microbatch here.
        """
        newcomer = self._newcomer
        work, line_s = newcomer.plan.work, newcomer.host.line_s(move.target)
        self.device_s = max(device_s * work[move.target] / work[move.origin], line_s)
        newcomer.membership.focus(range(newcomer.run.pipeline.stages))
        record = PeerRecord(
            peer=newcomer.me,
            stage=move.target,
            state=PeerState.CATCHING_UP,
            claimed_at=newcomer.host.unix_time(),
            device_s=self.device_s,
            version=__version__,
        )
        await newcomer.membership.claim(record)

    def _elsewhere(self) -> tuple[int, ...]:
        """Return the other stages that would fit once ours is given back."""
        host = self._newcomer.host
        free = host.free_bytes()
        if free is not None and host.needs_bytes:
            free += host.needs_bytes[self._stage]
        fits = stages_that_fit(host.needs_bytes, free, self._newcomer.run.pipeline.stages)
        within = servable(self._newcomer)
        return tuple(stage for stage in fits if stage in within and stage != self._stage and stage not in self._unfit)

    async def _look(self) -> Move | None:
        """Read all stages once and judge; return the move for which it is time."""
        membership, say = self._newcomer.membership, self._newcomer.reporter.say
        roster = await membership.peek(range(self._newcomer.run.pipeline.stages))
        if not membership.complete or roster.old_since_s is not None:
            return None
        claims = [
            claim._replace(may_serve=self.may_serve, moves_to=self.moves_to) if claim.peer == self._me.peer else claim
            for claim in claims_of(roster)
        ]
        verdict = decide(self._me, self._mind, claims, self._newcomer.plan.work, self._pace, loop_s())
        self._mind = verdict.mind
        if verdict.go:
            return verdict.move
        if verdict.announce != self.moves_to:
            self.moves_to = verdict.announce
            if verdict.move is not None:
                say(f"{verdict.move}; we go there in {self._pace.settle_s:.0f} s unless somebody else does")
            else:
                say("somebody else moves, or nobody has to any more: we stay")
        return None


async def stop_serving(network: PeerNetwork, run: RunConfig, plan: Dimensions, stage: int) -> None:
    """Serve a stage no more: who still asks for it is told so, and no handler keeps its weights in memory."""
    shapes = tuple(plan.shapes[stage].values())
    schemas = {GOSSIP: gossip_schema(run, shapes), STATE: state_schema(shapes)}
    if stage > 0:
        schemas[MICROBATCH] = microbatch_schema(run, plan.width)
    for name, schema in schemas.items():
        await network.serve(topic(name, stage), schema, _gone)


async def _gone(conversation: Conversation) -> None:
    raise ConnectionResetError(f"we serve another stage now, {conversation.peer}")
