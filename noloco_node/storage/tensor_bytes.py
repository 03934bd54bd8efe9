"""The bytes of tensors as they go to a disk: float32, little endian, some MiB at a time wherever the tensor lies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noloco_node.storage.tensor_file import Lazy

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = 2**22
"""Values that are copied at once from a tensor that is no float32 in main memory."""


def bytes_of(tensor: Tensor) -> memoryview | Lazy:
    """Return a tensor's bytes: its memory itself if these are its bytes, else what copies them when they are read."""
    import torch

    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.dtype is torch.float32 and tensor.is_contiguous():
        return _view(tensor.reshape(-1))
    return Lazy(4 * tensor.numel(), lambda: _copied(tensor))


def _copied(tensor: Tensor) -> Iterator[memoryview]:
    import torch

    for part in torch.split(tensor.reshape(-1), AT_ONCE):
        yield _view(part.to("cpu", torch.float32))


def _view(flat: Tensor) -> memoryview:
    import torch

    view: Any = flat.view(torch.uint8).numpy()
    return memoryview(view)
