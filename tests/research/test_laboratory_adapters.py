"""Adapters in the laboratory: what each side trains, how far products of means are apart, and the page by formula."""

import math
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laboratory_results import result_of
from msgspec.structs import replace
from torch import Tensor

from noloco_node.planning.model_layout import model_layout
from pipeline.stage import Stage
from research.laboratory import adapters as laboratory_adapters
from research.laboratory.experiments.adapter_grid import PLACES, SIDES, TUNED, Side, adapter_cell, adapter_grid
from research.laboratory.experiments.cell import Adapters, Cell, Result
from research.laboratory.experiments.task import run_of
from research.laboratory.methods.adapters import (
    A,
    AlternatingStage,
    B,
    adapted_stages,
    base_cell,
    loss_of_base,
    named,
    product_error,
    trained_base,
)
from research.laboratory.output.adapter_tables import COMPARISONS, differs, sent, student, trained
from research.laboratory.output.map_tables import Difference
from research.laboratory.running import trial
from research.laboratory.running.store import Store

pytestmark = pytest.mark.usefixtures("one_held_out_batch")

LEVELS: dict[Side, float] = {
    "mean": 2.4,
    "ffa": 2.5,
    "ffa_wide": 2.4,
    "alternating": 2.35,
    "synchronous": 2.3,
    "one": 2.5,
    "one_all": 2.3,
}
seeds = st.integers(0, 2**20)


def cell(side: Side, steps: int = 8) -> Cell:
    whole = adapter_cell(side, PLACES[0])
    assert whole.adapters is not None
    brief = replace(whole.adapters, base_text="prose", base_steps=3)
    return replace(whole, steps=steps, learning_rate=2e-2, seed=1, adapters=brief)


def opened(side: Side) -> Stage:
    run = run_of(cell(side))
    (stage,) = adapted_stages(cell(side), run, model_layout(run))
    return stage


@cache
def ran(side: Side) -> Result:
    return trial.run(cell(side))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestProducts:
    @given(seeds)
    def test_of_a_pair_the_error_is_a_quarter_of_the_differences_product(self, seed: int) -> None:
        a, b = drawn(seed, 2, 3, 7), drawn(seed + 1, 2, 5, 3)
        replicas = [{f"layer{A}": a[number], f"layer{B}": b[number]} for number in range(2)]
        mean = (b[0] @ a[0] + b[1] @ a[1]) / 2
        expected = ((b[0] - b[1]) @ (a[0] - a[1])).norm() / 4 / mean.norm()
        assert product_error(replicas) == pytest.approx(float(expected))

    @given(seeds, st.integers(1, 4))
    def test_with_one_a_there_is_no_error(self, seed: int, count: int) -> None:
        a, b = drawn(seed, 3, 7), drawn(seed + 1, count, 5, 3)
        replicas = [{f"layer{A}": a, f"layer{B}": b[number]} for number in range(count)]
        assert product_error(replicas) < 1e-12
        assert product_error([{f"layer{B}": b[number]} for number in range(count)]) == 0.0


class TestStages:
    def test_matrices_take_turns(self) -> None:
        stage = opened("alternating")
        assert isinstance(stage, AlternatingStage)
        ids = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
        for done, moving in ((0, B), (1, A), (1, A), (2, B)):
            stage.round, before = done, named(stage)
            moments = [moment.clone() for moment in stage.optimiser_state().moments]
            stage.loss(ids[:, :-1], ids[:, 1:])
            stage.step(1e-2, 1)
            moved = {name for name, weight in named(stage).items() if not torch.equal(weight, before[name])}
            assert moved == {name for name in stage.names if name.endswith(moving)}
            after = stage.optimiser_state().moments
            kept = [torch.equal(old, new) for old, new in zip(moments, after, strict=True)]
            assert kept == [not name.endswith(moving) for name in (*stage.names, *stage.names)]

    def test_all_sides_have_the_base_of_the_seed_and_untrained_adapters_do_not_change_it(self) -> None:
        bases = {base_cell(cell(side)) for side in SIDES}
        assert len(bases) == 1
        ids = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
        whole = trained_base(bases.pop()).infer(ids)
        for side in SIDES:
            assert torch.allclose(opened(side).infer(ids), whole, atol=1e-5)

    def test_ffa_trains_every_b_and_nothing_else(self) -> None:
        names = opened("mean").names
        assert opened("ffa").names == tuple(name for name in names if name.endswith(B))
        assert {name[-len(A) :] for name in names} == {A, B}
        assert trained(cell("ffa_wide")) == 2 * trained(cell("ffa"))
        assert trained(cell("ffa_wide")) == pytest.approx(trained(cell("mean")), rel=0.1)


class TestRuns:
    @pytest.mark.parametrize("side", ["mean", "ffa", "alternating", "synchronous"])
    def test_adapters_learn(self, side: Side) -> None:
        result = ran(side)
        assert result.merged < result.notes["before"] == loss_of_base(cell(side))
        assert len(result.curve) == 1
        # A step under way as the budget ends is taken.
        assert cell(side).budget <= sum(result.steps_taken) < cell(side).budget + cell(side).replicas

    def test_a_run_is_the_same_again(self) -> None:
        assert trial.run(cell("alternating")).held_out == ran("alternating").held_out

    def test_products_are_apart_where_replicas_differ_in_both_matrices(self) -> None:
        errors = {side: ran(side).notes["mean_of_products"] for side in ("mean", "ffa", "synchronous")}
        assert errors["ffa"] == errors["synchronous"] == 0.0
        assert 0.0 < errors["mean"] < 0.2

    def test_a_meeting_sends_half_a_byte_a_weight(self) -> None:
        for side in ("mean", "ffa"):
            result = ran(side)
            # What was under way when a meeting ended counts too.
            assert sent(result) / result.rounds == pytest.approx(trained(result.cell) / 2, rel=0.5)


class TestIntervals:
    @pytest.mark.parametrize(("free", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262)])
    def test_the_quantiles_are_those_of_tables(self, free: int, expected: float) -> None:
        assert student(0.05, free) == pytest.approx(expected, abs=1e-3)

    @settings(max_examples=30)
    @given(st.floats(1e-4, 0.5), st.floats(1.01, 10.0), st.integers(1, 60))
    def test_a_smaller_share_and_fewer_seeds_make_it_wider(self, share: float, factor: float, free: int) -> None:
        assert student(share / factor, free) > student(share, free) > student(share, free + 1)

    @given(st.floats(-1.0, 1.0), st.floats(1e-4, 1.0), st.integers(2, 4))
    def test_a_difference_counts_beyond_its_corrected_interval(self, nats: float, error: float, seeds: int) -> None:
        assert differs(Difference(nats, error, seeds)) is None
        assert differs(Difference(nats, error, 5)) == (abs(nats) > error * student(0.05 / COMPARISONS, 4))
        assert differs(Difference(math.nan, error, 5)) is differs(None) is None


def outcome(side: Side, cell: Cell) -> Result:
    """A result by formula: the side decides, seed and text by a little."""
    noise = Random(cell.key)
    level = LEVELS[side] + 0.1 * abs(math.log(cell.learning_rate / 4e-2))
    parts = tuple(level + Random(part).gauss(0.0, 0.2) + noise.gauss(0.0, 0.002) for part in range(32))
    notes = {"before": 3.0, "mean_of_products": 0.01}
    return result_of(cell, sum(parts) / len(parts), single=level, notes=notes, held_out=parts)


def side_of(name: str) -> Side:
    return next(side for side in sorted(SIDES, key=len, reverse=True) if name.startswith(side))


def test_the_page_says_what_is_decided(tmp_path: Path) -> None:
    store, grid = Store(tmp_path / "adapters.jsonl"), adapter_grid(5)
    while due := grid.due(store):
        for run in due:
            store.add(outcome(side_of(run.name), run.cell))
    assert laboratory_adapters.main(["--tables", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "adapters.md").read_text()
    assert f"*{SIDES['ffa']}*: worse." in text
    assert f"*{SIDES['ffa_wide']}*: open." in text
    assert f"*{SIDES['alternating']}*: better." in text
    assert f"Clearly better on both texts: {SIDES['alternating']}." in text
    assert text.count("Without adapters the bases have 3.000 nats here.") == len(PLACES)
    assert "Not run" not in text


def test_what_is_tuned_is_not_reported() -> None:
    grid = adapter_grid(5)
    tuned = [run for family in grid.families() for run in grid.tuning(family)]
    assert {(one.seed, one.text) for one in tuned} == {(0, TUNED.text)}
    for recipe in grid.recipes:
        reported = grid.seeds_of(recipe)
        assert not reported or (0 not in reported and recipe.cell.text != TUNED.text)
        assert isinstance(recipe.cell.adapters, Adapters)
    assert {len(grid.tuning(family)) for family in grid.families()} == {4}
