"""Every system of both papers in one laboratory: runs, tables, pictures.

    python benchmarks/papers.py --small            a dozen methods, under ten minutes on two cores
    python benchmarks/papers.py --all              everything, some hours; each finished run is kept at once
    python benchmarks/papers.py --tables           the tables and the picture again, from what is kept

An interrupted survey goes on where it was: run the same command again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from laboratory.grid import Grid
from laboratory.measured import Measured
from laboratory.progress import Board
from laboratory.recipes import everything, small, smoke
from laboratory.runner import Work, survey, trial
from laboratory.store import Store
from laboratory.tables import every_table, foot

INTERRUPTED = 130
INTRODUCTION = """# The laboratory

Written by `benchmarks/papers.py` from its record of runs; every sentence is computed from the figures below it. A
figure is mean ± standard deviation over seeds (number of seeds). Losses are nats a token on held-out text, of the model
with the mean of all replicas' weights where nothing else is said. Two recipes are compared seed by seed; they are level
where they differ by at most 0.01 nats. A larger difference within one standard deviation of itself decides nothing.

What is tuned and what is not: every family has the same budget of four learning rates, on seed 0. Nothing else is
tuned for the papers' methods: they keep the papers' constants, and rounds every 50 steps where nothing else is said.
The steps between rounds, the rule and the codec of asynchronous gossip were searched here, at seed 0 and on this same
validation text (the probes are in docs/log.md), which favours it. Methods named "paced" have its rounds.

Bytes are those of the run. The merged model of replicas that differ costs once more the weights of each, in the form in
which they travel to somebody who may be anywhere (bfloat16 where the codec is int4): "with a last merge" counts that.
Methods whose replicas are alike at the end need none."""


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`; then print and draw what the record says; return the exit code."""
    parser = _parser()
    asked = parser.parse_args(words)
    grid = small() if asked.small else smoke() if asked.smoke else everything()
    grid = _narrowed(grid, asked.only, parser)
    out: Path = asked.out or (Path("build/laboratory") if asked.small or asked.smoke else Path("docs"))
    try:
        store = Store(asked.results or out / "laboratory.jsonl")
    except OSError as error:
        parser.error(f"the results cannot be read: {error}")
    if asked.tables:
        if not store.path.exists():
            parser.error(
                f"there is no record {store.path} to make tables of; run a survey first, or name it: --results"
            )
        return _written(grid, store, out, parser)
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch in the workers
    with Board(grid, store) as board:
        try:
            failures = survey(grid, store, board, asked.processes, work)
        except KeyboardInterrupt:
            print(f"interrupted; the record {store.path} holds {len(store)} results", file=sys.stderr)
            return INTERRUPTED
        except OSError as error:
            print(f"stopped: {store.path} cannot be written ({error}); what it holds is kept", file=sys.stderr)
            return 1
    written = _written(grid, store, out, parser)
    for failed in failures:
        run, last = failed.run, failed.reason.rpartition("\n")[2]
        print(f"failed: {run.name}, rate {run.cell.learning_rate:g}, seed {run.cell.seed}: {last}", file=sys.stderr)
    waiting = grid.extent()[0] - grid.done(store)[0] - len(failures)
    if waiting:
        print(f"{waiting} runs wait for a tuning that failed", file=sys.stderr)
    return 1 if failures else written


def _written(grid: Grid, store: Store, out: Path, parser: argparse.ArgumentParser) -> int:
    """Print the tables, and write them and the picture below `out`."""
    from laboratory.pictures import picture  # matplotlib, which the workers need not load

    data = Measured(grid, store)
    parts = [*(table.markdown() for table in every_table(data)), foot(data)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    print(text)
    pages, drawing = out / "laboratory.md", out / "pictures" / "laboratory.png"
    try:
        drawing.parent.mkdir(parents=True, exist_ok=True)
        pages.write_text(f"{INTRODUCTION}\n\n{text}", encoding="utf-8")
        drawing.write_bytes(picture(data))
    except OSError as error:
        parser.error(f"the tables cannot be written: {error}")
    print(f"written: {pages}, {drawing}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="papers.py",
        usage=argparse.SUPPRESS,  # a mistake is answered by one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="Run the whole survey: tuning, then three seeds.")
    what.add_argument("--small", action="store_true", help="Run a dozen methods at tuned rates: 4 replicas, one seed.")
    what.add_argument("--smoke", action="store_true", help="Run every method for six steps, to see that it runs.")
    what.add_argument("--tables", action="store_true", help="Run nothing; write tables and pictures of what is kept.")
    parser.add_argument(
        "--processes", type=_processes, default=2, metavar="N", help="Run so many cells at a time, one thread each."
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="Keep the results here, one JSON line a run; laboratory.jsonl in the output directory otherwise.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="Write tables and pictures below this directory; docs, or build/laboratory for --small and --smoke.",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Run these recipes, what they are changes of, and the tuning that they need; * stands for anything.",
    )
    return parser


def _processes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of processes; it takes 1 or more")
    return int(text)


def _narrowed(grid: Grid, wanted: Sequence[str], parser: argparse.ArgumentParser) -> Grid:
    names = [recipe.name for recipe in grid.recipes]
    found: list[str] = []
    for pattern in wanted:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            parser.error(f"no recipe is named '{pattern}'; there are {', '.join(names)}")
        found += matching
    return grid.only(found) if wanted else grid


if __name__ == "__main__":
    sys.exit(main())
