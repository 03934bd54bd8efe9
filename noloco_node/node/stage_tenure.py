"""A node's time at one stage: from the moment at which it has the stage's weights to the one at which it gives them up.

Two stages at once may not fit into memory. So everything that holds weights belongs to the tenure, and what is left of
it (`TenureEnd`) holds none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from math import inf, prod
from typing import NamedTuple

from msgspec import structs

from gossip.transfer.chunks import cut
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import piece_s
from noloco_node import __version__
from noloco_node.journal import events
from noloco_node.limits.rate_limit import spending
from noloco_node.network.interface import Conversation, Handler
from noloco_node.network.schema import Schema, Violation
from noloco_node.node.joining.join import Start
from noloco_node.node.migration import MigrationWatcher
from noloco_node.node.node_context import NodeContext
from noloco_node.node.replica import Replica
from noloco_node.node.replica_context import ReplicaConfig, ReplicaContext
from noloco_node.node.reporting import ProgressReporter
from noloco_node.node.training import Ending, MoveTo, RetrySnapshot, RunOver, Training
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.run.protocols import GOSSIP, MICROBATCH, STATE, gossip_schema, microbatch_schema, state_schema, topic
from noloco_node.state_sync.download import copying_s
from noloco_node.state_sync.snapshot_keeper import SnapshotKeeper, SnapshotKeeperConfig, turn_away
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.swarm.roster import MOST_WAITS
from noloco_node.tasks import background, supervised

"""Characters of what we wait for, in our record: there may be many things."""


class TenureEnd(NamedTuple):
    """How the time at a stage ended. `saved`: its last checkpoint is on the disk.

    `device_s`: what a microbatch will take at the stage where we go on. `moves`: of this peer so far, with this one.
    `finished`: what is to be journalled should we be asked to leave before we have arrived there.
    """

    ending: Ending
    saved: bool
    moves: int
    device_s: float
    finished: events.Finished


class StageTenure:
    """One node at one stage. `moves`: of this peer so far. `unfit`: stages that it could not build."""

    def __init__(
        self, context: NodeContext, start: Start, addresses: tuple[str, ...], moves: int, unfit: set[int]
    ) -> None:
        self._context, self._addresses = context, addresses
        replica = self.replica = _make_replica(context, start)
        self._shapes = tuple(context.dimensions.shapes[start.number].values())
        self._served: dict[str, Schema] = {}
        """What is said here about each topic."""
        self._meetings: set[asyncio.Task[object]] = set()
        """Others' offers that are being answered, which may take as long as an exchange."""
        self._donor = Donor(replica.state, context.host.device.beside, self._shapes, self._donor_limits())
        self.migration = MigrationWatcher(
            context.newcomer(context.options.stage),
            start.number,
            moves,
            context.options.refresh_s,
            lambda: replica.progress.value,
            unfit,
            lambda: replica.rounds.met_partners,
        )
        self._training = Training(self.migration, context.work, self._depart, context.reporter)
        self._progress = ProgressReporter(
            replica,
            context.network,
            context.reporter,
            context.options.refresh_s,
            self._announce_training,
            context.membership,
        )

    async def run(self, leave: asyncio.Event) -> TenureEnd:
        """Serve, train and save until the run is over, or we are asked to leave or needed at another stage."""
        context, training = self._context, self._training
        await self._start_serving()
        async with aclosing(self.replica), background(context.writer.run()), background(self._keep_snapshots()):
            warn = context.reporter.warn or context.reporter.say
            async with background(supervised("the report of progress", self._progress.run, warn)):
                try:
                    ending = await training.run(self.replica, leave, self._in_pause, moves=context.options.moves)
                    self._progress.record_totals()
                    self._progress.record_receipts()
                    training.tell(self.replica, ending)
                except ExceptionGroup:
                    await self._save()
                    raise
                finally:
                    # What came back after our record was renewed last counts as well.
                    context.membership.note_samples(context.work.samples)
            saved = await self._save()
        finished = training.farewell(self.replica)
        if isinstance(ending, RunOver) and not leave.is_set():
            await self._linger(leave)
        if isinstance(ending, MoveTo | RetrySnapshot):
            context.work.rest()
            self._donor.close()
            await self._end_meetings()
        moves = self.migration.moves + isinstance(ending, MoveTo)
        return TenureEnd(ending, saved, moves, self.migration.device_s, finished)

    # What others may ask of us.

    async def _start_serving(self) -> None:
        """Serve what a replica serves."""
        context, replica = self._context, self.replica
        run, number = context.run_file.run, replica.config.stage
        if number > 0:
            await self._serve(MICROBATCH, microbatch_schema(run, context.dimensions.width), replica.microbatches.serve)
        context.membership.give_receipts(replica.microbatches.issued if replica.config.last else None)
        await self._serve(GOSSIP, gossip_schema(run, self._shapes), self._meet)
        await self._serve(STATE, state_schema(self._shapes), self._give)
        self._announce(PeerState.TRAINING)
        context.reporter.record(events.StateChanged(state=PeerState.TRAINING))

    async def _serve(self, protocol: str, schema: Schema, handler: Handler) -> None:
        name = topic(protocol, self.replica.config.stage)
        self._served[name] = schema
        handler = violations_journalled(self._context.reporter.record, protocol, handler)
        await self._context.network.serve(name, schema, handler)

    async def _give(self, conversation: Conversation) -> None:
        """Give our weights to whoever asks, once they are known to be worth anything."""
        doubtful = self.replica.starting_weights.doubtful
        await (turn_away(conversation) if doubtful else self._donor.serve(conversation))

    async def _meet(self, conversation: Conversation) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._meetings.add(task)
        try:
            await self.replica.rounds.serve(conversation)
        finally:
            self._meetings.discard(task)

    async def _end_meetings(self) -> None:
        """Break off what is left of meetings: each holds the replica in memory, and nothing comes of it any more."""
        left = set(self._meetings)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    def _donor_limits(self) -> DonorLimits:
        """Return the limits of copies: one outlives its newcomer's patience, so that one that comes back finds it."""
        sizes, options = [4 * prod(shape) for shape in self._shapes], self._context.options
        patience_s = copying_s(sum(sizes), options.slowest_bytes_per_s) if options.deadlines else inf
        return DonorLimits(deadline_s=8 * patience_s, piece_s=piece_s(patience_s, len(cut(sizes))))

    async def _depart(self, stage: int, device_s: float) -> None:
        """Take our place at another stage, or anew at ours, and serve this one no more."""
        await self.migration.take_place(stage, device_s)
        for name, schema in self._served.items():
            await self._context.network.serve(name, schema, _gone)

    async def _linger(self, leave: asyncio.Event) -> None:
        """Go on serving the weights after the end of a run."""
        reporter, linger_s = self._context.reporter, self._context.options.linger_s
        self._announce(PeerState.FINISHED)
        reporter.record(events.StateChanged(state=PeerState.FINISHED))
        reporter.say(f"finished; serving the weights for {linger_s:.0f} s, Ctrl-C leaves now")
        with suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                await leave.wait()

    # What we say of ourselves.

    def _announce_training(self) -> PeerState:
        self._announce(self._training.state)
        return self._training.state

    def _announce(self, state: PeerState) -> None:
        context = self._context
        if isinstance(self._training.ending, MoveTo | RetrySnapshot):
            return  # our record is at the stage where we go on
        record = self.replica.describe(state)
        disk = context.writer.trouble
        waiting = (
            *record.waiting,
            *(() if disk is None else (Wait(WaitCause.DISK, disk.seconds, disk.why),)),
            *(Wait(WaitCause.OTHER, detail=brief) for brief in context.health.trouble),
        )
        record = structs.replace(
            record,
            samples=context.work.samples,
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
        if not replica.starting_weights.doubtful and self._context.writer.due(replica.rounds.finished):
            self._context.writer.begin(await self._checkpoint())

    async def _save(self) -> bool:
        """Write the last checkpoint; a disk that refuses is said and costs no more than that.

        A snapshot that may be worth nothing does not take the place of what is there; nor does what is left of a
        replica whose device is lost take that of a whole checkpoint with the same slow weights.
        """
        replica, writer = self.replica, self._context.writer
        kept = replica.device_lost.done() and writer.holds(replica.rounds.finished)
        return kept or replica.starting_weights.doubtful or await writer.finish(await self._checkpoint())

    async def _checkpoint(self) -> Checkpoint:
        work = self._context.work
        return await self.replica.checkpoint(work.samples, work.position())

    async def _keep_snapshots(self) -> None:
        """Keep snapshots of other stages, if the owner asked for it."""
        context, store = self._context, self._context.host.snapshots
        if store is None or not context.keeps_snapshots:
            return
        config = SnapshotKeeperConfig(
            run_id=context.run_file.digest,
            seed=context.run_file.run.seed,
            shapes=tuple(tuple(shapes.values()) for shapes in context.dimensions.shapes),
            own=self.replica.config.stage,
            every=context.options.keep_snapshots,
            deadline_s=lambda weight_bytes: copying_s(weight_bytes, context.options.slowest_bytes_per_s),
        )
        membership = context.membership
        await SnapshotKeeper(
            config, context.network, lambda: membership.roster, store, context.host.device, context.reporter
        ).run()


def _make_replica(context: NodeContext, start: Start) -> Replica:
    """Make what joining yielded a replica of its stage."""
    run, options, membership = context.run_file.run, context.options, context.membership
    context.work.begin(start.starting_state.progress, start.counted)
    membership.focus(range(run.pipeline.stages) if context.keeps_snapshots else (start.number, start.number + 1))
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
        shut_out=context.shut_out,
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


async def _gone(conversation: Conversation) -> None:
    """Tell whoever still asks; this handler keeps no weights in memory."""
    raise ConnectionResetError(f"we serve another stage now, {conversation.peer}")


def violations_journalled(record: Callable[[events.Event], None], topic: str, handler: Handler) -> Handler:
    """Journal what a peer sends that no peer may send; the network ends that conversation by itself."""

    async def journalled(conversation: Conversation) -> None:
        try:
            await handler(conversation)
        except Violation as violation:
            record(events.PeerViolation(peer=conversation.peer, topic=topic, why=str(violation)))
            raise

    return journalled
