"""How much of a run is done: what one source's record adds, who is believed, and the roster that is made of it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.run.peer_state import PeerState
from noloco_node.swarm.membership import roster_of
from noloco_node.swarm.receipts import SOURCE_LIFETIME_S, RunProgress, SourceCount, SourceRecord, counted
from noloco_node.swarm.roster import PeerRecord, Roster
from noloco_node.swarm.run_samples import run_over
from noloco_node.swarm.stage_records import CLOCK_ERROR_S
from noloco_node.units import LARGEST_COUNT

FORGOTTEN_S = 2 * (SOURCE_LIFETIME_S + CLOCK_ERROR_S)


def record(peer: str, stage: int = 0, **facts: Any) -> PeerRecord:
    return PeerRecord(peer=peer, stage=stage, **({"state": PeerState.TRAINING} | facts))


def source(samples: int, finished: bool = False, first: int = 0) -> SourceCount:
    return SourceCount(SourceRecord(samples, finished), 0.0, first)


def raw(samples: int, finished: bool = False) -> bytes:
    return msgspec.msgpack.encode(SourceRecord(samples, finished))


def test_an_old_copy_of_a_record_takes_nothing_back_and_adds_nothing() -> None:
    known = counted(None, SourceRecord(100, False), 0.0)
    for samples, finished in ((90, False), (0, True), (100, False)):
        known = counted(known, SourceRecord(samples, finished), known.found_s + SOURCE_LIFETIME_S)
        assert (known.samples, known.first) == (100, 100)
    assert known.said == SourceRecord(100, True), "nor does it take back the end of its part"


def test_who_has_lost_count_is_counted_on_from_where_it_begins_anew() -> None:
    known = counted(counted(None, SourceRecord(40, False), 0.0), SourceRecord(100, False), 5.0)
    for samples, in_all in ((30, 100), (31, 101), (30, 101), (50, 120)):
        known = counted(known, SourceRecord(samples, False), FORGOTTEN_S)
        assert (known.samples, known.first) == (in_all, 40)


@given(st.lists(st.tuples(st.integers(0, LARGEST_COUNT), st.sampled_from([1.0, FORGOTTEN_S])), min_size=1))
def test_a_liar_lowers_nothing_and_stays_within_what_one_source_may_say(said: list[tuple[int, float]]) -> None:
    known, now_s = None, 0.0
    for samples, pause_s in said:
        before, now_s = known, now_s + pause_s
        known = counted(known, SourceRecord(samples, False), now_s)
        assert (before.samples if before else 0) <= known.samples <= LARGEST_COUNT


def test_only_who_was_seen_at_work_or_came_before_us_is_believed() -> None:
    progress = RunProgress("me")
    progress.take({"early": raw(5)}, 0.0)
    found = {"early": raw(6), "stranger": raw(2**50, True), "worker": raw(7), "garbled": b"\xc1"}
    known = [record("worker"), record("stranger", state=PeerState.CATCHING_UP, samples=2**50)]
    progress.see(known, known, 1.0)
    progress.take(found, 1.0)
    assert {peer: each.samples for peer, each in progress.sources.items()} == {"early": 6, "worker": 7}


def test_only_samples_of_stage_0_make_us_a_source() -> None:
    progress = RunProgress("me")
    progress.note_own(record("me", 1, samples=5), 0.0)
    progress.note_own(record("me", 0), 0.0)
    assert not progress.sources
    progress.note_own(record("me", 0, samples=5, state=PeerState.FINISHED), 0.0)
    assert progress.sources["me"].said == SourceRecord(5, True)


def make(believed: list[list[PeerRecord]], own: PeerRecord | None = None, **sources: SourceCount) -> Roster:
    return roster_of("me", own, [{each.peer: each for each in stage} for stage in believed], sources, 3.0, None)


def test_a_roster_holds_the_present_by_name_and_ourselves_as_we_say() -> None:
    said = [[record("b"), record("me", round=1), record("a")], [record("c", 1, state=PeerState.LEAVING)]]
    roster = make(said, record("me", round=2))
    assert [[(each.peer, each.round) for each in stage] for stage in roster.stages] == [
        [("a", 0), ("b", 0), ("me", 2)],
        [],
    ]
    assert [each.peer for each in make(said).stage(0)] == ["a", "b"], "we are there only where we say so"


@pytest.mark.parametrize(
    ("state", "finished", "counts"),
    [
        (PeerState.TRAINING, False, (1, 0)),
        (PeerState.TRAINING, True, (1, 1)),
        (PeerState.CATCHING_UP, False, (0, 0)),
        (PeerState.LEAVING, False, (0, 0)),
        (PeerState.FINISHED, True, (1, 1)),
    ],
)
def test_a_source_is_at_work_or_finished(state: PeerState, finished: bool, counts: tuple[int, int]) -> None:
    roster = make([[record("a", state=state)]], a=source(8, finished, first=3))
    assert (roster.sources, roster.sources_finished) == counts
    assert (roster.run_samples, roster.own_samples, roster.first_samples) == (8, 0, 3)


def test_our_own_samples_are_not_those_of_others() -> None:
    roster = make([[]], a=source(8, first=3), me=source(5, first=4))
    assert (roster.run_samples, roster.own_samples, roster.others_samples, roster.first_samples) == (13, 5, 8, 3)


def test_a_run_is_over_when_most_sources_say_so_and_never_by_silence() -> None:
    assert [run_over(4, finished) for finished in range(5)] == [False, False, False, True, True]
    assert not run_over(0, 0)
    assert run_over(1, 1)
