"""How much memory a stage needs on a device, how much is free there, and how what is free comes back to the system.

The need is the plan's: on a GPU what it computes with, on a CPU all of it. (Of the stage that it is about to take a
newcomer measures the graph of a microbatch: `noloco_node.node.joining.stage_claim`.) Free is of a GPU what its driver
says, else of the machine what Linux says, or a container's limit; None where nobody says it, since a number that was
made up would keep a peer from a stage that fits.

One rule says what fits, `usable_bytes`. The planner, `check`, `doctor` and a node that joins ask it, so that none of
them plans what another one refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_USABLE = 0.8
"""Of the memory that is free. A plan counts tensors; the rest is for what it does not know: the gaps between an
allocator's blocks, the workspaces of libraries, what other programs take meanwhile."""
_CONTEXT_BYTES = 600e6
"""That CUDA takes of each GPU for itself, about: its context, and the kernels that it has loaded."""
ARENAS = 2
M_ARENA_MAX = -8
"""By glibc's malloc.h, which numbers its parameters downwards."""
MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
"""Where a container of this time (cgroup 2) finds its limit; an older one says nothing here."""


def usable_bytes(free: float) -> float:
    """Return how much of the memory that is free a stage may be planned to take."""
    return _USABLE * free


def wanted_bytes(needs: float) -> float:
    """Return how much memory must be free for a stage that needs so much: the inverse of `usable_bytes`."""
    return needs / _USABLE


def free_of_gpu(size_bytes: float) -> float:
    """Return what the driver of a GPU of this size says is free of it in a process that trains."""
    return max(0.0, size_bytes - _CONTEXT_BYTES)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that are free for the tensors of a device."""
    if device.type == "cuda":
        import torch

        # What torch has taken of the driver and keeps for its next tensor is free too.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return machine_free_bytes()


def machine_free_bytes() -> int | None:
    """Return the bytes of the machine's own memory that are free for us."""
    known = [each for each in (available(MEMINFO), within_limit(CONTAINER)) if each is not None]
    return min(known, default=None)


def give_back(device: torch.device) -> None:
    """Have torch give back what it keeps of a GPU's memory and does not use."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def share_arenas() -> None:
    """Have the C library's threads share `ARENAS` stores of memory instead of eight a core, where it can (glibc).

    Call it before threads are started. A thread keeps the store that it once took, and so what a task needed that any
    of a pool's threads may do would in time be kept as often as the pool has threads.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def trim() -> None:
    """Have the C library give back the pages that it keeps free, where it can (glibc).

    It keeps for each thread what that thread once needed, in pieces that fit less and less: a replica that makes and
    drops tensors for days would grow by some megabytes an hour.
    """
    # Of the program itself, so of whichever C library it runs on; others than glibc have no such function.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def available(meminfo: Path) -> int | None:
    """Return what Linux estimates that a process can still take without swapping."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0][1]) if found and len(found[0]) > 1 and found[0][1].isdigit() else None


def within_limit(directory: Path) -> int | None:
    """Return what a container may still take; None where it has no limit.

    What files it has read or written lately take in memory counts as used, and is given back as soon as it is wanted.
    """
    try:
        limit, used = ((directory / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    if not (limit.isdigit() and used.isdigit()):
        return None
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        lines = []
    files = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
    return max(0, int(limit) - max(0, int(used) - files))
