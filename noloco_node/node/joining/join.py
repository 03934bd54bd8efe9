"""How a newcomer becomes a replica: it claims a stage (`noloco_node.node.joining.stage_claim`), chooses where its first
state comes from (`noloco_node.node.joining.state_source`), and puts that state into the stage.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from statistics import median_low
from typing import NamedTuple

from msgspec import structs

from gossip.exchange.messages import ReplicaState
from gossip.transfer import download
from gossip.transfer.download import MomentBounds
from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine.interface import StageModel
from noloco_node.node.joining.first_weights import fetch_tokenizer, put_first_weights, waiting_for_tokenizer_line
from noloco_node.node.joining.first_weights import waiting_line as no_weights_line
from noloco_node.node.joining.newcomer import Newcomer
from noloco_node.node.joining.revival import revive
from noloco_node.node.joining.stage_claim import build_stage, claim_stage
from noloco_node.node.joining.state_source import (
    Attempts,
    DownloadFailed,
    FromCheckpoint,
    FromPeerSnapshot,
    FromReplicas,
    FromSeed,
    LookAgain,
    NobodyBack,
    Seeker,
    SnapshotNotFound,
    choose_source,
    living_replicas,
)
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.state_sync.download import COPY_AGAIN_S, DownloadLink, StateDownload, copying_s, waiting_line
from noloco_node.state_sync.starting_state import StartingState, from_checkpoint, from_donor, from_seed, started
from noloco_node.storage.checkpoint import Checkpoint, Counters
from noloco_node.swarm.roster import PeerRecord
from pipeline.forward_pass import is_shortage
from pipeline.inner_step import moment_ratio

LOOKS, LOOK_S = 6, 5.0
"""How often, and after which pauses, a newcomer looks whether somebody comes back to a run that was begun."""


class Start(NamedTuple):
    """What joining yields: the stage's number, its slice, where it starts, and what we counted in an earlier life."""

    number: int
    stage: StageModel
    starting_state: StartingState
    counted: Counters | None


async def join(newcomer: Newcomer) -> Start:
    """Claim a stage, build it and find its weights; raise `UserError` where this machine cannot hold it."""
    served = await newcomer.host.last_stage() if newcomer.requested_stage is None else None
    number, stage = await claim_stage(newcomer, served)
    if stage is None:
        stage = await build_stage(newcomer.host, number)
    saved = await newcomer.host.load(number)
    try:
        starting_state = await _StateSearch(newcomer, number, stage, saved).run()
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise UserError(
            f"The state of stage {number} does not fit into the memory that is free.",
            why=" ".join(str(error).split())[:300] or "no memory is left",
            hint="end other programs, or serve a smaller stage with --stage",
            code=Exit.DEVICE,
        ) from error
    unfinished = newcomer.host.partial_download(number, 0)
    if unfinished is not None:
        # Of a copy that an earlier life began, and that nobody needs now, say.
        await newcomer.host.device.run(unfinished.discard)
    return Start(number, stage, starting_state, saved.counters if saved is not None else None)


class _StateSearch:
    """The way to a newcomer's first state: carries out what `choose_source` says until there is one."""

    def __init__(self, newcomer: Newcomer, number: int, stage: StageModel, saved: Checkpoint | None) -> None:
        self._newcomer, self._number, self._stage, self._saved = newcomer, number, stage, saved
        self._device, self._say, self._run = newcomer.host.device, newcomer.reporter.say, newcomer.run
        self._saved_round = saved.counters.round if saved is not None else None
        self._since_unix_s = newcomer.host.unix_time()
        self._download: StateDownload | None = None

    async def run(self) -> StartingState:
        """Return the first state, which is in the stage by then."""
        seeker = Seeker(
            me=self._newcomer.me,
            stage=self._number,
            saved_round=self._saved_round,
            staleness_at_most=self._run.outer.staleness_at_most,
            begun=self._newcomer.reached > 0.0 and not self._newcomer.begin_anew,
            revives=bool(self._newcomer.failed.losses),
        )
        attempts = Attempts()
        tokenizer = self._newcomer.host.tokenizer
        while tokenizer is not None and not await fetch_tokenizer(self._newcomer, tokenizer):
            self._say(waiting_for_tokenizer_line(COPY_AGAIN_S))
            await self._wait_for(WaitCause.TOKENIZER, COPY_AGAIN_S)
        while True:
            outcome: StartingState | DownloadFailed | SnapshotNotFound | None
            match choose_source(self._newcomer.membership.roster, seeker, attempts):
                case FromSeed(lost):
                    outcome = await self._from_seed(lost)
                case FromCheckpoint(living, searched):
                    outcome = await self._from_checkpoint(living, searched)
                case FromReplicas(living):
                    outcome = await self._from_replicas(living)
                case FromPeerSnapshot(attempt):
                    outcome = await revive(self._newcomer, self._number, self._stage, self._saved_round, attempt)
                case NobodyBack(looks):
                    await self._look_for_others(looks)
                    outcome = None
                case LookAgain(seconds, for_replica):
                    await self._wait(seconds, for_replica)
                    outcome = None
            if isinstance(outcome, StartingState):
                return outcome
            attempts = attempts.after(outcome)

    async def _from_seed(self, lost: bool) -> StartingState | None:
        weights = self._newcomer.host.first_weights
        if weights is not None and not await put_first_weights(self._newcomer, weights, self._number, self._stage):
            self._say(no_weights_line(self._number, COPY_AGAIN_S))
            await self._wait_for(WaitCause.WEIGHTS, COPY_AGAIN_S)
            return None
        if lost:
            self._say(
                f"STAGE {self._number} HAS LOST ITS WEIGHTS: no replica of it lives, nobody in the roster gives a"
                " snapshot, and we have no checkpoint of it. It starts from the run's first weights. If somebody still"
                " has its checkpoint, stop this node now and let them join first; join --keep-snapshots guards"
                " against it"
            )
        elif self._newcomer.reached:
            self._say(f"BEGINNING THE RUN ANEW, FROM ITS FIRST WEIGHTS: it had reached {self._newcomer.reached:.1%}")
        beginning = await self._device.run(from_seed, self._stage)
        return replace(beginning, progress=_median_progress(self._at_work()))

    async def _look_for_others(self, looks: int) -> None:
        """Look again who is there; raise `UserError` where nobody came back for long."""
        reached = f"{self._newcomer.reached:.1%} of the run"
        if looks == LOOKS:
            raise UserError(
                "Nobody who has weights of this run is here.",
                why=f"{reached} was done when its peers were last seen; beginning anew would throw that away",
                hint="start those first that hold its checkpoints, then this node; "
                "where nobody has them any more, join --begin-anew starts from step 0",
                code=Exit.UNREACHABLE,
            )
        if not looks:
            self._say(f"{reached} is done, and nobody who has its weights is here: looking for {LOOKS * LOOK_S:.0f} s")
        await asyncio.sleep(LOOK_S)
        await self._newcomer.membership.peek()

    async def _from_checkpoint(self, living: tuple[PeerRecord, ...], searched: bool) -> StartingState:
        saved = self._saved
        assert saved is not None
        if searched:
            self._say(
                f"no snapshot of stage {self._number} is newer than our own checkpoint (round {saved.counters.round})"
            )
        line = f"going on from our own checkpoint of inner step {saved.counters.inner_steps}"
        if not living:
            self._say(line)
            return await self._device.run(from_checkpoint, self._stage, saved)
        stage_round = median_low([record.round for record in living])
        self._say(f"{line}: it is of round {saved.counters.round}, and the stage is in round {stage_round}")
        starting_state = await self._device.run(from_checkpoint, self._stage, saved)
        return replace(starting_state, progress=_median_progress(living))

    async def _from_replicas(self, living: tuple[PeerRecord, ...]) -> StartingState | DownloadFailed:
        donors = download.donors(self._newcomer.me, [record.peer for record in living], self._run.seed)
        self._say(f"copying stage {self._number} from one of {len(donors)} replicas")
        if self._download is None:
            self._newcomer.reporter.record(events.StateChanged(state=PeerState.CATCHING_UP))
            self._announce()
            self._newcomer.host.prepare_text(self._number)
            self._download = self._new_download()

        state = await self._download.attempt(donors)
        if not isinstance(state, ReplicaState):
            self._say(f"could not copy the state: {state}")
            return DownloadFailed()
        # The stage's word on how far the run is by now, not one donor's.
        living = living_replicas(self._newcomer.membership.roster, self._number, self._newcomer.me) or living
        starting_state = await self._device.run(from_donor, self._stage, state)
        starting_state = started(starting_state, [record.round for record in living], _median_progress(living))
        await self._device.run(self._download.discard)
        return starting_state

    def _new_download(self) -> StateDownload:
        newcomer, weight_bytes = self._newcomer, 4 * sum(map(prod, self._stage.shapes))
        deadline_s = copying_s(weight_bytes, newcomer.slowest_bytes_per_s) if newcomer.deadlines else math.inf
        line = DownloadLink(newcomer.network, self._device, deadline_s)
        keep = newcomer.host.partial_download(self._number, weight_bytes)
        inner = newcomer.run.inner
        moments = MomentBounds(moment_ratio(inner.beta1, inner.beta2), inner.clip_norm)
        return StateDownload(self._number, self._stage, line, newcomer.reporter, keep, self._saved, moments)

    async def _wait(self, seconds: float, for_replica: bool) -> None:
        """Look again a while later; say for whom we wait and since when, to our owner and in our record."""
        if for_replica:
            self._say(waiting_line(self._number, self._since_unix_s, self._newcomer.host.unix_time(), seconds))
        await self._wait_for(WaitCause.STATE if for_replica else None, seconds)

    async def _wait_for(self, cause: WaitCause | None, seconds: float) -> None:
        if cause is not None:
            self._announce(Wait(cause))
        await asyncio.sleep(seconds)
        await self._newcomer.membership.peek()

    def _at_work(self) -> Sequence[PeerRecord]:
        """Return the records of the others that train: those of our stage, or of all where it has none."""
        roster, number, me = self._newcomer.membership.roster, self._number, self._newcomer.me
        stages = (living_replicas(roster, stage, me) for stage in range(len(roster.stages)))
        return living_replicas(roster, number, me) or [record for records in stages for record in records]

    def _announce(self, *waiting: Wait) -> None:
        """Say in our record that we catch up, and for what we wait."""
        for record in self._newcomer.membership.roster.stage(self._number):
            if record.peer == self._newcomer.me:
                record = structs.replace(record, state=PeerState.CATCHING_UP, waiting=waiting)
                self._newcomer.membership.update(record)


def _median_progress(records: Sequence[PeerRecord]) -> float:
    return median_low([record.progress for record in records] or [0.0])
