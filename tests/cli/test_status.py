"""What `status` prints fits a terminal of eighty columns, and marks who may be dead."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from admission_keys import NOW_S, key, public
from hypothesis import given
from hypothesis import strategies as st
from memory_swarms import recipe

from noloco_node.admission.owner_files import make_key, public_half, save_key
from noloco_node.admission.ticket import MEMBER, InviteCredential, Right, grant, peer_of
from noloco_node.cli import status
from noloco_node.cli.status import picture
from noloco_node.run.peer_state import PeerState, Wait, WaitCause
from noloco_node.swarm import invite as invites
from noloco_node.swarm.access import Visitor
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_distribution import RunFileText
from noloco_node.units import LARGEST, LARGEST_COUNT

FIGURES = st.fixed_dictionaries(
    {},
    optional={
        "inner_steps": st.integers(0, LARGEST_COUNT),
        "round": st.integers(0, LARGEST_COUNT),
        "loss": st.floats(0.0, LARGEST),
        "gap": st.floats(0.0, LARGEST),
        "tokens_per_s": st.floats(0.0, LARGEST),
        "device_s": st.floats(0.0, 1e9),
    },
)
WORDS = "all its replicas were lost, or are on trial, " * 4


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
        waiting=(Wait(WaitCause.ANSWER, 12.3, WORDS),),
        budget="upload 10 Mbit/s of 20 Mbit/s, " * 4,
    )


def test_a_narrow_terminal_shows_fewer_figures_and_folds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = picture(recipe(), Roster(stages=((record("abcdefgh"),), ())), {"12D3KooWabcdefgh": 17.3})
    assert max(map(len, shown.splitlines())) <= 60
    (row,) = (line for line in shown.splitlines() if "catching up" in line)
    assert all(figure in row for figure in ("abcdefgh", "123456", "12345", "10.123", "123,456"))
    assert "device time" not in shown


@pytest.mark.parametrize("width", range(40, 60))
def test_a_very_narrow_terminal_shows_whole_ids_and_speeds(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = picture(recipe(), Roster(stages=((record("abcdefgh"),), ())))
    assert max(map(len, shown.splitlines())) <= width
    (row,) = (line for line in shown.splitlines() if "catching up" in line)
    assert "abcdefgh" in row
    assert "123,456" in row


def test_everything_is_shown_within_eighty_columns() -> None:
    shown = picture(recipe(), Roster(stages=((record("abcdefgh"),), ())), {"12D3KooWabcdefgh": 17.3})
    assert max(map(len, shown.splitlines())) <= 80
    (row,) = (line for line in shown.splitlines() if "catching up" in line)
    assert all(figure in row for figure in ("123456", "12345", "100.0%", "10.123", "0.1234", "123,456", "12300"))
    joined = " ".join(shown.split())
    assert f"an answer of the next stage: {WORDS.split(',')[0]}" in joined
    assert "nobody" in shown


@given(st.integers(40, 120), st.lists(FIGURES, min_size=1, max_size=6))
def test_figures_of_thirty_digits_break_no_line(width: int, figures: list[dict[str, float]]) -> None:
    """A stranger may claim them; all others are still to be read."""
    run, peers = recipe(), [f"{number:08}" for number in range(len(figures) + 1)]
    claimed = [msgspec.structs.replace(record(peer), **each) for peer, each in zip(peers, figures, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        shown = picture(run, Roster(stages=((*claimed, record(peers[-1])), ()))).splitlines()
    assert max(map(len, shown)) <= width
    (table,) = [shown[place + 2 :] for place, line in enumerate(shown) if line.startswith(" stage peer")]
    rows = [line.split()[:3] for line in table[: len(peers)]]
    assert rows == [["0", peer, "catching"] for peer in peers]


def test_where_nobody_is_the_run_is_not_said_to_be_at_its_beginning() -> None:
    """Its peers may all have left at the end."""
    for roster in (Roster(stages=((), ())), Roster(stages=((record("abcdefgh"),), ()))):
        assert ("of the token budget" in picture(recipe(), roster)) == any(roster.stages)


def test_who_is_late_with_its_news_is_marked() -> None:
    roster = Roster(stages=((record("abcdefgh"), record("ijklmnop")), ()))
    assert "No news" not in picture(recipe(), roster)
    shown = picture(recipe(), roster, {"12D3KooWijklmnop": 17.3})
    assert "No news:\n ijklmnop for 17 s: it may be dead" in shown


def test_what_a_stranger_waits_for_is_neither_markup_nor_signs_of_a_terminal() -> None:
    waits = (Wait(WaitCause.ROOM, 9.0, "[/x]\x1b[2J:smile:"),)
    idle = msgspec.structs.replace(record("abcdefgh"), state=PeerState.TRAINING, tokens_per_s=0.0, waiting=waits)
    roster = Roster(stages=((idle,), (msgspec.structs.replace(idle, peer="12D3KooWijklmnop", stage=1),)))
    shown = " ".join(picture(recipe(), roster).split())
    assert "Nothing is trained: stage 0 waits for room at the next stage." in shown
    assert "room at the next stage: [/x] [2J:smile:, for 9 s" in shown


@pytest.mark.parametrize("as_json", [True, False])
def test_the_seed_of_an_invitation_is_not_printed(monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> None:
    run = recipe()
    link = grant(key(0), run.digest, MEMBER | Right.ONCE, NOW_S, public(8))
    credential = InviteCredential((link,), (8).to_bytes(32))
    given = invites.format(run.digest, [f"/ip4/192.0.2.1/tcp/4001/p2p/{peer_of(public(1))}"], credential)
    there = SimpleNamespace(roster=Roster(stages=((), ())), news_age_s={})

    @asynccontextmanager
    async def visited(*_: object) -> AsyncIterator[object]:
        yield None, run, there

    monkeypatch.setattr(status, "visited", visited)
    shown = asyncio.run(status.look(given, as_json=as_json, visitor=Visitor()))
    assert "/ip4/192.0.2.1/tcp/4001/p2p/" in shown
    assert str(credential) not in shown


def test_only_the_owner_of_the_run_is_known_by_the_key_beside_its_run_file(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    owner = make_key(run)
    run.write_text(
        '[model]\narchitecture = "llama"\nsizes = {hidden_size = 8, num_hidden_layers = 4}\n'
        f'[admission]\nowner = "{public_half(owner)}"\nrule = "listed"\n'
    )
    visitor, digest = Visitor(run=run), RunFileText(run.read_text(), "the owner's").digest
    assert visitor.owner_key(digest) is None
    save_key(run, owner)
    found = visitor.owner_key(digest)
    assert found.private_bytes_raw() == owner.private_bytes_raw()
    assert visitor.owner_key("0" * 64) is None
    assert Visitor(run=tmp_path / "none.toml").owner_key(digest) is None


def test_as_json_a_record_has_its_fields_by_name() -> None:
    roster = Roster(stages=((record("abcdefgh"),), ()))
    ((found,), none) = msgspec.json.decode(msgspec.json.encode(status.summary(recipe(), roster, "an invite")))["stages"]
    assert (found["peer"], found["state"], found["inner_steps"]) == ("12D3KooWabcdefgh", "catching up", 123_456)
    assert none == []
