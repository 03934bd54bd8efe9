"""How much memory a device has free, how much of it a stage may take, and how free memory returns to the system.

The GPU's driver, the system and a container's limit say what is free. `usable_bytes` alone decides what fits: the
planner, `check`, `doctor` and a joining node all ask it. `SavedTensors` counts, exactly on any device, what autograd
keeps of a forward pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_USABLE = 0.8
"""Of the memory that is free. A plan counts tensors; the rest is for what it does not know: the gaps between an
allocator's blocks, the workspaces of libraries, what other programs take meanwhile."""
_CONTEXT_BYTES = 600e6  # that CUDA takes of each GPU for itself, about: its context, and the kernels that it has loaded
ARENAS = 2
M_ARENA_MAX = -8  # by glibc's malloc.h, which numbers its parameters downwards
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where the system says what containers, services and jobs may take (cgroup 2), and which of them we are in."""


def usable_bytes(free: float) -> float:
    """Return how much of the free memory a stage may take."""
    return _USABLE * free


def wanted_bytes(needs: float) -> float:
    """Return how much memory must be free for a stage that needs so much; the inverse of `usable_bytes`."""
    return needs / _USABLE


def bytes_beside(computing: float, beside: float, moments: int, graph: float, gpu: float, ram: float) -> int:
    """Return the bytes of a stage's 8-bit moments that lie in main memory: as few as let it fit a GPU.

    As few as leave room for `graph` more, if that helps: moments cross to the GPU once an inner step, and passes would
    be computed again for every microbatch. None where the stage fits, or would not fit so either. `computing`,
    `beside`: what it takes of both memories with the moments on the GPU. `gpu`, `ram`: what it may take.
    """
    for wanted in (computing + graph, computing):
        lacking = ceil(max(0.0, wanted - gpu))
        if lacking <= min(moments, ram - beside):
            return lacking
    return 0


def free_of_gpu(size_bytes: float) -> float:
    """Return what the driver of a GPU of this size calls free in a process that trains."""
    return max(0.0, size_bytes - _CONTEXT_BYTES)


def gpu_for(needs: float) -> float:
    """Return the size of the GPU of which a stage may take so much; the inverse of the two above."""
    return wanted_bytes(needs) + _CONTEXT_BYTES


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free for the tensors of a device."""
    from pipeline.hardware.device_type import DEVICE_TYPES

    kind = DEVICE_TYPES[device.type]
    of_driver, of_machine = kind.free_bytes(device), machine_free_bytes() if kind.shares_memory else None
    # What torch has taken and keeps for its next tensor is free too.
    return min(each for each in (of_driver, of_machine) if each is not None) + kind.kept_bytes(device)


def machine_free_bytes() -> int:
    """Return the free bytes of main memory: what can still be taken without swapping."""
    left = [within_limit(each) for each in own_groups()]
    return min([int(psutil.virtual_memory().available), *(each for each in left if each is not None)])


def share_arenas() -> None:
    """Have the C library's threads share `ARENAS` stores of memory instead of eight a core, if it is glibc.

    Call it before threads start. A thread keeps the store that it once took, so the memory of a task would in time be
    kept once for each thread of a pool.
    """
    _call_glibc("mallopt", M_ARENA_MAX, ARENAS)


def expand_segments() -> None:
    """Have torch grow its blocks of CUDA memory, which leaves fewer gaps; what the owner has set stays.

    Call it before torch is loaded.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second one is the older
    if not any(name in os.environ for name in names):
        os.environ.update(dict.fromkeys(names, "expandable_segments:True"))


def trim() -> None:
    """Have the C library give back the pages that it keeps free, if it is glibc.

    It keeps for each thread what that thread once needed, in ever smaller pieces: without this a replica grows by some
    megabytes an hour for days.
    """
    _call_glibc("malloc_trim", 0)


def _call_glibc(function: str, *arguments: int) -> None:
    """Call a function of the C library that the program runs on; other libraries than glibc do not have it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        getattr(ctypes.CDLL(None), function)(*arguments)


def own_groups() -> list[Path]:
    """Return the directories of the control groups that this process is in, the outermost first; each has a limit."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = []
    names = [name for line in lines if line.startswith("0::/") for name in line.split("/")[1:]]
    return [CGROUPS.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def within_limit(directory: Path) -> int | None:
    """Return what a control group may still take; None without a limit. Cached files count as free."""
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


class GraphBytes(NamedTuple):
    """What autograd keeps of a microbatch at a stage. `by_layers`: at most, where each layer is computed again."""

    whole: float
    by_layers: float


class SavedTensors:
    """A context in which a pass runs; `bytes` are the most that autograd kept at a time.

    What autograd lets go in mid-pass, as what chose a token's experts, counts no longer. The weights and the pass's
    input are leaves: they are there anyway and do not count. `counts`: which of the other tensors do; all of them where
    it is left out.
    """

    def __init__(self, counts: Callable[[Tensor], bool] = lambda _tensor: True) -> None:
        self._counts = counts
        self._holders, self._now = Counter[int](), 0
        """How many saved tensors share the storage at an address; nothing else can lie there meanwhile."""
        self.bytes = 0

    def __enter__(self) -> None:
        import torch

        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda saved: saved.tensor)
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _keep(self, tensor: Tensor) -> _Saved:
        whole = tensor if tensor._base is None else tensor._base
        counts = not (whole.is_leaf and whole.requires_grad) and self._counts(tensor)
        if counts:
            self._change(tensor, 1)
        # A node's own result leads back to the node: held as it is, it would keep its graph for ever.
        return _Saved(tensor.detach(), self._change if counts else None)

    def _change(self, tensor: Tensor, holders: int) -> None:
        storage = tensor.untyped_storage()
        before = self._holders[storage.data_ptr()]
        self._holders[storage.data_ptr()] += holders
        self._now += storage.nbytes() * (bool(before + holders) - bool(before))
        self.bytes = max(self.bytes, self._now)


class _Saved:
    """A tensor in a graph, which lets this object go where it lets the tensor go."""

    def __init__(self, tensor: Tensor, change: Callable[[Tensor, int], None] | None) -> None:
        self.tensor, self._change = tensor, change

    def __del__(self) -> None:
        if self._change is not None:
            self._change(self.tensor, -1)
