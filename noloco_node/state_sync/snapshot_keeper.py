"""Snapshots: slow weights of every stage, kept by peers that volunteer, so that no stage dies with its last replica.

A peer that runs with `--keep-snapshots ROUNDS` looks now and then how far each stage is. A stage that is so many rounds
further than the snapshot of it gets a new one: a few of its replicas say round and norm, one of those that agree is
chosen at random, and its slow weights are fetched as an export fetches them, beside the training, one stage at a time,
and not at all while the donor is busy with newcomers. The last few of each stage are kept, as files like checkpoints;
the own stage is left out, for its checkpoints lie beside them. A stage that has begun anew replaces nothing: its rounds
have to pass those of the snapshot first.

What is kept is served under a topic of its own (`noloco_node.state_sync.snapshot_keeper`): whoever revives a stage asks
for it (`noloco_node.node.joining.revival`). A stage that has lost its last replica is served in any case, or a stranger
who asks for another one all the time would keep it dead.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from random import Random
from statistics import median_low

from gossip.exchange.messages import Busy, Manifest, Parts, ReplicaState
from gossip.exchange.swap import norm
from gossip.transfer.chunks import cut
from gossip.transfer.donor import Donor, DonorLimits
from gossip.transfer.download import OUTLYING_ROUNDS, download_state, piece_s
from noloco_node.machine.interface import Host, Reporter, Runner, SnapshotStore
from noloco_node.network.interface import Conversation, PeerNetwork, patient
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import STATE, topic
from noloco_node.state_sync.download import SNAPSHOT, WeightsOf, ask_manifests, standings
from noloco_node.state_sync.replica_mean import ReplicaSummary, drop_outliers
from noloco_node.storage.checkpoint import Checkpoint, Counters
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.tasks import loop_s

Shapes = tuple[tuple[int, ...], ...]
"""Of a stage's parameters."""
REQUEST_S = 10.0
RETRY_S = 5.0


class SnapshotServer:
    """Serves slow weights that lie on the disk, of one stage at a time.

    `shapes`: of each stage. `deadline_s`: for so many bytes to be fetched. `load`: reads a stage's weights, None where
    there are none. `is_last`: says that nobody else serves a stage; it is then given besides others.
    """

    def __init__(
        self,
        network: PeerNetwork,
        device: Runner,
        shapes: Sequence[Shapes],
        deadline_s: Callable[[int], float],
        load: Callable[[int], Awaitable[Checkpoint | None]],
        is_last: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._network, self._device, self._shapes, self._deadline_s = network, device, shapes, deadline_s
        self._load, self._is_last = load, is_last
        self._donors: dict[int, Donor] = {}
        self._outlines: dict[int, ReplicaState] = {}
        self._talking: Counter[int] = Counter()

    async def note(self, found: Checkpoint) -> None:
        """Serve a stage of which `found` are the newest weights from now on."""
        number = found.counters.stage
        is_new = number not in self._donors
        await self._outline(number, state_of(found))
        if is_new:
            await self._open(number)

    async def serve(self, number: int) -> None:
        """Serve a stage from now on; its weights are read when somebody asks for them."""
        if number not in self._donors:
            await self._open(number)

    def forget_outlines(self) -> None:
        """Read anew what there is of each stage when somebody asks."""
        self._outlines.clear()

    def _donor(self, number: int) -> Donor:
        if number not in self._donors:
            subject = self._subject(number)
            deadline_s = self._deadline_s(subject.weight_bytes)
            pieces = len(cut([4 * prod(shape) for shape in subject.shapes]))
            limits = DonorLimits(deadline_s=2 * deadline_s, piece_s=piece_s(deadline_s, pieces))
            provide = partial(self._provide, number)
            self._donors[number] = Donor(provide, self._device.beside, subject.shapes, limits)
        return self._donors[number]

    async def _open(self, number: int) -> None:
        self._donor(number)
        serve = partial(self._converse, number)
        await self._network.serve(topic(SNAPSHOT, number), self._subject(number).schema, serve)

    def _subject(self, number: int) -> WeightsOf:
        return WeightsOf(number, self._shapes[number], SNAPSHOT)

    async def _outline(self, number: int, state: ReplicaState) -> ReplicaState:
        """Remember what weights say of themselves: many ask that, and it must cost neither the disk nor memory."""
        size = await self._device.beside(norm, state.slow)
        self._donor(number).knows(state.round, size)
        outline = self._outlines[number] = replace(state, slow=())
        return outline

    async def _provide(self, number: int, parts: Parts) -> ReplicaState:
        """Return what is known of a stage's weights, or they themselves, read from the disk."""
        if parts is Parts.OUTLINE and number in self._outlines:
            return self._outlines[number]
        found = await self._load(number) if parts is not Parts.ALL else None
        if found is None:
            raise ConnectionAbortedError("of another's stage there are slow weights, as long as they lie here, no more")
        state = state_of(found)
        if number not in self._outlines:
            await self._outline(number, state)
        return self._outlines[number] if parts is Parts.OUTLINE else state

    async def _converse(self, number: int, conversation: Conversation) -> None:
        if self._is_busy_with_others(number) and not self._is_last(number):
            await turn_away(conversation)
            return
        self._talking[number] += 1
        try:
            await self._donors[number].serve(conversation)
        finally:
            self._talking[number] -= 1

    def _is_busy_with_others(self, number: int) -> bool:
        """Say whether weights of another stage are being given, or held for somebody."""
        others = [other for other in self._donors if other != number]
        return any(self._talking[other] or self._donors[other].statistics()["held"] for other in others)


class FormerStageServer:
    """Serves what one peer has of the stages that it served before.

    `deadline_s`: as for `SnapshotServer`; None serves nothing, for whoever keeps snapshots of all stages gives these
    with them.
    """

    def __init__(
        self, host: Host, network: PeerNetwork, shapes: Sequence[Shapes], deadline_s: Callable[[int], float] | None
    ) -> None:
        self._former, self._stages, self._server = host.former, len(shapes), None
        if deadline_s is not None:
            self._server = SnapshotServer(network, host.device, shapes, deadline_s, host.former.slow)

    async def begin(self, own: int) -> None:
        """Set aside what is there of other stages than our own, and serve it from now on."""
        await self._former.set_aside(own)
        if self._server is not None:
            self._server.forget_outlines()
            for number in await self._former.stages():
                if number != own and number < self._stages:
                    await self._server.serve(number)


def state_of(kept: Checkpoint) -> ReplicaState:
    """Return what is kept as a replica would give it."""
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
    """Tell whoever asks to come back later; raise ConnectionAbortedError where it asks nothing."""
    async with patient(conversation, REQUEST_S):
        await conversation.receive()
        await conversation.send(Busy(retry_after_s=RETRY_S))


LOOK_S = 10.0
"""Between two looks at how far the stages are."""
FAILURE_S = 120.0
"""Before a stage is tried again whose snapshot failed."""
REPLICAS_ASKED = 3
"""Replicas that are asked for round and norm before one of them is chosen."""
NORM_CHANGE = 1.5
"""By which a norm may differ from what the same replica said a moment ago."""


def next_stage(rounds: Sequence[Sequence[int]], kept: Mapping[int, int], every: int) -> int | None:
    """Return the stage that needs a snapshot most, None if none does.

    `rounds`: of each stage's replicas at work. `kept`: round of the last snapshot. The median counts: no single replica
    can have snapshots taken all the time, or never.
    """
    behind = {number: median_low(found) - kept.get(number, -every) for number, found in enumerate(rounds) if found}
    due = [number for number, lag in behind.items() if lag >= every]
    return max(due, key=lambda number: (behind[number], -number), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotKeeperConfig:
    """What is kept. `shapes`: of each stage's parameters. `own`: the stage that we serve. `every`: in rounds.

    `deadline_s`: for the fetching of so many bytes.
    """

    run_id: str
    seed: int
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    own: int
    every: int
    deadline_s: Callable[[int], float]


class SnapshotKeeper:
    """Takes snapshots and serves them; `run` is to be awaited as long as we take part."""

    def __init__(
        self,
        config: SnapshotKeeperConfig,
        network: PeerNetwork,
        roster: Callable[[], Roster],
        store: SnapshotStore,
        device: Runner,
        reporter: Reporter,
    ) -> None:
        self._config, self._network, self._roster = config, network, roster
        self._store, self._device, self._reporter = store, device, reporter
        self._rng = Random(f"{config.seed}|snapshots|{network.peer_id}")
        self._rounds: dict[int, int] = {}
        self._not_before_s: dict[int, float] = {}
        self._server = SnapshotServer(
            network, device, config.shapes, config.deadline_s, store.newest, lambda number: not self._at_work(number)
        )

    async def run(self) -> None:
        """Serve what is there, and take a snapshot of a stage whenever one is due, until cancelled."""
        for number in range(len(self._config.shapes)):
            await self._look_up(number)
        while True:
            await asyncio.sleep(LOOK_S)
            due = next_stage(self._standing(), self._rounds, self._config.every)
            if due is not None:
                await self._take(due)

    async def _look_up(self, number: int) -> None:
        found = await self._store.newest(number)
        if found is not None:
            await self._note(found)

    def _standing(self) -> list[list[int]]:
        """Return the rounds of the replicas of each stage that may be asked now."""
        now_s = loop_s()
        return [
            [record.round for record in self._at_work(number)]
            if number != self._config.own and now_s >= self._not_before_s.get(number, 0.0)
            else []
            for number in range(len(self._config.shapes))
        ]

    def _at_work(self, number: int) -> list[PeerRecord]:
        return [record for record in self._roster().stage(number) if record.state is PeerState.TRAINING]

    async def _take(self, number: int) -> None:
        try:
            found = await self._fetch(number)
            await self._store.keep(found)
        except OSError as error:  # a lost connection is one too
            self._not_before_s[number] = loop_s() + FAILURE_S
            self._reporter.say(f"no snapshot of stage {number} this time: {error}")
            return
        if number not in self._rounds:
            self._reporter.say(f"keeping snapshots of stage {number}, the first of round {found.counters.round}")
        await self._note(found)

    async def _fetch(self, number: int) -> Checkpoint:
        """Return the slow weights of one replica of a stage; raise `OSError` where nobody gives them."""
        subject = WeightsOf(number, self._config.shapes[number], STATE)
        peers = [record.peer for record in self._at_work(number)]
        replies = await ask_manifests(self._network, self._rng.sample(peers, min(REPLICAS_ASKED, len(peers))), subject)
        found = possible(standings(replies.manifests), self._config.every)
        kept, _ = drop_outliers(found, self._config.every)
        if not kept:
            raise ConnectionRefusedError("none of its replicas answered")
        chosen = found[self._rng.choice(kept)]
        wanted = subject.wanted(self._config.deadline_s(subject.weight_bytes))
        state = await download_state(
            [chosen.peer],
            subject.converse(self._network),
            replace(wanted, objection=self._objection(chosen)),
            self._device.beside,
            passes=1,
        )
        return snapshot_of(state, chosen.peer, number, self._config.run_id)

    def _objection(self, chosen: ReplicaSummary) -> Callable[[str, Manifest], Awaitable[str | None]]:
        async def objection(_: str, manifest: Manifest) -> str | None:
            if manifest.round > chosen.round + max(self._config.every, OUTLYING_ROUNDS):
                return f"it is in round {manifest.round}, and was in round {chosen.round} a moment ago"
            if chosen.norm / NORM_CHANGE <= manifest.norm <= chosen.norm * NORM_CHANGE:
                return None
            return f"its norm is {manifest.norm:.4g}, and was {chosen.norm:.4g} a moment ago"

        return objection

    async def _note(self, found: Checkpoint) -> None:
        """Remember how far a stage's snapshot is, and serve it from now on."""
        self._rounds[found.counters.stage] = found.counters.round
        await self._server.note(found)


def snapshot_of(state: ReplicaState, peer: str, stage: int, run_id: str) -> Checkpoint:
    """Return a replica's slow weights as they are kept."""
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


def possible(found: Sequence[ReplicaSummary], every: int) -> list[ReplicaSummary]:
    """Return the replicas that are not far ahead of the others: a snapshot of such a round would never be replaced."""
    furthest = median_low([each.round for each in found]) + max(every, OUTLYING_ROUNDS) if found else 0
    return [each for each in found if each.round <= furthest]
