"""Watches, beside the training, whether another stage needs our replica more, and says when it is time to go.

A replica reads only the stages that it works with. So every few refreshes it reads all stages once, and
`pipeline.placement` judges what it sees. The replica asks nobody: its record says where it would move (`may_serve`) and
where it is about to move (`moves_to`), and every peer reads that. A reading counts only if the DHT answered for all
stages. A stage fits if it fits into the free memory and what our own stage would give back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from random import Random

import msgspec

from noloco_node.node.node_context import NodeContext
from noloco_node.node.stage_claim import claims_of, fitting_stages, free_memory, servable
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import PeerRecord
from noloco_node.tasks import loop_s
from pipeline.placement import MigrationState, Move, OwnPlacement, StagePace, decide, may_move


class MigrationWatcher:
    """One replica's watch over the balance of the swarm; `run` beside the training.

    `may_serve`, `moves_to`: what our record is to say. `moves`: that this peer has made so far. `device_s`: of a
    microbatch at the stage that it goes to, once it has taken its place there. `unfit`: stages that turned out to be
    too much for this machine.
    """

    def __init__(
        self,
        context: NodeContext,
        stage: int,
        moves: int,
        progress: Callable[[], float],
        unfit: Collection[int] = (),
        proved: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """`proved`: the replicas of our stage whose weights we have met; None asks for no proof."""
        self.may_serve: tuple[int, ...] = ()
        self.moves_to: int | None = None
        self.moves = moves
        self.device_s = 0.0
        self._context, self._stage, self._progress, self._unfit = context, stage, progress, unfit
        self._proved = proved
        self._pace = StagePace.of(context.options.refresh_s)
        self._me = OwnPlacement(context.me, context.run.seed, loop_s(), moves)
        self._state = MigrationState()

    async def run(self) -> Move:
        """Return when it is time to go, and where; never where the owner does not allow it."""
        if not self._context.options.moves:
            await asyncio.Event().wait()
        rng = Random(f"{self._me.seed}|looks|{self._me.peer}|{self.moves}")
        while True:
            await asyncio.sleep(self._pace.look_s * rng.uniform(0.9, 1.1))
            if not may_move(self._me, self._pace, loop_s(), self._progress()):
                self.may_serve, self.moves_to, self._state = (), None, MigrationState()
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

    async def take_place(self, target: int, device_s: float) -> None:
        """Take our place at a stage, before the microbatches in our hands are back: others shall know at once.

        `device_s`: of a microbatch here.
        """
        context = self._context
        work, line_s = context.dimensions.work, context.host.line_s(target)
        self.device_s = max(device_s * work[target] / work[self._stage], line_s)
        context.membership.focus(context.run.pipeline.all_stages)
        await context.membership.claim(context.claim_record(target, PeerState.CATCHING_UP, self.device_s))

    def _elsewhere(self) -> tuple[int, ...]:
        """Return the other stages that would fit once ours is given back."""
        host = self._context.host
        free = free_memory(host, given_back=self._stage)
        fits = fitting_stages(host, free, len(self._context.dimensions.work))
        within = servable(self._context)
        return tuple(stage for stage in fits if stage in within and stage != self._stage and stage not in self._unfit)

    async def _look(self) -> Move | None:
        """Read all stages once and judge; return the move for which it is time."""
        membership, say = self._context.membership, self._context.reporter.say
        roster = await membership.peek(self._context.run.pipeline.all_stages)
        if not membership.complete or roster.old_since_s is not None:
            return None
        claims = [
            claim._replace(may_serve=self.may_serve, moves_to=self.moves_to) if claim.peer == self._me.peer else claim
            for claim in claims_of(roster)
        ]
        proved = None if self._proved is None else self._proved()
        work = self._context.dimensions.work
        decision = decide(self._me, self._state, claims, work, self._pace, loop_s(), proved)
        self._state = decision.state
        if decision.go:
            return decision.move
        if decision.announce != self.moves_to:
            self.moves_to = decision.announce
            if decision.move is not None:
                say(f"{decision.move}; we go there in {self._pace.settle_s:.0f} s unless somebody else does")
            else:
                say("somebody else moves, or nobody has to any more: we stay")
        return None
