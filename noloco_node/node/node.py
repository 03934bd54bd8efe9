"""One peer's life: join, catch up, train, leave.

A newcomer reads the roster and claims a stage; it copies the state of a living replica, or starts from the run's own
weights while no stage has reported a round; it trains until the token budget of the run is used up or somebody asks
it to go; it saves what it holds, and for a while goes on serving its weights to whoever takes the model home. Nothing
in it outlives `live`: every task belongs to one task group.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace

from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.journal.throttle import JournalThrottle
from noloco_node.machine.interface import Dimensions, Host, Reporter
from noloco_node.network.bans import BanHook
from noloco_node.network.interface import HookedNetwork, PeerNetwork
from noloco_node.network.timeouts import DialTimeouts
from noloco_node.node.health import HealthMonitor
from noloco_node.node.joining.join import Start, join
from noloco_node.node.node_context import NodeContext, NodeOptions
from noloco_node.node.replica import Replica
from noloco_node.node.stage_tenure import StageTenure, TenureEnd, violations_journalled
from noloco_node.node.training import AskedToLeave, MoveTo, RetrySnapshot, RunOver, StageWork
from noloco_node.run.peer_state import PeerState
from noloco_node.state_sync import weight_exchange
from noloco_node.state_sync.download import copying_s
from noloco_node.state_sync.snapshot_keeper import FormerStageServer
from noloco_node.state_sync.starting_state import NONE_FAILED, FailedSnapshots
from noloco_node.storage.checkpoint_store import CheckpointWriter
from noloco_node.swarm import run_distribution, speed_test
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Roster
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import background, supervised, until_event
from pipeline.placement import Move

LAST_WORD_S = 5.0
"""For telling the others that we leave, where something has failed here."""
MOST_ADDRESSES = 8
"""Of a machine with very many interfaces; a record has little room."""


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
            host=host,
            options=options,
            reporter=reporter,
            membership=membership,
            work=StageWork(run, network.peer_id, membership, host.open_text, reporter),
            writer=CheckpointWriter(
                host.save, reporter.say, reporter.warn or reporter.say, options.save_every_s, self._note_disk
            ),
            health=HealthMonitor(membership, reporter, host.unix_time, host.asleep_s, self._forgive),
            shut_out=bans.shut_out,
        )
        self._snapshots = FormerStageServer(
            host,
            context.network,
            tuple(tuple(shapes.values()) for shapes in dimensions.shapes),
            None if context.keeps_snapshots else lambda size: copying_s(size, options.slowest_bytes_per_s),
        )
        self._tenure: StageTenure | None = None
        self._addresses: tuple[str, ...] = ()
        self._unfit: set[int] = set()
        """Stages that we could not build."""
        self._failed: dict[int, FailedSnapshots] = {}
        """Snapshots that were worth nothing, by stage."""

    def _note_disk(self, text: str, over: bool) -> None:
        self._context.reporter.record(events.Noticed(what=events.DISK, text=text, over=over))

    @property
    def replica(self) -> Replica | None:
        """What we train, once we have joined; None on the way to another stage."""
        return None if self._tenure is None else self._tenure.replica

    @property
    def roster(self) -> Roster:
        """Who is there, as far as we know."""
        return self._context.membership.roster

    @property
    def membership(self) -> Membership:
        """Our own record and everybody's."""
        return self._context.membership

    @property
    def samples(self) -> int:
        """Sequences drawn here that a gradient came back for."""
        return self._context.work.samples

    async def live(self, leave: asyncio.Event) -> None:
        """Join the run, train until it ends or `leave` is set, serve the weights for a while, and withdraw."""
        context = self._context
        network, record = context.network, context.reporter.record
        self._addresses = (await network.addresses())[:MOST_ADDRESSES]
        warn = context.reporter.warn or context.reporter.say
        health = supervised("the watch over this node", context.health.run, warn)
        async with background(context.membership.run()), background(health):
            await network.serve(run_distribution.TOPIC, run_distribution.SCHEMA, context.run_file.serve)
            answer = violations_journalled(record, speed_test.TOPIC, speed_test.SpeedTestService().answer)
            await network.serve(speed_test.TOPIC, speed_test.SCHEMA, answer)
            await self._serve_checkpoint()
            record(events.StateChanged(state=PeerState.JOINING))
            try:
                saved = await self._serve_stages(leave)
            except Exception:
                # Others shall not go on to send us their work.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORD_S):
                        await context.membership.withdraw()
                raise
            await context.membership.withdraw()
        if not saved:
            raise UserError(
                "The weights of this replica could not be saved.",
                why="the disk refused; the lines above say how",
                hint="free some space; the checkpoints before it are kept, and the swarm does not wait for this one",
                code=Exit.STORAGE,
            )

    async def _serve_checkpoint(self) -> None:
        """Give what we have of the checkpoint that the run starts from."""
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
        start = until_event(leave, join(self._context.newcomer(self._context.options.stage)))
        end = await self._serve_stage(start, leave, moves=0)
        while end is not None:
            match end.ending:
                case RunOver() | AskedToLeave():
                    return end.saved
                case RetrySnapshot(stage, trial, loss):
                    self._failed[stage] = self._failed_at(stage).with_one(trial, loss)
                    arriving = self._arrive_again(stage, end.device_s, leave)
                case MoveTo(move):
                    arriving = self._arrive(move, end.device_s, leave)
            gc.collect()  # two stages at once may not fit, and the parts of a replica refer to each other
            following = await self._serve_stage(arriving, leave, end.moves)
            if following is None:
                self._context.reporter.record(end.finished)
                return end.saved
            end = following
        return True

    async def _serve_stage(
        self, joining: Awaitable[Start | None], leave: asyncio.Event, moves: int
    ) -> TenureEnd | None:
        """Serve the stage that joining yields, as long as we are to; None if we are asked to leave before."""
        tenure = self._tenure = await self._begin(joining, moves)
        if tenure is None:
            return None
        end = await tenure.run(leave)
        if isinstance(end.ending, MoveTo | RetrySnapshot):
            self._tenure = None
        return end

    async def _begin(self, joining: Awaitable[Start | None], moves: int) -> StageTenure | None:
        # What joining yields holds copies of weights that the replica will have replaced: nothing else may keep it.
        start = await joining
        if start is None:
            return None
        await self._snapshots.begin(start.number)
        return StageTenure(self._context, start, self._addresses, moves, self._unfit)

    async def _arrive_again(self, stage: int, device_s: float, leave: asyncio.Event) -> Start | None:
        """Join the stage that we come from with another snapshot; None once we are asked to leave."""
        if leave.is_set():
            return None
        await self._snapshots.begin(stage)
        return await until_event(leave, join(self._context.newcomer(stage, device_s, self._failed_at(stage))))

    async def _arrive(self, move: Move, device_s: float, leave: asyncio.Event) -> Start | None:
        """Join the stage that we move to, or again the one that we come from; None once we are asked to leave."""
        if leave.is_set():
            return None
        context = self._context
        await self._snapshots.begin(move.target)
        try:
            return await until_event(leave, join(context.newcomer(move.target, device_s)))
        except UserError as trouble:
            why = f"{trouble.what} {trouble.why}"
        gc.collect()  # what was built of it
        self._unfit.add(move.target)
        context.reporter.say(f"we cannot serve stage {move.target}: {why} Going back to stage {move.origin}")
        context.reporter.record(events.Moved(origin=move.target, target=move.origin, why=why))
        context.reporter.record(events.StateChanged(state=PeerState.JOINING))
        return await until_event(leave, join(context.newcomer(move.origin)))

    def _failed_at(self, stage: int) -> FailedSnapshots:
        return self._failed.get(stage, NONE_FAILED)

    def _forgive(self, seconds: float) -> None:
        """Suspect nobody of the next stage for so long: it was us who were away."""
        if self.replica is not None and self.replica.next_stage is not None:
            self.replica.next_stage.forgive(seconds)
