"""Mixed blocks: nothing lost, nothing twice, and resumed exactly anywhere."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.data.blocks import ShuffledBlocks, open_blocks
from noloco_node.run.config import DataConfig


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    directory = tmp_path_factory.mktemp("texts")
    for number in range(12):
        (directory / f"{number}.txt").write_text(f"{number:02d} " * 40)
    return DataConfig(source="text", path=str(directory), validation_percent=0.0)


def opened(data: DataConfig, chunk: int = 10) -> ShuffledBlocks:
    return ShuffledBlocks(open_blocks(data, 16, 3, "me"), chunk, lambda number: Random(f"order {number}"))


def test_a_chunk_is_dealt_whole_and_in_another_order(texts: DataConfig) -> None:
    plain = open_blocks(texts, 16, 3, "me").next_batch(20)
    dealt = opened(texts).next_batch(20)
    for chunk in (slice(0, 10), slice(10, 20)):
        assert sorted(map(tuple, plain[chunk].tolist())) == sorted(map(tuple, dealt[chunk].tolist()))
    assert not torch.equal(plain, dealt)


@settings(max_examples=30)
@given(before=st.integers(0, 35), batch=st.integers(1, 7))
def test_resumption_is_exact_anywhere(texts: DataConfig, before: int, batch: int) -> None:
    first = opened(texts)
    for _ in range(before):
        first.next_batch(1)
    again = opened(texts)
    assert again.restore(first.position())
    for _ in range(5):
        assert torch.equal(first.next_batch(batch), again.next_batch(batch))


def test_a_position_of_another_order_begins_anew(texts: DataConfig) -> None:
    position = opened(texts).position()
    other = ShuffledBlocks(open_blocks(texts, 16, 4, "me"), 10, lambda number: Random(number))
    assert other.restore(position) is False


@pytest.mark.parametrize("position", [{}, {"chunk": {}, "number": 0}, {"chunk": None, "number": "x", "dealt": 0}])
def test_nonsense_is_no_position(texts: DataConfig, position: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no position"):
        opened(texts).restore(position)
