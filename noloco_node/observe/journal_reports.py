"""Reports of journals: tables or curves for other programs, and what a home has given.

A table has one row an event and one column a field; a field with counts by name has a column for each name, as
`sent.microbatch`. Curves are for TensorBoard and Weights & Biases.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec

from noloco_node.admission.ticket import peer_of_file
from noloco_node.errors import config_error, os_errors_as, storage_error, usage_error
from noloco_node.journal import events
from noloco_node.journal.events import fields_of
from noloco_node.journal.reader import journals_in, read
from noloco_node.observe.curves import CurveFormat, drawing, step_figures
from noloco_node.observe.peer_history import Contribution, ledger_of
from noloco_node.observe.swarm_view import plain
from noloco_node.storage import atomic_file
from noloco_node.storage.home import HomePaths
from noloco_node.units import format_bytes, format_count, format_duration, format_energy

LARGEST_INTEGER = 2**63 - 1  # of a column of whole numbers in Parquet
BATCH_ROWS = 8192  # that are in memory at once
FIRST = ("peer_name", "at", "event")


class TableFormat(StrEnum):
    """What journals are written as: two tables and two kinds of curves."""

    CSV = "csv"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"

    @property
    def curves(self) -> CurveFormat | None:
        return None if self in (TableFormat.CSV, TableFormat.PARQUET) else CurveFormat(self)


def export_journals(places: Sequence[Path], out: Path, kind: TableFormat) -> str:
    """Write journals to a new file (curves: to a new directory), and say what was written."""
    journals = journals_in(places)
    if out.exists():
        raise usage_error(f"{out} is there already.", why="nothing is written over", hint="give --out another name")
    if next(rows(journals), None) is None:
        raise config_error(
            "There is nothing to export.", "no event in these journals is legible", "give the home of a node"
        )
    curves = kind.curves
    with os_errors_as(storage_error, f"Cannot write {out}.", "give --out another place"):
        count = _write_whole(journals, out, kind) if curves is None else _draw(journals, out, curves)
    return f"Wrote {count:,} {'points' if curves else 'rows'} to {out}."


def rows(journals: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield a flat row for each legible event of some journals, by their peers' names."""
    for name, path in journals.items():
        for event in read(path):
            fields = dict(fields_of(event))
            row = {"peer_name": name, "at": fields.pop("at"), "event": fields.pop("event")}
            for key, value in fields.items():
                if isinstance(value, dict):
                    row |= {f"{key}.{inner}": count for inner, count in value.items()}
                else:
                    row[key] = msgspec.json.encode(value).decode() if isinstance(value, list | tuple) else value
            yield row


def _write_whole(journals: Mapping[str, Path], out: Path, kind: TableFormat) -> int:
    with atomic_file.replacing(out) as aside:
        columns = _columns(journals)
        count = (_write_csv if kind is TableFormat.CSV else _write_parquet)(journals, columns, aside)
        atomic_file.flush(aside)
    return count


def _columns(journals: Mapping[str, Path]) -> dict[str, type]:
    """Return the columns in order, each with the type of its values: float for int too, str where they differ."""
    found: dict[str, type] = dict.fromkeys(FIRST, str) | {"at": float}
    for row in rows(journals):
        for key, value in row.items():
            if value is None:
                continue
            # A count that no column of whole numbers holds becomes a float.
            now = float if type(value) is int and abs(value) > LARGEST_INTEGER else type(value)
            before = found.get(key, now)
            found[key] = before if before is now else float if {before, now} <= {int, float} else str
    return found


def _write_csv(journals: Mapping[str, Path], columns: Mapping[str, type], out: Path) -> int:
    count = 0
    with out.open("w", newline="", encoding="utf-8") as file:
        # A field that never has a value is no column, and nor is one that a living node wrote down just now.
        table = csv.DictWriter(file, list(columns), restval="", extrasaction="ignore")
        table.writeheader()
        for row in rows(journals):
            table.writerow({key: _harmless(value) for key, value in row.items()})
            count += 1
    return count


def _harmless(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: strangers have written part of a journal."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _write_parquet(journals: Mapping[str, Path], columns: Mapping[str, type], out: Path) -> int:
    import pyarrow
    from pyarrow import parquet

    kinds = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    schema = pyarrow.schema([(name, kinds.get(kind, pyarrow.string())) for name, kind in columns.items()])
    count = 0
    with parquet.ParquetWriter(out, schema) as table:
        told = rows(journals)
        for batch in iter(lambda: list(islice(told, BATCH_ROWS)), []):
            values = [{name: _as(row.get(name), kind) for name, kind in columns.items()} for row in batch]
            table.write_table(pyarrow.Table.from_pylist(values, schema))
            count += len(batch)
    return count


def _as(value: Any, kind: type) -> Any:
    return value if value is None or kind not in (float, str) else kind(value)


def _draw(journals: Mapping[str, Path], out: Path, kind: CurveFormat) -> int:
    count = 0
    for name, path in journals.items():
        with drawing(kind, name, out, offline=True) as draw:
            for point in step_figures(read(path)):
                draw(point)
                count += len(point.figures)
    return count


# What a home has given: `noloco-node me`.


def report(home: Path, *, as_json: bool) -> str:
    """Return what a home has given, as text or as one JSON object a run."""
    journal, me = HomePaths(home).journal, peer_of_file(HomePaths(home).identity)
    told = read(journal)
    first = list(islice(told, 1))
    found = list(ledger_of(chain(first, told)).by_run.values())
    if not found:
        raise config_error(
            f"{home} has given nothing yet.",
            ("its journal does not tell of any run" if journal.exists() else "it has no journal")
            + (f" (you are {me})" if me else ""),
            "name the home of a node that took part with --home",
        )
    if as_json:
        return "\n".join(msgspec.json.encode(each).decode() for each in found)
    lines = [*([f"you are {me}"] if me else []), *(line for each in found for line in _lines(each))]
    if any(isinstance(event, events.Continued) for event in first):
        lines.append(f"since {_day(first[0].at)}: of a long journal the oldest events are dropped")
    return "\n".join(lines)


def _lines(given: Contribution) -> list[str]:
    stages = ", ".join(map(str, sorted(given.stages)))
    rows: list[tuple[str, Any]] = [
        ("as", ", ".join(plain(peer) for peer in given.peers)),
        ("at stage", stages),
        ("there", format_duration(given.there_s)),
        ("computed", f"{format_duration(given.device_s)} of CPU or GPU time, joining and serving not counted"),
        ("tokens", f"{format_count(given.tokens)} in {given.inner_steps:,} inner steps, {given.rounds:,} meetings"),
    ]
    if given.signed_tokens:
        rows.append(
            ("signed", f"receipts for at least {format_count(given.signed_tokens)} tokens that were drawn here")
        )
    rows.append(("sent", f"{format_bytes(given.sent_bytes)}, received {format_bytes(given.received_bytes)}"))
    if given.joules:
        rows.append(("energy", f"{format_energy(given.joules)}, as the device tells"))
    return [f"run {plain(given.run)[:12]}, {_day(given.first_at)} to {_day(given.last_at)}"] + [
        f"  {name:<10}{value}" for name, value in rows
    ]


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
