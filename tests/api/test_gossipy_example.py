"""The outer rule in the simulator of another project, where that is installed (the package gossipy-dfl)."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("gossipy.simul", reason="pip install gossipy-dfl")
EXAMPLE = Path(__file__).parents[2] / "examples" / "noloco_in_gossipy.py"


@pytest.mark.filterwarnings("ignore")  # of that project
def test_the_outer_rule_learns_in_anothers_simulator() -> None:
    example = runpy.run_path(str(EXAMPLE))
    learnt = example["simulate"](example["NoLoCoHandler"], 6)
    assert learnt[-1] > 0.5, "a fifth by chance"
