"""A state is cut into pieces that fit together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from state_copies import SHAPES, drawn

from gossip.exchange.messages import Parts, Section
from gossip.transfer.chunks import LEAST_PIECE_BYTES, MOST_PIECE_BYTES, cut, gather, piece_bytes, scatter, sections

sizes = st.lists(st.integers(0, 40_000).map(lambda count: 4 * count), max_size=30)


@given(sizes)
def test_pieces_cover_every_byte_once_and_in_order(tensor_bytes: list[int]) -> None:
    spans = cut(tensor_bytes)
    covered = [(part.tensor, at) for span in spans for part in span.parts for at in (part.start, part.stop)]
    expected = 0
    for tensor, size in enumerate(tensor_bytes):
        mine = [at for number, at in covered if number == tensor]
        assert mine[0] == 0
        assert mine[-1] == size
        assert mine[1:-1:2] == mine[2:-1:2]
        expected += size
    assert sum(span.size_bytes for span in spans) == expected
    assert covered == sorted(covered)


@given(sizes)
def test_pieces_are_bounded_and_no_piece_holds_parts_of_two_tensors(tensor_bytes: list[int]) -> None:
    limit = piece_bytes(sum(tensor_bytes))
    spans = cut(tensor_bytes)
    for span in spans:
        assert span.size_bytes <= limit
        assert span.size_bytes % 4 == 0
        if len(span.parts) > 1:
            assert all((part.start, part.stop) == (0, tensor_bytes[part.tensor]) for part in span.parts)
    # A tensor is one unit's, and units follow each other.
    units = {part.tensor: {s.unit for s in spans if part in s.parts} for span in spans for part in span.parts}
    assert all(len(found) == 1 for found in units.values())
    assert list(dict.fromkeys(span.unit for span in spans)) == list(range(spans[-1].unit + 1))
    for unit in range(spans[-1].unit + 1):
        of_unit = [span for span in spans if span.unit == unit]
        assert len(of_unit) == 1 or len({part.tensor for span in of_unit for part in span.parts}) == 1


@given(st.integers(0, 2**40))
def test_the_size_of_a_piece_is_bounded_and_a_power_of_two(section_bytes: int) -> None:
    size = piece_bytes(section_bytes)
    assert LEAST_PIECE_BYTES <= size <= MOST_PIECE_BYTES
    assert size & (size - 1) == 0


@given(st.integers(0, 1000))
def test_what_is_gathered_and_scattered_is_what_was_there(seed: int) -> None:
    tensors, copies = drawn(seed), tuple(torch.zeros(shape) for shape in SHAPES)
    for span in cut([tensor.nbytes for tensor in tensors]):
        data = gather(tensors, span)
        assert data.nbytes == span.size_bytes
        scatter(data, copies, span)
    assert all(map(torch.equal, tensors, copies))


def test_who_asks_for_less_gets_less() -> None:
    assert sections(Parts.OUTLINE, momentum=True, meetings=2, optimiser=True) == ()
    assert sections(Parts.SLOW, momentum=True, meetings=2, optimiser=True) == (Section.SLOW,)
    assert sections(Parts.ALL, momentum=True, meetings=2, optimiser=True) == tuple(Section)
    assert sections(Parts.ALL, momentum=True, meetings=0, optimiser=False) == (Section.SLOW, Section.MOMENTUM)


@pytest.mark.parametrize(
    ("section_bytes", "most"), [(0, 4096), (131_071, 4096), (131_072, 8192), (2**26 - 1, 2**21), (2**40, 2**22)]
)
def test_peers_of_all_versions_cut_alike(section_bytes: int, most: int) -> None:
    """No message says how a section is cut: both ends know it."""
    assert piece_bytes(section_bytes) == most
