"""Parts on their way to a device: what arrives, and when memory is written to again. No GPU is needed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.hardware import upload
from pipeline.hardware.upload import Upload

CPU = torch.device("cpu")


class Taken:
    """An event that says when somebody waits for it, and that nobody writes to the memory before."""

    def __init__(self, near: torch.Tensor) -> None:
        self._near, self._recorded = near, near.clone()

    def record(self) -> None:
        self._recorded = self._near.clone()

    def synchronize(self) -> None:
        assert torch.equal(self._near, self._recorded), "written to while the device may read it"


def staged() -> Upload:
    """Return the memory that a GPU has, in main memory."""
    found = Upload(CPU)
    for _ in range(2):
        near = torch.zeros(upload.PART)
        found._places.append(upload._Place(torch.zeros(upload.PART), near, Taken(near)))  # type: ignore[arg-type]
    return found


@given(st.lists(st.integers(1, 8), min_size=1, max_size=9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_parts_arrive_and_stay_until_the_next_call_but_one(lengths: list[int], kind: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "PART", 8)
        sending = staged()
        parts = [torch.full((length,), float(number + 1), dtype=kind) for number, length in enumerate(lengths)]
        before = sending(parts[0])
        for earlier, part in pairwise(parts):
            there = sending(part)
            assert torch.equal(there, part)
            assert there.dtype is kind
            assert torch.equal(before, earlier)
            before = there
