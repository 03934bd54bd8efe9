"""A node's assignment to one stage, from the moment it has the stage's weights until it gives them up.

The assignment serves peers, trains, and saves. It ends when the run is over, when the node is asked to leave, when
another stage needs the node (`MoveTo`), or when the snapshot that it began with proves worthless (`RetrySnapshot`).
From then on it takes nothing new, waits within bounds for what is in hand, and discards and counts the rest.

    TRAINING --RunOver--------------> drain, last round, save --> FINISHED: serve the weights for a while
             --AskedToLeave---------> LEAVING: drain, save
             --MoveTo,RetrySnapshot-> LEAVING: claim the next place, drain, save, release the weights

Two stages at once may not fit into memory. So the assignment owns everything that holds weights, and `AssignmentEnd`,
which outlives it, holds none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from msgspec import structs

from noloco_node import __version__
from noloco_node.journal import events
from noloco_node.limits.rate_limit import spending
from noloco_node.node.health import HealthMonitor
from noloco_node.node.join import Start
from noloco_node.node.migration import MigrationWatcher
from noloco_node.node.node_context import NodeContext
from noloco_node.node.replica import Replica
from noloco_node.node.replica_context import ReplicaConfig, ReplicaContext
from noloco_node.node.reporting import ProgressReporter
from noloco_node.node.stage_server import StageServer
from noloco_node.node.stage_work import StageWork
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.run.protocols import gossip_schema, microbatch_schema
from noloco_node.state_sync.download import copying_s
from noloco_node.state_sync.snapshot_keeper import SnapshotKeeper, SnapshotKeeperConfig
from noloco_node.state_sync.starting_state import SnapshotTrial
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.checkpoint_store import CheckpointWriter
from noloco_node.swarm.roster import MOST_WAITS
from noloco_node.tasks import background, loop_s, supervised, until_event
from pipeline.placement import Move

ASKED = "asked to leave"
LAST_ROUND_S = 20.0
DRAIN_S, LONGEST_DRAIN_S = 10.0, 60.0
"""How long a leaving node waits for the microbatches in its hands: twice what a window took, within these bounds."""


class RunOver(NamedTuple):
    """The run is done."""


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
"""How an assignment ends."""


class AssignmentEnd(NamedTuple):
    """The rest of an assignment. `saved`: its last checkpoint is on the disk.

    `device_s`: what a microbatch will take at the stage where we go on. `moves`: of this peer so far, with this one.
    `finished`: journalled if we are asked to leave before we have arrived there.
    """

    ending: Ending
    saved: bool
    moves: int
    device_s: float
    finished: events.Finished


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeServices:
    """The parts of a node that outlive its assignments. `shut_out`: a peer, for so many seconds."""

    work: StageWork
    writer: CheckpointWriter
    health: HealthMonitor
    shut_out: Callable[[str, float], None]


class Assignment:
    """One node at one stage. `moves`: of this peer so far. `unfit`: stages that it could not build."""

    def __init__(
        self,
        context: NodeContext,
        services: NodeServices,
        start: Start,
        addresses: tuple[str, ...],
        moves: int,
        unfit: set[int],
    ) -> None:
        self._context, self._services, self._addresses = context, services, addresses
        self._reporter = context.reporter
        replica = self.replica = _make_replica(context, services, start)
        self._server = StageServer(context, replica)
        self.migration = MigrationWatcher(
            context,
            start.number,
            moves,
            lambda: replica.progress.value,
            unfit,
            lambda: replica.rounds.met_partners,
        )
        self._state = PeerState.TRAINING
        """What our record says."""
        self._ending: Ending | None = None
        """Once it is decided. From then on our record is at the stage where we go on, if there is one."""
        self._discarded = 0
        """Microbatches that became no step."""
        self._progress = ProgressReporter(
            replica,
            context.network,
            self._reporter,
            context.options.refresh_s,
            self._announce_training,
            context.membership,
        )

    async def run(self, leave: asyncio.Event) -> AssignmentEnd:
        """Serve, train and save until the assignment ends."""
        context, services = self._context, self._services
        await self._server.begin()
        self._announce(PeerState.TRAINING)
        self._reporter.record(events.StateChanged(state=PeerState.TRAINING))
        async with aclosing(self.replica), background(services.writer.run()), background(self._keep_snapshots()):
            async with background(supervised("the report of progress", self._progress.run, context.warn)):
                try:
                    ending = await self.train(leave)
                    self._progress.record_totals()
                    self._progress.record_receipts()
                    self._tell(ending)
                except ExceptionGroup:
                    await self._save()
                    raise
                finally:
                    # What came back after our record was renewed last counts as well.
                    context.membership.note_samples(services.work.samples)
            saved = await self._save()
        finished = self._finished(ASKED, 0)  # what was discarded is told with the move
        if isinstance(ending, RunOver) and not leave.is_set():
            await self._linger(leave)
        if isinstance(ending, MoveTo | RetrySnapshot):
            services.work.rest()
            await self._server.aclose()
        moves = self.migration.moves + isinstance(ending, MoveTo)
        return AssignmentEnd(ending, saved, moves, self.migration.device_s, finished)

    # The training, and its end.

    async def train(self, leave: asyncio.Event) -> Ending:
        """Train until the assignment ends. Raises `DeviceLost` in a group where the device fails for good."""
        replica, work = self.replica, self._services.work
        self._reporter.say(f"training stage {replica.config.stage} from inner step {replica.inner_steps}")
        async with asyncio.TaskGroup() as group:
            gossip = group.create_task(replica.rounds.run(), name="gossip")
            steps = group.create_task(replica.train(self._in_pause), name="inner steps")
            done = group.create_task(work.run_until_done(replica), name="work")
            deserted = group.create_task(work.run_until_deserted(replica), name="deserted")
            asked = group.create_task(leave.wait(), name="leave")
            moving = group.create_task(self.migration.run(), name="moving")
            failed, lost = replica.starting_weights.failed_snapshot, replica.device_lost
            ends: set[asyncio.Future[Any]] = {done, deserted, asked, moving, failed, lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise lost.result()
            ending: Ending
            if done.done() or deserted.done():
                ending = RunOver()
            elif asked.done():
                ending = AskedToLeave()
            elif moving.done():
                ending = MoveTo(moving.result())
            else:
                ending = RetrySnapshot(replica.config.stage, *failed.result())
            self._ending = ending
            moving.cancel()
            self._state = PeerState.TRAINING if isinstance(ending, RunOver) else PeerState.LEAVING
            replica.admission.close()
            if isinstance(ending, MoveTo | RetrySnapshot):
                await self._depart(ending.stage if isinstance(ending, RetrySnapshot) else ending.move.target)
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

    async def _depart(self, stage: int) -> None:
        """Claim our place at another stage, or anew at ours, and serve this one no more."""
        self._reporter.record(events.StateChanged(state=PeerState.LEAVING))
        await self.migration.take_place(stage, self.replica.worker.device_s)
        await self._server.stop()

    async def _drain(self, steps: asyncio.Task[None]) -> None:
        """Wait until the step loop has ended: by itself, once nothing is in flight; a complete window is still used."""
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
            case AskedToLeave():
                self._reporter.record(self._finished(ASKED, self._discarded))
            case MoveTo(move):
                self._reporter.say(f"moving from stage {move.origin} to stage {move.target}: {move}")
                self._tell_move(move.origin, move.target, str(move))
            case RetrySnapshot(stage):
                why = f"the weights of stage {stage} that we were given are worth nothing"
                self._reporter.say(f"leaving stage {stage}: {why}")
                self._tell_move(stage, stage, why)

    def _tell_move(self, origin: int, target: int, why: str) -> None:
        self._reporter.record(events.Moved(origin=origin, target=target, why=why, discarded=self._discarded))
        self._reporter.record(events.StateChanged(state=PeerState.JOINING))

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
        """Go on serving the weights after the end of a run."""
        reporter, linger_s = self._reporter, self._context.options.linger_s
        self._announce(PeerState.FINISHED)
        reporter.record(events.StateChanged(state=PeerState.FINISHED))
        reporter.say(f"finished; serving the weights for {linger_s:.0f} s, Ctrl-C leaves now")
        with suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                await leave.wait()

    # What we say of ourselves.

    def _announce_training(self) -> PeerState:
        self._announce(self._state)
        return self._state

    def _announce(self, state: PeerState) -> None:
        context, services = self._context, self._services
        if isinstance(self._ending, MoveTo | RetrySnapshot):
            return  # our record is at the stage where we go on
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
            addresses=self._addresses,
            waiting=waiting[:MOST_WAITS],
            budget=spending(context.network.statistics()),
            hops=self._progress.hops,
        )
        context.membership.update(self.migration.with_plans(record))

    # What lies on the disk.

    async def _in_pause(self) -> None:
        """Save every round, between two inner steps, where weights, momentum and optimiser belong together."""
        replica = self.replica
        if not replica.starting_weights.doubtful and self._services.writer.due(replica.rounds.finished):
            self._services.writer.begin(await self._checkpoint())

    async def _save(self) -> bool:
        """Write the last checkpoint; a disk that refuses is said and costs no more than that.

        A snapshot that may be worth nothing does not take the place of what is there; nor does what is left of a
        replica whose device is lost take that of a whole checkpoint with the same slow weights.
        """
        replica, writer = self.replica, self._services.writer
        kept = replica.device_lost.done() and writer.holds(replica.rounds.finished)
        return kept or replica.starting_weights.doubtful or await writer.finish(await self._checkpoint())

    async def _checkpoint(self) -> Checkpoint:
        work = self._services.work
        return await self.replica.checkpoint(work.samples, work.position())

    async def _keep_snapshots(self) -> None:
        """Keep stage snapshots, if the owner asked for it."""
        context, store = self._context, self._context.host.snapshots
        if store is None or not context.keeps_snapshots:
            return
        config = SnapshotKeeperConfig(
            run_id=context.run_file.digest,
            seed=context.run.seed,
            shapes=tuple(tuple(shapes.values()) for shapes in context.dimensions.shapes),
            own=self.replica.config.stage,
            every=context.options.keep_snapshots,
            deadline_s=lambda weight_bytes: copying_s(weight_bytes, context.options.slowest_bytes_per_s),
        )
        membership = context.membership
        await SnapshotKeeper(
            config, context.network, lambda: membership.roster, store, context.host.device, context.reporter
        ).run()


def _make_replica(context: NodeContext, services: NodeServices, start: Start) -> Replica:
    """Make a replica of what joining yielded."""
    run, options, membership = context.run, context.options, context.membership
    services.work.begin(start.starting_state.progress, start.counted)
    membership.focus(run.pipeline.all_stages if context.keeps_snapshots else (start.number, start.number + 1))
    config = ReplicaConfig(
        run=run,
        run_id=context.run_file.digest,
        stage=start.number,
        peer=context.me,
        deadlines=options.deadlines,
        slowest_bytes_per_s=options.slowest_bytes_per_s,
        line_s=context.host.line_s(start.number),
    )
    replica_context = ReplicaContext(
        network=context.network,
        roster=lambda: membership.roster,
        record=context.reporter.record,
        hold=context.host.hold,
        microbatch_schema=microbatch_schema(run, context.dimensions.width),
        gossip_schema=gossip_schema(run, start.stage.shapes),
        vocabulary=context.dimensions.vocabulary,
        unix_time=context.host.unix_time,
        shut_out=services.shut_out,
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
    return Replica(config, start.stage, context.host.device, replica_context, start.starting_state)
