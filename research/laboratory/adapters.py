"""Adapters in a swarm: plain means of A and B, FFA-LoRA and alternating matrices, and two ways without gossip.

    python -m research.laboratory.adapters --only "mean*"  what is due of the plain mean
    python -m research.laboratory.adapters --tables  the page again, from what is kept

An interrupted survey goes on where it was: run the same command again. All runs of a seed come before the next seed's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from research.laboratory.experiments.adapter_grid import adapter_grid
from research.laboratory.output.table import Table
from research.laboratory.running.by_seed import Survey, run_by_seed
from research.laboratory.running.results import Measured
from research.laboratory.running.runner import Work, trial

INTRODUCTION = """# Adapters in a swarm

Written by `python -m research.laboratory.adapters` from its record, adapters.jsonl; figures and verdicts are computed.

**Question.** Replicas that gossip adapters (LoRA) meet by the mean of their A and the mean of their B. The product of
two means is not the mean of the products. Is it better to train B alone (FFA-LoRA), so that both are the same, or to
train B in one round and A in the next?

**Runs.** A Llama of 0.14 million parameters is trained by one machine on one text (500 steps of 512 bytes) and frozen.
Four replicas on equal machines then train adapters of rank 4 (alpha 8) on all its linear layers, on another text, with
80 inner steps each of 256 bytes. Gossip is the production's: random partners, training goes on, int4 with error
feedback, rounds of 4 inner steps growing to 16, one last meeting. Injection of adapters, their first values, inner
optimiser, outer rule and scoring are the production's as well. Alternating replicas exchange and average both
matrices in every meeting. The initial A, the base and the text that a replica draws are those of the seed for all
sides. The score is the loss of the base with the mean of all replicas' A and B, on all of the held-out text (46 to 94
kB).

**Tuning.** Each side at four learning rates, on seed 0, on a base of prose and adapters of the library: neither that
seed nor that pair of texts is reported. FFA-LoRA has higher rates to choose from, for it needs them.

**Reading.** Losses ± their 95 % interval over seeds. A difference is paired: the same seed, base and text; below 0 the
side is better than the plain mean. Its intervals are over seeds and 32 parts of the held-out text together, by
Student's t; the second is corrected for all comparisons of this page (Bonferroni). *Apart*: how far mean(B) mean(A)
is from mean(B A) at the end, as a share of its norm. Bytes are what a replica sent in its meetings, but for the probes
(32 kB a meeting, whatever the size of a model); data parallel sends float32. Fewer than five seeds decide nothing."""
LIMITS = """## Limits

The model is tiny, the text is bytes, and a run has 80 steps, in which an adapter has far to go. Replicas draw from the
same text; with a text of its own for each they would move further apart. Machines are equal and nobody leaves. Gossip
takes the steps that are under way when the others end: up to 3 of 320 more.

Matrices that rest are frozen by the laboratory: the program has `freeze_a`, and no field for alternating ones.

    python -m research.laboratory.adapters  # goes on with what is missing"""


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`, seed after seed, and write the page; return the exit code."""
    return run_by_seed(Survey("adapters", __doc__, adapter_grid, _page), words, work)


def _page(data: Measured, out: Path) -> list[str | Table]:
    from research.laboratory.output.adapter_tables import adapter_tables, said  # torch and matplotlib

    return [INTRODUCTION, "## What came out", said(data), *adapter_tables(data), LIMITS]


if __name__ == "__main__":
    sys.exit(main())
