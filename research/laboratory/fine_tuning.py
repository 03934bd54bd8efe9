"""A downstream measure: held-out loss after the same short fine-tuning of what each method has made.

    python -m research.laboratory.fine_tuning  what is due
    python -m research.laboratory.fine_tuning --tables  the page again, from what is kept

An interrupted survey goes on where it was: run the same command again. All runs of a seed come before the next seed's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from research.laboratory.experiments.fine_tuning_grid import fine_tuning_grid
from research.laboratory.output.table import Table
from research.laboratory.running.by_seed import Survey, run_by_seed
from research.laboratory.running.results import Measured
from research.laboratory.running.runner import Work, trial

INTRODUCTION = """# After a fine-tuning

Written by `python -m research.laboratory.fine_tuning` from its record, fine_tuning.jsonl; all figures are computed.

**Question.** Methods end at other losses on the text that they train on. How much of that is left when somebody takes
the model home and trains it on another text?

**Runs.** Eight very unequal replicas train 0.09 million parameters with each method, as in the survey of rivals
(laboratory.md): the same model, steps, rate and choices. Then one machine trains the merged model on English prose
(Python's reference, as pydoc keeps it): 80 steps of 256 bytes, fresh moments, the same text for all methods of a seed.
It does so at three rates, and the rate with the lowest loss on seed 0 counts; reported are the other seeds.

**Reading.** Nats a byte on all held-out text: *before* and *after* on that of the prose, ± the standard deviation over
seeds. The difference to the mean with the same choices is paired, with its 95 % interval by Student's t, for one
comparison; above 0 the mean is better. Fewer than five seeds decide nothing."""


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`, seed after seed, and write the page; return the exit code."""
    return run_by_seed(Survey("fine_tuning", __doc__, fine_tuning_grid, _page), words, work)


def _page(data: Measured, out: Path) -> list[str | Table]:
    from research.laboratory.output.fine_tuning_tables import fine_tuning_tables  # torch and matplotlib

    return [INTRODUCTION, *fine_tuning_tables(data)]


if __name__ == "__main__":
    sys.exit(main())
