"""What a home has given, by its own journal."""

from pathlib import Path

import msgspec
import pytest
from command_line import printed, refused
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from sample_events import history, inner, started, write_journal

from gossip.interface import OuterStepTaken
from noloco_node.admission.ticket import peer_of_file
from noloco_node.errors import UserError
from noloco_node.journal import events
from noloco_node.journal.events import stamped
from noloco_node.journal.reader import read
from noloco_node.journal.writer import Journal
from noloco_node.libp2p.settings import ensure_identity
from noloco_node.observe.journal_observer import change_text
from noloco_node.observe.journal_reports import report
from noloco_node.observe.peer_history import LONGEST_PAUSE_S, ledger_of
from noloco_node.swarm.roster import Given

DAY_S = 86400.0


def session(at: float, run: str, stage: int, sent: int) -> list[events.Event]:
    """Fifty steps of two seconds each."""
    steps = [inner(step, at + 2 * step, tokens=10, seconds=2.0, device_s=0.5) for step in range(1, 51)]
    return [
        started(f"peer{stage}", stage, at, run=run),
        *steps,
        OuterStepTaken(at=at + 100, round=1, partner="p", seconds=1.0),
        OuterStepTaken(at=at + 100, round=2, seconds=1.0),
        events.Traffic(at=at + 100, sent={"microbatch": sent, "gossip": 1}, received={"microbatch": 5}),
    ]


def test_lives_are_added_up_and_time_away_is_not() -> None:
    ledger = ledger_of([*session(0, "a", 0, 99), *session(DAY_S, "a", 1, 9), *session(2 * DAY_S, "b", 1, 9)])
    first, second = ledger.by_run.values()
    assert (first.run, first.stages, first.peers) == ("a", [0, 1], ["peer0", "peer1"])
    assert (first.tokens, first.inner_steps, first.rounds) == (1000, 100, 2)
    assert first.there_s == pytest.approx(200.0)
    assert first.device_s == pytest.approx(50.0)
    assert (first.sent_bytes, first.received_bytes) == (110, 10)
    assert (second.run, second.tokens, second.there_s) == ("b", 500, pytest.approx(100.0))
    assert ledger.given("a") == Given(1000, 200, 110, 10)
    assert ledger.given("c") is None
    assert ledger.now is second


@given(cut=st.integers(1, 50), stage=st.integers(0, 1))
def test_a_journal_that_goes_on_in_a_new_file_begins_nothing_and_knows_its_run(cut: int, stage: int) -> None:
    lived = session(1e9, "a", stage, 99)
    again = events.Continued(**structs.asdict(started(f"peer{stage}", stage, lived[cut].at, run="a")))
    (whole,) = ledger_of(lived).by_run.values()
    assert list(ledger_of([*lived[:cut], again, *lived[cut:]]).by_run.values()) == [whole]
    (rest,) = ledger_of([again, *lived[cut:]]).by_run.values()
    assert (rest.run, rest.stages, rest.sent_bytes) == ("a", [stage], whole.sent_bytes)
    assert rest.tokens == 10 * (51 - cut)
    one, other = history("n", 0, lived), history("n", 0, [*lived[:cut], again, *lived[cut:]])
    assert (one.loss, one.steps, one.session_steps, one.stage) == (other.loss, other.steps, other.session_steps, stage)
    assert one.tokens_per_s(1e9 + 100) == other.tokens_per_s(1e9 + 100)
    assert history("n", 0, [again, *lived[cut:]]).stage == stage
    assert change_text(again) is None


@given(cut=st.integers(1, 50), set_by=st.floats(-400 * DAY_S, 400 * DAY_S), back=st.integers(0, 50))
def test_a_clock_that_is_set_costs_no_more_than_the_line_at_which_it_is(cut: int, set_by: float, back: int) -> None:
    lived = session(1e9, "a", 0, 99)
    moved = [stamped(each, each.at + set_by * (cut <= place <= cut + back)) for place, each in enumerate(lived)]
    (given_of_it,) = ledger_of(moved).by_run.values()
    assert 96.0 <= given_of_it.there_s <= 100.0 + 2 * LONGEST_PAUSE_S
    assert given_of_it.first_at <= given_of_it.last_at


def test_a_life_counts_from_zero_however_short_the_one_before_was() -> None:
    """Also where its first totals are larger than the last ones before it; a move to another stage begins nothing."""

    def begun(at: float, pid: int, sent: int, joules: float) -> list[events.Event]:
        return [
            started("p", 0, at, run="a", pid=pid),
            events.Traffic(at=at, sent={"microbatch": sent}, received={"gossip": sent}),
            events.Energy(at=at, joules=joules),
        ]

    moved = events.Moved(at=2.0, origin=0, target=1, why="w")
    again = [*begun(0.0, 1, 10, 100.0), *begun(1.0, 2, 50, 150.0), moved, *begun(3.0, 2, 70, 160.0)]
    found = ledger_of([*again, *begun(4.0, 2, 90, 170.0)]).by_run["a"]  # the next session of the same process
    assert (found.sent_bytes, found.received_bytes, found.joules) == (10 + 70 + 90, 10 + 70 + 90, 100.0 + 170.0)


@pytest.mark.parametrize("ends", [[], [events.Finished(why="asked to leave", step=1, round=1, progress=0.1)]])
def test_a_move_that_never_arrives_takes_nothing_from_the_next_life(ends: list[events.Event]) -> None:
    """Killed or asked to leave on the way. A negative total in our record would make every reader refuse it."""
    moved = events.Moved(at=101.0, origin=0, target=1, why="w")
    for run in ("a", "b"):
        begun, *again = session(DAY_S, run, 1, 200)
        begun = msgspec.structs.replace(begun, pid=0 if ends else 2)
        found = ledger_of([*session(0, "a", 0, 99), moved, *ends, begun, *again])
        sent = [each.sent_bytes for each in found.by_run.values()]
        assert sent == ([100 + 201] if run == "a" else [100, 201])
    short = ledger_of([*session(0, "a", 0, 99), moved, *session(DAY_S, "b", 1, 9)])  # as in a container: one pid
    assert [each.sent_bytes for each in short.by_run.values()] == [100, 10]


def test_energy_is_added_up_over_lives_and_receipts_are_not() -> None:
    def told(joules: float, own: int) -> list[events.Event]:
        return [events.Energy(at=1.0, joules=joules), events.Receipts(at=1.0, claimed={}, signed={}, own=own)]

    begun = started("p", 0, 0.0, run="a")
    found = ledger_of([begun, *told(7200.0, 30), *told(10800.0, 50), begun, *told(3600.0, 40)]).by_run["a"]
    assert (found.joules, found.signed_tokens) == (14400.0, 50)
    assert found.given().joules == 14400


def test_me_tells_what_the_journal_of_a_home_says(tmp_path: Path) -> None:
    taken = session(1e9, "0123456789abcdef", 0, 99)
    taken += [events.Energy(at=1e9 + 100, joules=7200.0), events.Receipts(at=1e9 + 100, claimed={}, signed={}, own=400)]
    write_journal(tmp_path, taken)
    said = printed("me", "--home", tmp_path)
    assert "run 0123456789ab, " in said
    assert "500 in 50 inner steps, 1 meetings" in said
    assert "of CPU or GPU time" in said
    assert "receipts for at least 400 tokens that were drawn here" in said
    assert "2 Wh, as the device tells" in said
    raw = printed("me", "--home", tmp_path, "--json")
    assert msgspec.json.decode(raw)["sent_bytes"] == 100
    assert refused("me", "--home", tmp_path / "none")


@pytest.mark.parametrize("rotations", [0, 1, 2, 3])
def test_me_says_since_when_a_journal_tells_whose_oldest_events_are_gone(tmp_path: Path, rotations: int) -> None:
    """Of a journal there are two files at most."""
    path = tmp_path / "journal.jsonl"
    with Journal(path, max_bytes=2048) as journal:
        journal.write(started("p", 0, 0.0, run="a"))
        for _ in range(rotations):
            file = path.stat().st_ino
            while path.stat().st_ino == file:
                journal.write(inner(1, 0.0))
    said, kept = report(tmp_path, as_json=False), ledger_of(read(path)).by_run["a"]
    assert said.splitlines()[-1].startswith("since ") is (rotations > 1)
    assert f"in {kept.inner_steps} inner steps" in said
    assert msgspec.json.decode(report(tmp_path, as_json=True))["inner_steps"] == kept.inner_steps


def test_me_says_who_one_is_also_before_anything_was_given(tmp_path: Path) -> None:
    ensure_identity(tmp_path / "identity.key")
    peer = peer_of_file(tmp_path / "identity.key")
    with pytest.raises(UserError, match="nothing yet") as caught:
        report(tmp_path, as_json=False)
    assert f"you are {peer}" in caught.value.why
    write_journal(tmp_path, session(0, "a", 0, 9))
    assert report(tmp_path, as_json=False).splitlines()[0] == f"you are {peer}"
