"""Snapshots: slow weights of every stage, kept by peers that volunteer, so that no stage dies with its last replica.

A peer that runs with `--keep-snapshots ROUNDS` looks now and then how far each stage is. A stage that is so many rounds
further than the snapshot of it gets a new one: a few of its replicas say round and norm, one of those that agree is
chosen at random, and its slow weights are fetched as an export fetches them, beside the training, one stage at a time,
and not at all while the donor is busy with newcomers. The last few of each stage are kept, as files like checkpoints;
the own stage is left out, for its checkpoints lie beside them. A stage that has begun anew replaces nothing: its rounds
have to pass those of the snapshot first.

What is kept is served under a topic of its own (`noloco_node.state_sync.snapshot_server`): whoever revives a stage asks
for it (`noloco_node.node.joining.revival`). A stage that has lost its last replica is served in any case, or a stranger
who asks for another one all the time would keep it dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median_low

from gossip.exchange.messages import Manifest, ReplicaState
from gossip.transfer.donor_checks import OUTLYING_ROUNDS
from gossip.transfer.download import download_state
from noloco_node.machine.interface import Reporter, Runner, SnapshotStore
from noloco_node.network.interface import PeerNetwork
from noloco_node.run.peer_state import PeerState
from noloco_node.run.protocols import STATE
from noloco_node.state_sync.manifests import WeightsOf, ask_manifests, standings
from noloco_node.state_sync.replica_mean import ReplicaSummary, drop_outliers
from noloco_node.state_sync.snapshot_server import SnapshotServer
from noloco_node.storage.checkpoint import Checkpoint, Counters
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.tasks import loop_s

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
