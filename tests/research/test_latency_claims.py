"""The survey of both latency claims, small: its trees and waits against recursions worked out beside it."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.sim import clock
from research.latency import blocking, claims, open_rounds, tree
from research.latency.paper import BLOCKING, EXPLAINED, TREE_OVER_PAIR, Comparison
from research.latency.picture import picture
from research.latency.survey import Scale, Survey
from research.latency.tree import Shape, Together, Trials, plant

TINY = Scale(trials=4, workers_at_most=16, outer_steps=5, long_outer_steps=5, repeats=2, own_replicas_at_most=0, seed=3)


class Delays:
    """Lines on which each message takes what a table says, by (sender, receiver)."""

    def __init__(self, seconds: Callable[[str, str], float]) -> None:
        self.seconds = seconds
        self.sent: Counter[tuple[str, str]] = Counter()

    def carry(self, sender: str, receiver: str, arrive: Callable[[], None]) -> None:
        self.sent[sender, receiver] += 1
        asyncio.get_running_loop().call_later(self.seconds(sender, receiver), arrive)


def all_reduce(shape: Shape, workers: int, delays: Delays) -> float:
    async def once() -> float:
        return await Together(plant(shape, workers, delays.carry)).once()

    return clock.run(once())


@pytest.mark.parametrize("shape", ["complete", "binomial"])
@pytest.mark.parametrize("workers", [2, 4, 16, 64, 1024])
def test_without_spread_a_tree_takes_two_latencies_a_level(shape: Shape, workers: int) -> None:
    delays = Delays(lambda sender, receiver: 1.0)
    assert all_reduce(shape, workers, delays) == 2 * math.log2(workers)
    assert sum(delays.sent.values()) == tree.messages(shape, workers)
    assert set(delays.sent.values()) == {1}


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 50.0), min_size=6, max_size=6), st.lists(st.floats(0.01, 50.0), min_size=6, max_size=6))
def test_a_complete_tree_of_four_takes_its_longest_way_up_and_its_longest_way_down(
    up: list[float], down: list[float]
) -> None:
    edges = [(f"worker {number}", f"meeting 1.{number // 2}") for number in range(4)]
    edges += [(f"meeting 1.{number}", "meeting 2.0") for number in range(2)]
    table = dict(zip(edges, up, strict=True)) | {
        (above, below): delay for (below, above), delay in zip(edges, down, strict=True)
    }
    ways = [(number, 4 + number // 2) for number in range(4)]
    longest = max(up[low] + up[high] for low, high in ways) + max(down[low] + down[high] for low, high in ways)
    assert all_reduce("complete", 4, Delays(lambda *edge: table[edge])) == pytest.approx(longest)


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 50.0), min_size=6, max_size=6))
def test_a_binomial_tree_of_four_sends_nothing_to_itself(delays: list[float]) -> None:
    edges = [(1, 0), (3, 2), (2, 0), (0, 2), (0, 1), (2, 3)]
    table = {(f"worker {one}", f"worker {other}"): delay for (one, other), delay in zip(edges, delays, strict=True)}
    up = max(delays[0], delays[1] + delays[2])
    down = max(delays[4], delays[3] + delays[5])
    assert all_reduce("binomial", 4, Delays(lambda *edge: table[edge])) == pytest.approx(up + down)


def test_a_lost_message_is_a_deadlock_and_not_a_shorter_time() -> None:
    def lossy(sender: str, receiver: str, arrive: Callable[[], None]) -> None:
        if receiver != "worker 2":
            asyncio.get_running_loop().call_later(1.0, arrive)

    with pytest.raises(clock.Deadlock):
        clock.run(Together(plant("complete", 4, lossy)).once())


@pytest.mark.parametrize("spread", [0.5, 1.0])
def test_a_pair_takes_twice_the_later_of_two_latencies(spread: float) -> None:
    times = tree.measure(Trials("complete", 2, spread, 4000, 1))
    expected_s = 2 * (1 + math.erf(math.sqrt(math.log1p(spread**2)) / 2))
    assert times.mean_s == pytest.approx(expected_s, rel=4 * times.relative_error)


def test_a_barrier_takes_the_longest_of_each_phase() -> None:
    phases = np.random.default_rng(5).uniform(1.0, 9.0, (8, 6)).tolist()
    ends = clock.run(blocking.all_for_all(blocking.Cell(8, 1, 6, 0), phases))
    expected = np.cumsum(np.max(phases, axis=0))
    assert np.allclose(ends, np.tile(expected, (8, 1)))


def test_pairs_wait_for_the_later_of_two() -> None:
    phases = np.random.default_rng(6).uniform(1.0, 9.0, (8, 6))
    ends = clock.run(blocking.two_for_two(blocking.Cell(8, 1, 6, 4), phases.tolist()))
    now_s = np.zeros(8)
    for outer_step in range(6):
        now_s = now_s + phases[:, outer_step]
        now_s = np.maximum(now_s, now_s[list(blocking.partners(8, 4, outer_step))])
        assert np.allclose([mine[outer_step] for mine in ends], now_s)


def test_blocking_is_near_its_figure() -> None:
    waits = blocking.measure(blocking.Cell(64, 10, 40, 1))
    assert waits.diloco_s[-1] / waits.noloco_s[-1] == pytest.approx(BLOCKING[64, 10], rel=0.05)
    assert 1.0 < waits.noloco_overhead < waits.diloco_overhead


def test_an_open_round_never_waits_and_a_blocking_one_hardly() -> None:
    open_form, blocking_form = (open_rounds.measure(open_rounds.Form(8, 10, 12, blocks, 1)) for blocks in (False, True))
    assert open_form.overhead == pytest.approx(1.0, abs=1e-9)
    assert 1.0 < blocking_form.overhead < 1.1
    for form in (open_form, blocking_form):
        assert form.met > 0.9
        assert form.met + form.skipped + form.solo == pytest.approx(1.0)


@pytest.fixture(scope="module")
def found() -> Survey:
    return claims.survey(TINY, 1)


def test_a_survey_compares_prints_and_draws_every_cell_it_measures(
    found: Survey, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = {one.name: one for one in claims.comparisons(found)}
    assert len(compared) == sum(cell[1] <= 16 for cell in TREE_OVER_PAIR) + sum(cell[0] <= 16 for cell in BLOCKING)
    exact = compared["tree, spread 0.0, 16"]
    assert exact.ours == exact.theirs == 4.0
    assert compared["tree, spread 2.5, 4"].error > 0.0
    claims.show(found)
    printed = capsys.readouterr().out
    assert sum(line.strip()[:3] in {"0.0", "0.5", "1.0", "1.5", "2.0", "2.5"} for line in printed.splitlines()) == 12
    for heading in ("Tree all-reduce", "over conversations", "Total time of a barrier", "rounds met"):
        assert heading in printed
    png = picture(found)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 10_000


def test_the_exit_code_tells_an_unexplained_deviation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    near = Comparison(name="near", ours=1.04, theirs=1.0)
    far = Comparison(name="far", ours=1.2, theirs=1.0, error=0.06)
    assert claims.verdict([near], 0.0, 1.0) == 0
    assert claims.verdict([near, far], 0.0, 1.0) == 1
    assert "far: 1.200 where 1 is to be (+20.0 %); why?" in capsys.readouterr().out
    assert claims.verdict([near, far], 3.0, 1.0) == 0
    monkeypatch.setitem(EXPLAINED, "far", "the paper rounds")
    assert claims.verdict([near, far], 0.0, 1.0) == 0
    assert "the paper rounds" in capsys.readouterr().out
