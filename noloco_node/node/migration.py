"""Watches, beside the training, whether another stage needs our replica more, and says when the move is due.

A replica reads only the stages that it works with. So every few refreshes it reads all stages once, and
`pipeline.placement` judges the reading. The replica asks no peer: its record says which stages it may serve and which
it is about to move to (`moves_to`), and every peer reads that. A reading counts only if the DHT answered for all
stages. A stage fits if it fits into the free memory plus that of our own stage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from random import Random

import msgspec

from noloco_node.node.node_context import NodeContext
from noloco_node.node.stage_claim import claims_of, fitting_stages, free_memory, microbatch_s, servable
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.stage_division import READ_S
from noloco_node.tasks import loop_s
from pipeline.placement import MigrationState, Move, OwnPlacement, StagePace, decide, may_move


class MigrationWatcher:
    """One replica's watch over the balance of the swarm; `run` beside the training.

    `may_serve`, `moves_to`: fields of our record. `moves`: the moves of this peer so far. `device_s`: device seconds of
    a microbatch at the next stage, once claimed. `unfit`: stages that this machine could not build.
    """

    def __init__(
        self,
        context: NodeContext,
        stage: int,
        moves: int,
        progress: Callable[[], float],
        unfit: Collection[int],
        proved: Callable[[], Collection[str]],
    ) -> None:
        """`proved`: the replicas of our stage whose weights we have met."""
        self.may_serve: tuple[int, ...] = ()
        self.moves_to: int | None = None
        self.moves = moves
        self.device_s = 0.0
        self._context, self._stage, self._progress, self._unfit = context, stage, progress, unfit
        self._proved = proved
        self._usual_pace = StagePace.of(context.options.refresh_s)
        self._me = OwnPlacement(context.me, context.run.seed, loop_s(), moves)
        self._state = MigrationState()

    @property
    def _pace(self) -> StagePace:
        """Return how slowly we decide: to read all stages costs much where they are large, and news of them is late."""
        if not self._context.membership.roster.is_sample:
            return self._usual_pace
        slow = StagePace.of(READ_S)
        return self._usual_pace._replace(look_s=slow.look_s, settle_s=slow.settle_s, delay_s=slow.delay_s)

    async def run(self) -> Move:
        """Return the move when it is due; never if the owner does not allow moves."""
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
        """Return our record with the stages that we may serve and the one that we move to."""
        if not self.may_serve and self.moves_to is None:
            return record
        return msgspec.structs.replace(record, may_serve=self.may_serve, moves_to=self.moves_to)

    async def take_place(self, target: int, device_s: float) -> None:
        """Claim our next stage at once, before the microbatches in our hands are back.

        `device_s`: device seconds of a microbatch at the present stage; 0 before the first.
        """
        context = self._context
        self.device_s = microbatch_s(context, self._stage, device_s)[target]
        context.membership.focus(context.run.pipeline.all_stages)
        await context.membership.claim(context.claim_record(target, PeerState.CATCHING_UP, self.device_s))

    def _elsewhere(self) -> tuple[int, ...]:
        """Return the other stages that would fit if ours were released."""
        host = self._context.host
        free = free_memory(host, given_back=self._stage)
        fits = fitting_stages(host, free, len(self._context.dimensions.work))
        within = servable(self._context)
        return tuple(stage for stage in fits if stage in within and stage != self._stage and stage not in self._unfit)

    async def _look(self) -> Move | None:
        """Read all stages once and judge; return the move that is due."""
        membership, say = self._context.membership, self._context.reporter.say
        roster = await membership.peek(self._context.run.pipeline.all_stages)
        if not membership.complete or roster.old_since_s is not None:
            return None
        claims = [
            claim._replace(may_serve=self.may_serve, moves_to=self.moves_to) if claim.peer == self._me.peer else claim
            for claim in claims_of(roster)
        ]
        work = self._context.dimensions.work
        decision = decide(self._me, self._state, claims, work, self._pace, loop_s(), self._proved())
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
