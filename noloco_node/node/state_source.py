"""Where a newcomer's first state comes from: one pure decision.

If the run has begun and the stage lives, the state is this peer's own checkpoint if that is at most a few rounds
behind, else a living replica's state. If no replica gives its state, the newcomer waits, since rounds would average
older weights into those of the living replicas. If no replica of the stage lives, the state is a snapshot that some
peer keeps, or our checkpoint. With neither, and in a run that has not begun, it is the run's first weights: from its
seed, or from the model that it continues.

A run without any peer may still have begun: bootstrap peers and homes remember its progress
(`noloco_node.swarm.run_distribution`). Then peers that are away have its weights, and a newcomer waits for them a
while. It begins anew only if its owner says so, or beside peers that have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from noloco_node.run.peer_state import AT_WORK
from noloco_node.state_sync.download import pause_s
from noloco_node.state_sync.starting_state import AGAIN_S, asks_again, is_recent_enough
from noloco_node.swarm.roster import PeerRecord, Roster


@dataclass(frozen=True, slots=True)
class FromSeed:
    """The run's first weights. `lost`: the stage was trained, and no peer has its weights any more."""

    lost: bool = False


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """Our own checkpoint. `living`: replicas that it can keep up with. `searched`: we asked for a newer snapshot."""

    living: tuple[PeerRecord, ...] = ()
    searched: bool = False


@dataclass(frozen=True, slots=True)
class FromReplicas:
    living: tuple[PeerRecord, ...]


@dataclass(frozen=True, slots=True)
class FromPeerSnapshot:
    """A peer's snapshot, if there is one. `attempt`: from 0."""

    attempt: int


@dataclass(frozen=True, slots=True)
class NobodyBack:
    """The run was begun, and no peer that has its weights is here. `looks`: readings so far."""

    looks: int


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Read the roster again after so many seconds. `for_replica`: we wait for a replica's state."""

    seconds: float
    for_replica: bool


StateSource: TypeAlias = FromSeed | FromCheckpoint | FromReplicas | FromPeerSnapshot | NobodyBack | LookAgain


@dataclass(frozen=True, slots=True)
class DownloadFailed:
    """No replica gave its state."""


@dataclass(frozen=True, slots=True)
class SnapshotNotFound:
    """No peer gave a snapshot. `promised`: some peer has one, or may have."""

    promised: bool


@dataclass(frozen=True, slots=True)
class NobodyFound:
    """No peer that has the weights of a run that was begun was here at a reading of the roster."""


Failure: TypeAlias = DownloadFailed | SnapshotNotFound | NobodyFound


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often each source failed, and which one failed since the last wait."""

    downloads: int = 0
    searches: int = 0
    looks: int = 0
    failure: Failure | None = None

    def after(self, failure: Failure | None) -> Attempts:
        """Return the attempts after one more; None: after a wait."""
        return Attempts(
            self.downloads + isinstance(failure, DownloadFailed),
            self.searches + isinstance(failure, SnapshotNotFound),
            self.looks + isinstance(failure, NobodyFound),
            failure,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seeker:
    """A newcomer that looks for the state of `stage`. `saved_round`: of its own checkpoint; None without one.

    `begun`: the run is known to have been begun, and its owner did not say to begin it anew. `revives`: a snapshot of
    the stage proved worthless; the present replicas may have begun with the same one.
    """

    me: str
    stage: int
    saved_round: int | None
    staleness_at_most: int
    begun: bool = False
    revives: bool = False


def choose_source(roster: Roster, seeker: Seeker, attempts: Attempts) -> StateSource:
    """Return the source of the first state, or how long to wait before the next reading."""
    saved, living = seeker.saved_round is not None, living_replicas(roster, seeker.stage, seeker.me)
    match attempts.failure:
        case DownloadFailed():
            return LookAgain(pause_s(attempts.downloads), for_replica=True)
        case SnapshotNotFound(promised):
            if asks_again(promised, saved, attempts.searches - 1):
                return LookAgain(AGAIN_S, for_replica=False)
            if not living:
                return FromCheckpoint(searched=True) if saved else FromSeed(lost=True)
    if not any(record.round > 0 for records in roster.stages for record in records):
        if saved:
            return FromCheckpoint()
        alone = not any(living_replicas(roster, stage, seeker.me) for stage in range(len(roster.stages)))
        return NobodyBack(attempts.looks) if seeker.begun and alone else FromSeed()
    if not living or (seeker.revives and attempts.failure is None and not attempts.downloads):
        return FromPeerSnapshot(attempts.searches)
    rounds = [record.round for record in living]
    if seeker.saved_round is not None and is_recent_enough(seeker.saved_round, rounds, seeker.staleness_at_most):
        return FromCheckpoint(living)
    return FromReplicas(living)


def living_replicas(roster: Roster, stage: int, me: str) -> tuple[PeerRecord, ...]:
    """Return the other replicas of a stage that can give its state."""
    return tuple(record for record in roster.stage(stage) if record.peer != me and record.state in AT_WORK)
