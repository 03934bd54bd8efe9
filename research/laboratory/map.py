"""Where gossip wins: a map over churn, unequal speeds, lines and replicas, with two means over all as opponents.

    python -m research.laboratory.map --seeds 1 --only "*_4"  what is due of one seed with four replicas
    python -m research.laboratory.map --tables  the page and the picture again, from what is kept

An interrupted survey goes on where it was: run the same command again. All runs of a seed come before the next seed's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from research.laboratory.experiments.grid import Grid
from research.laboratory.experiments.volunteer_grid import map_grid
from research.laboratory.running.progress import Board
from research.laboratory.running.runner import Work, survey, trial
from research.laboratory.running.store import Store

SEEDS = 5


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`, seed after seed, and write the page and the picture; return the exit code."""
    parser = _parser()
    asked = parser.parse_args(words)
    out: Path = asked.out
    store = Store(out / "map.jsonl")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch in the workers
    failed = 0
    for seeds in range(1, 1 + (0 if asked.tables else asked.seeds)):
        grid = _narrowed(map_grid(seeds), asked.only)
        with Board(grid, store) as board:
            failed += len(survey(grid, store, board, asked.processes, work))
    return 1 if failed else 0


def _narrowed(grid: Grid, patterns: Sequence[str]) -> Grid:
    names = [recipe.name for recipe in grid.recipes]
    return grid.only(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns or ["*"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="map.py",
        usage=argparse.SUPPRESS,  # a mistake is answered by one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tables", action="store_true", help="Run nothing; write page and picture of what is kept.")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="Run so many seeds.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="Run these recipes; * is anything.")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="Run so many cells at a time.")
    parser.add_argument(
        "--out", type=Path, default=Path("research"), metavar="DIR", help="Keep record, page and picture here."
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
