"""Journals as tables: nothing is lost, nothing written over, and nothing that a stranger said is a formula."""

import csv
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pyarrow.parquet
import pytest
from command_line import printed
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from sample_events import inner, started, write_journal
from typer.testing import CliRunner

from noloco_node.cli.main import app
from noloco_node.errors import UserError
from noloco_node.journal import events
from noloco_node.journal.writer import Journal
from noloco_node.observe.journal_reports import TableFormat, export_journals, report
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from tests.support.fake_loggers import FakeLoggers


@pytest.fixture
def homes(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / "swarm" / name).mkdir(parents=True)
        with Journal(tmp_path / "swarm" / name / "journal.jsonl", now=lambda: 5.0) as journal:
            journal.write(events.Traffic(sent={"microbatch": 100}, received={}))
            journal.write(events.StateChanged(state=PeerState.TRAINING, waiting=Wait(WaitCause.OTHER, detail="=1+1")))
            journal.write(
                events.InnerStep(step=1, progress=0.5, loss=None, tokens=8, seconds=1.0, learning_rate=0.1, stale=2)
            )
            journal.write(
                events.InnerStep(step=2, progress=1, loss=2.0, tokens=8, seconds=1.5, learning_rate=0.1, device_s=1)
            )
    with (tmp_path / "swarm" / "b" / "journal.jsonl").open("a") as torn:
        torn.write('{"event":"inner_st')
    return tmp_path / "swarm"


@pytest.mark.parametrize("kind", [TableFormat.CSV, TableFormat.PARQUET])
def test_a_field_that_never_has_a_value_is_no_column(tmp_path: Path, kind: TableFormat) -> None:
    """As in the home of a node that never waited."""
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write(events.StateChanged(state=PeerState.TRAINING))
    assert export_journals([tmp_path], tmp_path / "out", kind).startswith("Wrote 1 rows")


@pytest.mark.parametrize("kind", [TableFormat.CSV, TableFormat.PARQUET])
def test_a_home_whose_name_is_no_text_is_written(tmp_path: Path, kind: TableFormat) -> None:
    home = tmp_path / os.fsdecode(b"h\xff")
    write_journal(home, [started("p", 0)])
    export_journals([home], tmp_path / "table", kind)
    assert b"h\\udcff" in (tmp_path / "table").read_bytes()


def test_a_csv_has_a_row_for_each_event(homes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert printed("journal", "export", homes, "--out", out) == f"Wrote 8 rows to {out}.\n"
    with out.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["peer_name"] for row in table] == ["a"] * 4 + ["b"] * 4
    assert [row["event"] for row in table[:4]] == ["traffic", "state", "inner_step", "inner_step"]
    assert table[0]["sent.microbatch"] == "100"
    assert table[1]["waiting.detail"] == "'=1+1"
    assert [row["loss"] for row in table[2:4]] == ["", "2.0"]
    assert table[3]["step"] == "2"


def test_a_parquet_file_keeps_types(homes: Path, tmp_path: Path) -> None:
    export_journals([homes], tmp_path / "out.parquet", TableFormat.PARQUET)
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["step"] == "int64"
    assert kinds["progress"] == kinds["device_s"] == kinds["at"] == "double"
    assert kinds["waiting.cause"] == "string"
    assert table.num_rows == 8
    assert table.column("loss").to_pylist()[:4] == [None, None, None, 2.0]


@pytest.mark.parametrize("kind", [TableFormat.CSV, TableFormat.PARQUET])
def test_an_evaluation_with_its_samples_is_a_row(tmp_path: Path, kind: TableFormat) -> None:
    event = events.Evaluated(number=1, round=4, step=9, progress=0.1, loss=4.0, margin=None, tokens=48, documents=6)
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write(event)
        journal.write(structs.replace(event, samples=(events.TextSample(prompt="a", text="b"),)))
    assert export_journals([tmp_path], tmp_path / "out", kind).startswith("Wrote 2 rows")
    if kind is TableFormat.PARQUET:
        column = pyarrow.parquet.read_table(tmp_path / "out").column("samples")
        assert column.to_pylist() == ["[]", '[{"prompt":"a","text":"b"}]']


def test_nothing_is_written_over_and_nothing_half(homes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    out.write_text("mine")
    with pytest.raises(UserError, match="there already"):
        export_journals([homes], out, TableFormat.CSV)
    with pytest.raises(UserError, match="Cannot write"):
        export_journals([homes], tmp_path / "none" / "out.csv", TableFormat.CSV)
    with pytest.raises(UserError, match="no journal"):
        export_journals([tmp_path / "none"], tmp_path / "new.csv", TableFormat.CSV)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "swarm"]
    assert CliRunner().invoke(app, ["journal", "export", str(homes), "--out", "x", "--to", "xls"]).exit_code == 2


@pytest.mark.parametrize("kind", [TableFormat.TENSORBOARD, TableFormat.WANDB])
def test_what_writes_curves_is_asked_for_where_it_is_missing(
    kind: TableFormat, homes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(UserError, match="not installed"):
        export_journals([homes], tmp_path / "curves", kind)
    assert not (tmp_path / "curves").exists()


def test_curves_are_written_by_step(homes: Path, tmp_path: Path, loggers: FakeLoggers) -> None:
    assert export_journals([homes / "a"], tmp_path / "curves", TableFormat.TENSORBOARD).startswith("Wrote ")
    assert ("train/loss", 2.0, 2, 5.0) in loggers.told
    assert loggers.told[-1] == "closed"


def test_weights_and_biases_sends_nothing(homes: Path, tmp_path: Path, loggers: FakeLoggers) -> None:
    loggers.has_key = True
    export_journals([homes], tmp_path / "curves", TableFormat.WANDB)
    assert [(each["mode"], each["name"], each["dir"]) for each in loggers.opened] == [
        ("offline", name, str(tmp_path / "curves")) for name in "ab"
    ]
    losses = [each for each in loggers.told if isinstance(each, dict) and "train/loss" in each]
    assert [(each["train/global_step"], each["train/loss"]) for each in losses] == [(2, 2.0), (2, 2.0)]


@given(number=st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just(10**400))
def test_no_number_in_a_damaged_journal_ends_a_report(number: float) -> None:
    first, step = started("p", 0), inner(1, 0.0)
    told = [events.Continued(**structs.asdict(first)), first, structs.replace(step, tokens=1), step]
    damaged = [
        msgspec.json.encode({**events.fields_of(each), "at": 1e9} | {field: number})
        for each in told
        for field in ("at", "step", "tokens", "seconds")
    ]
    with TemporaryDirectory() as name:
        home = Path(name)
        whole = msgspec.json.encode({**events.fields_of(first), "at": 1e9})
        (home / "journal.jsonl").write_bytes(b"\n".join([*damaged, whole, b""]))
        assert "run " in report(home, as_json=False)
        for kind in (TableFormat.CSV, TableFormat.PARQUET):
            assert export_journals([home], home / kind, kind)


@pytest.mark.parametrize("kind", [TableFormat.CSV, TableFormat.PARQUET])
def test_a_count_beyond_a_column_of_whole_numbers_is_a_float(tmp_path: Path, kind: TableFormat) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write(events.Receipts(claimed={"a": 2**63}, signed={"a": 1}, own=0))
        journal.write(events.Receipts(claimed={"a": 7}, signed={"a": 1}, own=0))
    assert export_journals([tmp_path], tmp_path / "out", kind).startswith("Wrote 2 rows")
    if kind is TableFormat.PARQUET:
        table = pyarrow.parquet.read_table(tmp_path / "out")
        assert table["claimed.a"].to_pylist() == [2.0**63, 7.0]
        assert table["signed.a"].to_pylist() == [1, 1]
