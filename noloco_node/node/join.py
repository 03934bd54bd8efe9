"""How a node becomes a replica: it claims a stage, and puts a first state into it.

`stage_claim` claims the stage, and `state_source` says where the first state comes from. This module carries that out.

A newcomer that finds the run begun and its stage empty asks the peers in the roster for a snapshot of the stage. Peers
with `--keep-snapshots` have one, and so have peers that served the stage before. The newcomer prefers its own
checkpoint unless a snapshot is clearly newer, because a checkpoint holds the momenta too. With neither, the stage
starts from the run's first weights, and the node tells its owner that the stage has lost its training.

No peer vouches for a snapshot, so the newcomer believes it within bounds. It rejects a snapshot that claims far more
progress than the run has made. Where three or more peers offer one, it rejects a norm that is far from their median. It
does not compare rounds, because a stage with a quarter of another's replicas takes four times its steps. The loss of
the first microbatches then shows whether the snapshot is good (`noloco_node.state_sync.starting_state`); if not, the
node joins again with another one. A snapshot holds neither momenta nor the optimiser's state: those begin at zero.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from random import Random
from statistics import median_low
from typing import NamedTuple

from msgspec import structs

from gossip.exchange.messages import Manifest, ReplicaState
from gossip.transfer import download
from gossip.transfer.download import MomentBounds
from noloco_node.errors import Exit, UserError
from noloco_node.journal import events
from noloco_node.machine.interface import FirstWeights, StageModel
from noloco_node.node import state_source
from noloco_node.node.node_context import NodeContext, StageRequest
from noloco_node.node.stage_claim import build_stage, claim_stage
from noloco_node.run.peer_state import AT_WORK, PeerState, Wait, WaitCause
from noloco_node.run.protocols import moment_sizes
from noloco_node.state_sync import download as downloads
from noloco_node.state_sync import starting_state as starting
from noloco_node.state_sync.starting_state import FailedSnapshots, SnapshotTrial, StartingState, from_donor
from noloco_node.state_sync.weight_exchange import TOKENIZER_TOPIC, WeightDownload
from noloco_node.storage.checkpoint import Checkpoint, Counters
from noloco_node.storage.weight_store import PIECE_BYTES, WeightStore
from noloco_node.swarm.roster import PeerRecord
from noloco_node.tasks import loop_s
from noloco_node.units import format_bytes
from pipeline.adamw import magnitudes
from pipeline.hardware.device_type import is_shortage
from pipeline.inner_step import moment_ratio

LOOKS, LOOK_S = 6, 5.0  # how often, and at which pauses, a newcomer of a run that was begun looks for peers that return
FIRST_ROUNDS = 2
"""Rounds of work that may be done before anybody has finished one: more peers may be there than planned."""


class Start(NamedTuple):
    """A joined stage: its number, its slice, its first state, and our counters from an earlier session."""

    number: int
    stage: StageModel
    starting_state: StartingState
    counted: Counters | None


async def join(context: NodeContext, request: StageRequest) -> Start:
    """Claim a stage, build it and find its weights; raise `UserError` if this machine cannot hold it."""
    host = context.host
    served = await host.checkpoints.served() if request.stage is None else None
    number, stage = await claim_stage(context, request, served)
    if stage is None:
        stage = await build_stage(host, number)
    saved = await host.checkpoints.load(number)
    try:
        starting_state = await _StateSearch(context, request, number, stage, saved).run()
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise UserError(
            f"The state of stage {number} does not fit into the memory that is free.",
            why=" ".join(str(error).split())[:300] or "no memory is left",
            hint="end other programs, or serve a smaller stage with --stage",
            code=Exit.DEVICE,
        ) from error
    unfinished = host.partial_download(number)
    if unfinished is not None:
        # It may be left of a copy that an earlier session began.
        await host.device.run(unfinished.discard)
    return Start(number, stage, starting_state, saved.counters if saved is not None else None)


class _StateSearch:
    """Carries out what `choose_source` says until the stage has its first state."""

    def __init__(
        self, context: NodeContext, request: StageRequest, number: int, stage: StageModel, saved: Checkpoint | None
    ) -> None:
        self._context, self._failed = context, request.failed
        self._number, self._stage, self._saved = number, stage, saved
        self._device, self._say, self._options = context.host.device, context.reporter.say, context.options
        self._membership, self._network = context.membership, context.network
        self._saved_round = saved.counters.round if saved is not None else None
        self._since_s = loop_s()  # a clock of the system may be set meanwhile
        self._download: downloads.StateDownload | None = None

    async def run(self) -> StartingState:
        """Put the first state into the stage, and return it."""
        seeker = state_source.Seeker(
            me=self._context.me,
            stage=self._number,
            saved_round=self._saved_round,
            staleness_at_most=self._context.run.outer.staleness_at_most,
            begun=self._options.reached > 0.0 and not self._options.begin_anew,
            revives=bool(self._failed.losses),
        )
        attempts = state_source.Attempts()
        tokenizer = self._context.host.tokenizer
        while tokenizer is not None and not await self._fetch_tokenizer(tokenizer):
            self._say(f"waiting for the tokenizer of the run: nobody reached has it; {_ASKING_AGAIN}")
            await self._wait_for(WaitCause.TOKENIZER, downloads.COPY_AGAIN_S)
        weights = self._context.host.first_weights
        if weights is not None and weights.frozen:
            while not await self._put_first_weights(weights):
                await self._wait_for_first_weights()
        while True:
            outcome: StartingState | state_source.Failure | None
            match state_source.choose_source(self._membership.roster, seeker, attempts):
                case state_source.FromSeed(lost):
                    outcome = await self._from_seed(lost)
                case state_source.FromCheckpoint(living, searched):
                    outcome = await self._from_checkpoint(living, searched)
                case state_source.FromReplicas(living):
                    outcome = await self._from_replicas(living)
                case state_source.FromPeerSnapshot(attempt):
                    outcome = await self._from_snapshot(attempt)
                case state_source.NobodyBack(looks):
                    outcome = await self._look_for_others(looks)
                case state_source.LookAgain(seconds, for_replica):
                    if for_replica:
                        now_unix_s, waited_s = self._context.host.unix_time(), loop_s() - self._since_s
                        self._say(downloads.waiting_line(self._number, now_unix_s, waited_s, seconds))
                    await self._wait_for(WaitCause.STATE if for_replica else None, seconds)
                    outcome = None
            if isinstance(outcome, StartingState):
                return outcome
            attempts = attempts.after(outcome)

    # The run's first weights, and its tokenizer.

    async def _from_seed(self, lost: bool) -> StartingState | None:
        weights = self._context.host.first_weights
        if weights is not None and not weights.frozen and not await self._put_first_weights(weights):
            await self._wait_for_first_weights()
            return None
        if lost:
            self._say(
                f"STAGE {self._number} HAS LOST ITS WEIGHTS: no replica of it lives, nobody in the roster gives a"
                " snapshot, and we have no checkpoint of it. It starts from the run's first weights. If somebody still"
                " has its checkpoint, stop this node now and let them join first; join --keep-snapshots guards"
                " against it"
            )
        elif self._options.reached:
            self._say(f"BEGINNING THE RUN ANEW, FROM ITS FIRST WEIGHTS: it had reached {self._options.reached:.1%}")
        beginning = await self._device.run(starting.from_seed, self._stage)
        run, others = self._context.run, self._at_work()
        if not lost:
            # Nobody has finished a round. A liar's claim of more would end the run for the peer that comes first.
            most = FIRST_ROUNDS * (run.outer.inner_steps_per_round + run.outer.overlap_steps) / run.inner.steps
            others = [record for record in others if record.progress <= most]
        return replace(beginning, progress=_median_progress(others))

    async def _put_first_weights(self, weights: FirstWeights) -> bool:
        """Fetch the stage's part of the run's first weights and put it into the stage; False if a part is missing.

        Raises `UserError` if the disk refuses, or the weights are not this model's.
        """
        store, job, line = weights.store, self._device.beside, downloads.ProgressLine(self._context.reporter)

        def tell(here: int, count: int) -> None:
            what = f"{format_bytes(here * PIECE_BYTES)} of {format_bytes(count * PIECE_BYTES)} ({here / count:.0%})"
            line.tell(here / count, f"fetching the weights that stage {self._number} starts from: {what}")

        fetch, peers = WeightDownload(self._network, store, job, tell), self._weight_donors()
        if not await fetch.digests(peers) or not await fetch.pieces(store.first_pieces(), peers):
            return False
        if not await fetch.pieces(await job(store.header_pieces), peers):
            return False
        pieces = await job(weights.pieces, self._number)
        line.begin()
        try:
            if not await fetch.pieces(pieces, peers):
                return False
        finally:
            line.close()
        await self._device.run(weights.put, self._number, self._stage)
        does = "is frozen at" if weights.frozen else "begins with"
        self._say(f"stage {self._number} {does} the weights of the checkpoint that the run goes on from")
        return True

    async def _wait_for_first_weights(self) -> None:
        self._say(
            "waiting for the weights that the run starts from: nobody reached has all of stage"
            f" {self._number}'s; {_ASKING_AGAIN}"
        )
        await self._wait_for(WaitCause.WEIGHTS, downloads.COPY_AGAIN_S)

    async def _fetch_tokenizer(self, store: WeightStore) -> bool:
        """Fetch the files of the run's tokenizer; return False if one is missing."""
        job = self._device.beside
        if not await job(store.missing, store.all_pieces()):
            return True
        found = await WeightDownload(self._network, store, job, topic=TOKENIZER_TOPIC).everything(self._weight_donors())
        if found:
            size = format_bytes(sum(each.size_bytes for each in store.files))
            self._say(f"the tokenizer of the checkpoint that the run goes on from is here: {size}")
        return found

    def _weight_donors(self) -> list[str]:
        """Return the peers to ask: nodes first, so that a bootstrap peer gives few pieces."""
        nodes = dict.fromkeys(record.peer for records in self._membership.roster.stages for record in records)
        return [peer for peer in (*nodes, *self._options.bootstrap_peers) if peer != self._context.me]

    async def _look_for_others(self, looks: int) -> state_source.NobodyFound:
        """Read the roster again; raise `UserError` if no peer came back for long."""
        reached = f"{self._options.reached:.1%} of the run"
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
        await self._membership.peek()
        return state_source.NobodyFound()

    # What this peer, or others, have of the stage.

    async def _from_checkpoint(self, living: tuple[PeerRecord, ...], searched: bool) -> StartingState:
        saved = self._saved
        assert saved is not None
        if searched:
            self._say(
                f"no snapshot of stage {self._number} is newer than our own checkpoint (round {saved.counters.round})"
            )
        line = f"going on from our own checkpoint of inner step {saved.counters.inner_steps}"
        if living:
            stage_round = median_low([record.round for record in living])
            line += f": it is of round {saved.counters.round}, and the stage is in round {stage_round}"
        self._say(line)
        starting_state = await self._device.run(starting.from_checkpoint, self._stage, saved)
        return starting.at_progress(starting_state, _median_progress(living)) if living else starting_state

    async def _from_replicas(self, living: tuple[PeerRecord, ...]) -> StartingState | state_source.DownloadFailed:
        donors = download.donors(self._context.me, [record.peer for record in living], self._context.run.seed)
        self._say(f"copying stage {self._number} from one of {len(donors)} replicas")
        if self._download is None:
            self._context.reporter.record(events.StateChanged(state=PeerState.CATCHING_UP))
            self._announce()
            self._context.host.prepare_text(self._number)
            self._download = self._new_download()
        state = await self._download.attempt(donors)
        if not isinstance(state, ReplicaState):
            self._say(f"could not copy the state: {state}")
            return state_source.DownloadFailed()
        # The median of the whole stage says how far the run is, not one donor.
        living = state_source.living_replicas(self._membership.roster, self._number, self._context.me) or living
        starting_state = await self._device.run(from_donor, self._stage, state)
        starting_state = starting.started(starting_state, [each.round for each in living], _median_progress(living))
        await self._device.run(self._download.discard)
        return starting_state

    def _new_download(self) -> downloads.StateDownload:
        options, weight_bytes = self._options, 4 * sum(map(prod, self._stage.shapes))
        deadline_s = downloads.copying_s(weight_bytes, options.slowest_bytes_per_s) if options.deadlines else math.inf
        line = downloads.DownloadLink(self._network, self._device, deadline_s)
        keep = self._context.host.partial_download(self._number)
        inner = self._context.run.inner
        moments = MomentBounds(moment_ratio(inner.beta1, inner.beta2), inner.clip_norm, magnitudes)
        sizes = moment_sizes(self._context.run, self._stage.shapes)
        return downloads.StateDownload(
            self._number, self._stage, line, self._context.reporter, keep, self._saved, moments, sizes
        )

    async def _from_snapshot(self, attempt: int) -> StartingState | state_source.SnapshotNotFound:
        """Revive a stage without replicas from a snapshot. `attempt`: from 0."""
        me, number, roster = self._context.me, self._number, self._membership.roster
        asked = starting.asked_of(roster, me, Random(f"{self._context.run.seed}|reviving|{me}|{attempt}"))
        others = [each for records in roster.stages for each in records if each.peer != me and each.state in AT_WORK]
        if attempt == 0:
            self._say(f"no replica of stage {number} lives: asking {len(asked)} peers for a snapshot of it")
        subject = downloads.WeightsOf(number, tuple(tuple(shape) for shape in self._stage.shapes), downloads.SNAPSHOT)
        replies = await downloads.ask_manifests(self._network, asked, subject)
        offers, run = replies.offers, starting.reached(self._membership.roster)
        believed_donors = starting.donors(self._saved_round, offers, run)
        order = untried(self._failed, believed_donors, self._saved_round, self._context.dimensions.vocabulary)
        if not order:
            return state_source.SnapshotNotFound(promised=replies.busy > 0)
        believed, givers = starting.verify_snapshot(offers, run), list[str]()

        async def objection(peer: str, manifest: Manifest) -> str | None:
            givers.append(peer)
            return await believed(peer, manifest)

        deadline_s = downloads.copying_s(subject.weight_bytes, self._options.slowest_bytes_per_s)
        try:
            state = await subject.fetch(self._network, order, deadline_s, self._device.run, objection, passes=5)
        except ConnectionError as error:
            self._say(f"no snapshot of stage {number} could be fetched: {error}")
            return state_source.SnapshotNotFound(promised=True)
        self._say(f"reviving stage {number} from a snapshot of its round {state.round}")
        progress = median_low([record.progress for record in others] or [state.progress])
        usual = self._failed.usual or tuple(record.loss for record in others if record.loss is not None)
        trial = SnapshotTrial(givers[-1], usual) if givers[-1] not in self._failed.losses else None
        revived = await self._device.run(from_donor, self._stage, state)
        return replace(revived, progress=progress, given=trial is not None, trial=trial)

    # What others read of us meanwhile.

    async def _wait_for(self, cause: WaitCause | None, seconds: float) -> None:
        """Say in our record what we wait for, if there is a cause; then read the roster again."""
        if cause is not None:
            self._announce(Wait(cause))
        await asyncio.sleep(seconds)
        await self._membership.peek()

    def _at_work(self) -> Sequence[PeerRecord]:
        """Return the records of other peers that train: those of our stage, or of all stages if ours has none."""
        roster, number, me = self._membership.roster, self._number, self._context.me
        stages = (state_source.living_replicas(roster, stage, me) for stage in range(len(roster.stages)))
        return state_source.living_replicas(roster, number, me) or [record for records in stages for record in records]

    def _announce(self, *waiting: Wait) -> None:
        for record in self._membership.roster.stage(self._number):
            if record.peer == self._context.me:
                record = structs.replace(record, state=PeerState.CATCHING_UP, waiting=waiting)
                self._membership.update(record)


_ASKING_AGAIN = (
    f"asking again in {downloads.COPY_AGAIN_S:.0f} s. A peer that has the checkpoint gives it to the others:"
    " noloco-node bootstrap, or join, with --weights DIR"
)


def untried(failed: FailedSnapshots, order: Sequence[str], saved_round: int | None, vocabulary: int) -> tuple[str, ...]:
    """Return the peers to ask, of those whose snapshot we believe, without those whose snapshot has failed.

    If none is left and we have no checkpoint, return the best of the failed ones if its loss was below a guess's.
    """
    tried = failed.losses
    left = tuple(peer for peer in order if peer not in tried)
    if left or not tried or saved_round is not None:
        return left
    best = min(tried, key=lambda peer: tried[peer])
    return (best,) if best in order and tried[best] < math.log(vocabulary) else ()


def _median_progress(records: Sequence[PeerRecord]) -> float:
    return median_low([record.progress for record in records] or [0.0])
