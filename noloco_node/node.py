"""One peer's life: join, catch up, train, leave.

A newcomer reads the roster and claims a stage; it copies the state of a living replica, or starts from the run's own
weights while no stage has reported a round; it trains until the token budget of the run is used up or somebody asks
it to go; it saves what it holds, and for a while goes on serving its weights to whoever takes the model home. Nothing
in it outlives `live`: every task belongs to one task group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf, prod
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from gossip import catch_up
from noloco_node import __version__, journal
from noloco_node.checkpoint import Counters
from noloco_node.errors import Exit, Trouble
from noloco_node.joining import Newcomer, Start, copying_s, join
from noloco_node.machine import Dimensions, Machine, Text, Voice
from noloco_node.post import SLOWEST_BYTES_PER_S, Post, World
from noloco_node.presence import Presence
from noloco_node.recipe import SCHEMA as RUN_SCHEMA
from noloco_node.recipe import TOPIC as RUN_TOPIC
from noloco_node.recipe import Recipe
from noloco_node.replica import Replica
from noloco_node.roster import Roster, State
from noloco_node.source import Source
from noloco_node.telling import Telling
from noloco_node.topics import GOSSIP, MICROBATCH, STATE, gossip_schema, microbatch_schema, state_schema, topic
from noloco_node.wire import Violation
from pipeline.schedule import run_over

if TYPE_CHECKING:
    from noloco_node.port import Conversation, Handler, Network

T = TypeVar("T")

LAST_ROUND_S = 20.0
DRAIN_S = 10.0
"""How long a leaving node waits for the microbatches in its hands."""
MOST_ADDRESSES = 8
"""Of a machine with very many interfaces; a record has little room."""
STATE_TURNS = 2
"""Copies of our state that exist at once for others to fetch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the owner of this peer asked for. `deadlines`: False waits for ever on exchanges, which only tests want.

    `slowest_bytes_per_s`: of a line that weights may travel on; deadlines follow from it.
    """

    stage: int | None = None
    linger_s: float = 600.0
    refresh_s: float = 10.0
    save_every_s: float = 300.0
    deadlines: bool = True
    slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S


class Node:
    """One peer of one run."""

    def __init__(
        self, recipe: Recipe, plan: Dimensions, network: Network, machine: Machine, wishes: Wishes, voice: Voice
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
        self._resumed: Counters | None = None
        self._state = State.TRAINING
        self._unlisted = 0
        self._saved_at = asyncio.get_running_loop().time()

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
        async with self._running(self._presence.run()):
            await self._network.serve(RUN_TOPIC, RUN_SCHEMA, self._recipe.serve)
            self._voice.record(journal.StateChanged(state=State.JOINING))
            newcomer = Newcomer(
                recipe=self._recipe,
                network=self._network,
                presence=self._presence,
                machine=self._machine,
                voice=self._voice,
                wish=self._wishes.stage,
                slowest_bytes_per_s=self._wishes.slowest_bytes_per_s,
                deadlines=self._wishes.deadlines,
            )
            start = await _unless(leave, join(newcomer))
            if start is not None:
                replica = self._replica = self._become_replica(start)
                start = None  # it holds copies of the weights that the replica will have replaced
                await self._open_doors(replica)
                telling = Telling(
                    replica, self._network, self._voice, self._wishes.refresh_s, lambda: self._announce(self._state)
                )
                async with self._running(telling.run()):
                    try:
                        over = await self._train(replica, leave, telling)
                    except ExceptionGroup:
                        await self._save(replica)
                        raise
                    saved = await self._save(replica)
                await self._linger(leave, over)
                unsaved = not saved and not over
            await self._presence.withdraw()
        if unsaved:
            raise Trouble(
                "The weights of this replica could not be saved.",
                why="the disk refused; the lines above say how",
                attempt="free some space; the swarm goes on without this replica's last minutes",
                code=Exit.STORAGE,
            )

    def _become_replica(self, start: Start) -> Replica:
        self._resumed = start.counted
        self._presence.focus((start.number, start.number + 1))
        post = Post(
            run=self._run,
            run_id=self._recipe.digest,
            stage=start.number,
            peer=self._me,
            deadlines=self._wishes.deadlines,
            slowest_bytes_per_s=self._wishes.slowest_bytes_per_s,
        )
        world = World(
            network=self._network,
            roster=lambda: self._presence.roster,
            record=self._voice.record,
            microbatch_schema=microbatch_schema(self._run, self._plan.width),
            gossip_schema=gossip_schema(self._run, start.stage.shapes),
            vocabulary=self._plan.vocabulary,
        )
        self._voice.record(
            journal.Started(
                peer=self._me,
                stage=start.number,
                run=self._recipe.digest,
                version=__version__,
                parameters=sum(tensor.numel() for tensor in start.beginning.origin.state.slow),
            )
        )
        return Replica(post, start.stage, self._machine.device, world, start.beginning)

    async def _open_doors(self, replica: Replica) -> None:
        async def serve_state(conversation: Conversation) -> None:
            await catch_up.serve(conversation, replica.state, self._turns, deadline_s=patience_s)

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
        await self._network.serve(topic(STATE, number), state_schema(shapes), self._watched(STATE, serve_state))
        self._announce(State.TRAINING)
        self._voice.record(journal.StateChanged(state=State.TRAINING))

    # Training.

    async def _train(self, replica: Replica, leave: asyncio.Event, telling: Telling) -> bool:
        """Train until the run is over (True) or we are asked to leave (False)."""
        self._voice.say(f"training stage {replica.post.stage} from inner step {replica.inner_steps}")
        async with asyncio.TaskGroup() as group:
            gossip = group.create_task(replica.rounds.run(), name="gossip")
            steps = group.create_task(replica.train(self._in_pause), name="inner steps")
            work = group.create_task(self._work(replica), name="work")
            asked = group.create_task(leave.wait(), name="leave")
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            over = work.done()
            self._state = State.TRAINING if over else State.LEAVING
            replica.gate.close()
            # The step loop ends by itself once nothing is in flight; a window that is complete is still used.
            until_s = asyncio.get_running_loop().time() + DRAIN_S
            while not steps.done() and not replica.stranded and asyncio.get_running_loop().time() < until_s:
                await asyncio.wait({steps}, timeout=0.5)
            if not steps.done():
                self._voice.say(f"{replica.gate.in_flight} microbatches did not come back in time")
            for task in (work, asked, steps):
                task.cancel()
            await asyncio.wait({work, asked, steps})
            discarded = await replica.discard()
            if over:
                self._voice.say("the run is over; one last round")
                await _unless(leave, replica.rounds.last_round(LAST_ROUND_S))
            await replica.rounds.leave()
            gossip.cancel()
        telling.record_totals()
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
            source = await self._make_source(replica)
            await source.run(self._run.pipeline.microbatches_per_step * self._run.pipeline.windows_in_flight)
            return
        while not run_over(self._presence.roster.sources, self._presence.roster.sources_finished):
            await self._presence.changed()

    async def _make_source(self, replica: Replica) -> Source:
        text = self._text = await self._machine.open_text()
        resumed = self._resumed
        position = resumed.data_position if resumed is not None else None
        if position is not None and not await text.restore(position):
            self._voice.say("the text is another one than before: reading it from its beginning")
        self._source = Source(
            text.draw,
            replica.worker.process,
            self._progress,
            me=self._me,
            budget_s=self._run.pipeline.budget_s,
            rng=Random(f"{self._run.seed}|source|{self._me}"),
        )
        # The swarm forgets a source that was away for long; its own checkpoint does not.
        self._source.samples = max(self._presence.roster.own_samples, resumed.samples if resumed else 0)
        # Nor does the stage forget how far the run was when sources that the DHT knows no more were at work.
        reached = round(replica.progress.value * self._run.budget_samples)
        self._unlisted = max(0, reached - self._presence.roster.run_samples)
        return self._source

    def _progress(self, own_samples: int) -> float:
        """Return the progress of the whole run, our own samples as they are and the others' as they said."""
        roster = self._presence.roster
        if run_over(roster.sources, roster.sources_finished):
            return 1.0
        samples = self._unlisted + roster.run_samples - roster.own_samples + own_samples
        return min(1.0, samples / self._run.budget_samples)

    def _watched(self, topic: str, handler: Handler) -> Handler:
        """Journal what a peer sends that no peer may send; the network ends that conversation by itself."""

        async def watched(conversation: Conversation) -> None:
            try:
                await handler(conversation)
            except Violation as violation:
                self._voice.record(journal.Violation(peer=conversation.peer, topic=topic, why=str(violation)))
                raise

        return watched

    def _announce(self, state: State) -> None:
        record = self._replica_or_fail().describe(state)
        samples = self._source.samples if self._source else 0
        self._presence.update(structs.replace(record, samples=samples, addresses=self._addresses))

    def _replica_or_fail(self) -> Replica:
        assert self._replica is not None
        return self._replica

    # Leaving.

    async def _in_pause(self) -> None:
        """Save every few minutes, between two inner steps, where weights, momentum and optimiser belong together."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._saved_at >= self._wishes.save_every_s:
            self._saved_at = now_s
            await self._save(self._replica_or_fail())

    async def _save(self, replica: Replica) -> bool:
        """Write a checkpoint; a disk that refuses is said and costs no more than that."""
        samples = self._source.samples if self._source else 0
        position = self._text.position() if self._text else None
        try:
            where = await self._machine.save(await replica.checkpoint(samples, position))
        except OSError as error:
            self._voice.say(f"could not save: {error}; free some space, earlier checkpoints are kept")
            return False
        self._voice.say(f"saved {where}")
        return True

    async def _linger(self, leave: asyncio.Event, over: bool) -> None:
        """Go on serving the weights after the end of a run."""
        if over and not leave.is_set():
            self._announce(State.FINISHED)
            self._voice.record(journal.StateChanged(state=State.FINISHED))
            self._voice.say(f"finished; serving the weights for {self._wishes.linger_s:.0f} s, Ctrl-C leaves now")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wishes.linger_s):
                    await leave.wait()

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

    def statistics(self) -> dict[str, int | float]:
        """Return the samples drawn here whose gradient came back, and the replica's counters."""
        samples = self._source.samples if self._source else 0
        return {"samples": samples, **(self._replica.statistics() if self._replica else {})}

    def __repr__(self) -> str:
        return f"Node({self._me}, {self._replica!r})"


async def _unless(leave: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns, or None once we are asked to leave before it is done."""
    asked, task = asyncio.create_task(leave.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait({asked, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (asked, task):
            each.cancel()
        await asyncio.wait({asked, task})
