"""A coded mean over all: what is sent in all is what was meant in all, whatever the bits and the weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gossip.rounds.matching import dynamic_steps
from research.laboratory.experiments.choices import lacks
from research.laboratory.experiments.grid import at
from research.laboratory.experiments.rivals import heads, rivals, trials
from research.laboratory.experiments.sizes import OURS
from research.laboratory.methods.coded_mean import BLOCK, CodedMean, rounded
from research.laboratory.methods.replicas import Model, mean_of

pytestmark = pytest.mark.usefixtures("one_held_out_batch")

few = settings(max_examples=25)
codecs = st.sampled_from(["float32", "int8", "int4", "int3", "int2"])
CENTRAL = replace(OURS, method="central", replicas=3)


def models(seed: int, count: int) -> list[Model]:
    source = torch.Generator().manual_seed(seed)
    return [[(torch.randn(3, 70, generator=source), torch.randn(5, generator=source))] for _ in range(count)]


@few
@given(st.integers(0, 2**20), codecs, st.integers(1, 12))
def test_what_rounding_leaves_out_is_sent_later(seed: int, codec: str, rounds: int) -> None:
    cell = replace(CENTRAL, codec=codec)
    mean, weights = CodedMean(models(0, 1)[0], cell), [1, 4, 7]
    meant, sent = torch.zeros(3, 70), torch.zeros(3, 70)
    for number in range(rounds):
        brought = models(seed + number, 3)
        shares = [weight / sum(weights) for weight in weights]
        meant += sum((share * model[0][0] for share, model in zip(shares, brought, strict=True)), torch.zeros(()))
        sent += mean.of(brought, weights)[0][0]
    # Two residuals, one on each way, each of a few steps of the code at most.
    steps = {"float32": 1e-5, "int8": 0.1, "int4": 2.0, "int3": 4.0, "int2": 20.0}[codec]
    assert float((meant - sent).abs().max()) < steps


@few
@given(st.integers(0, 2**20), st.sampled_from([2, 3, 4, 8]), st.integers(1, 3 * BLOCK))
def test_a_value_is_off_by_half_a_step_of_its_block(seed: int, bits: int, size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    largest = 2 ** (bits - 1) - 1
    for first in range(0, size, BLOCK):
        block = values[first : first + BLOCK]
        away = (rounded(values, bits)[first : first + BLOCK] - block).abs().max()
        assert float(away) <= float(block.abs().max()) / largest * (0.5 + 2.0**-7 * largest)
    assert not rounded(torch.zeros(size), bits).any()


def test_a_weight_counts_a_model_as_often() -> None:
    one, other = models(2, 2)
    weighed, repeated = mean_of([one, other], [1, 3]), mean_of([one, other, other, other])
    torch.testing.assert_close(weighed[0][0], repeated[0][0])


class TestRivals:
    def test_rivals_have_all_choices_of_gossip(self) -> None:
        cells = {name: cell for name, (cell, _) in heads().items()}
        assert lacks(cells["mean"], cells["gossip_weighed"]) == lacks(cells["diloco"], cells["gossip_weighed"]) == ()
        assert {cell.scale for cell in cells.values()} == {"small"}
        assert {cell.budget for cell in cells.values()} == {cells["gossip"].budget}

    def test_what_is_reported_was_in_no_choice(self) -> None:
        grid = rivals()
        reported = [recipe for recipe in grid.recipes if recipe.name not in trials()]
        for family in grid.families():
            assert {(cell.seed, cell.text) for cell in grid.tuning(family)} == {(0, "library")}
        assert {seed for recipe in reported for seed in grid.seeds_of(recipe)} == {1, 2, 3}
        assert {seed for name in trials() for seed in grid.seeds_of(grid.recipe(name))} == {0}
        assert {recipe.cell.text for recipe in reported} == {"library", "torch"}
        for recipe in reported:
            assert replace(recipe.cell, text="library", replicas=8) == grid.recipe(recipe.family).cell


@pytest.mark.parametrize("name", ["mean", "diloco", "gossip_weighed"])
def test_each_trains_on_both_texts(name: str) -> None:
    from research.laboratory.running import trial

    cell = at(replace(heads()[name][0], replicas=4, steps=12), 1e-2, 1)
    result = trial.run(replace(cell, text="torch" if name == "mean" else "library"))
    assert result.curve[-1].merged < result.curve[0].merged
    assert result.bytes_per_step > 0.0
    if name != "gossip_weighed":
        assert result.spread == pytest.approx(0.0, abs=1e-6)
    # Replicas take steps as suit their speed: 1, 0.77, 0.38 and 0.17 of the fastest's, a tenth of tolerance more.
    shares = [dynamic_steps(speed, [1.0], 100) / 100 for speed in (1.0, 0.768, 0.384, 0.174)]
    taken = [steps / result.steps_taken[0] for steps in result.steps_taken]
    assert taken == pytest.approx(shares, abs=0.25)
    assert sorted(taken, reverse=True) == taken
