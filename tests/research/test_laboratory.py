"""The laboratory's record, grid, runner, tables and command; and every method for a few steps."""

import hashlib
import math
import multiprocessing
import re
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT
from toy_cells import outcome, toy

from noloco_node.data.blocks import SMALLEST_PIECE_BYTES
from noloco_node.data.file_documents import pieces_of, stdlib_files
from research.laboratory import papers
from research.laboratory.experiments.cell import ADDED_LATER, Adapters, Cell, Conditions, FineTuning, Result, Rule
from research.laboratory.experiments.choices import lacks
from research.laboratory.experiments.grid import RATES, Grid, Recipe, Run, at
from research.laboratory.experiments.recipes import SMALL_RATES, everything, small, smoke
from research.laboratory.experiments.sensitivity import sensitivity
from research.laboratory.experiments.task import shard
from research.laboratory.output.table import NO_WORSE, compared, judged
from research.laboratory.output.tables import every_table, tuning
from research.laboratory.running.results import Figure, Measured, figure, seconds_to
from research.laboratory.running.runner import survey, trial
from research.laboratory.running.store import SOURCES, Store, decode, encode

cells = st.builds(
    Cell,
    method=st.sampled_from(["parallel", "pairs", "gossip"]),
    replicas=st.integers(1, 16),
    steps=st.integers(1, 400),
    learning_rate=st.sampled_from(RATES),
    seed=st.integers(0, 3),
    rule=st.builds(Rule, alpha=st.floats(0, 1), beta=st.floats(0, 1)),
    late_inner_steps=st.none() | st.integers(1, 50),
)
losses = st.floats(0.1, 9.0) | st.sampled_from([math.nan, math.inf])


def filled(grid: Grid, path: Path) -> Store:
    """A record with all runs of a grid."""
    store = Store(path)
    while due := grid.due(store):
        for run in due:
            store.add(outcome(run.cell))
    return store


def ours() -> Cell:
    return everything().recipe("ours").cell


def heard(text: str) -> None:
    raise AssertionError(text)


class TestStore:
    @settings(max_examples=40)
    @given(cells, losses)
    def test_a_line_holds_a_result(self, cell: Cell, merged: float) -> None:
        result = outcome(cell, merged)
        again = decode(encode(result))
        assert encode(result).count(b"\n") == 1
        assert repr(again) == repr(result)  # not a number is not equal to itself

    @settings(max_examples=20)
    @given(st.lists(cells, min_size=1, max_size=4, unique_by=lambda cell: cell.key), st.data())
    def test_an_interruption_loses_at_most_the_last_line(
        self, tmp_path_factory: pytest.TempPathFactory, some: list[Cell], data: st.DataObject
    ) -> None:
        path = tmp_path_factory.mktemp("store") / "deep" / "results.jsonl"
        store = Store(path)
        for cell in some:
            store.add(outcome(cell))
        whole = path.read_bytes()
        last = len(encode(outcome(some[-1])))
        path.write_bytes(whole[: len(whole) - data.draw(st.integers(2, last - 1))])
        warnings: list[str] = []
        torn = Store(path, warnings.append)
        assert [cell in torn for cell in some] == [True] * (len(some) - 1) + [False]
        assert len(warnings) == 1
        torn.add(outcome(some[-1]))
        assert len(Store(path, warnings.append)) == len(some)

    def test_every_source_that_is_asked_for_is_there(self) -> None:
        found = {pattern: list(ROOT.glob(pattern)) for pattern in SOURCES}
        assert [pattern for pattern, paths in found.items() if not paths] == []


class TestCell:
    @settings(max_examples=40)
    @given(cells)
    def test_what_was_added_later_is_not_in_the_digest_of_a_cell_without_it(self, cell: Cell) -> None:
        before = {name: getattr(cell, name) for name in Cell.__struct_fields__ if name not in ADDED_LATER}
        digest = hashlib.sha256(msgspec.json.encode(before)).hexdigest()[:16]
        others = {"common_start": 0.1, "often_at_end": 0.1, "last_rounds": 3, "weighed": True}
        others |= {"slower_lines": 4.0, "charged": True, "beside": True, "roster_lag_s": 30.0}
        others |= {"scale": "small", "text": "torch", "fragments": 4, "overlap": 1, "mixing": 0.5}
        others |= {"density": 0.5, "pushes": 2, "batch": 2, "sharding": "fixed"}
        others |= {"grace_s": 5.0, "discount": "poly", "compensation": 3.0, "conditions": Conditions()}
        others |= {
            "adapters": Adapters(base_text="prose"),
            "fine_tuning": FineTuning(text="prose"),
            "optimiser": "muon",
            "appointments": 1.0,
        }
        assert set(others) == set(ADDED_LATER)
        changed = [msgspec.structs.replace(cell, **{name: value}) for name, value in others.items()]
        assert len({digest, cell.key, *(one.key for one in changed)}) == 1 + len(others)


class TestGrid:
    def test_the_rates_of_the_small_survey_are_those_of_the_record(self) -> None:
        path = ROOT / "research" / "laboratory.jsonl"
        if not path.exists():
            pytest.skip("no record is kept")
        grid, kept = everything(), Store(path)
        tuned = {family: grid.rate(family, kept) for family in SMALL_RATES}
        known = {family: rate for family, rate in tuned.items() if rate is not None}
        assert {family: SMALL_RATES[family] for family in known} == known

    @pytest.mark.parametrize("grid", [everything(), small(), smoke(), sensitivity()])
    def test_the_extent_is_what_runs(self, grid: Grid, tmp_path: Path) -> None:
        store = filled(grid, tmp_path / "r.jsonl")
        assert (len(store), sum(result.cell.budget for result in store)) == grid.extent() == grid.done(store)

    def test_the_rounds_of_every_cell_are_such_as_a_node_accepts(self) -> None:
        from research.laboratory.experiments.task import run_of

        gossips = [recipe.cell for recipe in everything().recipes if recipe.cell.method == "gossip"]
        for cell in gossips:
            outer = run_of(at(cell, 1e-2, 0)).outer
            assert (outer.alpha, outer.beta, outer.gamma) == (cell.rule.alpha, cell.rule.beta, cell.rule.gamma)
        assert len(gossips) > 10

    def test_a_part_brings_the_tuning_that_it_needs(self) -> None:
        part = everything().only(["noloco_gamma_0", "ours_int4"])
        assert {recipe.name for recipe in part.recipes} == {"noloco_gamma_0", "noloco", "ours_int4", "ours"}


def plain(name: str, steps: int, method: str = "pairs") -> Recipe:
    cell = msgspec.convert({"method": method, "replicas": 2, "steps": steps, "learning_rate": 0.0}, Cell)
    return Recipe(name=name, family=name, cell=cell, about=name)


class Notes:
    """Remembers what a runner tells."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.bad: dict[str, str] = {}

    def ended(self, run: Run, result: Result) -> None:
        assert run.cell == result.cell
        self.done.append(run.name)

    def failed(self, run: Run, reason: str) -> None:
        self.bad[run.name] = reason

    def look(self, at_work: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """End what spawning a process starts beside it: a tracker of shared resources, which would live as long as we."""
    yield
    resource_tracker._resource_tracker._stop()


class TestRunner:
    def test_what_dies_stops_nobody_and_an_interruption_leaves_the_record_whole(self, tmp_path: Path) -> None:
        recipes = (plain("dies", 17), plain("waits", 19), plain("good", 5))
        grid = Grid(recipes=recipes, seeds=1, rates={recipe.name: 1e-2 for recipe in recipes})
        store = Store(tmp_path / "r.jsonl")

        class Interrupted(Notes):
            def look(self, at_work: object) -> None:
                if self.done:
                    raise KeyboardInterrupt

        notes = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            survey(grid, store, notes, 2, toy)
        assert children() == []
        assert "code 3" in notes.bad["dies"]
        assert [result.cell.steps for result in Store(store.path, heard)] == [5]


def children() -> list[int]:
    """The living worker processes."""
    return [process.pid or 0 for process in multiprocessing.active_children()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return filled(everything(), tmp_path_factory.mktemp("full") / "r.jsonl")


class TestTables:
    def test_a_full_record_lacks_nothing(self, store: Store) -> None:
        for table in every_table(Measured(everything(), store)):
            assert table.missing == () or list(table.missing) == []
            assert table.says
            assert table.rows
            assert {len(row) for row in table.rows} == {len(table.header)}

    def test_what_has_more_choices_lacks_none(self) -> None:
        weighed = msgspec.structs.replace(ours(), weighed=True)
        assert lacks(weighed, ours()) == lacks(ours(), ours()) == ()
        assert lacks(ours(), weighed) == ("weighed means",)
        assert lacks(msgspec.structs.replace(ours(), codec="int8"), ours()) == ("int4",)
        assert lacks(ours(), msgspec.structs.replace(ours(), codec="int8")) == ()

    @pytest.mark.parametrize("grid", [small(), smoke()])
    def test_one_seed_decides_nothing(self, grid: Grid, tmp_path: Path) -> None:
        for table in every_table(Measured(grid, filled(grid, tmp_path / "r.jsonl"))):
            assert not re.search(r"(better|worse) than|level with|the best |'[^']*' holds|\d nats", table.says), (
                table.says
            )

    @given(st.floats(-1.0, 1.0), st.none() | st.floats(0.0, 1.0), st.integers(1, 5))
    def test_a_difference_is_decided_by_seeds_enough_and_beyond_its_spread(
        self, mean: float, deviation: float | None, seeds: int
    ) -> None:
        found = Figure(mean, deviation, seeds)
        turned = found._replace(mean=-mean)
        if seeds < 3:
            assert compared(found) == "on too few seeds to be compared with"
            assert judged(found, *NO_WORSE) == "is undecided on so few seeds"
            return
        is_open = (deviation or 0.0) > 0.01 and abs(mean) <= (deviation or 0.0)
        assert (compared(found) == "within the error of") == is_open
        assert (compared(found) == "level with") == (abs(mean) <= 0.01 and not is_open)
        assert (compared(found) == "better than") == (compared(turned) == "worse than")
        verdict = "holds" if mean <= 0.01 else "does not hold"
        assert judged(found, *NO_WORSE) == ("is undecided within the error" if is_open else verdict)

    def test_an_empty_record_gives_dashes_and_names_what_is_missing(self, tmp_path: Path) -> None:
        data = Measured(everything(), Store(tmp_path / "none.jsonl"))
        for table in every_table(data):
            text = table.markdown()
            assert "Not run (yet): " in text
            assert "holds" not in text
            assert "nan" not in text
        assert "noloco" in tuning(data).missing

    @given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5))
    def test_a_figure_is_mean_and_deviation(self, values: list[float]) -> None:
        found = figure(values)
        assert min(values) - 1e-9 <= found.mean <= max(values) + 1e-9
        assert (found.deviation is None) == (len(values) == 1)
        assert figure([*values, math.nan]) == (pytest.approx(math.nan, nan_ok=True), None, len(values) + 1)

    @given(st.floats(0.0, 1.0))
    def test_the_time_to_a_loss_lies_on_the_curve(self, part: float) -> None:
        result = outcome(at(everything().recipe("noloco").cell, 1e-2, 0))
        first, last = result.curve[0], result.curve[-1]
        level = first.merged + part * (last.merged - first.merged)
        expected = first.virtual_s + part * (last.virtual_s - first.virtual_s)
        assert seconds_to(result, level) == pytest.approx(expected)
        assert math.isnan(seconds_to(result, last.merged - 0.01))


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "complaint"),
        [
            ([], "one of the arguments"),
            (["--all", "--small"], "not allowed with"),
            (["--smoke", "--processes", "0"], "no number of processes"),
            (["--smoke", "--only", "nolocco"], "no recipe is named 'nolocco'"),
            (["--tables", "--results", "{tmp}"], "cannot be read"),
            (["--tables", "--results", "{tmp}/none.jsonl"], "there is no record"),
        ],
    )
    def test_wrong_input_gives_a_line_and_exit_code_2(
        self, words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            papers.main([word.format(tmp=tmp_path) for word in words])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert complaint in line

    def test_tables_come_from_the_record_alone(
        self, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = store.path.read_bytes()
        assert papers.main(["--tables", "--results", str(store.path), "--out", str(tmp_path)]) == 0
        assert store.path.read_bytes() == before
        assert "### Asynchronous gossip, on very" in capsys.readouterr().out
        # Of rivals: two texts, more replicas, choices; and each question of what the papers vary.
        assert (tmp_path / "laboratory.md").read_text().count("Not run (yet)") == 4 + 9
        assert (tmp_path / "pictures" / "laboratory.png").stat().st_size > 10_000

    def test_the_page_is_what_the_record_says(self) -> None:
        docs = ROOT / "research"
        kept = Store(docs / "laboratory.jsonl", heard)
        every = papers.tables(Measured(everything(), kept), kept)
        written = (docs / "laboratory.md").read_text(encoding="utf-8")
        assert written == papers.page(every, papers.WITHDRAWN), "run research/laboratory/papers.py --tables"

    def test_a_survey_is_run_once_and_its_tables_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--smoke", "--only", "noloco", "async_*", "--processes", "1", "--out", str(tmp_path)]
        assert papers.main(words, toy) == 0
        assert {result.cell.method for result in Store(tmp_path / "laboratory.jsonl", heard)} == {"pairs", "server"}
        said = capsys.readouterr()
        assert said.err.startswith("3 runs, 36 inner steps in all")
        assert "| async_delayed " in said.out
        assert papers.main(words, toy) == 0
        assert "3 of them are in" in capsys.readouterr().err

    def test_a_failure_is_the_exit_code(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipe = plain("noloco", 13)
        follows = msgspec.structs.replace(recipe, name="follows", cell=plain("", 5).cell)
        grid = Grid(recipes=(recipe, follows), seeds=2)
        monkeypatch.setattr(papers, "smoke", lambda: grid)
        assert papers.main(["--smoke", "--processes", "1", "--out", str(tmp_path)], toy) == 1
        said = capsys.readouterr().err
        assert said.count("failed: noloco, tuning, rate") == len(RATES)
        assert "3 runs wait for a tuning that failed" in said


def test_shards_are_parts_of_the_text_and_unlike() -> None:
    parts = [{(piece.name, piece.start) for piece in shard(number, 4)} for number in range(4)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(pieces_of(stdlib_files(), SMALLEST_PIECE_BYTES))
    sizes = [sum(piece.end - piece.start for piece in shard(number, 4)) for number in range(4)]
    assert max(sizes) < 1.2 * min(sizes)


def of_server(**fields: object) -> Result:
    """Twelve steps of two workers at a server, one thing changed."""
    (cell,) = smoke().cells(smoke().recipe("async_naive"), Store(Path("none")))
    return trial(msgspec.structs.replace(cell, speeds="very", **fields), lambda share: None)


def test_what_a_server_may_do_about_late_workers_changes_what_comes_out(tiny: None) -> None:
    plain = of_server()
    changed = [
        of_server(grace_s=10.0),
        of_server(discount="poly"),
        of_server(compensation=30.0),
        of_server(sharding="fixed"),
        of_server(sharding="sampled"),
    ]
    assert len({result.merged for result in (plain, *changed)}) == 1 + len(changed)
    assert changed[0].virtual_s > plain.virtual_s
    # Nobody is more than ten steps late here.
    assert of_server(discount="threshold").merged == changed[1].merged


METHODS = ("parallel", "independent", "diloco", "noloco_random_routes", "async_delayed", "ours")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains(name: str, tiny: None) -> None:
    shares: list[float] = []
    (cell,) = smoke().cells(smoke().recipe(name), Store(Path("none")))
    result = trial(cell, shares.append)
    first, last = result.curve[0], result.curve[-1]
    # Who is in the middle of a step when the budget is spent ends it.
    assert 12 == cell.budget <= sum(result.steps_taken) < cell.budget + cell.replicas
    assert last.merged < first.merged < math.log(384) + 1.0
    assert shares == sorted(shares)
    assert shares[-1] == last.share >= 1.0
    assert 0.0 < result.busy <= 1.0 + 1e-9
    assert (result.bytes_per_step > 0.0) == (cell.method != "independent")
    assert decode(encode(result)) == result
    assert result.spread >= 0.0
