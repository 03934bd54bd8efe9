"""The context that a node has from its start to its end, whatever stage it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from noloco_node import __version__
from noloco_node.machine.interface import Dimensions, Host, Reporter
from noloco_node.network.interface import PeerNetwork
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S
from noloco_node.run.config import RunConfig
from noloco_node.run.peer_state import PeerState
from noloco_node.state_sync.starting_state import NONE_FAILED, FailedSnapshots
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Given, PeerRecord
from noloco_node.swarm.run_distribution import RunFileText


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """The choices of this peer's owner.

    `stage`: to serve and never to leave. `moves`: the node goes to another stage that needs it more. `keep_snapshots`:
    rounds between two stage snapshots; 0 keeps none. `deadlines`: False waits for ever on exchanges, which
    only tests want. `slowest_bytes_per_s`: we give up a peer with a slower line. `reached`: the last known progress of
    the run, 0 if unknown. `begin_anew`: begin with the run's first weights even so. `name`: shown beside our id.
    `bootstrap_peers`: we ask these for the weights that the run starts from. `given`: this peer's totals for the run,
    from its journal.
    """

    stage: int | None = None
    moves: bool = False
    linger_s: float = 600.0
    refresh_s: float = 10.0
    save_every_s: float = 300.0
    keep_snapshots: int = 0
    deadlines: bool = True
    slowest_bytes_per_s: float = SLOWEST_BYTES_PER_S
    reached: float = 0.0
    begin_anew: bool = False
    name: str = ""
    bootstrap_peers: tuple[str, ...] = ()
    given: Callable[[], Given | None] = lambda: None


class StageRequest(NamedTuple):
    """The stage to join: named by the owner or by a move, or None to choose one.

    `device_s`: expected device seconds of a microbatch at the stage of a move. `failed`: snapshots of the stage that
    proved worthless.
    """

    stage: int | None = None
    device_s: float = 0.0
    failed: FailedSnapshots = NONE_FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeContext:
    """The run, the network, the roster and the machine, as every part of a node uses them."""

    run_file: RunFileText
    dimensions: Dimensions
    network: PeerNetwork
    membership: Membership
    host: Host
    reporter: Reporter
    options: NodeOptions = NodeOptions()

    @property
    def me(self) -> str:
        return self.network.peer_id

    @property
    def run(self) -> RunConfig:
        return self.run_file.run

    @property
    def keeps_snapshots(self) -> bool:
        return self.options.keep_snapshots > 0

    def claim_record(
        self, stage: int, state: PeerState, device_s: float, may_serve: tuple[int, ...] = ()
    ) -> PeerRecord:
        return PeerRecord(
            peer=self.me,
            stage=stage,
            state=state,
            claimed_at=self.host.unix_time(),
            device_s=device_s,
            may_serve=may_serve,
            version=__version__,
        )
