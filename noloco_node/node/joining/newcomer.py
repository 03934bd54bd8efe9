"""What a joining peer knows."""

from __future__ import annotations

from dataclasses import dataclass

from noloco_node import __version__
from noloco_node.machine.interface import Dimensions, Host, Reporter
from noloco_node.network.interface import PeerNetwork
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.state_sync.starting_state import NONE_FAILED, FailedSnapshots
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import PeerRecord
from noloco_node.swarm.run_distribution import RunFileText


@dataclass(frozen=True, kw_only=True, slots=True)
class Newcomer:
    """A peer that is about to take part, or to move.

    `requested_stage`: the one that its owner asked for, or to which it moves; then `device_s` is what a microbatch will
    take it there, as far as it knows. `slowest_bytes_per_s`: a donor whose line is slower is given up. `deadlines`:
    False waits for a copy without end. `reached`, `begin_anew`, `bootstrap_peers`: as in `NodeOptions`. `failed`:
    snapshots of the requested stage that were worth nothing.
    """

    run_file: RunFileText
    dimensions: Dimensions
    network: PeerNetwork
    membership: Membership
    host: Host
    reporter: Reporter
    requested_stage: int | None = None
    device_s: float = 0.0
    slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S
    deadlines: bool = True
    reached: float = 0.0
    begin_anew: bool = False
    bootstrap_peers: tuple[str, ...] = ()
    failed: FailedSnapshots = NONE_FAILED

    @property
    def me(self) -> str:
        """Our peer id."""
        return self.network.peer_id

    @property
    def run(self) -> RunConfig:
        """What all peers of the run have agreed on."""
        return self.run_file.run

    def claim_record(
        self, stage: int, state: PeerState, device_s: float, may_serve: tuple[int, ...] = ()
    ) -> PeerRecord:
        """Return the record that claims a stage from now on."""
        return PeerRecord(
            peer=self.me,
            stage=stage,
            state=state,
            claimed_at=self.host.unix_time(),
            device_s=device_s,
            may_serve=may_serve,
            version=__version__,
        )
