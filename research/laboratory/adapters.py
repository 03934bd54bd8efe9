"""Adapters in a swarm: plain means of A and B, FFA-LoRA and alternating matrices, and two ways without gossip.

python -m research.laboratory.adapters
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from research.laboratory.experiments.adapter_grid import adapter_grid
from research.laboratory.running.by_seed import Survey, run_by_seed
from research.laboratory.running.results import Measured
from research.laboratory.running.runner import Work, trial


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`, seed after seed, and write the page; return the exit code."""
    return run_by_seed(Survey("adapters", __doc__, adapter_grid, _write), words, work)


def _write(data: Measured, out: Path) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
