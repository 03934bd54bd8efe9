"""A run file that others sent reads nothing of this machine that its owner has not named."""

from functools import partial
from pathlib import Path

import pytest
from user_errors import user_error

from noloco_node.data.encoding import open_tokenizer
from noloco_node.errors import Exit, UserError
from noloco_node.run.runfile import check_paths, check_text, decode_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = '[model]\narchitecture = "llama"\nsizes = {hidden_size = 8, num_hidden_layers = 4}\n'


def test_a_directory_is_named_only_where_it_is_allowed() -> None:
    run = decode_run(MODEL + '[data]\ntokenizer = "~/.ssh"\n', "a stranger's")
    ((_, path),) = run.local_paths()
    with user_error(Exit.CONFIG, r"data\.tokenizer"):
        check_paths(run, ["/elsewhere"])
    check_paths(run, ["/elsewhere", path])


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\\u0000b", 5000 * "a"])
def test_a_path_that_the_system_cannot_follow_is_refused_as_any_other(path: str) -> None:
    run = decode_run(f'{MODEL}[data]\ntokenizer = "{path}"\n', "a stranger's")
    for use in (partial(check_paths, run, ()), partial(open_tokenizer, run.data)):
        with user_error(Exit.CONFIG, r"data\.tokenizer"):
            use()
    check_paths(run, [run.data.tokenizer])


def test_a_repository_may_have_a_name_that_is_too_long_for_a_file() -> None:
    name = f'"{300 * "a"}"\ncommit = "{COMMIT}"\n'
    check_paths(decode_run(f"[model]\nhub = {name}", "a stranger's"), ())
    check_paths(decode_run(f'{MODEL}[data]\nsource = "hub"\npath = {name}', "a stranger's"), ())


def test_text_that_a_peer_names_for_itself_is_told() -> None:
    run = decode_run(MODEL, "a stranger's")
    assert "text: your own, my/texts; " in " ".join(run.summary("my/texts"))


def test_files_that_travel_name_no_path_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("files").mkdir()
    listed = f'file = "tokenizer.json"\nsize_bytes = 9\ndigest = "{"ab" * 32}"\n'
    run = decode_run(MODEL + f'[data]\ntokenizer = "files"\n[[data.tokenizer_files]]\n{listed}', "a stranger's")
    check_paths(run, ())
    assert "tokenizer: the checkpoint's own" in " ".join(run.summary())


def test_a_directory_that_is_called_like_a_repository_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = decode_run(MODEL + f'[data]\nsource = "hub"\npath = "my/letters"\ncommit = "{COMMIT}"\n', "a stranger's")
    monkeypatch.chdir(tmp_path)
    check_paths(run, ())
    Path("my/letters").mkdir(parents=True)
    with pytest.raises(UserError, match=r"data\.path"):
        check_paths(run, ())


def test_text_of_this_machine_is_read_where_its_owner_names_it() -> None:
    run = decode_run(MODEL + '[data]\nsource = "text"\npath = "~/.ssh/*"\n', "a stranger's")
    with user_error(Exit.CONFIG, r"\.ssh"):
        check_text(run, None)
    check_text(run, "books/*.txt")
    check_text(decode_run(MODEL, "a stranger's"), None)


def test_a_few_lines_say_what_a_run_is_and_move_no_cursor() -> None:
    run = decode_run(MODEL + '[data]\nsource = "text"\npath = "a\\nb"\n', "a stranger's")
    lines = run.summary()
    assert "none is named here; a source names its own with --data" in " ".join(lines)
    assert len(lines) <= 4
    assert all(line.isprintable() for line in lines), lines
    assert "llama" in " ".join(lines)
