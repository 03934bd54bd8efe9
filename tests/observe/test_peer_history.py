"""Histories of peers, and curves of them in a terminal: bounded, and true to what they are made of."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_events import history, inner, started

from noloco_node.demo.loss_plot import over_tokens
from noloco_node.demo.summary import trained
from noloco_node.journal import events
from noloco_node.observe.journal_observer import JournalObserver
from noloco_node.observe.peer_history import PeerHistory, Point
from noloco_node.observe.roster_observer import RosterObserver
from noloco_node.observe.screen import chart, smoothed
from noloco_node.observe.swarm_view import Thinned
from noloco_node.run.peer_state import PeerState
from noloco_node.run.presets import demo_run_text
from noloco_node.run.runfile import decode_run
from noloco_node.swarm.roster import PeerRecord, Roster

RUN = decode_run(demo_run_text(stages=2, replicas=2, steps=100, seed=0), "a test's run file")


def test_who_begins_again_has_not_finished() -> None:
    begun = started("Qm0a", 1)
    ended = events.Finished(at=2.0, why="asked to leave", step=1, round=0, progress=0.1)
    assert history("0a", 0, [begun, ended]).finished == "asked to leave"
    assert history("0a", 0, [begun, ended, begun]).finished is None


def test_speed_is_measured_over_recent_steps_and_falls_when_nothing_comes() -> None:
    steady = history("0a", 0, [inner(number, 100.0 + 0.5 * number) for number in range(1, 30)])
    assert steady.tokens_per_s(now=114.6) == pytest.approx(4096 / 0.5)
    assert steady.tokens_per_s(now=130.0) < 4096
    steady.take(events.Finished(why="over", step=29, round=0, progress=1.0))
    assert steady.tokens_per_s(now=114.6) == 0


@given(set_by=st.floats(-1e8, 1e8), cut=st.integers(2, 29))
def test_a_clock_that_is_set_changes_no_speed(set_by: float, cut: int) -> None:
    steps = [inner(number, 2e8 + 0.5 * number + set_by * (number >= cut), device_s=0.2) for number in range(1, 30)]
    peer = history("0a", 0, steps)
    assert peer.tokens_per_s(now=steps[-1].at) == pytest.approx(4096 / 0.5)
    assert peer.busy_share(now=steps[-1].at) == pytest.approx(0.4)
    assert peer.tokens_per_s(now=steps[-1].at - 3600) == pytest.approx(4096 / 0.5)


def test_a_common_axis_counts_the_tokens_of_all_sources() -> None:
    first, second = history("0a", 0, [inner(1, 101.0), inner(2, 102.0)]), history("0b", 0, [inner(1, 101.5)])
    later = history("1a", 1, [inner(1, 100.75), inner(2, 101.5), inner(3, 200.0)])
    points = over_tokens(later.losses, [first, second, later])
    # 0a begins its first step at 100.5, and takes its second from 101 to 102; 0b is at its first from 101 to 101.5.
    assert [point.x for point in points] == pytest.approx([0.5 * 4096, 2.5 * 4096, 3 * 4096])


@given(stages=st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_a_token_counts_where_it_is_drawn_wherever_its_peer_moves(stages: list[int]) -> None:
    moving, partner = PeerHistory("0a", 0), PeerHistory("1a", 1)
    observer = JournalObserver("a run", [moving, partner], None)
    for number, stage in enumerate(stages):
        observer.take(moving, started("Qm0a", stage))
        for each in (moving, partner):
            observer.take(each, inner(number, 101.0 + number))
    observer.take(moving, events.Receipts(claimed={}, signed={}, own=10**6))
    drawn, view = 4096 * stages.count(0), observer.view(200.0)
    assert view.tokens == trained([moving, partner]) == view.given.drawn == drawn
    assert over_tokens(partner.losses, [moving, partner])[-1].x == drawn


@given(tokens=st.integers(0, 10**9), samples=st.integers(0, 10**6), signed=st.integers(0, 10**6))
def test_what_our_own_peer_has_drawn_is_what_its_record_claims(tokens: int, samples: int, signed: int) -> None:
    own = history("0a", 0, [started("Qm0a", 1), inner(1, 101.0, tokens=tokens)])
    own.take(events.Receipts(claimed={}, signed={}, own=RUN.tokens(signed)))
    record = PeerRecord(peer="Qm0a", stage=0, state=PeerState.TRAINING, samples=samples)
    view = RosterObserver(RUN, "r", own).view(Roster(stages=((record,), ())), 200.0)
    assert view.given.drawn == (RUN.tokens(max(samples, signed)) if signed else 0)


@given(st.integers(1, 5000))
def test_what_is_thinned_is_bounded_and_keeps_its_first_point(count: int) -> None:
    thinned = Thinned[int](limit=64)
    for number in range(count):
        thinned.add(number)
    assert len(thinned.points) < 64
    assert thinned.points[0] == 0
    gaps = {later - earlier for earlier, later in pairwise(thinned.points)}
    assert len(gaps) <= 1  # evenly thinned


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=200))
def test_smoothing_stays_within_what_it_smooths(values: list[float]) -> None:
    points = [Point(number / len(values), value) for number, value in enumerate(values)]
    smooth = smoothed(points)
    assert [point.x for point in smooth] == [point.x for point in points]
    assert min(values) - 1e-6 <= min(p.value for p in smooth) <= max(p.value for p in smooth) <= max(values) + 1e-6
    assert smooth[0] == points[0]


def test_a_falling_curve_falls_from_corner_to_corner() -> None:
    points = [Point(number / 99, 6.0 * 0.97**number) for number in range(100)]
    drawn = [line.plain for line in chart(points, width=40, height=6)]
    assert all(len(line) == 40 for line in drawn)
    assert drawn[0].startswith("  6.00 ┤")
    assert drawn[0][8] != " "
    assert drawn[-1][-1] != " "
    assert all(line[8:].count(" ") < 32 for line in drawn)
    assert [line.plain for line in chart([], width=40, height=3)] == ["", "", ""]
