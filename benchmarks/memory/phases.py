"""Bytes a parameter that a replica takes beside its device in each phase, and what its rounds compute.

    python -m benchmarks.memory.phases [--millions 20] [--codec int4] [--alpha 0] [--gamma 1]

One stage of square matrices with the production's device side (`pipeline.stage`), outer optimiser and checkpoint file,
in this process; what its partner sends is its own weights by the steps of a noisy probe. Of each phase two figures,
both the most at any time, without what the device would hold (weights, gradients, moments): *live*, the bytes of all
storages of tensors that Python knows, counted after each job; and *resident*, by the kernel, over what the process had
before, with what the inner step needs for a moment. `check` plans the live ones; the last column is what it plans of
the whole process, the device's part included, over what was resident. While a checkpoint is written, and while a copy
is made and all its pieces are read, a round is taken. Each round has an inner step between outer step and correction.
Arithmetic is processor time of one thread, the median over rounds after the first: encoding, checking and the step; to
measure how far a partner is (`influence`) comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gossip.exchange.messages import ReplicaState
from gossip.rounds.outer_optimiser import OuterOptimiser, Snapshot, Step
from gossip.rounds.weights_lock import WeightsLock
from gossip.rule.outer_step import OuterState, Tensors
from gossip.settings import Format, OuterConfig
from gossip.transfer.chunks import cut, digest
from noloco_node.machine.memory import trim
from noloco_node.planning.bandwidth import gossip_memory
from noloco_node.storage.checkpoint import Checkpoint, Counters, save
from noloco_node.storage.transfer_files import StateFile
from pipeline.forward_pass import StageSettings
from pipeline.inner_step import InnerConfig
from pipeline.stage import Stage

T = TypeVar("T")
WIDTH = 4352
"""Matrices of 36 MiB in bfloat16, which the C library takes from the system and gives back one by one."""
DEVICE = 16
"""Bytes a parameter on the device: weights, gradients, and AdamW's two moments."""


class Phase(NamedTuple):
    """What a phase took at most, in bytes a parameter beside the device."""

    name: str
    planned: float
    live: float
    resident: float

    @property
    def ratio(self) -> float:
        """Planned bytes of the whole process over measured ones."""
        return (DEVICE + self.planned) / (DEVICE + self.resident)


class Replica:
    """A stage whose rounds are taken here; notes what is alive after each job."""

    def __init__(self, millions: float) -> None:
        layers = max(1, round(millions * 1e6 / WIDTH**2))
        gc.collect()
        trim()
        self.before = resident_bytes()
        with torch.no_grad():
            module: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        inner = InnerConfig(beta2=0.95)
        self.stage = Stage(module, inner, StageSettings(torch.device("cpu")), first=False, last=False)
        self.parameters: int = sum(weight.numel() for weight in module.parameters())
        self.gradients = list(module.parameters())
        self.live_bytes, self.cpu_s, self.bound_s = 0, 0.0, 0.0
        self.weights = WeightsLock()
        self.train()

    def train(self) -> None:
        """Take an inner step. The gradients stay, as while a window fills."""
        for weight in self.gradients:
            weight.grad = torch.randn_like(weight)
        self.stage.step(1e-4, 1)
        for weight in self.gradients:
            weight.grad = torch.ones_like(weight)
        self.note()

    def note(self) -> None:
        """Look at what is alive."""
        self.live_bytes = max(self.live_bytes, live_bytes())

    async def compute(self, function: Callable[..., T], /, *args: object) -> T:
        """Run a job of arithmetic, and take its time."""
        began_s = time.thread_time()
        result = function(*args)
        self.cpu_s += time.thread_time() - began_s
        self.note()
        return result

    async def snapshot(self, slow: Tensors) -> Tensors:
        """Return a copy of the fast weights, or their difference from slow ones."""
        return self.stage.weights(slow)

    async def correct(self, correction: Tensors) -> None:
        """Add to the fast weights."""
        self.note()
        self.stage.correct(correction)

    def alone(self, retry_after_s: float) -> None:
        """Is not called."""

    def begin_phase(self) -> None:
        """Forget the peaks."""
        gc.collect()
        trim()
        Path("/proc/self/clear_refs").write_text("5")
        self.live_bytes = 0

    def end_phase(self, name: str, planned_bytes: int) -> Phase:
        """Return the peaks."""
        self.note()
        peaks = (planned_bytes, self.live_bytes - DEVICE * self.parameters, self._resident())
        return Phase(name, *(peak / self.parameters for peak in peaks))

    def _resident(self) -> float:
        return peak_bytes() - self.before - DEVICE * self.parameters


def live_bytes() -> int:
    """Return the bytes of all storages of tensors on the CPU, each once."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            for tensor in (each, each.grad if each.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def resident_bytes() -> int:
    """Return what this process has in memory."""
    return _status_bytes("VmRSS:")


def peak_bytes() -> int:
    """Return the most that it has had in memory since the last `begin_phase`."""
    return _status_bytes("VmHWM:")


async def one_round(replica: Replica, optimiser: OuterOptimiser) -> None:
    """Meet somebody who is where we are, but for some noise in what is probed."""
    snapshot = await optimiser.snapshot(0)
    replica.note()
    fast_steps = _steps(optimiser, optimiser.fast_probe(snapshot))
    mine = await optimiser.encode_fast(snapshot, fast_steps)
    cpu_s = replica.cpu_s
    came = await optimiser.encode_fast(Snapshot(snapshot.fast, 0), fast_steps)
    slow = None
    if optimiser.needs_slow:
        slow_steps = _steps(optimiser, optimiser.slow_probe())
        mine_slow, came_slow = await optimiser.encode_slow(slow_steps), await optimiser.encode_slow(slow_steps)
        slow = await optimiser.hear_slow(came_slow.coded.wire, mine_slow)
    replica.cpu_s = cpu_s  # what the partner computes
    fast = await optimiser.hear_fast(came.coded.wire, snapshot, mine)
    cpu_s = replica.cpu_s
    fast = await optimiser.bound_fast("partner", fast, snapshot)
    replica.cpu_s, replica.bound_s = cpu_s, replica.cpu_s - cpu_s
    async with replica.weights.slow.moving():
        correction = await optimiser.take(Step(snapshot.fast, fast, slow))
    async with replica.weights.fast.moving():
        replica.train()  # the correction waits for the pause after it
        await optimiser.correct(correction)


def _steps(optimiser: OuterOptimiser, probe: Tensor | None) -> tuple[float, ...]:
    noise = torch.Generator().manual_seed(1)
    theirs = None if probe is None else probe + 1e-3 * torch.randn(probe.shape, generator=noise)
    return optimiser.steps(probe, theirs)


async def measure(
    millions: float, outer: OuterConfig, rounds: int, directory: Path
) -> tuple[list[Phase], list[float], list[float]]:
    """Go through all phases; return them, and nanoseconds a parameter of each round: of arithmetic, and of measuring
    what came.
    """
    replica = Replica(millions)
    state = OuterState(replica.stage.weights())
    optimiser = OuterOptimiser(outer, state, replica, replica.compute, seed=0)  # type: ignore[arg-type]
    planned = gossip_memory(outer, replica.stage.shapes)
    once = 4 * replica.parameters
    steps_bytes = once + planned["outer_momentum"] + planned["gathered"]
    round_bytes = steps_bytes + planned["snapshot"] + planned["exchange"]
    nanoseconds, bounding = list[float](), list[float]()
    await one_round(replica, optimiser)
    found = []
    replica.begin_phase()
    replica.train()
    found.append(replica.end_phase("steps", steps_bytes))
    replica.begin_phase()
    for _ in range(rounds):
        replica.train()
        replica.cpu_s = 0.0
        await one_round(replica, optimiser)
        nanoseconds.append(1e9 * replica.cpu_s / replica.parameters)
        bounding.append(1e9 * replica.bound_s / replica.parameters)
    found.append(replica.end_phase("a round", round_bytes))
    replica.begin_phase()
    saved = await checkpoint_of(replica, optimiser)
    writing = asyncio.create_task(asyncio.to_thread(save, directory, saved))
    await one_round(replica, optimiser)
    await writing
    del saved, writing
    found.append(replica.end_phase("a round while saving", round_bytes))
    replica.begin_phase()
    giving = asyncio.create_task(give(replica, optimiser, directory))
    await asyncio.sleep(0)
    await one_round(replica, optimiser)
    await giving
    found.append(replica.end_phase("a round while giving a copy", round_bytes))
    return found, nanoseconds, bounding


async def checkpoint_of(replica: Replica, optimiser: OuterOptimiser) -> Checkpoint:
    """Return what `noloco_node.node.replica.Replica.checkpoint` does."""
    release, loop = await replica.weights.read(), asyncio.get_running_loop()
    outer, fast, moments = optimiser.state, replica.stage.current_weights(), replica.stage.optimiser_state().moments
    groups = {"slow": outer.slow, "fast": fast, "optimiser": moments} | (
        {"momentum": outer.momentum} if outer.momentum else {}
    )
    counters = Counters(run_id="", stage=0, round=0, inner_steps=0, progress=0.0, samples=0, optimiser_steps=0)

    def read() -> None:
        loop.call_soon_threadsafe(release)

    return Checkpoint(counters, groups, read)


async def give(replica: Replica, optimiser: OuterOptimiser, directory: Path) -> None:
    """Do what a donor does: have a copy made, and read each of its pieces."""
    async with replica.weights.reading():
        outer, moments = optimiser.state, replica.stage.optimiser_state().moments
        counters = {"round": 0, "inner_steps": 0, "progress": 0.0, "optimiser_steps": 0}
        state = ReplicaState(slow=outer.slow, momentum=outer.momentum, optimiser=moments, **counters)  # type: ignore[arg-type]
        held = await asyncio.to_thread(StateFile, directory, state)
    for section in held.sections:
        for span in cut([tensor.nbytes for tensor in outer.slow]):
            await asyncio.to_thread(lambda section, span: digest(held.read(section, span)), section, span)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=20, metavar="N", help="Parameters of the stage, in millions.")
    parser.add_argument("--codec", choices=list(Format), default="int4", help="Codec of the run.")
    parser.add_argument("--alpha", type=float, default=0.0, help="Decay of the outer momentum.")
    parser.add_argument("--gamma", type=float, default=1.0, help="Pull; beta is 1.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="Rounds to take the time of.")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    outer = OuterConfig(codec=Format(asked.codec), alpha=asked.alpha, gamma=asked.gamma)
    with tempfile.TemporaryDirectory() as directory:
        found, *spent = asyncio.run(measure(asked.millions, outer, asked.rounds, Path(directory)))
    print(
        f"torch {torch.__version__}, one thread, {asked.millions:g}M parameters, {asked.codec}, alpha {asked.alpha:g}"
    )
    heads = f"{'planned':>8} {'live':>8} {'resident':>9} {'plan/process':>13}"
    print(f"{'bytes a parameter beside the device':<36} {heads}")
    for phase in found:
        print(f"{phase.name:<36} {phase.planned:8.2f} {phase.live:8.2f} {phase.resident:9.2f} {phase.ratio:13.3f}")
    for what, nanoseconds in zip(("a round's arithmetic", "measuring what came"), spent, strict=True):
        low, high = min(nanoseconds), max(nanoseconds)
        print(f"{what}: {median(nanoseconds):.2f} ns a parameter (from {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
