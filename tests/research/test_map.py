"""The map's comparison of methods, its verdicts, and its page from a record by formula."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laboratory_results import result_of

from noloco_node.planning.expectation import FAR, MAP, on_such_lines
from research.laboratory import map as laboratory_map
from research.laboratory.experiments.cell import Cell, Point, Result
from research.laboratory.experiments.grid import at
from research.laboratory.experiments.volunteer_grid import TUNED, map_cell, map_grid, places
from research.laboratory.output.map_tables import SEEDS, Difference, difference, planner_map, verdict_of
from research.laboratory.running.results import Measured
from research.laboratory.running.store import Store

LEVELS = {"gossip": 2.5, "quorum_mean": 2.6, "late_mean": 2.45}


def outcome(cell: Cell) -> Result:
    """A result by formula: the method decides, seed and text by a little."""
    noise = Random(cell.key)
    parts = tuple(LEVELS[cell.method] + Random(part).gauss(0.0, 0.2) + noise.gauss(0.0, 0.01) for part in range(32))
    merged = sum(parts) / len(parts)
    curve = tuple(
        Point(
            share=part / 9,
            virtual_s=1200.0 * part,
            merged=merged + 1.0 - part / 9,
            single=merged,
            spread=0.0,
            learning_rate=cell.learning_rate,
            sent_bytes=1e9 * part,
        )
        for part in range(1, 10)
    )
    others = {"bytes_per_step": 1.0, "rounds": 9.0, "steps_taken": (1,) * cell.replicas}
    return result_of(cell, merged, virtual_s=10800.0, curve=curve, held_out=parts, **others)


def pairs(method: str, count: int) -> list[tuple[Result, Result]]:
    names = (method, "gossip")
    runs = [[outcome(at(map_cell(name, TUNED, 4), 1e-2, seed)) for name in names] for seed in range(count)]
    return [(one, other) for one, other in runs]


class TestVerdicts:
    @pytest.mark.parametrize(("method", "winner"), [("quorum_mean", "gossip"), ("late_mean", "mean")])
    def test_five_seeds_decide_and_four_do_not(self, method: str, winner: str) -> None:
        found = [difference(pairs(method, count)) for count in (1, 4, 5)]
        assert [one is not None and one.winner for one in found] == ["undecided", "undecided", winner]

    def test_a_difference_has_the_size_of_what_was_put_in(self) -> None:
        found = difference(pairs("quorum_mean", 5))
        assert found.nats == pytest.approx(0.1, abs=4 * found.error)
        assert 0.0 < found.error < 0.01
        assert difference([]) is None

    @given(st.lists(st.floats(-1.0, 1.0), min_size=2, max_size=2), st.floats(0.001, 0.5))
    def test_gossip_is_better_only_where_it_beats_both(self, nats: list[float], error: float) -> None:
        compared = [Difference(each, error, 5) for each in nats]
        verdict = verdict_of(compared)
        assert (verdict == "gossip") == (min(nats) > 2 * error)
        assert (verdict == "mean") == (min(nats) < -2 * error)
        assert verdict_of(compared[:1]) == "undecided"
        assert verdict_of([compared[0], compared[1]._replace(seeds=4)]) == "undecided"


def test_what_a_planner_says_of_the_map_is_in_its_record() -> None:
    record = Store(Path(laboratory_map.__file__).parents[1] / "map.jsonl")
    assert planner_map(Measured(map_grid(SEEDS), record)) == MAP


def ratio(one: float, other: float) -> float:
    return max(one / other, other / one)


@given(st.floats(0.01, 1e6), st.integers(1, 200))
def test_a_planner_hears_of_the_replicas_and_lines_that_are_nearest(sends: float, replicas: int) -> None:
    number = min(dict.fromkeys(line.replicas for line in MAP), key=lambda one: ratio(replicas, one))
    ratios = {line.sends: ratio(sends, line.sends) for line in MAP if line.replicas == number}
    said = on_such_lines(sends, replicas)
    assert f"Where it could {min(ratios, key=lambda one: ratios[one]):,} times," in said
    assert f"{number} whole replicas" in said
    assert ("these lines are unlike all" in said) is (min(ratios.values()) > FAR)
    assert (f"{replicas} replicas are unlike all" in said) is (ratio(replicas, number) > FAR)


def fill(store: Store, seeds: int, count: int) -> None:
    """Add what is due of the first places."""
    grid = map_grid(seeds)
    wanted = {recipe.name for recipe in grid.recipes[: len(LEVELS) * (1 + count)]}
    while due := [run for run in grid.due(store) if run.name.partition(",")[0] in wanted]:
        for run in due:
            store.add(outcome(run.cell))


def test_the_page_says_what_is_decided(tmp_path: Path) -> None:
    store, count = Store(tmp_path / "map.jsonl"), len(places())
    fill(store, 1, count)
    fill(store, 5, 3)
    assert laboratory_map.main(["--tables", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "map.md").read_text()
    assert f"Of {count} places {count} have run." in text
    assert "against *barrier* gossip is better at 3, worse at 0, and 0 stay open" in text
    assert "against *nobody waits* gossip is better at 0, worse at 3, and 0 stay open" in text
    assert "gossip is better than both at 0." in text
    assert f"fewer seeds, which decide nothing: {count - 3}." in text
    assert (tmp_path / "pictures" / "map.png").stat().st_size > 10_000
