"""What is written from a replica's own memory is one state, however long writing takes; training goes on."""

import asyncio
import math
from collections.abc import Callable
from itertools import groupby
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import Peer, recipe, until
from torch import Tensor

from gossip.exchange.messages import Parts, ReplicaState
from gossip.interface import OuterStepTaken
from gossip.rounds.outer_optimiser import OuterOptimiser
from gossip.transfer.chunks import HeldCopy
from noloco_node.journal import events
from noloco_node.machine.interface import DeviceLost
from noloco_node.node.replica import LEFT_OUT, Replica
from noloco_node.sim.hardware.memory_host import MemoryHost
from noloco_node.sim.hardware.priced_stage import VirtualDevice
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.swarm.run_distribution import RunFileText
from pipeline.stage import Stage, StepReport

T = TypeVar("T")

WRITES_S = 5.0
"""As long as dozens of inner steps."""
STEPS_S = 3.0
"""Of an outer step: as long as some inner steps."""


class SlowDisk:
    """Notes the steps that were taken while it read tensors, and whether any of these moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.moved = 0, 0
        save, hold = MemoryHost.save, MemoryHost.hold
        disk = self

        async def slow_save(host: MemoryHost, checkpoint: Checkpoint) -> str:
            await disk.look_at([tensor for group in checkpoint.tensors.values() for tensor in group])
            written = await save(host, checkpoint)
            checkpoint.read()
            await asyncio.sleep(WRITES_S)  # until the disk has it
            return written

        async def slow_hold(host: MemoryHost, state: ReplicaState) -> HeldCopy:
            await disk.look_at([*state.slow, *state.momentum, *state.optimiser])
            return await hold(host, state)

        monkeypatch.setattr(MemoryHost, "save", slow_save)
        monkeypatch.setattr(MemoryHost, "hold", slow_hold)

    async def look_at(self, tensors: list[Tensor]) -> None:
        before = [tensor.clone() for tensor in tensors]
        await asyncio.sleep(WRITES_S)
        self.read += 1
        self.moved += not all(map(torch.equal, tensors, before))


async def test_nothing_moves_while_it_is_written_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)

    hub, what = SimNetwork(), recipe(stages=1, replicas=2, steps=500, per_round=4)
    peers = [Peer(hub, what, f"peer-{name}", 0) for name in "ab"]
    await until(lambda: all(len(peer.of(OuterStepTaken)) >= 3 for peer in peers))
    replica = peers[0].replica
    await replica.state(Parts.ALL)
    await until(lambda: all(len(peer.of(OuterStepTaken)) >= 12 for peer in peers))
    for peer in peers:
        peer.leave.set()
    await asyncio.wait({peer.task for peer in peers})
    assert disk.read >= 4
    assert disk.moved == 0
    for peer in peers:
        assert peer.saved is not None
        times = [event for event in peer.of(events.InnerStep) if event.seconds >= WRITES_S / 2]
        assert times, "a step has waited"
        assert len(times) < len(peer.of(events.InnerStep)) / 4, "and not all of them"


# The outer step, beside the training.


class SlowArithmetic(VirtualDevice):
    """Takes long for an outer step, beside its own work; the slow weights move at the beginning of that time."""

    async def beside(self, job: Callable[..., T], *args: object) -> T:
        result = await super().beside(job, *args)
        if getattr(job, "__func__", None) is OuterOptimiser._take:
            await asyncio.sleep(STEPS_S)
        return result


class Stepping(Peer):
    """A peer with such a device. `saves`: of each checkpoint its round, and the last round whose correction it has."""

    def __init__(self, hub: SimNetwork, what: RunFileText, name: str) -> None:
        super().__init__(hub, what, name, 0, device=SlowArithmetic(0.05))
        self.saves: list[tuple[int, int]] = []

    @property
    def last_round(self) -> int:
        return max((step.round for step in self.of(OuterStepTaken)), default=0)

    async def _save(self, checkpoint: Checkpoint) -> str:
        self.saves.append((checkpoint.counters.round, self.last_round))
        return await super()._save(checkpoint)


def stepping_pair() -> list[Stepping]:
    hub, what = SimNetwork(), recipe(stages=1, replicas=2, steps=10_000, per_round=4)
    return [Stepping(hub, what, f"peer-{name}") for name in "ab"]


async def leave(*peers: Peer) -> None:
    for peer in peers:
        peer.leave.set()
    await asyncio.wait({peer.task for peer in peers})


async def test_the_device_does_not_stop_for_an_outer_step_and_no_checkpoint_has_half_of_one() -> None:
    peers = stepping_pair()
    await until(lambda: all(len(peer.of(OuterStepTaken)) >= 5 for peer in peers))
    for peer in peers:
        met = [step for step in peer.of(OuterStepTaken) if step.partner is not None]
        assert all(step.staleness >= 3 for step in met), "steps were taken meanwhile"
        assert max(step.seconds for step in peer.of(events.InnerStep)) < STEPS_S / 2
    await leave(*peers)
    for peer in peers:
        assert len(peer.saves) >= 5
        assert all(round == corrected for round, corrected in peer.saves)


@pytest.mark.parametrize("after_s", [0.0, STEPS_S - 0.1, STEPS_S + 0.1])
async def test_whoever_leaves_or_fails_amid_an_outer_step_saves_the_whole_of_it(after_s: float) -> None:
    failing, leaving = stepping_pair()
    for peer, ends in ((leaving, leaving.leave.set), (failing, lambda: fail_the_text(failing))):
        met = len(peer.of(OuterStepTaken))
        await until(lambda peer=peer: peer.node.replica is not None and not peer.replica.rounds.settled)
        await asyncio.sleep(after_s)
        ends()
        await asyncio.wait({peer.task})
        assert len(peer.of(OuterStepTaken)) > met
        assert peer.saves[-1] == (peer.last_round, peer.last_round)
        assert "fast" in peer.saved.tensors
    assert isinstance(failing.task.exception(), ExceptionGroup)


def fail_the_text(peer: Peer) -> None:
    peer.text.failure = OSError("the text is gone")


async def test_a_device_that_is_lost_amid_an_outer_step_leaves_the_slow_weights_after_it() -> None:
    peers = stepping_pair()
    await until(lambda: all(len(peer.of(OuterStepTaken)) >= 2 for peer in peers))
    lost = peers[0]
    # Nothing is saved before: a whole checkpoint of the round before would be kept instead.
    lost.node._services.writer.due = lambda *_: False
    lost.node._services.writer.holds = lambda *_: False
    await until(lambda: not lost.replica.rounds.settled)
    before, finished = [tensor.clone() for tensor in lost.replica.rounds.state.slow], lost.replica.rounds.finished
    lost.replica.training_failed.set_result(DeviceLost("cuda", "unspecified launch failure"))
    await asyncio.wait({lost.task})
    assert set(lost.saved.tensors) <= {"slow", "momentum", "gathered"}
    # The step that was under way is awaited, and counted where it has moved the weights.
    assert lost.counters.round > finished
    assert all(map(torch.equal, lost.saved.tensors["slow"], before)), "moved already when the step began"
    await leave(peers[1])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2 * LEFT_OUT)), max_size=8))
def test_steps_left_out_in_a_row_are_told_once_and_their_end_too(stretches: list[tuple[bool, int]]) -> None:
    told = list[bool]()
    replica: Any = Replica.__new__(Replica)
    notice = SimpleNamespace(notice=lambda what, text, over=False: told.append(over))
    replica._left_out, replica._context = 0, SimpleNamespace(reporter=notice)
    steps = [applied for applied, count in stretches for _ in range(count)]
    for applied in steps:
        replica._tell_left_out(applied)
    rows = [len(list(row)) for applied, row in groupby(steps) if not applied]
    long = sum(row >= LEFT_OUT for row in rows)
    goes_on = bool(steps) and not steps[-1] and rows[-1] >= LEFT_OUT
    assert told == ([False, True] * long)[: 2 * long - goes_on]


async def test_an_owner_reads_that_steps_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "step", lambda *_: StepReport(math.nan, False))
    peer = Peer(SimNetwork(), recipe(stages=1, steps=LEFT_OUT + 2), "alone", 0)
    await until(lambda: len(peer.of(events.InnerStep)) > LEFT_OUT)
    peer.leave.set()
    await asyncio.wait({peer.task})
    assert any(f"{LEFT_OUT} inner steps were left out" in text for text in peer.said)
