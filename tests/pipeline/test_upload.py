"""Parts on their way to a device: what arrives, and when memory is written to again. No GPU is needed."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_stages import cuts, make_stage, prepared

from pipeline.hardware import upload
from pipeline.hardware.upload import Upload

CPU = torch.device("cpu")


class Taken:
    """An event that says when somebody waits for it, and that nobody writes to the memory before."""

    def __init__(self, near: torch.Tensor) -> None:
        self._near, self._recorded = near, near.clone()

    def record(self, _stream: object = None) -> None:
        self._recorded = self._near.clone()

    def synchronize(self) -> None:
        assert torch.equal(self._near, self._recorded), "written to while the device may read it"


@pytest.fixture(autouse=True, scope="module")
def streams() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: device)
        yield


def staged() -> Upload:
    """Return the memory that a GPU has, in main memory."""
    found = Upload(CPU)
    for _ in range(2):
        near = torch.zeros(upload.PART)
        found._places.append(upload._Place(torch.zeros(upload.PART), near, Taken(near)))
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


def test_a_difference_and_a_correction_pass_through_the_memory_of_a_device() -> None:
    """They are what they are where the device computes in main memory, and `less` is not written to."""
    recipe = prepared("llama")
    plain, apart = (make_stage(recipe, cuts(recipe, 2)[0]) for _ in range(2))
    source = torch.Generator().manual_seed(3)
    slow = [weight + 0.01 * torch.randn(weight.shape, generator=source) for weight in plain.weights()]
    before = [each.clone() for each in slow]
    apart._device, apart._upload = torch.device("cuda"), staged()
    differences = [stage.weights(slow) for stage in (plain, apart)]
    assert all(map(torch.equal, *differences))
    assert all(map(torch.equal, slow, before))
    for stage, difference in zip((plain, apart), differences, strict=True):
        stage.correct([-each for each in difference])
    assert all(map(torch.equal, plain.weights(), apart.weights()))
