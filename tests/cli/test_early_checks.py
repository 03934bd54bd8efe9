"""Wrong input is refused before torch is loaded, and the options on what is said stand where a person puts them."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from command_line import printed
from hypothesis import given
from hypothesis import strategies as st
from limits import LAST_RESORT_S
from typer.testing import CliRunner

from noloco_node.cli.main import app, main
from noloco_node.errors import Exit
from noloco_node.journal import events
from noloco_node.journal.writer import Journal
from noloco_node.run.presets import run_text
from noloco_node.storage.home import Home
from noloco_node.swarm.invite import SCHEME

INVITE = SCHEME + "a" * 64 + "@/ip4/127.0.0.1/tcp/9/p2p/12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
HUGE = 30 * "9"
LONG = 300 * "x"  # longer than a file's name may be
REFUSED: list[tuple[list[str], Exit]] = [
    (["status", "nonsense"], Exit.CONFIG),
    (["status", "--home", "empty"], Exit.CONFIG),
    (["status", "nothing.txt"], Exit.CONFIG),
    (["join", INVITE, "--home", ""], Exit.USAGE),
    (["join", INVITE, "--home", "held"], Exit.HOME_IN_USE),
    (["bootstrap", "--home", ""], Exit.USAGE),
    (["watch", "nonsense"], Exit.CONFIG),
    (["watch", "--journal", "nowhere"], Exit.CONFIG),
    *((["watch", what, "--once", "--web", "0"], Exit.USAGE) for what in (INVITE, "--journal")),
    (["doctor", "nonsense"], Exit.CONFIG),
    (["bootstrap", "--run", "nowhere.toml"], Exit.CONFIG),
    (["bootstrap", "--run", "broken.toml"], Exit.CONFIG),
    (["init", "--preset", "nonsense"], Exit.USAGE),
    (["init", "new.toml", "--line", "100mbit/"], Exit.USAGE),
    (["init", "new.toml", "--ram", f"{400 * '9'}GB"], Exit.USAGE),
    (["init", "new.toml", "--gpu", "0GiB"], Exit.USAGE),
    (["init", "new.toml", "--from", "nowhere"], Exit.CONFIG),
    (["bootstrap", "--home", "new", "--weights", "nowhere"], Exit.CONFIG),
    (["bootstrap", "--home", "new", "--weights", "nothing.txt"], Exit.CONFIG),
    *(
        (["bootstrap", "--run", "home/run.toml", "--home", "new", option, "4001"], Exit.CONFIG)
        for option in ("--listen", "--announce")
    ),
    (["join", INVITE, "--home", "new", "--weights", "nowhere"], Exit.CONFIG),
    (["join", INVITE, "--home", "new", "--weights", "nothing.txt"], Exit.CONFIG),
    *(
        ([*command.split(), INVITE, "--local", "empty", "--local", "nowhere"], Exit.CONFIG)
        for command in ("join", "status", "doctor", "watch", "export --out new")
    ),
    (["init", "new.toml", "--from", "empty"], Exit.CONFIG),
    (["init", "new.toml", "--gpu", "nonsense"], Exit.USAGE),
    (["init", "new.toml", "--target", "q_proj"], Exit.USAGE),
    (["init", "new.toml", "--base", "int8"], Exit.USAGE),
    (["init", LONG], Exit.STORAGE),
    (["init", "nothing.txt/run.toml"], Exit.STORAGE),
    (["check", LONG], Exit.CONFIG),
    (["evaluate", LONG], Exit.CONFIG),
    (["generate", LONG, "--prompt", "a"], Exit.CONFIG),
    (["init", "new.toml", "--from", LONG], Exit.CONFIG),
    (["join", LONG], Exit.CONFIG),
    *(
        (words, Exit.USAGE)
        for words in (
            ["evaluate", "--from-home", LONG],
            ["export", "--from-home", LONG, "--out", "new"],
            ["export", INVITE, "--out", LONG],
            ["watch", "--journal", LONG],
            ["journal", "export", LONG, "--out", "new"],
        )
    ),
    (["init", "broken.toml"], Exit.USAGE),
    (["init", "--force", "."], Exit.USAGE),
    (["check", "nowhere.toml"], Exit.CONFIG),
    (["check", "broken.toml"], Exit.CONFIG),
    (["join", "nonsense"], Exit.CONFIG),
    (["join", INVITE, "--data", "nowhere"], Exit.CONFIG),
    (["join", INVITE, "--listen", "nonsense"], Exit.CONFIG),
    (["join", INVITE, "--max-memory", "nonsense"], Exit.USAGE),
    (["join", INVITE, "--max-ram", "nonsense"], Exit.USAGE),
    (["join", INVITE, "--device", "nonsense"], Exit.DEVICE),
    (["join", INVITE, "--device", "mps:1"], Exit.DEVICE),
    (["join", INVITE, "--device", "cuda", "--devices", "all"], Exit.USAGE),
    (["join", INVITE, "--devices", "cuda:0,nonsense"], Exit.DEVICE),
    (["export", INVITE, "--out", "full"], Exit.USAGE),
    (["export", "nonsense", "--out", "new"], Exit.CONFIG),
    (["export", "--out", "new"], Exit.USAGE),
    (["export", "--from-home", "empty", "--out", "new"], Exit.CONFIG),
    (["evaluate"], Exit.USAGE),
    (["evaluate", "nowhere"], Exit.CONFIG),
    (["evaluate", "--from-home", "empty"], Exit.CONFIG),
    (["evaluate", "--from-home", "home", "--weights", "empty"], Exit.USAGE),
    (["generate", "empty", "--prompt", "x"], Exit.CONFIG),
    (["me", "--home", "nowhere"], Exit.CONFIG),
    (["me", "--home", "nothing.txt"], Exit.CONFIG),
    (["me", "--home", "odd"], Exit.CONFIG),
    (["members", "list", "--run", "nowhere.toml"], Exit.CONFIG),
    (["simulate", "nowhere.toml"], Exit.CONFIG),
    (["simulate", "broken.toml"], Exit.CONFIG),
    (["journal", "export", "nowhere", "--out", "new.csv"], Exit.CONFIG),
    (["journal", "export", "nothing.txt", "--out", "new.csv"], Exit.CONFIG),
    (["bootstrap", "--run", "home/run.toml", "--home", "damaged"], Exit.STORAGE),
    (["me", "--home", "damaged"], Exit.STORAGE),
]
RUN_ALL = """
import json, sys
from noloco_node.__main__ import main
codes = []
for words in json.load(sys.stdin):
    sys.argv = ["noloco-node", *words]
    try:
        main()
    except SystemExit as left:
        codes.append(left.code)
    if "torch" in sys.modules:
        raise AssertionError(f"torch is loaded by {words}")
print(json.dumps(codes))
"""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_path_that_the_output_cannot_show_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr("sys.argv", ["noloco-node", "init", str(tmp_path / os.fsdecode(b"\xc3\xa4\xff.toml"))])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert (tmp_path / os.fsdecode(b"\xc3\xa4\xff.toml")).exists()


def test_wrong_input_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "run.toml").write_text(run_text("tiny"))
    (tmp_path / "odd" / "journal.jsonl").mkdir(parents=True)
    (tmp_path / "damaged" / "identity.key").mkdir(parents=True)
    (tmp_path / "full" / "a").touch()
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "broken.toml").write_text("name = [")
    given = json.dumps([words for words, _ in REFUSED])
    path = [str(Path(__file__).parents[2])]
    started = f"import sys; sys.path[:0] = {path}\n{RUN_ALL}"
    with Home.open(tmp_path / "held"):
        done = subprocess.run(
            [sys.executable, "-c", started], input=given, capture_output=True, text=True, check=False, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [code for _, code in REFUSED]
    assert done.stderr.count("noloco-node: ") == done.stderr.count("\n  why: ") == done.stderr.count("\n  try: ")
    assert done.stderr.count("\n  why: ") == len(REFUSED)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("new*")), "a refused command leaves nothing behind"


@pytest.mark.parametrize(
    "words",
    [
        ["--log-json", "--log-level", "error", "me"],
        ["me", "--log-level", "error", "--log-json"],
        ["me", "--log-json", "--log-level=error"],
    ],
)
def test_options_on_what_is_said_stand_before_or_behind_the_command(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, bool]] = []
    monkeypatch.setattr("noloco_node.cli.main.configure", lambda least, *, as_json: said.append((str(least), as_json)))
    with pytest.raises(Exception, match="has given nothing yet"):
        app([*words, "--home", str(tmp_path)], standalone_mode=False)
    assert said == [("error", True)]


@pytest.mark.parametrize(
    "words",
    [
        *(["join", INVITE, option, HUGE] for option in ("--threads", "--linger", "--refresh", "--slowdown")),
        *(["join", INVITE, option, "inf"] for option in ("--linger", "--refresh")),
        *([*command.split(), "--seed", HUGE] for command in ("generate . --prompt a", "demo", "simulate")),
        ["demo", "--minutes", "inf"],
        *(["init", *each] for each in (["--tflops", "inf"], ["--latency-ms", "inf"], ["--tflops", "nan"])),
    ],
)
def test_a_number_that_no_command_can_use_is_refused(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == Exit.USAGE
    assert words[-2] in done.output


def test_an_option_on_what_is_said_without_its_value_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["me", "--log-level"])
    assert ended.value.code == Exit.USAGE
    assert "requires an argument" in capsys.readouterr().err


def told(home: Path, out: int | IO[bytes], *before: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command that returns some lines, by way of the command `before`."""
    words = [*before, sys.executable, "-m", "noloco_node", "me", "--home", str(home)]
    return subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=False)


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_a_reader_that_closes_the_pipe_or_terminal_is_no_error(
    tmp_path: Path, opened: Callable[[], tuple[int, int]]
) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write(events.Started(peer="12D3peer", stage=0, run="r", version="0"))
    reading, writing = opened()
    os.close(reading)
    done = told(tmp_path, writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (Exit.OK, b"")


def test_an_output_that_cannot_be_written_gets_a_message(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write(events.Started(peer="12D3peer", stage=0, run="r", version="0"))
    with Path("/dev/full").open("wb") as full, (tmp_path / "limited").open("wb") as limited:
        ends = {
            b"No space left on device": told(tmp_path, full),
            b"File too large": told(tmp_path, limited, "sh", "-c", 'ulimit -f 0; exec "$@"', "sh"),
        }
    for why, done in ends.items():
        assert done.returncode == Exit.STORAGE, done.stderr
        assert why in done.stderr
        assert b"Traceback" not in done.stderr


def hosted(home: Path, out: int | IO[bytes]) -> subprocess.CompletedProcess[bytes]:
    """Run a bootstrap peer, which prints its invite from inside of task groups."""
    run_file = home.with_name("run.toml")
    run_file.write_text(run_text("tiny"))
    place = ("--run", str(run_file), "--home", str(home), "--relays", "0", "--listen", "/ip4/127.0.0.1/tcp/0")
    words = [sys.executable, "-m", "noloco_node", "bootstrap", *place]
    return subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=False, timeout=LAST_RESORT_S)


def test_an_invite_that_cannot_be_written_gets_a_message_too(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = hosted(tmp_path / "home", full)
    assert done.returncode == Exit.STORAGE, done.stderr
    assert b"No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_reader_that_closes_the_pipe_before_the_invite_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = hosted(tmp_path / "home", writing)
    os.close(writing)
    assert done.returncode == Exit.OK, done.stderr
    assert b"Traceback" not in done.stderr


def test_the_directory_of_a_new_run_file_is_made(tmp_path: Path) -> None:
    printed("init", tmp_path / "of" / "friends" / "run.toml", "--preset", "tiny")
    assert (tmp_path / "of" / "friends" / "run.toml").read_text() == run_text("tiny")


@given(dangling=st.booleans(), preset=st.sampled_from(["tiny", "125m"]))
def test_a_run_file_is_written_where_a_link_leads(
    tmp_path_factory: pytest.TempPathFactory, dangling: bool, preset: str
) -> None:
    place = tmp_path_factory.mktemp("links")
    (place / "shared").mkdir()
    target, link = place / "shared" / "run.toml", place / "link.toml"
    link.symlink_to(Path("shared", "run.toml"))
    if not dangling:
        target.write_text("old")
    printed("init", link, "--preset", preset, *([] if dangling else ["--force"]))
    assert link.is_symlink()
    assert target.read_text() == run_text(preset)
    assert [each.name for each in target.parent.iterdir()] == ["run.toml"]
