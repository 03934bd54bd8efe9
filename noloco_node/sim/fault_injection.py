"""What faults do to the peers of a world: to their lines, the network's conditions, partitions, devices and disks.

Faults that last may overlap: what several ask for holds until the last of them ends, and conditions are as bad as in
the worst storm. A second partition takes the place of the first, for their groups have no union.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import structs

from noloco_node.sim.hardware.priced_stage import Stutter
from noloco_node.sim.network.link_model import Access, NetworkConditions
from noloco_node.sim.network.medium import Corruption
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault


class FaultInjector:
    """The faults of one world. `conditions`: of its network when no storm lasts."""

    def __init__(self, network: SimNetwork, peers: Mapping[str, SimulatedPeer], conditions: NetworkConditions) -> None:
        self._network, self._peers, self._conditions = network, peers, conditions
        self._lasting: list[Fault] = []

    def begin(self, fault: Fault) -> bool:
        """Let a fault happen; return False where there is nothing for it to happen to."""
        peer = self._peers.get(getattr(fault, "peer", ""))
        match fault:
            case faults.Slow() if peer is not None:
                peer.slow_down(fault.factor)
            case faults.StutterFault() if peer is not None:
                peer.begin_stutter(Stutter(fault.share, fault.pause_s))
            case faults.LinkFault() if peer is not None:
                peer.access = _access(fault)
                if peer.running:
                    self._network.set_access(peer.name, peer.access)
            case faults.Tamper() if peer is not None and peer.running:
                self._network.corrupt(peer.name, Corruption(fault.how), fault.count)
            case faults.Silence():
                self._network.silence(fault.peer)
            case faults.Partition():
                self._lasting = [other for other in self._lasting if not isinstance(other, faults.Partition)]
                self._network.partition(fault.groups)
            case faults.Storm():
                self._network.conditions = self._stormy((*self._storms(), fault))
            case faults.Disk() if peer is not None:
                peer.disk_refuses = True
            case _:
                return False  # random schedules ask for such things, of peers that are gone
        if isinstance(fault, faults.LASTING):
            self._lasting.append(fault)
        return True

    def end(self, fault: Fault) -> None:
        """Let a fault that lasts end; what another asks for as well goes on."""
        if fault not in self._lasting:
            return  # another partition has taken its place
        self._lasting.remove(fault)
        match fault:
            case faults.Silence() if not self._lasts(faults.Silence, fault.peer):
                self._network.resume(fault.peer)
            case faults.Partition():
                self._network.heal()
            case faults.Storm():
                self._network.conditions = self._stormy(self._storms())
            case faults.Disk() if fault.peer in self._peers and not self._lasts(faults.Disk, fault.peer):
                self._peers[fault.peer].disk_refuses = False
            case _:
                pass

    def _lasts(self, kind: type[faults.Silence | faults.Disk], peer: str) -> bool:
        return any(isinstance(fault, kind) and fault.peer == peer for fault in self._lasting)

    def _storms(self) -> tuple[faults.Storm, ...]:
        return tuple(fault for fault in self._lasting if isinstance(fault, faults.Storm))

    def _stormy(self, storms: tuple[faults.Storm, ...]) -> NetworkConditions:
        """Return the conditions with all these storms: of each share the worst."""
        shares = ("loss", "late", "duplicate")
        worst = {name: max(getattr(each, name) for each in (self._conditions, *storms)) for name in shares}
        return structs.replace(self._conditions, **worst)


def _access(fault: faults.LinkFault) -> Access:
    return Access(
        up_bytes_per_s=fault.up_bytes_per_s or math.inf,
        down_bytes_per_s=fault.down_bytes_per_s or math.inf,
        dials_only=fault.dials_only,
    )
