"""One simulated peer: a production node, the machine under it, and what survives when it dies.

A peer lives several lives. The name, the line and the disk stay; network, device, stage and node are new each time. A
crash is what the node cannot see coming: its network is gone, its disk takes nothing more, its tasks are cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Protocol

import torch

from noloco_node.journal import events
from noloco_node.machine.interface import Reporter, Text
from noloco_node.network.interface import PeerNetwork
from noloco_node.node.node import Node
from noloco_node.node.node_context import NodeOptions
from noloco_node.sim.attacks import Attack, HostileNetwork
from noloco_node.sim.hardware.device import Stutter, VirtualDevice
from noloco_node.sim.hardware.memory_host import MemoryHost
from noloco_node.sim.hardware.memory_store import MemoryStore
from noloco_node.sim.hardware.priced_stage import PricedStage
from noloco_node.sim.hardware.quadratic_model import VOCABULARY, RandomBatches
from noloco_node.sim.network.hub import SimNetwork
from noloco_node.sim.network.link_model import Access
from noloco_node.sim.scenario.setup import SimSetup
from noloco_node.storage.checkpoint import Checkpoint

KEPT_LINES = 50
"""Of what a node said, in a life."""


class Observer(Protocol):
    """Hears everything that peers do, in order."""

    def __call__(self, peer: SimulatedPeer, event: events.Event) -> None:
        """Take note of an event of a peer's journal."""


class PeerLife:
    """One run of a peer's process. `wrong`: promises that its stage saw broken. `crashed`: it was not asked."""

    def __init__(self, number: int) -> None:
        self.number, self.crashed = number, False
        self.leave = asyncio.Event()
        self.wrong: list[str] = []
        self.said: list[str] = []
        self.stage: PricedStage | None = None
        self.node: Node | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self.task is not None and not self.task.done() and not self.crashed

    def forget(self) -> None:
        """Let go of all that an earlier life held but its words, once nobody asks for its weights and counters."""
        self.node = self.stage = self.task = None


class SimulatedPeer:
    """A peer of a world. `asked_stage`: the one that its owner wants; None lets it choose.

    `attack`: what it does instead of what it should.
    """

    def __init__(
        self, name: str, asked_stage: int | None, setting: SimSetup, hub: SimNetwork, observe: Observer
    ) -> None:
        self.name, self.asked_stage = name, asked_stage
        self.access: Access = setting.access()
        self.first_slowness = self.slowness = 1.0
        self.stutter = Stutter()
        self.attack: Attack | None = None
        self.disk: Checkpoint | None = None
        self.shelf = MemoryStore(lambda: self.disk)
        self.disk_refuses = False
        self.lives: list[PeerLife] = []
        self.devices: list[VirtualDevice] = []
        self._setting, self._hub, self._observe = setting, hub, observe

    @property
    def life(self) -> PeerLife:
        """The present life, or the last."""
        return self.lives[-1]

    @property
    def running(self) -> bool:
        """Whether the peer's process is there."""
        return bool(self.lives) and self.life.running

    @property
    def leaving(self) -> bool:
        """Whether the process is there, and was asked to leave."""
        return self.running and self.life.leave.is_set()

    @property
    def device(self) -> VirtualDevice:
        """The device of the last life."""
        return self.devices[-1]

    @property
    def stage(self) -> int | None:
        """The stage that the peer serves, or served last; None before it has one."""
        node = self.life.node if self.lives else None
        if node is not None and node.replica is not None:
            return node.replica.config.stage
        return self.disk.counters.stage if self.disk is not None else self.asked_stage

    def start(self) -> None:
        """Begin a life; the node goes on from the peer's disk."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        setting, swarm = self._setting, self._setting.scenario.swarm
        life = PeerLife(len(self.lives))
        device = VirtualDevice(seed=f"{setting.run.seed}|{self.name}|{life.number}")
        device.slow_down(self.slowness)
        device.stutter(self.stutter)
        self.lives.append(life)
        self.devices.append(device)
        network: PeerNetwork = self._hub.network(self.name, self.access)
        if self.attack is not None:
            network = HostileNetwork(network, self.attack)
        node = life.node = Node(
            setting.recipe,
            setting.dimensions,
            network,
            self._host(life, device),
            NodeOptions(
                stage=self.asked_stage,
                linger_s=3 * swarm.refresh_s,
                refresh_s=swarm.refresh_s,
                moves=swarm.moves,
                save_every_s=swarm.save_every_s,
                deadlines=swarm.impatient,
                slowest_bytes_per_s=setting.slowest_bytes_per_s,
            ),
            Reporter(record=self._recorder(life), say=self._speaker(life)),
        )
        life.task = asyncio.create_task(node.live(life.leave), name=f"{self.name} life {life.number}")
        life.task.add_done_callback(lambda _: self._over(life))

    def crash(self) -> None:
        """Let the process die, with nobody asked and nothing saved."""
        life = self.life
        life.crashed = True
        self._hub.kill(self.name)
        if life.task is not None:
            life.task.cancel()

    def ask_to_leave(self) -> None:
        """Ask the node to leave politely."""
        self.life.leave.set()

    def slow_down(self, factor: float) -> None:
        """Let the device take `factor` times as long as at first, in later lives too."""
        self.slowness = self.first_slowness * factor
        self.device.slow_down(self.slowness)

    def begin_stutter(self, stutter: Stutter) -> None:
        """Let the device stutter, in later lives too."""
        self.stutter = stutter
        self.device.stutter(stutter)

    def weights_digest(self) -> bytes:
        """Return the SHA-256 of slow weights, momentum, fast weights and counters of the last life."""
        total = hashlib.sha256(self.name.encode())
        node, stage = self.life.node, self.life.stage
        if node is not None and node.replica is not None and stage is not None:
            state = node.replica.rounds.state
            for tensor in (*state.slow, *state.momentum, *stage.weights()):
                total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            total.update(f"{node.replica.rounds.finished} {node.replica.inner_steps}".encode())
        return total.digest()

    def _host(self, life: PeerLife, device: VirtualDevice) -> MemoryHost:
        def build(number: int) -> PricedStage:
            setting = self._setting
            windows = setting.run.pipeline.windows_in_flight
            stage = setting.build(number)
            if self.attack is not None and self.attack.stage is not None:
                stage = self.attack.stage(stage)
            life.stage = PricedStage(stage, setting.prices[number], device.charge, life.wrong.append, windows)
            return life.stage

        async def save(checkpoint: Checkpoint) -> str:
            if self.disk_refuses or life.crashed:
                raise OSError("No space left on device")
            self.disk = checkpoint
            return "the simulated disk"

        return MemoryHost(device, self.shelf, build=build, open_text=self._open_text, save=save)

    async def _open_text(self) -> Text:
        run = self._setting.run
        if self._setting.scenario.swarm.model == "transformer":
            from noloco_node.sim.hardware.block_text import BlockText

            return BlockText(run, self.name, self._setting.dimensions.vocabulary)
        shape = (run.pipeline.microbatch_size, run.pipeline.sequence_length)
        digest = hashlib.sha256(f"{run.seed}|{self.name}".encode()).digest()
        return RandomBatches(shape, int.from_bytes(digest[:3], "big") % VOCABULARY)

    def _recorder(self, life: PeerLife) -> Callable[[events.Event], None]:
        def record(event: events.Event) -> None:
            if not life.crashed:
                self._observe(self, event)

        return record

    def _speaker(self, life: PeerLife) -> Callable[[str], None]:
        def say(line: str) -> None:
            if len(life.said) < KEPT_LINES:
                life.said.append(line)

        return say

    def _over(self, life: PeerLife) -> None:
        """Take a process that ended by itself out of the network."""
        if not life.crashed:
            self._hub.kill(self.name)
