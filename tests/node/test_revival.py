"""Who is asked for a snapshot once some were worth nothing."""

import math

import pytest

from noloco_node.node.join import untried
from noloco_node.state_sync.starting_state import NONE_FAILED, FailedSnapshots, SnapshotTrial

GUESS = math.log(32)


@pytest.mark.parametrize(
    ("tried", "saved_round", "expected"),
    [
        ({}, None, ("a", "b")),
        ({"a": 9.0}, None, ("b",)),
        ({"a": 9.0, "b": GUESS - 0.1}, None, ("b",)),
        ({"a": 9.0, "b": GUESS - 0.1}, 3, ()),
        ({"a": 9.0, "b": GUESS + 0.1}, None, ()),
        ({"a": 9.0, "b": 8.0, "gone": GUESS - 0.1}, None, ()),
        ({"a": math.inf}, None, ("b",)),
    ],
)
def test_the_best_of_those_that_failed_is_taken_where_it_knows_more_than_a_guess(
    tried: dict[str, float], saved_round: int | None, expected: tuple[str, ...]
) -> None:
    assert untried(FailedSnapshots(tried), ("a", "b"), saved_round, 32) == expected


def test_all_are_compared_with_what_others_lost_before_the_first_of_them() -> None:
    failed = NONE_FAILED.with_one(SnapshotTrial("a", (3.0, 3.1)), 9.0).with_one(SnapshotTrial("b", (9.0,)), 8.0)
    assert failed == FailedSnapshots({"a": 9.0, "b": 8.0}, (3.0, 3.1))
