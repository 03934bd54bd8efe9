"""What an optimiser changes of each method's loss, and of how far gossip is from the mean: a table for each text."""

from __future__ import annotations

from itertools import product

from research.laboratory.experiments.cell import Corpus, Optimiser
from research.laboratory.experiments.optimiser_grid import METHODS, OPTIMISERS, TEXTS, family, recipe_name
from research.laboratory.output.adapter_tables import paired, tuning_table
from research.laboratory.output.table import NOTHING, Table, shown
from research.laboratory.running.results import Measured, figure

SAID: dict[Optimiser, str] = {
    "adamw": "AdamW",
    "adamw_08": "AdamW, beta1 0.8",
    "adamw_nesterov": "AdamW, Nesterov",
    "muon": "Muon",
    "orthogonal": "AdamW, orthogonal",
}
HEADER = ("method", "optimiser", "rate", "loss", "less AdamW's", "less Nesterov's", "less the mean's")


def optimiser_tables(data: Measured) -> list[Table]:
    """Return a table of each text on which something has run, and one of the tuning."""
    sides = list(product(METHODS, OPTIMISERS))
    tables = []
    for text in TEXTS:
        rows = [_row(data, *side, text) for side in sides if _losses(data, *side, text)]
        if rows:
            tables.append(Table(f"On {text}", "", HEADER, tuple(rows), data.take_missing(), texts=2))
    families = [(family(*side), f"{METHODS[side[0]]}, {SAID[side[1]]}") for side in sides]
    return [*tables, tuning_table(data, "method", families)]


def _row(data: Measured, method: str, optimiser: Optimiser, text: Corpus) -> tuple[str, ...]:
    losses = _losses(data, method, optimiser, text)

    def less(others: dict[int, float]) -> str:
        return paired([loss - others[seed] for seed, loss in losses.items() if seed in others])

    return (
        METHODS[method],
        SAID[optimiser],
        data.rate(recipe_name(method, optimiser, text)).partition(" ")[0],
        shown(figure(losses.values()), 4),
        *(
            NOTHING if optimiser == usual else less(_losses(data, method, usual, text))
            for usual in ("adamw", "adamw_nesterov")
        ),
        NOTHING if method == "mean" else less(_losses(data, "mean", optimiser, text)),
    )


def _losses(data: Measured, method: str, optimiser: Optimiser, text: Corpus) -> dict[int, float]:
    """Return the losses of the merged model by seed."""
    return {result.cell.seed: result.merged for result in data.results(recipe_name(method, optimiser, text))}
