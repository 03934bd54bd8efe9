"""A node's assignment to one stage, from the moment it has the stage's weights until it gives them up.

The assignment serves peers (microbatches, meetings, copies of its state), trains, and saves. It ends when the run is
over, when the node is asked to leave, when another stage needs the node (`MoveTo`), or when the snapshot that it began
with proves worthless (`RetrySnapshot`). From then on it takes nothing new, waits within bounds for the microbatches in
hand, and discards and counts the rest.

    TRAINING --RunOver--------------> drain, last round, save --> FINISHED: serve the weights for a while
             --AskedToLeave---------> LEAVING: drain, save
             --MoveTo,RetrySnapshot-> LEAVING: claim the next place, drain, save, release the weights

Two stages at once may not fit into memory. So the assignment owns everything that holds weights, and `AssignmentEnd`,
which outlives it, holds none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from math import isinf
from typing import Any, NamedTuple, TypeAlias

from msgspec import structs

from noloco_node import __version__
from noloco_node.evaluation.evaluator import Evaluator, EvaluatorContext, last_evaluation
from noloco_node.journal import events
from noloco_node.limits.rate_limit import spending
from noloco_node.node.health import Condition, HealthMonitor
from noloco_node.node.join import Start
from noloco_node.node.migration import MigrationWatcher
from noloco_node.node.node_context import NodeContext
from noloco_node.node.replica import Replica
from noloco_node.node.reporting import ProgressReporter
from noloco_node.node.stage_claim import out_of_memory
from noloco_node.node.stage_server import StageServer
from noloco_node.node.stage_work import StageWork
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.state_sync.snapshot_keeper import SnapshotKeeper, SnapshotKeeperConfig, SnapshotServer
from noloco_node.state_sync.starting_state import SnapshotTrial
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.checkpoint_store import CheckpointWriter
from noloco_node.swarm.roster import MOST_WAITS
from noloco_node.tasks import background, loop_s, supervised, until_event
from pipeline.placement import Move
from pipeline.worker import UNFIT_S

ASKED = "asked to leave"
LAST_ROUND_S = 20.0
DRAIN_S, LONGEST_DRAIN_S = 10.0, 60.0
"""How long a leaving node waits for the microbatches in its hands: twice what a window took, within these bounds."""


class RunOver(NamedTuple):
    """The token budget of the run is used up."""


class AskedToLeave(NamedTuple):
    """We were asked to leave."""


class MoveTo(NamedTuple):
    """Another stage needs us more."""

    move: Move


class RetrySnapshot(NamedTuple):
    """The snapshot that we began with is worth nothing, as its loss shows: we join the stage again with another one."""

    stage: int
    trial: SnapshotTrial
    loss: float


Ending: TypeAlias = RunOver | AskedToLeave | MoveTo | RetrySnapshot


class AssignmentEnd(NamedTuple):
    """What remains of an assignment. `saved`: its last checkpoint is on the disk.

    `device_s`: device seconds of a microbatch at the next stage. `moves`: of this peer so far, with this one.
    `finished`: the event to journal if we are asked to leave before we arrive there.
    """

    ending: Ending
    saved: bool
    moves: int
    device_s: float
    finished: events.Finished


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeServices:
    """The parts of a node that outlive its assignments. `shut_out`: bans a peer for so many seconds."""

    work: StageWork
    writer: CheckpointWriter
    health: HealthMonitor
    shut_out: Callable[[str, float], None]
    snapshots: SnapshotServer


class Assignment:
    """One node at one stage. `moves`: of this peer so far. `unfit`: stages that this node could not build."""

    def __init__(
        self,
        context: NodeContext,
        services: NodeServices,
        start: Start,
        moves: int,
        unfit: set[int],
    ) -> None:
        self._context, self._services = context, services
        self._reporter = context.reporter
        replica = self.replica = _make_replica(context, services, start)
        self._server = StageServer(context, replica)
        self.migration = MigrationWatcher(
            context, start.number, moves, lambda: replica.progress.value, unfit, lambda: replica.rounds.met_partners
        )
        self._state = PeerState.TRAINING
        self._ending: Ending | None = None
        """Set once it is decided. From then on our record is at the next stage, if there is one."""
        self._conditions: dict[str, Condition] = {}
        self._discarded = 0  # microbatches that became no step
        self._progress = ProgressReporter(context, replica, self._announce_training)
        self._evaluator = self._make_evaluator()

    async def run(self, leave: asyncio.Event) -> AssignmentEnd:
        """Serve, train and save until the assignment ends."""
        await self._server.begin()
        self._announce(PeerState.TRAINING)
        self._reporter.record(events.StateChanged(state=PeerState.TRAINING))
        async with nullcontext() if self._evaluator is None else aclosing(self._evaluator):
            return await self._run(leave)

    async def _run(self, leave: asyncio.Event) -> AssignmentEnd:
        context, services = self._context, self._services
        keeping = supervised("the keeping of snapshots", self._keep_snapshots, self._reporter.warn)
        async with aclosing(self.replica), background(services.writer.run(), keeping):
            async with background(supervised("the report of progress", self._progress.run, self._reporter.warn)):
                try:
                    ending = await self.train(leave)
                    self._progress.record_totals()
                    self._progress.record_receipts()
                    self._tell(ending)
                except (ExceptionGroup, asyncio.CancelledError) as end:
                    # Cancelled by a failure beside us, and not by somebody who wants us to end at once.
                    if isinstance(end, ExceptionGroup) or context.membership.failed:
                        await self._save()
                    raise
                finally:
                    # Samples that came back after our last record count as well.
                    context.membership.note_samples(services.work.samples)
            saved = await self._save()
        finished = self._finished(ASKED, 0)  # the event of the move counts the discarded microbatches
        if isinstance(ending, RunOver) and not leave.is_set():
            await self._linger(leave)
        if isinstance(ending, MoveTo | RetrySnapshot):
            services.work.rest()
            await self._server.aclose()
        moves = self.migration.moves + isinstance(ending, MoveTo)
        return AssignmentEnd(ending, saved, moves, self.migration.device_s, finished)

    # The training, and its end.

    async def train(self, leave: asyncio.Event) -> Ending:
        """Train until the assignment ends.

        Raises, in a group, `TrainingFailed` if device or program fail for good, `UserError` if memory does not suffice.
        """
        replica, work = self.replica, self._services.work
        self._reporter.say(f"training stage {replica.stage} from inner step {replica.inner_steps}")
        async with asyncio.TaskGroup() as group:
            gossip = group.create_task(replica.rounds.run(), name="gossip")
            steps = group.create_task(replica.train(self._in_pause), name="inner steps")
            done = group.create_task(work.run_until_done(replica), name="work")
            deserted = group.create_task(work.run_until_deserted(replica), name="deserted")
            asked = group.create_task(leave.wait(), name="leave")
            moving = group.create_task(self.migration.run(), name="moving")
            unfit = group.create_task(replica.worker.unfit.wait(), name="unfit")
            bad_snapshot, failed = replica.starting_weights.failed_snapshot, replica.training_failed
            ends: set[asyncio.Future[Any]] = {done, deserted, asked, moving, bad_snapshot, failed, unfit}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            if unfit.done():
                raise out_of_memory(replica.stage, f"for {UNFIT_S:.0f} s every microbatch ran out of it")
            unfit.cancel()
            ending: Ending
            if done.done() or deserted.done():
                ending = RunOver()
            elif asked.done():
                ending = AskedToLeave()
            elif moving.done():
                ending = MoveTo(moving.result())
            else:
                ending = RetrySnapshot(replica.stage, *bad_snapshot.result())
            self._ending = ending
            moving.cancel()
            self._state = PeerState.TRAINING if isinstance(ending, RunOver) else PeerState.LEAVING
            replica.admission.close()
            if isinstance(ending, MoveTo | RetrySnapshot):
                # Claim our place at another stage, or anew at ours, and serve this one no more.
                self._reporter.record(events.StateChanged(state=PeerState.LEAVING))
                target = ending.stage if isinstance(ending, RetrySnapshot) else ending.move.target
                await self.migration.take_place(target, replica.worker.device_s)
                await self._server.stop()
            await self._drain(steps)
            for task in (done, deserted, asked, steps):
                task.cancel()
            await asyncio.wait({done, deserted, asked, steps})
            self._discarded = await replica.discard()
            if isinstance(ending, RunOver):
                self._reporter.say("the run is over; one last round")
                await until_event(leave, replica.rounds.last_round(LAST_ROUND_S))
            await replica.rounds.leave()
            gossip.cancel()
        return ending

    async def _drain(self, steps: asyncio.Task[None]) -> None:
        """Wait until the step loop ends, as it does once nothing is in flight; a complete window is still used."""
        replica = self.replica
        until_s = loop_s() + min(LONGEST_DRAIN_S, max(DRAIN_S, 2 * replica.seconds_per_step))
        while not steps.done() and not replica.stranded and loop_s() < until_s:
            await asyncio.wait({steps}, timeout=0.5)
        if replica.admission.in_flight:
            self._reporter.say(f"{replica.admission.in_flight} microbatches did not come back in time")

    def _tell(self, ending: Ending) -> None:
        """Journal how the assignment ended."""
        match ending:
            case RunOver():
                self._reporter.record(self._finished(events.RUN_OVER, self._discarded))
                return
            case AskedToLeave():
                self._reporter.record(self._finished(ASKED, self._discarded))
                return
            case MoveTo(move):
                origin, target, why = move.origin, move.target, str(move)
                self._reporter.say(f"moving from stage {origin} to stage {target}: {why}")
            case RetrySnapshot(origin):
                target, why = origin, f"the weights of stage {origin} that we were given are worth nothing"
                self._reporter.say(f"leaving stage {origin}: {why}")
        self._reporter.record(events.Moved(origin=origin, target=target, why=why, discarded=self._discarded))
        self._reporter.record(events.StateChanged(state=PeerState.JOINING))

    def conditions(self, explained: bool) -> dict[str, Condition]:
        """Return what keeps the training from going on, or did when it ended before the run.

        `explained`: as in `ProgressReporter.conditions`.
        """
        if self._ending is None:
            self._conditions = self._progress.conditions(explained)
        return {} if isinstance(self._ending, RunOver) else self._conditions

    def forgive(self, for_s: float) -> None:
        """Suspect no peer of the next stage for so long, and no partner until now: we were away ourselves."""
        self.replica.rounds.forgive()
        if self.replica.next_stage is not None:
            self.replica.next_stage.forgive(for_s)

    def _finished(self, why: str, discarded: int) -> events.Finished:
        replica = self.replica
        return events.Finished(
            why=why,
            step=replica.inner_steps,
            round=replica.rounds.finished,
            progress=replica.progress.value,
            discarded=discarded,
        )

    async def _linger(self, leave: asyncio.Event) -> None:
        """Serve the weights for a while after the end of the run."""
        reporter, linger_s = self._reporter, self._context.options.linger_s
        until_s = loop_s() + linger_s
        self._announce(PeerState.FINISHED)
        reporter.record(events.StateChanged(state=PeerState.FINISHED))
        until = "until we leave" if isinf(linger_s) else f"for {linger_s:.0f} s, Ctrl-C leaves now"
        reporter.say(f"finished; serving the weights {until}")
        if self._evaluator is not None and not self.replica.starting_weights.doubtful:
            await until_event(leave, self._evaluator.at_the_end(*self._place()))
            self._announce(PeerState.FINISHED)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await leave.wait()
        every, membership = self._context.run.data.evaluate_every_rounds, self._context.membership
        if every and self.replica.stage > 0:
            await until_event(leave, last_evaluation(lambda: membership.roster, every))
        self._progress.record_receipts()  # signers tell of their last work when they end, which is after us

    # What we say of ourselves.

    def _announce_training(self) -> PeerState:
        self._announce(self._state)
        return self._state

    def _announce(self, state: PeerState) -> None:
        context, services = self._context, self._services
        if isinstance(self._ending, MoveTo | RetrySnapshot):
            return  # our record is at the next stage
        record = self.replica.describe(state)
        disk = services.writer.trouble
        waiting = (
            *record.waiting,
            *(() if disk is None else (Wait(WaitCause.DISK, disk.seconds, disk.why),)),
            *(Wait(WaitCause.OTHER, detail=brief) for brief in services.health.trouble),
        )
        record = structs.replace(
            record,
            samples=services.work.samples,
            waiting=waiting[:MOST_WAITS],
            budget=spending(context.network.statistics()),
            hops=self._progress.hops,
            evaluation=None if self._evaluator is None else self._evaluator.newest,
        )
        context.membership.update(self.migration.with_plans(record))

    # What lies on the disk.

    async def _in_pause(self) -> None:
        """Save every round; between two inner steps weights, momentum and optimiser belong together.

        While an outer step is computed beside the training they do not: its end would be waited for.
        """
        replica, rounds = self.replica, self.replica.rounds
        if self._evaluator is not None and not replica.starting_weights.doubtful:
            await self._evaluator.in_pause(*self._place())
        due = not replica.starting_weights.doubtful and self._services.writer.due(replica.stage, rounds.finished)
        if due and rounds.settled:
            self._services.writer.begin(await self._checkpoint())

    def _place(self) -> tuple[int, int, float]:
        """Return how far the replica is: its round, its inner steps, its progress."""
        return self.replica.rounds.finished, self.replica.inner_steps, self.replica.progress.value

    async def _save(self) -> bool:
        """Write the last checkpoint; return whether the weights are on the disk.

        A doubtful snapshot replaces no checkpoint. Nor do the slow weights of a replica whose training has failed
        replace a whole checkpoint of the same round.
        """
        replica, writer = self.replica, self._services.writer
        kept = replica.training_failed.done() and writer.holds(replica.stage, replica.rounds.finished)
        return kept or replica.starting_weights.doubtful or await writer.finish(await self._checkpoint())

    async def _checkpoint(self) -> Checkpoint:
        work = self._services.work
        return await self.replica.checkpoint(work.samples, work.position())

    def _make_evaluator(self) -> Evaluator | None:
        """Return what evaluates our replica; None where nothing is to be evaluated."""
        context, replica = self._context, self.replica
        if context.host.evaluation is None or replica.stage > 0:
            return None
        evaluated = EvaluatorContext(
            run_id=context.run_file.digest,
            run=context.run,
            me=context.me,
            host=context.host.evaluation,
            roster=lambda: context.membership.roster,
            losses=replica.losses,
            logits=replica.logits,
            evaluated=replica.evaluated,
            busy_s=lambda: context.host.device.busy_s,
            is_ending=lambda: self._ending is not None,
            reporter=self._reporter,
        )
        return Evaluator(evaluated, replica.rounds.finished)

    async def _keep_snapshots(self) -> None:
        context, membership = self._context, self._context.membership
        if not context.keeps_snapshots:
            return
        config = SnapshotKeeperConfig(
            run_id=context.run_file.digest,
            seed=context.run.seed,
            own=self.replica.stage,
            every=context.options.keep_snapshots,
        )
        await SnapshotKeeper(config, self._services.snapshots, lambda: membership.roster, context.reporter).run()


def _make_replica(context: NodeContext, services: NodeServices, start: Start) -> Replica:
    services.work.begin(start.starting_state.progress, start.counted)
    context.membership.focus(
        context.run.pipeline.all_stages if context.keeps_snapshots else (start.number, start.number + 1)
    )
    context.reporter.record(
        events.Started(
            peer=context.me,
            stage=start.number,
            run=context.run_file.digest,
            version=__version__,
            parameters=sum(tensor.numel() for tensor in start.starting_state.origin.state.slow),
        )
    )
    return Replica(context, start.number, start.stage, start.starting_state, services.shut_out)
