"""Prints figures of the product's structure, read from its syntax trees.

    python -m benchmarks.structure [--at REVISION]... [--json]

Without a revision it measures the working tree; with several it prints them side by side, so that what was before and
what is after come from one command. Packages are compared as they lie on the disk: "at the top" are gossip, pipeline,
and what noloco_node holds directly; the parts of a package are what it holds directly. An arrow leads from one to
another if a module of the first imports one of the second, under TYPE_CHECKING and inside functions too. Two to five
seconds a revision.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from itertools import zip_longest

from benchmarks.structure.figures import Figures, measure
from benchmarks.structure.source import read_commit, read_tree

CELL_WIDTH = 52
"""Longer entries are broken, so that two versions fit beside each other."""


def table(columns: dict[str, Figures]) -> str:
    """Set the figures of several versions side by side; a list takes several lines."""
    labels = list(dict.fromkeys(label for figures in columns.values() for label in figures))
    rows = [("", *columns)]
    for label in labels:
        cells = [_cell(figures.get(label, "")) for figures in columns.values()]
        rows += zip_longest([label], *cells, fillvalue="")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at", action="append", default=[], metavar="REVISION", help="measure this commit")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        columns = {revision: measure(read_commit(revision)) for revision in options.at}
    except ValueError as error:
        parser.error(str(error))
    columns = columns or {"working tree": measure(read_tree())}
    print(json.dumps(columns, indent=1) if options.json else table(columns))


def _cell(value: int | str | list[str]) -> list[str]:
    entries = (value or ["none"]) if isinstance(value, list) else [str(value)]
    return [line for entry in entries for line in textwrap.wrap(entry, CELL_WIDTH, subsequent_indent="  ") or [""]]


if __name__ == "__main__":
    main()
