"""What one change does, each beside the recipe that lacks it; and what the end of a run costs and gives."""

from __future__ import annotations

from collections.abc import Iterator

from research.laboratory.experiments.cell import Result
from research.laboratory.output.table import (
    SEEDS,
    Table,
    apart,
    at_rounds,
    compared,
    gap,
    is_enough,
    merged,
    seeds,
    shown,
    signed,
    single,
    single_gap,
    spread,
)
from research.laboratory.running.results import Measured, bytes_with_merge

ENDS = ("noloco", "ours", "ours_last_rounds", "ours_often_at_end")
"""Recipes whose replicas differ at the end."""


def changes(data: Measured) -> Table:
    """Each change beside the recipe that lacks it, on the seeds that both have."""
    rows = [
        (
            name,
            data.about(name),
            other,
            shown(data.figure(name, merged), 4, "diverged"),
            shown(data.against(name, other, gap)),
            shown(data.against(name, other, single_gap)),
            shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 0),
            shown(data.figure(name, lambda result: 100.0 * result.busy), 1),
            shown(data.figure(name, lambda result: result.rounds), 0),
            shown(data.figure(name, _steps_late), 1),
            shown(data.figure(name, lambda result: result.virtual_s), 0),
        )
        for name, other in data.changes.items()
    ]
    header = (
        "recipe",
        "what it is",
        "beside",
        "loss, merged",
        "against it",
        "single, against it",
        "kB / step",
        "busy %",
        "rounds",
        "steps late",
        "virtual s",
    )
    title = "What one change does, beside what lacks it"
    return Table(title, " ".join(_said_of_changes(data)), header, tuple(rows), data.take_missing(), 3)


def _steps_late(result: Result) -> float:
    """Return how many inner steps after its snapshot a correction came, on average; 0 where all wait."""
    return result.notes.get("steps_late", 0.0)


def _said_of_changes(data: Measured) -> Iterator[str]:
    few = []
    for name, other in data.changes.items():
        found = data.against(name, other, gap)
        if not is_enough(found):
            few += [name] if found is not None else []
            continue
        late = [data.figure(one, _steps_late) for one in (name, other)]
        more = ""
        if "_lines_" in name and late[0] is not None and late[1] is not None:
            more = f", with corrections {late[0].mean:.1f} instead of {late[1].mean:.1f} inner steps late"
        more = at_rounds(data, name, other) + more
        yield f"{name} is {compared(found)} {other} ({apart(found)}{more})."
    if few:
        yield f"On fewer than {SEEDS} seeds, and so undecided: {', '.join(few)}."


def ends(data: Measured) -> Table:
    """Single replicas at the end, the model that a last merge makes of them, and what it costs."""
    rows = [
        (
            name,
            data.about(name),
            shown(data.figure(name, single), 4, "diverged"),
            shown(data.figure(name, merged), 4, "diverged"),
            shown(data.figure(name, lambda result: result.single - result.merged), 4),
            shown(data.figure(name, spread), 2),
            shown(data.figure(name, lambda result: result.bytes_per_step / 1e3), 1),
            shown(data.figure(name, lambda result: bytes_with_merge(result) / 1e3), 1),
        )
        for name in ENDS
    ]
    header = (
        "recipe",
        "what it is",
        "loss, single",
        "loss, merged",
        "a merge gains",
        "spread x 1000",
        "kB / step",
        "with a last merge",
    )
    title = "The end of a run: what a last merge gives, and what it costs"
    return Table(title, " ".join(_said_of_ends(data)), header, tuple(rows), data.take_missing(), 2)


def _said_of_ends(data: Measured) -> Iterator[str]:
    for name in ENDS:
        gain = data.figure(name, lambda result: result.merged - result.single)
        cost = data.figure(name, lambda result: bytes_with_merge(result) / result.bytes_per_step - 1.0)
        if is_enough(gain) and cost is not None:
            yield (
                f"A last merge changes the loss of replicas of {name} by {signed(gain, 4)} nats ({seeds(gain)}), for "
                f"{cost.mean:.1%} more bytes."
            )
