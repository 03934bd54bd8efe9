"""What a peer says about us is said to a person as it is meant: to us, in one line, without ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.admission import admission_state
from noloco_node.admission.refusals import addressed, told


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (admission_state.NO_TICKET, "you have shown no ticket"),
        (admission_state.EXPIRED, "your ticket has expired"),
        (admission_state.SHUT_OUT, "the owner of the run has shut you out"),
        (admission_state.FOREIGN, "your ticket is not one of this run's owner"),
        ("its ticket does not let it train", "your ticket does not let you train"),
    ],
)
def test_a_refusal_is_said_to_us(refusal: str, said: str) -> None:
    assert addressed(refusal) == said
    assert addressed(said) == said
    assert told([refusal, refusal]) == f"the bootstrap peer says: {said}"


@given(st.text())
def test_whatever_a_stranger_says_is_one_short_line_that_moves_no_cursor(text: str) -> None:
    assert addressed(text).isprintable()
    assert len(addressed(text)) <= 1000
