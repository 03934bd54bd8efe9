"""The downstream measure: a merged model is trained on another text, and the page compares what becomes of methods."""

from pathlib import Path
from random import Random

import pytest
from laboratory_results import result_of
from msgspec.structs import replace

from research.laboratory import fine_tuning
from research.laboratory.experiments.cell import Cell, FineTuning, Result
from research.laboratory.experiments.fine_tuning_grid import CHOOSING, METHODS, TEXTS, fine_tuning_grid
from research.laboratory.methods.fine_tuning import BEFORE, after
from research.laboratory.running import trial
from research.laboratory.running.store import Store

RATES = (1e-3, 1e-2)


def test_a_model_that_is_fine_tuned_is_the_same_and_learns_the_other_text() -> None:
    plain = Cell(method="parallel", replicas=1, steps=10, learning_rate=1e-2, seed=1, scale="tiny")
    tuned = replace(plain, fine_tuning=FineTuning(text="prose", steps=8, rates=RATES))
    first, again = trial.run(tuned), trial.run(tuned)
    assert [point.merged for point in first.curve] == [point.merged for point in trial.run(plain).curve]
    assert first.notes == again.notes
    assert set(first.notes) == {BEFORE, *map(after, RATES)}
    assert first.notes[after(1e-2)] < first.notes[after(1e-3)] < first.notes[BEFORE]
    assert first.merged == pytest.approx(sum(first.held_out) / len(first.held_out)), "all held-out text is scored"


LEVELS = dict(zip(METHODS, (2.0, 2.1, 2.2, 2.4), strict=True))


def outcome(method: str, cell: Cell) -> Result:
    """A result by formula: half of what a method lacks is left after a fine-tuning; the rate 0.003 is the best one."""
    assert cell.fine_tuning is not None
    level, noise = LEVELS[method], Random(cell.seed).gauss(0.0, 0.01)
    notes = {after(rate): 1.0 + level / 2 + noise + (rate != 3e-3) for rate in cell.fine_tuning.rates}
    return result_of(cell, level + noise, notes={BEFORE: 2.0 + level + noise, **notes})


def test_the_page_compares_at_the_rate_of_the_seed_that_is_not_reported(tmp_path: Path) -> None:
    store, grid = Store(tmp_path / "fine_tuning.jsonl"), fine_tuning_grid(5)
    for run in grid.due(store):
        method = next(method for method in METHODS if run.name.startswith(method))
        store.add(outcome(method, run.cell))
    assert fine_tuning.main(["--tables", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "fine_tuning.md").read_text().splitlines()
    for text in TEXTS:
        assert f"### Trained on {text}" in lines
    (gossip, _) = (line for line in lines if line.startswith("| asynchronous gossip, means weighed"))
    assert gossip.count("+0.1000 ± 0.0000") == 2
    assert gossip.count("+0.0500 ± 0.0000") == 1
    assert gossip.rstrip(" |").endswith("0.003")


def test_what_chooses_a_rate_is_not_reported() -> None:
    grid = fine_tuning_grid(5)
    for recipe in grid.recipes:
        assert (0 in grid.seeds_of(recipe)) == recipe.name.endswith(CHOOSING)
        assert len(grid.seeds_of(recipe)) == (1 if recipe.name.endswith(CHOOSING) else 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing", "--out", "new"], "no recipe is named nothing"),
        (["--out", "file"], "--out file cannot be a directory"),
    ],
)
def test_a_survey_that_cannot_begin_says_why_in_a_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as ended:
        fine_tuning.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
