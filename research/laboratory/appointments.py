"""Gossip by appointment: does it help to agree on partners and step sizes a round ahead?

    python -m research.laboratory.appointments  what is due
    python -m research.laboratory.appointments --tables  the page again, from what is kept

An interrupted survey goes on where it was: run the same command again. All runs of a seed come before the next seed's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from research.laboratory.experiments.appointment_grid import appointment_grid
from research.laboratory.output.table import Table
from research.laboratory.running.by_seed import Survey, run_by_seed
from research.laboratory.running.results import Measured
from research.laboratory.running.runner import Work, trial

INTRODUCTION = """# Appointments

Written by `python -m research.laboratory.appointments` from its record, appointments.jsonl; all figures are computed.

**Question.** In gossip a correction comes some inner steps late: a replica takes its snapshot, then finds a partner,
swaps probes with it, and only then sends its codes. Does it help if two replicas agree a round ahead on partner, moment
and step sizes, so that codes leave together with the snapshot?

**How.** A replica whose meeting is over asks others, in the random order of its next round. Two that agree settle a
moment for both snapshots and swap the probes of their last snapshots, so step sizes are a round old. A round without
an appointment, or whose appointment breaks, goes on as always (`research/laboratory/methods/appointments.py`). All
messages travel on the simulated lines, and all clocks are alike.

**Runs.** AdamW with Nesterov's momentum, at a rate of 0.01, which was the best of five for gossip and the mean
(optimisers.md), and for all methods of the map without that momentum. Machines that stay: eight very unequal replicas
train 0.09 million parameters, as in the survey of rivals (laboratory.md). Churn: a place of the map (map.md), four
replicas, 100/20, the slowest machine half as fast, a peer leaves so often in an hour of presence. Choices were made on
seed 1 of the library's text.

**Reading.** Nats a byte on all held-out text, ± the standard deviation over seeds. Differences are paired by seed, with
their 95 % interval by Student's t, each for one comparison. "Kept" is the share of meetings that were appointments.
Fewer than five seeds decide nothing."""


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`, seed after seed, and write the page; return the exit code."""
    return run_by_seed(Survey("appointments", __doc__, appointment_grid, _page), words, work)


def _page(data: Measured, out: Path) -> list[str | Table]:
    from research.laboratory.output.appointment_tables import appointment_tables  # torch and matplotlib

    return [INTRODUCTION, *appointment_tables(data)]


if __name__ == "__main__":
    sys.exit(main())
