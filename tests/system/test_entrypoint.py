"""What a container does while it waits for its invite: the entry point of the image, with no engine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from limits import LAST_RESORT_S
from repository import ROOT

from noloco_node.errors import Exit


@contextmanager
def node(invite: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a container's node, whose program only shows what it is given."""
    program = invite.parent / "noloco-node"
    program.write_text('#!/bin/sh\necho "$@"\ncat\n')
    program.chmod(0o755)
    environment = {"PATH": f"{invite.parent}:{os.environ['PATH']}", "INVITE_FILE": str(invite)}
    words = ("sh", str(ROOT / "docker" / "entrypoint.sh"), "node", "--stay")
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def waiting(invite: Path) -> Iterator[subprocess.Popen[str]]:
    with node(invite) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"waiting for the invite in {invite}\n"
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_container_that_waits_for_its_invite_heeds_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with waiting(tmp_path / "invite") as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=LAST_RESORT_S)
    assert (process.returncode, said) == (Exit.INTERRUPTED, "noloco-node: interrupted\n")


def test_an_invite_reaches_the_node_as_soon_as_it_is_there_and_shows_in_no_list_of_processes(tmp_path: Path) -> None:
    invite = tmp_path / "invite"
    with waiting(invite) as process:
        invite.touch()  # as the bootstrap peer makes it, before it has something to say
        (tmp_path / "whole").write_text("noloco6:secret\nwhat stands below\n")
        (tmp_path / "whole").replace(invite)
        shown, _ = process.communicate(timeout=LAST_RESORT_S)
    assert shown == "join - --home /home/noloco/home --stay\nnoloco6:secret\n"
    assert process.returncode == Exit.OK


def test_an_invite_that_cannot_be_read_is_no_reason_to_wait(tmp_path: Path) -> None:
    invite = tmp_path / "invite"
    invite.mkdir()  # even root cannot read its first line
    with node(invite) as process:
        _, said = process.communicate(timeout=LAST_RESORT_S)
    assert f"noloco-node: {invite} cannot be read by user {os.getuid()}." in said
    assert process.returncode == Exit.CONFIG
