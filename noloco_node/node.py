"""One peer's life: join, catch up, train, leave.

A newcomer reads the roster and claims a stage; it copies the state of a living replica, or starts from the run's own
weights while no stage has reported a round; it trains until the token budget of the run is used up or somebody asks
it to go; it saves what it holds, and for a while goes on serving its weights to whoever takes the model home. Nothing
in it outlives `live`: every task belongs to one task group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from gossip import catch_up
from gossip.messages import Parts
from noloco_node import __version__, checkpoint, journal
from noloco_node.blueprint import Blueprint
from noloco_node.errors import Exit, Trouble
from noloco_node.presence import Presence
from noloco_node.recipe import SCHEMA as RUN_SCHEMA
from noloco_node.recipe import TOPIC as RUN_TOPIC
from noloco_node.recipe import Recipe
from noloco_node.replica import Beginning, Post, Replica, Runner, World, copied, fresh, restored
from noloco_node.roster import PeerRecord, State
from noloco_node.source import Source
from noloco_node.topics import GOSSIP, MICROBATCH, STATE, gossip_schema, microbatch_schema, state_schema
from pipeline.placement import Claim, choose_stage, yields
from pipeline.schedule import run_over

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from noloco_node.port import Conversation, Network
    from pipeline.stage import Stage

SETTLE_S = 1.0
"""Between a claim and its second reading: time for a claim made at the same moment to be seen."""
LAST_ROUND_S = 20.0
DRAIN_S = 30.0
"""How long a leaving node waits for the microbatches in its hands."""
LINE_EVERY_S = 10.0
STATE_TURNS = 2
"""Copies of our state that exist at once for others to fetch."""


class Text(Protocol):
    """Where a source's tokens come from. `position` and `restore`: to resume exactly."""

    async def draw(self) -> Tensor:
        """Return the next tokens [batch, sequence + 1], int64."""

    def position(self) -> dict[str, Any]:
        """Return where the next draw begins."""

    def restore(self, position: Mapping[str, Any]) -> None:
        """Go back to a position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine gives: a device's thread, a way to build a stage and to open the text, and a place to save."""

    device: Runner
    build: Callable[[int], Stage]
    open_text: Callable[[], Text]
    checkpoints: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the owner of this peer asked for."""

    stage: int | None = None
    linger_s: float = 600.0
    refresh_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Voice:
    """How a node tells what it does: `record` to the journal, `say` to a person."""

    record: Callable[[journal.Event], None]
    say: Callable[[str], None]


class Node:
    """One peer of one run."""

    def __init__(
        self, recipe: Recipe, plan: Blueprint, network: Network, machine: Machine, wishes: Wishes, voice: Voice
    ) -> None:
        self._recipe, self._plan, self._network = recipe, plan, network
        self._machine, self._wishes, self._voice = machine, wishes, voice
        self._run = recipe.run
        self._me = network.peer_id
        self._addresses: tuple[str, ...] = ()
        self._presence = Presence(network, recipe.digest, self._run.pipeline.stages, refresh_s=wishes.refresh_s)
        self._turns = asyncio.Semaphore(STATE_TURNS)
        self._replica: Replica | None = None
        self._source: Source | None = None
        self._text: Text | None = None
        self._saved: checkpoint.Checkpoint | None = None

    async def live(self, leave: asyncio.Event) -> None:
        """Join the run, train until it ends or `leave` is set, serve the weights for a while, and withdraw."""
        self._addresses = await self._network.addresses()
        async with self._running(self._presence.run()):
            await self._network.serve(RUN_TOPIC, RUN_SCHEMA, self._recipe.serve)
            stage = await self._claim()
            replica = self._replica = await self._become_replica(stage)
            await self._open_doors(replica)
            async with self._running(self._tell()):
                over = await self._train(replica, leave)
                await self._save(replica)
            await self._linger(replica, leave, over)

    # Joining.

    async def _claim(self) -> int:
        """Announce a stage, read again, and move if another newcomer chose alike."""
        roster = await self._presence.peek()
        stages = self._run.pipeline.stages
        counts = [len(roster.stage(number)) for number in range(stages)]
        try:
            stage = choose_stage(counts, self._wishes.stage, Random(f"{self._run.seed}|placement|{self._me}"))
        except ValueError as error:
            raise Trouble(
                f"There is no stage {self._wishes.stage}.",
                why=str(error),
                attempt="leave out --stage, or choose one that is there",
                code=Exit.USAGE,
            ) from error
        claimed_at = time.time()
        while True:
            await self._presence.claim(self._newcomer(stage, claimed_at))
            if self._wishes.stage is not None:
                return stage
            await asyncio.sleep(SETTLE_S)
            await self._presence.peek()
            elsewhere = yields(self._me, self._claims(), stages)
            if elsewhere is None:
                return stage
            self._voice.say(f"another newcomer chose stage {stage} too; moving to stage {elsewhere}")
            stage = elsewhere

    def _claims(self) -> list[Claim]:
        return [
            Claim(record.peer, record.stage, record.claimed_at, settled=record.state is not State.JOINING)
            for records in self._presence.roster.stages
            for record in records
        ]

    def _newcomer(self, stage: int, claimed_at: float) -> PeerRecord:
        state = State.CATCHING_UP if self._wishes.stage is not None else State.JOINING
        return PeerRecord(peer=self._me, stage=stage, state=state, claimed_at=claimed_at, version=__version__)

    async def _become_replica(self, number: int) -> Replica:
        stage = await self._machine.device.run(self._machine.build, number)
        beginning = await self._beginning(number, stage)
        post = Post(run=self._run, run_id=self._recipe.digest, stage=number, peer=self._me)
        world = World(
            network=self._network,
            roster=lambda: self._presence.roster,
            record=self._voice.record,
            microbatch_schema=microbatch_schema(self._run, self._plan.width),
            gossip_schema=gossip_schema(self._run, stage.shapes),
        )
        replica = Replica(post, stage, self._machine.device, world, beginning)
        self._voice.record(
            journal.Started(
                peer=self._me,
                stage=number,
                run=self._recipe.digest,
                version=__version__,
                parameters=sum(tensor.numel() for tensor in beginning.origin.state.slow),
            )
        )
        return replica

    async def _beginning(self, number: int, stage: Stage) -> Beginning:
        """Decide where our weights come from: a living replica, our own checkpoint, or the run itself."""
        roster, device = self._presence.roster, self._machine.device
        donors = [
            r.peer for r in roster.stage(number) if r.state in (State.TRAINING, State.FINISHED) and r.peer != self._me
        ]
        begun = any(record.round > 0 for records in roster.stages for record in records)
        if donors and begun:
            self._voice.say(f"copying stage {number} from one of {len(donors)} replicas")
            state = await self._copy(number, stage, donors)
            if state is not None:
                return await device.run(copied, stage, state)
        saved = await asyncio.to_thread(checkpoint.load_latest, self._machine.checkpoints, self._recipe.digest)
        if saved is not None and saved.counters.stage == number:
            self._voice.say(f"going on from our own checkpoint at inner step {saved.counters.inner_steps}")
            self._saved = saved
            return await device.run(restored, stage, saved)
        if begun:
            self._voice.say(
                f"the run has begun and no replica of stage {number} lives: starting it from the first weights"
            )
        return await device.run(fresh, stage)

    async def _copy(self, number: int, stage: Stage, donors: list[str]) -> Any:
        import torch

        like = tuple(torch.empty(shape, device="meta") for shape in stage.shapes)
        schema = state_schema(stage.shapes)
        size = sum(tensor.nbytes for tensor in like)
        wanted = catch_up.Wanted(
            parts=Parts.ALL, like=like, optimiser_like=like + like, deadline_s=60.0 + 4 * size / 2**20
        )
        try:
            return await catch_up.catch_up(
                catch_up.donors(self._me, donors, self._run.seed),
                lambda peer: self._network.talk(peer, STATE, schema),
                wanted,
                self._machine.device.run,
            )
        except ConnectionError as error:
            self._voice.say(f"could not copy the state of stage {number}: {error}")
            return None

    async def _open_doors(self, replica: Replica) -> None:
        async def serve_state(conversation: Conversation) -> None:
            await catch_up.serve(conversation, replica.state, self._turns, deadline_s=3600.0)

        shapes = tuple(self._plan.shapes[replica.post.stage].values())
        if replica.post.stage > 0:
            schema = microbatch_schema(self._run, self._plan.width)
            await self._network.serve(MICROBATCH, schema, replica.serve_microbatch)
        await self._network.serve(GOSSIP, gossip_schema(self._run, shapes), replica.rounds.serve)
        await self._network.serve(STATE, state_schema(shapes), serve_state)
        self._announce(State.TRAINING)

    # Training.

    async def _train(self, replica: Replica, leave: asyncio.Event) -> bool:
        """Train until the run is over (True) or we are asked to leave (False)."""
        self._voice.say(f"training stage {replica.post.stage} from inner step {replica.inner_steps}")
        async with asyncio.TaskGroup() as group:
            gossip = group.create_task(replica.rounds.run(), name="gossip")
            steps = group.create_task(replica.train(), name="inner steps")
            work = group.create_task(self._work(replica), name="work")
            asked = group.create_task(leave.wait(), name="leave")
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            over = work.done()
            await self._drain(replica)
            for task in (work, asked, steps):
                task.cancel()
            await asyncio.wait({work, asked, steps})
            discarded = await replica.discard()
            if over:
                self._voice.say("the run is over; one last round")
                await replica.rounds.last_round(LAST_ROUND_S)
            gossip.cancel()
        self._voice.record(
            journal.Finished(
                why="the run is over" if over else "asked to leave",
                step=replica.inner_steps,
                round=replica.rounds.finished,
                progress=replica.progress.value,
                discarded=discarded,
            )
        )
        return over

    async def _work(self, replica: Replica) -> None:
        """Return when this peer's part of the run is done: at stage 0 as a source, later when the sources say so."""
        if replica.post.stage == 0:
            await self._make_source(replica).run(self._run.pipeline.microbatches_per_step)
            return
        while not run_over(self._presence.roster.sources, self._presence.roster.sources_finished):
            await self._presence.changed()

    async def _drain(self, replica: Replica) -> None:
        """Take no more microbatches and wait for those in our hands."""
        replica.gate.close()
        try:
            async with asyncio.timeout(DRAIN_S):
                await replica.gate.drained()
        except TimeoutError:
            self._voice.say(f"{replica.gate.in_flight} microbatches did not come back in time")

    def _make_source(self, replica: Replica) -> Source:
        text = self._text = self._machine.open_text()
        saved = self._saved
        if saved is not None and saved.counters.data_position is not None:
            text.restore(saved.counters.data_position)
        self._source = Source(
            text.draw,
            replica.worker.process,
            self._progress,
            me=self._me,
            budget_s=self._run.pipeline.budget_s,
            rng=Random(f"{self._run.seed}|source|{self._me}"),
        )
        self._source.samples = self._presence.roster.own_samples
        return self._source

    def _progress(self, own_samples: int) -> float:
        """Return the progress of the whole run, our own samples as they are and the others' as they said."""
        roster = self._presence.roster
        if run_over(roster.sources, roster.sources_finished):
            return 1.0
        return min(1.0, (roster.run_samples - roster.own_samples + own_samples) / self._run.budget_samples)

    # Telling.

    async def _tell(self) -> None:
        """Keep our record, the journal's totals and the person in front of the screen up to date."""
        said_at = 0.0
        while True:
            await asyncio.sleep(min(self._wishes.refresh_s, LINE_EVERY_S) / 2)
            self._announce(State.TRAINING)
            replica = self._replica_or_fail()
            if replica.downstream is not None:
                totals = replica.downstream.hop_totals
                self._voice.record(journal.Hops(counts={peer: total.succeeded for peer, total in totals.items()}))
            now_s = asyncio.get_running_loop().time()
            if now_s - said_at >= LINE_EVERY_S:
                said_at = now_s
                self._voice.say(progress_line(replica.describe(State.TRAINING)))

    def _announce(self, state: State) -> None:
        record = self._replica_or_fail().describe(state)
        samples = self._source.samples if self._source else 0
        self._presence.update(structs.replace(record, samples=samples, addresses=self._addresses))

    def _replica_or_fail(self) -> Replica:
        assert self._replica is not None
        return self._replica

    # Leaving.

    async def _save(self, replica: Replica) -> None:
        samples = self._source.samples if self._source else 0
        position = self._text.position() if self._text else None
        saved = await replica.checkpoint(samples, position)
        try:
            path = await asyncio.to_thread(checkpoint.save, self._machine.checkpoints, saved)
        except OSError as error:
            self._voice.say(f"could not save: {error}; free some space, the weights are still being served")
        else:
            self._voice.say(f"saved {path}")

    async def _linger(self, replica: Replica, leave: asyncio.Event, over: bool) -> None:
        if over and not leave.is_set():
            self._announce(State.FINISHED)
            self._voice.record(journal.StateChanged(state=State.FINISHED))
            self._voice.say(f"finished; serving the weights for {self._wishes.linger_s:.0f} s, Ctrl-C leaves now")
            try:
                async with asyncio.timeout(self._wishes.linger_s):
                    await leave.wait()
            except TimeoutError:
                pass
        await self._presence.withdraw()

    @asynccontextmanager
    async def _running(self, background: Awaitable[None]) -> AsyncIterator[None]:
        """Run something beside the body, end it with the body, and let its failure end the body."""

        async def body() -> None:
            await background

        async with asyncio.TaskGroup() as group:
            task = group.create_task(body())
            try:
                yield
            finally:
                task.cancel()

    def __repr__(self) -> str:
        return f"Node({self._me}, {self._replica!r})"


def progress_line(record: PeerRecord) -> str:
    """Say in one line how a peer is doing."""
    loss = "" if record.loss is None else f", loss {record.loss:.3f}"
    gap = "" if record.gap is None else f", gap {record.gap:.4f}"
    waits = "" if record.waiting is None else f"; waiting for {record.waiting}"
    return (
        f"step {record.inner_steps}, round {record.round}, progress {record.progress:.1%}{loss}{gap}, "
        f"{record.tokens_per_s:,.0f} tokens/s{waits}"
    )
