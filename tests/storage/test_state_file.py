"""A copy of a state on the disk is that state, stands still, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from state_copies import SHAPES, TERMS, state
from toy_gossip import at_once

from gossip.exchange.messages import Busy, Gone, Manifest, Parts, PieceRequest, ReplicaState, Section, StateRequest
from gossip.transfer.chunks import CopyInMemory, cut
from gossip.transfer.donor import ABANDONED_S, Donor
from noloco_node.sim.clock import run
from noloco_node.storage import atomic_file
from noloco_node.storage.transfer_files import StateFile

SPANS = cut([torch.empty(shape, device="meta").numel() * 4 for shape in SHAPES])
STATES = {
    "whole": state(),
    "no momentum": state(momentum=()),
    "amid a period": state(gathered=state(9).slow, meetings=2),
    "slow weights": state(momentum=(), optimiser=()),
}


@pytest.mark.parametrize("whole", STATES.values(), ids=STATES)
def test_a_file_has_the_pieces_of_the_state_that_it_was_made_of(tmp_path: Path, whole: ReplicaState) -> None:
    expected = CopyInMemory(whole)
    pieces = {(section, span): expected.read(section, span) for section in expected.sections for span in SPANS}
    size, sections = expected.norm(), expected.sections
    held = StateFile(tmp_path, whole)
    for tensors in (whole.slow, whole.momentum, whole.optimiser, whole.gathered):
        for tensor in tensors:
            tensor.add_(1.0)  # the replica trains on
    assert (held.norm(), held.sections) == (size, sections)
    assert held.counters.slow == ()
    for (section, span), piece in pieces.items():
        assert torch.equal(held.read(section, span), piece)
    assert not list(tmp_path.iterdir())


def test_the_disk_is_free_again_once_a_copy_is_let_go(tmp_path: Path) -> None:
    held = StateFile(tmp_path, state())
    descriptor = held._file.fileno()
    os.fstat(descriptor)
    del held
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_disk_without_room_has_newcomers_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StateFile] = []

    async def provide(parts: Parts) -> Any:
        if parts is Parts.OUTLINE:
            return state()
        made.append(StateFile(tmp_path, state()))
        return made[-1]

    async def main() -> None:
        donor, wanted = Donor(provide, at_once, SHAPES, TERMS), StateRequest(parts=Parts.ALL)
        with monkeypatch.context() as full:
            full.setattr(atomic_file, "SPARE_BYTES", 2**60)
            assert isinstance(await donor._manifest(wanted), Busy)
        assert isinstance(await donor._manifest(wanted), Busy), "not at once again"
        await asyncio.sleep(ABANDONED_S)
        manifest = await donor._manifest(wanted)
        assert isinstance(manifest, Manifest)
        assert len(made) == 1
        made[0]._file.truncate(0)  # as a disk that loses what was written
        asked = PieceRequest(snapshot=manifest.snapshot, section=Section.FIRST, number=0)
        assert isinstance(await donor._piece(asked), Gone)
        assert donor.statistics()["held"] == 0

    run(main())
