"""What a node has from its start to its end, whatever stage it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from noloco_node.machine.interface import Dimensions, Host, Reporter
from noloco_node.network.interface import PeerNetwork
from noloco_node.node.health import HealthMonitor
from noloco_node.node.joining.newcomer import Newcomer
from noloco_node.node.training import StageWork
from noloco_node.planning.bandwidth import SLOWEST_BYTES_PER_S
from noloco_node.state_sync.starting_state import NONE_FAILED, FailedSnapshots
from noloco_node.storage.checkpoint_store import CheckpointWriter
from noloco_node.swarm.membership import Membership
from noloco_node.swarm.roster import Given
from noloco_node.swarm.run_distribution import RunFileText


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """What the owner of this peer asked for. `deadlines`: False waits for ever on exchanges, which only tests want.

    `slowest_bytes_per_s`: of a line that weights may travel on; deadlines follow from it. `moves`: goes to another
    stage when it is needed there. `keep_snapshots`: rounds between two snapshots of another stage; 0 keeps none.
    `reached`: progress at which the run was last seen, 0 if nobody knows; `begin_anew`: from its first weights even so.
    `name`: that others show beside our id. `bootstrap_peers`: who may have the weights that the run starts from.
    `given`: what this peer has given to the run in all its lives, as its journal has it.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeContext:
    """The parts of a node that outlive its time at one stage. `shut_out`: a peer, for so many seconds."""

    run_file: RunFileText
    dimensions: Dimensions
    network: PeerNetwork
    host: Host
    options: NodeOptions
    reporter: Reporter
    membership: Membership
    work: StageWork
    writer: CheckpointWriter
    health: HealthMonitor
    shut_out: Callable[[str, float], None]

    @property
    def me(self) -> str:
        """Our peer id."""
        return self.network.peer_id

    @property
    def keeps_snapshots(self) -> bool:
        """Whether snapshots of other stages are kept here."""
        return self.host.snapshots is not None and self.options.keep_snapshots > 0

    def newcomer(self, stage: int | None, device_s: float = 0.0, failed: FailedSnapshots = NONE_FAILED) -> Newcomer:
        """Return ourselves as who is about to join, at `stage` if that is given. `failed`: as in `Newcomer`."""
        return Newcomer(
            run_file=self.run_file,
            dimensions=self.dimensions,
            network=self.network,
            membership=self.membership,
            host=self.host,
            reporter=self.reporter,
            requested_stage=stage,
            device_s=device_s,
            slowest_bytes_per_s=self.options.slowest_bytes_per_s,
            deadlines=self.options.deadlines,
            reached=self.options.reached,
            begin_anew=self.options.begin_anew,
            bootstrap_peers=self.options.bootstrap_peers,
            failed=failed,
        )
