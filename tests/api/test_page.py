"""The programs on docs/python.md run as they stand there."""

import os
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from process_swarm import host
from processes import Commands

import noloco_node

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def programs() -> list[str]:
    return [dedent(block) for block in re.findall(r"(?m)(?:^ {4}.*\n(?:^\n(?= {4}))?)+", PAGE.read_text())]


@pytest.mark.network
def test_a_run_is_written_joined_watched_and_taken_home(monkeypatch: pytest.MonkeyPatch) -> None:
    written, _, member, _, swarm, _, _, _, loaded = programs()
    with Commands() as commands:
        monkeypatch.chdir(commands.directory)
        names: dict[str, Any] = {}
        exec(written.replace("steps=1000", "steps=50"), names)
        _, invite = host(commands, Path("run.toml"), "--weights", ".")
        Path("invite").write_text(invite)
        exec(member, names)
        assert names["optimizer"].finished, "the loop ended with the run"
        exec(swarm, names)
        noloco_node.export(None, "my-model", homes=["member"])
        exec(loaded, names)
        assert os.listdir("my-model")
