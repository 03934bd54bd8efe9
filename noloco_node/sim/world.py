"""The world of a simulation: its peers, what happens to them and when, and its end.

All planned peers start together; faults come at their times. The run is over when every process has ended: by itself
when the token budget is used up, or because it was asked to once `duration_s` had passed. Whoever does not end within
`GRACE_S` of that waits for ever: `Stuck` says who, and where.

Observers hear every journal event and look at the world every `LOOK_S` or so; they may raise to end it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Protocol, TypeVar

from noloco_node import journal
from noloco_node.errors import trouble_of
from noloco_node.sim import clock, faults
from noloco_node.sim.device import Stutter
from noloco_node.sim.faults import Fault
from noloco_node.sim.network.hub import Hub, Tampering
from noloco_node.sim.network.lines import Access, Weather
from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.setting import Setting

T = TypeVar("T")

GRACE_S = 300.0
LOOK_S = 1.0


class Stuck(AssertionError):
    """Peers that should have ended wait for ever."""


class Watcher(Protocol):
    """Sees what happens, and may raise."""

    def hear(self, peer: SimulatedPeer, event: journal.Event) -> None:
        """Take note of an event of a peer's journal."""

    def struck(self, fault: Fault) -> None:
        """Take note of a fault, which has just happened."""

    def look(self) -> None:
        """Look at the world; called about once a second of virtual time."""


class World:
    """One simulation; make it inside a running virtual loop."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.hub = Hub(setting.weather, seed=setting.scenario.seed, size_bytes=setting.size_bytes)
        self.peers: dict[str, SimulatedPeer] = {}
        self.watchers: list[Watcher] = []
        self.ended_s = 0.0
        """When the last planned work was done; the time for which nodes serve their weights is not counted."""
        self._at_work: dict[str, asyncio.Task[None]] = {}
        self._ended: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        slowness = setting.scenario.devices.slowness
        devices = setting.scenario.devices
        for number, name in enumerate(setting.peers):
            stage, replica = divmod(number, setting.run.pipeline.replicas)
            peer = self._add(name, stage)
            peer.slowness = slowness[replica % len(slowness)]
            peer.stutter = Stutter(devices.stutter_share, devices.stutter_pause_s)
        self._make_unreachable(setting.scenario.network.dials_only)

    def __repr__(self) -> str:
        running = sum(peer.running for peer in self.peers.values())
        return f"World({running} of {len(self.peers)} peers running, {self.hub!r})"

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return asyncio.get_running_loop().time()

    @property
    def progress(self) -> float:
        """How far the run is, 0 to 1, as the replica that is furthest knows."""
        replicas = [peer.life.node.replica for peer in self.peers.values() if peer.lives and peer.life.node]
        return max((replica.progress.value for replica in replicas if replica is not None), default=0.0)

    def digest(self) -> str:
        """Return the SHA-256 over the weights, momenta and counters of all peers."""
        total = hashlib.sha256()
        for name in sorted(self.peers):
            if self.peers[name].lives:
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
        starts = [f.at_s for f in self.setting.scenario.fault if isinstance(f, faults.Join | faults.Restart)]
        last_start_s, duration_s = max(starts, default=-1.0), self.setting.scenario.swarm.duration_s
        while self._at_work or last_start_s >= self.now_s:
            if self.now_s >= duration_s:
                await self._send_home()
                return
            await self._news(duration_s)

    async def _send_home(self) -> None:
        """Ask everybody to leave, and see that they do."""
        for name in list(self._at_work):
            self.peers[name].ask_to_leave()
        limit_s = self.now_s + GRACE_S
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
            if not task.cancelled() and trouble_of(task.exception()) is None:
                task.result()

    def _begin(self, peer: SimulatedPeer) -> None:
        """Begin a life of a peer, and take note of its end."""
        peer.start()
        task = peer.life.task
        assert task is not None
        self._at_work[peer.name] = task
        task.add_done_callback(lambda task: self._over(peer, task))

    def _over(self, peer: SimulatedPeer, task: asyncio.Task[None]) -> None:
        if self._at_work.get(peer.name) is task:
            del self._at_work[peer.name]
            self._ended.append(task)
            self._changed.set()

    def waits(self) -> list[str]:
        """Say of every task where it waits."""
        return sorted(
            f"{task.get_name()}: {clock.waits_at(task)}"
            for task in asyncio.all_tasks()
            if task is not asyncio.current_task()
        )

    async def _look(self) -> None:
        rng = Random(f"{self.setting.scenario.seed}|looks")
        while True:
            # Not a beat: what happens in a rhythm of its own would be seen at the same point of it each time.
            await asyncio.sleep(LOOK_S * rng.uniform(0.5, 1.5))
            for watcher in self.watchers:
                watcher.look()

    def _hear(self, peer: SimulatedPeer, event: journal.Event) -> None:
        if isinstance(event, journal.InnerStep | journal.OuterStep):
            self.ended_s = self.now_s
        for watcher in self.watchers:
            watcher.hear(peer, event)

    def _add(self, name: str, stage: int | None) -> SimulatedPeer:
        peer = self.peers[name] = SimulatedPeer(name, stage, self.setting, self.hub, self._hear)
        return peer

    def _make_unreachable(self, share: float) -> None:
        """Let every so-manieth peer dial only: spread over the stages, the same ones each time."""
        names = list(self.peers)
        for number in range(int(share * len(names) + 0.5)):
            peer = self.peers[names[int(number / share) % len(names)]]
            peer.access = Access(
                up_bytes_per_s=peer.access.up_bytes_per_s,
                down_bytes_per_s=peer.access.down_bytes_per_s,
                dials_only=True,
            )

    # What happens.

    async def _strike(self) -> None:
        ordered = sorted(enumerate(self.setting.scenario.fault), key=lambda numbered: (numbered[1].at_s, numbered[0]))
        async with asyncio.TaskGroup() as lasting:
            for _, fault in ordered:
                await asyncio.sleep(max(0.0, fault.at_s - self.now_s))
                after = self._apply(fault)
                for watcher in self.watchers:
                    watcher.struck(fault)
                if after is not None:
                    lasting.create_task(_later(faults.ends_s(fault) - fault.at_s, after))

    def _apply(self, fault: Fault) -> Callable[[], None] | None:
        """Let a fault happen; return what ends it, if it ends by itself."""
        peer = self.peers.get(getattr(fault, "peer", ""))
        match fault:
            case faults.Join():
                self._begin(peer or self._add(fault.peer, fault.stage))
            case faults.Restart() if peer is not None and not peer.running:
                self._begin(peer)
            case faults.Crash() if peer is not None and peer.running:
                del self._at_work[peer.name]
                peer.crash()
                self._changed.set()
            case faults.Leave() if peer is not None and peer.running:
                peer.ask_to_leave()
            case faults.Slow() if peer is not None:
                peer.slow_down(fault.factor)
            case faults.Stutter() if peer is not None:
                peer.begin_stutter(Stutter(fault.share, fault.pause_s))
            case faults.Line() if peer is not None:
                peer.access = _access(fault)
                if peer.running:
                    self.hub.set_access(peer.name, peer.access)
            case faults.Tamper() if peer is not None and peer.running:
                self.hub.tamper(peer.name, Tampering(fault.how), fault.count)
            case faults.Silence():
                self.hub.silence(fault.peer)
                return lambda: self.hub.resume(fault.peer)
            case faults.Partition():
                self.hub.partition(fault.groups)
                return self.hub.heal
            case faults.Storm():
                self.hub.weather = _stormy(self.setting.weather, fault)
                return self._calm
            case faults.Disk() if peer is not None:
                peer.disk_refuses = True
                return lambda: setattr(peer, "disk_refuses", False)
            case _:
                pass  # a peer that is gone cannot crash again: random schedules ask for such things
        return None

    def _calm(self) -> None:
        self.hub.weather = self.setting.weather


async def _later(seconds: float, act: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    act()


def _access(fault: faults.Line) -> Access:
    return Access(
        up_bytes_per_s=fault.up_bytes_per_s or math.inf,
        down_bytes_per_s=fault.down_bytes_per_s or math.inf,
        dials_only=fault.dials_only,
    )


def _stormy(weather: Weather, storm: faults.Storm) -> Weather:
    return Weather(
        latency=weather.latency,
        loss=max(weather.loss, storm.loss),
        late=max(weather.late, storm.late),
        late_s=weather.late_s,
        duplicate=max(weather.duplicate, storm.duplicate),
        roster_lag_s=weather.roster_lag_s,
        silence_s=weather.silence_s,
        open_s=weather.open_s,
    )


def simulate(setting: Setting, watch: Callable[[World], Sequence[Watcher]], finish: Callable[[World], T]) -> T:
    """Run a setting to its end in virtual time, seen by the watchers that `watch` makes; return what `finish` says."""

    async def main() -> T:
        world = World(setting)
        world.watchers += watch(world)
        await world.run()
        return finish(world)

    return clock.run(main())
