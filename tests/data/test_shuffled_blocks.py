"""Mixed blocks: nothing lost, nothing twice, and resumed exactly anywhere."""

from contextlib import suppress
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.data.blocks import CHUNK_PARTS, ShuffledBlocks, open_blocks
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


@settings(max_examples=30)
@given(size=st.integers(20, 3000), chunk=st.integers(1, 400), batch=st.integers(1, 7), before=st.integers(0, 60))
def test_a_chunk_ends_with_the_second_pass_over_a_short_text(
    tmp_path_factory: pytest.TempPathFactory, size: int, chunk: int, batch: int, before: int
) -> None:
    """However short the text: a first batch reads little more than two passes, and resumption is exact."""
    path = tmp_path_factory.mktemp("short") / "text.txt"
    path.write_text(("".join(map(str, range(size))))[:size])
    data = DataConfig(source="text", path=str(path), validation_percent=0.0)
    first, whole, part = opened(data, chunk), -(-size // 16), max(1, chunk // CHUNK_PARTS)
    with patch.object(first._blocks, "next_batch", wraps=first._blocks.next_batch) as read:
        first.next_batch(1)
        assert sum(call.args[0] for call in read.call_args_list) <= min(chunk, 2 * whole + part + 1) + 2
    for _ in range(before):
        first.next_batch(batch)
    again = opened(data, chunk)
    assert again.restore(first.position())
    for _ in range(20):
        assert torch.equal(first.next_batch(batch), again.next_batch(batch))


def test_a_place_in_a_chunk_that_was_longer_goes_on_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a short text\n" * 5)
    data = DataConfig(source="text", path=str(tmp_path), validation_percent=0.0)
    blocks = opened(data, 200)
    assert blocks.restore({**blocks.position(), "number": 3, "dealt": 150})
    assert len(blocks.next_batch(2)) == 2
    assert blocks.position()["number"] == 4


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
