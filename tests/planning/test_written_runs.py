"""The run files in docs/scenarios/runs are what `init` plans, and fit the machines that they name."""

import runpy
from pathlib import Path

import pytest
from msgspec import structs

from noloco_node.cli.run_file import MachineOptions
from noloco_node.planning.expectation import planned_values, with_evaluations
from noloco_node.planning.model_layout import model_layout
from noloco_node.planning.search import plan_for
from noloco_node.planning.throughput import fits, gpu_memories
from noloco_node.run.presets import run_text
from noloco_node.run.runfile import decode_run, load_run

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "generate_runs.py"))
RUNS: Path = SCRIPT["RUNS"]


def test_each_run_lies_there() -> None:
    wanted = {f"{preset}-{name}.toml" for preset in SCRIPT["PRESETS"] for name in SCRIPT["CROWDS"]}
    assert {path.name for path in RUNS.iterdir()} == wanted


@pytest.mark.parametrize("path", sorted(RUNS.iterdir()), ids=lambda path: path.stem)
def test_a_run_fits_the_machines_that_it_names_and_keeps_its_preset(path: Path) -> None:
    run, machines = load_run(path), MachineOptions().completed_from(path.read_text("utf-8"), path).machines()
    asked = decode_run(run_text(path.name[:2]), "the preset")
    assert run.pipeline.peers <= machines.count
    assert fits(gpu_memories(run, model_layout(run), machines), machines)
    assert run.budget_samples == pytest.approx(asked.budget_samples, rel=0.01)
    planned = {section: values.keys() for section, values in planned_values(run).items()}
    for section in ("model", "admission"):
        assert getattr(run, section) == getattr(asked, section)
    assert structs.replace(run.data, evaluate_every_rounds=0) == asked.data
    # A run is evaluated about a hundred times, as far as it has rounds.
    assert run == with_evaluations(run)
    assert run.data.evaluate_every_rounds > 0
    for section, names in planned.items():
        kept = set(type(getattr(run, section)).__annotations__) - names
        assert all(getattr(getattr(run, section), name) == getattr(getattr(asked, section), name) for name in kept)


def test_a_run_is_what_is_planned_now() -> None:
    path = RUNS / "1b-24gib-100-20.toml"
    machines = MachineOptions().completed_from(path.read_text("utf-8"), path).machines()
    planned = plan_for(decode_run(run_text("1b"), "the preset"), machines).run
    assert structs.replace(with_evaluations(planned), name="1b") == load_run(path)
