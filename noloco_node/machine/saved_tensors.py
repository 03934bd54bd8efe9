"""Counts the bytes that autograd keeps of a forward pass, tensor by tensor.

That is exact on any device, where the memory in use before and after a pass tells of allocators and of everything else
in the process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class SavedTensors:
    """A context in which a forward pass runs; `sizes` are the bytes of each kept storage, by its address.

    The weights and the pass's input are leaves: they are there anyway and do not count. `counts`: which of the other
    tensors do; all of them where it is left out.
    """

    def __init__(self, counts: Callable[[Tensor], bool] = lambda _tensor: True) -> None:
        self._counts, self.sizes = counts, dict[int, int]()
        self._kept: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Of all that was kept."""
        return sum(self.sizes.values())

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _note(self, tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base
        if not (whole.is_leaf and whole.requires_grad) and self._counts(tensor):
            storage = tensor.untyped_storage()
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor
