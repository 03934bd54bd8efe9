"""Production nodes over real libp2p daemons in one process: real time and lines, the rest of each machine in memory.

One process, for the start of several takes longer on a busy machine than all the rest; but a daemon for each peer.

What a device measures are the prices of its work, not the time that passed: nodes compare their speeds, and so the
comparison comes out the same however often a busy machine interrupts them. `Device(slowdown=...)` would multiply each
interruption: a thousand times ten milliseconds are ten seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing

import torch

from noloco_node.libp2p.network import Libp2pNetwork
from noloco_node.libp2p.settings import NetworkSettings
from noloco_node.machine.device import Device, WallClock
from noloco_node.machine.interface import Reporter, StageModel
from noloco_node.node.node import Node
from noloco_node.node.node_context import NodeOptions
from noloco_node.sim.hardware.memory_host import MemoryHost, MemoryStore
from noloco_node.sim.hardware.priced_stage import PricedStage, Prices
from noloco_node.sim.hardware.quadratic_model import RandomBatches
from noloco_node.sim.scenario.setup import SimSetup
from noloco_node.storage.checkpoint import Checkpoint

LOCAL = "/ip4/127.0.0.1/tcp/0"


class Paid:
    """The clock of a device's thread: it moves by what work costs, and the thread really waits for that long."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def charge(self, seconds: float) -> None:
        time.sleep(seconds)
        self._now_s += seconds

    def wall(self) -> WallClock:
        return WallClock(clock=lambda: self._now_s, core=lambda: self._now_s)


class RealNodes:
    """The nodes of one swarm; the first is where the others enter. Daemons end with the block.

    `wrong`: promises that a stage saw broken, in words.
    """

    def __init__(self, setting: SimSetup) -> None:
        self._setting = setting
        self.bootstrap: tuple[str, ...] = ()
        self._open = AsyncExitStack()
        self.tasks: list[asyncio.Task[None]] = []
        self.peers: list[str] = []
        self.wrong: list[str] = []

    async def __aenter__(self) -> RealNodes:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await self._open.aclose()

    async def start(
        self,
        wishes: NodeOptions,
        reporter: Reporter,
        leave: asyncio.Event,
        *,
        forward_s: float,
    ) -> asyncio.Task[None]:
        """Start a daemon, and a node that lives until it is asked to leave. `forward_s`: of a forward pass."""
        setting = self._setting
        settings = NetworkSettings(run=setting.recipe.digest, listen=(LOCAL,), bootstrap=self.bootstrap)
        network = await self._open.enter_async_context(Libp2pNetwork.open(settings, print))
        self.bootstrap = self.bootstrap or await network.addresses()
        paid = Paid()
        device = self._open.enter_context(closing(Device(torch.device("cpu"), wall=paid.wall())))

        def build(stage: int) -> StageModel:
            windows = setting.run.pipeline.windows_in_flight
            return PricedStage(setting.build(stage), Prices(forward_s), paid.charge, self.wrong.append, windows)

        host = _in_memory(device, build, len(self.tasks))
        node = Node(setting.recipe, setting.dimensions, network, host, wishes, reporter)
        task = asyncio.create_task(node.live(leave))
        self.tasks.append(task)
        self.peers.append(network.peer_id)
        return task


class _Host(MemoryHost):
    def unix_time(self) -> float:
        return time.time()


def _in_memory(device: Device, build: Callable[[int], StageModel], number: int) -> MemoryHost:
    saved: list[Checkpoint] = []
    shelf = MemoryStore(lambda: saved[-1] if saved else None)

    async def open_text() -> RandomBatches:
        return RandomBatches((1, 1), 1000 * number)

    async def save_it(checkpoint: Checkpoint) -> str:
        saved.append(checkpoint)
        return "memory"

    return _Host(device, shelf, build=build, open_text=open_text, save=save_it)
