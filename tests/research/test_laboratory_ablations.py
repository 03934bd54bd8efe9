"""What the laboratory changes in a method: its laws, and every change for a few steps of a tiny model."""

import asyncio
import math
from functools import cache
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gossip.exchange.swap import MARGIN, common_steps
from gossip.rule.outer_step import Outer, OuterState
from gossip.settings import Format, absolute, wire_bytes
from noloco_node.planning.model_layout import model_layout
from noloco_node.sim import clock
from research.codec import coding_seconds, margins
from research.laboratory.experiments.cell import Cell, Result, Scale
from research.laboratory.experiments.grid import at
from research.laboratory.experiments.hardware_model import PARAMETERS, merge_bytes
from research.laboratory.experiments.recipes import everything, smoke
from research.laboratory.experiments.sizes import OURS
from research.laboratory.experiments.task import open_stages, run_of
from research.laboratory.methods import synchronous
from research.laboratory.methods.final_rounds import Still, meet, plain_mean
from research.laboratory.methods.lagging_roster import Crowd
from research.laboratory.methods.server_rules import Server, ServerState, nesterov
from research.laboratory.methods.virtual_trainee import Device
from research.laboratory.running import trial
from research.theory.pair_step import outer_step

seeds = st.integers(0, 2**20)
few = settings(max_examples=25)
CHANGES = {recipe.name: recipe.beside for recipe in everything().recipes if recipe.beside}


def tensors(seed: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=source) for shape in ((3, 2), (5,)))


class TestLaws:
    @few
    @given(seeds, st.floats(0.0, 0.9), st.floats(0.1, 1.5))
    def test_looking_ahead_with_everybody_is_the_servers_nesterov(self, seed: int, alpha: float, beta: float) -> None:
        slow, momentum, fast = tensors(seed), tensors(seed + 1), tensors(seed + 2)
        before = OuterState(slow, tuple(beta * m for m in momentum))
        after = synchronous.ahead(before, outer_step(before, fast, slow, Outer(alpha, beta, beta)), alpha)
        g = tuple(phi - theta for phi, theta in zip(slow, fast, strict=True))
        there = nesterov(ServerState(slow, momentum), g, Server(rate=beta, momentum=alpha))
        for mine, theirs in zip(after.slow, there.weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(after.momentum, there.momentum, strict=True):
            torch.testing.assert_close(mine, beta * theirs, rtol=1e-4, atol=1e-5)

    @few
    @given(
        st.sampled_from([0.0, 3.0, 30.0]),
        st.lists(st.tuples(st.floats(0.1, 9.0), st.sampled_from("abc")), max_size=20),
        st.floats(0.0, 30.0),
    )
    def test_a_roster_shows_everybody_as_they_were(
        self, lag_s: float, course: list[tuple[float, str]], after_s: float
    ) -> None:
        async def watched() -> None:
            crowd, now_s = Crowd(lag_s), 0.0
            done = {peer: [(-math.inf, 0)] for peer in "abc"}
            for peer in done:
                crowd.join(peer, 1.0)
            for wait_s, peer in [*course, (after_s, "")]:
                await asyncio.sleep(wait_s)
                now_s = asyncio.get_running_loop().time()
                if peer:
                    done[peer].append((now_s, len(done[peer])))
                    crowd.note(peer, len(done[peer]) - 1)
                expected = {
                    other: max(number for at_s, number in known if at_s <= now_s - lag_s)
                    for other, known in done.items()
                }
                assert {one.peer: one.round for one in crowd.others("me")} == expected
                assert {one.peer for one in crowd.others("a")} == {"b", "c"}
            crowd.leave("b")
            assert ("b" in {one.peer for one in crowd.others("a")}) == (lag_s > 0.0)
            await asyncio.sleep(lag_s + 0.001)
            assert [one.peer for one in crowd.others("a")] == ["c"]

        clock.run(watched())

    def test_a_last_merge_is_of_the_models_weights(self) -> None:
        sizes = {}
        for scale in get_args(Scale):
            run = run_of(replace(OURS, steps=1, scale=scale))
            shapes = open_stages(run, model_layout(run))[0].shapes
            sizes[scale] = sum(map(math.prod, shapes))
        assert sizes == PARAMETERS
        run = run_of(replace(OURS, steps=1))
        shapes = open_stages(run, model_layout(run))[0].shapes
        for form in Format:
            exact = wire_bytes(absolute(form), shapes)
            assert merge_bytes(replace(OURS, codec=form.value)) == pytest.approx(exact, rel=1e-3)
        assert {merge_bytes(replace(OURS, method=method)) for method in ("parallel", "central", "server")} == {0}


class TestMargins:
    @few
    @given(seeds, st.sampled_from([margins.gaussian, margins.laplace]))
    def test_what_is_counted_as_wrapped_is(self, seed: int, draw: margins.Draw) -> None:
        source = torch.Generator().manual_seed(seed)
        own = tuple(torch.randn(shape, generator=source) for shape in ((40, 30), (200,)))
        apart = margins.Apart(own, tuple(0.01 * draw(tuple(w.shape), source) + w for w in own))
        farthest = max(float((x - y).abs().max()) for x, y in zip(*apart, strict=True))
        wide = margins.seen(apart, (farthest / 7.4,) * 2)
        assert wide.wrapped == 0.0
        narrow = margins.seen(apart, (farthest / 800,) * 2)
        assert narrow.wrapped > 0.3
        assert narrow.rounding < 0.1 * wide.rounding

    def test_steps_at_the_margin_are_the_productions(self) -> None:
        apart = margins.synthetic(margins.unseen_rows, 1)
        assert margins.steps_at(apart, 1, MARGIN) == common_steps(*margins.probes(apart, 1))
        still = (apart.own[0] == apart.other[0]).all(dim=1)
        assert 0.9 < float(still.float().mean()) < 0.96


@pytest.fixture(autouse=True)
def tiny_but_for_its_size(request: pytest.FixtureRequest) -> None:
    """Make the model small, but for the test of how large the model is."""
    if request.cls is None:
        request.getfixturevalue("tiny")


@cache
def short(cell: Cell) -> Result:
    """A run of a few steps."""
    return trial.run(cell)


def ours() -> Cell:
    return at(smoke().recipe("ours").cell, 1e-2, 0)


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_trains(name: str) -> None:
    result = short(at(smoke().recipe(name).cell, 1e-2, 0))
    first, last = result.curve[0], result.curve[-1]
    assert last.merged < first.merged < math.log(384) + 1.0
    assert last.share >= 1.0
    assert result.cell.budget <= sum(result.steps_taken) < result.cell.budget + result.cell.replicas
    assert result.bytes_per_step > 0.0
    assert 0.0 < result.busy <= 1.0 + 1e-9
    assert result.notes.get("lost", 0) == 0


def test_a_common_start_to_the_end_is_data_parallel_training() -> None:
    parallel = short(at(smoke().recipe("parallel").cell, 1e-2, 0))
    whole = short(replace(parallel.cell, method="independent", common_start=1.0))
    assert [point.merged for point in whole.curve] == [point.merged for point in parallel.curve]
    assert (whole.bytes_per_step, whole.virtual_s, whole.spread) == (parallel.bytes_per_step, parallel.virtual_s, 0.0)


@pytest.mark.parametrize("form", Format)
def test_a_last_meeting_moves_both_to_their_mean(form: Format) -> None:
    run = run_of(ours())
    sides = [open_stages(run, model_layout(run))[0] for _ in range(2)]
    for number, stage in enumerate(sides):
        source = torch.Generator().manual_seed(number)
        stage.set_weights([w + 0.01 * torch.randn(w.shape, generator=source) for w in stage.weights()])
    before = [stage.weights() for stage in sides]
    sent = clock.run(meet(*(Still(stage).optimiser(plain_mean(form), 0, Device().compute) for stage in sides)))
    assert sent >= wire_bytes(form, sides[0].shapes)
    for mine, theirs, one, other in zip(*(stage.weights() for stage in sides), *before, strict=True):
        # What rounding has left out of each stays with it, and nothing is lost.
        torch.testing.assert_close(mine + theirs, one + other, rtol=0.0, atol=1e-6 if form is Format.FLOAT32 else 1e-3)
        rounding = {Format.FLOAT32: 1e-6, Format.BFLOAT16: 2.0**-8, Format.INT8: 0.01, Format.INT4: 0.02}[form]
        torch.testing.assert_close(mine, (one + other) / 2, rtol=0.0, atol=rounding * max(1.0, float(one.abs().max())))


def test_what_rounds_compute_beside_inner_steps_slows_them_and_does_not_wait_for_them() -> None:
    free, charged, beside = map(short, (ours(), replace(ours(), charged=True), replace(ours(), beside=True)))
    assert beside.busy < free.busy
    assert beside.virtual_s > free.virtual_s
    assert free.notes["steps_late"] <= beside.notes["steps_late"] < charged.notes["steps_late"]


@pytest.mark.parametrize(("form", "calls"), [(Format.FLOAT32, 3.0), (Format.INT4, 3.0)])
def test_what_a_meeting_computes_is_timed(form: Format, calls: float) -> None:
    times = clock.run(coding_seconds.measure(form, 2))
    assert times.calls == calls
    assert len(times.meetings) == 2
    assert len(times.inner_steps) == 2 * 2 * coding_seconds.APART
    assert min((*times.meetings, *times.inner_steps)) > 0.0
