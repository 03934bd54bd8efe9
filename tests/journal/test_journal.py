"""The journal: flat lines, bounded files, torn lines and full disks that hurt nobody."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from user_errors import user_error

from gossip.interface import OuterStepTaken, RoundSkipped
from noloco_node.errors import Exit
from noloco_node.journal import reader
from noloco_node.journal.events import (
    Continued,
    Finished,
    Hops,
    InnerStep,
    Noticed,
    Started,
    StateChanged,
    decode,
    fields_of,
)
from noloco_node.journal.reader import LONGEST_LINE_BYTES, Tail, read
from noloco_node.journal.writer import TAKEN_S, Journal, rotated
from noloco_node.machine.interface import Reporter
from noloco_node.network.wire import is_usable
from noloco_node.run.peer_state import LONGEST_DETAIL, PeerState, Wait, WaitCause


def step(number: int, loss: float | None = 2.5) -> InnerStep:
    return InnerStep(step=number, progress=number / 100, loss=loss, tokens=4096, seconds=0.5, learning_rate=1e-3)


def steps(path: Path) -> list[int]:
    return [event.step for event in read(path) if isinstance(event, InnerStep)]


def test_a_path_that_is_no_text_is_noticed_all_the_same(tmp_path: Path) -> None:
    path, told = tmp_path / os.fsdecode(b"\xff") / "journal.jsonl", list[str]()
    path.parent.mkdir()
    with Journal(path, tell=told.append) as journal:
        reporter = Reporter(record=journal.write, say=told.append)
        reporter.notice("evaluation", f"the weights are not kept: {path}")
        with patch.object(os, "write", lambda *_: 0):
            journal.write(step(1))
    noticed = [event for event in read(path) if isinstance(event, Noticed)]
    assert [each.what for each in noticed] == ["evaluation", "journal"]
    assert all(str(path) in line for line in told)


def test_a_line_is_one_flat_object_with_time_and_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, now=lambda: 1234.5) as journal:
        journal.write(step(1))
        journal.write(StateChanged(state=PeerState.CATCHING_UP, waiting=Wait(WaitCause.STATE, 2.5)))
        journal.write(Hops(counts={"Qm1": 3}))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "event": "inner_step",
        "at": 1234.5,
        "step": 1,
        "progress": 0.01,
        "loss": 2.5,
        "tokens": 4096,
        "seconds": 0.5,
        "learning_rate": 1e-3,
        "device_s": 0.0,
        "stale": 0,
    }
    waiting = {"cause": "state", "seconds": 2.5, "detail": ""}
    assert lines[1] == {"event": "state", "at": 1234.5, "state": "catching up", "waiting": waiting}
    assert [line["event"] for line in lines] == ["inner_step", "state", "hops"]


def test_what_a_node_waited_for_in_an_older_journal_is_a_wait_in_words() -> None:
    text = "room at the next stage: " + "x" * 1000
    line = json.dumps({"event": "state", "at": 7.5, "state": "training", "waiting": text}).encode()
    wait = Wait(WaitCause.OTHER, detail=text[:LONGEST_DETAIL])
    assert decode(line) == StateChanged(at=7.5, state=PeerState.TRAINING, waiting=wait)
    assert decode(line.replace(b"training", b"bored")) is None
    assert decode(line.replace(b'"state": "', b'"state": 1, "x": "')) is None


@given(
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False).filter(is_usable),
    partner=st.none() | st.text(max_size=60),
    numbers=st.integers(0, 2**53),
)
def test_events_come_back_as_they_were_written(loss: float | None, partner: str | None, numbers: int) -> None:
    event = OuterStepTaken(
        round=numbers, partner=partner, gap=loss, staleness=3, bytes_sent=numbers, bytes_received=1, seconds=0.25
    )
    assert decode(msgspec.json.encode(fields_of(event))) == event


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.write(step(1))
        journal.write(step(2))
    path.write_bytes(path.read_bytes()[:-10])
    assert steps(path) == [1]
    with Journal(path) as journal:
        journal.write(step(3))
    assert steps(path) == [1, 3]


def test_lines_of_another_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.write(step(1))
        path.write_bytes(path.read_bytes() + b'{"event":"eclipse","at":1}\nnot json\n\xff\xfe\n[]\n')
        journal.write(step(2))
    assert steps(path) == [1, 2]


def test_rotation_bounds_the_disk_and_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, max_bytes=2000) as journal:
        for number in range(100):
            journal.write(step(number))
    assert path.stat().st_size <= 2000
    assert rotated(path) == tmp_path / "journal.1.jsonl"
    assert rotated(path).stat().st_size <= 2000
    kept = steps(path)
    assert kept == list(range(kept[0], 100))
    assert len(kept) > 10


def test_each_file_says_which_session_goes_on_in_it(tmp_path: Path) -> None:
    path, times = tmp_path / "journal.jsonl", iter(map(float, range(10**6)))
    begun = [Started(peer="p", stage=stage, run="r", version="1", pid=9) for stage in (1, 2)]
    ended = Finished(why="w", step=0, round=0, progress=0.0)
    with Journal(path, max_bytes=3000, now=times.__next__) as journal:
        for session in ([*begun[:1], *map(step, range(40)), begun[1], *map(step, range(40))], [ended]):
            for event in session:
                journal.write(event)
            assert path.stat().st_size <= 3000
            first = next(read(path))
            assert first == Continued(**msgspec.structs.asdict(begun[1]) | {"at": first.at})
        for number in range(40):
            journal.write(step(number))
    assert not any(isinstance(event, Started) for event in read(path))


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 2.0 * TAKEN_S)), max_size=40))
def test_a_loss_is_told_when_it_begins_and_counted_when_it_ends(story: list[tuple[bool, float]]) -> None:
    """Each line: whether the disk takes it, whole or in part, and how long after the one before it comes."""
    told, lost, now_s, takes = list[str](), 0, [1e9], True
    real, ends, begins, since = os.write, list[int](), 0, -1e9

    def write(file: int, data: bytes) -> int:
        return real(file, data if takes else data[:5])

    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        path = Path(directory) / "journal.jsonl"
        with Journal(path, now=lambda: now_s[0], tell=told.append) as journal:
            patch.setattr(os, "write", write)
            for number, (takes, passed_s) in enumerate(story):
                now_s[0] += passed_s
                if lost and now_s[0] - since >= TAKEN_S:
                    if takes:
                        ends.append(lost)
                        lost = 0
                    else:
                        since = now_s[0]
                begins += not takes and not lost
                lost += not takes
                since = since if takes else now_s[0]
                journal.write(step(number))
                assert len(told) == begins + len(ends), "nothing is told twice"
            takes = True
        ends += [lost] * (lost > 0)
        kept = steps(path)
        noticed = [event.text for event in read(path) if isinstance(event, Noticed)]
    assert kept == [number for number, (taken, _) in enumerate(story) if taken]
    assert sum("loses lines (No space left on device)" in line for line in told) == begins == len(ends)
    assert noticed == [line for line in told if "were lost" in line]
    assert [int(text.partition("; ")[2].split()[0]) for text in noticed] == ends


def test_rotation_that_fails_drops_events_and_grows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with Journal(path, max_bytes=500) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            for number in range(50):
                journal.write(step(number))
        assert path.stat().st_size <= 500
        journal.write(step(99))
    assert steps(path)[-1] == 99


@given(st.lists(st.sampled_from(["write", "remove", "move", "empty", "replace"]), max_size=60))
def test_a_journal_that_its_owner_moves_or_removes_goes_on_where_it_belongs(story: list[str]) -> None:
    begun = Started(peer="p", stage=1, run="r", version="1")
    with tempfile.TemporaryDirectory() as directory:
        path, away = Path(directory) / "journal.jsonl", Path(directory) / "away.jsonl"
        with Journal(path, max_bytes=700) as journal:
            journal.write(begun)
            for number, what in enumerate(story):
                if path.exists():
                    match what:
                        case "remove":
                            path.unlink()
                        case "move":
                            path.replace(away)
                        case "empty":
                            os.truncate(path, 0)
                        case "replace":
                            away.write_bytes(b"of its owner, without an end")
                            away.replace(path)
                journal.write(step(number))
                assert steps(path)[-1] == number
                assert path.stat().st_size <= 800
            if story[-1:] == ["remove"]:
                assert any(isinstance(event, Continued) for event in read(path)), "a new file says whose it is"


@given(st.lists(st.sampled_from(["write", "copy", "look"]), max_size=60), st.booleans(), st.integers(1, 3))
def test_no_line_is_lost_or_told_twice_though_files_change_their_numbers(
    story: list[str], is_link: bool, often: int
) -> None:
    """As on some network file systems. A journal may be a link to another disk, too, until it is rotated."""
    stat, looks = os.stat, 0

    def unstable(*given: Any, **more: Any) -> os.stat_result:
        nonlocal looks
        looks += 1
        found = list(stat(*given, **more))
        found[1] += (looks // often) << 40  # the number of no other file
        return os.stat_result(found)

    seen = list[Any]()
    with tempfile.TemporaryDirectory() as directory:
        path, away = Path(directory) / "journal.jsonl", Path(directory) / "away.jsonl"
        if is_link:
            path.symlink_to(Path(directory) / "elsewhere")
        tail = Tail(path)
        with Journal(path, max_bytes=900) as journal, patch.object(os, "stat", unstable):
            journal.write(Started(peer="p", stage=1, run="r", version="1"))
            for number, what in enumerate(story):
                if what == "copy":
                    away.write_bytes(path.read_bytes())
                    away.replace(path)
                elif what == "look":
                    seen += tail.poll()
                journal.write(step(number))
                assert steps(path)[-1] == number
                assert path.stat().st_size <= 900
            known = steps(path)
            begun = [event for event in read(path) if isinstance(event, Started | Continued)]
            seen += [event for _ in range(4) for event in tail.poll()]
        tail.close()
    assert known == list(range(known[0], len(story))) if story else not known
    assert len(begun) <= 2, "one in each file"
    told = [event.step for event in seen if isinstance(event, InnerStep)]
    assert told == sorted(set(told))
    assert told[-1:] == known[-1:]


def test_a_journal_goes_with_its_directory(tmp_path: Path) -> None:
    path, told = tmp_path / "home" / "journal.jsonl", list[str]()
    path.parent.mkdir()
    with Journal(path, tell=told.append) as journal:
        journal.write(step(1))
        path.parent.rename(tmp_path / "moved")
        journal.write(step(2))
        path.parent.mkdir()
        journal.write(step(3))
    assert (steps(tmp_path / "moved" / path.name), steps(path), told) == ([1, 2], [3], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's part")
def test_a_journal_that_cannot_be_read_back_says_so(tmp_path: Path) -> None:
    """Its last line may be torn, and nobody can tell."""
    path = tmp_path / "journal.jsonl"
    path.touch(0o200)
    for each in (path, tmp_path):
        os.chown(each, 65534, 65534)
    for each in tmp_path.parents[:2]:
        each.chmod(0o755)
    os.seteuid(65534)
    try:
        with user_error(Exit.STORAGE):
            Journal(path)
    finally:
        os.seteuid(0)


@given(
    before=st.lists(st.sampled_from([(b"[", 200_000), (b"\0", 3_000_000), (b"{", 9), (b"9", 9000)]), max_size=3),
    ends=st.sampled_from([b"\n", b""]),
)
def test_whatever_stands_in_a_journal_is_passed_over(before: list[tuple[bytes, int]], ends: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        path, sizes = Path(directory) / "journal.jsonl", list[int]()
        patch.setattr(reader, "decode", lambda line: (sizes.append(len(line)), decode(line))[1])
        path.write_bytes(b"".join(b'{"event":"inner_step","x":' + what * often + ends for what, often in before))
        with Journal(path) as journal:
            journal.write(step(7))
        assert steps(path) == [7]
        assert max(sizes) <= LONGEST_LINE_BYTES


def test_a_closed_journal_takes_nothing_and_raises_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.close()
    journal.close()
    journal.write(step(1))
    assert steps(tmp_path / "journal.jsonl") == []


def test_a_journal_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with user_error(Exit.STORAGE):
        Journal(tmp_path / "absent" / "journal.jsonl")


def test_a_missing_journal_has_no_events(tmp_path: Path) -> None:
    assert list(read(tmp_path / "journal.jsonl")) == []


@pytest.mark.parametrize("chance", range(6))
def test_a_rotation_while_a_journal_is_read_hides_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chance: int
) -> None:
    """It may come before one of the files is opened, or between two lines."""
    path, opened, chances = tmp_path / "journal.jsonl", Path.open, iter(range(100))
    with Journal(path) as journal:
        for number in range(4):
            journal.write(step(number))
            if number == 1:
                journal._rotate()

        def may_rotate() -> None:
            if next(chances) == chance:
                journal._rotate()
                journal.write(step(4))

        def open_then(self: Path, mode: str) -> Any:
            may_rotate()
            return opened(self, mode)

        monkeypatch.setattr(Path, "open", open_then)
        seen = []
        for event in read(path):
            assert isinstance(event, InnerStep)
            seen.append(event.step)
            may_rotate()
    # Of a half that went before it was opened nothing is left.
    assert seen in ([0, 1, 2, 3], [2, 3], [2, 3, 4])


def test_tail_sees_each_event_once_and_follows_rotation(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail, seen = Tail(path), []
    assert tail.poll() == []
    with Journal(path, max_bytes=900) as journal:
        for number in range(40):
            journal.write(step(number))
            seen += [event.step for event in tail.poll() if isinstance(event, InnerStep)]
    assert seen == list(range(40))
    assert steps(path)[0] > 0, "it was rotated more than once"
    tail.close()


def test_tail_loses_no_line_that_was_written_just_before_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read_file = tmp_path / "journal.jsonl", os.read
    with Journal(path) as journal:
        tail = Tail(path)
        journal.write(step(1))
        assert len(tail.poll()) == 1
        written: list[int] = []

        def read_then_written(file: int, size: int) -> bytes:
            chunk = read_file(file, size)
            if not written:
                written.append(2)
                journal.write(step(2))
                journal._rotate()
                journal.write(step(3))
            return chunk

        monkeypatch.setattr(os, "read", read_then_written)
        seen = [event.step for _ in range(4) for event in tail.poll() if isinstance(event, InnerStep)]
    assert seen == [2, 3]
    tail.close()


def test_tail_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    line = msgspec.json.encode(fields_of(RoundSkipped(round=2, in_a_row=1, at=5.0))) + b"\n"
    tail = Tail(path)
    path.write_bytes(line[:20])
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(line[20:])
    assert tail.poll() == [RoundSkipped(round=2, in_a_row=1, at=5.0)]
    tail.close()
