"""What a tampered stage says instead of what it has computed."""

from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from benchmarks.robustness.attacks import HOLDS_AFTER_S, ROWS, absent, outcome
from tests.explorer.attacks import TamperedStage


class Middle:
    """A stage that doubles, as far as it is used here."""

    class Pass:
        def __init__(self, hidden: Tensor) -> None:
            self.output = 2.0 * hidden

        def backward(self, gradient: Tensor) -> Tensor | None:
            return 2.0 * gradient

    def forward(self, hidden: Tensor, _: Tensor | None = None, /) -> Pass:
        return self.Pass(hidden)


def test_a_stage_in_the_middle_returns_what_the_attack_makes_of_its_gradient() -> None:
    middle: Any = Middle()
    ones = torch.ones(3)
    passed = TamperedStage(middle, gradient=torch.neg).forward(ones)
    assert torch.equal(passed.output, 2.0 * ones)
    returned = passed.backward(ones)
    assert returned is not None
    assert torch.equal(returned, -2.0 * ones)
    honest = TamperedStage(middle, output=torch.neg).forward(ones)
    assert torch.equal(honest.output, -2.0 * ones)
    assert torch.equal(honest.backward(ones), 2.0 * ones)


def test_one_that_holds_microbatches_before_it_refuses_them_costs_little_more_than_its_absence() -> None:
    """Beside that only what it held at first: until a refusal has come nobody knows."""
    row = next(row for row in ROWS if row.name == "holds-5")
    played = structs.replace(row.scenario, swarm=structs.replace(row.scenario.swarm, rounds=12))
    gone = outcome(absent(row._replace(scenario=played)), row.hostile)
    held = outcome(played, row.hostile, row.begin)
    assert HOLDS_AFTER_S < held.seconds < 1.1 * gone.seconds + 5.0
