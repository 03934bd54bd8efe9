"""One simulated peer: a production node, the machine under it, and what survives when it dies.

Name, line and disk stay from session to session; network, device, stage and node are new. In a crash the network is
gone, the disk takes nothing more, and the tasks are cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from noloco_node.data.held_out_text import EvaluationText
from noloco_node.journal import events
from noloco_node.machine.interface import Reporter, StageModel, Text
from noloco_node.network.interface import PeerNetwork
from noloco_node.node.node import Node
from noloco_node.node.node_context import NodeOptions
from noloco_node.node.replica import Replica
from noloco_node.sim.hardware.memory_host import BlockText, MemoryEvaluation, MemoryHost, MemoryStore
from noloco_node.sim.hardware.priced_stage import PricedStage, Stutter, VirtualDevice
from noloco_node.sim.hardware.quadratic_model import VOCABULARY, RandomBatches, held_out_numbers
from noloco_node.sim.network.medium import Corruption
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.sim.scenario.setup import SimSetup
from noloco_node.storage.checkpoint import Checkpoint

KEPT_LINES = 50
"""Of what a node said, in a session."""
FOREVER = 100_000
"""Messages of a hostile peer that arrive wrong: more than it sends."""


class PeerSession:
    """One run of a peer's process. `wrong`: promises that its stage saw broken. `crashed`: it was not asked."""

    def __init__(self, number: int, device: VirtualDevice) -> None:
        self.number, self.device, self.crashed = number, device, False
        self.leave = asyncio.Event()
        self.wrong: list[str] = []
        self.said: list[str] = []
        self.stage: PricedStage | None = None
        self.node: Node | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done() and not self.crashed

    @property
    def replica(self) -> Replica | None:
        """The replica of this session; None before it has joined, and after `forget`."""
        return None if self.node is None else self.node.replica

    def say(self, line: str) -> None:
        if len(self.said) < KEPT_LINES:
            self.said.append(line)

    def forget(self) -> None:
        """Let go of all that an earlier session held but its words, once nobody asks for its weights and counters."""
        self.node = self.stage = self.task = None


class Tampering(Protocol):
    """Which parts of a node a hostile peer replaces; tests hand them in (`tests/explorer/attacks.py`)."""

    @property
    def corruption(self) -> Corruption | None:
        """How its messages with tensors are spoilt."""
        ...

    def network(self, network: PeerNetwork, /) -> PeerNetwork:
        """Return the network that its node gets."""
        ...

    def stage(self, stage: StageModel, /) -> StageModel:
        """Return the stage that its node computes with."""
        ...


class SimulatedPeer:
    """A peer of a world. `asked_stage`: the one that its owner wants; None lets it choose.

    `tampering`: what it does instead of what it should.
    """

    def __init__(
        self,
        name: str,
        asked_stage: int | None,
        setting: SimSetup,
        network: SimNetwork,
        observe: Callable[[SimulatedPeer, events.Event], None],
    ) -> None:
        """`observe`: takes note of each event of the peer's journal, in order."""
        self.name, self.asked_stage = name, asked_stage
        self.access = setting.access
        self.first_slowness = self.slowness = 1.0
        self.stutter = Stutter()
        self.tampering: Tampering | None = None
        self.disk: Checkpoint | None = None
        self.archive = MemoryStore(lambda: self.disk)
        self.disk_refuses = False
        self.sessions: list[PeerSession] = []
        self._setting, self._network, self._observe = setting, network, observe

    @property
    def session(self) -> PeerSession:
        return self.sessions[-1]

    @property
    def running(self) -> bool:
        return bool(self.sessions) and self.session.running

    @property
    def leaving(self) -> bool:
        return self.running and self.session.leave.is_set()

    @property
    def replica(self) -> Replica | None:
        """The replica of the present session, or of the last."""
        return self.session.replica if self.sessions else None

    @property
    def device(self) -> VirtualDevice:
        return self.session.device

    @property
    def stage(self) -> int | None:
        if self.replica is not None:
            return self.replica.stage
        return self.disk.counters.stage if self.disk is not None else self.asked_stage

    def start(self) -> None:
        """Begin a session; the node goes on from the peer's disk."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        setting, swarm = self._setting, self._setting.scenario.swarm
        number = len(self.sessions)
        device = VirtualDevice(seed=f"{setting.run.seed}|{self.name}|{number}")
        device.slowness, device.stutter = self.slowness, self.stutter
        session = PeerSession(number, device)
        self.sessions.append(session)
        network: PeerNetwork = self._network.network(self.name, self.access)
        if self.tampering is not None:
            network = self.tampering.network(network)
            if self.tampering.corruption is not None and not self._network.is_corrupting(self.name):
                self._network.corrupt(self.name, self.tampering.corruption, FOREVER)
        node = session.node = Node(
            setting.recipe,
            setting.dimensions,
            network,
            self._host(session),
            NodeOptions(
                stage=self.asked_stage,
                linger_s=3 * swarm.refresh_s,
                refresh_s=swarm.refresh_s,
                moves=swarm.moves,
                save_every_s=swarm.save_every_s,
                deadlines=swarm.impatient,
                slowest_bytes_per_s=setting.slowest_bytes_per_s,
            ),
            Reporter(record=self._recorder(session), say=session.say),
        )
        session.task = asyncio.create_task(node.live(session.leave), name=f"{self.name} session {session.number}")
        session.task.add_done_callback(lambda _: self._over(session))

    def crash(self) -> None:
        """Let the process die, with nobody asked and nothing saved."""
        session = self.session
        session.crashed = True
        self._network.kill(self.name)
        if session.task is not None:
            session.task.cancel()

    def ask_to_leave(self) -> None:
        self.session.leave.set()

    def slow_down(self, factor: float) -> None:
        """Let the device take `factor` times as long as at first, in later sessions too."""
        self.slowness = self.device.slowness = self.first_slowness * factor

    def begin_stutter(self, stutter: Stutter) -> None:
        """Let the device stutter, in later sessions too."""
        self.stutter = self.device.stutter = stutter

    def weights_digest(self) -> bytes:
        """Return the SHA-256 of slow weights, momentum, fast weights and counters of the last session."""
        total = hashlib.sha256(self.name.encode())
        replica, stage = self.replica, self.session.stage
        if replica is not None and stage is not None:
            state = replica.rounds.state
            for tensor in (*state.slow, *state.momentum, *stage.weights()):
                total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            total.update(f"{replica.rounds.finished} {replica.inner_steps}".encode())
        return total.digest()

    def _host(self, session: PeerSession) -> MemoryHost:
        def build(number: int) -> PricedStage:
            setting = self._setting
            windows = setting.run.pipeline.windows_in_flight
            honest = setting.build(number)
            stage = honest if self.tampering is None else self.tampering.stage(honest)
            session.stage = PricedStage(
                stage, setting.prices[number], session.device.charge, session.wrong.append, windows
            )
            return session.stage

        async def save(checkpoint: Checkpoint) -> str:
            if self.disk_refuses or session.crashed:
                raise OSError("No space left on device")
            self.disk = checkpoint
            return "the simulated disk"

        host = MemoryHost(
            session.device,
            self.archive,
            build=build,
            open_text=self._open_text,
            save=save,
            line_s=self._setting.line_s,
        )
        run = self._setting.run
        host.passes = [prices.passes(run.pipeline.in_flight(n)) for n, prices in enumerate(self._setting.prices)]
        host.passes_alone = [prices.passes(1) for prices in self._setting.prices]
        if run.data.evaluate_every_rounds:
            is_text = self._setting.scenario.swarm.model == "transformer"
            read = (
                EvaluationText(run, None).read
                if is_text
                else partial(held_out_numbers, run, self._setting.microbatch_tokens)
            )
            host.evaluation = MemoryEvaluation(read)
        return host

    async def _open_text(self) -> Text:
        run = self._setting.run
        if self._setting.scenario.swarm.model == "transformer":
            return BlockText(run, self.name, self._setting.dimensions.vocabulary)
        digest = hashlib.sha256(f"{run.seed}|{self.name}".encode()).digest()
        return RandomBatches(run.pipeline.ids_shape, int.from_bytes(digest[:3], "big") % VOCABULARY)

    def _recorder(self, session: PeerSession) -> Callable[[events.Event], None]:
        def record(event: events.Event) -> None:
            if not session.crashed:
                self._observe(self, event)

        return record

    def _over(self, session: PeerSession) -> None:
        if not session.crashed:
            self._network.kill(self.name)
