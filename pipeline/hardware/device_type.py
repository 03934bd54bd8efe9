"""What torch does differently on each type of device.

`cuda` means AMD's GPUs too. `mps` is the GPU of an Apple processor, which has no memory apart from main memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


class DeviceType(NamedTuple):
    """Functions of one type of device, of which each takes the device.

    `finish`: waits until the device has done its work. `random_state`: the state of the random numbers that dropout
    draws from. `empty_cache`: has torch give back memory that it does not use. `kept_bytes`: how much that would be.
    `free_bytes`: what the driver still gives; None where only main memory is the bound. `shares_memory`: whether the
    device computes in main memory. `half`: the format of 16 bits that it multiplies faster than float32, bfloat16 if
    it can without emulation; None if there is none. `beside`: a context that may be entered again; copies to main
    memory that another thread makes in it do not wait for passes, nor passes for them. Nobody may write to what is
    copied.
    """

    finish: Callable[[torch.device], None]
    random_state: Callable[[torch.device], Tensor]
    set_random_state: Callable[[torch.device, Tensor], None]
    empty_cache: Callable[[torch.device], None]
    kept_bytes: Callable[[torch.device], int]
    free_bytes: Callable[[torch.device], int | None]
    shares_memory: bool
    half: Callable[[torch.device], torch.dtype | None]
    beside: Callable[[torch.device], AbstractContextManager[object]]


def _cuda_half(device: torch.device) -> torch.dtype | None:
    """torch's own answer counts emulation as support, and is about the current device instead of ours."""
    capability = torch.cuda.get_device_capability(device)
    # Of AMD's: CDNA 3 and later, RDNA 3 and later. RDNA 2 is (10, 3).
    amd = torch.version.hip is not None
    if capability >= (8, 0) if not amd else capability[0] >= 11 or (9, 4) <= capability < (10, 0):
        return torch.bfloat16
    # NVIDIA's Pascal (6, 1) multiplies float16 64 times slower than float32.
    return torch.float16 if amd or capability >= (7, 0) else None


DEVICE_TYPES = {
    "cpu": DeviceType(
        finish=lambda _: None,
        random_state=lambda _: torch.get_rng_state(),
        set_random_state=lambda _, state: torch.set_rng_state(state),
        empty_cache=lambda _: None,
        kept_bytes=lambda _: 0,
        free_bytes=lambda _: None,
        shares_memory=True,
        half=lambda _: None,
        beside=lambda _: nullcontext(),
    ),
    "cuda": DeviceType(
        finish=lambda device: torch.cuda.synchronize(device),
        random_state=lambda device: torch.cuda.get_rng_state(device),
        set_random_state=lambda device, state: torch.cuda.set_rng_state(state, device),
        empty_cache=lambda _: torch.cuda.empty_cache(),
        kept_bytes=lambda device: torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device),
        free_bytes=lambda device: torch.cuda.mem_get_info(device)[0],
        shares_memory=False,
        half=_cuda_half,
        beside=lambda device: torch.cuda.stream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
    ),
    "mps": DeviceType(
        finish=lambda _: torch.mps.synchronize(),
        random_state=lambda _: torch.mps.get_rng_state(),
        set_random_state=lambda _, state: torch.mps.set_rng_state(state),
        empty_cache=lambda _: torch.mps.empty_cache(),
        kept_bytes=lambda _: torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory(),
        free_bytes=lambda _: max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()),
        shares_memory=True,
        # Apple's matrix library knows bfloat16 from macOS 14 on.
        half=lambda _: torch.bfloat16 if torch.backends.mps.is_macos_or_newer(14, 0) else None,
        beside=lambda _: nullcontext(),
    ),
}


def is_shortage(error: BaseException) -> bool:
    """Say whether an error means that memory ran out: torch, and NVIDIA's libraries, raise a RuntimeError for it."""
    said = str(error).lower()
    signs = ("out of memory", "allocate memory", "alloc_failed")
    return isinstance(error, MemoryError) or any(sign in said for sign in signs)
