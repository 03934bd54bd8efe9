"""When a replica saves itself, and a disk that refuses."""

import asyncio
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_counters import counters

from noloco_node.storage.checkpoint import Checkpoint
from noloco_node.storage.checkpoint_store import SHARE, CheckpointWriter, LastCheckpoint, checkpoint_due
from noloco_node.tasks import background


def checkpoint(round: int) -> Checkpoint:
    return Checkpoint(counters(round=round, inner_steps=10 * round), {})


@given(
    round_s=st.floats(0.1, 1000.0),
    took_s=st.floats(0.0, 500.0),
    every_s=st.floats(1.0, 600.0),
    rounds=st.integers(2, 60),
)
def test_every_round_is_saved_as_far_as_the_share_of_time_goes(
    round_s: float, took_s: float, every_s: float, rounds: int
) -> None:
    last, busy_s, saved = LastCheckpoint(None, 0.0, took_s), took_s, 0
    for round in range(1, rounds + 1):
        now_s = took_s + round * round_s
        if now_s >= last.ended_s and checkpoint_due(now_s, (1, round), last, every_s):
            last, busy_s, saved = LastCheckpoint((1, round), now_s + took_s, took_s), busy_s + took_s, saved + 1
    # The first interval begins with a write of its own.
    assert busy_s <= SHARE * max(last.ended_s, took_s) + took_s + 1e-6
    if took_s <= SHARE * round_s:
        assert saved == rounds


@given(every_s=st.floats(1.0, 600.0), waited=st.floats(0.0, 3.0))
def test_without_rounds_it_is_saved_now_and_then(every_s: float, waited: float) -> None:
    last = LastCheckpoint((1, 7), 0.0, 0.0)
    for place, before in (((1, 7), last), ((2, 0), last), ((2, 0), LastCheckpoint(None, 0.0, 0.0))):
        assert checkpoint_due(waited * every_s, place, before, every_s) == (waited * every_s >= every_s)
    for place in ((2, 3), (2, 7)):  # the same number at another stage is another round
        assert checkpoint_due(1e-9, place, last, every_s)


class Disk:
    """A disk that takes a while, and may refuse."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.refuses, self.written, self.busy = takes_s, False, list[int](), 0
        self.error: Exception = OSError(28, "No space left on device")

    async def save(self, checkpoint: Checkpoint) -> str:
        self.busy += 1
        assert self.busy == 1, "one at a time"
        await asyncio.sleep(self.takes_s)
        self.busy -= 1
        if self.refuses:
            raise self.error
        self.written.append(checkpoint.counters.round)
        return "there"


async def test_a_disk_that_refuses_is_said_once_and_is_a_state_until_it_takes_one_again() -> None:
    notes: list[tuple[str, bool]] = []
    said: list[str] = []
    states: list[str | None] = []
    disk = Disk(0.1)

    def warn(line: str) -> None:
        said.append(f"warning: {line}")

    saving = CheckpointWriter(disk.save, said.append, warn, 60.0, lambda *noted: notes.append(noted))
    writing = asyncio.create_task(saving.run())
    for round in range(1, 9):
        disk.refuses = 3 <= round <= 6
        assert saving.due(0, round)
        saving.begin(checkpoint(round))
        assert not saving.due(0, round)
        await asyncio.sleep(5.0)
        assert not saving.due(0, round)
        states.append(saving.trouble)
    assert disk.written == [1, 2, 7, 8]
    writing.cancel()
    assert notes == [("could not save: No space left on device", False), ("checkpoints are saved again", True)]
    assert [line.split()[0] for line in said] == ["saved", "warning:", "saved"]
    assert "earlier checkpoints are kept" in said[1]
    assert said[2].endswith("after all")
    assert [state is None for state in states] == [True, True, False, False, False, False, True, True]
    assert states[3].why == "No space left on device"


async def test_the_last_one_waits_for_the_one_before_it_and_is_always_said() -> None:
    said: list[str] = []
    disk = Disk(30.0)
    saving = CheckpointWriter(disk.save, said.append, said.append, every_s=60.0)
    writing = asyncio.create_task(saving.run())
    saving.begin(checkpoint(1))
    await asyncio.sleep(1.0)
    assert await saving.finish(checkpoint(2))
    assert disk.written == [1, 2]
    held = {(stage, round): saving.holds(stage, round) for stage in (0, 1) for round in (0, 1, 2)}
    assert [place for place, is_held in held.items() if is_held] == [(0, 0), (0, 2), (1, 0)], "not of another stage"
    disk.refuses = True
    assert not await saving.finish(checkpoint(3))
    assert not await saving.finish(checkpoint(3))
    writing.cancel()
    assert [line.split()[0] for line in (said)] == ["saved", "saved", "could", "could"]


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=4), st.integers(1, 3), st.booleans())
async def test_the_last_one_is_written_unless_the_disk_has_it(
    rounds: list[tuple[int, bool]], round: int, waits: bool
) -> None:
    """`rounds`: those of earlier checkpoints, and whether the disk refuses them."""
    disk, said = Disk(1.0), list[str]()
    saving = CheckpointWriter(disk.save, said.append, said.append, every_s=60.0)
    async with background(saving.run()):
        for number, disk.refuses in rounds:
            saving.begin(checkpoint(number))
            await asyncio.sleep(2.0)
        disk.refuses = False
        before, is_there = list(disk.written), rounds[-1:] == [(round, False)]
        if waits:  # it is being written when it is to be the last one
            saving.begin(checkpoint(round))
            await asyncio.sleep(0.5)
        assert await saving.finish(checkpoint(round))
    assert disk.written == before + [round] * (waits or not is_there)
    assert said[-1].startswith("saved there")


async def test_the_writer_keeps_no_weights_between_two_checkpoints() -> None:
    """The masters of a replica move on to a copy under a step: what it has left is to be free."""
    saving = CheckpointWriter(Disk(0.1).save, lambda _: None, lambda _: None, every_s=60.0)
    weights = torch.zeros(4)
    gone = weakref.ref(weights)
    async with background(saving.run()):
        saving.begin(Checkpoint(counters(), {"fast": (weights,)}))
        del weights
        await asyncio.sleep(0.05)
        assert gone() is not None
        await asyncio.sleep(1.0)
        assert saving.holds(0, counters().round)
        assert gone() is None


LOST = torch.AcceleratorError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device"), MemoryError(), LOST])
async def test_weights_may_move_once_a_checkpoint_is_written_refused_or_left_out(error: Exception | None) -> None:
    """A device that is lost may be noticed here first, and a node without memory for a checkpoint trains on."""
    read: list[int] = []

    def reading(number: int) -> Checkpoint:
        return checkpoint(number)._replace(read=lambda: read.append(number))

    disk = Disk(30.0)
    disk.refuses, disk.error = error is not None, error or disk.error
    saving = CheckpointWriter(disk.save, lambda _: None, lambda _: None, every_s=60.0)
    writing = asyncio.create_task(saving.run())
    saving.begin(reading(1))
    await asyncio.sleep(1.0)
    assert not read
    saving._waiting = reading(2)  # which the last one makes useless
    assert await saving.finish(reading(3)) == (error is None)
    assert read == [2, 1, 3]
    assert not writing.done()
