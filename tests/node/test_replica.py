"""What is written from a replica's own memory is one state, however long writing takes; training goes on."""

from __future__ import annotations

import asyncio

import pytest
import torch
from memory_swarms import Peer, recipe, until
from torch import Tensor

from gossip.exchange.messages import Parts, ReplicaState
from gossip.interface import OuterStepTaken
from gossip.transfer.chunks import HeldCopy
from noloco_node.journal import events
from noloco_node.sim.hardware.memory_host import MemoryHost
from noloco_node.sim.network.sim_network import SimNetwork
from noloco_node.storage.checkpoint import Checkpoint

WRITES_S = 5.0
"""As long as dozens of inner steps."""


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
