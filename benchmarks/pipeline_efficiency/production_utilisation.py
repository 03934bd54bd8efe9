"""How busy a pipeline of production nodes is: whole peers in virtual time, to hold
`noloco_node.planning.windows` against.

Nodes, rosters, routing, gates, workers and sources are the production modules; stages are quadratic models, devices and
lines virtual. Nobody gossips, for the forecast leaves that out. Each run warms up first: replicas have to find each
other, fill, and measure their own speeds, by which microbatches are then routed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from noloco_node.journal import events
from noloco_node.machine.interface import Reporter
from noloco_node.node.node import Node
from noloco_node.node.node_context import NodeOptions
from noloco_node.sim.clock import run
from noloco_node.sim.hardware.memory_host import MemoryHost, MemoryStore
from noloco_node.sim.hardware.priced_stage import PricedStage, Prices, VirtualDevice
from noloco_node.sim.hardware.quadratic_model import QuadraticModel, RandomBatches, quadratic_layout
from noloco_node.sim.network.link_model import Latency, NetworkConditions
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.swarm.run_distribution import RunFileText

REFRESH_S = 2.0
PATIENCE_S = 1e5
_MICROBATCH = (1, 8)
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
"""Its multiples, less their whole parts, lie evenly between 0 and 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """A pipeline.

    `passes`: for each stage the time of a forward pass at each of its replicas. `window`: microbatches of an inner
    step. `latency`: mean time of one message. `jitter`: its standard deviation over its mean, log-normal.
    """

    passes: tuple[tuple[float, ...], ...]
    window: int
    latency: float = 0.0
    jitter: float = 0.0
    windows_in_flight: int = 1

    @property
    def capacity(self) -> float:
        """Microbatches in a unit of time when the weakest stage never waits."""
        return min(math.fsum(1.0 / (3.0 * time) for time in replicas) for replicas in self.passes)


def spread_speeds(work: Sequence[float], speeds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return the `passes` of stages with so much work each, whose replicas have these speeds, relative to their mean.

    Replicas are set up to a hundredth apart: where clocks are equal to the last bit, much hangs on who is served first
    in the same instant. No real machines are so equal.
    """
    mean = math.fsum(speeds) / len(speeds)
    apart = 0.02 if len(speeds) > 1 else 0.0
    return tuple(
        tuple(
            each * mean / speed * (1.0 + apart * ((stage * len(speeds) + number + 1) * _GOLDEN % 1.0 - 0.5))
            for number, speed in enumerate(speeds)
        )
        for stage, each in enumerate(work)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """`pass_s`: seconds of the shape's unit of time. `warm_up` and `microbatches`: of each replica, on average."""

    pass_s: float = 0.1
    warm_up: int = 50
    microbatches: int = 150
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """What was measured. `efficiency`: of what all devices of a stage could do; `refused`: calls, of all `calls`."""

    efficiency: float
    calls: int
    refused: int
    virtual_s: float


@dataclass(kw_only=True, slots=True)
class _Peer:
    stage: int
    time: float
    device: VirtualDevice = field(default_factory=VirtualDevice)
    node: Node | None = None

    def passes(self, pass_s: float) -> float:
        """Return how many forward passes of work the device has done."""
        return self.device.busy_s / (self.time * pass_s)

    def count(self, name: str) -> int:
        """Return one of the replica's counters."""
        return int(self.node.replica.statistics().get(name, 0)) if self.node and self.node.replica else 0


def measure(shape: PipelineShape, trial: Trial) -> Utilisation:
    """Run production nodes in the shape of a pipeline; deterministic. Raises RuntimeError where a node misbehaves."""
    return run(_measure(shape, trial))


async def _measure(shape: PipelineShape, trial: Trial) -> Utilisation:
    latency = Latency(
        shape="lognormal" if shape.jitter else "constant",
        mean_s=shape.latency * trial.pass_s,
        std_s=shape.jitter * shape.latency * trial.pass_s,
    )
    hub = SimNetwork(NetworkConditions(latency=latency), seed=trial.seed)
    recipe = _recipe(shape, trial.seed)
    wrong: list[str] = []
    peers = [_Peer(stage=stage, time=time) for stage, times in enumerate(shape.passes) for time in times]
    tasks = []
    for number, peer in enumerate(peers):
        peer.node = _node(hub, recipe, f"peer-{number:03d}", peer, trial.pass_s, wrong)
        tasks.append(asyncio.create_task(peer.node.live(asyncio.Event())))
    # Whole windows, and at least two of them, before and while it is measured.
    replicas = max(map(len, shape.passes)) * shape.window
    warm_up, windows = (max(2, math.ceil(count / shape.window)) for count in (trial.warm_up, trial.microbatches))
    await _until(peers, tasks, warm_up * replicas)
    begun_s, before = asyncio.get_running_loop().time(), _totals(peers, trial.pass_s)
    await _until(peers, tasks, (warm_up + windows) * replicas)
    ended_s, after = asyncio.get_running_loop().time(), _totals(peers, trial.pass_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    wrong += [f"{peer}: {failure!r}" for peer, failure in hub.failures]
    if wrong:
        raise RuntimeError(f"{len(wrong)} things went wrong, first: {wrong[0]}")
    microbatches = (after[0] - before[0]) / (3 * len(shape.passes))
    return Utilisation(
        efficiency=microbatches / shape.capacity / ((ended_s - begun_s) / trial.pass_s),
        calls=int(after[1] - before[1]),
        refused=int(after[2] - before[2]),
        virtual_s=ended_s - begun_s,
    )


def _recipe(shape: PipelineShape, seed: int) -> RunFileText:
    text = f"""
name = "utilisation"
seed = {seed}
[model]
architecture = "llama"
sizes = {{ hidden_size = 1 }}
[pipeline]
stages = {len(shape.passes)}
replicas = {max(2, len(shape.passes[0]))}
sequence_length = {_MICROBATCH[1]}
microbatch_size = {_MICROBATCH[0]}
microbatches_per_step = {shape.window}
windows_in_flight = {shape.windows_in_flight}
budget_s = 86400.0
[inner]
steps = 1000000
learning_rate = 0.01
[outer]
inner_steps_per_round = 1000000
"""
    return RunFileText(text, "the run file of this measurement")


def _node(hub: SimNetwork, recipe: RunFileText, name: str, peer: _Peer, pass_s: float, wrong: list[str]) -> Node:
    device = peer.device
    device.slowness = peer.time

    def build(number: int) -> PricedStage:
        windows = recipe.run.pipeline.windows_in_flight
        return PricedStage(QuadraticModel(number), Prices(forward_s=pass_s), device.charge, wrong.append, windows)

    async def open_text() -> RandomBatches:
        return RandomBatches(_MICROBATCH, int(name[-3:]) * 10_000)

    async def save(checkpoint: Checkpoint) -> str:
        return "nowhere"

    def record(event: events.Event) -> None:
        if isinstance(event, events.PeerViolation | events.Lost):
            wrong.append(f"{name}: {event}")

    host = MemoryHost(device, MemoryStore(lambda: None), build=build, open_text=open_text, save=save)
    wishes = NodeOptions(stage=peer.stage, refresh_s=REFRESH_S)
    return Node(
        recipe,
        quadratic_layout(recipe.run.pipeline.stages),
        hub.network(name),
        host,
        wishes,
        Reporter(record=record, say=lambda text: None),
    )


async def _until(peers: list[_Peer], tasks: list[asyncio.Task[None]], microbatches: int) -> None:
    """Wait until so many microbatches have had their gradient at the first stage."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(peer.count("worker.succeeded") for peer in peers if peer.stage == 0) < microbatches:
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)


def _totals(peers: list[_Peer], pass_s: float) -> tuple[float, int, int]:
    """Return passes, calls and refusals since the start."""
    refused = sum(peer.count("downstream.refused_full") for peer in peers)
    answered = sum(peer.count("downstream.gradients") for peer in peers)
    return sum(peer.passes(pass_s) for peer in peers), answered + refused, refused
