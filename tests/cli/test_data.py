"""`noloco-node data`: rows as a run reads them, on a screen of 80 columns, and what does not fit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
from checkpoints import write_tokenizer
from torch import nn
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result
from user_errors import user_error

import noloco_node
from noloco_node.cli.main import app
from noloco_node.data import dataset_documents, row_preview
from noloco_node.data.row_encoder import UnfitRowError
from noloco_node.data.row_preview import preview
from noloco_node.errors import Exit, UserError
from noloco_node.run.config import DataConfig
from noloco_node.run.presets import run_text
from noloco_node.run.runfile import decode_run

ASKED = {"messages": [{"role": "user", "content": "Grüße?"}, {"role": "assistant", "content": "Hallo!\n\tWelt"}]}
LONG = {"messages": [{"role": "user", "content": "why " * 60}, {"role": "assistant", "content": "so"}]}


def write_run(directory: Path, rows: list[Any], **fields: str) -> Path:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = run_text("tiny")
    fields = {"source": "json", "form": "messages", "chat_template": "chatml"} | fields
    for name, value in fields.items():
        text = text.replace(f'\n{name} = "', f'\n{name} = "{value}" # "', 1)
    path = directory / "run.toml"
    path.write_text(text.replace('# path = "books/*.txt"', f'path = "{directory}/rows.jsonl"'))
    return path


def show(path: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["data", str(path), *more])


def test_rows_are_shown_with_the_tokens_that_are_learnt(tmp_path: Path) -> None:
    shown = show(write_run(tmp_path, [ASKED] * 5))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("rows.jsonl:") == row_preview.SHOWN
    assert (
        "rows.jsonl:1: 82 tokens, 24 of them learnt\n"
        "  | <|im_start|>user\\n\n"
        "  | Grüße?<|im_end|>\\n\n"
        "  | <|im_start|>assistant\\n\n"
        "  > Hallo!\\n\n"
        "  > \\tWelt<|im_end|>\\n\n"
        "  > </s>\n"
    ) in shown.stdout
    assert "5 rows fit the form" in shown.stdout
    assert "36% of what is computed is filling" in " ".join(shown.stdout.split())


def test_a_screen_has_80_columns_and_a_long_row_is_shown_by_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    many = {"prompt": "line\n" * 20, "completion": "x" * 200}
    path = write_run(tmp_path, [many] * 2, form="prompt", chat_template="")
    path.write_text(path.read_text().replace("sequence_length = 128", "sequence_length = 512"))
    path.write_text(path.read_text().replace(f"{tmp_path}/", "").replace("embeddings = 128", "embeddings = 512"))
    shown = show(path)
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "  | ... 8 more lines\n" in shown.stdout


def test_rows_that_do_not_fit_are_counted_by_kind_and_the_code_says_it(tmp_path: Path) -> None:
    rows = [ASKED, {"text": "x"}, LONG, {"text": "y"}, {"messages": [{"role": "user", "content": "?"}]}, ASKED]
    shown = show(write_run(tmp_path, rows))
    assert isinstance(shown.exception, UserError)
    assert shown.exception.code is Exit.DATA == 14
    assert shown.exception.what == '3 of 6 rows do not fit data.form = "messages".'
    assert "rows.jsonl:2, whose fields are text, has no field 'messages'" in shown.exception.why
    told = " ".join(shown.stdout.split())
    assert "has no field 'messages' and is left out (the first of 2 so far)" in told
    assert "rows.jsonl:5 has in the field 'messages' no message whose role is 'assistant' and is left out" in told
    assert "1 of them is longer than a sequence and is left out in training: the longest has 304 tokens" in told
    assert "3 rows fit the form" in told


@pytest.mark.parametrize("rows", [[{"text": "x"}], [LONG]])
def test_where_no_row_fits_the_code_says_it(tmp_path: Path, rows: list[Any]) -> None:
    shown = show(write_run(tmp_path, rows))
    assert isinstance(shown.exception, UserError)
    assert shown.exception.code is Exit.DATA
    assert shown.exception.what.startswith("None of 1 rows fits")


def test_a_tokenizer_that_travels_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    tokens = tmp_path / "checkpoint"
    tokens.mkdir()
    write_tokenizer(tokens, ["hello world"])
    tokenizer = AutoTokenizer.from_pretrained(tokens)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    tokenizer.save_pretrained(tokens)
    path = write_run(tmp_path, [ASKED], chat_template="", tokenizer="files")
    path.write_text(
        path.read_text().replace(
            "[inner]\n",
            f'[[data.tokenizer_files]]\nfile = "tokenizer.json"\nsize_bytes = 1\ndigest = "{"0" * 64}"\n[inner]\n',
        )
    )
    refused = show(path)
    assert isinstance(refused.exception, UserError)
    assert "--weights" in refused.exception.hint or "own directory" in refused.exception.hint
    shown = show(path, "--weights", str(tokens))
    assert shown.exit_code == 0, shown.output
    assert "tokenizer's own chat template" in " ".join(shown.stdout.split())


def test_text_is_shown_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_text("tiny"))
    shown = show(path)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("\nSequence ") == row_preview.SHOWN
    assert "  | " not in shown.stdout


def test_a_large_file_is_counted_whole_and_measured_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_preview, "MEASURED", 6)
    shown = show(write_run(tmp_path, [ASKED, LONG] * 5))
    told = " ".join(shown.stdout.split())
    assert "10 rows fit the form" in told
    assert "Those of the first 6 that fit a sequence" in told
    assert "3 of the first 6 are longer" in told
    assert "Of those after the first 6 only the fields were looked at." in told


def test_rows_that_fit_are_found_behind_many_that_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_preview, "MEASURED", 4)
    shown = show(write_run(tmp_path, [LONG] * 6 + [ASKED] * 4))
    assert shown.exit_code == 0, shown.output
    told = " ".join(shown.stdout.split())
    assert "10 rows fit the form" in told
    assert "6 of the first 9 are longer" in told


def test_a_run_whose_program_reads_its_own_data_shows_none(tmp_path: Path) -> None:
    refused = show(noloco_node.init(tmp_path / "run.toml", nn.Linear(2, 1), steps=1))
    assert isinstance(refused.exception, UserError)
    assert "reads no data" in refused.exception.what


def test_of_a_data_set_of_the_hub_no_more_rows_are_read_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def rows() -> Iterator[dict[str, str]]:
        for number in range(1000):
            read.append(number)
            yield {"prompt": "a", "completion": "b"}

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(row_preview, "load_rows", lambda data: stream)
    monkeypatch.setattr(row_preview, "MEASURED", 20)
    monkeypatch.setattr(dataset_documents, "CHUNK_ROWS", 7)
    monkeypatch.setattr(row_preview.RowEncoder, "document", Mock(side_effect=UnfitRowError("does not fit")))
    data = DataConfig(source="hub", path="some/rows", commit="0" * 40, form="prompt")
    with user_error(Exit.DATA, "None of 20 rows"):
        list(preview(decode_run(run_text("tiny"), "the preset"), data))
    assert len(read) < 40
