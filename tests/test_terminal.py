"""Lines to a person: one a fact, whole in a file, and readable on a narrow terminal."""

from __future__ import annotations

import io
import sys

import pytest

from noloco_node.terminal import say

INVITE = "noloco1:" + "0" * 64 + "@/ip4/192.0.2.1/tcp/4001"
TEXT = "step 10, round 3, progress 1.4%, loss 3.651, waiting for a replica of the next stage to appear"


class Terminal(io.StringIO):
    """A terminal that notes what is printed."""

    def isatty(self) -> bool:
        return True


def test_a_long_line_goes_on_below_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    say(TEXT)
    say(INVITE)
    first, second, *invite = terminal.getvalue().splitlines()
    assert max(map(len, (first, second))) <= 80
    assert second.startswith(" " * 10)
    assert f"{first[10:]} {second.strip()}" == TEXT
    assert INVITE in " ".join(invite), "in one piece"
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    say(TEXT)
    assert file.getvalue().splitlines()[0].endswith(TEXT)
