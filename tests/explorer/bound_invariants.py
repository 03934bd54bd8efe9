"""Everything that grows stays within what windows, replicas and lifetimes allow: queues, conversations, memory, timers.

Each bound says how much there can be at once when all is well, in the worst conditions. Only those of calls and timers
have room to spare, and name it.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass

from noloco_node.node.replica import Replica
from noloco_node.run.protocols import MICROBATCH, topic
from noloco_node.sim.clock import MANY_TIMERS, VirtualLoop
from noloco_node.sim.network.sim_network import SimNetwork
from tests.explorer.observation import CheckerContext, sizes, slots
from tests.explorer.session_records import SessionRecord

SPARE_CALLS = 8
VERSIONS = 4
"""Of a record: the last two on each side of a partition. Readers that lag need those of their lag besides."""
TIMERS_A_CALL = 6
"""Beats, silence and a deadline at both ends, and what is in flight."""
TIMERS_A_PEER = 20
"""Deadlines and sleeps of a node's own tasks."""


@dataclass(slots=True, repr=False)
class BoundInvariants:
    """Checks at every look that nothing has grown too large."""

    context: CheckerContext

    def look(self) -> None:
        most_calls = self._most_calls()
        served = Counter(
            stage for _, stage in {(name, each.stage) for (name, _), each in self.context.sessions.items()}
        )
        for record, replica in self.context.training():
            self._check_gate(record, replica)
            self._check(f"{record.name}: open conversations", self._open_calls(record.name), most_calls)
            for what, stage, size in sizes(replica):
                # One entry at most for each that ever trained there.
                self._check(f"{record.name}: {what}", size, served[stage])
        self._check_network(len(self.context.world.peers) * most_calls)
        self._check_timers()

    def _check(self, what: str, size: int, limit: int) -> None:
        self.context.checked["bound"] += 1
        if size > limit:
            self.context.complain("bound", f"{what}: {size}, more than {limit}")

    def _check_gate(self, record: SessionRecord, replica: Replica) -> None:
        gate = replica.admission
        if gate.queued > gate.queue_limit or gate.in_flight + gate.succeeded > gate.windows * gate.window:
            self.context.complain("bound", f"{record.name} has let in too many: {slots(gate)}")
        if record.stage > 0:
            handled = _answered_count(self.context.world.network, record.name, record.stage) - replica.microbatches.idle
            self.context.checked["slot"] += 1
            if gate.in_flight + gate.queued > handled:
                sentence = f"{record.name} handles {handled} microbatches, and more slots and places are taken"
                self.context.complain("slot", f"{sentence}: {slots(gate)}")

    def _open_calls(self, name: str) -> int:
        """Return how many conversations a peer has open with peers that do not attack it."""
        network = self.context.world.network.peer(name)
        return 0 if network is None else sum(end.peer not in self.context.hostile for end in network.ends)

    def _most_calls(self) -> int:
        """Return how many conversations a peer may have open: a window with each neighbour, and its gossip."""
        replicas = max(Counter(record.stage for record in self.context.present.values()).values(), default=0)
        pipeline = self.context.world.setting.run.pipeline
        window = pipeline.microbatches_per_step * pipeline.windows_in_flight
        return 2 * replicas * window + 2 * replicas + SPARE_CALLS

    def _check_network(self, most_streams: int) -> None:
        network, setting = self.context.world.network, self.context.world.setting
        peers, scenario = len(self.context.world.peers), setting.scenario
        # A stream is there while it is open; one that was left in a cut is dropped when patience ends.
        self._check("messages and streams held back", len(network.held_outboxes), most_streams)
        # Under the key of each stage that a peer has served, as a source, and as one that signs receipts.
        places = peers * (setting.run.pipeline.stages + 2)
        versions = VERSIONS + math.ceil(2 * scenario.network.roster_lag_s / scenario.swarm.refresh_s)
        kept = int(network.dht.statistics()["records.kept"])
        self._check("versions of records kept in the network", kept, places * versions)

    def _check_timers(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        calls = sum(self.context.world.network.open_calls(name) for name in self.context.running)
        live = TIMERS_A_CALL * calls + TIMERS_A_PEER * len(self.context.world.peers)
        # Cancelled ones are thrown away when they are more than half, and many.
        self._check("timers of the loop", loop.timer_count, 2 * live + MANY_TIMERS)


def _answered_count(network: SimNetwork, name: str, stage: int) -> int:
    """Return on how many conversations a peer takes microbatches of others: one at a time, or none, on each."""
    peer, kind = network.peer(name), topic(MICROBATCH, stage)
    return 0 if peer is None else sum(end.topic == kind for end in peer.answering)
