"""Wherever a tensor lies and whatever it is of, its bytes are those of its float32 values in order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from noloco_node.storage import atomic_file
from noloco_node.storage.atomic_file import Array, Lazy, bytes_of

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda tensor: tensor,
    "a parameter": torch.nn.Parameter,
    "transposed": lambda tensor: tensor.T,
    "bfloat16": lambda tensor: tensor.bfloat16(),
    "one value": lambda tensor: tensor[0, 0],
    "empty": lambda tensor: tensor[:0],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("at_once", [1, 7, 2**22])
def test_bytes_are_those_of_the_values(
    form: Callable[[Tensor], Tensor], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_file, "AT_ONCE", at_once)
    tensor = form(torch.randn(5, 9, generator=torch.Generator().manual_seed(1)))
    array = Array("any", "F32", tuple(tensor.shape), bytes_of(tensor))
    chunks = list(array.chunks())
    assert b"".join(chunks) == tensor.detach().float().contiguous().numpy().tobytes()
    assert array.size_bytes == sum(map(len, chunks))
    if isinstance(array.data, Lazy):
        assert all(len(chunk) <= 4 * at_once for chunk in chunks)
