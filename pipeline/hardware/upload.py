"""Copies of tensors from main memory to a device, part by part.

A GPU copies several times as fast from pinned memory as from other memory. So each part is written to
pinned memory first, and while the GPU takes it the next part is written to another such place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PART = 2**21  # the most values of a part
_PLACES = 2


class _Place(NamedTuple):
    """Memory for one part. `near`: main memory, pinned for a GPU. `taken`: when the GPU has read what is there."""

    there: Tensor
    near: Tensor
    taken: torch.cuda.Event | None


class Upload:
    """Memory for parts on their way to a device, taken once: a change of the weights must not fail half-way."""

    def __init__(self, device: torch.device) -> None:
        """Take the memory; a CPU needs none."""
        gpu, self._next, self._device = device.type == "cuda", 0, device
        self._places = [
            _Place(
                torch.empty(PART, device=device),
                torch.empty(PART, pin_memory=gpu),
                torch.cuda.Event() if gpu else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(0 if device.type == "cpu" else _PLACES)
        ]

    def __call__(self, part: Tensor) -> Tensor:
        """Return values [n], n <= PART, on the device, where they stay until the next call but one.

        They are float32 or of fewer bytes.
        """
        place = self._places[self._next]
        self._next = (self._next + 1) % _PLACES
        there, near = (memory.view(part.dtype)[: len(part)] for memory in (place.there, place.near))
        if place.taken is not None:
            place.taken.synchronize()
        there.copy_(near.copy_(part), non_blocking=place.taken is not None)
        if place.taken is not None:
            # torch would take the stream of the current device, which may be another GPU.
            place.taken.record(torch.cuda.current_stream(self._device))
        return there
