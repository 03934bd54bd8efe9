"""Lines to a person: one a fact, whole in a file, and readable on a narrow terminal."""

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from noloco_node import terminal
from noloco_node.errors import usage_error
from noloco_node.swarm.invite import SCHEME
from noloco_node.terminal import say

INVITE = SCHEME + "0" * 64 + "@/ip4/192.0.2.1/tcp/4001"
TEXT = "step 10, round 3, progress 1.4%, loss 3.651, waiting for a replica of the next stage to appear"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_line_goes_on_below_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", narrow := Terminal())
    say(TEXT)
    say(INVITE)
    first, second, *invite = narrow.getvalue().splitlines()
    assert max(map(len, (first, second))) <= 80
    assert second.startswith(" " * 10)
    assert f"{first[10:]} {second.strip()}" == TEXT
    assert INVITE in " ".join(invite), "in one piece"
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    say(TEXT)
    assert file.getvalue().splitlines()[0].endswith(TEXT)


def test_why_a_command_ended_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    error = usage_error(f"{TEXT} {TEXT}.", why=TEXT, hint=f"{TEXT}, {INVITE}")
    monkeypatch.setattr(sys, "stderr", narrow := Terminal())
    terminal.complain(str(error))
    lines = narrow.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines if INVITE not in line)
    assert any(line.strip() == INVITE for line in lines), "in one piece"
    assert " ".join(narrow.getvalue().split()) == " ".join(str(error).split())
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    terminal.complain(str(error))
    assert file.getvalue() == f"{error}\n"


@pytest.fixture
def _as_before() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    terminal.configure(terminal.LogLevel.INFO, as_json=False)
    terminal.sign("")
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("_as_before")
def test_a_program_reads_an_object_a_line_with_the_level_and_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", heard := io.StringIO())
    terminal.configure(terminal.LogLevel.INFO, as_json=True)
    say("first")
    terminal.sign("abcd1234")
    terminal.warn("two\nlines")
    logging.getLogger("some.library").error("%s went wrong", "that")
    logging.getLogger("some.library").debug("a detail")
    terminal.complain("the end")
    lines = [json.loads(line) for line in heard.getvalue().splitlines()]
    assert [(line["level"], line["text"]) for line in lines] == [
        ("info", "first"),
        ("warning", "two\nlines"),
        ("error", "that went wrong"),
        ("error", "the end"),
    ]
    assert [line.get("peer") for line in lines] == [None, "abcd1234", "abcd1234", "abcd1234"]
    assert lines[2]["source"] == "some.library"


@pytest.mark.usefixtures("_as_before")
def test_a_line_of_a_library_that_prints_its_lines_itself_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", heard := io.StringIO())
    terminal.configure(terminal.LogLevel.INFO, as_json=False)
    logging.getLogger("talking").addHandler(logging.StreamHandler(heard))
    lines = ["one", "two", "three"]
    for line in lines:
        logging.getLogger("talking.part").warning(line)
    said = heard.getvalue().splitlines()
    assert [line.split()[-1] for line in said] == lines
    assert all("warning: " in line for line in said[1:])


@pytest.mark.usefixtures("_as_before")
def test_a_handler_that_a_program_has_set_for_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", heard := io.StringIO())
    terminal.configure(terminal.LogLevel.INFO, as_json=False)
    logging.getLogger("kept").addHandler(logging.StreamHandler(own := io.StringIO()))
    for line in ("one", "two"):
        logging.getLogger("kept").warning(line)
    assert own.getvalue().split() == ["one", "two"]
    assert len(heard.getvalue().splitlines()) == 2


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(("least", "count"), [("debug", 3), ("info", 3), ("warning", 2), ("error", 1)])
def test_what_matters_less_is_not_said(monkeypatch: pytest.MonkeyPatch, least: str, count: int) -> None:
    monkeypatch.setattr(sys, "stderr", heard := io.StringIO())
    terminal.configure(terminal.LogLevel(least), as_json=False)
    say("an information")
    terminal.warn("a warning")
    logging.getLogger("some.library").critical("the worst")
    assert len(heard.getvalue().splitlines()) == count
    assert "error: the worst" in heard.getvalue()


@pytest.mark.usefixtures("_as_before")
def test_the_systemd_journal_is_told_the_level_and_not_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "journal").open("w+") as file:
        end = os.fstat(file.fileno())
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setenv("JOURNAL_STREAM", f"{end.st_dev}:{end.st_ino}")
        terminal.sign("abcd1234")
        say("first")
        terminal.warn("second")
        terminal.complain("third\n  why: fourth")
        file.seek(0)
        said = ("<6>abcd1234: first", "<4>abcd1234: second", "<3>abcd1234: third", "<3>abcd1234:   why: fourth")
        assert file.read().splitlines() == list(said)


@pytest.mark.usefixtures("_as_before")
def test_lines_name_the_device_where_several_nodes_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", heard := io.StringIO())
    monkeypatch.setenv(terminal.DEVICE_VARIABLE, "cuda:1")
    for as_json in (False, True):
        terminal.configure(terminal.LogLevel.INFO, as_json=as_json)
        terminal.warn("first")
        terminal.complain("the end")
    plain, end, *objects = heard.getvalue().splitlines()
    assert (plain[8:], end) == ("  cuda:1  warning: first", "cuda:1  the end")
    assert [json.loads(each)["device"] for each in objects] == ["cuda:1"] * 2
    assert not terminal.Bar(Console(file=io.StringIO(), force_terminal=True)).draw(0.5, "half"), "one for all"
    assert terminal.terminal_options() == ("--log-level", "info", "--log-json")
    monkeypatch.undo()


@pytest.mark.parametrize("as_json", [False, True])
def test_nobody_who_reads_is_no_reason_to_end(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as unread:
        monkeypatch.setattr(sys, "stderr", unread)
        terminal.configure(terminal.LogLevel.INFO, as_json=as_json)
        say("to whom?")
        terminal.complain("to whom?")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # for what is still to be flushed


@pytest.mark.usefixtures("_as_before")
def test_a_thread_of_another_program_logs_and_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", heard := io.StringIO())
    terminal.configure(terminal.LogLevel.INFO, as_json=False)
    logged: list[str] = []
    theirs = logging.Logger("theirs", logging.INFO)
    theirs.addFilter(lambda record: logged.append(record.getMessage()))

    def in_a_thread() -> None:
        terminal.hand_to(theirs)
        say("logged")

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    say("printed")
    assert logged == ["logged"]
    assert [line.split()[-1] for line in heard.getvalue().splitlines()] == ["printed"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_socket_takes_the_place_of_a_stream_that_the_shell_has_closed(closed: str) -> None:
    made = (
        "import socket, sys; from noloco_node import __main__; from noloco_node.cli import main; "
        "main.main = lambda: (print(1), sys.exit(socket.socket().fileno() < 3)); __main__.main()"
    )
    done = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, made], check=False)
    assert done.returncode == 0
