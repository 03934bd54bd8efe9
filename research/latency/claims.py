"""Both latency claims of the papers, from messages really exchanged: tree against pair, barrier against pairs.

    python -m research.latency.claims [--trials 2000] [--processes 2] [--seed 0] [--out research/pictures/latency.png]
    python -m research.latency.claims --quick

Nothing here is a formula: actors exchange messages over the simulator's lines in virtual time, and what is printed is
when the last one was done. `latency.tree` says which tree and which pair the paper must have meant, `latency.blocking`
what its other experiment is, `latency.open_rounds` what this project's own rounds make of it. Each figure is printed
beside the one to be reproduced (`latency.paper`). The exit code is 1 if one deviates by more than 5 % and nobody knows
why. All of it depends on the seed alone, not on the number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from research.latency import jobs
from research.latency.paper import EXPLAINED, TOLERANCE, Comparison
from research.latency.picture import picture
from research.latency.survey import OWN_CELLS, TALKED_SPREAD, Scale, Survey
from research.latency.survey import jobs as work

QUICK = Scale(trials=40, workers_at_most=64, outer_steps=30, long_outer_steps=30, repeats=4, own_replicas_at_most=16)
PICTURE = Path(__file__).parents[1] / "pictures" / "latency.png"


def survey(scale: Scale, processes: int) -> Survey:
    """Measure everything."""
    placed = work(scale)
    return Survey(scale, [place for place, _ in placed], jobs.run([job for _, job in placed], processes))


def comparisons(found: Survey) -> list[Comparison]:
    """Return every figure that has one to be compared with."""
    trees = [row for row in found.rows("complete") if row[1] > 2]
    return [
        *(found.tree_comparison(spread, workers) for spread, workers in trees),
        *(found.blocking_comparison(*row) for row in found.rows("blocking")),
        *found.printed_comparisons(),
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(lines)


def trees(found: Survey) -> str:
    """Return the table of tree against pair."""
    rows = []
    for spread, workers in found.rows("complete"):
        if workers == 2:
            continue
        one, times = found.tree_comparison(spread, workers), found.times("complete", (spread, workers))
        other = found.ratio("binomial", spread, workers)[0]
        measured = (f"{times.trials}", f"{times.mean_s:.2f}", f"{one.ours:.2f}", f"{100 * one.error:.1f} %")
        rows.append((f"{spread}", f"{workers}", *measured, f"{one.theirs:g}", _percent(one), f"{other:.2f}"))
    head = ("std/mean", "n", "trials", "time, s", "over pair", "error", "to be", "deviation", "binomial")
    return table(head, rows)


def conversations(found: Survey) -> str:
    """Return the table of real conversations beside bare messages."""
    rows = []
    for workers in (workers for workers in found.rows("talked") if workers > 2):
        (talked, error), (carried, other) = found.talked_ratio(workers), found.ratio("complete", TALKED_SPREAD, workers)
        errors = abs(talked / carried - 1) / (error**2 + other**2) ** 0.5
        apart = (f"{100 * (talked / carried - 1):+.1f} %", f"{errors:.1f} standard errors")
        rows.append((f"{workers}", f"{talked:.3f}", f"{carried:.3f}", *apart))
    return table(("n", "talk", "carry", "apart", "that is"), rows)


def blocking(found: Survey) -> str:
    """Return the table of barrier against pairs."""
    rows = []
    for replicas, inner_steps in found.rows("blocking"):
        one = found.blocking_comparison(replicas, inner_steps)
        ours = (f"{found.scale.outer_steps}", f"{one.ours:.3f}", f"{one.theirs:.2f}", _percent(one))
        rows.append((f"{replicas}", f"{inner_steps}", *ours))
    for one, length in zip(found.printed_comparisons(), ("250", "500"), strict=False):
        rows.append(("1024", "100", length, f"{one.ours:.3f}", f"{one.theirs:.2f}", _percent(one)))
    return table(("n", "m", "outer steps", "ratio", "to be", "deviation"), rows)


def own_rounds(found: Survey) -> str:
    """Return the table of what waiting costs in each form."""
    rows = []
    for cell in OWN_CELLS:
        if cell not in found.rows("open form"):
            continue
        diloco, noloco = found.overheads(*cell)
        own = found.own(*cell)
        times = (diloco, noloco, own["blocking form"].overhead, own["open form"].overhead)
        met = (own["blocking form"], own["open form"])
        cells = (*(f"{time:.3f}" for time in times), *(f"{100 * form.met:.1f} %" for form in met))
        rows.append((f"{cell[0]}", f"{cell[1]}", *cells))
    head = ("n", "m", "barrier", "pairs that wait", "our blocking form", "our open form", "blocking met", "open met")
    return table(head, rows)


def _percent(one: Comparison) -> str:
    return f"{100 * one.deviation:+.1f} %"


def show(found: Survey) -> None:
    """Print all tables."""
    for heading, text in (
        ("Tree all-reduce over pair average, mean latency 1 s", trees(found)),
        (f"The same over conversations, spread {TALKED_SPREAD}", conversations(found)),
        (
            "Total time of a barrier (DiLoCo) over pairs that wait (NoLoCo); m inner steps per outer one",
            blocking(found),
        ),
        ("Time over the time of the inner steps alone, and rounds met of those opened", own_rounds(found)),
    ):
        print(f"\n{heading}\n\n{text}")


def main() -> int:
    """Measure, print, draw; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trials = f"of the tree of 1024, smaller ones get more; {Scale().trials} by default, {QUICK.trials} with --quick"
    parser.add_argument("--trials", type=int, help=trials)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: few trials, small swarms")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the picture; with --quick none is drawn unless this is given")
    arguments = parser.parse_args()
    if arguments.processes < 1 or (arguments.trials is not None and arguments.trials < 1):
        parser.error("--trials and --processes are at least 1")
    torch.set_num_threads(1)
    plan = QUICK if arguments.quick else Scale()
    scale = replace(plan, trials=arguments.trials or plan.trials, seed=arguments.seed)
    begun = time.perf_counter()
    found = survey(scale, arguments.processes)
    show(found)
    out = arguments.out or (None if arguments.quick else PICTURE)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(picture(found))
    return verdict(comparisons(found), 3.0 if arguments.quick else 0.0, time.perf_counter() - begun)


def verdict(compared: Sequence[Comparison], errors: float, seconds: float) -> int:
    """Print what deviates too much, by more than so many standard errors of ours; return the exit code."""
    print()
    for one in compared:
        if abs(one.deviation) > TOLERANCE:
            known = EXPLAINED.get(one.name)
            print(f"{one.name}: {one.ours:.3f} where {one.theirs:g} is to be ({_percent(one)}); {known or 'why?'}")
    beyond = sum(one.is_open(errors) for one in compared)
    worst = max(compared, key=lambda one: abs(one.deviation))
    allowance = f" and {errors:g} standard errors" if errors else ""
    print(
        f"{len(compared)} figures compared in {seconds:.0f} s: {beyond} beyond {100 * TOLERANCE:g} %{allowance} "
        f"without a known reason; the worst is {worst.name}, {_percent(worst)}"
    )
    return int(beyond > 0)


if __name__ == "__main__":
    sys.exit(main())
