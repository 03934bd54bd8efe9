"""AdamW, Muon and orthogonal steps inside replicas: what each brings to gossip and to a mean, each at its own rate.


    python -m research.laboratory.optimisers  what is due
    python -m research.laboratory.optimisers --tables  the page again, from what is kept

An interrupted survey goes on where it was: run the same command again. All runs of a seed come before the next seed's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from research.laboratory.experiments.optimiser_grid import optimiser_grid
from research.laboratory.output.table import Table
from research.laboratory.running.by_seed import Survey, run_by_seed
from research.laboratory.running.results import Measured
from research.laboratory.running.runner import Work, trial

INTRODUCTION = """# Optimisers inside

Written by `python -m research.laboratory.optimisers` from its record, optimisers.jsonl; all figures are computed.

**Question.** MuLoCo (arXiv 2505.23725) reports that replicas that train by Muon lose less by averaging seldom than
those that train by AdamW. Is gossip then nearer to the mean over all?

**Runs.** Eight very unequal replicas train 0.09 million parameters, as in the survey of rivals (laboratory.md): the
same model, steps and choices. Muon is torch's, with steps of the size of AdamW's; it takes the matrices inside layers,
and AdamW all else. Runs as short as these favour a short memory of the mean gradient, so AdamW is here twice: with 0.9
for beta1, and with 0.8. "Orthogonal" steps are production's (`inner.orthogonal`): of the same matrices, by Nesterov's
momentum. Each row was tuned at the same five learning rates, on seed 0 of the library's text, which is not reported.

**Reading.** Nats a byte on all held-out text, ± the standard deviation over seeds. Differences are paired by seed, with
their 95 % interval by Student's t, each for one comparison. "Less AdamW's" is the difference to AdamW without
Nesterov's momentum, "less Nesterov's" that to AdamW with it, which production has. Fewer than five seeds decide
nothing."""


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`, seed after seed, and write the page; return the exit code."""
    return run_by_seed(Survey("optimisers", __doc__, optimiser_grid, _page), words, work)


def _page(data: Measured, out: Path) -> list[str | Table]:
    from research.laboratory.output.optimiser_tables import optimiser_tables  # torch and matplotlib

    return [INTRODUCTION, *optimiser_tables(data)]


if __name__ == "__main__":
    sys.exit(main())
