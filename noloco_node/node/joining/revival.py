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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import Enum
from random import Random
from statistics import median_high, median_low
from typing import TYPE_CHECKING, NamedTuple

from gossip.exchange.messages import Manifest
from gossip.rounds.matching import ROUND_BOUND
from gossip.transfer.donor_switch import OUTLYING_PROGRESS
from gossip.transfer.download import catch_up
from noloco_node.state_sync.download import copying_s
from noloco_node.state_sync.manifests import SNAPSHOT, Subject, outlines, standings
from noloco_node.state_sync.replica_mean import Standing
from noloco_node.state_sync.starting_state import Beginning, copied
from noloco_node.swarm.roster import Roster, State

if TYPE_CHECKING:
    from noloco_node.machine.interface import Stage
    from noloco_node.node.joining.join import Newcomer
    from noloco_node.storage.checkpoint import Checkpoint

MOST_ASKED = 256
"""Of those at work, and a quarter as many of those who are on their way to it."""
AGAIN_S = 10.0
"""Before everybody is asked again."""
ATTEMPTS = 30
"""Where somebody has a snapshot, or may have."""
ATTEMPTS_IN_VAIN = 2
NORM_FACTOR = 4.0
"""By which the norm of a snapshot may differ from the median of three or more: they are of different rounds."""
VOICES = 3
MOST_TIMES = 64
"""As many rounds as the furthest of the other stages may a stage have made: it had the fewer replicas."""
_AT_WORK = (State.TRAINING, State.FINISHED)


class Outcome(Enum):
    """What came of an attempt that revived nothing."""

    NOTHING = "there is no snapshot"
    AGAIN = "somebody may still give one"


class Reached(NamedTuple):
    """How far the run is, by its stages at work."""

    round: int
    progress: float

    def allows(self, of: Standing | Manifest) -> bool:
        """Say whether a snapshot of another stage may be so far."""
        most = MOST_TIMES * (self.round + ROUND_BOUND)
        return 0 <= of.round <= most and of.progress <= self.progress + OUTLYING_PROGRESS


def donors(own_round: int | None, offers: Sequence[Standing], run: Reached) -> tuple[str, ...]:
    """Return the peers whose snapshot to ask for, the newest first; none where our own checkpoint is as good.

    `own_round`: of our checkpoint of the stage, None without one.
    """
    believed = [offer for offer in offers if run.allows(offer)]
    if len(believed) >= VOICES:
        norm = median_low(offer.norm for offer in believed)
        believed = [offer for offer in believed if norm / NORM_FACTOR <= offer.norm <= norm * NORM_FACTOR]
    if own_round is not None:
        believed = [offer for offer in believed if offer.round > own_round + ROUND_BOUND]
    return tuple(offer.peer for offer in sorted(believed, key=lambda offer: -offer.round))


def kept_word(offers: Sequence[Standing], run: Reached) -> Callable[[str, Manifest], Awaitable[str | None]]:
    """Return what refuses whoever gives another snapshot than the one for which `donors` chose it."""
    norms = {offer.peer: offer.norm for offer in offers}

    async def objection(peer: str, manifest: Manifest) -> str | None:
        if not run.allows(manifest):
            return f"its snapshot is of round {manifest.round} and progress {manifest.progress:.2f}, the run at {run}"
        if not norms[peer] / NORM_FACTOR <= manifest.norm <= norms[peer] * NORM_FACTOR:
            return f"its snapshot has the norm {manifest.norm:.4g}, and had {norms[peer]:.4g} a moment ago"
        return None

    return objection


def reached(roster: Roster) -> Reached:
    """Return how far the stage is that is furthest, by the medians of its replicas at work.

    Newcomers say round 0, and there may be many of them: they count where nobody else is left.
    """
    at_work = [[record for record in records if record.state in _AT_WORK] for records in roster.stages]
    stages = [records for records in (at_work if any(at_work) else roster.stages) if records]
    return Reached(
        max((median_high([record.round for record in records]) for records in stages), default=0),
        max((median_high([record.progress for record in records]) for records in stages), default=0.0),
    )


def asked_of(roster: Roster, me: str, rng: Random) -> list[str]:
    """Return the peers that are asked for a snapshot: whoever works, or has left a stage and not yet arrived."""
    found: list[str] = []
    for states, most in ((_AT_WORK, MOST_ASKED), ((State.CATCHING_UP,), MOST_ASKED // 4)):
        records = [record for records in roster.stages for record in records if record.state in states]
        peers = sorted({record.peer for record in records} - {me, *found})
        found += rng.sample(peers, min(most, len(peers)))
    return found


async def revive(
    newcomer: Newcomer, number: int, stage: Stage, saved: Checkpoint | None, attempt: int
) -> Beginning | Outcome:
    """Put a snapshot of a stage without replicas into ours, or say whether there is none, or to look again.

    `saved`: our own checkpoint of this stage. `attempt`: from 0; before another one some time has passed.
    """
    say, device = newcomer.voice.say, newcomer.machine.device
    others = [
        record
        for records in newcomer.presence.roster.stages
        for record in records
        if record.peer != newcomer.me and record.state in _AT_WORK
    ]
    rng = Random(f"{newcomer.recipe.run.seed}|reviving|{newcomer.me}|{attempt}")
    asked = asked_of(newcomer.presence.roster, newcomer.me, rng)
    if attempt == 0:
        say(f"no replica of stage {number} lives: asking {len(asked)} peers for a snapshot of it")
    subject = Subject(number, tuple(tuple(shape) for shape in stage.shapes), SNAPSHOT)
    told = await outlines(newcomer.network, asked, subject)
    own_round = saved.counters.round if saved is not None else None
    offers, run = standings(told.manifests), reached(newcomer.presence.roster)
    order = donors(own_round, offers, run)
    if order:
        wanted = subject.wanted(copying_s(subject.weight_bytes, newcomer.slowest_bytes_per_s))
        wanted = replace(wanted, objection=kept_word(offers, run))
        try:
            state = await catch_up(order, subject.converse(newcomer.network), wanted, device.run)
        except ConnectionError as error:
            say(f"no snapshot of stage {number} could be fetched: {error}")
        else:
            say(f"reviving stage {number} from a snapshot of its round {state.round}")
            zeros = tuple(tensor.new_zeros(tensor.shape) for tensor in state.slow)
            progress = median_low([record.progress for record in others] or [state.progress])
            return replace(await device.run(copied, stage, replace(state, momentum=zeros)), progress=progress)
    if asks_again(bool(order) or told.busy > 0, saved is not None, attempt):
        await asyncio.sleep(AGAIN_S)
        await newcomer.presence.peek()
        return Outcome.AGAIN
    if saved is None:
        say(
            f"STAGE {number} HAS LOST ITS WEIGHTS: no replica of it lives, nobody in the roster gives a snapshot, and"
            " we have no checkpoint of it. It starts from the run's first weights. If somebody still has its"
            " checkpoint, stop this node now and let them join first; join --keep-snapshots guards against it"
        )
    else:
        say(f"no snapshot of stage {number} is newer than our own checkpoint (round {saved.counters.round})")
    return Outcome.NOTHING


def asks_again(promised: bool, saved: bool, attempt: int) -> bool:
    """Say whether to ask everybody again after this attempt, from 0.

    Where somebody has a snapshot, or is busy giving another one, for some minutes: a stage is at stake. Where nobody
    has, once more if the run's first weights are all that is left, for an answer may have been lost.
    """
    if promised:
        return attempt + 1 < ATTEMPTS
    return not saved and attempt + 1 < ATTEMPTS_IN_VAIN
