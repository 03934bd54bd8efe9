"""A GPU that fails for good ends its node within seconds: nobody sends it work any more, and its slow weights are kept.

The worker, the gate and the device are the real ones, in real time; only the error is none.
"""

import asyncio
from typing import Any

import pytest
import torch
from limits import LAST_RESORT_S
from memory_swarms import Peer, asked_to_leave, recipe, until

from noloco_node.admission.admission_state import not_admitted
from noloco_node.errors import Exit, user_error_of
from noloco_node.journal import events
from noloco_node.machine.device import Device
from noloco_node.sim.network.sim_network import SimNetwork
from pipeline.worker import UNFIT_S

SOON_S = 10.0


def fail(*_: Any) -> Any:
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


@pytest.mark.processes
@pytest.mark.parametrize(("stage", "where"), [(1, "loss"), (0, "forward"), (0, "step"), (1, "step")])
async def test_a_node_whose_device_fails_saves_its_slow_weights_and_leaves(stage: int, where: str) -> None:
    hub, what = SimNetwork(), recipe(stages=2, steps=10_000, per_round=3)
    device = Device(torch.device("cpu"))
    peer = Peer(hub, what, "peer-a", stage, device=device)
    other = Peer(hub, what, "peer-b", 1 - stage, job_s=0.001)
    # Nothing is saved before: there is no whole checkpoint with the same slow weights.
    peer.node._services.writer.due = lambda *_: False
    await until(lambda: len(peer.of(events.InnerStep)) >= 7, LAST_RESORT_S)
    dead = peer.stages[-1]
    for name in {where, "current_weights", "optimiser_state", "discard"}:
        setattr(dead, name, fail)
    await asyncio.wait({peer.task}, timeout=SOON_S)
    trouble = user_error_of(peer.task.exception())
    assert trouble.code is Exit.DEVICE_LOST
    await until(lambda: not other.node.roster.stage(stage), SOON_S)
    assert set(peer.saved.tensors) <= {"slow", "momentum", "gathered"}
    assert peer.saved.counters.round > 0
    device.close()

    hub.kill("peer-a")
    again = Peer(hub, what, "peer-a", stage, saved=peer.saved, job_s=0.001)
    await until(lambda: len(again.of(events.InnerStep)) >= 3, LAST_RESORT_S)
    assert again.of(events.InnerStep)[0].step == peer.saved.counters.inner_steps + 1
    await asked_to_leave(again, other)


async def test_a_node_that_the_run_lets_in_no_more_keeps_what_it_has_trained() -> None:
    hub, what = SimNetwork(), recipe(stages=2, steps=10_000, per_round=3)
    peer, other = Peer(hub, what, "peer-a", 0), Peer(hub, what, "peer-b", 1)
    peer.node._services.writer.due = lambda *_: False
    await until(lambda: len(peer.of(events.InnerStep)) >= 7, LAST_RESORT_S)

    async def refuse() -> None:
        raise not_admitted("you have been shut out")

    peer.node.membership._read_due = refuse
    await asyncio.wait({peer.task})
    trouble = user_error_of(peer.task.exception())
    assert trouble.code is Exit.NOT_ADMITTED
    assert peer.saved is not None
    assert peer.counters.inner_steps == peer.of(events.InnerStep)[-1].step
    await asked_to_leave(other)


async def test_a_stage_for_which_memory_never_suffices_ends_its_node_with_its_state_saved() -> None:
    """In virtual time: a sender asks again every few seconds, and is refused for minutes."""
    hub, what = SimNetwork(), recipe(stages=2, steps=10_000, per_round=3)
    peer, other = Peer(hub, what, "peer-a", 1), Peer(hub, what, "peer-b", 0)
    await until(lambda: len(peer.of(events.InnerStep)) >= 4, LAST_RESORT_S)

    def short(*_: Any) -> Any:
        raise MemoryError("CUDA out of memory")

    peer.stages[-1].loss = short
    await asyncio.wait({peer.task}, timeout=2 * UNFIT_S)
    trouble = user_error_of(peer.task.exception())
    assert trouble.code is Exit.DEVICE
    assert "every microbatch ran out of it" in trouble.why
    assert set(peer.saved.tensors) >= {"slow", "fast", "optimiser"}
    await asked_to_leave(other)
