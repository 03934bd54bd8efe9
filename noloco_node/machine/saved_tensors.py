"""Counts the bytes that autograd keeps of a forward pass, tensor by tensor.

That is exact on any device, where the memory in use before and after a pass tells of allocators and of everything else
in the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor


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
