"""`noloco-node me` and `journal export`: what nodes have written down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noloco_node.cli.options import HomeOption, default_home
from noloco_node.machine.signals import unwound

journal = typer.Typer(no_args_is_help=True, help="What nodes have written down: journals.")


def me(
    home: HomeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run instead of text.")] = False,
) -> None:
    """Say what this home has given to which runs: tokens, hours, bytes, as its own journal has them."""
    from noloco_node.observe.journal_reports import report

    typer.echo(report(home or default_home("node"), as_json=as_json))


@journal.command(name="export")
def export_journal(
    out: Annotated[Path, typer.Option(metavar="PATH", help="New file; for curves a new directory.")],
    homes: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Homes of nodes, or directories that hold such homes.")
    ],
    kind: Annotated[str, typer.Option("--to", help="csv, parquet, tensorboard, or wandb (offline).")] = "csv",
) -> None:
    """Write journals as a table, one row an event, or as curves for TensorBoard or Weights & Biases."""
    from noloco_node.observe.journal_reports import TableFormat, export_journals

    if kind not in list(TableFormat):
        raise typer.BadParameter(f"{kind!r} is none of {', '.join(TableFormat)}")
    with unwound():
        typer.echo(export_journals(homes, out, TableFormat(kind)))
