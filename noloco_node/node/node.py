"""One peer's life: join, catch up, train, leave.

A newcomer reads the roster and claims a stage; it copies the state of a living replica, or starts from the run's own
weights while no stage has reported a round; it trains until the token budget of the run is used up or somebody asks
it to go; it saves what it holds, and for a while goes on serving its weights to whoever takes the model home. Nothing
in it outlives `live`: every task belongs to one task group.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, prod
from typing import TYPE_CHECKING

from msgspec import structs

from gossip.transfer.chunks import cut
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import piece_s
from noloco_node import __version__
from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.limits.rate_limit import spending
from noloco_node.machine.interface import Dimensions, Host, Reporter
from noloco_node.network.timeouts import AdaptiveTimeoutNetwork
from noloco_node.network.wire import Violation
from noloco_node.node.health import HealthMonitor
from noloco_node.node.joining.join import Start, join
from noloco_node.node.joining.newcomer import Newcomer
from noloco_node.node.migration import MigrationWatcher, close_doors
from noloco_node.node.replica import Replica
from noloco_node.node.replica_context import ReplicaConfig, ReplicaContext
from noloco_node.node.reporting import ProgressReporter
from noloco_node.node.training import StageWork, Training
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import GOSSIP, MICROBATCH, STATE, gossip_schema, microbatch_schema, state_schema, topic
from noloco_node.state_sync.deadlines import copying_s
from noloco_node.state_sync.snapshot_keeper import SnapshotKeeper, SnapshotKeeperConfig
from noloco_node.state_sync.snapshot_server import SnapshotServer
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.checkpoint_writer import CheckpointWriter
from noloco_node.swarm import speed_test
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Roster
from noloco_node.swarm.run_distribution import SCHEMA as RUN_SCHEMA
from noloco_node.swarm.run_distribution import TOPIC as RUN_TOPIC
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.tasks import background, until_event
from pipeline.migration import Move

if TYPE_CHECKING:
    from noloco_node.network.interface import Conversation, Handler, PeerNetwork

LIFETIME_S = 30.0
"""For which our record is believed at least; for others' too, since all of a run refresh alike as a rule."""
REFRESHES = 3
"""That our record outlives: one or two may be lost on the way."""
MOST_ADDRESSES = 8
"""Of a machine with very many interfaces; a record has little room."""
LONGEST_WAITING = 400
"""Characters of what we wait for, in our record: there may be many things."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """What the owner of this peer asked for. `deadlines`: False waits for ever on exchanges, which only tests want.

    `slowest_bytes_per_s`: of a line that weights may travel on; deadlines follow from it. `moves`: goes to another
    stage when it is needed there. `keep_snapshots`: rounds between two snapshots of another stage; 0 keeps none.
    """

    stage: int | None = None
    moves: bool = False
    linger_s: float = 600.0
    refresh_s: float = 10.0
    save_every_s: float = 300.0
    keep_snapshots: int = 0
    deadlines: bool = True
    slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S


class Node:
    """One peer of one run."""

    def __init__(
        self,
        recipe: RunFileText,
        plan: Dimensions,
        network: PeerNetwork,
        host: Host,
        wishes: NodeOptions,
        reporter: Reporter,
    ) -> None:
        self._recipe, self._plan = recipe, plan
        self._network: PeerNetwork = AdaptiveTimeoutNetwork(network)
        self._machine, self._wishes, self._voice = host, wishes, reporter
        self._run = recipe.run
        self._me = network.peer_id
        self._addresses: tuple[str, ...] = ()
        self._presence = Membership(
            network,
            recipe.digest,
            self._run.pipeline.stages,
            lifetime_s=max(LIFETIME_S, REFRESHES * wishes.refresh_s),
            refresh_s=wishes.refresh_s,
            unix_time=host.unix_time,
        )
        self._replica: Replica | None = None
        self._duty = StageWork(self._run, self._me, self._presence, host.open_text, reporter)
        self._saving = CheckpointWriter(host.save, reporter.say, wishes.save_every_s)
        self._watch = HealthMonitor(self._presence, reporter, host.unix_time, host.asleep_s, self._forgive)
        self._training: Training | None = None
        self._unfit: set[int] = set()
        """Stages that we could not build."""
        self._lending = SnapshotServer(
            host,
            self._network,
            tuple(tuple(shapes.values()) for shapes in plan.shapes),
            None if self._keeps_snapshots else lambda size: copying_s(size, wishes.slowest_bytes_per_s),
        )

    @property
    def replica(self) -> Replica | None:
        """What we train, once we have joined."""
        return self._replica

    @property
    def roster(self) -> Roster:
        """Who is there, as far as we know."""
        return self._presence.roster

    async def live(self, leave: asyncio.Event) -> None:
        """Join the run, train until it ends or `leave` is set, serve the weights for a while, and withdraw."""
        self._addresses = (await self._network.addresses())[:MOST_ADDRESSES]
        unsaved = False
        async with background(self._presence.run()), background(self._watch.run()):
            await self._network.serve(RUN_TOPIC, RUN_SCHEMA, self._recipe.serve)
            await self._network.serve(
                speed_test.TOPIC,
                speed_test.SCHEMA,
                self._watched(speed_test.TOPIC, speed_test.SpeedTestService().answer),
            )
            self._voice.record(events.StateChanged(state=PeerState.JOINING))
            newcomer = Newcomer(
                recipe=self._recipe,
                plan=self._plan,
                network=self._network,
                membership=self._presence,
                host=self._machine,
                reporter=self._voice,
                wish=self._wishes.stage,
                slowest_bytes_per_s=self._wishes.slowest_bytes_per_s,
                deadlines=self._wishes.deadlines,
            )
            start = await until_event(leave, join(newcomer))
            while start is not None:
                await self._lending.begin(start.number)
                replica = self._replica = self._become_replica(start)
                start = None  # it holds copies of the weights that the replica will have replaced
                training = self._training = self._begin_training(newcomer, replica.post.stage)
                donor = await self._open_doors(replica)
                telling = ProgressReporter(
                    replica, self._network, self._voice, self._wishes.refresh_s, self._announce_training
                )
                async with background(self._saving.run()), background(self._keep_snapshots(replica.post.stage)):
                    async with background(telling.run()):
                        try:
                            over = await self._train(replica, leave, telling)
                        except ExceptionGroup:
                            await self._save(replica)
                            raise
                    saved = await self._save(replica)
                if training.move is None:
                    await self._linger(leave, over)
                    unsaved = not saved
                    continue
                left = training.farewell(replica)
                self._replica = None
                self._duty.rest()
                # Two stages at once may not fit, and the parts of a replica refer to each other.
                donor.close()
                del replica, telling, donor
                gc.collect()
                start = None if leave.is_set() else await self._arrive(newcomer, training, leave)
                if start is None:
                    self._voice.record(left)
                    unsaved = not saved
            await self._presence.withdraw()
        if unsaved:
            raise UserError(
                "The weights of this replica could not be saved.",
                why="the disk refused; the lines above say how",
                attempt="free some space; the checkpoints before it are kept, and the swarm does not wait for this one",
                code=Exit.STORAGE,
            )

    # Moving to another stage.

    def _begin_training(self, newcomer: Newcomer, stage: int) -> Training:
        """Make what trains at a stage, and watches whether we are needed elsewhere."""
        before = self._training
        moves = 0 if before is None else before.moving.moves + (before.move is not None)

        def progress() -> float:
            return self._replica_or_fail().progress.value

        moving = MigrationWatcher(newcomer, stage, moves, self._wishes.refresh_s, progress, self._unfit)

        async def depart(move: Move, device_s: float) -> None:
            await moving.take_place(move, device_s)
            await close_doors(self._network, self._run, self._plan, move.origin)

        return Training(moving, self._duty, depart, self._voice)

    async def _arrive(self, newcomer: Newcomer, training: Training, leave: asyncio.Event) -> Start | None:
        """Join the stage that we move to, or again the one that we come from; None once we are asked to leave."""
        move = training.move
        assert move is not None
        await self._lending.begin(move.target)
        try:
            there = replace(newcomer, wish=move.target, device_s=training.moving.device_s)
            return await until_event(leave, join(there))
        except UserError as trouble:
            why = f"{trouble.what} {trouble.why}"
        gc.collect()  # what was built of it
        self._unfit.add(move.target)
        training.turn_back(why)
        return await until_event(leave, join(replace(newcomer, wish=move.origin)))

    # Work at a stage.

    def _become_replica(self, start: Start) -> Replica:
        self._duty.begin(start.beginning.progress, start.counted)
        stages = range(self._run.pipeline.stages)
        self._presence.focus(stages if self._keeps_snapshots else (start.number, start.number + 1))
        post = ReplicaConfig(
            run=self._run,
            run_id=self._recipe.digest,
            stage=start.number,
            peer=self._me,
            deadlines=self._wishes.deadlines,
            slowest_bytes_per_s=self._wishes.slowest_bytes_per_s,
            line_s=self._machine.line_s(start.number),
        )
        world = ReplicaContext(
            network=self._network,
            roster=lambda: self._presence.roster,
            record=self._voice.record,
            microbatch_schema=microbatch_schema(self._run, self._plan.width),
            gossip_schema=gossip_schema(self._run, start.stage.shapes),
            vocabulary=self._plan.vocabulary,
        )
        self._voice.record(
            events.Started(
                peer=self._me,
                stage=start.number,
                run=self._recipe.digest,
                version=__version__,
                parameters=sum(tensor.numel() for tensor in start.beginning.origin.state.slow),
            )
        )
        return Replica(post, start.stage, self._machine.device, world, start.beginning)

    async def _open_doors(self, replica: Replica) -> Donor:
        """Serve what a replica serves; return what gives its state to newcomers."""
        number = replica.post.stage
        shapes = tuple(self._plan.shapes[number].values())
        weight_bytes = 4 * sum(map(prod, shapes))
        patience_s = copying_s(weight_bytes, self._wishes.slowest_bytes_per_s) if self._wishes.deadlines else inf
        if number > 0:
            schema = microbatch_schema(self._run, self._plan.width)
            handler = self._watched(MICROBATCH, replica.serve_microbatch)
            await self._network.serve(topic(MICROBATCH, number), schema, handler)
        gossip = self._watched(GOSSIP, replica.rounds.serve)
        await self._network.serve(topic(GOSSIP, number), gossip_schema(self._run, shapes), gossip)
        # A copy outlives its newcomer's patience, so that one that comes back finds it.
        terms = DonorLimits(
            deadline_s=8 * patience_s, piece_s=piece_s(patience_s, len(cut([4 * prod(s) for s in shapes])))
        )
        donor = Donor(replica.state, self._machine.device.beside, shapes, terms)
        await self._network.serve(topic(STATE, number), state_schema(shapes), self._watched(STATE, donor.serve))
        self._announce(PeerState.TRAINING)
        self._voice.record(events.StateChanged(state=PeerState.TRAINING))
        return donor

    # Training.

    async def _train(self, replica: Replica, leave: asyncio.Event, telling: ProgressReporter) -> bool:
        """Train until the run is over (True), or we are asked to leave or move to another stage (False)."""
        assert self._training is not None
        ending = await self._training.run(replica, leave, self._in_pause, moves=self._wishes.moves)
        telling.record_totals()
        self._training.tell(replica, ending)
        return ending.over

    async def _keep_snapshots(self, stage: int) -> None:
        store = self._machine.snapshots
        if store is None or not self._keeps_snapshots:
            return
        snapshot_keeper_config = SnapshotKeeperConfig(
            run_id=self._recipe.digest,
            seed=self._run.seed,
            shapes=tuple(tuple(shapes.values()) for shapes in self._plan.shapes),
            own=stage,
            every=self._wishes.keep_snapshots,
            deadline_s=lambda weight_bytes: copying_s(weight_bytes, self._wishes.slowest_bytes_per_s),
        )
        roster = self._presence
        await SnapshotKeeper(
            snapshot_keeper_config, self._network, lambda: roster.roster, store, self._machine.device, self._voice
        ).run()

    @property
    def _keeps_snapshots(self) -> bool:
        return self._machine.snapshots is not None and self._wishes.keep_snapshots > 0

    def _watched(self, topic: str, handler: Handler) -> Handler:
        """Journal what a peer sends that no peer may send; the network ends that conversation by itself."""

        async def watched(conversation: Conversation) -> None:
            try:
                await handler(conversation)
            except Violation as violation:
                self._voice.record(events.PeerViolation(peer=conversation.peer, topic=topic, why=str(violation)))
                raise

        return watched

    def _announce_training(self) -> PeerState:
        assert self._training is not None
        self._announce(self._training.state)
        return self._training.state

    def _announce(self, state: PeerState) -> None:
        assert self._training is not None
        if self._training.move is not None:
            return  # our record is at the other stage already
        record = self._replica_or_fail().describe(state)
        waiting = "; ".join(filter(None, (record.waiting, self._saving.trouble, self._watch.trouble)))
        record = structs.replace(
            record,
            samples=self._duty.samples,
            addresses=self._addresses,
            waiting=waiting[:LONGEST_WAITING] or None,
            budget=spending(self._network.statistics()),
        )
        self._presence.update(self._training.moving.told(record))

    def _forgive(self, seconds: float) -> None:
        """Suspect nobody of the next stage for so long: it was us who were away."""
        if self._replica is not None and self._replica.downstream is not None:
            self._replica.downstream.forgive(seconds)

    def _replica_or_fail(self) -> Replica:
        assert self._replica is not None
        return self._replica

    # Leaving.

    async def _in_pause(self) -> None:
        """Save every round, between two inner steps, where weights, momentum and optimiser belong together."""
        replica = self._replica_or_fail()
        if self._saving.due(replica.rounds.finished):
            self._saving.begin(await self._checkpoint(replica))

    async def _save(self, replica: Replica) -> bool:
        """Write the last checkpoint; a disk that refuses is said and costs no more than that."""
        return await self._saving.finish(await self._checkpoint(replica))

    async def _checkpoint(self, replica: Replica) -> Checkpoint:
        return await replica.checkpoint(self._duty.samples, self._duty.position())

    async def _linger(self, leave: asyncio.Event, over: bool) -> None:
        """Go on serving the weights after the end of a run."""
        if over and not leave.is_set():
            self._announce(PeerState.FINISHED)
            self._voice.record(events.StateChanged(state=PeerState.FINISHED))
            self._voice.say(f"finished; serving the weights for {self._wishes.linger_s:.0f} s, Ctrl-C leaves now")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wishes.linger_s):
                    await leave.wait()

    def statistics(self) -> dict[str, int | float]:
        """Return the samples drawn here whose gradient came back, and the replica's counters."""
        return {"samples": self._duty.samples, **(self._replica.statistics() if self._replica else {})}

    def __repr__(self) -> str:
        return f"Node({self._me}, {self._replica!r})"
