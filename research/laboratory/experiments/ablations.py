"""What one change does, each beside the recipe that lacks it: late corrections, weighed meetings, starts and ends.

Nothing here is tuned: a change takes the learning rate of its family, and one seed. What is different is one field of
the cell, so the difference in loss is what that does at this rate, on seed 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from research.laboratory.experiments.cell import Cell
from research.laboratory.experiments.grid import Recipe

SLOWER = (4, 16)
"""By how much lines are slower than the laboratory's."""
START = END = 0.1
"""Share of the budget that a common start, and an end with frequent rounds, take."""
LAST_ROUNDS = 3
"""As many as 8 replicas need for the mean of all, if every pair were well chosen."""
ROSTER_LAG_S = 30.0


class Plain(NamedTuple):
    """The cells that are changed. `ours_late`: rare rounds to the end. `by_noloco_rule`: ours, by NoLoCo's own rule."""

    ours: Cell
    ours_float32: Cell
    ours_late: Cell
    by_noloco_rule: Cell
    noloco: Cell


def changes(plain: Plain) -> Iterator[Recipe]:
    """Yield each change; of all, the name of the recipe that lacks it is in `beside`."""
    ours, noloco = plain.ours, plain.noloco
    weighed = "means weighed by the inner steps that each brings"
    start, end = f"{START:.0%} of the tokens trained data-parallel before", f"the last {END:.0%}"
    found = {
        "ours_weighed": ("ours_float32", replace(plain.ours_float32, weighed=True), f"sent as float32, {weighed}"),
        "ours_noloco_rule_weighed": (
            "ours_noloco_rule",
            replace(plain.by_noloco_rule, weighed=True),
            f"by NoLoCo's own rule, {weighed}",
        ),
        "noloco_lookahead": (
            "noloco",
            replace(noloco, rule=replace(noloco.rule, lookahead=True)),
            "Nesterov's look-ahead instead of heavy ball",
        ),
        **{
            f"ours_lines_{slower}": (
                "ours",
                replace(ours, slower_lines=float(slower)),
                f"on lines {slower} times slower",
            )
            for slower in SLOWER
        },
        f"ours_late_lines_{SLOWER[-1]}": (
            "ours_late",
            replace(plain.ours_late, slower_lines=float(SLOWER[-1])),
            f"a round every {plain.ours_late.inner_steps} steps, on lines {SLOWER[-1]} times slower",
        ),
        "ours_common_start": ("ours", replace(ours, common_start=START), start),
        "noloco_common_start": ("noloco", replace(noloco, common_start=START), start),
        "ours_often_at_end": (
            "ours",
            replace(ours, often_at_end=END),
            f"a round every {ours.inner_steps} steps again in {end}",
        ),
        "ours_last_rounds": ("ours", replace(ours, last_rounds=LAST_ROUNDS), f"{LAST_ROUNDS} rounds more at the end"),
        "ours_charged": ("ours", replace(ours, charged=True), "coding and outer steps wait their turn at the device"),
        "ours_beside": (
            "ours",
            replace(ours, beside=True),
            "coding and outer steps beside the inner steps, on one core",
        ),
        "ours_roster_lag": (
            "ours",
            replace(ours, roster_lag_s=ROSTER_LAG_S),
            f"rosters {ROSTER_LAG_S:g} s out of date",
        ),
    }
    for name, (beside, cell, what) in found.items():
        family, system = ("noloco", "NoLoCo") if name.startswith("noloco") else ("ours", "asynchronous gossip")
        family = "noloco" if beside == "ours_noloco_rule" else family
        # How a node computes on a CPU, and so as sure as the headline itself.
        seeds = 3 if name == "ours_beside" else 1
        yield Recipe(name=name, family=family, cell=cell, about=f"{system}, {what}", seeds=seeds, beside=beside)
