"""Which two sides the watcher of random schedules takes for one meeting."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gossip.events import OuterStepTaken
from noloco_node.run.config import OuterConfig
from noloco_node.sim.explore.meetings import MeetingChecker, MeetingSide


def side(name: str, partner: str, mean: float, at_s: float) -> MeetingSide:
    """A side that met at a gap of nothing: the slow weights of both were alike."""
    record: Any = SimpleNamespace(name=name, stepped_s=[at_s - 2.0, at_s - 1.0], began_s=0.0)
    event = OuterStepTaken(round=3, seconds=0.1, partner=partner, gap=0.0)
    slow, applied = torch.zeros(4), torch.full((4,), mean)
    return MeetingSide(record, event, applied, slow=slow, snapshot=applied, scale=1.0, at_s=at_s)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_side_whose_partner_counts_in_part_still_belongs_to_the_meeting(clipped: bool) -> None:
    lives: dict[tuple[str, int], Any] = {}
    context: Any = SimpleNamespace(
        outer=OuterConfig(), checked=Counter[str](), lives=lives, is_spoilt=lambda peer, since_s: False
    )
    said: list[str] = []
    context.complain = lambda kind, sentence: said.append(sentence)
    checker = MeetingChecker(cast(Any, context))
    one, other = side("a", "b", 1.0, 10.0), side("b", "a", 1.5, 10.2)
    other.clipped = clipped
    checker.hear(one)
    checker.hear(other)
    checker.end()
    # Without that excuse means that differ are of two meetings, each of which lacks a side.
    assert len(said) == (0 if clipped else 2)
