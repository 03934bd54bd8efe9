"""Every system of both papers in one laboratory: runs, tables, pictures.

    python -m research.laboratory.papers --small  a dozen methods, under ten minutes on two cores
    python -m research.laboratory.papers --all  everything, some hours; each finished run is kept at once
    python -m research.laboratory.papers --headline  what the headline still lacks, on two texts, in order
    python -m research.laboratory.papers --rivals  gossip and its rivals on an equal footing, smaller, two texts
    python -m research.laboratory.papers --sensitivity  what the papers vary, smaller
    python -m research.laboratory.papers --tables  the tables and the picture again, from what is kept

An interrupted survey goes on where it was: run the same command again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from research.laboratory.experiments.grid import Grid
from research.laboratory.experiments.recipes import everything, headline_runs, small, smoke
from research.laboratory.experiments.rivals import rivals
from research.laboratory.experiments.sensitivity import sensitivity
from research.laboratory.output.rival_tables import rival_tables
from research.laboratory.output.sensitivity_tables import sensitivity_tables
from research.laboratory.output.tables import every_table, foot
from research.laboratory.running.progress import Board
from research.laboratory.running.results import Measured
from research.laboratory.running.runner import Work, survey, trial
from research.laboratory.running.store import Store

INTERRUPTED = 130
INTRODUCTION = """# The laboratory

Written by `research/laboratory/papers.py` from its record of runs; every sentence beside a table is computed from its
figures. A figure is mean ± standard deviation over seeds (number of seeds). Losses are nats a token on held-out text,
of the model with the mean of all replicas' weights where nothing else is said. Two recipes are compared seed by seed.
Fewer than three seeds decide nothing, nor does a difference within one standard deviation of itself; two recipes are
level where they differ by at most 0.01 nats and that deviation is no larger.

What is tuned and what is not: every family has the same budget of four learning rates, on seed 0, which is one of the
three reported; mean_equal and diloco_equal have two of these, 0.005 and 0.01, since both other families with rounds so
frequent chose the second and did worse at 0.02. Nothing else is tuned for the papers' methods: they keep the papers'
constants, and rounds every 50 steps where nothing else is said. The steps between rounds, the rule and the codec of
asynchronous gossip were searched here, at seed 0 and on this same validation text (the probes are in research/log.md),
which favours it. On the other text nothing was chosen: rates and all else are those of the first. The tables of rivals
are of a second survey (`--rivals`): a model of 0.09 million parameters, one learning rate for all, seeds on which
nothing was chosen, and the same two texts. There the rivals of others had three settings each, of about the same bytes,
and the best on seed 0 is reported on seeds 1 to 3. Methods named "paced" have as many steps between rounds as gossip,
which makes fewer rounds in all. Asynchronous gossip is held only against methods that were given its codec, its dynamic
steps, its weights of a mean and its growing rounds.

Bytes are those of the run. The merged model of replicas that differ costs once more the weights of each, in the form in
which they travel to somebody who may be anywhere (bfloat16 where the codec is int4): "with a last merge" counts that.
Methods whose replicas are alike at the end need none."""
WITHDRAWN = """### Withdrawn claims (2026-11-22)

Written by hand. Until this day these pages held asynchronous gossip against synchronous means that had been given
neither its codec (int4 with error feedback) nor its dynamic steps. That says what these two give, and nothing about
doing without a barrier. Withdrawn are:

- "Level with or better than every synchronous DiLoCo", with 0.22 and 0.02 nats to show for it: those had neither, and
  the second was one seed.
- "Seven times the bytes" and "four times the time" of synchronous means with rounds as frequent: they sent float32, and
  let every machine take as many steps as the slowest.
- "Nobody waits gains 0.062": one seed, and 90 rounds against 56 (`ours`, `ours_in_step`). At 56 rounds each
  (`ours_none`, `ours_in_step`, seed 0) asynchrony, lateness and int4 together cost 0.046.
- "14 % off data parallel": of the loss. In perplexity it is 18 %.
- "Closes two thirds of NoLoCo's gap" without its conditions: very unequal machines, this text, coding charged no time.
- "Asynchronous gossip is the best after data parallel" of 4, 8 and 16 replicas, and "the laboratory found best" of the
  defaults: rivals with fewer choices, and mostly one seed.
- Every difference that rests on one seed, as a result.

An independent check found it: a synchronous mean with int4 and error feedback both ways, dynamic steps, replicas
weighed by their tokens and rounds of 7 growing to 24 steps, untuned, ended at 1.242 and 1.244 nats (seeds 0, 1). That
mean is now a method of this laboratory, `mean_equal`, and leads the headline below on three seeds of both texts. (The
same check found gossip on the second text, with other speeds and one seed, at 0.58 of the gap, and on equal machines at
0.35.)

What gossip offers whatever the loss: no barrier, no collective, nobody whose absence stops the others, and any number
of replicas."""


def main(words: Sequence[str] | None = None, work: Work = trial) -> int:
    """Run what is due, by `work`; then print and draw what the record says; return the exit code."""
    parser = _parser()
    asked = parser.parse_args(words)
    made = {"small": small, "smoke": smoke, "rivals": rivals, "headline": headline_runs}
    made["sensitivity"] = sensitivity
    grid = next((make() for name, make in made.items() if getattr(asked, name)), everything())
    grid = _narrowed(grid, asked.only, parser)
    out: Path = asked.out or (Path("build/laboratory") if asked.small or asked.smoke else Path("research"))
    note = "" if asked.small or asked.smoke else WITHDRAWN
    try:
        store = Store(asked.results or out / "laboratory.jsonl")
    except OSError as error:
        parser.error(f"the results cannot be read: {error}")
    if asked.tables:
        if not store.path.exists():
            parser.error(
                f"there is no record {store.path} to make tables of; run a survey first, or name it: --results"
            )
        return _written(grid, store, out, parser, note)
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
    is_part = asked.rivals or asked.headline or asked.sensitivity
    written = _written(everything() if is_part else grid, store, out, parser, note)
    for failed in failures:
        run, last = failed.run, failed.reason.rpartition("\n")[2]
        print(f"failed: {run.name}, rate {run.cell.learning_rate:g}, seed {run.cell.seed}: {last}", file=sys.stderr)
    waiting = grid.extent()[0] - grid.done(store)[0] - len(failures)
    if waiting:
        print(f"{waiting} runs wait for a tuning that failed", file=sys.stderr)
    return 1 if failures else written


def _written(grid: Grid, store: Store, out: Path, parser: argparse.ArgumentParser, note: str) -> int:
    """Print the tables, and write them below `out`, after an introduction and a note, and the picture.

    With a note they are the page of the documents, which holds the smaller surveys too.
    """
    from research.laboratory.output.plots import picture  # matplotlib, which the workers need not load

    data = Measured(grid, store)
    text = tables(data, store if note else None)
    print(text)
    pages, drawing = out / "laboratory.md", out / "pictures" / "laboratory.png"
    try:
        drawing.parent.mkdir(parents=True, exist_ok=True)
        pages.write_text(page(text, note), encoding="utf-8")
        drawing.write_bytes(picture(data))
    except OSError as error:
        parser.error(f"the tables cannot be written: {error}")
    print(f"written: {pages}, {drawing}", file=sys.stderr)
    return 0


def tables(data: Measured, store: Store | None = None) -> str:
    """Return all tables that the record can fill; with the `store` also those of the rivals and of what papers vary."""
    parts = [*(table.markdown() for table in every_table(data)), foot(data)]
    if store is not None:
        others, varied = Measured(rivals(), store), Measured(sensitivity(), store)
        before = [*(table.markdown() for table in rival_tables(others)), foot(others)]
        parts = [*before, *parts, *(table.markdown() for table in sensitivity_tables(varied)), foot(varied)]
    return "\n\n".join(part for part in parts if part) + "\n"


def page(text: str, note: str) -> str:
    """Return the page of some tables, a note before them."""
    return "\n\n".join(part for part in (INTRODUCTION, note, text) if part)


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
    what.add_argument("--headline", action="store_true", help="Run what the headline lacks, the most telling first.")
    what.add_argument("--rivals", action="store_true", help="Run gossip and its rivals on an equal footing.")
    what.add_argument("--sensitivity", action="store_true", help="Run what the papers vary, at the small scale.")
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
        help="Write tables and pictures below this directory; research, or build/laboratory for --small and --smoke.",
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
