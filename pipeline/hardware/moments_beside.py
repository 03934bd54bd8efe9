"""Moments that lie in main memory, and visit the device piece by piece while a step takes them.

A step reads and writes each moment once; between two steps moments only fill the device's memory. So they lie in main
memory, and the device has a few places for pieces: while one piece is computed, the next one comes and the previous one
goes back, each way on a stream of its own.
The arithmetic is the device's in either case, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

_PLACES = 3
_TOGETHER = 2**28  # bytes of pinned memory that moments share, at most, where none is larger
_ALIGNED = 256  # bytes, of which each moment begins at a multiple


class Codes(NamedTuple):
    """One moment of some blocks. `scales`: float32 [blocks, 1]. `codes`: int8 or uint8 [blocks, values]."""

    scales: Tensor
    codes: Tensor


class _Place(NamedTuple):
    """Memory on the device for both moments of a piece. `come`, `used`, `gone`: when the device had done so."""

    scales: Tensor
    codes: Tensor
    come: torch.cuda.Event | None
    used: torch.cuda.Event | None
    gone: torch.cuda.Event | None

    def views(self, moments: tuple[Codes, Codes]) -> tuple[Codes, Codes]:
        first, second = (
            Codes(
                scales[: len(near.scales)].view(near.scales.shape),
                codes[: near.codes.numel()].view(near.codes.dtype).view(near.codes.shape),
            )
            for near, scales, codes in zip(moments, self.scales, self.codes, strict=True)
        )
        return first, second


class MomentsBeside:
    """Takes pieces of moments to a device and back. Its memory is taken once: a step must not fail half-way."""

    def __init__(self, device: torch.device, blocks: int, values: int) -> None:
        """`blocks`, `values`: the most of a piece."""
        gpu, self._next, self._device = device.type == "cuda", 0, device
        self._inward, self._outward = (
            torch.cuda.Stream(device) if gpu else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._places = [
            _Place(
                torch.empty(2, blocks, device=device),
                torch.empty(2, values, dtype=torch.int8, device=device),
                *(torch.cuda.Event() if gpu else None for _ in range(3)),  # type: ignore[no-untyped-call]
            )
            for _ in range(_PLACES if gpu else 1)
        ]

    @contextmanager
    def on_device(self, moments: tuple[Codes, Codes]) -> Iterator[tuple[Codes, Codes]]:
        """Give the moments of a piece as they are on the device, and write them back afterwards."""
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        there = place.views(moments)
        with _after(self._inward, place.gone, place.come):
            _copy(moments, there)
        if place.come is not None:
            # torch would take the stream of the current device, which may be another GPU.
            place.come.wait(torch.cuda.current_stream(self._device))
        yield there
        if place.used is not None:
            place.used.record(torch.cuda.current_stream(self._device))
        with _after(self._outward, place.used, place.gone):
            _copy(there, moments)

    def settle(self) -> None:
        """Wait until main memory has all that was written back."""
        if self._outward is not None:
            self._outward.synchronize()


def main_memory(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Return zeros, int8, of so many bytes each.

    torch rounds what it pins up to a power of two, and a moment is often just above one. So moments share memory.
    """
    found, blocks = dict[int, Tensor](), shared(sizes)
    for members in blocks:
        memory = torch.zeros(sum(_rounded(sizes[number]) for number in members), dtype=torch.int8, pin_memory=pinned)
        start = 0
        for number in members:
            found[number] = memory[start : start + sizes[number]]
            start += _rounded(sizes[number])
    return [found[number] for number in range(len(sizes))]


def shared(sizes: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the sizes that share a block: the largest first, each in the first block with room."""
    blocks, rooms = list[list[int]](), list[int]()
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = _rounded(sizes[number])
        place = next((place for place, room in enumerate(rooms) if size <= room), len(blocks))
        if place == len(blocks):
            blocks.append([])
            rooms.append(max(_TOGETHER, 1 << (size - 1).bit_length()))
        blocks[place].append(number)
        rooms[place] -= size
    return blocks


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@contextmanager
def _after(
    stream: torch.cuda.Stream | None, before: torch.cuda.Event | None, after: torch.cuda.Event | None
) -> Iterator[None]:
    """Queue what is done within on `stream`, after the event `before`, and `after` behind it."""
    on_it: AbstractContextManager[object] = nullcontext() if stream is None else torch.cuda.stream(stream)
    with on_it:
        if before is not None:
            before.wait()
        yield
        if after is not None:
            after.record()


def _copy(source: tuple[Codes, Codes], target: tuple[Codes, Codes]) -> None:
    for mine, theirs in zip(source, target, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            other.copy_(one, non_blocking=True)
