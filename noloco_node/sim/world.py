"""The world of a simulation: its peers, what happens to them and when, and its end.

The run is over when every process has ended: by itself when the token budget is used up, or because the world asked it
to once `duration_s` had passed, or once nobody had taken an inner step for `patience_s` and no fault was left that
could change it. `Stuck` names peers that do not end within `patience_s` of that, and where they wait.

A fault does not happen where there is nothing for it to happen to (the crash of a peer that is gone), and watchers do
not hear of it. A peer that is restarted while it still leaves comes back when it has left.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import TypeVar

from gossip.interface import OuterStepTaken
from noloco_node.errors import user_error_of
from noloco_node.journal import events
from noloco_node.run.protocols import GOSSIP
from noloco_node.sim import clock
from noloco_node.sim.fault_injection import FaultInjector
from noloco_node.sim.hardware.priced_stage import Stutter
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.sim.peer import SimulatedPeer, Tampering
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.faults import Fault
from noloco_node.sim.scenario.scenario import unreachable
from noloco_node.sim.scenario.setup import SimSetup

T = TypeVar("T")

LOOK_S = 1.0


class Stuck(AssertionError):
    """Peers that should have ended wait for ever."""


class Watcher:
    """Sees what happens, and may raise; one that inherits it overrides what it cares for."""

    def hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        """Take note of an event of a peer's journal."""

    def struck(self, fault: Fault) -> None:
        """Take note of a fault that has just happened, or of a restart that will when its peer has left."""

    def look(self) -> None:
        """Look at the world; called about once a second of virtual time."""


class World:
    """One simulation; make it inside a running virtual loop."""

    def __init__(self, setting: SimSetup) -> None:
        self.setting = setting
        self.network = SimNetwork(
            setting.scenario.network, seed=setting.scenario.seed, size_bytes=setting.sizes.size_bytes
        )
        self.network.share_with_rounds(GOSSIP, setting.run.outer.line_share)
        self.peers: dict[str, SimulatedPeer] = {}
        self.watchers: list[Watcher] = []
        self.attacks: Mapping[str, Callable[[], Tampering]] = {}
        """The attacks of hostile peers, by the names that faults give them."""
        self.ended_s = 0.0
        """When the last planned work was done; the time for which nodes serve their weights is not counted."""
        self.standstill: str | None = None
        """Why nobody could take a step any more, where the world ended for that."""
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._returning: dict[str, None] = {}
        self._sent_home = False
        self._ended: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._fault_injector = FaultInjector(self.network, self.peers, setting.scenario.network)
        devices = setting.scenario.devices
        for number, name in enumerate(setting.peers):
            stage, replica = divmod(number, setting.run.pipeline.replicas)
            peer = self._add(name, None if setting.scenario.swarm.choose_stages else stage)
            peer.first_slowness = peer.slowness = devices.slowness[replica % len(devices.slowness)]
            peer.stutter = Stutter(devices.stutter_share, devices.stutter_pause_s)
        for name in unreachable(setting.peers, setting.scenario.network.dials_only):
            self.peers[name].access = replace(self.peers[name].access, dials_only=True)

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def progress(self) -> float:
        """How far the run is, 0 to 1, as the replica that is furthest knows."""
        replicas = (peer.replica for peer in self.peers.values())
        return max((replica.progress.value for replica in replicas if replica is not None), default=0.0)

    def digest(self) -> str:
        """Return the SHA-256 over the weights, momenta and counters of all peers."""
        total = hashlib.sha256()
        for name in sorted(self.peers):
            if self.peers[name].sessions:
                total.update(self.peers[name].weights_digest())
        return total.hexdigest()

    async def run(self) -> None:
        """Let everything happen; raise `Stuck`, what a node raised, or what a watcher raised."""
        for peer in list(self.peers.values()):
            self._begin(peer)
        async with asyncio.TaskGroup() as group:
            chores = [
                group.create_task(self._look(), name="watchers"),
                group.create_task(self._strike(), name="faults"),
            ]
            await self._work()
            for chore in chores:
                chore.cancel()

    async def _work(self) -> None:
        """Wait until every process has ended and no fault is left that starts one."""
        setting = self.setting
        duration_s, most_still_s = setting.scenario.swarm.duration_s, patience_s(setting)
        starts = [fault.at_s for fault in setting.faults if isinstance(fault, faults.Join | faults.Restart)]
        last_start_s = max(starts, default=-1.0)
        last_fault_s = max((faults.ends_s(fault) for fault in setting.faults), default=0.0)
        while self._at_work or self._returning or last_start_s >= self.now_s:
            hostile = [peer for name in self._at_work if (peer := self.peers[name]).tampering is not None]
            if hostile and len(hostile) == len(self._at_work) and not self._returning and last_start_s < self.now_s:
                for peer in hostile:  # what they do among themselves need not end
                    self._crash(peer)
                return
            still_s = max(self.ended_s, last_fault_s) + most_still_s
            if self.now_s >= min(duration_s, still_s):
                if still_s < duration_s:
                    self.standstill = standstill_sentence(self.peers, self.setting.run.pipeline.stages, self.ended_s)
                await self._send_home()
                return
            await self._news(min(duration_s, still_s))

    async def _send_home(self) -> None:
        """Ask everybody to leave, and see that they do; nobody comes any more."""
        self._sent_home = True
        self._returning.clear()
        for name in list(self._at_work):
            self.peers[name].ask_to_leave()
        limit_s = self.now_s + patience_s(self.setting)
        while self._at_work:
            if self.now_s >= limit_s:
                raise Stuck("asked to leave, and still there:\n  " + "\n  ".join(self.waits()))
            await self._news(limit_s)

    async def _news(self, limit_s: float) -> None:
        """Wait until a process has ended, for a moment where there is none, and until `limit_s` at most."""
        wait_s = limit_s - self.now_s if self._at_work else min(LOOK_S, limit_s - self.now_s)
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        ended, self._ended = self._ended, []
        for task in ended:
            # A node that ends with a message to its owner is a process that ended.
            if not task.cancelled() and user_error_of(task.exception()) is None:
                task.result()

    def _begin(self, peer: SimulatedPeer) -> None:
        peer.start()
        task = peer.session.task
        assert task is not None
        self._at_work[peer.name] = task
        task.add_done_callback(lambda task: self._over(peer, task))

    def _over(self, peer: SimulatedPeer, task: asyncio.Task[None]) -> None:
        if self._at_work.get(peer.name) is task:
            del self._at_work[peer.name]
            self._ended.append(task)
            self._changed.set()
            if not task.cancelled():
                # Otherwise the whole world is being put away, and nobody would end a new session.
                self._bring_back(peer)

    def waits(self) -> list[str]:
        return clock.waiting(asyncio.all_tasks() - {asyncio.current_task()})

    async def _look(self) -> None:
        rng = Random(f"{self.setting.scenario.seed}|looks")
        while True:
            # Not a beat: what happens in a rhythm of its own would be seen at the same point of it each time.
            await asyncio.sleep(LOOK_S * rng.uniform(0.5, 1.5))
            for watcher in self.watchers:
                watcher.look()

    def _hear(self, peer: SimulatedPeer, event: events.Event) -> None:
        if isinstance(event, events.InnerStep | OuterStepTaken):
            self.ended_s = self.now_s
        for watcher in self.watchers:
            watcher.hear(peer, event)

    def _add(self, name: str, stage: int | None) -> SimulatedPeer:
        peer = self.peers[name] = SimulatedPeer(name, stage, self.setting, self.network, self._hear)
        return peer

    # What happens.

    async def _strike(self) -> None:
        ordered = sorted(enumerate(self.setting.faults), key=lambda numbered: (numbered[1].at_s, numbered[0]))
        async with asyncio.TaskGroup() as lasting:
            for _, fault in ordered:
                await asyncio.sleep(max(0.0, fault.at_s - self.now_s))
                if not self._happens(fault):
                    continue
                for watcher in self.watchers:
                    watcher.struck(fault)
                if isinstance(fault, faults.LASTING):
                    lasting.create_task(self._end_later(fault))

    async def _end_later(self, fault: Fault) -> None:
        await asyncio.sleep(max(0.0, faults.ends_s(fault) - self.now_s))
        self._fault_injector.end(fault)

    def _happens(self, fault: Fault) -> bool:
        """Let a fault happen; return whether it did: a peer that is gone cannot crash again."""
        peer = self.peers.get(getattr(fault, "peer", ""))
        match fault:
            case faults.Join() | faults.Restart() if self._sent_home:
                return False
            case faults.Join() if peer is None or not peer.running:
                self._begin(peer or self._add(fault.peer, fault.stage))
            case faults.Restart() if peer is not None and not peer.running:
                self._begin(peer)
            case faults.Restart() if peer is not None and peer.leaving:
                self._returning[peer.name] = None
            case faults.Crash() if peer is not None and peer.running:
                self._crash(peer)
            case faults.Hostile() if peer is not None:
                peer.tampering = self.attacks[fault.how]()
                if peer.running:
                    self._returning[peer.name] = None
                    self._crash(peer)
            case faults.Leave() if peer is not None and peer.running and not peer.leaving:
                peer.ask_to_leave()
            case faults.Join() | faults.Restart() | faults.Crash() | faults.Leave():
                return False
            case _:
                return self._fault_injector.begin(fault)
        return True

    def _crash(self, peer: SimulatedPeer) -> None:
        del self._at_work[peer.name]
        peer.crash()
        self._changed.set()
        # Not before watchers have heard of the crash of the session that is over.
        asyncio.get_running_loop().call_soon(self._bring_back, peer)

    def _bring_back(self, peer: SimulatedPeer) -> None:
        """Begin the session of a peer that was to be restarted as soon as it had left."""
        if peer.name in self._returning and not peer.running:
            del self._returning[peer.name]
            self._begin(peer)


def simulate(setting: SimSetup, watch: Callable[[World], Sequence[Watcher]], finish: Callable[[World], T]) -> T:
    """Run a setting to its end in virtual time, seen by the watchers that `watch` makes; return what `finish` says."""

    async def main() -> T:
        world = World(setting)
        world.watchers += watch(world)
        await world.run()
        return finish(world)

    return clock.run(main())


LEAST_S = 1800.0
REFRESHES = 20
TIMES = 20
"""As long as the slowest window and copy of the weights."""
TRIPS = 4
"""Latencies of a call at most: its stream is opened, it goes there and back."""
MOST_NAMES = 20


def patience_s(setting: SimSetup) -> float:
    """Return after how many virtual seconds without an inner step nobody will ever take one."""
    scenario, pipeline = setting.scenario, setting.run.pipeline
    devices, line = scenario.devices, setting.access
    slowness, pause_s = max(devices.slowness), devices.stutter_pause_s
    slowest, slowest_pause_s, is_late = 1.0, 0.0, scenario.network.late > 0.0
    bytes_per_s = min(line.up_bytes_per_s, line.down_bytes_per_s)
    for fault in setting.faults:
        match fault:
            case faults.Slow():
                slowest = max(slowest, fault.factor)
            case faults.StutterFault():
                slowest_pause_s = max(slowest_pause_s, fault.pause_s)
            case faults.Storm():
                is_late |= fault.late > 0.0
            case faults.LinkFault():
                rates = [rate for rate in (fault.up_bytes_per_s, fault.down_bytes_per_s) if rate is not None]
                bytes_per_s = min([bytes_per_s, *rates])
    work_s = max(prices.passes_s + prices.step_s for prices in setting.prices) * slowness * slowest
    pass_s = work_s + 2 * max(pause_s, slowest_pause_s)
    late_s = scenario.network.late_s if is_late else 0.0
    there_and_back = setting.sizes.microbatch_bytes + setting.sizes.gradient_bytes
    # All replicas of a stage may send to the same one.
    way_s = there_and_back * pipeline.replicas / bytes_per_s + TRIPS * (scenario.network.latency.mean_s + late_s)
    window_s = pipeline.microbatches_per_step * pipeline.stages * (pass_s + way_s)
    copy_s = setting.sizes.largest_state_bytes / bytes_per_s
    return max(LEAST_S, REFRESHES * scenario.swarm.refresh_s, TIMES * (window_s + copy_s))


def standstill_sentence(peers: Mapping[str, SimulatedPeer], stages: int, since_s: float) -> str:
    """Say who waits for ever, and for what; `since_s` is the virtual time of the last inner step."""
    waiting = [peer.name for peer in peers.values() if peer.running]
    served = {peer.stage for peer in peers.values() if peer.running and peer.replica}
    bare = [str(stage) for stage in range(stages) if stage not in served]
    text = f"Nobody took an inner step after {since_s:,.0f} s, and no fault was left that could have changed it"
    if bare:
        text += f": nobody serves stage{'s' * (len(bare) > 1)} {', '.join(bare)}"
    names = ", ".join(waiting[:MOST_NAMES])
    more = len(waiting) - MOST_NAMES
    return f"{text}. {names}{f' and {more} more' if more > 0 else ''} waited for ever."
