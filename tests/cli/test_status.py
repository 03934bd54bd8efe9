"""What `status` prints fits a terminal of eighty columns, and marks who may be dead."""

from __future__ import annotations

import msgspec
import pytest
from memory_swarms import recipe

from noloco_node.cli.status import picture
from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.roster import PeerRecord, Roster

WORDS = "a replica of the next stage to appear in the roster, " * 4


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def record(peer: str) -> PeerRecord:
    return PeerRecord(
        peer=f"12D3KooW{peer}",
        stage=0,
        state=PeerState.CATCHING_UP,
        inner_steps=123_456,
        round=12_345,
        progress=1.0,
        loss=10.123,
        gap=0.1234,
        tokens_per_s=123_456.0,
        device_s=12.3,
        waiting=WORDS,
        budget="upload 10 Mbit/s of 20 Mbit/s, " * 4,
    )


def test_everything_is_shown_within_eighty_columns() -> None:
    shown = picture(recipe(), Roster(stages=((record("abcdefgh"),), ())), {"12D3KooWabcdefgh": 17.3})
    assert max(map(len, shown.splitlines())) <= 80
    (row,) = (line for line in shown.splitlines() if "catching up" in line)
    assert all(figure in row for figure in ("123456", "12345", "100.0%", "10.123", "0.1234", "123,456", "12300"))
    joined = " ".join(shown.split())
    assert WORDS.split(",")[0] in joined
    assert "nobody" in shown


def test_who_is_late_with_its_news_is_marked() -> None:
    roster = Roster(stages=((record("abcdefgh"), record("ijklmnop")), ()))
    assert "No news" not in picture(recipe(), roster)
    shown = picture(recipe(), roster, {"12D3KooWijklmnop": 17.3})
    assert "No news:\n ijklmnop for 17 s: it may be dead" in shown


def test_what_a_stranger_waits_for_is_neither_markup_nor_signs_of_a_terminal() -> None:
    waits = "room at the next stage[/x]\x1b[2J"
    idle = msgspec.structs.replace(record("abcdefgh"), state=PeerState.TRAINING, tokens_per_s=0.0, waiting=waits)
    roster = Roster(stages=((idle,), (msgspec.structs.replace(idle, peer="12D3KooWijklmnop", stage=1),)))
    shown = " ".join(picture(recipe(), roster).split())
    assert "Nothing is trained: stage 0 waits for room at the next stage[/x] [2J." in shown
