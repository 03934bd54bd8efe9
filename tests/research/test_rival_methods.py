"""What defines each rival of others: where it is told to leave its own idea out, it is a method that is known."""

from collections.abc import Iterator
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gossip.rule.outer_step import Tensors
from research.laboratory.experiments import task
from research.laboratory.experiments.cell import Cell, Result, Rule
from research.laboratory.experiments.choices import lacks
from research.laboratory.experiments.grid import at
from research.laboratory.experiments.rivals import CHOSEN, heads, settings_of, trials
from research.laboratory.experiments.sizes import DILOCO
from research.laboratory.methods.coded_mean import CodedMean
from research.laboratory.methods.fragments import fragments, parts
from research.laboratory.methods.near_code import toward
from research.laboratory.methods.random_peers import accelerated, proposed, pushed
from research.laboratory.methods.replicas import Model
from research.laboratory.methods.server_rules import Server, ServerState, nesterov
from research.laboratory.methods.sparse_mean import CHUNK, DECAY, SparseMean, kept, largest
from research.laboratory.methods.synchronous import groups
from research.laboratory.running import trial
from research.theory.pair_step import pseudo_gradient

pytestmark = pytest.mark.usefixtures("one_held_out_batch", "smaller")

few = settings(max_examples=25)
seeds = st.integers(0, 2**20)
CELL = replace(at(heads()["mean"][0], 1e-2, 1), replicas=4, steps=10, inner_steps=3, late_inner_steps=None)


@pytest.fixture(scope="module")
def smaller() -> Iterator[None]:
    """Shrink the model of the small scale."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "SMALL", task.SMALL._replace(width=16, layers=1, intermediate=32, sequence_length=32))
        yield


def tensors(seed: int) -> Tensors:
    source = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=source) for shape in ((3, 70), (5,)))


def models(seed: int, count: int) -> list[Model]:
    return [[tensors(seed + 1000 * number)] for number in range(count)]


@cache
def ran(cell: Cell) -> Result:
    return trial.run(cell)


def assert_same_run(one: Cell, other: Cell) -> None:
    """Floating point apart, two cells do the same."""
    mine, theirs = ran(one), ran(other)
    assert mine.steps_taken == theirs.steps_taken
    assert mine.curve[0].merged > mine.merged
    assert [point.merged for point in mine.curve] == pytest.approx([point.merged for point in theirs.curve], abs=1e-3)
    assert mine.bytes_per_step == pytest.approx(theirs.bytes_per_step)
    assert mine.rounds == pytest.approx(theirs.rounds)


class TestStreaming:
    @pytest.mark.parametrize("rule", [Rule(), DILOCO])
    def test_one_fragment_without_overlap_is_diloco(self, rule: Rule) -> None:
        central = replace(CELL, rule=rule)
        assert_same_run(replace(central, method="streaming"), central)
        assert ran(replace(central, method="streaming")).virtual_s == pytest.approx(ran(central).virtual_s)

    @few
    @given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
    def test_every_parameter_is_in_one_fragment(self, sizes: list[int], count: int) -> None:
        found = fragments(sizes, count)
        assert [number for piece in found for number in piece] == list(range(len(sizes)))
        assert all(found)
        for piece in found:
            assert sum(sizes[number] for number in piece) <= sum(sizes) / count + 2 * max(sizes)

    @given(st.integers(0, 99), st.integers(1, 9))
    def test_steps_are_divided(self, steps: int, count: int) -> None:
        divided = parts(steps, count)
        assert sum(divided) == steps
        assert max(divided) - min(divided) <= 1


class TestShards:
    def test_one_shard_is_gossip_in_pairs(self) -> None:
        exact = replace(CELL, codec="float32", weighed=True)
        assert_same_run(replace(exact, method="shards"), replace(exact, method="pairs"))


class TestEpidemic:
    def test_to_push_to_all_is_a_mean_over_all(self) -> None:
        exact = replace(CELL, codec="float32", weighed=True)
        pushed_to_all, mean = (ran(replace(exact, method="epidemic", pushes=3)), ran(exact))
        assert pushed_to_all.merged == pytest.approx(mean.merged, abs=1e-3)
        assert pushed_to_all.spread < 1e-4
        assert pushed_to_all.rounds == mean.rounds

    @given(seeds, st.integers(2, 9), st.data())
    def test_everybody_pushes_to_as_many_others(self, seed: int, replicas: int, data: st.DataObject) -> None:
        pushes = data.draw(st.integers(1, replicas - 1))
        came = pushed(Random(seed), replicas, pushes)
        assert sum(map(len, came)) == replicas * pushes
        assert all(len(set(senders) - {own}) == len(senders) for own, senders in enumerate(came))


class TestGasloc:
    def test_without_momentum_it_is_gossip_in_pairs(self) -> None:
        exact = replace(CELL, codec="float32", rule=Rule())
        assert_same_run(replace(exact, method="gasloc"), replace(exact, method="pairs"))

    @few
    @given(seeds, st.floats(0.0, 0.9), st.floats(0.1, 1.0))
    def test_the_mean_of_all_takes_nesterovs_steps_whoever_meets(self, seed: int, momentum: float, rate: float) -> None:
        rule, order = Rule(alpha=momentum, beta=rate), Random(seed)
        (start,) = models(seed, 1)[0]
        server, starts = ServerState(start, tuple(map(torch.zeros_like, start))), [start] * 4
        before = starts
        for number in range(4):
            arrived = [
                tuple(map(torch.add, own, moved)) for own, (moved,) in zip(starts, models(number, 4), strict=True)
            ]
            gradients = [pseudo_gradient(own, end) for own, end in zip(starts, arrived, strict=True)]
            mean = tuple(torch.stack(every).mean(0) for every in zip(*gradients, strict=True))
            server = nesterov(server, mean, Server(rate=rate, momentum=momentum))
            after = [proposed(own, end, rule) for own, end in zip(starts, arrived, strict=True)]
            starts = list(starts)
            for pair in groups(order, 4, 2):
                for own, other in (pair, pair[::-1]):
                    middle = toward(after[own], [after[other]], [0.5], "float32")
                    starts[own] = accelerated(middle, after[own], before[own], rule)
            before = after
        for every, expected in zip(zip(*starts, strict=True), server.weights, strict=True):
            torch.testing.assert_close(torch.stack(every).mean(0), expected, rtol=1e-3, atol=1e-3)


class TestSparse:
    @few
    @given(seeds, st.lists(st.integers(1, 9), min_size=3, max_size=3))
    def test_all_values_exactly_are_the_mean(self, seed: int, weights: list[int]) -> None:
        exact = replace(CELL, replicas=3, codec="float32")
        (like,) = models(0, 1)
        sparse, whole = SparseMean(like, exact), CodedMean(like, exact)
        for number in range(3):
            brought = models(seed + number, 3)
            for mine, theirs in zip(sparse.of(brought, weights)[0], whole.of(brought, weights)[0], strict=True):
                torch.testing.assert_close(mine, theirs)

    @few
    @given(seeds, st.sampled_from(["float32", "int4", "int2"]), st.floats(0.05, 1.0))
    def test_what_is_not_sent_is_owed_and_fades(self, seed: int, codec: str, density: float) -> None:
        cell = replace(CELL, replicas=1, codec=codec, density=density)
        brought, sparse = models(seed, 3), SparseMean(models(0, 1)[0], cell)
        owed = [torch.zeros_like(tensor) for tensor in tensors(0)]
        for (model,) in brought:
            came = sparse.of([[model]])[0]
            owed = [DECAY * rest + new - sent for rest, new, sent in zip(owed, model, came, strict=True)]
        for rest, own in zip(owed, sparse._owed[0][0], strict=True):
            torch.testing.assert_close(rest, own, rtol=1e-4, atol=1e-5)

    @few
    @given(seeds, st.integers(1, 2 * CHUNK), st.floats(0.001, 1.0))
    def test_the_largest_of_each_chunk_are_sent(self, seed: int, size: int, density: float) -> None:
        values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        sent = largest(values, density, 32)
        for given_, taken in zip(values.split(CHUNK), sent.split(CHUNK), strict=True):
            chosen = taken != 0
            assert int(chosen.sum()) == kept(len(given_), density)
            assert torch.equal(taken[chosen], given_[chosen])
            if not chosen.all():
                assert float(given_[chosen].abs().min()) >= float(given_[~chosen].abs().max())


class TestNearCode:
    @few
    @given(seeds, st.sampled_from(["float32", "int4", "int3", "int2"]))
    def test_a_meeting_leaves_the_mean_of_both(self, seed: int, codec: str) -> None:
        one, other = tensors(seed), tensors(seed + 1)
        met = [toward(one, [other], [0.5], codec), toward(other, [one], [0.5], codec)]
        for before, after in zip(zip(one, other, strict=True), zip(*met, strict=True), strict=True):
            torch.testing.assert_close(sum(after), sum(before), rtol=1e-4, atol=1e-4)


class TestChoices:
    def test_every_rival_of_others_had_as_many_settings_and_what_gossip_has(self) -> None:
        own = heads()["gossip_weighed"][0]
        assert {len(settings_of(name)) for name in CHOSEN} == {3}
        for name, (cell, _) in trials().items():
            # A round every step cannot grow, nor can steps be fewer for the slow.
            often = {"growing rounds"} if cell.inner_steps == 1 else set()
            assert set(lacks(cell, own)) == often, name
            assert cell.scale == "small"


@pytest.mark.parametrize("name", CHOSEN)
def test_each_trains(name: str) -> None:
    result = ran(replace(at(heads()[name][0], 1e-2, 1), replicas=4, steps=12))
    assert result.curve[-1].merged < result.curve[0].merged
    assert result.bytes_per_step > 0.0
    assert result.rounds > 0.0
