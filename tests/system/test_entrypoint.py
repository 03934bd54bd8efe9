"""What a container does before its program runs: the entry point of the image, with no engine."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from limits import LAST_RESORT_S
from repository import ROOT

from noloco_node.errors import Exit

SHOWS = 'echo "$@"; cat'


@contextmanager
def container(
    invite: Path, *words: str, program: str = SHOWS, script: Path = ROOT / "docker" / "entrypoint.sh"
) -> Iterator[subprocess.Popen[str]]:
    """Run what a container runs, with `program` for noloco-node."""
    installed = invite.parent / "noloco-node"
    installed.write_text(f"#!/bin/sh\n{program}\n")
    installed.chmod(0o755)
    environment = {"PATH": f"{invite.parent}:{os.environ['PATH']}", "INVITE_FILE": str(invite)}
    words = ("sh", str(script), *words)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def waiting(invite: Path) -> Iterator[subprocess.Popen[str]]:
    with container(invite, "node", "--stay") as process:
        assert process.stderr.readline() == f"waiting for the invite in {invite}\n"
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_container_that_waits_for_its_invite_heeds_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with waiting(tmp_path / "invite") as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=LAST_RESORT_S)
    assert (process.returncode, said) == (Exit.INTERRUPTED, "noloco-node: interrupted\n")


def test_a_container_that_makes_its_run_file_heeds_a_signal(tmp_path: Path) -> None:
    with container(tmp_path / "invite", "bootstrap", program="echo $$ $1; exec tail -f /dev/null") as process:
        made, word = process.stdout.readline().split()
        try:
            process.send_signal(signal.SIGINT)
            assert (word, process.wait(LAST_RESORT_S)) == ("init", Exit.INTERRUPTED)
        finally:
            os.kill(int(made), signal.SIGKILL)  # as the end of its first process does in a container


def test_an_invite_reaches_the_node_as_soon_as_it_is_there_and_shows_in_no_list_of_processes(tmp_path: Path) -> None:
    invite = tmp_path / "invite"
    with waiting(invite) as process:
        invite.touch()  # as the bootstrap peer makes it, before it has something to say
        (tmp_path / "whole").write_text("noloco6:secret\nwhat stands below\n")
        (tmp_path / "whole").replace(invite)
        shown, _ = process.communicate(timeout=LAST_RESORT_S)
    assert shown == "join - --home /home/noloco/home --stay\nnoloco6:secret\n"
    assert process.returncode == Exit.OK


NOTHING, FILE, DIRECTORY = "nothing", "file", "directory"


def script_below(directory: Path) -> Path:
    """Return the entry point with the places that a container mounts below a directory."""
    places = ("run.toml", "run-dir", "run-file", "text", "invite-file", "invite")
    text, script = (ROOT / "docker" / "entrypoint.sh").read_text(), directory / "entrypoint"
    script.write_text(re.sub(rf"(?<=[\s=])/({'|'.join(places)})\b", rf"{directory}/\1", text))
    return script


def test_a_second_bootstrap_peer_leaves_the_invite_of_the_first(tmp_path: Path) -> None:
    invite, script = tmp_path / "invite" / "invite", script_below(tmp_path)
    invite.parent.mkdir()
    (tmp_path / "run.toml").touch()
    with container(invite, "bootstrap", program="echo first; echo >&2; exec tail -f /dev/null", script=script) as first:
        first.stderr.readline()
        with container(invite, "bootstrap", program="echo second", script=script) as second:
            _, said = second.communicate(timeout=LAST_RESORT_S)
        assert (second.returncode, "another bootstrap peer" in said) == (Exit.CONFIG, True)
        assert invite.read_text() == "first\n"
    with container(invite, "bootstrap", program="echo third", script=script) as third:
        assert third.wait(LAST_RESORT_S) == Exit.OK
    assert invite.read_text() == "third\n"


@pytest.mark.parametrize(
    ("role", "setting", "place", "kind"),
    [
        ("bootstrap", "RUN_FILE", "run.toml", FILE),
        ("bootstrap", "RUN_DIR", "run-dir", DIRECTORY),
        ("node", "TEXT", "text", DIRECTORY),
        ("node", "INVITE_FILE", "invite-file", FILE),
        ("node", "INVITE_FILE", "invite/invite", FILE),
    ],
)
@pytest.mark.parametrize("given", [NOTHING, FILE, DIRECTORY])
def test_a_setting_that_names_the_wrong_thing_is_refused_and_never_passed_over(
    tmp_path: Path, role: str, setting: str, place: str, kind: str, given: str
) -> None:
    """Compose mounts /dev/null where a setting names nothing."""
    for each in ("run-file", "invite"):
        (tmp_path / each).mkdir()
    script = script_below(tmp_path)
    (tmp_path / "invite" / "invite").write_text("noloco6:secret\n")
    if given == NOTHING:
        (tmp_path / place).unlink(missing_ok=True)
        (tmp_path / place).symlink_to("/dev/null")
    elif given == FILE:
        (tmp_path / place).write_text("noloco6:other\n")
    else:
        (tmp_path / place).unlink(missing_ok=True)
        (tmp_path / place).mkdir()
        (tmp_path / place / "run.toml").touch()
    with container(tmp_path / "invite" / "invite", role, script=script) as process:
        _, said = process.communicate(timeout=LAST_RESORT_S)
    expected = place == "invite/invite" if given == NOTHING else given != kind
    assert (f"{setting}" in said) is expected, said
    assert process.returncode == (Exit.CONFIG if expected else Exit.OK)


def test_an_invite_that_cannot_be_read_is_no_reason_to_wait(tmp_path: Path) -> None:
    invite = tmp_path / "invite"
    invite.mkdir()  # even root cannot read its first line
    with container(invite, "node") as process:
        _, said = process.communicate(timeout=LAST_RESORT_S)
    assert f"noloco-node: user {os.getuid()} cannot read the invite: error reading '{invite}': Is a directory" in said
    assert process.returncode == Exit.CONFIG
