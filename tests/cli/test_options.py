"""What options of the command line take."""

import io
import os
import traceback
from pathlib import Path

import pytest
from command_line import printed, refused
from typer.testing import CliRunner
from user_errors import user_error

from noloco_node.cli import main
from noloco_node.cli.main import app
from noloco_node.cli.options import (
    INVITE_VARIABLE,
    LONGEST_PROMPT,
    MOST_PROMPTS,
    JoinOptions,
    default_home,
    directory_there,
    invite_text,
)
from noloco_node.cli.run_file import MachineOptions
from noloco_node.errors import Exit, UserError
from noloco_node.run.presets import machines_of
from noloco_node.swarm.invite import SCHEME


def test_an_invite_is_typed_or_read_from_a_file_or_from_the_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line, file = f"{SCHEME}ab@/ip4/203.0.113.7/tcp/4001" + 400 * "0", Path("noloco-invite")
    file.write_text(f"{line}\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\nmore\n"))
    assert [invite_text(each) for each in (line, str(file), "-", None)] == [line, line, line, None]


@pytest.mark.parametrize(("credential", "warned"), [("#iAAAA", True), ("#tAAAA", True), ("#open", False), ("", False)])
def test_a_secret_that_is_typed_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], credential: str, *, warned: bool
) -> None:
    invite = f"{SCHEME}ab@/ip4/203.0.113.7/tcp/4001{credential}"
    monkeypatch.setattr("sys.argv", ["noloco-node", "join", invite])
    assert invite_text(invite) == invite
    assert ("list of processes" in capsys.readouterr().err) == warned


def test_an_invite_may_come_by_a_variable_that_other_users_cannot_read(tmp_path: Path) -> None:
    words = ["join", "--home", str(tmp_path / "home")]
    done = CliRunner().invoke(app, words, env={INVITE_VARIABLE: "noloco9:of another time"})
    assert isinstance(done.exception, UserError)
    assert "noloco9" in done.exception.why


def test_the_home_of_a_node_stays_as_it_is_and_a_misspelt_path_is_named(tmp_path: Path) -> None:
    for typed in (str(tmp_path), f" {tmp_path}\n"):
        assert invite_text(typed) == typed
    for typed in (str(tmp_path / "invite"), "\x1b[31m" + 900 * "x"):
        with pytest.raises(UserError, match="There is no invite") as caught:
            invite_text(typed)
        assert caught.value.what.isprintable()


def test_a_file_that_holds_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "invite").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read from"):
        invite_text(str(tmp_path / "invite"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    with pytest.raises(UserError, match="cannot be read from the standard input"):
        invite_text("-")


@pytest.mark.parametrize("line", ["10mbit/", "/10mbit", "10mbit/20mbit/30mbit", ""])
def test_a_line_that_cannot_be_read_is_quoted_as_it_was_given(tmp_path: Path, line: str) -> None:
    assert f"--line {line!r}" in refused("init", tmp_path / "run.toml", "--line", line, code=Exit.USAGE).what


@pytest.mark.parametrize(
    "named", ["--peers 0", "--tflops -1", "--tflops nan", "--latency-ms -5", "--peers x", "--home a"]
)
def test_machines_that_no_person_could_type_are_no_better_in_a_comment(tmp_path: Path, named: str) -> None:
    printed("init", tmp_path / "run.toml")
    text = (tmp_path / "run.toml").read_text()
    machines = machines_of(text)
    assert machines is not None
    with pytest.raises(UserError, match="names machines that cannot be read") as caught:
        MachineOptions().completed_from(text.replace(machines, named), tmp_path / "run.toml")
    assert caught.value.why.endswith(named)


def test_the_machines_in_a_comment_are_read_from_a_pipe(tmp_path: Path) -> None:
    printed("init", tmp_path / "run.toml", "--peers", "2")
    read, write = os.pipe()
    os.write(write, (tmp_path / "run.toml").read_bytes())
    os.close(write)
    assert "On 2 machines" in printed("check", f"/dev/fd/{read}")
    os.close(read)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", 5000 * "a", "a\0b"])
def test_a_directory_that_the_system_cannot_follow_is_not_there(path: str) -> None:
    with pytest.raises(UserError, match="There is no directory"):
        directory_there(Path(path))


def test_a_user_without_a_home_directory_is_told_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(UserError, match="no home directory") as caught:
        default_home("node")
    assert "--home" in caught.value.hint


@pytest.mark.parametrize("prompts", [[""], ["x" * (LONGEST_PROMPT + 1)], ["a"] * (MOST_PROMPTS + 1), ["\udcff"]])
def test_prompts_for_which_the_training_would_wait_too_long_are_refused(prompts: list[str]) -> None:
    assert JoinOptions().prompts == ()
    assert JoinOptions(sample=["The ", "a\nb"]).prompts == ("The ", "a\nb")
    with user_error(Exit.USAGE, "--sample"):
        _ = JoinOptions(sample=prompts).prompts


def test_an_error_that_the_program_does_not_know_is_shown_however_deep_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of a node lie deeper in each other than a traceback shows."""
    bug: BaseException = KeyError("a bug")
    error = bug
    for _ in range(20):
        error = BaseExceptionGroup("unhandled errors in a TaskGroup", [error])

    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    monkeypatch.setattr("gc.freeze", lambda: None)
    with pytest.raises(BaseExceptionGroup) as found:
        main.main()
    assert found.value.exceptions == (bug,)
    assert "a bug" in "".join(traceback.format_exception(found.value))
