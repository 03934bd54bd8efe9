"""A stage without replicas goes on: from a snapshot that a peer keeps, or from a returning checkpoint.

A newcomer that finds the run begun and its stage empty asks everybody in the roster for a snapshot of it
(`noloco_node.state_sync.snapshot_keeper`; most keep none and say so at once). Whoever served the stage before has one
too (`noloco_node.state_sync.snapshot_keeper`), also while it is on its way to another stage. The newcomer's own
checkpoint of the stage, if it has one, comes first unless a snapshot is clearly newer, for it holds the momenta too.
Where there is neither, the stage starts from the run's first weights: what it had learned is lost, and that is said as
loudly as it deserves.

Nobody vouches for a snapshot, so it is believed within bounds, by whoever takes one home too
(`noloco_node.export.replica_fetch`). One that claims far more progress than the run has made is passed over. Rounds
say less: a stage with a quarter of another's replicas takes four times its steps. Where three or more peers offer one,
the median norm is the measure. Its first microbatches then show whether it is worth anything
(`noloco_node.state_sync.starting_state`); if not, the newcomer comes back here for another one. It carries neither
momenta nor the optimiser's memory: those begin at zero, as for the run's first step, in the middle of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import median_low

from gossip.exchange.messages import Manifest
from gossip.transfer.download import download_state
from noloco_node.machine.interface import StageModel
from noloco_node.node.joining.newcomer import Newcomer
from noloco_node.node.joining.state_source import SnapshotNotFound
from noloco_node.run.peer_state import AT_WORK
from noloco_node.state_sync.download import SNAPSHOT, WeightsOf, ask_manifests, copying_s
from noloco_node.state_sync.starting_state import (
    SnapshotTrial,
    StartingState,
    asked_of,
    donors,
    from_donor,
    reached,
    verify_snapshot,
)


async def revive(
    newcomer: Newcomer, number: int, stage: StageModel, saved_round: int | None, attempt: int
) -> StartingState | SnapshotNotFound:
    """Put a snapshot of a stage without replicas into ours, if somebody gives one.

    `saved_round`: of our own checkpoint of this stage. `attempt`: from 0; before another one some time has passed.
    """
    say, device = newcomer.reporter.say, newcomer.host.device
    others = [
        record
        for records in newcomer.membership.roster.stages
        for record in records
        if record.peer != newcomer.me and record.state in AT_WORK
    ]
    rng = Random(f"{newcomer.run.seed}|reviving|{newcomer.me}|{attempt}")
    asked = asked_of(newcomer.membership.roster, newcomer.me, rng)
    if attempt == 0:
        say(f"no replica of stage {number} lives: asking {len(asked)} peers for a snapshot of it")
    subject = WeightsOf(number, tuple(tuple(shape) for shape in stage.shapes), SNAPSHOT)
    replies = await ask_manifests(newcomer.network, asked, subject)
    offers, run = replies.offers, reached(newcomer.membership.roster)
    order = untried(newcomer, donors(saved_round, offers, run), saved_round)
    if not order:
        return SnapshotNotFound(promised=replies.busy > 0)
    wanted = subject.wanted(copying_s(subject.weight_bytes, newcomer.slowest_bytes_per_s))
    believed, givers = verify_snapshot(offers, run), list[str]()

    async def objection(peer: str, manifest: Manifest) -> str | None:
        givers.append(peer)
        return await believed(peer, manifest)

    wanted = replace(wanted, objection=objection)
    try:
        state = await download_state(order, subject.converse(newcomer.network), wanted, device.run)
    except ConnectionError as error:
        say(f"no snapshot of stage {number} could be fetched: {error}")
        return SnapshotNotFound(promised=True)
    say(f"reviving stage {number} from a snapshot of its round {state.round}")
    progress = median_low([record.progress for record in others] or [state.progress])
    usual = newcomer.failed.usual or tuple(record.loss for record in others if record.loss is not None)
    trial = SnapshotTrial(givers[-1], usual) if givers[-1] not in newcomer.failed.losses else None
    given = trial is not None
    return replace(await device.run(from_donor, stage, state), progress=progress, given=given, trial=trial)


def untried(newcomer: Newcomer, order: Sequence[str], saved_round: int | None) -> tuple[str, ...]:
    """Return who is asked, of those whose snapshot is believed: who has not given one that was worth nothing.

    Where nobody else is left and we have no checkpoint, the best of those if it knew more than a guess does.
    """
    tried = newcomer.failed.losses
    left = tuple(peer for peer in order if peer not in tried)
    if left or not tried or saved_round is not None:
        return left
    best = min(tried, key=lambda peer: tried[peer])
    return (best,) if best in order and tried[best] < math.log(newcomer.dimensions.vocabulary) else ()
