"""Slow weights of other stages, kept and served so that no stage dies with its last replica.

A peer serves its last checkpoints of stages that it served before, one stage at a time. With `--keep-snapshots ROUNDS`
it also takes a stage snapshot that is so many rounds further than the last one, from a random one of the replicas that
agree on round and norm, and serves a stage without replicas in any case (docs/design/catching-up.md).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import median_low

from gossip.exchange.codec import norm
from gossip.exchange.messages import Busy, Manifest, Parts, ReplicaState
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import OUTLYING_ROUNDS, Objection, piece_s
from noloco_node.machine.interface import CheckpointArchive, Reporter, Runner
from noloco_node.network.calls import patient
from noloco_node.network.interface import Conversation, PeerNetwork
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import STATE, topic
from noloco_node.state_sync.download import SNAPSHOT, WeightsOf, ask_manifests
from noloco_node.state_sync.replica_mean import ReplicaSummary, drop_outliers
from noloco_node.storage.checkpoint import Checkpoint, Counters
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.tasks import loop_s

Shapes = tuple[tuple[int, ...], ...]  # of a stage's parameters
REQUEST_S = 10.0
RETRY_S = 5.0
SOON_S = 5.0  # a peer that asks for an outline waits twice as long
LOOK_S = 10.0  # between two looks at how far the stages are
FAILURE_S = 120.0  # before a stage is tried again whose snapshot failed, or lay here damaged
REPLICAS_ASKED = 3  # replicas that say round and norm before one of them is chosen
NORM_CHANGE = 1.5  # a norm may differ by this factor from what the same replica said a moment ago


class SnapshotServer:
    """Serves slow weights of other stages than our own from the disk, of one stage at a time.

    `archive`: has the weights. `shapes`: of each stage. `deadline_s`: for so many bytes to be fetched. `is_last`: says
    that no replica serves a stage, which is then served besides others.
    """

    def __init__(
        self,
        network: PeerNetwork,
        device: Runner,
        archive: CheckpointArchive,
        shapes: Sequence[Shapes],
        deadline_s: Callable[[int], float],
        is_last: Callable[[int], bool],
    ) -> None:
        self.network, self.device, self.archive, self.shapes = network, device, archive, shapes
        self.deadline_s, self._is_last = deadline_s, is_last
        self._donors: dict[int, Donor] = {}
        self._served = set[int]()
        self._counters: dict[int, ReplicaState] = {}
        self._readings: dict[int, asyncio.Task[None]] = {}  # of stages whose counters are not known yet
        self._talking: Counter[int] = Counter()
        self._not_before_s: dict[int, float] = {}  # when to look again for weights that were of no use

    async def begin(self, own: int) -> None:
        """Set aside checkpoints of other stages than our own, and serve all that are here from now on."""
        await self.archive.set_aside(own)
        self._counters.clear()
        self._not_before_s.clear()
        for number in await self.archive.stages():
            if number != own and number < len(self.shapes):
                await self._serve(number)

    async def note(self, found: Checkpoint) -> None:
        """Serve a stage from now on, with `found` as its newest weights."""
        self._not_before_s.pop(found.counters.stage, None)
        await self._remember(found.counters.stage, state_of(found))
        await self._serve(found.counters.stage)

    async def _serve(self, number: int) -> None:
        """Serve a stage from now on; its weights are read when a peer asks for them."""
        if number not in self._served:
            subject, serve = self._subject(number), partial(self._converse, number)
            await self.network.serve(topic(SNAPSHOT, number), subject.schema, serve)
            self._served.add(number)

    def _donor(self, number: int) -> Donor:
        if number not in self._donors:
            subject = self._subject(number)
            deadline_s = self.deadline_s(subject.weight_bytes)
            limits = DonorLimits(deadline_s=2 * deadline_s, piece_s=piece_s(deadline_s, subject.pieces))
            provide = partial(self._provide, number)
            self._donors[number] = Donor(provide, self.device.beside, subject.shapes, limits)
        return self._donors[number]

    def _subject(self, number: int) -> WeightsOf:
        return WeightsOf(number, self.shapes[number], SNAPSHOT)

    async def _remember(self, number: int, state: ReplicaState) -> None:
        """Remember counters and norm: many peers ask for these, which must cost neither disk nor memory."""
        self._donor(number).knows(state.round, await self.device.beside(norm, state.slow))
        self._counters[number] = replace(state, slow=())

    async def _provide(self, number: int, parts: Parts) -> ReplicaState:
        """Return a stage's counters, or its weights from the disk."""
        if parts is Parts.OUTLINE and number in self._counters:
            return self._counters[number]
        found = None
        if parts is not Parts.ALL and loop_s() >= self._not_before_s.get(number, 0.0):
            found = await self.archive.slow(number)
            self._not_before_s[number] = loop_s() + FAILURE_S if found is None else 0.0
        if found is None:
            raise ConnectionAbortedError("of another's stage there are slow weights, as long as they lie here, no more")
        state = state_of(found)
        if self._counters.get(number) != replace(state, slow=()):  # the newest weights may be damaged by now
            await self._remember(number, state)
        return self._counters[number] if parts is Parts.OUTLINE else state

    async def _converse(self, number: int, conversation: Conversation) -> None:
        is_busy = self._is_busy_with_others(number) and not self._is_last(number)
        if is_busy or not await self._is_read_soon(number):
            await turn_away(conversation)
            return
        self._talking[number] += 1
        try:
            await self._donor(number).serve(conversation)
        finally:
            self._talking[number] -= 1

    async def _is_read_soon(self, number: int) -> bool:
        """Say whether a stage's counters are known in a moment, or nothing of it is here.

        Gigabytes are read and hashed for them, which may take longer than a peer waits; so the reading goes on.
        """
        if number not in self._counters:
            if number not in self._readings:
                self._readings[number] = asyncio.create_task(self._look_up(number), name="snapshot")
                self._readings[number].add_done_callback(lambda _: self._readings.pop(number))
            await asyncio.wait({self._readings[number]}, timeout=SOON_S)
        return number not in self._readings

    async def _look_up(self, number: int) -> None:
        with suppress(ConnectionAbortedError):  # as whoever asks is told
            await self._provide(number, Parts.OUTLINE)

    def _is_busy_with_others(self, number: int) -> bool:
        """Say whether weights of another stage are on their way, or held for a peer."""
        others = [other for other in self._donors if other != number]
        return any(self._talking[other] or self._donors[other].statistics()["held"] for other in others)


def state_of(kept: Checkpoint) -> ReplicaState:
    """Return a checkpoint's slow weights as a replica would give them."""
    counters = kept.counters
    return ReplicaState(
        slow=kept.tensors["slow"],
        momentum=(),
        optimiser=(),
        round=counters.round,
        inner_steps=counters.inner_steps,
        progress=counters.progress,
        optimiser_steps=0,
        last_met=counters.last_met or 0,
    )


async def turn_away(conversation: Conversation) -> None:
    """Tell a peer to come back later; raise ConnectionAbortedError if it asks nothing."""
    async with patient(conversation, REQUEST_S):
        await conversation.receive()
        await conversation.send(Busy(retry_after_s=RETRY_S))


def next_stage(rounds: Sequence[Sequence[int]], kept: Mapping[int, int], every: int) -> int | None:
    """Return the stage that needs a snapshot most, None if none does.

    `rounds`: of each stage's replicas at work. `kept`: round of the last snapshot. The median counts, so that no single
    replica forces or prevents snapshots.
    """
    behind = {number: median_low(found) - kept.get(number, -every) for number, found in enumerate(rounds) if found}
    due = [number for number, lag in behind.items() if lag >= every]
    return max(due, key=lambda number: (behind[number], -number), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotKeeperConfig:
    """The snapshots to take. `own`: the stage that we serve. `every`: rounds."""

    run_id: str
    seed: int
    own: int
    every: int


class SnapshotKeeper:
    """Takes snapshots, which `server` serves; the caller awaits `run` as long as the node takes part."""

    def __init__(
        self, config: SnapshotKeeperConfig, server: SnapshotServer, roster: Callable[[], Roster], reporter: Reporter
    ) -> None:
        self._config, self._server, self._roster, self._reporter = config, server, roster, reporter
        self._network, self._device, self._archive = server.network, server.device, server.archive
        self._rng = Random(f"{config.seed}|snapshots|{server.network.peer_id}")
        self._rounds: dict[int, int] = {}
        self._not_before_s: dict[int, float] = {}

    async def run(self) -> None:
        """Note the snapshots on the disk, and take one of a stage whenever it is due, until cancelled."""
        for number in range(len(self._server.shapes)):
            if (found := await self._archive.slow(number)) is not None:
                await self._note(found)
            del found  # the last one would stay as long as this runs
        while True:
            await asyncio.sleep(LOOK_S)
            due = next_stage(self._standing(), self._rounds, self._config.every)
            if due is not None:
                await self._take(due)

    def _standing(self) -> list[list[int]]:
        """Return the rounds of each stage's replicas, as far as the stage may be asked now."""
        now_s = loop_s()
        return [
            [record.round for record in training_at(self._roster(), number)]
            if number != self._config.own and now_s >= self._not_before_s.get(number, 0.0)
            else []
            for number in range(len(self._server.shapes))
        ]

    async def _take(self, number: int) -> None:
        try:
            found = await self._fetch(number)
            await self._archive.keep(found)
        except (OSError, MemoryError, RuntimeError) as error:  # a lost connection is one too, and a lack of memory
            self._not_before_s[number] = loop_s() + FAILURE_S
            self._reporter.say(f"no snapshot of stage {number} this time: {error}")
            return
        if number not in self._rounds:
            self._reporter.say(f"keeping snapshots of stage {number}, the first of round {found.counters.round}")
        await self._note(found)

    async def _fetch(self, number: int) -> Checkpoint:
        """Return the slow weights of one replica of a stage; raise `OSError` if none gives them, or without room."""
        subject = WeightsOf(number, self._server.shapes[number], STATE)
        await self._archive.require_room(subject.weight_bytes)
        peers = [record.peer for record in training_at(self._roster(), number)]
        replies = await ask_manifests(self._network, self._rng.sample(peers, min(REPLICAS_ASKED, len(peers))), subject)
        found = possible(replies.offers, self._config.every)
        kept, _ = drop_outliers(found, self._config.every)
        if not kept:
            raise ConnectionRefusedError("none of its replicas answered")
        chosen = found[self._rng.choice(kept)]
        deadline_s, objection = self._server.deadline_s(subject.weight_bytes), self._objection(chosen)
        state = await subject.fetch(self._network, [chosen.peer], deadline_s, self._device.beside, objection)
        return snapshot_of(state, chosen.peer, number, self._config.run_id)

    def _objection(self, chosen: ReplicaSummary) -> Objection:
        async def objection(_: str, manifest: Manifest) -> str | None:
            if manifest.round > chosen.round + max(self._config.every, OUTLYING_ROUNDS):
                return f"it is in round {manifest.round}, and was in round {chosen.round} a moment ago"
            if chosen.norm / NORM_CHANGE <= manifest.norm <= chosen.norm * NORM_CHANGE:
                return None
            return f"its norm is {manifest.norm:.4g}, and was {chosen.norm:.4g} a moment ago"

        return objection

    async def _note(self, found: Checkpoint) -> None:
        self._rounds[found.counters.stage] = found.counters.round
        await self._server.note(found)


def snapshot_of(state: ReplicaState, peer: str, stage: int, run_id: str) -> Checkpoint:
    """Return a replica's slow weights as a checkpoint."""
    counters = Counters(
        run_id=run_id,
        stage=stage,
        round=state.round,
        inner_steps=state.inner_steps,
        progress=state.progress,
        samples=0,
        optimiser_steps=0,
        last_met=state.last_met,
        peer=peer,
    )
    return Checkpoint(counters, {"slow": state.slow})


def training_at(roster: Roster, number: int) -> list[PeerRecord]:
    """Return the replicas that train at a stage."""
    return [record for record in roster.stage(number) if record.state is PeerState.TRAINING]


def possible(found: Sequence[ReplicaSummary], every: int) -> list[ReplicaSummary]:
    """Return the replicas that are not far ahead of the others: their snapshot would never be replaced."""
    furthest = median_low([each.round for each in found]) + max(every, OUTLYING_ROUNDS) if found else 0
    return [each for each in found if each.round <= furthest]
