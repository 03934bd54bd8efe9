"""Optimisers inside replicas: what Muon steps, and the page that holds others against AdamW."""

from pathlib import Path
from random import Random

import pytest
import torch
from laboratory_results import result_of
from msgspec.structs import replace

from noloco_node.planning.model_layout import model_layout
from research.laboratory import optimisers
from research.laboratory.experiments.cell import Cell
from research.laboratory.experiments.optimiser_grid import METHODS, OPTIMISERS, TEXTS, optimiser_grid
from research.laboratory.experiments.task import Text, open_stages, run_of
from research.laboratory.methods.muon import OUTSIDE, MuonStage
from research.laboratory.running import trial
from research.laboratory.running.store import Store

CELL = Cell(method="parallel", replicas=1, steps=10, learning_rate=1e-2, seed=1, scale="tiny", optimiser="muon")


def test_muon_steps_the_matrices_inside_layers_and_adamw_all_else() -> None:
    run = run_of(CELL)
    plan = model_layout(run)
    (plain,), other = open_stages(run, plan), MuonStage(run, plan)
    before = other.weights()
    batch = Text(run, 0).draw()
    for stage in (plain, other):
        stage.loss(*batch)
        stage.step(1e-2, 1)
    for name, start, by_adamw, by_muon in zip(other.names, before, plain.weights(), other.weights(), strict=True):
        inside = start.ndim == 2 and not any(part in name for part in OUTSIDE)
        assert torch.equal(by_adamw, by_muon) is not inside, name
        if inside:
            taken = (by_muon - start).square().mean().sqrt() / 1e-2
            assert 0.1 < taken < 0.4, "a step of Muon is as large as AdamW's commonly are"


def test_a_run_scores_all_held_out_text_whatever_its_optimiser() -> None:
    for optimiser in OPTIMISERS:
        result = trial.run(replace(CELL, optimiser=optimiser))
        assert result.merged == pytest.approx(sum(result.held_out) / len(result.held_out))


def outcome(method: str, cell: Cell) -> float:
    """A loss by formula: the rate 0.01 is the best, Muon brings 0.1 to both, and 0.02 more to gossip."""
    gossip, by_muon = method == "gossip_weighed", cell.optimiser == "muon"
    level = 2.0 + 0.1 * gossip - 0.1 * by_muon - 0.02 * (gossip and by_muon) + (cell.learning_rate != 1e-2)
    return level + Random(cell.seed).gauss(0.0, 0.01)


def test_the_page_compares_with_adamw_and_with_the_mean_at_rates_chosen_on_another_seed(tmp_path: Path) -> None:
    store, grid = Store(tmp_path / "optimisers.jsonl"), optimiser_grid(5)
    while due := grid.due(store):
        for run in due:
            method = next(method for method in METHODS if run.name.startswith(method))
            store.add(result_of(run.cell, outcome(method, run.cell)))
    assert optimisers.main(["--tables", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "optimisers.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| asynchronous gossip | Muon ")]
    assert len(rows) == len(TEXTS)
    for row in rows:
        assert "| 0.01 |" in " ".join(row.split())
        assert "-0.1200 ± 0.0000" in row
        assert "+0.0800 ± 0.0000" in row
