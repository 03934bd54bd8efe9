"""The bounds that a run file's decoder holds the section `outer` to."""

from typing import get_args, get_type_hints

import pytest

from gossip.settings import OuterConfig


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [("inner_steps_per_round", 1, 1_000_000), ("staleness_at_most", 1, 1_000_000), ("skips_before_solo", 1, 10_000)],
)
def test_counts_are_positive_and_bounded(field: str, least: int, most: int) -> None:
    assert get_args(get_type_hints(OuterConfig, include_extras=True)[field]) == (int, (least, most))
