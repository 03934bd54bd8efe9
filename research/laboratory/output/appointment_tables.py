"""What appointments change of gossip's loss, lateness and rounds: a table for each place, and one of the choice."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from research.laboratory.experiments.appointment_grid import (
    ABOUT,
    CHOICES,
    PLACES,
    choice_name,
    methods,
    recipe_name,
)
from research.laboratory.experiments.cell import Result
from research.laboratory.output.adapter_tables import paired
from research.laboratory.output.table import NOTHING, Table, shown
from research.laboratory.running.results import Measured, figure

SAID = {"stay": "Machines that stay", "churn": "60 % leave in an hour"}
HEADER = ("method", "loss", "less gossip's", "less the mean's", *("steps late", "kept", "rounds", "kB / step"))
CHOICE = ("step sizes wider by", "every", "loss", "steps late", "kept", "rounds", "kB / step")


def appointment_tables(data: Measured) -> list[Table]:
    """Return a table of each place at which something has run, and one of the choice."""
    tables = []
    for place, text in PLACES:
        rows = [
            (ABOUT[method], shown(figure(losses.values()), 4), *_less(data, place, text, method), *_how(data, name))
            for method in methods(place)
            if (losses := _losses(data, name := recipe_name(place, text, method)))
        ]
        if rows:
            tables.append(Table(f"{SAID[place]}, {text}", "", HEADER, tuple(rows), data.take_missing()))
    named = [("no appointments", "4 to 16", "choice_none")]
    named += [(f"{wider:g}", f"4 to {late}", choice_name(wider, late)) for wider, late in CHOICES]
    rows = [
        (wider, every, shown(figure(_losses(data, name).values()), 4), *_how(data, name))
        for wider, every, name in named
    ]
    return [*tables, Table("The choice: seed 1, library", "", CHOICE, tuple(rows), data.take_missing(), texts=2)]


def _less(data: Measured, place: str, text: str, method: str) -> list[str]:
    losses = _losses(data, recipe_name(place, text, method))
    said = []
    for other in ("gossip", "mean"):
        others = _losses(data, recipe_name(place, text, other))
        apart = [loss - others[seed] for seed, loss in losses.items() if seed in others]
        said.append(NOTHING if method == other else paired(apart))
    return said


def _how(data: Measured, name: str) -> tuple[str, ...]:
    """Return how late corrections came, the share of meetings by appointment, rounds, and bytes of a replica's step."""
    results = data.results(name)
    gossip = [result for result in results if "met" in result.notes]

    def over(some: list[Result], measure: Callable[[Result], float], digits: str) -> str:
        return format(mean(map(measure, some)), digits) if some else NOTHING

    return (
        over(gossip, lambda result: result.notes["steps_late"], ".2f"),
        over(gossip, lambda result: result.notes.get("appointed", 0.0) / max(1.0, result.notes["met"]), ".0%"),
        over(results, lambda result: result.rounds, ".1f"),
        over(results, lambda result: result.bytes_per_step / 1e3, ",.1f"),
    )


def _losses(data: Measured, name: str) -> dict[int, float]:
    """Return the losses of the merged model by seed."""
    return {result.cell.seed: result.merged for result in data.results(name)}
