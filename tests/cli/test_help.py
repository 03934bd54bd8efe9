"""What `--help` prints on a terminal of 80 columns."""

from itertools import pairwise

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from noloco_node.cli.main import app

COMMANDS = ["", *get_command(app).commands, "journal export"]  # type: ignore[attr-defined] (it is a group)


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_cut_off_and_no_paragraph_broken_twice(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # rich would take the width from a terminal that the tests may run on.
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    said = CliRunner().invoke(app, [*command.split(), "--help"]).output
    assert "Usage:" in said
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    for paragraph in said.partition("╭")[0].split("\n \n"):
        for line, following in pairwise(map(str.split, paragraph.splitlines())):
            # Wider than the terminal in the source, a line would leave a stump of itself.
            assert not following or len(" ".join(line)) + len(following[0]) > 70 or not line, line
