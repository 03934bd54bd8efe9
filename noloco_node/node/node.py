"""One peer of one run: it joins, serves one stage after another, and leaves.

    JOINING --join()--> assignment --RunOver, AskedToLeave--> withdraw
       ^                    |
       +---MoveTo, RetrySnapshot

A newcomer reads the roster and claims a stage (`join`). It copies the state of a living replica, or starts from the
run's own weights while no stage has reported a round. It trains (`assignment`) until the token budget of the run is
used up or its owner asks it to leave; then it saves, and serves its weights for a while. Nothing outlives `live`: every
task belongs to one task group.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace

from noloco_node.errors import UserError, storage_error, user_error_of
from noloco_node.journal import events
from noloco_node.journal.writer import JournalThrottle
from noloco_node.machine.interface import Dimensions, Host, Reporter
from noloco_node.network.bans import BanHook
from noloco_node.network.calls import HookedNetwork
from noloco_node.network.interface import PeerNetwork
from noloco_node.network.timeouts import DialTimeouts
from noloco_node.node import assignment as assignments
from noloco_node.node.health import Condition, HealthMonitor
from noloco_node.node.join import Start, join
from noloco_node.node.node_context import NodeContext, NodeOptions, StageRequest
from noloco_node.node.replica import Replica
from noloco_node.node.stage_server import violations_journalled
from noloco_node.node.stage_work import StageWork
from noloco_node.run.peer_state import PeerState
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.download import copying_s
from noloco_node.state_sync.snapshot_keeper import SnapshotServer, training_at
from noloco_node.state_sync.starting_state import NONE_FAILED, FailedSnapshots
from noloco_node.storage.checkpoint_store import CheckpointWriter
from noloco_node.swarm import run_distribution, speed_test
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Roster
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import background, supervised, until_event
from pipeline.placement import Move

LAST_WORD_S = 5.0  # how long a node that has failed tries to tell the others that it leaves


class Node:
    """One peer of one run."""

    def __init__(
        self,
        run_file: RunFileText,
        dimensions: Dimensions,
        network: PeerNetwork,
        host: Host,
        options: NodeOptions,
        reporter: Reporter,
    ) -> None:
        run, reporter = run_file.run, replace(reporter, record=JournalThrottle(reporter.record))
        membership = Membership(
            network,
            run_file.digest,
            run.pipeline.stages,
            refresh_s=options.refresh_s,
            unix_time=host.unix_time,
            name=options.name,
            given=options.given,
        )
        bans = BanHook()
        context = self._context = NodeContext(
            run_file=run_file,
            dimensions=dimensions,
            network=HookedNetwork(network, DialTimeouts(), bans),
            membership=membership,
            host=host,
            reporter=reporter,
            options=options,
        )
        snapshots = SnapshotServer(
            context.network,
            host.device,
            host.checkpoints,
            tuple(tuple(shapes.values()) for shapes in dimensions.shapes),
            lambda size: copying_s(size, options.slowest_bytes_per_s),
            # Without snapshots we read records of our own stage and the next one alone.
            lambda number: context.keeps_snapshots and not training_at(membership.roster, number),
        )
        self._services = assignments.NodeServices(
            work=StageWork(run, membership, host.open_text, reporter),
            writer=CheckpointWriter(
                host.save,
                reporter.say,
                reporter.warn,
                options.save_every_s,
                lambda text, over: reporter.record(events.Noticed(what=events.DISK, text=text, over=over)),
            ),
            health=HealthMonitor(membership, reporter, host, self._forgive, self._conditions),
            shut_out=bans.shut_out,
            snapshots=snapshots,
        )
        self.assignment: assignments.Assignment | None = None  # our assignment; None on the way to a stage
        self._unfit: set[int] = set()
        self._failed: dict[int, FailedSnapshots] = {}  # snapshots that proved worthless, by stage

    @property
    def replica(self) -> Replica | None:
        """The replica that we train; None on the way to a stage."""
        return None if self.assignment is None else self.assignment.replica

    @property
    def roster(self) -> Roster:
        return self._context.membership.roster

    @property
    def membership(self) -> Membership:
        """Our own record, and those of all peers."""
        return self._context.membership

    @property
    def samples(self) -> int:
        """Sequences drawn here whose gradient came back."""
        return self._services.work.samples

    async def live(self, leave: asyncio.Event) -> None:
        """Join the run, train until it ends or `leave` is set, serve the weights for a while, and withdraw."""
        context = self._context
        network, record = context.network, context.reporter.record
        health = supervised("the watch over this node", self._services.health.run, context.reporter.warn)
        async with background(context.membership.run(), health):
            await network.serve(run_distribution.TOPIC, run_distribution.SCHEMA, context.run_file.serve)
            answer = violations_journalled(record, speed_test.TOPIC, speed_test.SpeedTestService().answer)
            await network.serve(speed_test.TOPIC, speed_test.SCHEMA, answer)
            await self._serve_checkpoint()
            record(events.StateChanged(state=PeerState.JOINING))
            try:
                saved = await self._serve_stages(leave)
            except Exception:
                # Else others would go on to send us microbatches.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORD_S):
                        await context.membership.withdraw()
                raise
            await context.membership.withdraw()
        if not saved:
            raise storage_error(
                "The weights of this replica could not be saved.",
                why="the disk refused; the lines above say how",
                hint="free some space; the checkpoints before it are kept, and the swarm does not wait for this one",
            )

    async def _serve_checkpoint(self) -> None:
        """Serve the pieces that we have of the checkpoint that the run starts from."""
        host, network = self._context.host, self._context.network
        stores = {weight_exchange.TOKENIZER_TOPIC: host.tokenizer}
        if host.first_weights is not None:
            stores[weight_exchange.TOPIC] = host.first_weights.store
        for topic, store in stores.items():
            if store is not None:
                server = weight_exchange.WeightServer(store, host.device.beside)
                await network.serve(topic, weight_exchange.SCHEMA, server.serve)

    async def _serve_stages(self, leave: asyncio.Event) -> bool:
        """Serve one stage after another; say whether the weights of the last one are saved."""
        start = until_event(leave, join(self._context, StageRequest(self._context.options.stage)))
        end = await self._serve_stage(start, leave, moves=0)
        while end is not None:
            match end.ending:
                case assignments.RunOver() | assignments.AskedToLeave():
                    return end.saved
                case assignments.RetrySnapshot(stage, trial, loss):
                    self._failed[stage] = self._failed.get(stage, NONE_FAILED).with_one(trial, loss)
                    arriving = self._arrive(StageRequest(stage, end.device_s, self._failed[stage]), leave)
                case assignments.MoveTo(move):
                    arriving = self._move(move, end.device_s, leave)
            gc.collect()  # two stages at once may not fit, and the parts of a replica refer to each other
            following = await self._serve_stage(arriving, leave, end.moves)
            if following is None:
                self._context.reporter.record(end.finished)
                return end.saved
            end = following
        return True

    async def _serve_stage(
        self, joining: Awaitable[Start | None], leave: asyncio.Event, moves: int
    ) -> assignments.AssignmentEnd | None:
        """Serve the stage that joining yields until the assignment ends; None if we are asked to leave before."""
        assignment = self.assignment = await self._begin(joining, moves)
        if assignment is None:
            return None
        end = await assignment.run(leave)
        if isinstance(end.ending, assignments.MoveTo | assignments.RetrySnapshot):
            self.assignment = None
            self._services.health.leave_stage()
        return end

    async def _begin(self, joining: Awaitable[Start | None], moves: int) -> assignments.Assignment | None:
        # `start` holds copies of weights that the replica will replace: nothing else may keep it.
        start = await joining
        if start is None:
            return None
        await self._services.snapshots.begin(start.number)
        return assignments.Assignment(self._context, self._services, start, moves, self._unfit)

    async def _arrive(self, request: StageRequest, leave: asyncio.Event) -> Start | None:
        """Join a stage as a node that has served one; None once we are asked to leave."""
        if leave.is_set():
            return None
        assert request.stage is not None
        await self._services.snapshots.begin(request.stage)
        return await until_event(leave, join(self._context, request))

    async def _move(self, move: Move, device_s: float, leave: asyncio.Event) -> Start | None:
        """Join the stage that we move to, or again the one that we come from; None once we are asked to leave."""
        try:
            return await self._arrive(StageRequest(move.target, device_s), leave)
        except (UserError, ExceptionGroup) as error:  # a group: of a download by several streams
            trouble = user_error_of(error)
            if trouble is None:
                raise
            why = f"{trouble.what} {trouble.why}"
            del trouble  # its traceback holds what was built
        gc.collect()  # what was built of it
        self._unfit.add(move.target)
        reporter = self._context.reporter
        reporter.say(f"we cannot serve stage {move.target}: {why} Going back to stage {move.origin}")
        reporter.record(events.Moved(origin=move.target, target=move.origin, why=why))
        reporter.record(events.StateChanged(state=PeerState.JOINING))
        return await until_event(leave, join(self._context, StageRequest(move.origin)))

    def _forgive(self, seconds: float) -> None:
        if self.assignment is not None:
            self.assignment.forgive(seconds)

    def _conditions(self, explained: bool) -> dict[str, Condition]:
        return {} if self.assignment is None else self.assignment.conditions(explained)
