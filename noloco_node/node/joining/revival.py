"""A stage without replicas goes on: from a snapshot that a peer keeps, or from a returning checkpoint.

A newcomer that finds the run begun and its stage empty asks everybody in the roster for a snapshot of it
(`noloco_node.state_sync.snapshot_keeper`; most keep none and say so at once). Whoever served the stage before has one
too (`noloco_node.state_sync.snapshot_server`), also while it is on its way to another stage. The newcomer's own
checkpoint of the stage, if it has one, comes first unless a snapshot is clearly newer, for it holds the momenta too.
Where there is neither, the stage starts from the run's first weights: what it had learned is lost, and that is said as
loudly as it deserves.

Nobody vouches for a snapshot, so it is believed within bounds, by whoever takes one home too
(`noloco_node.export.snapshot_fetch`). One that claims far more progress than the run has made is passed over. Rounds
say less: a stage with a quarter of another's replicas takes four times its steps. Where three or more peers offer one,
the median norm is the measure. It carries neither momenta nor the optimiser's memory: those begin at zero, as for the
run's first step, in the middle of the schedule.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from enum import Enum
from random import Random
from statistics import median_low
from typing import TYPE_CHECKING

from gossip.transfer.download import download_state
from noloco_node.state_sync.deadlines import copying_s
from noloco_node.state_sync.manifests import SNAPSHOT, WeightsOf, ask_manifests, standings
from noloco_node.state_sync.snapshot_choice import (
    _AT_WORK,
    AGAIN_S,
    asked_of,
    asks_again,
    donors,
    reached,
    verify_snapshot,
)
from noloco_node.state_sync.starting_state import StartingState, from_donor

if TYPE_CHECKING:
    from noloco_node.machine.interface import StageModel
    from noloco_node.node.joining.newcomer import Newcomer
    from noloco_node.storage.checkpoint import Checkpoint


class RevivalOutcome(Enum):
    """What came of an attempt that revived nothing."""

    NOTHING = "there is no snapshot"
    AGAIN = "somebody may still give one"


async def revive(
    newcomer: Newcomer, number: int, stage: StageModel, saved: Checkpoint | None, attempt: int
) -> StartingState | RevivalOutcome:
    """Put a snapshot of a stage without replicas into ours, or say whether there is none, or to look again.

    `saved`: our own checkpoint of this stage. `attempt`: from 0; before another one some time has passed.
    """
    say, device = newcomer.reporter.say, newcomer.host.device
    others = [
        record
        for records in newcomer.membership.roster.stages
        for record in records
        if record.peer != newcomer.me and record.state in _AT_WORK
    ]
    rng = Random(f"{newcomer.recipe.run.seed}|reviving|{newcomer.me}|{attempt}")
    asked = asked_of(newcomer.membership.roster, newcomer.me, rng)
    if attempt == 0:
        say(f"no replica of stage {number} lives: asking {len(asked)} peers for a snapshot of it")
    subject = WeightsOf(number, tuple(tuple(shape) for shape in stage.shapes), SNAPSHOT)
    told = await ask_manifests(newcomer.network, asked, subject)
    own_round = saved.counters.round if saved is not None else None
    offers, run = standings(told.manifests), reached(newcomer.membership.roster)
    order = donors(own_round, offers, run)
    if order:
        wanted = subject.wanted(copying_s(subject.weight_bytes, newcomer.slowest_bytes_per_s))
        wanted = replace(wanted, objection=verify_snapshot(offers, run))
        try:
            state = await download_state(order, subject.converse(newcomer.network), wanted, device.run)
        except ConnectionError as error:
            say(f"no snapshot of stage {number} could be fetched: {error}")
        else:
            say(f"reviving stage {number} from a snapshot of its round {state.round}")
            zeros = tuple(tensor.new_zeros(tensor.shape) for tensor in state.slow)
            progress = median_low([record.progress for record in others] or [state.progress])
            return replace(await device.run(from_donor, stage, replace(state, momentum=zeros)), progress=progress)
    if asks_again(bool(order) or told.busy > 0, saved is not None, attempt):
        await asyncio.sleep(AGAIN_S)
        await newcomer.membership.peek()
        return RevivalOutcome.AGAIN
    if saved is None:
        say(
            f"STAGE {number} HAS LOST ITS WEIGHTS: no replica of it lives, nobody in the roster gives a snapshot, and"
            " we have no checkpoint of it. It starts from the run's first weights. If somebody still has its"
            " checkpoint, stop this node now and let them join first; join --keep-snapshots guards against it"
        )
    else:
        say(f"no snapshot of stage {number} is newer than our own checkpoint (round {saved.counters.round})")
    return RevivalOutcome.NOTHING
