"""Mixed blocks: nothing lost, nothing twice, and resumed exactly anywhere."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from unittest.mock import patch

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


@given(batch=st.integers(1, 5))
def test_no_draw_but_the_first_reads_a_whole_chunk(texts: DataConfig, batch: int) -> None:
    blocks = opened(texts)
    blocks.next_batch(batch)
    with patch.object(blocks._blocks, "next_batch", wraps=blocks._blocks.next_batch) as read:
        for _ in range(40):
            read.reset_mock()
            blocks.next_batch(batch)
            assert sum(call.args[0] for call in read.call_args_list) <= 2 * batch


@settings(max_examples=30)
@given(before=st.integers(0, 35), batch=st.integers(1, 7))
def test_a_read_that_fails_loses_nothing(texts: DataConfig, before: int, batch: int) -> None:
    blocks, plain = opened(texts), opened(texts)
    assert torch.equal(blocks.next_batch(before + 1), plain.next_batch(before + 1))
    with patch.object(blocks._blocks, "next_batch", side_effect=OSError), suppress(OSError):
        blocks.next_batch(1)
        plain.next_batch(1)
    assert blocks.position() == plain.position()
    assert torch.equal(blocks.next_batch(batch), plain.next_batch(batch))


def test_a_position_of_another_order_begins_anew(texts: DataConfig) -> None:
    position = opened(texts).position()
    other = ShuffledBlocks(open_blocks(texts, 16, 4, "me"), 10, lambda number: Random(number))
    assert other.restore(position) is False


@pytest.mark.parametrize("position", [{}, {"chunk": {}, "number": 0}, {"chunk": None, "number": "x", "dealt": 0}])
def test_nonsense_is_no_position(texts: DataConfig, position: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no position"):
        opened(texts).restore(position)
