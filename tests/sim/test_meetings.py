"""The two sides of a meeting, compared: what rounding explains is no complaint, and what it does not is one."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gossip.interface import OuterStepTaken
from gossip.settings import Format, OuterConfig
from tests.explorer.meetings import MeetingChecker, MeetingSide

# Just above a power of two bfloat16 rounds most coarsely, beside a value's size.
SNAPSHOT, SLOW = torch.full((256,), 2.0 + 1 / 256), torch.full((256,), 2.0 + 3 / 256)


def side(name: str, partner: str, mean: Tensor) -> MeetingSide:
    record = cast(Any, SimpleNamespace(name=name, stepped_s=deque[float](), began_s=0.0))
    event = OuterStepTaken(round=3, seconds=1.0, partner=partner, gap=0.0)
    return MeetingSide(record, event, mean, slow=SLOW, snapshot=SNAPSHOT, kept=0.0, scale=float(SLOW.max()), at_s=1.0)


def complaints(gamma: float, off: float) -> list[str]:
    """Return what is said of a meeting whose sides have both applied a mean that is so far from their snapshots'."""
    found: list[str] = []
    context = SimpleNamespace(
        outer=OuterConfig(codec=Format.BFLOAT16, gamma=gamma),
        checked=Counter[str](),
        is_spoilt=lambda peer, since_s: False,
        complain=lambda kind, sentence: found.append(f"{kind}: {sentence}"),
    )
    checker = MeetingChecker(cast(Any, context))
    for name, partner in (("a", "b"), ("b", "a")):
        checker.hear(side(name, partner, SNAPSHOT + off))
    assert checker.compared == 1
    return found


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_what_a_mean_may_be_off_is_what_travelled_was_rounded_by(gamma: float) -> None:
    """Each side rounds its fast weights twice, and so it does the slow ones where they travel: with half the weight."""
    rounding = 2 * 2.0**-8 * float(SLOW.max())
    most = rounding + (1.0 - gamma) * rounding
    assert complaints(gamma, 0.99 * most) == []
    assert "a mean of other weights" in complaints(gamma, 1.05 * most)[0]
