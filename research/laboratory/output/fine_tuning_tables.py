"""What each method's model is worth after a fine-tuning, beside the mean's, seed by seed: a table for each text."""

from __future__ import annotations

from collections.abc import Callable

from research.laboratory.experiments.cell import Corpus, Result
from research.laboratory.experiments.fine_tuning_grid import CHOOSING, METHODS, TEXTS, recipe_name
from research.laboratory.methods.fine_tuning import BEFORE, after
from research.laboratory.output.adapter_tables import paired
from research.laboratory.output.table import NOTHING, Table, shown
from research.laboratory.running.results import Measured, figure

DEFAULT = "mean"
HEADER = (
    "method",
    "on its own text",
    "less the mean's",
    "on prose before",
    "less the mean's",
    "after",
    "less the mean's",
    "at the rate",
)


def chosen_rate(data: Measured, method: str, text: Corpus) -> float | None:
    """Return the rate of the fine-tuning with the lowest loss on the seed that is not reported; None without that."""
    for result in data.results(f"{recipe_name(method, text)}_{CHOOSING}"):
        wish = result.cell.fine_tuning
        assert wish is not None, "all of these are fine-tuned"
        return min(wish.rates, key=lambda rate: result.notes[after(rate)])
    return None


def fine_tuning_tables(data: Measured) -> list[Table]:
    """Return a table of each text on which something has run."""
    tables = []
    for text in TEXTS:
        rows = [_row(data, method, text) for method in METHODS if data.results(recipe_name(method, text))]
        if rows:
            tables.append(Table(f"Trained on {text}", "", HEADER, tuple(rows), data.take_missing()))
    return tables


def _row(data: Measured, method: str, text: Corpus) -> tuple[str, ...]:
    rates = {each: chosen_rate(data, each, text) for each in (method, DEFAULT)}
    if None in rates.values():
        return (data.about(recipe_name(method, text)), *(NOTHING,) * (len(HEADER) - 1))

    def tuned(result: Result, of: str) -> float:
        return result.notes[after(rates[of] or 0.0)]

    measures: tuple[Callable[[Result, str], float], ...] = (
        lambda result, _: result.merged,
        lambda result, _: result.notes[BEFORE],
        tuned,
    )
    cells = [cell for measure in measures for cell in _beside(data, method, text, measure)]
    return (data.about(recipe_name(method, text)), *cells, f"{rates[method]:g}")


def _beside(data: Measured, method: str, text: Corpus, measure: Callable[[Result, str], float]) -> tuple[str, str]:
    """Return the figure of a method, and its paired difference to the mean's with the interval."""
    own = data.results(recipe_name(method, text))
    others = {result.cell.seed: measure(result, DEFAULT) for result in data.results(recipe_name(DEFAULT, text))}
    said = shown(figure(measure(result, method) for result in own), 4)
    apart = [measure(result, method) - others[result.cell.seed] for result in own if result.cell.seed in others]
    return said, NOTHING if method == DEFAULT else paired(apart)
