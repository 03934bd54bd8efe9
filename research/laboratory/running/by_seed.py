"""The command of a survey that runs seed after seed and writes a page of its own from its record."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from research.laboratory.experiments.grid import Grid
from research.laboratory.output.table import Table
from research.laboratory.running.progress import Board
from research.laboratory.running.results import Measured
from research.laboratory.running.runner import Work, survey
from research.laboratory.running.store import Store

SEEDS = 5


class Survey(NamedTuple):
    """`name`: of the record and the page. `grid`: what runs with so many seeds. `page`: the parts of the page, whose
    pictures it draws into the directory.
    """

    name: str
    about: str
    grid: Callable[[int], Grid]
    page: Callable[[Measured, Path], list[str | Table]]


def run_by_seed(what: Survey, words: Sequence[str] | None, work: Work) -> int:
    """Run what is due, by `work`, seed after seed, and write the page; return the exit code."""
    parser = _parser(what)
    asked = parser.parse_args(words)
    if not _narrowed(what.grid(1), asked.only).recipes:
        parser.error(f"no recipe is named {' or '.join(asked.only)}; {what.name}.md lists them")
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {asked.out} cannot be a directory: {error.strerror}")
    store = Store(asked.out / f"{what.name}.jsonl")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch in the workers
    failed = 0
    for seeds in range(1, 1 + (0 if asked.tables else asked.seeds)):
        grid = _narrowed(what.grid(seeds), asked.only)
        with Board(grid, store) as board:
            failed += len(survey(grid, store, board, asked.processes, work))
    parts = what.page(Measured(what.grid(SEEDS), store), asked.out)
    page = "\n\n".join(part if isinstance(part, str) else part.markdown() for part in parts)
    (asked.out / f"{what.name}.md").write_text(page + "\n", encoding="utf-8")
    return 1 if failed else 0


def _narrowed(grid: Grid, patterns: Sequence[str]) -> Grid:
    names = [recipe.name for recipe in grid.recipes]
    return grid.only(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns or ["*"]))


def _parser(what: Survey) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{what.name}.py",
        usage=argparse.SUPPRESS,  # a mistake is answered by one line
        description=what.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tables", action="store_true", help="Run nothing; write the page again of what is kept.")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="Run so many seeds.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="Run these recipes; * is anything.")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="Run so many cells at a time.")
    parser.add_argument("--out", type=Path, default=Path("research"), metavar="DIR", help="Keep record and page here.")
    return parser
