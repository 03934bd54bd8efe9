"""What a peer does at its stage between joining and leaving it: its part of the run, the training, and the end of both.

At stage 0 the part is a source's; later it lasts until the sources say that the run is done. Training ends with it, or
when the peer is asked to leave, or is needed at another stage. Nothing is taken on from then, what is in hand is
waited for within bounds, and what did not become a step is forgotten and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from noloco_node.journal import events
from noloco_node.machine.interface import Reporter, Text
from noloco_node.node.microbatch_source import MicrobatchSource
from noloco_node.node.migration import MigrationWatcher
from noloco_node.node.replica import Replica
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.state_sync.starting_state import SnapshotTrial
from noloco_node.storage.checkpoint import Counters
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.run_samples import ALONE_S, RunSamples, is_over_below
from noloco_node.tasks import loop_s, until_event
from pipeline.placement import Move

ASKED = "asked to leave"
LAST_ROUND_S = 20.0
DRAIN_S, LONGEST_DRAIN_S = 10.0, 60.0
"""How long a leaving node waits for the microbatches in its hands: twice what a window took, within these bounds."""


class StageWork:
    """This peer's part of the run, whatever stage it serves.

    `text`: what it trains on as a source; it stays open where the peer moves away from stage 0, and is gone on with.
    """

    def __init__(
        self,
        run: RunConfig,
        me: str,
        membership: Membership,
        open_text: Callable[[], Awaitable[Text]],
        reporter: Reporter,
    ) -> None:
        self.text: Text | None = None
        self._run, self._me, self._membership = run, me, membership
        self._open_text, self._reporter = open_text, reporter
        self._source: MicrobatchSource | None = None
        self._counted: RunSamples | None = None
        self._resumed: Counters | None = None

    @property
    def samples(self) -> int:
        """Sequences that a gradient came back for at the present stage; 0 but for a source."""
        if self._source is None:
            return self._resumed.samples if self._resumed else 0
        return self._source.samples

    def position(self) -> dict[str, Any] | None:
        """Return where the next draw from the text begins."""
        if self.text is None:
            return self._resumed.data_position if self._resumed else None
        return self.text.position()

    def rest(self) -> None:
        """Let go of the stage that was served."""
        self._source = self._counted = self._resumed = None

    def begin(self, progress: float, counted: Counters | None) -> None:
        """Begin at a stage, at its progress, with what we counted there in an earlier life.

        What others do counts from here on, however long our text takes to open.
        """
        self._resumed = counted
        # Our own checkpoint may know of more than those do who came back before us.
        reached = max(progress, counted.progress if counted else 0.0)
        # The swarm forgets a source that was away for long; its own checkpoint does not.
        own = max(self._membership.roster.own_samples, counted.samples if counted else 0)
        self._counted = RunSamples(self._run, self._membership, round(reached * self._run.budget_samples), own)

    async def run_until_done(self, replica: Replica) -> None:
        """Return when this peer's part of the run is done, and nothing of it under way."""
        if replica.config.stage == 0:
            source = await self._make_source(replica)
            await source.run(self._run.pipeline.microbatches_per_step * self._run.pipeline.windows_in_flight)
        else:
            begun_s, served = loop_s(), replica.microbatches

            def over() -> bool:
                roster, idle_s = self._membership.roster, loop_s() - max(begun_s, served.returned_s)
                return is_over_below(self._run, roster, served.issued.samples, replica.progress.value, idle_s)

            await self._seen(over)

    async def run_until_deserted(self, replica: Replica) -> None:
        """Return when the run is over at stage 0 and nobody is left to whom our microbatches could go.

        Nobody is who holds them and has sent none back for long: he may wait for us to leave, as sources are at work.
        """

        def deserted() -> bool:
            source = self._source
            if source is None or self._counted is None:
                return False
            idle = replica.stranded or loop_s() - source.returned_s > ALONE_S
            return idle and self._counted.is_over(source.samples, source.returned_s)

        await self._seen(deserted)

    async def _seen(self, over: Callable[[], bool]) -> None:
        while not over():
            with suppress(TimeoutError):
                async with asyncio.timeout(ALONE_S):
                    await self._membership.changed()

    async def _make_source(self, replica: Replica) -> MicrobatchSource:
        opened, resumed = self.text is None, self._resumed
        text = self.text or await self._open_text()
        # A source that comes back to its stage goes on where it was.
        position = resumed.data_position if resumed is not None and opened else None
        if position is not None and not await text.restore(position):
            self._reporter.say("the text is another one than before: reading it from its beginning")
        self.text = text
        assert self._counted is not None, "a stage was begun"

        async def draw() -> Tensor:
            batch = await text.draw()
            for sentence in text.news():
                self._reporter.record(events.Noticed(what="text", text=sentence))
            return batch

        self._source = MicrobatchSource(
            draw,
            replica.worker.process,
            self._counted.progress,
            samples=self._counted.own_then,
            me=self._me,
            prove=self._membership.receipts.prove,
            budget_s=self._run.pipeline.budget_s,
            rng=Random(f"{self._run.seed}|source|{self._me}"),
            told=self._run.pipeline.subspace is not None,
        )
        return self._source


class RunOver(NamedTuple):
    """The run is done."""


class AskedToLeave(NamedTuple):
    """We were asked to leave."""


class MoveTo(NamedTuple):
    """We are needed at another stage."""

    move: Move


class RetrySnapshot(NamedTuple):
    """The snapshot that we served was worth nothing, as its loss says: we join the stage anew, with another one."""

    stage: int
    trial: SnapshotTrial
    loss: float


Ending: TypeAlias = RunOver | AskedToLeave | MoveTo | RetrySnapshot
"""How training at a stage ends."""


class Training:
    """The training at one stage; it keeps nothing of the replica, for the next one's weights need the room.

    `migration`: watches whether we are needed elsewhere. `state`: what our record is to say. `ending`: once it is
    decided; where we go on at a stage our record is there from then on. `depart`: takes the place at that stage, given
    the device seconds of a microbatch here, and serves the old one no more. `discarded`: microbatches that became no
    step.
    """

    def __init__(
        self,
        migration: MigrationWatcher,
        work: StageWork,
        depart: Callable[[int, float], Awaitable[None]],
        reporter: Reporter,
    ) -> None:
        self.state = PeerState.TRAINING
        self.ending: Ending | None = None
        self.discarded = 0
        self._migration, self._work, self._depart, self._reporter = migration, work, depart, reporter

    async def run(
        self, replica: Replica, leave: asyncio.Event, in_pause: Callable[[], Awaitable[None]], *, moves: bool
    ) -> Ending:
        """Train until the run is over, or we are asked to leave or, if it `moves`, needed at another stage.

        `in_pause` is called between two inner steps. Raises `DeviceLost` in a group where the device fails for good.
        """
        self._reporter.say(f"training stage {replica.config.stage} from inner step {replica.inner_steps}")
        async with asyncio.TaskGroup() as group:
            gossip = group.create_task(replica.rounds.run(), name="gossip")
            steps = group.create_task(replica.train(in_pause), name="inner steps")
            work = group.create_task(self._work.run_until_done(replica), name="work")
            deserted = group.create_task(self._work.run_until_deserted(replica), name="deserted")
            asked = group.create_task(leave.wait(), name="leave")
            moving = group.create_task(self._migration.run(moves), name="moving")
            failed, lost = replica.starting_weights.failed_snapshot, replica.device_lost
            ends: set[asyncio.Future[Any]] = {work, deserted, asked, moving, failed, lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise lost.result()
            if work.done() or deserted.done():
                ending: Ending = RunOver()
            elif asked.done():
                ending = AskedToLeave()
            elif moving.done():
                ending = MoveTo(moving.result())
            else:
                ending = RetrySnapshot(replica.config.stage, *failed.result())
            self.ending = ending
            moving.cancel()
            self.state = PeerState.TRAINING if isinstance(ending, RunOver) else PeerState.LEAVING
            replica.admission.close()
            if isinstance(ending, MoveTo | RetrySnapshot):
                self._reporter.record(events.StateChanged(state=PeerState.LEAVING))
                stage = ending.stage if isinstance(ending, RetrySnapshot) else ending.move.target
                await self._depart(stage, replica.worker.device_s)
            await self._drain(replica, steps)
            for task in (work, deserted, asked, steps):
                task.cancel()
            await asyncio.wait({work, deserted, asked, steps})
            self.discarded = await replica.discard()
            if isinstance(ending, RunOver):
                self._reporter.say("the run is over; one last round")
                await until_event(leave, replica.rounds.last_round(LAST_ROUND_S))
            await replica.rounds.leave()
            gossip.cancel()
        return ending

    async def _drain(self, replica: Replica, steps: asyncio.Task[None]) -> None:
        """Wait until the step loop has ended: by itself, once nothing is in flight; a complete window is still used."""
        drain_s = min(LONGEST_DRAIN_S, max(DRAIN_S, 2 * replica.seconds_per_step))
        until_s = loop_s() + drain_s
        while not steps.done() and not replica.stranded and loop_s() < until_s:
            await asyncio.wait({steps}, timeout=0.5)
        if replica.admission.in_flight:
            self._reporter.say(f"{replica.admission.in_flight} microbatches did not come back in time")

    def tell(self, replica: Replica, ending: Ending) -> None:
        """Journal how it ended."""
        match ending:
            case RunOver():
                self._reporter.record(_finished(replica, events.RUN_OVER, self.discarded))
            case AskedToLeave():
                self._reporter.record(_finished(replica, ASKED, self.discarded))
            case MoveTo(move):
                self._reporter.say(f"moving from stage {move.origin} to stage {move.target}: {move}")
                self._tell_move(move.origin, move.target, str(move))
            case RetrySnapshot(stage):
                why = f"the weights of stage {stage} that we were given are worth nothing"
                self._reporter.say(f"leaving stage {stage}: {why}")
                self._tell_move(stage, stage, why)

    def _tell_move(self, origin: int, target: int, why: str) -> None:
        self._reporter.record(events.Moved(origin=origin, target=target, why=why, discarded=self.discarded))
        self._reporter.record(events.StateChanged(state=PeerState.JOINING))

    def farewell(self, replica: Replica) -> events.Finished:
        """Return what is to be journalled should we be asked to leave before we have arrived at the other stage."""
        return _finished(replica, ASKED, 0)  # what was discarded is told with the move


def _finished(replica: Replica, why: str, discarded: int) -> events.Finished:
    return events.Finished(
        why=why,
        step=replica.inner_steps,
        round=replica.rounds.finished,
        progress=replica.progress.value,
        discarded=discarded,
    )
